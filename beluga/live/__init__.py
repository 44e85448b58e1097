# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a server does now, for people: one snapshot for ``beluga top``, the page, and programs.

It is made in the server's process when somebody asks, at most once a second, from the counters that
the exporter collects.
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
