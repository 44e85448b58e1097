# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A cache rejects wrong arguments before it calls the server, whatever the pool contains; and no
argument ends the interpreter.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import role
from support.soft_dsa import soft_engine

from beluga import IndexServer, KVCache, Pool, coherence
from beluga.errors import BadValueError, LayoutError, RpcError
from beluga.index import Grant, IndexClient
from beluga.index.client import Pins
from beluga.kvcache import Run
from beluga.rpc import Client
from beluga.transfer import (
    CHUNK,
    PIECE,
    BlockLayout,
    CopySettings,
    CpuEngine,
    Plan,
    Slots,
    View,
    arrangements,
    plan_blocks,
    plan_rows,
)
from tests.kvcache.conftest import digests

Case = tuple[str, Callable[[], object]]
HUGE = 1 << 62


def keys(count: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(count)]


def array(count: int = 2, length: int = 4096) -> Any:
    return np.zeros((count, length), np.uint8)


def objects(*shape: int) -> Any:
    return np.array([object() for _ in range(int(np.prod(shape)))], object).reshape(shape)


def run_of(memory: Any, **changed: Any) -> Run:
    count, length = memory.shape
    rows = np.zeros((count, 2), np.uint64)
    rows[:, 0] = memory.ctypes.data + np.arange(count) * length
    rows[:, 1] = length
    fields = {
        "count": count,
        "length": length,
        "fragment_count": 1,
        "fragments": rows,
        "owners": [memory],
    }
    return Run(**{**fields, **changed})


def rows_of(memory: Any, sizes: list[int]) -> Any:
    rows = np.zeros((len(sizes), 2), np.uint64)
    rows[:, 0], rows[:, 1] = memory.ctypes.data, sizes
    return rows


def runs() -> Iterator[tuple[str, Callable[[], Run], int]]:
    memory = array()
    wrong: dict[str, dict[str, Any]] = {
        "starting at 1": {"start": 1},
        "starting at a billion": {"start": 10**9},
        "starting before": {"start": -1},
        "of more blocks than rows": {"count": 1000},
        "of more fragments than rows": {"fragment_count": 1000},
        "without fragments": {"fragment_count": 0},
        "longer than its rows": {"length": 1 << 20},
        "shorter than its rows": {"length": 64},
        "without bytes": {"length": 0},
        "of 64-bit length": {"length": HUGE},
        "of floats": {"fragments": np.zeros((2, 2))},
        "of signed": {"fragments": np.zeros((2, 2), np.int64)},
        "of objects": {"fragments": objects(2, 2)},
        "of columns": {"fragments": np.asfortranarray(rows_of(memory, [4096, 4096]))},
        "every other row": {"fragments": rows_of(memory, [4096] * 4)[::2]},
        "of a list": {"fragments": [[memory.ctypes.data, 4096]] * 2},
        "at address 0": {"fragments": np.array([[0, 4096]] * 2, np.uint64)},
        "over the end": {"fragments": np.array([[(1 << 64) - 64, 4096]] * 2, np.uint64)},
        "of sizes that wrap": {
            "fragment_count": 2,
            "fragments": rows_of(memory, [(1 << 64) - 64, 4160] * 2),
        },
    }
    for name, changed in wrong.items():
        yield f"run {name}", lambda changed=changed: run_of(memory, **changed), 0


