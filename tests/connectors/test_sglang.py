# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's storage backend over a pool, with a fake of SGLang and its host pools."""

from __future__ import annotations

import dataclasses
import importlib
import json
import lzma
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import damage
from sglang_parts import (
    LONG_S,
    PACKAGE,
    PAGE,
    PAGES,
    Config,
    CopiedPool,
    Flat,
    HostPool,
    Make,
    Transfer,
    indices,
    keys,
    made_backends,
)
from support.blocks import eventually
from support.memory_tier import MemoryTier, served

from beluga import IndexServer, Pool
from beluga.connectors.sglang.pages import page_buffers
from beluga.errors import ConnectorError, LayoutError
from beluga.rpc import KINDS, report
from beluga.transfer import TransferClass


@pytest.fixture
def lone_backend(monkeypatch: pytest.MonkeyPatch, pool_name: str) -> Iterator[Make]:
    yield from made_backends(monkeypatch, pool_name)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_pages_are_fetched_to_other_indices(backend: Make, layout: str, mla: bool) -> None:
    source, target = HostPool(layout, mla=mla), HostPool(layout, mla=mla)
    source.kv_buffer[:] = np.random.default_rng(1).integers(0, 256, source.kv_buffer.shape)
    rank = Config(is_mla_model=mla)
    cache, other = backend(source, rank=rank), backend(target, rank=rank)
    assert cache.batch_set_v1(keys(4), indices([1, 3, 5, 7])) == [True] * 4
    assert other.batch_exists(keys(6)) == 4
    assert other.exists(keys(1)[0])
    assert other.batch_get_v1(keys(6), indices([6, 5, 4, 3, 2, 1])) == [True] * 4 + [False] * 2
    for put, got in zip([1, 3, 5, 7], [6, 5, 4, 3], strict=True):
        assert all(map(np.array_equal, source.page(put), target.page(got)))
    assert not target.kv_buffer[..., 8:, :].any() or layout != "layer_first"


@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_pages_that_only_a_lower_tier_has_are_fetched(
    shm: Path, lone_backend: Make, remote: bool
) -> None:
    tier = MemoryTier(remote=remote)
    rows = np.random.default_rng(2).integers(0, 256, (3, 4096), dtype=np.uint8)
    with served(shm / "first", tier):
        assert lone_backend(v1=False, pool=str(shm / "first")).batch_set(
            keys(3), [Flat(row) for row in rows]
        )
        assert eventually(lambda: len(tier.blocks) == 4)  # with the generation's record
    with served(shm / "second", tier):
        cache = lone_backend(v1=False, pool=str(shm / "second"))
        assert cache.batch_exists(keys(4)) == 3
        targets = [Flat(np.zeros(4096, dtype=np.uint8)) for _ in range(3)]
        assert cache.batch_get(keys(3), targets) == targets
        assert all(np.array_equal(t.data, row) for t, row in zip(targets, rows, strict=True))
        cache.clear()
        assert cache.batch_exists(keys(3)) == 0
    with served(shm / "third", tier):
        assert lone_backend(v1=False, pool=str(shm / "third")).batch_exists(keys(3)) == 0


def test_flat_pages_are_fetched_and_distinct_from_pages_in_place(backend: Make) -> None:
    rows = np.random.default_rng(2).integers(0, 256, (3, 4096), dtype=np.uint8)
    cache, other = backend(v1=False), backend(v1=False)
    assert cache.batch_set(keys(3), [Flat(row) for row in rows])
    assert cache.set(keys(1)[0], Flat(rows[0]))
    assert other.batch_exists(keys(4)) == 3
    targets = [Flat(np.zeros(4096, dtype=np.uint8)) for _ in range(4)]
    pages = other.batch_get(keys(4), targets)
    assert pages[:3] == targets[:3]
    assert pages[3] is None
    assert all(np.array_equal(t.data, row) for t, row in zip(targets, rows, strict=False))
    assert other.get(keys(1)[0], targets[3]) is targets[3]
    assert backend(v1=True).batch_exists(keys(3)) == 0


