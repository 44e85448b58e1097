# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA kernels' own source, compiled for this CPU with sanitizers: addresses, bytes, sums.

These tests cannot show the speed or the memory model of a GPU.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from beluga_bench.gpu.stub import compile_host
from cuda_scene import (
    BUGS,
    DEVICE_STRIPES,
    SANITIZE,
    STRIPE,
    Geometry,
    Grid,
    KernelProcess,
    SanitizerError,
    Scene,
    Shape,
    tables,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import cut

from beluga import coherence
from beluga._ffi import ffi, lib
from beluga.errors import EngineUnavailableError
from beluga.transfer import CHUNK, PIECE, Plan, plan_rows

HARNESS = Path(__file__).resolve().parents[2] / "native/cuda_harness.cu"
UNROLL = 8  # words in flight for each lane
ONE = Geometry(1, interleaved=False, window_stripes=1)
THREE = Geometry(3, interleaved=True, window_stripes=2)
FOUR = Geometry(4, interleaved=False, window_stripes=8)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness; g++ is installed for it if it is available."""
    if shutil.which("c++") is None:
        setup = Path(__file__).resolve().parents[3] / "scripts" / "dev/setup-packages"
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([setup, "g++"], capture_output=True, check=False, timeout=150)
    target = tmp_path_factory.mktemp("cuda") / "harness"
    try:
        compile_host(HARNESS, target, *SANITIZE)
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    return target


@pytest.fixture(scope="module")
def process(program: Path) -> Iterator[KernelProcess]:
    started = KernelProcess(program)
    yield started
    started.end()


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    sizes = draw(
        st.lists(
            st.one_of(
                st.integers(1, 700),
                st.sampled_from([1280, 2048, 4096, 8192]),
                st.integers(3000, 9000),
            ),
            min_size=1,
            max_size=5,
        )
    )
    room = -(-sum(sizes) // 64) * 64 + 256
    places = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    start = draw(st.sampled_from([1, 2, 5])) * STRIPE - 1024 * draw(st.integers(0, 8))
    return Shape(
        tuple(sizes),
        tuple(start + 256 + place * room for place in places),
        draw(st.sampled_from([ONE, THREE])),
        ragged=tuple(draw(st.lists(st.sampled_from([0, 0, 1, 4, 8, 16]), min_size=1, max_size=3))),
        chunk_size=draw(st.sampled_from([0, 64, 1024, 16384])),
        grid=draw(st.sampled_from([Grid(1, 32), Grid(2, 64), Grid(4, 128)])),
    )


MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(shape=shapes(), seed=st.integers(0, 1000))
def test_a_gather_writes_every_byte_once_and_sums_it(
    process: KernelProcess, shape: Shape, seed: int
) -> None:
    Scene(process, shape).gathered(seed)


@MANY
@given(shape=shapes(), seed=st.integers(0, 1000))
def test_a_scatter_reads_every_byte_once_and_verifies_its_checksums(
    process: KernelProcess, shape: Shape, seed: int
) -> None:
    Scene(process, shape).scattered(seed)


@MANY
@given(
    rows=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7000), st.integers(1, 1300)),
                  min_size=1, max_size=8),
    chunk_size=st.sampled_from([0, 1024, 4096]),
    spoil=st.booleans(),
)  # fmt: skip
def test_rows_are_read_and_the_chunks_they_touch_are_summed(
    process: KernelProcess, rows: list[tuple[int, int, int]], chunk_size: int, spoil: bool
) -> None:
    length, offsets = 8300, (2 * STRIPE - 4096, 2 * STRIPE + 8192)
    scene = Scene(process, Shape((length,), offsets, THREE))
    payloads = scene.content(7)
    for offset, payload in zip(offsets, payloads, strict=True):
        scene.fill_pool(offset, payload)
    step = chunk_size or length
    sums = [[coherence.crc32c(p[at : at + step]) for at in range(0, length, step)]
            for p in payloads]  # fmt: skip
    targets = [process.allocate(size) for _, _, size in rows]
    blocks, places, sizes = (np.array(column) for column in zip(*rows, strict=True))
    plan = plan_rows(
        np.array(targets, np.uint64),
        *(blocks, places, sizes),
        offsets=np.array(offsets, np.uint64),
        length=length,
        chunk_size=chunk_size,
        checksums=np.array(sums, np.uint32) if chunk_size else None,
    )
    block, place, _ = rows[0]
    if spoil and chunk_size:  # a byte of the chunk that is in no row
        at = offsets[block] + place // chunk_size * chunk_size
        scene.fill_pool(at, bytes([scene.pool(at, 1)[0] ^ 1]))
    outcome = scene.launch(plan, write=False)
    assert outcome.bad_count == int(spoil and chunk_size > 0)
    if not spoil:
        for target, (block, place, size) in zip(targets, rows, strict=True):
            assert process.read(target, size) == payloads[block][place : place + size]
    scene.check_rows(plan, outcome)


def overlapping(process: KernelProcess, ragged: int) -> tuple[Scene, Plan, list[int], bytes]:
    """Make rows that contain, equal and overlap each other across the end of a stripe, and a row of
    one byte. Also returns the payload.
    """
    length, offset = 9000, 2 * STRIPE - 4096
    scene = Scene(process, Shape((length,), (offset,), THREE))
    (payload,) = scene.content(3)
    scene.fill_pool(offset, payload)
    sums = [coherence.crc32c(payload[at : at + 8192]) for at in (0, 8192)]
    targets = [process.allocate(size, ragged) for _, size in OVERLAPPING]
    places, sizes = (np.array(column) for column in zip(*OVERLAPPING, strict=True))
    plan = plan_rows(
        np.array(targets, np.uint64),
        *(np.zeros(len(places), np.int64), places, sizes),
        offsets=np.array([offset], np.uint64),
        length=length,
        chunk_size=8192,
        checksums=np.array([sums], np.uint32),
    )
    return scene, plan, targets, payload


OVERLAPPING = ((0, 8000), (0, 8000), (100, 4000), (1000, 6100), (1000, 1), (4095, 2), (7999, 1001))


@pytest.mark.parametrize("ragged", [0, 1, 8])
def test_bytes_of_several_rows_are_read_and_summed_once(
    process: KernelProcess, ragged: int
) -> None:
    scene, plan, targets, payload = overlapping(process, ragged)
    outcome = scene.launch(plan, write=False)
    assert outcome.bad_count == 0
    for target, (place, size) in zip(targets, OVERLAPPING, strict=True):
        assert process.read(target, size) == payload[place : place + size]
    scene.check_rows(plan, outcome)


def test_a_scatter_counts_the_chunks_with_wrong_checksums(process: KernelProcess) -> None:
    scene = Scene(process, Shape((5000, 5000), (STRIPE - 5056,), THREE, chunk_size=1024))
    scene.scattered()
    scene.fill_pool(STRIPE, bytes([scene.pool(STRIPE, 1)[0] ^ 0x10]))
    assert scene.launch(scene.plan, write=False).bad_count == 1
    scene.fill_pool(STRIPE - 5056, bytes([scene.pool(STRIPE - 5056, 1)[0] ^ 0x80]))
    assert scene.launch(scene.plan, write=False).bad_count == 2


def test_a_part_of_a_plan_counts_its_own_chunks(process: KernelProcess) -> None:
    """A long plan is launched in parts; a part's chunks and pieces are numbered in the whole."""
    shape = Shape((1500, 3500), (STRIPE - 5056, 3 * STRIPE), THREE, chunk_size=1024)
    scene = Scene(process, shape)
    payloads = scene.content(3)
    scene.fill_fragments(payloads)
    sums = [coherence.crc32c(p[at : at + 1024]) for p in payloads for at in range(0, 5000, 1024)]
    parts = list(cut(scene.plan, 2048))
    assert parts[-1].chunk_base > 0
    for part in parts:
        base, count = part.chunk_base, len(part.chunks)
        scene.launch(part, write=True)
        assert part.checksums is not None
        assert part.checksums.tolist() == sums[base : base + count]
        assert scene.launch(part, write=False).bad_count == 0
        last = int(part.chunks["offset"][-1])
        scene.fill_pool(last, bytes([scene.pool(last, 1)[0] ^ 1]))
        assert scene.launch(part, write=False).bad_count == 1


@pytest.mark.parametrize("chunk_size", [0, 16384])
def test_a_fragment_as_long_as_stripes_is_written_and_read_correctly(
    process: KernelProcess, chunk_size: int
) -> None:
    shape = Shape((81_936, STRIPE + 1280), (STRIPE + 256,), THREE, chunk_size=chunk_size)
    scene = Scene(process, shape)
    scene.gathered()
    scene.scattered()


@given(
    offset=st.integers(0, DEVICE_STRIPES * STRIPE - 1),
    geometry=st.sampled_from([ONE, THREE, FOUR]),
)
def test_spans_have_the_addresses_of_their_windows(offset: int, geometry: Geometry) -> None:
    windows = geometry.windows()
    numbers = np.arange(windows.bases.size, dtype=np.uint64) + np.uint64(1)
    windows.bases[:] = (numbers << np.uint64(40)).reshape(windows.bases.shape)
    plan = Plan(np.array([(64, offset, 1, 0)], PIECE), np.array([(offset & ~63, 64, 0)], CHUNK))
    made = windows.spans(plan, write=False)
    device, window, inside = geometry.place(offset)
    assert len(made) == 1
    assert int(made["pool"][0]) == int(windows.bases[device, window]) + inside
    assert windows.touched(plan) == {(device, window)}
    assert windows.reached(plan, set()) == [True]
    assert windows.reached(plan, {(device, window)}) == [False]


@MANY
@given(pieces=st.lists(st.integers(1, 100_000), min_size=1, max_size=6))
def test_spans_tile_their_pieces_in_parts_of_a_few_kib(pieces: list[int]) -> None:
    windows = ONE.windows()
    windows.bases[:] = 1 << 40
    ends = np.cumsum(pieces)
    rows = [(1 << 30, int(end) - size, size, 0) for end, size in zip(ends, pieces, strict=True)]
    plan = Plan(np.array(rows, PIECE), np.array([(0, int(ends[-1]), 0)], CHUNK))
    made = windows.spans(plan, write=False)
    assert len(pieces) <= len(made) <= len(pieces) + plan.size // lib.BL_SPAN_SIZE
    assert int(made["length"].sum()) == plan.size
    assert (np.diff(made["pool"].astype(np.int64)) == made["length"][:-1]).all()
    assert made["length"].max() < lib.BL_SPAN_SIZE + 128
    windows.bases[:] = 0
    assert len(windows.spans(plan, write=False)) == 0


def test_enough_bytes_are_in_flight(process: KernelProcess) -> None:
    scene = Scene(process, Shape((20480,) * 4, (STRIPE,), ONE, grid=Grid(1, 32)))
    for outcome in (scene.gathered(), scene.scattered()):
        assert (outcome.accesses["size"] == 16).all()
        first = outcome.accesses[outcome.accesses["thread"] == 0]
        assert first["store"][: 2 * UNROLL].tolist() == [0] * UNROLL + [1] * UNROLL


def test_small_rows_use_half_a_warp(process: KernelProcess) -> None:
    scene = Scene(process, Shape((1280,) * 16, (STRIPE,), ONE, chunk_size=16384))
    for outcome in (scene.gathered(), scene.scattered()):
        assert "_half" in outcome.kernel


def test_the_tables_are_powers_of_the_polynomial() -> None:
    """Appending n zeros to a message multiplies its checksum, without its inversions, by x^(8n)."""
    for lanes in (16, 32):
        made = tables(lanes)
        step, part, words = made[:1024], made[1024:2048], made[2048:2080]
        for table, count in ((step, lanes * 16), (part, 4)):
            for place in range(4):
                for byte in (1, 0x80, 0xFF):
                    value = byte << 8 * place
                    assert table[256 * place + byte] == appended(value, count)
        assert words.tolist() == [appended(1 << 31, 4 + 16 * n) for n in range(32)]
        powers = made[2080:].tolist()
        assert powers[:20] == [appended(1 << 31, 1 << n) for n in range(20)]


def appended(value: int, count: int) -> int:
    """Return the product of a polynomial and x^(8 * count)."""
    for _ in range(8 * count):
        value = value >> 1 ^ 0x82F63B78 * (value & 1)
    return value


@pytest.mark.parametrize("length", [1, 65_535, 65_536, 65_537, 1 << 20])
def test_checksums_of_zeros_are_correct_for_any_length(length: int) -> None:
    assert blank(length) == coherence.crc32c(bytes(length))


def blank(length: int) -> int:
    """Return the checksum of a chunk whose spans contribute nothing: that of zeros."""
    chunks, sums = np.array([(0, length, 0)], CHUNK), np.zeros(1, np.uint32)
    plan = Plan(np.array([(64, 0, length, 0)], PIECE), chunks, sums)
    assert lib.bl_spans_sum(ffi.NULL, ffi.NULL, 0, plan.struct(), True) == 0
    return int(sums[0])


# Each bug shows only with some of these: unaligned ends, several chunks, K and V.
PLANTED = Shape((4099, 4099), (3 * STRIPE - 8192,), THREE, chunk_size=1024)


def test_rows_that_are_read_twice_are_detected(program: Path) -> None:
    process = KernelProcess(program)
    try:
        process.plant("again")
        scene, plan, _, _ = overlapping(process, 0)
        with pytest.raises(AssertionError, match="twice"):
            scene.check_rows(plan, scene.launch(plan, write=False))
    finally:
        process.end()


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "again"])
def test_a_planted_bug_is_detected(program: Path, bug: str) -> None:
    process = KernelProcess(program)
    try:
        for ways in ("gathered", "scattered"):
            getattr(Scene(process, PLANTED), ways)()  # no finding for correct kernels
        process.plant(bug)
        ways = ["gathered"] if bug == "pad" else ["gathered", "scattered"]
        for way in ways:
            started = KernelProcess(program)
            started.plant(bug)
            try:
                with pytest.raises((AssertionError, SanitizerError)):
                    getattr(Scene(started, PLANTED), way)()
            finally:
                started.end()
    finally:
        process.end()
