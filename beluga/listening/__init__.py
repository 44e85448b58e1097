# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The defenses of all HTTP listeners: which requests they accept (``callers.py``), and which
connections and input (``server.py``, with aiohttp; imported where a listener starts).
docs/operate/listeners.md has the table of all listeners.
"""

from beluga.listening.callers import (
    KnownHosts,
    Token,
    from_other_site,
    is_loopback,
    plain_path,
    read_tls,
    read_token,
    shown_url,
)

__all__ = [
    "KnownHosts",
    "Token",
    "from_other_site",
    "is_loopback",
    "plain_path",
    "read_tls",
    "read_token",
    "shown_url",
]
