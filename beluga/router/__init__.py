# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""L7: which worker a request goes to. Pure: the proxy and the simulator call the same code."""

from beluga.router import costs
from beluga.router.constraints import BusyThresholds, Constraints
from beluga.router.events import Cleared, Removed, RouterEvent, Stored, Tier
from beluga.router.indexer import Indexer
from beluga.router.load import LoadTracker
from beluga.router.matches import FindMatches, Matches
from beluga.router.metrics import ActiveLoad, MetricsAggregator, MetricsPublisher, WorkerMetrics
from beluga.router.min_ttft import Estimate, Estimator
from beluga.router.policy import Candidate, Choice, Policy, Query
from beluga.router.registry import POLICIES, make_policy
from beluga.router.router import Router
from beluga.router.worker import Load, Overlap, Worker

__all__ = [
    "POLICIES",
    "ActiveLoad",
    "BusyThresholds",
    "Candidate",
    "Choice",
    "Cleared",
    "Constraints",
    "Estimate",
    "Estimator",
    "FindMatches",
    "Indexer",
    "Load",
    "LoadTracker",
    "Matches",
    "MetricsAggregator",
    "MetricsPublisher",
    "Overlap",
    "Policy",
    "Query",
    "Removed",
    "Router",
    "RouterEvent",
    "Stored",
    "Tier",
    "Worker",
    "WorkerMetrics",
    "costs",
    "make_policy",
]
