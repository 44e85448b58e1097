# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The headers that pass through a proxy (RFC 9110, 7.6.1): all but those of one connection."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from multidict import CIMultiDict

# Headers of one hop. Content-Length is set again for the body that is sent.
_HOP = frozenset(
    (
        "connection",
        "content-length",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
# Further headers of a request that do not pass: the URL has the host; the service's session asks
# for answers that are not compressed; and the body has been read, so nobody waits for "100
# Continue".
_REQUEST = _HOP | {"host", "accept-encoding", "expect"}


def for_engine(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers for an engine from a client's headers."""
    return _passed(headers, _REQUEST)


def for_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers for the client from an engine's headers."""
    return _passed(headers, _HOP)


def _passed(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = headers.get("Connection")
    if named is not None:
        dropped = dropped | {word.strip().lower() for word in named.split(",")}
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )


def retry_after_s(headers: Mapping[str, str], most: float) -> float:
    """Return the seconds that a ``Retry-After`` asks for, at most ``most``. It is 1 without a valid
    one.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return min(float(text), most)
    try:
        wait_s = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError):
        wait_s = 1.0
    return min(max(wait_s, 0.0), most)
