# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A snapshot of a server's activity for ``beluga top``, the page, and programs.

It is made in the server's process on request, at most once a second, from the exporter's counters.
"""

from beluga.live.observer import Observer
from beluga.live.snapshot import (
    CellState,
    DeviceFacts,
    IndexFacts,
    LinkFacts,
    Note,
    PoolFacts,
    Rates,
    ServerFacts,
    SessionFacts,
    SlowCall,
    Snapshot,
    TenantFacts,
    TierFacts,
)

__all__ = [
    "CellState",
    "DeviceFacts",
    "IndexFacts",
    "LinkFacts",
    "Note",
    "Observer",
    "PoolFacts",
    "Rates",
    "ServerFacts",
    "SessionFacts",
    "SlowCall",
    "Snapshot",
    "TenantFacts",
    "TierFacts",
]
