# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga serve``: the server, with its lower tiers and events."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from beluga.choices import ADMISSIONS, EVICTIONS, OFFLOADS, SILENT_S
from beluga.cli import logs
from beluga.cli.detach import detached, serving_process
from beluga.cli.frame import BadParameter, Option, OptionGroup
from beluga.cli.options import (
    Host,
    JsonLines,
    LogFormat,
    LogLevel,
    PoolPaths,
    as_bad_value,
    need,
    open_pool,
    refuse_alone,
    size,
)
from beluga.cli.output import announce
from beluga.cli.services import Manager, Services
from beluga.errors import (
    AdminError,
    BadTypeError,
    BadValueError,
    DeposedError,
    RouterError,
    RpcError,
    TierError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from beluga.admin import Admin, Routes, ServerHealth
    from beluga.cli.services import RestartableService
    from beluga.events import EventSettings
    from beluga.index import IndexServer
    from beluga.pool import Pool
    from beluga.rpc import Handlers, Server
    from beluga.tiers import TierService, TierSettings

Disks = Annotated[
    list[str] | None,
    Option(
        "--disk",
        metavar="PATH",
        help=(
            "Offload blocks to this disk: a directory, a file or a block device. Repeat the "
            "option to spread them over several disks."
        ),
    ),
]
DiskBytes = Annotated[
    int,
    Option(parser=size, metavar="SIZE", help="The total size used on the disks, such as 800G."),
]
Remotes = Annotated[
    list[str] | None,
    Option(
        "--remote",
        metavar="URL",
        help=(
            "Offload blocks to this store, which several pools may share: s3://BUCKET/PREFIX, "
            "file:///PATH, redis://HOST:PORT/DB or mooncake://HOST:PORT."
        ),
    ),
]
Offload = Annotated[
    str,
    Option(
        words=OFFLOADS,
        help=(
            "What to do with a block that would be evicted before it was offered to these tiers: "
            "drop it, or wait."
        ),
    ),
]
AdmissionName = Annotated[
    str,
    Option(
        "--admission",
        words=ADMISSIONS,
        metavar="NAME",
        help="Which blocks the tiers save: always, second-touch, sketch or adaptive.",
    ),
]


def refuse_without_tier(offload: str, admission: str, *, usual: tuple[str, str]) -> None:
    """Raise BadParameter for options of lower tiers without a tier. ``usual`` has their
    defaults.
    """
    for name, value, default in zip(
        ("--offload", "--admission"), (offload, admission), usual, strict=True
    ):
        if value != default:
            raise BadParameter(f"{name} {value} needs a lower tier; give --disk or --remote")


def admin_address(text: str) -> str:
    """Parse the address of an admin endpoint."""
    if text:
        from beluga.admin import read_address  # slow to import

        with as_bad_value(AdminError):
            read_address(text)
    return text


AdminAddress = Annotated[
    str,
    Option(
        "--admin",
        parser=admin_address,
        metavar="[HOST:]PORT",
        help=(
            "Serve the admin endpoint here, for Prometheus and browsers: on 127.0.0.1 unless HOST "
            "is given; 0 for a free port."
        ),
    ),
]


def admin_endpoint(
    admin: AdminAddress = "", admin_token: Path | None = None, admin_tls: str = ""
) -> Callable[..., Any]:
    """Return a factory of the admin endpoint. Raises SettingsError.

    --admin-token FILE: A file with the token required for requests to --admin, except for health
        checks.
    --admin-tls CERTIFICATE,KEY: Use TLS on the address of --admin, with these PEM files.
    """
    from beluga.admin import Admin, read_address
    from beluga.listening import read_tls, read_token

    refuse_alone("--admin", admin, admin_token=admin_token, admin_tls=admin_tls)
    return partial(
        Admin,
        address=read_address(admin) if admin else None,
        token=read_token(admin_token) if admin_token else None,
        context=read_tls(admin_tls) if admin_tls else None,
    )


AdminEndpoint = Annotated[Callable[..., Any], OptionGroup(admin_endpoint)]


DeclaredGone = Annotated[
    bool, Option(help="Declare that every server and client so far has ended.")
]
HandlerThreads = Annotated[
    int, Option(min=1, max=64, help="The number of handlers that run at a time.")
]
Detach = Annotated[
    bool,
    Option(
        help=(
            "Serve in the background: return once the server serves or stands by. Stop it with "
            "`beluga stop`."
        ),
    ),
]
_Count = Annotated[int, Option(min=0, max=(1 << 32) - 1)]  # a quota
_LOOK_INTERVAL_S = 0.5
_PERCENT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,4})?")
_OFFLOAD, _ADMISSION = "drop", "adaptive"
_HINT_BUDGET = "25%"
_EVENTS_FORM, _EVENTS_NAME = "vllm", "beluga"