def test_damaged_bytes_are_a_miss_and_can_be_stored_again(pool: Pool, backend: Make) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (2, 4096), dtype=np.uint8)
    cache = backend(v1=False)
    assert cache.batch_set(keys(2), [Flat(row) for row in rows])
    damage(pool, rows[1])
    targets = [Flat(np.zeros(4096, dtype=np.uint8)) for _ in range(2)]
    assert cache.batch_get(keys(2), targets) == [targets[0], None]
    assert cache.batch_exists(keys(2)) == 1
    assert cache.batch_set(keys(2), [Flat(row) for row in rows])
    assert cache.batch_get(keys(2), targets) == targets
    assert np.array_equal(targets[1].data, rows[1])


OTHERS: list[dict[str, Any]] = [
    *({"rank": Config(tp_rank=1)}, {"rank": Config(tp_size=4)}, {"rank": Config(pp_size=2)}),
    {"rank": Config(pp_rank=1, pp_size=2)},
    {"rank": Config(attn_cp_rank=1, attn_cp_size=2)},
    *({"rank": Config(model_name="other")}, {"salt": "secret"}, {"variant": "revision 2"}),
    *({"host_pool": HostPool("page_head")}, {"host_pool": HostPool(dtype="float16")}),
]


def test_pages_of_another_rank_configuration_host_pool_or_version_are_misses(backend: Make) -> None:
    def hits(**given: Any) -> int:
        cache = backend(**given)
        try:
            return int(cache.batch_exists(keys(2)))
        finally:
            cache.close()

    assert backend().batch_set_v1(keys(2), indices([0, 1])) == [True, True]
    assert hits() == 2
    for given in OTHERS:
        assert hits(**given) == 0, given
    sys.modules[f"{PACKAGE}.backend"].sglang_version = "0.5.24"  # type: ignore[attr-defined]
    assert hits() == 0


def test_the_first_rank_reports_its_loaded_tokens_to_the_server(
    monkeypatch: pytest.MonkeyPatch, server: IndexServer, backend: Make
) -> None:
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    first = backend(rank=Config(is_mla_model=True))
    other = backend(rank=Config(is_mla_model=True, tp_rank=1))
    assert first.batch_set_v1(keys(3), indices([0, 1, 2])) == [True] * 3
    for cache in (first, other):
        assert cache.batch_get_v1(keys(4), indices([4, 5, 6, 7])) == [True] * 3 + [False]
        cache.batch_get_v1(keys(1), indices([0]))  # reports the earlier ones
    figures = server.reported(KINDS.index("sglang"))
    assert figures[report.Figure.SAVED_TOKENS] == 3 * PAGE
    assert not server.reported(0)


def test_ranks_that_have_the_same_kv_share_it(backend: Make) -> None:
    source, target = HostPool(mla=True), HostPool(mla=True)
    source.kv_buffer[:] = 7
    writer = backend(source, rank=Config(is_mla_model=True))
    reader = backend(target, rank=Config(is_mla_model=True, tp_rank=3, tp_size=4))
    assert writer.batch_set_v1(keys(1), indices([2])) == [True]
    assert reader.batch_get_v1(keys(1), indices([3])) == [True]
    assert (target.page(3)[0] == 7).all()
    split = Config(is_mla_model=True, tp_size=4, dcp_size=2)
    other = dataclasses.replace(split, tp_rank=1, dcp_rank=1)
    assert backend(rank=other).batch_exists(keys(1)) == 0
    assert backend(rank=split).batch_set_v1(keys(1), indices([2])) == [True]
    assert backend(rank=dataclasses.replace(split)).batch_exists(keys(1)) == 1
    assert backend(rank=dataclasses.replace(split, tp_size=8)).batch_exists(keys(1)) == 0


