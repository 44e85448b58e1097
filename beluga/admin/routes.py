# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The routes of the admin endpoint.

A route is a function in a dictionary, by method and path::

    routes: Routes = {("GET", "/live"): live, ("POST", "/trace"): trace}

GET only reads. All other methods may change something, so only the socket serves them. Several
threads may call a route at a time. Its errors become answers: ValueError is the status 400,
BelugaError the status 409, and anything else the status 500.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias

from beluga.errors import BelugaError
from beluga.exporter import Collector, ServerCollector
from beluga.live import Observer
from beluga.metrics import prometheus_text
from beluga.rpc import Quota, read_trace
from beluga.threads import Thread

if TYPE_CHECKING:
    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.rpc import Server
    from beluga.tiers import TierService

log = logging.getLogger(__name__)

HEALTHZ, READYZ = "/healthz", "/readyz"
METRICS = "/metrics"
STILL_S = 15.0
"""A server without progress for this many seconds hangs."""
_METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
_CALLS = 100  # the default of GET /trace
_CALLS_MAX = 10_000
_LIMITS = tuple(limit.name for limit in dataclasses.fields(Quota))
_LOOK_S = 0.02  # between two looks at a drain
_INLINE = {"style": b"style", "script": b"script"}


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """A request: its path, the last value of each name in its query, and its body."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> object:
        """Return the body's JSON value, or None without a body. Raises ValueError."""
        try:
            value: object = json.loads(self.body) if self.body else None
        except RecursionError:
            raise ValueError("the body is nested too deeply; send a flat object") from None
        return value


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


# ---- All routes.


def lane_routes(server: Server, pool: Pool) -> Routes:
    """Return the routes of a server without the block index: its metrics."""
    return {("GET", METRICS): _metrics(ServerCollector(server, pool))}


def _metrics(collector: ServerCollector) -> Route:
    lock = threading.Lock()

    def metrics(_: AdminRequest) -> AdminResponse:
        with lock:
            return AdminResponse(prometheus_text(collector.collect()).encode(), _METRICS_KIND)

    return metrics


def server_routes(server: IndexServer, pool: Pool, tiers: TierService | None = None) -> Routes:
    """Return all routes of a server; ``tiers`` is the service of its lower tiers."""
    observer = Observer(server, pool)

    def live(request: AdminRequest) -> AdminResponse:
        snapshot = observer.snapshot()
        if "history" not in request.query:
            snapshot = dataclasses.replace(snapshot, history=())
        return json_response(dataclasses.asdict(snapshot))

    return {
        ("GET", METRICS): _metrics(Collector(server, pool)),
        ("GET", "/live"): live,
        **page_routes(),
        **operate_routes(server, pool, tiers),
    }


