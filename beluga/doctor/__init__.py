# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks whether this machine is fit for Beluga, from what the operating system reports.

``checks``    the list of all checks, and how they run
``hardware``, ``pool``  the checks
``machine``   their inputs (files below a root, this process, the pool), and their results

A check needs neither a pool nor a server, a privilege or an optional package.
"""

from beluga.doctor.checks import Check, diagnose
from beluga.doctor.machine import Finding, Machine, PoolLook

__all__ = [
    "Check",
    "Finding",
    "Machine",
    "PoolLook",
    "diagnose",
]