def blocks() -> Iterator[tuple[str, Callable[[], Any]]]:
    closed = memoryview(bytearray(4096))
    closed.release()
    named = np.zeros((2, 4), [("O", "<f4"), ("n", "<u2")])
    yield "objects in an array", lambda: objects(2, 512)
    yield "objects in arrays", lambda: [objects(512), objects(512)]
    yield "objects in fragments", lambda: [[objects(8), objects(8)]] * 2
    yield "objects in a view", lambda: [memoryview(objects(512))] * 2
    yield "objects in a struct", lambda: [np.zeros(64, [("a", "O"), ("b", "u8")])] * 2
    yield "objects of ctypes", lambda: [(ctypes.py_object * 512)()] * 2
    yield "a field called O", lambda: [memoryview(named[0]), memoryview(named[1])]
    yield "read-only", lambda: [bytes(4096)] * 2
    yield "text", lambda: ["a" * 4096] * 2
    yield "none", lambda: [None, None]
    yield "numbers", lambda: [1, 2]
    yield "no bytes", lambda: [b"", b""]
    yield "no fragments", lambda: [[], []]
    yield "a released view", lambda: [closed, closed]
    yield "columns", lambda: [np.zeros((64, 64), np.uint8)[:, 0]] * 2
    yield "backwards", lambda: [np.zeros(4096, np.uint8)[::-1]] * 2
    yield "a matrix backwards", lambda: array(2, 8192)[:, ::-2]
    yield "rows of no bytes", lambda: np.zeros((2, 0), np.uint8)
    yield "one number", lambda: np.uint8(1)
    yield "too long", lambda: np.lib.stride_tricks.as_strided(array(), (2, 1 << 40), (4096, 1))


def plans(pool: Pool) -> Iterator[tuple[str, Callable[[], Plan]]]:
    memory, start = array(), pool.geometry.data_offset

    def one(**changed: Any) -> Plan:
        plan = plan_blocks(
            np.array([[memory.ctypes.data]], np.uint64), [8192], [start], chunk_size=4096
        )
        for name, value in changed.items():
            rows, _, field = name.partition("__")
            if field:
                getattr(plan, rows)[field][-1] = value
            else:
                object.__setattr__(plan, rows, value)
        return plan

    for value in (1, 64, 1 << 31, HUGE, (1 << 64) - 64):
        yield f"plan with pieces at {value:#x}", lambda value=value: one(pieces__offset=value)
        yield f"plan with chunks at {value:#x}", lambda value=value: one(chunks__offset=value)
    for value in (0, 1, (1 << 32) - 1):
        yield f"plan with pieces of {value}", lambda value=value: one(pieces__length=value)
        yield f"plan with chunks of {value}", lambda value=value: one(chunks__length=value)
        yield f"plan with chunk {value}", lambda value=value: one(pieces__chunk=value + 7)
        yield f"plan with first {value}", lambda value=value: one(chunks__first=value + 7)
    yield "plan with few checksums", lambda: one(checksums=np.zeros(1, np.uint32))
    yield "plan with wide checksums", lambda: one(checksums=np.zeros(2, np.uint64))
    yield "plan with objects for checksums", lambda: one(checksums=objects(2))
    yield "plan with thin checksums", lambda: one(checksums=np.zeros(4, np.uint32)[::2])
    yield "plan with pieces for chunks", lambda: one(chunks=np.zeros(2, PIECE))
    yield "plan with objects for pieces", lambda: one(pieces=objects(2))
    yield "plan of many pieces", lambda: one(pieces=np.zeros(9, PIECE))
    yield "plan of no chunks", lambda: one(chunks=np.zeros(0, CHUNK))
    yield "plan with wild bases", lambda: one(piece_base=(1 << 32) - 1, chunk_base=(1 << 32) - 1)
    yield "plan with bases that are none", lambda: one(piece_base=-1)


def wild_plans() -> Iterator[Case]:
    memory = array()
    at = np.array([[memory.ctypes.data]], np.uint64)
    for offset in (-64, 63, HUGE, -HUGE):
        yield f"blocks at {offset}", lambda offset=offset: plan_blocks(at, [4096], [offset])
    for size in (0, -1, HUGE):
        yield f"blocks of {size}", lambda size=size: plan_blocks(at, [size], [0])
    yield "blocks of two sizes", lambda: plan_blocks(at, [64, 64], [0])
    for block, place, size in ((1, 0, 64), (-1, 0, 64), (0, 4096, 64), (0, -1, 64), (0, 0, HUGE)):
        yield (
            f"rows {block} {place} {size}",
            lambda row=(block, place, size): plan_rows(
                at[0], *([n] for n in row), offsets=[0], length=4096
            ),
        )


