# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rules of all HTTP listeners: which requests they accept, and which connection they close when
there are too many.

The gateway's listeners run on an event loop with aiohttp, a server's admin endpoint on threads with
the standard library. These rules need neither. docs/operate/listeners.md has the table of all
listeners.
"""

from beluga.listening.callers import KnownHosts, from_other_site, is_loopback
from beluga.listening.paths import plain_path
from beluga.listening.places import PATIENCE_S, ConnectionSlot, ConnectionSlots
from beluga.listening.secured import Token, read_tls, read_token
from beluga.listening.shown import shown_url

__all__ = [
    "PATIENCE_S",
    "ConnectionSlot",
    "ConnectionSlots",
    "KnownHosts",
    "Token",
    "from_other_site",
    "is_loopback",
    "plain_path",
    "read_tls",
    "read_token",
    "shown_url",
]
