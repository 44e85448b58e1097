# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Values of wrong types at every entry of the public API: a typed error in one line, and objects
that cannot leave their process.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beluga import Client, IndexServer, KVCache, Namespace, Pool
from beluga.errors import BadTypeError, BelugaError, GreenThreadsError, NoServerError
from beluga.kvcache import hash_keys
from beluga.rpc import Quota
from beluga.threads import Thread

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/dev"))
from test_api import NAMES

WRONG: list[Any] = [
    *(None, 3, -1, 2.5, 10**30, float("nan"), True, "text", b"bytes", object(), lambda *_: 0),
    *([None], ["text"], [3], [b""], [[]], {}, {"a": 1}, (), {3: 1}),
    *(np.zeros(3), np.zeros((2, 2)), np.int64(5), np.zeros(0, object)),
]
KEYS = [b"k" * 16, b"l" * 16]
ROWS = np.ones((2, 64), np.uint8)


@pytest.fixture(scope="module")
def folder(memory_root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="beluga-test-", dir=memory_root) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    with Pool.create([folder / "a"], device_size=16 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def cache(pool: Pool) -> Iterator[KVCache]:
    with IndexServer(pool), KVCache(pool, namespace="x") as made:
        made.put(KEYS, ROWS)
        yield made


def calls(pool: Pool, cache: KVCache, folder: Path) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "put keys", lambda wrong: cache.put(wrong, ROWS)
    yield "put sources", lambda wrong: cache.put(KEYS, wrong)
    yield "put a source", lambda wrong: cache.put(KEYS, [wrong, wrong])
    yield "get keys", lambda wrong: cache.get(wrong, ROWS.copy())
    yield "get targets", lambda wrong: cache.get(KEYS, wrong)
    yield "get tokens", lambda wrong: cache.get_tokens(KEYS, [[0, 0]], wrong)
    yield "onboard for", lambda wrong: cache.onboard(KEYS, wait_s=wrong)
    for name in ("lookup", "remove", "keys", "onboard"):
        yield name, getattr(cache, name)
    for name in ("namespace", "host", "timeout_s", "engine", "threads", "link", "chunk_size"):
        yield (
            f"cache with {name}",
            lambda wrong, name=name: KVCache(
                cache.client, **{"namespace": "x", name: wrong}
            ).close(),
        )
    yield "cache of", lambda wrong: KVCache(wrong, namespace="x")
    yield "client of", Client
    yield "client that waits", lambda wrong: Client(pool, timeout_s=wrong).close()
    yield "call number", cache.client.call
    yield "call with", lambda wrong: cache.client.call(1, wrong)
    yield "server of", IndexServer
    for name in ("host", "heartbeat_lost_s", "quota", "eviction"):
        yield (
            f"server with {name}",
            lambda wrong, name=name: IndexServer(pool, **{name: wrong}).stop(),
        )
    yield "namespace", Namespace
    yield "namespace of", Namespace.of
    yield "namespace field", lambda wrong: Namespace({"a": wrong})
    yield "salt", lambda wrong: Namespace({"a": 1}, salt=wrong)
    yield "hash_keys", hash_keys
    yield "hash_keys of", lambda wrong: hash_keys([wrong])
    yield "quota", lambda wrong: Quota(grants=wrong)
    settings = {"device_size": 16 << 20, "force": True}
    for name in set(inspect.signature(Pool.create).parameters) - {"paths", "progress"}:
        yield (
            f"pool with {name}",
            lambda wrong, name=name: Pool.create(
                [folder / "b"], **{**settings, name: wrong}
            ).close(),
        )
    yield "open", lambda wrong: Pool.open([wrong])
    yield "destroy", lambda wrong: Pool.destroy([wrong])


def test_a_value_of_a_wrong_type_is_a_typed_error_in_one_line(
    pool: Pool, cache: KVCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    untyped = []
    for name, call in calls(pool, cache, folder):
        for wrong in WRONG:
            try:
                call(wrong)
            except BelugaError as error:
                if "\n" in str(error):
                    untyped.append((name, f"{wrong!r:.30}", str(error)))
            except Exception as error:
                untyped.append((name, f"{wrong!r:.30}", repr(error)))
    assert untyped == [], untyped[:3]
    assert int(cache.lookup(KEYS)) <= 2  # the session still works


def test_numpy_integers_give_the_same_namespace() -> None:
    assert Namespace({"tp": np.int64(2)}).digest == Namespace({"tp": 2}).digest
    assert type(Namespace({"tp": np.int64(2)}).fields["tp"]) is int


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_objects_of_one_process_can_be_neither_copied_nor_pickled(
    pool: Pool, cache: KVCache, way: Callable[[object], object]
) -> None:
    for one in (pool, cache, cache.client, IndexServer(pool)):
        with pytest.raises(BadTypeError, match=f"a {type(one).__name__} belongs to the process"):
            way(one)


def test_an_unstarted_server_is_reported(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=16 << 20) as pool:
        server = IndexServer(pool)
        with pytest.raises(NoServerError, match=r"IndexServer that this process made .* start"):
            KVCache(pool, namespace="x")
        server.stop()
        with pytest.raises(NoServerError, match="start one with 'beluga serve'"):
            KVCache(pool, namespace="x")


@pytest.mark.parametrize("arguments", [["--help"], ["size", "--help"], ["--version"]])
def test_the_package_runs_as_a_module(arguments: list[str]) -> None:
    as_module = [sys.executable, "-m", "beluga", *arguments]
    ran = subprocess.run(as_module, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "beluga" in ran.stdout


def test_threads_that_are_greenlets_are_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_ident() -> int:
        return 1

    get_ident.__module__ = "gevent.thread"
    with Pool.create([shm / "a"], device_size=16 << 20) as pool, monkeypatch.context() as patched:
        server = IndexServer(pool)
        patched.setattr("threading.get_ident", get_ident)
        with pytest.raises(GreenThreadsError, match=r"gevent makes greenlets .*beluga serve"):
            server.start()
        with pytest.raises(GreenThreadsError):
            Thread(target=print).start()
        patched.undo()
        server.start()  # the failed start allocated nothing
        server.stop()


@pytest.mark.parametrize(
    ("library", "patch"),
    [("gevent.monkey", "patch_all()"), ("eventlet", "monkey_patch()")],
)
def test_a_server_with_patched_threading_raises(shm: Path, library: str, patch: str) -> None:
    pytest.importorskip(library)
    program = (
        f"import {library}; {library}.{patch}\n"
        "from beluga import IndexServer, Pool\n"
        "from beluga.errors import GreenThreadsError\n"
        f"with Pool.create([{str(shm / 'a')!r}], device_size=16 << 20) as pool:\n"
        "    try:\n"
        "        with IndexServer(pool): pass\n"
        "    except GreenThreadsError as error: print('refused', error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout.startswith(f"refused {library.partition('.')[0]}"), ran.stderr


def test_only_one_module_starts_threads() -> None:
    folder = Path(inspect.getfile(Pool)).parent.parent
    found = [
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if "threading.Thread(" in path.read_text()
    ]
    assert found == []


def test_a_block_with_an_object_has_an_object_of_its_own_class() -> None:
    """A type checker gave ``with IndexServer(pool) as server`` the type of its base class."""
    entries = [
        (value, vars(value)[name])
        for value in NAMES.values()
        for name in ("__enter__", "__aenter__")
        if inspect.isclass(value) and name in vars(value)
    ]
    assert len(entries) >= 4
    wrong = [value for value, enter in entries if enter.__annotations__["return"] != "Self"]
    assert wrong == []