def settings(pool: Pool) -> Iterator[Case]:
    wild = (
        {"threads": 10**6},
        {"chunk_size": 1 << 40},
        {"chunk_size": 1 << 32},
        {"threads": 1 << 40},
    )
    for options in (*wild, {"read_class": 77}, {"write_class": -1}, {"timeout_s": -1.0}):

        def use(options: Any = options) -> None:
            with KVCache(pool, namespace="misuse", engine="cpu", **options) as cache:
                cache.put(keys(2), array())
                cache.get(keys(2), array())

        yield f"a cache with {options}", use

    def plan() -> Plan:
        return plan_blocks(
            np.array([[memory.ctypes.data]], np.uint64), [8192], [pool.geometry.data_offset]
        )

    memory = array()
    most = dict.fromkeys(("part", "window", "step", "ahead", "past", "head", "direct"), 2**32 - 1)
    for tune in (most, dict.fromkeys(most, 0), {**most, "step": -1}):
        yield (
            f"copies set to {sorted(set(tune.values()))}",
            lambda tune=tune: CpuEngine(pool, 3, settings=CopySettings(**tune)).scatter_read(
                plan()
            ),
        )
    yield "a million threads", lambda: CpuEngine(pool, 10**6).scatter_read(plan()).wait()


def index(cache: KVCache) -> Iterator[Case]:
    client = IndexClient(cache.client)
    grant = Grant(
        state=3, offset=HUGE, length=HUGE, generation=7, block=2**32 - 1, status=0, key=(1, 2)
    )  # type: ignore[arg-type]
    wrong: dict[str, Any] = {
        "one number each": np.zeros(4, np.uint64),
        "three numbers each": np.zeros((4, 3), np.uint64),
        "one column": np.zeros((4, 1), np.uint64),
        "signed": np.zeros((4, 2), np.int64),
        "bytes": np.zeros((4, 2), np.uint8),
        "floats": np.zeros((4, 2)),
        "objects": objects(4, 2),
        "a cube": np.zeros((4, 2, 2), np.uint64),
        "a list": [[1, 2]],
    }
    for name, words in wrong.items():
        for call in (client.lookup, client.pin, client.remove):
            yield f"{call.__name__} of keys: {name}", lambda call=call, words=words: call(words)
        yield f"reserve of keys: {name}", lambda words=words: client.reserve(words, length=4096)
        if name != "a list":
            yield f"cache.lookup of keys: {name}", lambda words=words: cache.lookup(words)
    good = np.zeros((1, 2), np.uint64)
    for length in (-1, 1 << 32, HUGE):
        yield f"reserve of {length}", lambda length=length: client.reserve(good, length=length)
    for call in (client.commit, client.abort, client.release):
        yield f"{call.__name__} of a stranger's", lambda call=call: call([grant])
    many = cache.pin(keys(1))
    yield "more pins than there are", lambda: client.unpin(Pins(10**6, many._records))
    yield "fewer pins than none", lambda: client.unpin(Pins(-1, many._records))


def buffers() -> Iterator[Case]:
    target = objects(8)
    yield "ntstore over objects", lambda: coherence.ntstore_copy(target, bytes(64))
    yield "ntstore over bytes", lambda: coherence.ntstore_copy(bytes(64), bytes(64))
    yield "ntstore of two sizes", lambda: coherence.ntstore_copy(bytearray(64), bytes(65))
    yield "crc of columns", lambda: coherence.crc32c(np.zeros((8, 8))[:, 0])
    yield "crc from nothing", lambda: coherence.crc32c(b"", -1)
    yield "flush of nothing", lambda: coherence.flush(b"")


def tokens(cache: KVCache) -> Iterator[Case]:
    layout = arrangements.vllm([View.of(np.zeros((2, 3, 4, 2, 8), np.uint8))])
    for slots in ([12], [-1], [HUGE], [0.5], objects(1)):
        yield (
            f"slot {slots[0]!r:.20}",
            lambda slots=slots: cache.get_tokens(keys(1), [0], Slots(layout, slots)),
        )
    for ids in ([3], [-1], [HUGE], [[0]], [0.5]):
        yield f"blocks {ids}", lambda ids=ids: Run.of(layout, ids)
    yield "a view of objects", lambda: View.of(objects(2, 2))


