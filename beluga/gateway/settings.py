# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's settings, and the parsing of their text forms."""

from __future__ import annotations

import dataclasses
import math
import re
import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from beluga.arguments import StrPath, path_of
from beluga.conventions import GATEWAY_ADMIN_PORT, GATEWAY_PORT
from beluga.errors import RouterError, SettingsError
from beluga.listening import Token, read_tls, read_token, shown_url
from beluga.router import DEFAULT_POLICY, CostEstimator, Goals, Indexer
from beluga.router import costs as costs_module

_SCHEMES = ("http", "https")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+|null")
MIB = 1 << 20


class Address(NamedTuple):
    """The address of a listener. Port 0 means any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``HOST:PORT`` or ``[IPV6]:PORT``. Raises RouterError."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise RouterError(f"'{text}' is not HOST:PORT; give an address and a port to 65535")
        return cls(host.strip("[]"), int(port))

    @property
    def url(self) -> str:
        """The address as a URL, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


_LISTEN = Address("127.0.0.1", GATEWAY_PORT)
_ADMIN = Address("127.0.0.1", GATEWAY_ADMIN_PORT)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings of an engine.

    ``models`` are its models; by default those in its ``/v1/models``. ``events`` is the ZMQ
    endpoint of its KV events, ``replay`` that of their replay. ``other_ranks`` has both for each of
    its further data-parallel ranks that has an endpoint of its own.
    """

    url: str
    models: tuple[str, ...] = ()
    events: str | None = None
    replay: str | None = None
    other_ranks: tuple[tuple[str, str | None], ...] = ()

    @property
    def feeds(self) -> tuple[tuple[str, str | None], ...]:
        """The endpoints of KV events and of their replay, of all ranks."""
        first = () if self.events is None else ((self.events, self.replay),)
        return (*first, *self.other_ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of waits and sizes. Times are in seconds, sizes in bytes."""

    connect_s: float = 5.0
    stall_s: float = 600.0  # an engine that sends no byte for this long has stalled
    health_interval_s: float = 2.0
    health_timeout_s: float = 5.0
    cool_down_max_s: float = 60.0  # upper bound of an engine's Retry-After
    queue_s: float = 60.0  # longest wait of a request for a worker with a free slot
    drain_s: float = 30.0  # after SIGTERM, for running requests
    retries: int = 2  # other workers tried before the first byte
    body_size_max: int = 64 * MIB
    bodies_size_max: int = 256 * MIB  # of all requests whose engine has not started to respond
    body_s: float = 120.0  # for a client to send a request's body
    inflight_max: int = 0  # requests per worker; 0 for no limit
    queued_max: int = 1024  # requests that may wait; further ones are refused


