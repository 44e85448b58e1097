# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The page for browsers: one file, which fetches ``/live`` every second.

Its Content-Security-Policy allows its own style and script by their digests, requests to its own
origin, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from beluga.admin.route import AdminRequest, AdminResponse, Routes


def page_routes() -> Routes:
    """Return the route of the page."""
    body = files("beluga.admin").joinpath("page.html").read_bytes()
    answer = AdminResponse(
        body, "text/html; charset=utf-8", headers={"Content-Security-Policy": _policy(body)}
    )

    def page(_: AdminRequest) -> AdminResponse:
        return answer

    return {("GET", "/"): page}


def _policy(body: bytes) -> str:
    """Return the Content-Security-Policy of a page with inline styles and scripts."""
    parts = [f"{kind}-src {' '.join(_digests(body, tag))}" for kind, tag in _INLINE.items()]
    rest = (
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return "; ".join([*rest, *parts])


_INLINE = {"style": b"style", "script": b"script"}


def _digests(body: bytes, tag: bytes) -> list[str]:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(one).digest()).decode()}'" for one in found]