def cases(pool: Pool) -> Iterator[Case]:
    caches = [
        KVCache(pool, namespace="misuse", engine=engine)
        for engine in ("cpu", CpuEngine(pool, 2), soft_engine(pool))
    ]
    for cache in caches:
        assert cache.put(keys(2), array()).refused == 0
    for number, cache in enumerate(caches):
        for name, make, _ in runs():
            yield (
                f"{number}: put a {name}",
                lambda make=make, cache=cache: cache.put(keys(9)[: make().count], make()),
            )
            yield (
                f"{number}: get a {name}",
                lambda make=make, cache=cache: cache.get(keys(9)[: make().count], make()),
            )
        for name, made in blocks():
            yield (
                f"{number}: put {name}",
                lambda made=made, cache=cache: cache.put(keys(4)[2:], made()),
            )
            yield f"{number}: get {name}", lambda made=made, cache=cache: cache.get(keys(2), made())
        yield f"{number}: few keys", lambda cache=cache: cache.put(keys(1), array())
    for engine in (CpuEngine(pool, 2), soft_engine(pool)):
        for name, planned in plans(pool):
            for start in (engine.gather_write, engine.scatter_read):
                yield (
                    f"{engine.name}: {start.__name__} a {name}",
                    lambda planned=planned, start=start: start(planned()).wait(),
                )
    yield from wild_plans()
    yield from settings(pool)
    yield from index(caches[0])
    yield from buffers()
    yield from tokens(caches[0])
    for cache in caches:
        cache.close()
        yield "a closed cache", lambda cache=cache: cache.put(keys(2), array())
        yield "a closed cache's get", lambda cache=cache: cache.get(keys(2), array())


def misuse(folder: str) -> None:
    """Print the name of each case before it, and its exception afterwards, so that the output shows
    which case ended the process.
    """
    size, path = 48 << 20, Path(folder) / "a"
    with (
        Pool.create([path], device_size=size, coherence="hardware", sparse=True) as pool,
        IndexServer(pool),
    ):
        for name, call in cases(pool):
            print(f"{name} ...", end=" ", flush=True)
            try:
                call()
            except Exception as error:
                print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
            else:
                print("done", flush=True)
        with KVCache(pool, namespace="after") as cache:
            assert cache.put(keys(2), array()).stored == 2
            assert cache.get(keys(2), array()).hits == 2
    print("all ended")


SHAPE = (2, 3, 4, 2, 8)  # K and V, blocks, tokens, heads, bytes


def layout_of(array: Any) -> BlockLayout:
    return arrangements.vllm([View.of(array)])


@pytest.fixture
def target() -> BlockLayout:
    return layout_of(np.zeros(SHAPE, np.uint8))


@pytest.mark.parametrize(
    ("count", "tokens", "slots", "match"),
    [
        (1, [4], [0], "tokens 4 to 4"),
        (1, [-1], [0], "tokens -1"),
        (1, [0], [12], "slots 12 to 12"),
        (1, [0], 0, "slots of shape"),
        (1, [0, 1], [0], "slots of shape"),
        (1, np.array([True, False, True, False]), [0, 1, 2, 3], "whole numbers"),
        (1, [0.5], [0], "whole numbers"),
        (1, [0], np.array([True]), "whole numbers"),
        (2, [0], [0], "give each its block"),
        (2, [[0, 0], [1]], [0, 1], "whole numbers"),
        (2, [[-1, 0], [0, 0]], [0, 1], "blocks -1 to 0; their numbers"),
        (2, [[1, 0], [2, 0]], [0, 1], "blocks 1 to 2; their numbers"),
    ],
)
def test_wrong_tokens_are_reported_even_in_an_empty_pool(
    cache: KVCache, target: BlockLayout, count: int, tokens: Any, slots: Any, *, match: str
) -> None:
    with pytest.raises(LayoutError, match=match):
        cache.get_tokens(digests(count), tokens, Slots(target, slots))


