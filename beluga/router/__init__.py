# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""L7: which worker a request goes to. Pure: the proxy and the simulator call the same code."""

from beluga.router import costs
from beluga.router.policy import Candidate, Choice, Policy, Query
from beluga.router.registry import POLICIES, make_policy
from beluga.router.worker import Load, Overlap, Worker

__all__ = [
    "POLICIES",
    "Candidate",
    "Choice",
    "Load",
    "Overlap",
    "Policy",
    "Query",
    "Worker",
    "costs",
    "make_policy",
]
