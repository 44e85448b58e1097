# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The headers that a proxy forwards (RFC 9110, 7.6.1): all but those of a single connection. An
engine's own address in response headers would lead clients around the proxy, so it is removed:
``Location: http://engine:8000/v1/x`` becomes ``Location: /v1/x``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from urllib.parse import urlsplit

from multidict import CIMultiDict

# Headers of one hop. Content-Length is set again for the forwarded body.
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
# Further headers of a request that are not forwarded: the URL has the host; the service's session
# requests uncompressed responses; and the body has been read, so "100 Continue" is pointless.
_REQUEST = _HOP | {"host", "accept-encoding", "expect"}
_ANSWER = _HOP | {"alt-svc"}  # other addresses of the engine


def for_engine(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return a client's headers for an engine."""
    return _passed(headers, _REQUEST)


def for_client(headers: Mapping[str, str], url: str) -> CIMultiDict[str]:
    """Return the headers of the engine at a URL for the client."""
    passed = _passed(headers, _ANSWER)
    host = _host(url)
    if host in "\n".join(passed.values()):
        own = _own_address(url)
        return CIMultiDict(
            (name, own.sub("", value) or "/" if value else value) for name, value in passed.items()
        )
    return passed


@lru_cache(maxsize=1024)
def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


@lru_cache(maxsize=1024)
def _own_address(url: str) -> re.Pattern[str]:
    """Return a pattern for an engine's address in a header, including the base path before its own
    paths.
    """
    parts = urlsplit(url)
    default = ":443" if parts.scheme == "https" else ":80"
    bare = parts.netloc.removesuffix(default)
    port = f"(?:{default})?" if parts.port is None or bare != parts.netloc else ""
    path = f"(?:{re.escape(parts.path)}(?![^/?#]))?" if parts.path else ""
    return re.compile(rf"(?:https?:)?//{re.escape(bare)}{port}(?![\w.:-]){path}", re.IGNORECASE)


def _passed(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = headers.get("Connection")
    if named is not None:
        dropped = dropped | {word.strip().lower() for word in named.split(",")}
    return CIMultiDict([one for one in headers.items() if one[0].lower() not in dropped])


def retry_after_s(headers: Mapping[str, str], most: float) -> float:
    """Return the seconds of a ``Retry-After``, at most ``most``. Without a valid one, return 1."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return min(float(text), most)
    try:
        wait_s = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        wait_s = 1.0
    return min(max(wait_s, 0.0), most)
