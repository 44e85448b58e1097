# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which headers pass through a proxy (RFC 9110, 7.6.1): all but those of one connection."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from multidict import CIMultiDict

# Of one hop. Content-Length is said anew for the body that is sent.
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
# Of the request: the URL says the host; a stream must come in the clear, to be passed on as events;
# the body has been read, so nobody waits for "100 Continue".
_REQUEST = _HOP | {"host", "accept-encoding", "expect"}


def for_engine(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A client's headers as an engine gets them."""
    return _passed(headers, _REQUEST)


def for_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """An engine's headers as the client gets them."""
    return _passed(headers, _HOP)


def _passed(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = headers.get("Connection")
    if named is not None:
        dropped = dropped | {word.strip().lower() for word in named.split(",")}
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )


def retry_after_s(headers: Mapping[str, str], most: float) -> float:
    """Seconds that a ``Retry-After`` asks for, at most so many; 1 if there is none that makes
    sense."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return min(float(text), most)
    try:
        wait_s = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError):
        wait_s = 1.0
    return min(max(wait_s, 0.0), most)
