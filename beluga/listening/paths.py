# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Unambiguous paths of requests."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote

_ODD = re.compile(r"//|/\.{1,2}(?:/|$)|[\\\x00-\x1f\x7f%]|;")


@lru_cache(maxsize=64)  # requests have few paths, and each is looked up twice
def plain_path(raw: str) -> str | None:
    """Return a raw path decoded and without a trailing slash, or None if servers interpret it
    differently: it has an empty or a dotted segment, a backslash, a control character, parameters
    of a segment, or is encoded twice. Example: ``/v1/%2e%2e/sleep`` is ``/sleep`` for some servers.

    A rule about paths is safe only if every server behind it parses the path in the same way.
    """
    path = unquote(raw)
    if not path.startswith("/") or "/" in unquote(raw.replace("/", "")) or _ODD.search(path):
        return None
    return path if path == "/" else path.removesuffix("/")