@dataclasses.dataclass(frozen=True, slots=True)
class Callers:
    """The callers that the listeners accept."""

    hosts: tuple[str, ...] = ()  # additional names of this router in Host headers; * for all
    origins: tuple[str, ...] = ()  # sites whose pages may send forms without an API key
    admin_token: Token | None = None  # required from operators
    tls: ssl.SSLContext | None = None  # of both listeners

    @classmethod
    def read(
        cls,
        hosts: Iterable[str] | None,
        origins: Iterable[str] | None,
        token: StrPath | None,
        tls: str,
    ) -> Callers:
        """Read the options of a command line: ``token`` is a file, and ``tls`` is
        ``CERTIFICATE,KEY``. Raises SettingsError.
        """
        token = None if token is None else path_of("token", token)
        if "" in (hosts or ()):
            raise SettingsError("--allow-host is empty; give a name, or * for all")
        for origin in origins or ():
            if not _ORIGIN.fullmatch(origin):
                raise SettingsError(
                    f"--allow-origin {shown_url(origin)} is not an origin; give one such as "
                    "https://chat.example, without a path"
                )
        return cls(
            hosts=tuple(hosts or ()),
            origins=tuple(origins or ()),
            admin_token=read_token(token) if token else None,
            tls=read_tls(tls) if tls else None,
        )

    def url_of(self, address: Address) -> str:
        """Return the URL of a listener."""
        return address.url if self.tls is None else address.url.replace("http", "https", 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill:
    """Remote prefill: see ``beluga.router.RULES`` and ``beluga.disagg.open_queue``."""

    queues: tuple[tuple[str, str], ...] = ()  # pairs of a model and the address of its queue
    rule: str = "isl-bounding"  # current Dynamo's rule
    thresholds: tuple[tuple[str, float], ...] = ()  # of the rule, instead of its defaults
    wait_s: float = 60.0  # longest wait for a claimed prefill


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a gateway; see ``beluga gateway --help``."""

    policy: str = DEFAULT_POLICY  # NAME[:KEY=VALUE,...]
    estimator: CostEstimator = dataclasses.field(default_factory=CostEstimator)  # of times
    engines: tuple[EngineSpec, ...] = ()
    pool_events: str = ""  # ENDPOINT,REPLAY of a pool's server; empty: no pool events
    pool_events_token: Token | None = None  # that the server requires
    workers_file: Path | None = None
    listen: Address = _LISTEN
    admin: Address | None = _ADMIN
    tokenizer: Path | None = None
    chat_template: Path | None = None  # instead of the tokenizer's own
    trust_request_chat_template: bool = False  # a request may bring one
    block_size: int = 0  # tokens per block of the engines; 0: reported by the engines
    index_ranks: int = Indexer.WORKERS  # limit of all engines' ranks in the index
    queue: str = "fcfs"  # the order of waiting requests
    # Requests wait while every worker has more batches of prefill; 0: never.
    queue_threshold: float = 16.0
    seed: int | None = None
    limits: Limits = Limits()
    advise_s: float = 180.0  # seconds between advice of the planner (Dynamo's default); 0 for none
    goals: Goals = dataclasses.field(default_factory=Goals)
    prefill: Prefill = Prefill()
    callers: Callers = Callers()

    def __post_init__(self) -> None:
        """Accept paths as text. Raises BadTypeError."""
        for name in ("workers_file", "tokenizer", "chat_template"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, path_of(name, value))

    @property
    def costs(self) -> costs_module.ModelCosts:
        """The costs of the model, for time estimates."""
        return self.estimator.costs


def read_url(text: str) -> str:
    """Parse an engine's base URL, without a trailing slash. Raises RouterError."""
    try:
        parsed = urlsplit(text.strip())
        makes_sense = bool(parsed.hostname) and (parsed.port is None or parsed.port > 0)
        makes_sense &= not any(sign.isspace() or not sign.isprintable() for sign in parsed.geturl())
    except ValueError:  # an invalid port, or an incomplete address
        makes_sense = False
    if not makes_sense or parsed.scheme not in _SCHEMES:
        raise RouterError(f"'{shown_url(text)}' is not an engine's URL; give http://HOST:PORT")
    if "@" in parsed.netloc:  # not repeated in the message, which is displayed
        raise RouterError(
            "an engine's URL must not have a user and password; engines receive the clients' own "
            "Authorization"
        )
    if parsed.query or parsed.fragment:
        raise RouterError(f"'{shown_url(text)}': an engine's URL must not have a query or fragment")
    path = parsed.path.rstrip("/").removesuffix("/v1")
    return f"{parsed.scheme}://{parsed.netloc}{path}"


def read_engines(
    workers: Iterable[str], models: Iterable[str] = (), events: Iterable[str] = ()
) -> tuple[EngineSpec, ...]:
    """Parse the engines of a command line from ``URL``, ``MODEL=URL,URL``, and
    ``URL=ENDPOINT[,REPLAY]`` for KV events, one for each endpoint of an engine. Raises RouterError.
    """
    served: dict[str, list[str]] = {read_url(url): [] for url in workers}
    for text in models:
        name, equals, urls = text.partition("=")
        if not equals or not name or not urls:
            raise RouterError(f"'{shown_url(text)}' is not MODEL=URL,URL")
        for url in urls.split(","):
            served.setdefault(read_url(url), []).append(name)
    announced: dict[str, list[tuple[str, str | None]]] = {}
    for text in events:
        url, equals, endpoints = text.partition("=")
        if not equals or not endpoints:
            raise RouterError(f"'{shown_url(text)}' is not URL=ENDPOINT for KV events")
        endpoint, _, replay = endpoints.partition(",")
        announced.setdefault(read_url(url), []).append((endpoint, replay or None))
    if unknown := announced.keys() - served.keys():
        raise RouterError(f"KV events are configured for {min(unknown)}, which is not a worker")
    return tuple(engine_spec(url, names, announced.get(url, ())) for url, names in served.items())


def engine_spec(
    url: str, models: Iterable[str], feeds: Sequence[tuple[str, str | None]]
) -> EngineSpec:
    """Return an engine whose ranks publish their blocks at these endpoints. Raises RouterError."""
    endpoints = [endpoint for endpoint, _ in feeds]
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1:
            raise RouterError(
                f"the KV events of {url} at {endpoint} are configured twice; give each rank's "
                "endpoint once"
            )
    events, replay = feeds[0] if feeds else (None, None)
    return EngineSpec(url, tuple(models), events, replay, tuple(feeds[1:]))


def read_queues(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse the prefill queues of a command line from ``MODEL=QUEUE``. Raises RouterError."""
    queues: dict[str, str] = {}
    for text in texts:
        model, equals, url = text.partition("=")
        if not equals or not model or not url:
            raise RouterError(
                f"'{shown_url(text)}' is not MODEL=QUEUE; a queue is pool, or nats://HOST:PORT"
            )
        if model in queues:
            raise RouterError(f"the model {model} has two prefill queues; give one")
        queues[model] = url
    return tuple(queues.items())


def read_thresholds(texts: Iterable[str]) -> tuple[tuple[str, float], ...]:
    """Parse the thresholds of a rule from ``NAME=NUMBER``. Raises RouterError."""
    thresholds: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value):
            raise RouterError(f"'{text}' is not NAME=NUMBER; give, for example, effective_max=4096")
        thresholds[name] = int(value) if value.is_integer() else value
    return tuple(thresholds.items())
