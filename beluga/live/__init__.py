# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A snapshot of a server's activity for ``beluga top``, the page, and programs.

It is made in the server's process on request, at most once a second, from the exporter's metrics.
"""

from beluga.live.observer import Observer
from beluga.live.snapshot import Note, Snapshot

__all__ = [
    "Note",
    "Observer",
    "Snapshot",
]
