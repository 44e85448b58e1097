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
from cuda_process import BUGS, SANITIZE, Grid, KernelProcess, SanitizerError
from cuda_scene import STRIPE, Scene, Shape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beluga import coherence
from beluga.errors import EngineUnavailableError
from beluga.transfer import Plan, plan_rows
from beluga.transfer.engines.cuda import crc, source
from beluga.transfer.engines.cuda.tables import UNROLL
from beluga.transfer.engines.cuda.windows import Bases, Windows

ONE = Windows(1, 64, interleaved=False, skipped_stripes=1, shift=0)
THREE = Windows(3, 64, interleaved=True, skipped_stripes=1, shift=1)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The harness; g++ is installed for it if it can be had."""
    if shutil.which("c++") is None:
        setup = Path(__file__).resolve().parents[4] / "scripts" / "dev/setup-packages"
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([setup, "g++"], capture_output=True, check=False, timeout=150)
    target = tmp_path_factory.mktemp("cuda") / "harness"
    try:
        source.compile_host(source.ROOT / "cuda" / "harness.cu", target, *SANITIZE)
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
def test_a_scatter_reads_every_byte_once_and_finds_its_sums_right(
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
    if spoil and chunk_size:  # a byte of the chunk that no row need ask for
        at = offsets[block] + place // chunk_size * chunk_size
        scene.fill_pool(at, bytes([scene.pool(at, 1)[0] ^ 1]))
    outcome = scene.launch(plan, write=False)
    assert outcome.verdict["bad_count"] == int(spoil and chunk_size > 0)
    if not spoil:
        for target, (block, place, size) in zip(targets, rows, strict=True):
            assert process.read(target, size) == payloads[block][place : place + size]
    scene.check_rows(plan, outcome)


def overlapping(process: KernelProcess, ragged: int) -> tuple[Scene, Plan, list[int], bytes]:
    """Make rows that contain, equal and overlap each other across the end of a stripe, and a row of
    one byte. Return the payload, too."""
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
def test_bytes_that_several_rows_want_are_read_and_summed_once(
    process: KernelProcess, ragged: int
) -> None:
    scene, plan, targets, payload = overlapping(process, ragged)
    outcome = scene.launch(plan, write=False)
    assert outcome.verdict["bad_count"] == 0
    for target, (place, size) in zip(targets, OVERLAPPING, strict=True):
        assert process.read(target, size) == payload[place : place + size]
    scene.check_rows(plan, outcome)


def test_a_scatter_names_the_chunk_that_is_not_what_was_written(process: KernelProcess) -> None:
    scene = Scene(process, Shape((5000, 5000), (STRIPE - 5056,), THREE, chunk_size=1024))
    scene.scattered()
    scene.fill_pool(STRIPE, bytes([scene.pool(STRIPE, 1)[0] ^ 0x10]))
    outcome = scene.launch(scene.plan, write=False)
    assert (outcome.verdict["bad_count"], outcome.verdict["first_bad"]) == (1, 5056 // 1024)


def test_a_part_of_a_plan_counts_its_own_chunks(process: KernelProcess) -> None:
    """A long plan is launched in parts; a part's chunks and pieces are numbered in the whole."""
    shape = Shape((1500, 3500), (STRIPE - 5056, 3 * STRIPE), THREE, chunk_size=1024)
    scene = Scene(process, shape)
    payloads = scene.content(3)
    scene.fill_fragments(payloads)
    sums = [coherence.crc32c(p[at : at + 1024]) for p in payloads for at in range(0, 5000, 1024)]
    parts = list(scene.plan.cut(2048))
    assert parts[-1].chunk_base > 0
    for part in parts:
        base, count = part.chunk_base, len(part.chunks)
        outcome = scene.launch(part, write=True)
        assert outcome.sums["crc"].tolist() == sums[base : base + count]
        assert part.checksums is not None
        part.checksums[:] = outcome.sums["crc"]
        assert scene.launch(part, write=False).verdict["bad_count"] == 0
        last = int(part.chunks["offset"][-1])
        scene.fill_pool(last, bytes([scene.pool(last, 1)[0] ^ 1]))
        verdict = scene.launch(part, write=False).verdict
        assert (verdict["bad_count"], verdict["first_bad"]) == (1, count - 1)


