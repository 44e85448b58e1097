# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""All closable objects of Beluga, on a small pool, and arguments for their methods. ``MAKERS`` has
a factory for each class, and a use that works while the object is open. A class with a ``close`` or
a ``stop`` that is neither there nor in ``ELSEWHERE`` fails the test.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.soft_dsa import soft_engine

import beluga
from beluga import Client, Handlers, IndexServer, KVCache, Pool
from beluga._ffi import ffi
from beluga.errors import RpcError
from beluga.index import IndexClient, TaskClient, TaskRecord
from beluga.kvcache import OpWorker, Run
from beluga.pool import STRIPE_SIZE
from beluga.router import Indexer, RouterEvent, Stored, Worker
from beluga.router.hashing import words
from beluga.router.indexer import Tree
from beluga.router.policy import Query
from beluga.rpc import Quota, Server
from beluga.transfer import (
    CpuEngine,
    Direction,
    DsaEngine,
    IoHandle,
    Link,
    Slots,
    TransferClass,
    View,
    arrangements,
    plan_blocks,
)
from beluga.transfer.policy import probe

SHAPE = (2, 3, 4, 2, 8)  # K and V, blocks, tokens, heads, bytes
ENDS = ("close", "stop")

ELSEWHERE = {
    "beluga.admin": "tests/admin: threads in a server's process, as in `beluga serve`",
    "beluga.cli.services": "tests/tiers/test_tier_service.py: the services of a server's process",
    "beluga.connectors": "tests/connectors: they have one cache each, and engines of their own",
    "beluga.events": "tests/events: a service in a server's process, as in `beluga serve`",
    "beluga.gateway": "tests/gateway: on an event loop, without C",
    "beluga.http_server": "tests/gateway, tests/listeners: on an event loop, without C",
    "beluga.replay": "tests/replay: processes, without C",
    "beluga.disagg": "tests/disagg: on an event loop; a queue in the pool has one cache",
    "beluga.tiers.disk": "tests/tiers/test_disk.py",
    "beluga.tiers.settings": "tests/tiers/test_tier_service.py",
    "beluga.tiers.service": "tests/tiers/test_tier_service.py: it has sessions of its own",
    "beluga.kvbm": "tests/kvbm: in Python, without C",
    "beluga.tiers.remote": "tests/tiers/test_remote_stores.py: threads, without C",
    "beluga.tiers.hanging": "tests/tiers/test_remote_stores.py: threads, without C",
    "beluga.tiers.tier": "a protocol",
    "beluga.pool.mapping": "the pool's own",
    "beluga._shared": "used by the pool, places and all on them",
    "beluga.tiers.counters": "a part of the service of the tiers, which ends it",
    "beluga.transfer.engine": "a protocol",
    "beluga.transfer.cuda": "test_cuda_faults.py: needs compiled kernels",
}
"""Modules whose classes other tests close, with the reason."""


