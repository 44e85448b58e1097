# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A snapshot of a server's activity for ``beluga top``, the page, and programs.

It is made in the server's process on request, at most once a second, from the exporter's metrics.
"""

from beluga.live.observer import Observer
from beluga.live.snapshot import (
    CellState,
    DeviceFacts,
    LinkFacts,
    Note,
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
    "LinkFacts",
    "Note",
    "Observer",
    "ServerFacts",
    "SessionFacts",
    "SlowCall",
    "Snapshot",
    "TenantFacts",
    "TierFacts",
]