def test_without_a_server_everything_misses(lone_backend: Make) -> None:
    cache, _ = hybrid(lone_backend, 1, timeout_ms=200, attached=False)
    assert cache.batch_exists(keys(2)) == 0
    assert cache.batch_set_v1(keys(2), indices([0, 1])) == [False, False]
    assert cache.batch_get_v1(keys(2), indices([0, 1])) == [False, False]
    assert cache.batch_get(keys(1), [Flat(np.zeros(64))]) == [None]
    assert not cache.set(keys(1)[0], Flat(np.zeros(64)))
    assert cache.batch_exists_v2(keys(4), REQUESTED).restorable_prefix_pages == []
    for call in (cache.batch_get_v2, cache.batch_set_v2):
        missed = call([moved("swa", [0], [0]), moved("mamba", [0], [0])])
        assert missed == {"swa": [False], "mamba": [False]}


def test_a_page_of_another_size_or_without_room_in_the_pool_is_a_miss(backend: Make) -> None:
    cache, (key,) = backend(v1=False), keys(1)
    assert not cache.set(key, Flat(np.zeros(200 << 20, dtype=np.uint8)))
    assert not cache.exists(key)
    assert cache.set(key, Flat(np.ones(4096, dtype=np.uint8)))
    assert cache.get(key, Flat(np.zeros(2048, dtype=np.uint8))) is None


def test_unknown_host_pools_are_rejected(backend: Make) -> None:
    with pytest.raises(ConnectorError, match="layout 'page_unified'"):
        backend(HostPool("page_unified"))
    with pytest.raises(ConnectorError, match="pool mamba has no pages that beluga can copy"):
        backend().register_mem_host_pool_v2(object(), "mamba")
    with pytest.raises(ConnectorError, match="has no setting adress"):
        backend(adress="here")
    no_kv = HostPool()
    no_kv.kv_buffer = None  # type: ignore[assignment]
    with pytest.raises(ConnectorError, match="with KV in it"):
        backend(no_kv)
    empty = CopiedPool()
    empty.kv_buffer = np.zeros((2, PAGES, 0, PAGE), dtype=np.uint8)
    with pytest.raises(ConnectorError, match="pages without bytes"):
        backend().register_mem_host_pool_v2(empty, "swa")
    odd = types.SimpleNamespace(page_size=1, get_page_buffer_meta=lambda _: ([1, 2, 3], [8, 8, 8]))
    with pytest.raises(LayoutError, match="3 buffers of 3 sizes for 2 pages"):
        page_buffers(odd, [0, 1], 2)


GOOD = indices([1, 2])


