# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The arguments and results of the admin endpoint's routes.

A route is a function in a dictionary, by method and path::

    routes: Routes = {("GET", "/live"): live, ("POST", "/trace"): trace}

GET only reads. All other methods may change something, so only the socket serves them. Several
threads may call a route at a time. Its errors become answers: ValueError is the status 400,
BelugaError the status 409, and anything else the status 500.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """A request: its path, the last value of each name in its query, and its body."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> object:
        """Return the body's JSON value, or None without a body. Raises ValueError."""
        try:
            found: object = json.loads(self.body) if self.body else None
        except RecursionError:
            raise ValueError("the body is nested too deeply; send a flat object") from None
        return found


@dataclass(frozen=True, slots=True)
class AdminResponse:
    """A response: its body, the content type, its status, and further headers."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Route: TypeAlias = "Callable[[AdminRequest], AdminResponse]"
Routes: TypeAlias = "Mapping[tuple[str, str], Route]"


def json_response(value: object, status: HTTPStatus = HTTPStatus.OK) -> AdminResponse:
    """Return an answer with a JSON value."""
    return AdminResponse(
        json.dumps(value, separators=(",", ":")).encode(), "application/json", status
    )