def serve(
    pool: PoolPaths = None,
    host: Host = None,
    declare_gone: DeclaredGone = False,
    quota_grants: _Count = 0,
    quota_pins: _Count = 0,
    quota_bytes: Annotated[int, Option(parser=size)] = 0,
    quota_calls: _Count = 0,
    eviction: Annotated[str, Option(words=EVICTIONS)] = "lru",
    share: list[str] | None = None,
    hint_budget: str = _HINT_BUDGET,
    standby: bool = False,
    watch: bool = False,
    silent: Annotated[float, Option(min=0.5, max=86400)] = SILENT_S,
    disk: Disks = None,
    disk_bytes: DiskBytes = 0,
    disk_owner: str = "",
    remote: Remotes = None,
    forget_tier: list[str] | None = None,
    offload: Offload = _OFFLOAD,
    admission: AdmissionName = _ADMISSION,
    events: str = "",
    events_replay: str = "",
    events_token: Path | None = None,
    events_form: str = _EVENTS_FORM,
    events_name: str = _EVENTS_NAME,
    events_model: str = "",
    *,
    endpoint: AdminEndpoint,
    handlers: str = "",
    handler_threads: HandlerThreads = 1,
    detach: Detach = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    json: JsonLines = False,
) -> None:
    """Serve the pool's block index until SIGTERM or Ctrl-C.

    With --disk or --remote, evicted blocks are offloaded to these tiers and fetched again. With
    --events, routers follow the pool's blocks. With --admin, browsers show the server's state. With
    --handlers, clients call your functions.

    --quota-grants: The largest number of blocks that a session may write at a time; 0 for no limit.
    --quota-pins: The largest number of blocks that a session may pin; 0 for no limit.
    --quota-bytes: The most bytes that a session may write at a time and pin, such as 1G; 0 for no
        limit.
    --quota-calls: The calls per second that a session may make; 0 for no limit.
    --eviction: The eviction policy: {words}.
    --share NAME=PERCENT: A tenant's guaranteed share of the pool, such as acme=30%. Blocks of
        tenants above their share are evicted first. Repeat the option for each tenant.
    --hint-budget PERCENT: How much of each tenant's part hints may favor or pin, such as 25%; 0%
        for nothing.
    --standby: Wait until the pool's server ends, then take over.
    --watch: With --standby, stand by again after another server has taken over.
    --silent: Seconds without a heartbeat after which another machine's server counts as lost; more
        if its heartbeat was slow before.
    --disk-owner NAME: The owner of the disks' blocks; a disk of another owner is refused. Default:
        the pool's location, so that a new pool there takes the disk over with its blocks.
    --forget-tier NAME: Drop the pending removals of a tier that will never be used below this pool
        again: disk (all but the server's own), or a store's URL. Repeat the option for each.
    --events ENDPOINT: Publish the blocks that are stored and removed here (ZMQ PUB), as KV events;
        or at a router that listens: connect:tcp://HOST:PORT.
    --events-replay ENDPOINT: Replay events here (ZMQ ROUTER), for routers that connect late.
    --events-token FILE: Only routers with the token in this file's first line get events.
    --events-form FORM: The format of the events: vllm for Beluga's gateway, dynamo, llm-d or
        mooncake, or one of their versions, such as llm-d-v1.
    --events-name NAME: The pool's name in events for llm-d and mooncake.
    --events-model MODEL: The model in events for llm-d and mooncake, unless its engines report it.
    --handlers MODULE:NAME: Call these functions for clients (beluga.Handlers); see docs/use/rpc.md.
    """
    from beluga.rpc import Quota

    refuse_alone("--standby", standby, watch=watch)
    silent_s = silent if standby else None  # None: it does not stand by
    tiers = _tier_settings(disk, disk_bytes, disk_owner, remote, offload, admission, eviction)
    with as_bad_value(TierError):
        forgotten = tiers.others(forget_tier or ())  # stored names of tiers to abandon
    refuse_alone("--handlers", handlers, handler_threads=handler_threads != 1)
    published = _event_settings(
        events, events_replay, events_form, events_token, events_name, events_model
    )
    quota = Quota(quota_grants, quota_pins, quota_bytes, quota_calls)
    make = partial(_evicting(eviction, share, hint_budget), host=host, quota=quota)
    register = _registering(handlers, handler_threads)
    if detach:
        detached(pool, json, stands_by=silent_s is not None)
        return
    logs.begin(log_level, log_format)
    stopping = threading.Event()
    run = partial(serve_until_stopped, stopping=stopping, json=json, silent_s=silent_s)
    with open_pool(pool) as opened:
        while True:
            server = make(opened, declared_gone=declare_gone)
            for name in forgotten:
                server.give_up_tier(name)
            register(server)
            services = _services(server, opened, tiers, published, host, patient=bool(silent_s))
            health, routes = _routes(server, opened, services)
            try:
                with answering(endpoint, routes, opened, json) as admin:
                    run(server, admin=admin, health=health, services=services)
                return
            except DeposedError as error:
                _stand_by_again(error, watch=watch, json=json)
                declare_gone, forgotten = False, []  # both concern earlier servers


