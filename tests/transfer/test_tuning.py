# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Settings of the CPU's copies reach C, give the same bytes, and survive damaged files."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulation import fewer

from beluga import coherence, config
from beluga._ffi import lib
from beluga.errors import ChecksumError, EngineUnavailableError
from beluga.index import IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.transfer import CopySettings, CpuEngine, Plan, plan_blocks, tuned
from beluga.transfer import cpu as tuning
from beluga.transfer.calibrate.calibration_cache import CalibrationCache
from beluga.transfer.cpu import Shape, Trial, measure

DEFAULT = CopySettings.default()
SIZES = st.sampled_from([0, 1, 63, 64, 100, 1280, 4096, 65536, 1 << 20, 0xFFFFFFFF])
ANY = st.builds(CopySettings, **{field.name: SIZES for field in dataclasses.fields(CopySettings)})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache folder, without results from before."""
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(tuning, "_FOUND", {})
    monkeypatch.delenv("BELUGA_TUNING", raising=False)
    return tmp_path / "cache"


@settings(max_examples=fewer(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    given=ANY,
    threads=st.sampled_from([1, 3]),
    sizes=st.lists(st.sampled_from([1, 63, 64, 300, 1280, 20480, 300_000]), min_size=1, max_size=9),
    chunk=st.sampled_from([0, 64, 4096, 16384]),
)
def test_all_settings_give_the_same_bytes_and_checksums(
    pool: Pool, given: CopySettings, threads: int, sizes: list[int], chunk: int
) -> None:
    engine, offset = (
        CpuEngine(pool, threads, settings=given),
        pool.geometry.data_offset + (2 << 20) - 4096,
    )
    source = np.random.default_rng(7).integers(0, 256, sum(sizes) + 5 * len(sizes), np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum([0, *sizes[:-1]]) + 5 * np.arange(len(sizes))
    written, read = (
        plan_blocks(
            np.array([memory.ctypes.data + starts], np.uint64),
            np.array(sizes),
            np.array([offset]),
            chunk_size=chunk,
        )
        for memory in (source, target)
    )
    content = b"".join(
        source[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True)
    )
    engine.gather_write(written).wait()
    if written.checksums is not None and read.checksums is not None:
        wanted = [
            coherence.crc32c(content[at : at + chunk]) for at in range(0, len(content), chunk)
        ]
        assert written.checksums.tolist() == wanted
        read.checksums[:] = written.checksums
    engine.scatter_read(read).wait()
    found = b"".join(
        target[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True)
    )
    assert found == content
    assert target.sum(dtype=np.int64) == np.frombuffer(found, np.uint8).sum(dtype=np.int64)
    if read.checksums is not None:
        read.checksums[-1] ^= 1
        with pytest.raises(ChecksumError):
            engine.scatter_read(read).wait()


def test_rows_of_a_block_are_read_with_any_settings(pool: Pool) -> None:
    content = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8)
    offset = np.array([pool.geometry.data_offset])
    plan = plan_blocks(
        np.array([[content.ctypes.data]], np.uint64), np.array([200_000]), offset, chunk_size=4096
    )
    CpuEngine(pool, 1).gather_write(plan).wait()
    target = np.zeros(50 * 500, np.uint8)
    pieces = np.zeros(50, plan.pieces.dtype)
    pieces["address"] = target.ctypes.data + 500 * np.arange(50)
    pieces["offset"] = offset + 4096 * np.arange(50) + 700 % 4096
    pieces["length"], pieces["chunk"] = 500, np.arange(50)
    pieces = pieces[:48]
    chunks = plan.chunks[:48].copy()
    chunks["first"] = np.arange(48)
    assert plan.checksums is not None
    wanted = b"".join(content[at : at + 500].tobytes() for at in 4096 * np.arange(48) + 700)
    for odd in (0, 64, 8192, 0xFFFFFFFF):
        given = CopySettings(*[odd] * len(dataclasses.fields(CopySettings)))
        for sums in (None, plan.checksums[:48].copy()):
            target[:] = 0
            CpuEngine(pool, 3, settings=given).scatter_read(
                Plan(pieces, chunks, sums, sparse=True)
            ).wait()
            assert target[: 48 * 500].tobytes() == wanted


def test_settings_reach_c() -> None:
    given = CopySettings(*range(1, 1 + len(dataclasses.fields(CopySettings))))
    struct = given.struct(9)
    for field in dataclasses.fields(CopySettings):
        assert getattr(struct, field.name) == getattr(given, field.name)
    assert struct.threads == 9


def test_an_engine_and_a_cache_use_the_stored_settings(
    pool: Pool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = dataclasses.replace(DEFAULT, window=12345)
    CalibrationCache(pool).write("settings", dataclasses.asdict(tuned))
    monkeypatch.setattr(tuning, "measure", lambda *_: pytest.fail("kept settings are measured"))
    seen = []
    struct = CopySettings.struct
    monkeypatch.setattr(
        CopySettings, "struct", lambda self, threads: (seen.append(self), struct(self, threads))[1]
    )
    source = np.ones(4096, np.uint8)
    plan = plan_blocks(
        np.array([[source.ctypes.data]], np.uint64),
        np.array([4096]),
        np.array([pool.geometry.data_offset]),
    )
    engine = CpuEngine(pool)
    assert seen == []  # nothing is measured before the first copy
    engine.gather_write(plan).wait()
    engine.gather_write(plan).wait()
    with IndexServer(pool), KVCache(pool, namespace="tuned") as kv:
        kv.put([b"k" * 16], [source])
    assert seen == [tuned, tuned]


def test_a_machine_is_tuned_once(pool: Pool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times, places = [], []
    measured = measure

    def counted(scratch: Pool, offset: int) -> CopySettings:
        times.append(scratch.devices[0].coherence)
        places.append(scratch.devices[0].path.parent)
        return measured(scratch, offset, budget_s=0.05)

    monkeypatch.setattr(tuning, "measure", counted)
    found = tuned(pool)
    assert tuned(pool) == found
    assert times == ["software"]
    assert CopySettings.of(CalibrationCache(pool).read("settings")) == found
    monkeypatch.setattr(tuning, "_FOUND", {})  # another process
    assert tuned(pool) == found
    assert len(times) == 1
    CalibrationCache(pool).path.write_text("{")
    monkeypatch.setattr(tuning, "_FOUND", {})
    tuned(pool)
    assert len(times) == 2
    assert not any(place.exists() for place in places)


def test_settings_that_cannot_be_stored_are_not_measured(
    pool: Pool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path / "file" / "cache")
    assert tuned(pool) == DEFAULT
    monkeypatch.setattr(config, "cache_dir", lambda: cache)
    monkeypatch.setenv("BELUGA_TUNING", "off")
    assert tuned(pool) == DEFAULT
    assert not cache.exists()


def test_a_value_other_than_on_or_off_is_an_error(
    pool: Pool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELUGA_TUNING", "of")
    with pytest.raises(EngineUnavailableError, match="BELUGA_TUNING=of is not on or off"):
        tuned(pool)


def test_copies_work_without_a_home_folder(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(CalibrationCache, "can_write", lambda _: False)  # the / of another user
    monkeypatch.setattr(tuning, "_FOUND", {})
    assert tuned(pool) == DEFAULT
    assert (config.cache_dir(), config.state_dir()) == (
        Path("/.cache/beluga"),
        Path("/.local/state/beluga"),
    )


@pytest.mark.parametrize("content", ["", "[", "[]", "null", '{"version": 2}', "[" * 100_000])
def test_a_damaged_file_counts_as_missing(pool: Pool, cache: Path, content: str) -> None:
    kept = CalibrationCache(pool)
    kept.write("settings", {})
    kept.path.write_text(content)
    assert kept.read("settings") is None
    kept.write("settings", {"a": 1})
    assert kept.read("settings") == {"a": 1}


@pytest.mark.parametrize(
    "content",
    [None, 7, [], {}, {"window": 1}, dataclasses.asdict(DEFAULT) | {"step": -1},
     dataclasses.asdict(DEFAULT) | {"step": "1"}, dataclasses.asdict(DEFAULT) | {"step": 2**32},
     dataclasses.asdict(DEFAULT) | {"step": True}, dataclasses.asdict(DEFAULT) | {"more": 1}],
)  # fmt: skip
def test_invalid_settings_are_rejected(content: object) -> None:
    assert CopySettings.of(content) is None
    assert CopySettings.of(dataclasses.asdict(DEFAULT)) == DEFAULT


def test_writers_of_different_sections_do_not_conflict(pool: Pool, cache: Path) -> None:
    kept = CalibrationCache(pool)
    kept.write("costs", [1])
    kept.write("settings", {"a": 2})
    assert (kept.read("costs"), kept.read("settings"), kept.read("x")) == ([1], {"a": 2}, None)
    whole = json.loads(kept.path.read_text())
    whole["machine"] = ["another"]
    kept.path.write_text(json.dumps(whole))
    assert kept.read("costs") is None


def test_a_concurrent_read_returns_one_whole_file(pool: Pool, cache: Path) -> None:
    contents = [[number] * 20_000 for number in range(3)]
    CalibrationCache(pool).write("costs", contents[0])
    ended = threading.Event()
    torn = []

    def read() -> None:
        while not ended.is_set():
            if (found := CalibrationCache(pool).read("costs")) not in contents:
                torn.append(found)

    def write(number: int) -> None:
        for _ in range(20):
            CalibrationCache(pool).write("costs", contents[number])

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    reader.join()
    assert torn == []
    assert [path.name for path in cache.iterdir()] == [CalibrationCache(pool).path.name]


class Made(Trial):
    """Copies whose times are made up."""

    def __init__(
        self,
        pool: Pool,
        ahead: int,
        past: int,
        part: int,
        slow_ahead: dict[Shape, int] | None = None,
    ) -> None:
        super().__init__(pool, pool.geometry.data_offset, float("inf"))
        self._made = (ahead, past, part)
        self._slow_ahead = slow_ahead or {}  # takes twice as long for a shape

    def _time(self, struct, shape, *, write):  # type: ignore[no-untyped-def]
        ahead, past, part = self._made
        size = shape.size * shape.count
        time = 1000 - 100 * (struct.ahead == ahead)
        time -= 100 * ((struct.past <= size) == (past <= size))
        time *= 1 + (struct.ahead == self._slow_ahead.get(shape))
        if struct.threads == 2:
            time += 500 if struct.part < part else -500
        return time


def test_the_faster_value_is_chosen(pool: Pool) -> None:
    made = Made(pool, ahead=2048, past=512 << 10, part=128 << 10)
    sizes = [size << 10 for size in (128, 256, 512, 1024)]
    found = made.crossing(DEFAULT, "past", sizes)
    assert found.past == 512 << 10
    found = made.best(found, "ahead", [0, 2048, DEFAULT.ahead], Shape(4096, 4))
    assert found.ahead == 2048
    slow = Shape(1280, 4, sparse=True)
    one_sided = Made(pool, ahead=2048, past=0, part=0, slow_ahead={slow: 2048})
    values = [0, 2048, DEFAULT.ahead]
    assert one_sided.best(DEFAULT, "ahead", values, Shape(4096, 4)).ahead == 2048
    assert one_sided.best(DEFAULT, "ahead", values, Shape(4096, 4), slow) == DEFAULT
    assert Made(pool, 7, 2**31, 0).crossing(DEFAULT, "past", sizes).past == 0xFFFFFFFF
    assert Made(pool, 7, 0, 0).best(DEFAULT, "ahead", [0, DEFAULT.ahead], Shape(4096, 4)) == DEFAULT


def test_copies_that_are_timed_have_checksums(pool: Pool) -> None:
    """With checksums, like those of caches: a setting may be fast for copies without checksums and
    slow for these.
    """
    offset = pool.geometry.data_offset
    trial = Trial(pool, offset, float("inf"))
    struct, shape = DEFAULT.struct(1), Shape(4096, 8)
    for write in (False, True, False):
        trial._time(struct, shape, write=write)
    other = np.full(8 * 4096, 7, np.uint8)
    addresses = np.array([[other.ctypes.data]], np.uint64)
    plan = plan_blocks(addresses, np.array([other.nbytes]), [offset])
    CpuEngine(pool, 1).gather_write(plan).wait()
    with pytest.raises(OSError, match="Bad message"):
        trial._time(struct, shape, write=False)


def test_a_measurement_ends_with_its_budget(pool: Pool) -> None:
    assert measure(pool, pool.geometry.data_offset, budget_s=0) == DEFAULT
    found = measure(pool, pool.geometry.data_offset)
    assert CopySettings.of(dataclasses.asdict(found)) == found
    assert lib.bl_cpu_features()  # and C still works