# ---- The page: one file, which fetches /live every second.


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
    hashes = [f"{kind}-src {' '.join(_digests(body, tag))}" for kind, tag in _INLINE.items()]
    others = (
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return "; ".join([*others, *hashes])


def _digests(body: bytes, tag: bytes) -> list[str]:
    texts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return [
        f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts
    ]


# ---- Liveness and readiness, for Kubernetes or a load balancer.


class ServerHealth:
    """The health of a server, recorded by its main thread and read by the routes on other threads.

    A server that is starting counts as alive: a takeover of a large pool, or of large lower tiers,
    takes time.
    """

    def __init__(
        self, still_s: float = STILL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._still_s, self._clock = still_s, clock
        self._moved_s: float | None = None
        self._serves = False

    def record_progress(self, *, serves: bool) -> None:
        """Record that the server has made progress, and whether it serves or stands by."""
        self._moved_s, self._serves = self._clock(), serves

    def record_start(self) -> None:
        """Record that the server is starting, which may take long."""
        self._moved_s, self._serves = None, False

    def routes(self) -> Routes:
        """Return the routes."""
        return {("GET", HEALTHZ): self._lives, ("GET", READYZ): self._ready}

    def _lives(self, _: AdminRequest) -> AdminResponse:
        moved_s = self._moved_s
        still_s = 0.0 if moved_s is None else self._clock() - moved_s
        if still_s < self._still_s:
            return AdminResponse(b"alive\n")
        return _unavailable(f"no progress for {still_s:.0f} s: the server's poll loop hangs")

    def _ready(self, request: AdminRequest) -> AdminResponse:
        lives = self._lives(request)
        if lives.status != HTTPStatus.OK:
            return lives
        return (
            AdminResponse(b"serving\n") if self._serves else _unavailable("it does not serve yet")
        )


def _unavailable(text: str) -> AdminResponse:
    return AdminResponse(f"{text}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


# ---- For operators: sessions, trace, quota, drain.


def operate_routes(server: IndexServer, pool: Pool, tiers: TierService | None) -> Routes:
    """Return the routes of a server; ``tiers`` is the service of its lower tiers."""
    drain, lock = Drain(server, tiers), threading.Lock()

    def sessions(_: AdminRequest) -> AdminResponse:
        return json_response([dataclasses.asdict(session) for session in server.sessions()])

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
        body = _object(request, ("draining",), bool)
        if body.get("draining", True):
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
    fields = request.json()
    if not isinstance(fields, dict) or not fields.keys() <= set(names):
        raise ValueError(f"give a JSON object of {', '.join(names)}")
    for name, value in fields.items():
        if type(value) is not kind:
            raise ValueError(f"{name} is {value!r}, and must be of type {kind.__name__}")
    return fields


def _trace(pool: Pool, request: AdminRequest) -> dict[str, Any]:
    """AdminResponse ``?last=N&slow_ms=MS&method=M&session=S``, or ``?slowest=N``."""
    query = request.query
    recorded = read_trace(pool.runtime_dir)
    if "slowest" in query:
        calls = recorded.slowest(min(int(query["slowest"]), _CALLS_MAX))
    else:
        calls = recorded.calls(
            last=min(int(query.get("last", _CALLS)), _CALLS_MAX),
            slow_s=float(query.get("slow_ms", 0)) / 1e3,
            method=query.get("method") or None,
            session=query.get("session") or None,
        )
    return {"epoch": recorded.epoch, "calls": [dataclasses.asdict(call) for call in calls]}


class Drain:
    """Drains one server. The service is that of its lower tiers, if it has any."""

    def __init__(self, server: IndexServer, tiers: TierService | None = None) -> None:
        self._server, self._tiers = server, tiers
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._looked = self._missing = self._missing_bytes = 0
        self._done = False
        self._failure = ""

    def begin(self) -> None:
        """Begin to drain; a second call meanwhile has no effect."""
        with self._lock:
            if self._thread is not None:
                return
            self._server.drain()
            self._ending = threading.Event()
            self._looked = self._missing = self._missing_bytes = 0
            self._done, self._failure = False, ""
            self._thread = Thread(
                target=self._run, args=(self._ending,), name="beluga-drain", daemon=True
            )
            self._thread.start()

    def undo(self) -> None:
        """Store new blocks again."""
        with self._lock:
            self._ending.set()
            if self._thread is not None:
                self._thread.join()
            self._thread, self._done = None, False
            self._server.drain(False)

    def state(self) -> dict[str, Any]:
        """Return the progress as JSON. ``writing`` counts the blocks that sessions still write,
        ``dirty`` those not yet offered to the lower tiers, ``looked`` those of ``blocks`` that were
        compared with the tiers, and ``missing`` those that no tier has at the end, because tiers
        refused or evicted them, with ``missing_bytes``; these are None without lower tiers.
        """
        stat = self._server.index_stat()
        below = self._tiers is not None
        return {
            "draining": bool(self._server.stat().draining),
            "done": self._done,
            "writing": stat.grant_count,
            "quarantined_bytes": stat.held_bytes,
            "blocks": stat.block_count,
            "dirty": self._server.lower_stat().dirty_count if below else None,
            "looked": self._looked if below else None,
            "missing": self._missing if below else None,
            "missing_bytes": self._missing_bytes if below else None,
            "failure": self._failure,
        }

    def _run(self, ending: threading.Event) -> None:
        try:
            while not self._settled():
                if ending.wait(_LOOK_S):
                    return
            if self._tiers is not None:
                for looked, _ in self._tiers.save_missing(ending):
                    self._looked += looked
                if not ending.is_set():
                    self._missing, self._missing_bytes = self._tiers.only_in_pool()
            self._done = not ending.is_set()
        except (BelugaError, OSError) as error:  # the server has stopped, or a tier failed
            log.warning("draining: %s", error)
            self._failure = str(error)

    def _settled(self) -> bool:
        """Return whether no block is being written or waits to be offered to a tier."""
        applied = self._server.stat().draining
        writing = self._server.index_stat().grant_count
        dirty = self._server.lower_stat().dirty_count if self._tiers is not None else 0
        return bool(applied) and writing == 0 and dirty == 0