def _routes(
    server: IndexServer, pool: Pool, services: Sequence[RestartableService]
) -> tuple[ServerHealth, Routes]:
    """Return a server's health, and the routes of its admin endpoint."""
    from beluga.admin import ServerHealth, server_routes

    health = ServerHealth()
    return health, {**server_routes(server, pool, _saving(services)), **health.routes()}


def _evicting(
    eviction: str, share: Sequence[str] | None, hint_budget: str
) -> Callable[..., IndexServer]:
    """Return a function that makes a server with these rules of eviction."""
    from beluga.index import IndexServer

    shares, budget = _shares(share), _budget(hint_budget)
    return partial(IndexServer, eviction=eviction, shares=shares, hint_budget=budget)


def _budget(text: str) -> float:
    """Return the part of each share that hints may favor."""
    part = _part(text)
    if part is None or part > 1:
        raise BadParameter(f"--hint-budget is {text!r}; give a part of each share: 25%")
    return part


def _shares(stopping: Sequence[str] | None) -> dict[str, float]:
    """Return the shares of tenants by name, as fractions of the pool."""
    from beluga.index import check_shares

    shares: dict[str, float] = {}
    for text in stopping or ():
        name, equals, percent = text.rpartition("=")
        part = _part(percent)
        if not equals or part is None:
            raise BadParameter(f"--share is {text!r}; give a tenant and its part: acme=30%")
        if name in shares:
            raise BadParameter(f"--share names {name!r} twice; give one share to each tenant")
        shares[name] = part
    with as_bad_value(BadValueError):
        return check_shares(shares)


def _part(percent: str) -> float | None:
    """Return a part from a text such as 30%, or None."""
    number = percent.strip().removesuffix("%").strip()
    return float(number) / 100 if _PERCENT.fullmatch(number) else None


def _registering(target: str, threads: int) -> Callable[[Server], None]:
    """Load handlers and return a function that registers them with a server; without handlers it
    does nothing.
    """
    handlers = named_handlers(target)
    if handlers is None:
        return lambda server: None
    return lambda server: server.register(handlers, threads=threads)


def named_handlers(target: str) -> Handlers | None:
    """Load the handlers that an option names. Raises BadParameter, also for objects that are none,
    and BadValueError.
    """
    from beluga.rpc import load_handlers

    try:
        return load_handlers(target) if target else None
    except BadTypeError as error:
        raise BadParameter(str(error)) from None


def _stand_by_again(error: DeposedError, *, watch: bool, json: bool) -> None:
    """Report that the server lost its pool. Raises the error unless it should stand by again."""
    from beluga.rpc import LOST

    if not watch:
        raise error
    LOST.add(reason="deposed")
    announce(f"{error}; standing by again", "deposed", json=json)


def _tier_settings(
    disks: list[str] | None,
    disk_bytes: int,
    disk_owner: str,
    remotes: list[str] | None,
    offload: str,
    admission: str,
    eviction: str,
) -> TierSettings:
    from beluga.tiers import TierSettings

    with as_bad_value(TierError):
        tiers = TierSettings(
            disks=tuple(disks or ()),
            disk_bytes=disk_bytes,
            owner=disk_owner,
            remotes=tuple(remotes or ()),
            offload=offload,
            admission=admission,
            eviction=eviction,
        )
        refuse_alone("--disk", disks, disk_owner=disk_owner)
        if not tiers:
            refuse_without_tier(offload, admission, usual=(_OFFLOAD, _ADMISSION))
        tiers.check()
        return tiers


def _services(
    server: IndexServer,
    pool: Pool,
    tiers: TierSettings,
    published: EventSettings | None,
    host: int | None,
    *,
    patient: bool,
) -> list[RestartableService]:
    from beluga.tiers import TierService

    services: list[RestartableService] = []
    if tiers:
        if not patient:
            tiers.check_owner(pool)
        services.append(TierService(server, pool, tiers, host=host, patient=patient))
    if published:
        from beluga.events import EventService  # slow to import

        services.append(EventService(server, pool, published, host=host))
    return services


def _saving(services: Sequence[RestartableService]) -> TierService | None:
    """Return the service of the lower tiers, or None."""
    saving = (service for service in services if hasattr(service, "save_missing"))
    return cast("TierService | None", next(saving, None))