def test_an_empty_list_of_tokens_fetches_nothing(cache: KVCache, target: BlockLayout) -> None:
    assert cache.put(digests(2), Run.of(layout_of(np.ones(SHAPE, np.uint8)), [0, 1])).stored == 2
    for tokens in ([], np.empty((0, 2))):
        assert cache.get_tokens(digests(2), tokens, Slots(target, [])).hits == 2


def test_read_only_memory_is_rejected_as_a_target_of_a_cache(cache: KVCache) -> None:
    content = bytes(np.prod(SHAPE))
    frozen = layout_of(np.frombuffer(content, np.uint8).reshape(SHAPE))
    cache.put(digests(1), Run.of(layout_of(np.ones(SHAPE, np.uint8)), [0]))
    with pytest.raises(LayoutError, match="read-only"):
        cache.get(digests(1), Run.of(frozen, [0]))
    with pytest.raises(LayoutError, match="read-only"):
        cache.get_tokens(digests(1), [0], Slots(frozen, [0]))
    assert content == bytes(len(content))
    assert cache.put(digests(1, start=1), Run.of(frozen, [0])).stored == 1


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2, 2)])
def test_keys_must_be_pairs(cache: KVCache, shape: tuple[int, ...]) -> None:
    keys = np.zeros(shape, np.uint64)
    for call in (cache.lookup, cache.remove, cache.pin):
        with pytest.raises(ValueError, match=r"shape \(count, 2\)"):
            call(keys)
    with pytest.raises(ValueError, match="shape"):
        cache.put(keys, [b"x"] * len(keys))


HARMLESS = (
    *(f"{cache}: {call} a field called O" for cache in range(3) for call in ("put", "get")),
    *(f"{cache}: put read-only" for cache in range(3)),
    "a cache with {'threads': 1000000}",
    "a million threads",
    "copies set to [4294967295]",
    "copies set to [0]",
    "commit of a stranger's",  # each is refused by its status
    "abort of a stranger's",
    "release of a stranger's",
    "more pins than there are",
    "fewer pins than none",
    "flush of nothing",
)
KINDS = {
    *("BadTypeError", "BadValueError", "LayoutError", "RpcError"),
    *("ValueError", "TypeError", "OverflowError"),
}


def test_invalid_arguments_to_c_do_not_crash_the_interpreter(shm: Path) -> None:
    """Every case is rejected unless it is harmless."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    ended = role.run(misuse, shm, timeout_s=200, env=environment)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, f"{lines[-1:]} ended it: {ended.stderr[-2000:]}"
    assert lines.pop() == "all ended"
    results = dict(line.split(" ... ", 1) for line in lines)
    done = {name for name, what in results.items() if what == "done"}
    assert done == set(HARMLESS)
    kinds = {what.partition(":")[0] for what in results.values()} - {"done"}
    assert kinds == KINDS


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"chunk_size": 100}, {"chunk_size": -64}])
def test_invalid_settings_of_a_cache_are_rejected(
    pool: Pool, server: IndexServer, wrong: dict[str, Any]
) -> None:
    with pytest.raises(LayoutError):
        KVCache(pool, namespace="wrong", **wrong)


@pytest.mark.parametrize("closed", ["cache", "pool"])
def test_calls_after_a_close_name_the_mend(shm: Path, closed: str) -> None:
    pool = Pool.create([shm / "a"], device_size=16 << 20, sparse=True)
    with IndexServer(pool):
        cache = KVCache(pool, namespace={"model": "m", "cache_salt": "secret"})
        cache.close() if closed == "cache" else pool.close()
        calls = ("lookup", "remove", "pin", "hint", "onboard", "prefetch")
        for call in (*(getattr(cache, name) for name in calls), lambda k: cache.put(k, array())):
            with pytest.raises(RpcError, match="this client is closed; make a new one"):
                call(keys(2))
        assert "<Pool " in repr(cache)
        assert "secret" not in repr(cache)
        assert repr(cache.client) == f"<Client of {pool!r}>"
    pool.close()
    for make in (Client, IndexServer, lambda closed_pool: KVCache(closed_pool, namespace="m")):
        with pytest.raises(BadValueError, match="the pool is closed; open it again"):
            make(pool)