class Scene:
    """A pool in ``folder``, and objects on it, which are created on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [folder / "device"]
        self.pool = Pool.create(paths, device_size=16 << 20, sparse=True, max_blocks=64, force=True)
        self.prepared: dict[str, Any] = {}  # arguments, created before there are threads
        self.memory = np.ones(SHAPE, np.uint8)
        self.layout = arrangements.vllm([View.of(self.memory)])

    @functools.cached_property
    def server(self) -> IndexServer:
        server = IndexServer(self.pool)
        server.start()
        return server

    @functools.cached_property
    def client(self) -> Client:
        assert self.server
        return Client(self.pool, timeout_s=2)

    @functools.cached_property
    def link(self) -> Link:
        return Link("lifecycle", pool=self.pool, directory=self.folder)

    @functools.cached_property
    def handle(self) -> IoHandle:
        return IoHandle(self.link)

    @functools.cached_property
    def cpu(self) -> CpuEngine:
        return CpuEngine(self.pool, 1, handle=self.handle)

    @functools.cached_property
    def dsa(self) -> DsaEngine:
        return soft_engine(self.pool)

    @functools.cached_property
    def cache(self) -> KVCache:
        assert self.client
        return KVCache(self.pool, namespace="lifecycle", link=self.link, timeout_s=2, host=0)

    def plan(self) -> Any:
        addresses = np.array([[self.memory.ctypes.data]], np.uint64)
        offset = np.array([self.pool.geometry.size - STRIPE_SIZE])
        return plan_blocks(addresses, np.array([self.memory.nbytes]), offset, owners=(self.memory,))

    def serve_user(self) -> Server:
        """Return a server that is not started yet."""
        return Server(self.pool)

    @staticmethod
    def tree() -> Tree:
        return Tree(rank_max=2, block_max=64, name_max=64)

    def arguments(self, owner: object) -> dict[str, Any]:
        """Return the argument for a parameter of this name of a method of ``owner``."""
        word, keys = np.zeros((1, 2), np.uint64), [bytes(32)]
        prepared: dict[str, Any] = {
            "digests": keys,
            "keys": word,
            "key": word,
            "sources": Run.of(self.layout, [0]),
            "targets": Run.of(self.layout, [0]),
            "tokens": [0],
            "length": 4096,
            "grants": [],
            "hits": [],
            "pins": _no_pins(),
            "queue": 1,
            "visible_s": 1,
            "task": TaskRecord(word, 1, 1, 4096, 1),
            "method": 0 if isinstance(owner, Client) else 70,
            **{"handler": bytes, "handlers": Handlers()},
            "timeout_s": 0.01,
            "count_max": 1,
            "quota": Quota(),
            "wait": False,
            "unknown": False,
            **dict.fromkeys(("kinds", "level", "silent_s", "cell_count"), 1),
            "failure": RpcError("a test sets it"),
            "end": self.pool.prefault,
            "host": 0,
            "plan": self.plan(),
            "engine": self.cpu,
            "direction": Direction.READ,
            "kind": TransferClass.ONBOARD,
            "shares": 10,
            "bytes_per_s": 0,
            "transfer": None,
            "size": 4096,
            "piece_size": 4096,
            "count": 1,
            "ends": [1],
            "request": ffi.new("bl_io_request *", {"node": 1, "bytes": 64}),
            "timeout_ns": 0,
            "fragments": 1,
            "run": lambda _: 0,
            "node": 1,
            "now_ns": 1,
            "piece": 1,
            "handle": 1,
            **{"plugged": False, "write": False},
            "event": _stored(),
            "events": [_stored()],
            "tokens_hashes": [1, 2],
            **dict.fromkeys(("locals_", "contents", "names"), words([1, 2])),
            "parent": None,
            "worker": Worker(1, 0),
            "worker_id": 1,
            "rank": 1,
            **{"name": "disk", "tier": 0, "number": 1},
            "payload": b"x",
            "early_exit": False,
            "code": 0,
            "doing": "testing",
            "call": lambda _: None,
            "last_id": None,
            "query": Query(16, 4, (1, 2)),
            "fault": "a test sets it",
            "error": RpcError("a test sets it"),
        }
        return prepared

    def call(self, owner: object, name: str) -> object:
        """Call a method with plausible arguments, or read a property."""
        attribute = getattr(type(owner), name)
        if not callable(attribute):
            return getattr(owner, name)
        prepared = self.prepared
        if name == "get_tokens":
            prepared = {**prepared, "targets": Slots(self.layout, [0])}
        method = getattr(owner, name)
        arguments, named = [], {}
        for parameter in inspect.signature(method).parameters.values():
            if parameter.default is not parameter.empty and parameter.name != "timeout_s":
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                continue
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = prepared[parameter.name]
            else:
                arguments.append(prepared[parameter.name])
        result = method(*arguments, **named)
        return list(result) if inspect.isgenerator(result) else result

    def put_and_get(self, cache: KVCache) -> None:
        keys = [bytes(32)]
        cache.remove(keys)
        assert cache.put(keys, Run.of(self.layout, [0])).stored == 1
        assert cache.get(keys, Run.of(self.layout, [0])).hits == 1


def _no_pins() -> Any:
    pins: Any = type("Pins", (), {"count": 0, "_records": ()})()
    return pins


def _stored() -> RouterEvent:
    return RouterEvent(Worker(1, 0), Stored((1, 2), (1, 2)))


CLOSED, ORPHANED, FORKED = "closed", "orphaned", "forked"
"""The state of an object: it was closed, its pool was closed, or this process is a fork."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """``make`` creates one in a scene; ``use`` works while it is open, and is rejected in the
    states ``refused``; None: no state affects it.
    """

    make: Callable[[Scene], Any]
    use: Callable[[Scene, Any], object] | None = None
    refused: tuple[str, ...] = (CLOSED, ORPHANED, FORKED)
    skip: tuple[str, ...] = ()
    one_thread: bool = False


_POOLS = (ORPHANED, FORKED)


def _copy(scene: Scene, engine: Any) -> None:
    engine.gather_write(scene.plan()).wait(10)


MAKERS: dict[str, Kind] = {
    "Pool": Kind(lambda s: s.pool, lambda s, p: p.prefault() or p.handle),
    "Server": Kind(Scene.serve_user, lambda s, v: v.stat()),
    "IndexServer": Kind(
        lambda s: s.server, lambda s, v: v.index_stat(), skip=("attach_lower", "attach_journal")
    ),
    "Client": Kind(lambda s: s.client, lambda s, c: c.ping()),
    "IndexClient": Kind(lambda s: IndexClient(s.client), lambda s, m: m.stat(), _POOLS),
    "TaskClient": Kind(lambda s: TaskClient(s.client), lambda s, t: t.count(1), _POOLS),
    "KVCache": Kind(lambda s: s.cache, Scene.put_and_get),
    "OpWorker": Kind(lambda s: OpWorker(), lambda s, w: w.run(lambda _: None), (CLOSED, FORKED)),
    "Link": Kind(lambda s: s.link),
    "IoHandle": Kind(lambda s: s.handle, lambda s, p: p.handle, (FORKED,)),
    "CpuEngine": Kind(lambda s: s.cpu, _copy, _POOLS),
    "DsaEngine": Kind(lambda s: s.dsa, _copy, skip=("wait_for",)),
    "CacheMaintenance": Kind(
        lambda s: probe().maintenance("gpu", s.pool), lambda s, c: c.after_write(s.plan()), _POOLS
    ),
    "Indexer": Kind(lambda s: Indexer(workers=2, blocks=64)),
    "Tree": Kind(lambda s: Scene.tree(), skip=("store", "remove", "clear")),
}


def modules() -> Iterator[Any]:
    """Return all modules of Beluga whose requirements this environment has."""
    for package in pkgutil.walk_packages(beluga.__path__, "beluga."):
        try:
            yield importlib.import_module(package.name)
        except ImportError:
            continue


def closable() -> dict[str, set[str]]:
    """Return public classes that can be closed or stopped, and the modules that have one of that
    name.
    """
    modules_of: dict[str, set[str]] = {}
    for module in modules():
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if own and not name.startswith("_") and any(hasattr(kind, end) for end in ENDS):
                modules_of.setdefault(name, set()).add(module.__name__)
    return modules_of


def methods(owner: object, skip: tuple[str, ...] = ()) -> list[str]:
    """Return public methods and properties, and ``__enter__``, but no static or class methods."""
    names = []
    for name in dir(type(owner)):
        attribute = inspect.getattr_static(type(owner), name)
        if isinstance(attribute, staticmethod | classmethod) or name in skip:
            continue
        called = inspect.isfunction(attribute) or isinstance(attribute, property)
        if called and (not name.startswith("_") or name == "__enter__"):
            names.append(name)
    return names