@contextmanager
def answering(
    make: Callable[..., Admin], routes: Routes, pool: Pool, json: bool
) -> Iterator[Admin]:
    """Run an admin endpoint in the meantime, also while the server stands by."""
    endpoint = make(routes, directory=pool.runtime_dir)
    endpoint.start()
    if endpoint.url:
        page = f"page at {endpoint.url}, " if ("GET", "/") in routes else ""
        text = f"{page}metrics at {endpoint.metrics_url}"
        announce(text, "admin", json=json, url=endpoint.url, metrics=endpoint.metrics_url)
    try:
        yield endpoint
    finally:
        endpoint.stop()


def serve_until_stopped(
    server: Server,
    *,
    stopping: threading.Event | None = None,
    json: bool = False,
    services: Sequence[RestartableService] = (),
    admin: Admin | None = None,
    health: ServerHealth | None = None,
    silent_s: float | None = None,
) -> None:
    """Run ``server`` on its thread, and its services, until a signal arrives. Raises the error if
    it ends otherwise. ``admin`` then serves requests for the active server, and ``health`` receives
    its state.

    With ``silent_s`` the server first stands by, takes over from a server whose heartbeat has not
    moved for that many seconds, and retries services that it cannot start yet. A signal sets
    ``stopping``, which may be set before.
    """
    from beluga.admin import ServerHealth
    from beluga.rpc import stand_by

    running = Services(services, patient=silent_s is not None)
    manager, health, stopping = (
        Manager(_LOOK_INTERVAL_S),
        health or ServerHealth(),
        stopping or threading.Event(),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        if silent_s is None:
            server.start()
        else:
            pid, text = os.getpid(), "standing by"
            serving = serving_process(server.pool.runtime_dir)
            if serving is not None:
                text += f" for process {serving[0]}, which serves ('{serving[1]}' ends it)"
            text += "; stop with Ctrl-C"
            server_pid = None if serving is None else serving[0]
            announce(text, "standing by", json=json, pid=pid, server=server_pid)
            waits = partial(_report_waiting, server, manager, health)
            if not stand_by(server, stopping, silent_s=silent_s, waits=waits):
                return
            health.record_start()
            stat = server.stat()
            epoch, cause = stat.epoch, stat.takeover
            text = f"took over, epoch {epoch}: {cause}"
            announce(text, "serving", json=json, epoch=epoch, pid=os.getpid(), reason=cause.reason)
        running.start()
        if admin is not None:
            admin.claim()
        epoch = server.stat().epoch
        if silent_s is None:  # a standby serves before its services have started
            text = f"serving, epoch {epoch}; stop with Ctrl-C"
            announce(text, "serving", json=json, epoch=epoch, pid=os.getpid())
        manager.ready(f"serving, epoch {epoch}")
        _look_after(server, running, stopping, manager, health)
    finally:
        if stopping.is_set():
            manager.stopping()
        running.stop()
        server.stop()


def _report_waiting(server: Server, manager: Manager, health: ServerHealth, cause: str) -> None:
    """Report a standby as ready, after its first check of the active server."""
    server.pool.refuse_removed()
    health.record_progress(serves=False)
    manager.ready(f"standing by: {cause}" if cause else "standing by")
    manager.alive()


def _look_after(
    server: Server,
    services: Services,
    stopping: threading.Event,
    manager: Manager,
    health: ServerHealth,
) -> None:
    """Wait until a signal arrives. Notify the manager and ``health`` only if the server's poll loop
    has made progress since the last check. Raises the error that ended the server.
    """
    health.record_progress(serves=True)
    previous = -1
    while not stopping.wait(manager.look_s):
        try:
            progress = server.stat().housekeeping_count
        except RpcError:  # the server has stopped
            if server.failure is None:
                raise
        if server.failure is not None:
            raise server.failure
        if progress != previous:
            manager.alive()
            health.record_progress(serves=True)
        previous = progress
        services.look_after()


def _event_settings(
    endpoint: str, replay: str, form: str, token: Path | None, name: str, model: str
) -> EventSettings | None:
    repeats = False
    if form != _EVENTS_FORM:
        from beluga.events import form_named  # slow to import

        try:
            repeats = form_named(form).repeats
        except RouterError as error:
            raise BadParameter(f"--events-form{str(error).removeprefix('form')}") from None
    if (replay and not endpoint) or (endpoint and not replay and not repeats):
        raise BadParameter("--events and --events-replay need each other; give both")
    others = {"form": form != _EVENTS_FORM, "name": name != _EVENTS_NAME, "model": model}
    given = {f"events_{option}": value for option, value in {**others, "token": token}.items()}
    refuse_alone("--events", endpoint, **given)
    if not endpoint:
        return None
    need("router", "zmq")
    from beluga.events import EventSettings
    from beluga.listening import read_token

    with as_bad_value(RouterError):
        return EventSettings(
            endpoint,
            replay,
            form=form,
            name=name,
            model=model,
            token=read_token(token) if token else None,
        )
