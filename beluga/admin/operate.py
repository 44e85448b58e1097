# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The routes for operators: sessions, trace, quota, drain.

``POST /quota`` takes the limits to change, by the names of :class:`~beluga.rpc.Quota`; the others
are unchanged. ``POST /drain`` takes ``{"draining": true}`` or false.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from beluga.admin.drain import Drain
from beluga.admin.route import AdminRequest, AdminResponse, Routes, json_response
from beluga.rpc import Quota, read_trace

if TYPE_CHECKING:
    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.tiers import TierService

_CALLS = 100  # the default of GET /trace
_CALLS_MAX = 10_000
_LIMITS = tuple(field.name for field in dataclasses.fields(Quota))


def operate_routes(server: IndexServer, pool: Pool, tiers: TierService | None) -> Routes:
    """Return the routes of a server; ``tiers`` is the service of its lower tiers."""
    drain, lock = Drain(server, tiers), threading.Lock()

    def sessions(_: AdminRequest) -> AdminResponse:
        return json_response([dataclasses.asdict(one) for one in server.sessions()])

    def shares(_: AdminRequest) -> AdminResponse:
        return json_response([share.as_dict() for share in server.shares()])

    def tenants(_: AdminRequest) -> AdminResponse:
        return json_response([tenant.as_dict() for tenant in server.tenants()])

    def trace(request: AdminRequest) -> AdminResponse:
        return json_response(_trace(pool, request))

    def quota(_: AdminRequest) -> AdminResponse:
        return json_response(dataclasses.asdict(server.quota))

    def limit(request: AdminRequest) -> AdminResponse:
        changes = _object(request, _LIMITS, int)
        with lock:
            server.limit(dataclasses.replace(server.quota, **changes))
        return quota(request)

    def drained(_: AdminRequest) -> AdminResponse:
        return json_response(drain.state())

    def draining(request: AdminRequest) -> AdminResponse:
        wanted = _object(request, ("draining",), bool)
        if wanted.get("draining", True):
            drain.begin()
        else:
            drain.undo()
        return drained(request)

    return {
        ("GET", "/sessions"): sessions,
        ("GET", "/tenants"): tenants,
        ("GET", "/shares"): shares,
        ("GET", "/trace"): trace,
        ("GET", "/quota"): quota,
        ("POST", "/quota"): limit,
        ("GET", "/drain"): drained,
        ("POST", "/drain"): draining,
    }


def _object(request: AdminRequest, names: tuple[str, ...], kind: type) -> dict[str, Any]:
    """Return the request's JSON object, with these names only. Raises ValueError."""
    found = request.json()
    if not isinstance(found, dict) or not found.keys() <= set(names):
        raise ValueError(f"give a JSON object of {', '.join(names)}")
    for name, value in found.items():
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r}, and must be of type {kind.__name__}")
    return found


def _trace(pool: Pool, request: AdminRequest) -> dict[str, Any]:
    """AdminResponse ``?last=N&slow_ms=MS&method=M&session=S``, or ``?slowest=N``."""
    query = request.query
    found = read_trace(pool.runtime_dir)
    if "slowest" in query:
        calls = found.slowest(min(int(query["slowest"]), _CALLS_MAX))
    else:
        calls = found.calls(
            last=min(int(query.get("last", _CALLS)), _CALLS_MAX),
            slow_s=float(query.get("slow_ms", 0)) / 1e3,
            method=query.get("method") or None,
            session=query.get("session") or None,
        )
    return {"epoch": found.epoch, "calls": [dataclasses.asdict(call) for call in calls]}
