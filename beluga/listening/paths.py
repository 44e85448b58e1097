# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Paths of requests that mean one thing only."""

from __future__ import annotations

import re
from urllib.parse import unquote

_ODD = re.compile(r"//|/\.{1,2}(?:/|$)|[\\\x00-\x1f\x7f%]|;")


def plain_path(raw: str) -> str | None:
    """Return the path that a raw path means, decoded and without a slash at its end, or None if
    servers do not agree on that: it has an empty or a dotted segment, a backslash, a control
    character, parameters of a segment, or is encoded twice. Example: ``/v1/%2e%2e/sleep`` is
    ``/sleep`` for some.

    A rule about paths is safe only if it reads the path as every server behind it does.
    """
    path = unquote(raw)
    if not path.startswith("/") or "/" in unquote(raw.replace("/", "")) or _ODD.search(path):
        return None
    return path if path == "/" else path.removesuffix("/")