class Elsewhere:
    """Indices in a device's memory."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


HOSTILE: dict[str, Any] = {
    "too few": GOOD[:PAGE],
    "too many": indices([1, 2, 3]),
    "part of a page": GOOD[:-1],
    "negative": indices([-1, 2]),
    "behind the last page": indices([1, PAGES]),
    "far behind": indices([1, 1 << 40]),
    "not at a page's begin": [i + 1 for i in GOOD],
    "not in order": GOOD[::-1],
    "a hole in a page": [*GOOD[:-1], GOOD[-1] + 1],
    "floats": [float(i) for i in GOOD],
    "truths": [True] * len(GOOD),
    "two axes": [GOOD[:PAGE], GOOD[PAGE:]],
    "nothing": None,
    "text": "1" * len(GOOD),
    "elsewhere": Elsewhere(),
}


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_indices_that_are_not_whole_pages_copy_nothing(backend: Make, layout: str) -> None:
    host_pool = HostPool(layout)
    host_pool.kv_buffer[:] = 3
    cache = backend(host_pool)
    for name, wrong in HOSTILE.items():
        assert cache.batch_set_v1(keys(2), wrong) == [False, False], name
    assert cache.batch_exists(keys(2)) == 0
    assert cache.batch_set_v1(keys(2), GOOD) == [True, True]
    host_pool.kv_buffer[:] = 0
    for name, wrong in HOSTILE.items():
        assert cache.batch_get_v1(keys(2), wrong) == [False, False], name
    assert not host_pool.kv_buffer.any()
    assert cache.batch_get_v1(keys(2), np.array(GOOD, np.int32)) == [True, True]
    assert cache.attached  # the session still works


def test_pages_after_a_miss_are_fetched(backend: Make) -> None:
    source, target = HostPool(), HostPool()
    source.kv_buffer[:] = 5
    cache, other, flat = backend(source), backend(target), backend(v1=False)
    stored = [key for i, key in enumerate(keys(5)) if i != 2]
    assert cache.batch_set_v1(stored, indices([0, 1, 2, 3])) == [True] * 4
    assert other.batch_exists(keys(5)) == 2
    expected = [True, True, False, True, True]
    assert other.batch_get_v1(keys(5), indices([1, 2, 3, 4, 5])) == expected
    assert [bool((target.page(i)[0] == 5).all()) for i in range(1, 6)] == expected
    rows = [Flat(np.full(4096, i + 1, dtype=np.uint8)) for i in range(2)]
    assert flat.batch_set([keys(3)[0], keys(3)[2]], rows)
    targets = [Flat(np.zeros(4096, dtype=np.uint8)) for _ in range(3)]
    assert flat.batch_get(keys(3), targets) == [targets[0], None, targets[2]]
    assert [int(each.data[0]) for each in targets] == [1, 0, 2]


def test_a_put_that_began_before_a_clear_is_never_a_hit(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other, go, begun = backend(), backend(), threading.Event(), threading.Event()
    real = HostPool.get_page_buffer_meta

    def slow(pool: HostPool, wanted: list[int]) -> Any:
        begun.set()
        go.wait(LONG_S)
        return real(pool, wanted)

    monkeypatch.setattr(HostPool, "get_page_buffer_meta", slow)
    put = threading.Thread(target=cache.batch_set_v1, args=(keys(2), indices([0, 1])))
    put.start()
    assert begun.wait(LONG_S)
    other.clear()
    go.set()
    put.join(LONG_S)
    assert cache.batch_exists(keys(2)) == other.batch_exists(keys(2)) == 0


def test_sglang_is_not_imported_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ImportError):
        _ = importlib.import_module(PACKAGE).BelugaHiCache
    with pytest.raises(AttributeError, match="has no attribute 'BelugaHicache'"):
        _ = importlib.import_module(PACKAGE).BelugaHicache


def test_a_backend_counts_its_transfers_and_failures_and_is_reattached(
    pool: Pool, lone_backend: Make
) -> None:
    with IndexServer(pool):
        cache = lone_backend(timeout_ms=1000)
        assert cache.failure_count == 0
        assert cache.batch_set_v1(keys(1), indices([0])) == [True]
        assert cache.batch_set_v1(keys(2), indices([0, 1])) == [True, True]  # one is present
        assert cache.batch_get_v1(keys(2), indices([2, 3])) == [True, True]
        size = sum(view.nbytes for page in (0, 1) for view in HostPool().page(page))
        moved = cache.transfer_stats()
        assert size <= moved[TransferClass.OFFLOAD].bytes < 2 * size
        # the request of the pages still waits
        assert size <= moved[TransferClass.PREFETCH].bytes < 2 * size
        assert moved[TransferClass.ONBOARD].bytes < size
    assert cache.batch_exists(keys(2)) == 0
    assert cache.batch_set_v1(keys(2), indices([0, 1])) == [False, False]
    assert cache.failure_count >= 1  # the second call was not attempted
    assert not cache.attached
    with IndexServer(pool):
        assert eventually(lambda: cache.batch_exists(keys(2)) == 2, LONG_S)


def test_without_a_registered_pool_or_its_addresses_everything_misses(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise NotImplementedError("split buffers")

    made = backend(host_pool := HostPool())
    cache = type(made)(made._config)
    assert cache.attached  # otherwise the first requests of an engine would miss
    cache.mem_pool_host = HostPool()
    monkeypatch.setattr(host_pool, "get_page_buffer_meta", refuse)
    for each in (cache, made):
        assert each.batch_exists(keys(1)) == 0
        assert each.batch_set_v1(keys(1), indices([0])) == [False]
        assert each.batch_get_v1(keys(1), indices([0])) == [False]
    cache.clear()
    cache.close()
    assert not cache.attached


def test_calls_without_targets_or_sources_move_nothing(backend: Make) -> None:
    cache, page = backend(v1=False), Flat(np.ones(4096, dtype=np.uint8))
    assert cache.set(keys(1)[0], page)
    assert cache.batch_get(keys(2), [page]) == [None, None]
    assert cache.batch_get(keys(2), [page, None]) == [None, None]
    assert cache.get(keys(1)[0]) is None
    assert not cache.batch_set(keys(2), [page])
    assert not cache.batch_set(keys(2), [page, None])
    assert not cache.set(keys(2)[1])
    assert cache.batch_exists(keys(2)) == 1
    assert cache.batch_set_v1([], []) == []
    assert cache.get_stats() is None


def hybrid(backend: Make, seed: int | None = None, **named: Any) -> tuple[Any, dict[str, HostPool]]:
    """Make a backend with three kinds of pools and the KV, of random bytes or of zeros."""
    rank = named.get("rank", Config())
    pools: dict[str, HostPool] = {
        "kv": HostPool(mla=rank.is_mla_model),
        "indexer": HostPool("layer_first", mla=True),
        "swa": HostPool(),
        "mamba": CopiedPool(),
    }
    for number, pool in enumerate(pools.values()):
        if seed is not None:
            random_bytes = np.random.default_rng([seed, number])
            pool.kv_buffer[:] = random_bytes.integers(0, 256, pool.kv_buffer.shape)
    made = backend(pools["kv"], **named)
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, name)
    return made, pools


def moved(name: str, numbers: list[int], pages: list[int]) -> Transfer:
    return Transfer(name, [keys(8)[i] for i in numbers], indices(pages))


REQUESTED = [
    Transfer("indexer"),
    Transfer("swa", keys(2), hit_policy="trailing_pages"),
    Transfer("mamba", keys(1), hit_policy="trailing_pages"),
    Transfer("deepseek_v4_c4", hit_policy="block_groups"),
]


def store_hybrid(cache: Any) -> None:
    """Store six pages of KV, five of the indexer, windows at 3 and 6, states at 2, 3 and 6."""
    assert all(cache.batch_set_v1(keys(6), indices([0, 1, 2, 3, 4, 5])))
    stored = cache.batch_set_v2(
        [
            moved("indexer", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
            moved("swa", [1, 2, 4, 5], [1, 2, 4, 5]),
            moved("mamba", [1, 2, 5], [1, 2, 5]),
        ]
    )
    assert stored == {"indexer": [True] * 5, "swa": [True] * 4, "mamba": [True] * 3}


def test_a_prefix_is_restored_where_every_pool_has_its_pages(backend: Make) -> None:
    (cache, _), (other, _) = hybrid(backend, 1), hybrid(backend)
    store_hybrid(cache)
    result = other.batch_exists_v2(keys(8), REQUESTED)
    assert result.kv_hit_pages == 3
    assert result.restorable_prefix_pages == [3]
    assert result.extra_pool_hit_pages == {"kv": 6, "indexer": 5, "swa": 6, "mamba": 6}
    without = other.batch_exists_v2(keys(8), [*REQUESTED[1:3]])
    assert (without.kv_hit_pages, without.restorable_prefix_pages) == (6, [3, 6])
    assert other.batch_exists_v2(keys(8), [Transfer("draft")]).restorable_prefix_pages == []
    assert other.batch_exists_v2(keys(8)).kv_hit_pages == 6


def test_pages_of_several_pools_are_fetched_to_other_indices(backend: Make) -> None:
    (cache, source), (other, target) = hybrid(backend, 1), hybrid(backend)
    store_hybrid(cache)
    fetched = other.batch_get_v2(
        [
            moved("indexer", [0, 1, 2], [9, 8, 7]),
            moved("swa", [1, 2], [8, 7]),
            moved("mamba", [2, 3], [4, 5]),
            moved("unknown", [2], [7]),
            Transfer("swa", keys(1)),
        ]
    )
    assert fetched == {
        "indexer": [True] * 3,
        "swa": [False],
        "mamba": [True, False],
        "unknown": [False],
    }
    for name, put, got in (("indexer", 2, 7), ("swa", 1, 8), ("swa", 2, 7), ("mamba", 2, 4)):
        assert all(map(np.array_equal, source[name].page(put), target[name].page(got)))
    assert not any(part.any() for part in target["mamba"].page(5))
    assert all(not part.any() for name in target for part in target[name].page(0))


def test_a_damaged_page_of_one_pool_is_a_miss_of_that_pool(pool: Pool, backend: Make) -> None:
    (cache, source), (other, _) = hybrid(backend, 1), hybrid(backend)
    store_hybrid(cache)
    damage(pool, source["mamba"].get_data_page(2 * PAGE).data)  # type: ignore[attr-defined]
    fetched = other.batch_get_v2([moved("swa", [1, 2], [1, 2]), moved("mamba", [2], [2])])
    assert fetched == {"swa": [True, True], "mamba": [False]}
    assert other.batch_exists_v2(keys(8), REQUESTED).restorable_prefix_pages == []
    store_hybrid(cache)
    assert other.batch_exists_v2(keys(8), REQUESTED).restorable_prefix_pages == [3]


def test_states_belong_to_a_rank_and_a_page_size(backend: Make) -> None:
    """Also where the KV is the same on all ranks."""
    cache, _ = hybrid(backend, 1, rank=Config(is_mla_model=True))
    other, _ = hybrid(backend, rank=Config(is_mla_model=True, tp_rank=1))
    store_hybrid(cache)
    assert other.batch_exists_v2(keys(8), REQUESTED[:1]).kv_hit_pages == 5
    assert other.batch_exists_v2(keys(8), REQUESTED[2:3]).kv_hit_pages == 0
    same = backend(HostPool(mla=True), rank=Config(is_mla_model=True))
    same.register_mem_host_pool_v2(CopiedPool(dtype="float32"), "mamba")
    assert same.batch_exists_v2(keys(8), REQUESTED[2:3]).kv_hit_pages == 0


@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_pages_of_several_pools_are_fetched_from_a_lower_tier(
    shm: Path, lone_backend: Make, remote: bool
) -> None:
    tier = MemoryTier(remote=remote)
    with served(shm / "first", tier):
        cache, source = hybrid(lone_backend, 1, pool=str(shm / "first"))
        store_hybrid(cache)
        assert eventually(lambda: len(tier.blocks) == 6 + 5 + 4 + 3 + 1)  # the generation's record
    with served(shm / "second", tier):
        other, target = hybrid(lone_backend, pool=str(shm / "second"))
        requested = REQUESTED[1:3]
        result = other.batch_exists_v2(keys(8)[:6], requested)
        assert result.kv_hit_pages == 6
        got = other.batch_get_v2([moved("swa", [4, 5], [4, 5]), moved("mamba", [5], [5])])
        assert got == {"swa": [True, True], "mamba": [True]}
        for name in ("swa", "mamba"):
            assert all(map(np.array_equal, source[name].page(5), target[name].page(5)))


def test_a_kv_pool_without_bytes_has_the_pages_of_the_others(backend: Make) -> None:
    logical = HostPool()
    logical.kv_buffer, logical.size_per_token = None, 0  # type: ignore[assignment, attr-defined]
    cache = backend(logical)
    assert cache.batch_exists(keys(3)) == 0
    assert cache.batch_set_v1(keys(3), indices([0, 1, 2])) == [False] * 3
    cache.register_mem_host_pool_v2(HostPool(), "deepseek_v4_c4")
    assert cache.batch_set_v1(keys(3), indices([0, 1, 2])) == [True] * 3
    assert cache.batch_exists_v2(keys(3), [Transfer("deepseek_v4_c4")]).kv_hit_pages == 0
    cache.batch_set_v2([moved("deepseek_v4_c4", [0, 1], [0, 1])])
    assert cache.batch_exists_v2(keys(3), [Transfer("deepseek_v4_c4")]).kv_hit_pages == 2


RECORDED = json.loads(
    lzma.decompress(Path(__file__).with_name("sglang_calls.json.xz").read_bytes())
)


def content(key: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(key).integers(0, 256, 4096, dtype=np.uint8)


class Player:
    """Makes recorded calls with pages of known content, and checks the bytes that come back."""

    def __init__(self, backend: Any, host_pool: HostPool) -> None:
        self.backend, self.host_pool = backend, host_pool

    def batch_exists(self, numbers: list[int]) -> int:
        return int(self.backend.batch_exists(numbered(numbers), None))

    def batch_set_v1(self, numbers: list[int], pages: list[int]) -> list[bool]:
        for key, page in zip(numbers, pages, strict=True):
            for part in self.host_pool.page(page):
                part[:] = np.resize(content(key), part.shape)
        return list(self.backend.batch_set_v1(numbered(numbers), indices(pages), None))

    def batch_get_v1(self, numbers: list[int], pages: list[int]) -> list[bool]:
        self.host_pool.kv_buffer[:] = 0
        fetched = list(self.backend.batch_get_v1(numbered(numbers), indices(pages), None))
        for key, page, there in zip(numbers, pages, fetched, strict=True):
            for part in self.host_pool.page(page):
                assert np.array_equal(part, np.resize(content(key), part.shape)) == there
        return fetched

    def batch_set(self, numbers: list[int]) -> bool:
        pages = [Flat(content(key)) for key in numbers]
        return bool(self.backend.batch_set(numbered(numbers), pages))

    def batch_get(self, numbers: list[int]) -> list[bool]:
        targets = [Flat(np.zeros(4096, dtype=np.uint8)) for _ in numbers]
        tensors = self.backend.batch_get(numbered(numbers), targets)
        for key, target, tensor in zip(numbers, targets, tensors, strict=True):
            assert np.array_equal(target.data, content(key)) == (tensor is not None)
        return [tensor is not None for tensor in tensors]

    def clear(self) -> None:
        self.backend.clear()


def numbered(numbers: list[int]) -> list[str]:
    return [keys(numbers[-1] + 1)[i] for i in numbers]


@pytest.mark.parametrize("way", RECORDED)
def test_the_recorded_calls_have_the_recorded_results(backend: Make, way: str) -> None:
    host_pool = HostPool()
    player = Player(backend(host_pool, v1=way == "in place"), host_pool)
    for name, *arguments, result in RECORDED[way]:
        assert (name, getattr(player, name)(*arguments)) == (name, result)


@pytest.mark.parametrize("way", RECORDED)
def test_the_recorded_calls_miss_without_a_pool_and_end(lone_backend: Make, way: str) -> None:
    host_pool = HostPool()
    player = Player(lone_backend(host_pool, v1=way == "in place", attached=False), host_pool)
    for name, *arguments, _ in RECORDED[way]:
        if name != "clear":
            cached = getattr(player, name)(*arguments)
            assert not any(cached if isinstance(cached, list) else [cached])