@pytest.mark.parametrize("chunk_size", [0, 16384])
def test_a_fragment_as_long_as_stripes_comes_and_goes_whole(
    process: KernelProcess, chunk_size: int
) -> None:
    shape = Shape((81_936, STRIPE + 1280), (STRIPE + 256,), THREE, chunk_size=chunk_size)
    scene = Scene(process, shape)
    scene.gathered()
    scene.scattered()


@given(st.integers(0, 191 << 21))
def test_addresses_are_the_same_in_c_and_python(process: KernelProcess, offset: int) -> None:
    process.free()
    for windows in (THREE, Windows(4, 48, interleaved=False, skipped_stripes=1, shift=3)):
        places = {(d, w): (d + 1 << 50) + (w << 40) for d in range(4) for w in range(40)}
        count = windows.device_count
        bases = Bases.of(windows, {k: v for k, v in places.items() if k[0] < count})
        found = process.window_address(bases, offset)
        assert found == int(bases.addresses(np.array([offset], np.uint64))[0])


def test_enough_bytes_are_in_flight(process: KernelProcess) -> None:
    scene = Scene(process, Shape((20480,) * 4, (STRIPE,), ONE, grid=Grid(1, 32)))
    for outcome in (scene.gathered(), scene.scattered()):
        assert (outcome.accesses["size"] == 16).all()
        first = outcome.accesses[outcome.accesses["thread"] == 0]
        assert first["store"][: 2 * UNROLL].tolist() == [0] * UNROLL + [1] * UNROLL


def test_small_rows_are_given_half_a_warp(process: KernelProcess) -> None:
    scene = Scene(process, Shape((1280,) * 16, (STRIPE,), ONE, chunk_size=16384))
    assert scene.gathered().tables.lanes == scene.scattered().tables.lanes == 16


@pytest.mark.parametrize("lanes", [16, 32])
def test_sums_do_not_depend_on_the_order(lanes: int) -> None:
    content = np.random.default_rng(lanes).bytes(3000)
    total = int(crc.blank(np.array([3000]))[0])
    for at in range(0, 3000, 500):
        part = content[at : at + 500]
        alone = coherence.crc32c(part) ^ int(crc.blank(np.array([500]))[0])
        moved = crc.multiply(np.array([alone], np.uint32), crc.powers(np.array([2500 - at])))
        total ^= int(moved[0])
    assert total == coherence.crc32c(content)
    assert len(crc.tables(lanes)) == 20 * 256 + 64


@pytest.mark.parametrize("length", [1, 65_535, 65_536, 65_537, 1 << 20])
def test_sums_of_blank_runs_of_any_length(length: int) -> None:
    """Each alone: longer ones beside it would be multiplied for it, too."""
    assert int(crc.blank(np.array([length]))[0]) == coherence.crc32c(bytes(length))


# Each bug shows only with some of these: unaligned ends, several chunks, devices, K and V.
PLANTED = Shape((4099, 4099), (3 * STRIPE - 8192,), THREE, chunk_size=1024)


def test_rows_that_are_read_again_are_found(program: Path) -> None:
    process = KernelProcess(program)
    try:
        process.plant("again")
        scene, plan, _, _ = overlapping(process, 0)
        with pytest.raises(AssertionError, match="twice"):
            scene.check_rows(plan, scene.launch(plan, write=False))
    finally:
        process.end()


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "again"])
def test_a_planted_bug_is_found(program: Path, bug: str) -> None:
    process = KernelProcess(program)
    try:
        for ways in ("gathered", "scattered"):
            getattr(Scene(process, PLANTED), ways)()  # nothing is found where nothing is wrong
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
