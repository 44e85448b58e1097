# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks in a process that runs the kernels with sanitizers (tests/native/cuda_harness.cu), and
checks of every byte and access of a launch.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga import coherence
from beluga._ffi import core, ffi, lib, record_dtype
from beluga.pool import Pool
from beluga.transfer import PIECE, Plan, plan_blocks

# ---- Runs the kernels in a process with sanitizers (``tests/native/cuda_harness.cu``), over
# pipes.


ACCESS = np.dtype(
    [("address", "<u8"), ("thread", "<u4"), ("span", "<u4"), ("size", "<u4"), ("store", "<u4")]
)
SANITIZE = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
KERNELS = tuple(  # in the order of bl_kernels in the harness
    f"bl_{kernel}{half}{total}"
    for kernel in ("gather", "scatter")
    for half in ("", "_half")
    for total in ("", "_sum")
)
SPAN = record_dtype("bl_span")
JOB = np.dtype([("spans", "<u8"), ("sums", "<u8"), ("tables", "<u8"), ("count", "<u8")])
BUGS = ("shift", "swap", "tail", "sum", "twice", "strided", "pad", "again")


class SanitizerError(Exception):
    """The sanitizer ended the process; the error has its report."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of a launch, smaller than the engine's because the sanitizers are slow."""

    blocks: int
    threads: int


@functools.cache
def _fixed_addresses() -> tuple[str, ...]:
    """Return the command that starts a program at fixed addresses.

    Some Linux kernels randomize addresses so widely that the sanitizer's shadow memory does not
    fit.
    """
    command = ("setarch", "-R")
    if shutil.which(command[0]) is None:
        return ()
    allowed = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if allowed.returncode == 0 else ()


class KernelProcess:
    """The memory and kernels of a process that ends at the first bad access."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [*_fixed_addresses(), program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:color=never"},
        )

    def allocate(self, size: int, ragged: int = 0) -> int:
        """Allocate exactly ``size`` bytes, ``ragged`` bytes after an aligned address."""
        return self._number(self._call("A", size, ragged, answer=8))

    def write(self, address: int, content: bytes) -> None:
        self._call("W", address, len(content), payload=content)

    def read(self, address: int, size: int) -> bytes:
        return self._call("R", address, size, answer=size)

    def launch(self, kernel: str, grid: Grid, job: NDArray[Any]) -> NDArray[Any]:
        """Run a kernel. Return every access to pool and engine memory, of type ACCESS."""
        number = KERNELS.index(kernel)
        answer = self._call("L", number, grid.blocks, grid.threads, payload=job.tobytes(), answer=8)
        count = self._number(answer)
        return np.frombuffer(self._take(count * ACCESS.itemsize), ACCESS)

    def plant(self, bug: str | None) -> None:
        self._call("B", 0 if bug is None else BUGS.index(bug) + 1)

    def free(self) -> None:
        self._call("F")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _call(self, letter: str, *numbers: int, payload: bytes = b"", answer: int = 0) -> bytes:
        request = struct.pack("<4Q", ord(letter), *numbers, *[0] * (3 - len(numbers)))
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + payload)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last output is read below
        return self._take(answer)

    def _take(self, size: int) -> bytes:
        assert self._process.stdout is not None
        answer = self._process.stdout.read(size)
        if len(answer) < size:
            assert self._process.stderr is not None
            raise SanitizerError(self._process.stderr.read().decode(errors="replace"))
        return answer

    @staticmethod
    def _number(answer: bytes) -> int:
        return int.from_bytes(answer, "little")


# ---- Blocks in a kernel process, and checks of every byte and access of a launch.


STRIPE = 2 << 20
DEVICE_STRIPES = 64  # without the superblock's
SLACK = 128  # bytes watched on both sides of a block
CANARY = b"\xa5"


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of ``size`` bytes, with the GPU address of each: ``bases`` of shape (devices,
    windows)."""

    pool: Pool
    size: int
    bases: NDArray[np.uint64]

    def struct(self, pool: core.bl_pool) -> core.bl_windows:
        made = ffi.new("bl_windows *")
        made.pool, made.bases = pool, ffi.from_buffer("uint64_t[]", self.bases)
        made.window_count, made.window_shift = self.bases.shape[1], self.size.bit_length() - 1
        return made

    def touched(self, plan: Plan) -> set[tuple[int, int]]:
        """Return the windows in which a plan's bytes lie."""
        found = np.zeros(self.bases.shape, np.uint8)
        with self.pool.using() as pool:
            buffer = ffi.from_buffer("uint8_t[]", found)
            assert lib.bl_spans_touch(self.struct(pool), plan.struct(), buffer) == 0
        return set(zip(*(column.tolist() for column in np.nonzero(found)), strict=True))

    def reached(self, plan: Plan, missing: set[tuple[int, int]]) -> list[bool]:
        """Return for each chunk whether it lies in no window that is missing."""
        absent, found = np.zeros(self.bases.shape, np.uint8), np.empty(len(plan.chunks), np.uint8)
        for window in missing:
            absent[window] = 1
        with self.pool.using() as pool:
            buffers = (ffi.from_buffer("uint8_t[]", each) for each in (absent, found))
            lib.bl_spans_reach(self.struct(pool), plan.struct(), *buffers)
        return found.astype(bool).tolist()

    def spans(self, plan: Plan, *, write: bool) -> NDArray[np.void]:
        """Cut a plan into spans; none if a window has no address."""
        runs, shared = ffi.new("bl_row_runs *"), ffi.NULL
        if plan.sparse and plan.checksums is not None:
            assert lib.bl_row_runs_make(plan.struct(), runs) == 0
            size = runs.count * PIECE.itemsize
            pieces = np.frombuffer(bytes(ffi.buffer(runs.pieces, size)), PIECE)
            plan, shared = dataclasses.replace(plan, pieces=pieces), runs.shared
        made = np.zeros(len(plan.pieces) + plan.size // lib.BL_SPAN_SIZE, SPAN)
        with self.pool.using() as pool:
            out = ffi.from_buffer("bl_span[]", made)
            struct = self.struct(pool)
            count = lib.bl_spans_make(struct, plan.struct(), ffi.NULL, shared, write, out)
        lib.bl_row_runs_free(runs)
        return made[: max(count, 0)]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A pool, of which only the offset mapping is used, and windows."""

    devices: int
    interleaved: bool
    window_stripes: int

    @functools.cached_property
    def pool(self) -> Pool:
        return _pool(self.devices, interleaved=self.interleaved)

    def windows(self) -> Windows:
        count = -(-(DEVICE_STRIPES + 1) // self.window_stripes)
        bases = np.zeros((self.devices, count), np.uint64)
        return Windows(self.pool, self.window_stripes * STRIPE, bases)

    def place(self, offset: int) -> tuple[int, int, int]:
        """Return the device, the window and the byte in the window of an offset."""
        stripe = offset // STRIPE
        if self.interleaved:
            row, device = divmod(stripe, self.devices)
        else:
            device, row = divmod(stripe, DEVICE_STRIPES)
        window, inside = divmod(row + 1, self.window_stripes)
        return device, window, inside * STRIPE + offset % STRIPE


@functools.cache
def _pool(devices: int, *, interleaved: bool) -> Pool:
    folder = Path(tempfile.mkdtemp(prefix="beluga-test-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = [folder / f"device{number}" for number in range(devices)]
    size = (DEVICE_STRIPES + 1) * STRIPE
    pool = Pool.create(paths, device_size=size, interleave=interleaved, sparse=True)
    atexit.register(pool.close)
    return pool


@dataclasses.dataclass(frozen=True)
class Shape:
    """Blocks with equal fragments, and the pool in which they lie."""

    sizes: tuple[int, ...]  # of a block's fragments
    offsets: tuple[int, ...]  # of the blocks
    geometry: Geometry
    ragged: tuple[int, ...] = (0,)  # of the fragments, repeated
    chunk_size: int = 0
    grid: Grid = Grid(blocks=2, threads=64)

    @property
    def length(self) -> int:
        return sum(self.sizes)


@dataclasses.dataclass
class Outcome:
    """The accesses and the result of a launch."""

    spans: NDArray[np.void]
    kernel: str
    accesses: NDArray[Any]
    bad_count: int


class Scene:
    """Fragments in allocations of exactly their sizes, and the windows that the blocks touch."""

    def __init__(self, process: KernelProcess, shape: Shape) -> None:
        self.process, self.shape = process, shape
        process.free()
        count = len(shape.sizes)
        ragged = [shape.ragged[i % len(shape.ragged)] for i in range(len(shape.offsets) * count)]
        self.addresses = np.array(
            [process.allocate(shape.sizes[i % count], ragged[i]) for i in range(len(ragged))],
            np.uint64,
        ).reshape(len(shape.offsets), count)
        offsets = np.array(shape.offsets, np.uint64)
        self.plan = plan_blocks(
            self.addresses, np.array(shape.sizes), offsets, chunk_size=shape.chunk_size
        )
        self.windows = shape.geometry.windows()
        for start in shape.offsets:
            for at in range(start - SLACK, start + shape.length + 2 * SLACK, SLACK):
                device, window, _ = shape.geometry.place(max(at, 0))
                if not self.windows.bases[device, window]:
                    base = process.allocate(self.windows.size)
                    self.windows.bases[device, window] = base
        self._tables = {lanes: self._upload(tables(lanes)) for lanes in (16, 32)}

    def pool_addresses(self, offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the address of each offset."""
        places = [self.shape.geometry.place(offset) for offset in offsets.tolist()]
        return np.array(
            [int(self.windows.bases[device, window]) + at for device, window, at in places],
            np.uint64,
        )

    def content(self, seed: int) -> list[bytes]:
        """Return the payloads of the blocks, in which no two words are equal."""
        random = np.random.default_rng(seed)
        return [random.bytes(self.shape.length) for _ in self.shape.offsets]

    def fill_fragments(self, payloads: list[bytes]) -> None:
        for row, payload in zip(self.addresses.tolist(), payloads, strict=True):
            at = 0
            for address, size in zip(row, self.shape.sizes, strict=True):
                self.process.write(address, payload[at : at + size])
                at += size

    def fragments(self) -> list[bytes]:
        return [
            b"".join(
                self.process.read(address, size)
                for address, size in zip(row, self.shape.sizes, strict=True)
            )
            for row in self.addresses.tolist()
        ]

    def fill_pool(self, offset: int, content: bytes) -> None:
        at = 0
        for address, size in self._runs(offset, len(content)):
            self.process.write(address, content[at : at + size])
            at += size

    def pool(self, offset: int, size: int) -> bytes:
        return b"".join(self.process.read(*run) for run in self._runs(offset, size))

    def launch(self, plan: Plan, *, write: bool) -> Outcome:
        """Launch the kernel that the engine would choose for a plan."""
        spans, sums = self.windows.spans(plan, write=write), np.zeros(0, np.uint32)
        half = plan.size < 2048 * len(plan.pieces)
        number = 4 * (not write) + 2 * half + (plan.checksums is not None)
        at = [self._upload(each) for each in (spans, np.zeros(len(spans), np.uint32))]
        job = np.array((*at, self._tables[16 if half else 32], len(spans)), JOB)
        accesses = self.process.launch(KERNELS[number], self.shape.grid, job)
        bad_count = 0
        if plan.checksums is not None:
            sums = np.frombuffer(self.process.read(at[1], 4 * len(spans)), np.uint32).copy()
            given = ffi.from_buffer("bl_span[]", spans), ffi.from_buffer("uint32_t[]", sums)
            bad_count = lib.bl_spans_sum(*given, len(spans), plan.struct(), write)
        return Outcome(spans, KERNELS[number], accesses, bad_count)

    def _upload(self, array: NDArray[Any]) -> int:
        address = self.process.allocate(array.nbytes)
        self.process.write(address, array.tobytes())
        return address

    def gathered(self, seed: int = 1) -> Outcome:
        """Gather the blocks, and check every byte."""
        payloads, lines = self.content(seed), -(-self.shape.length // 64) * 64
        self.fill_fragments(payloads)
        for offset in self.shape.offsets:
            self.fill_pool(offset - SLACK, CANARY * (lines + 2 * SLACK))
        outcome = self.launch(self.plan, write=True)
        for offset, payload in zip(self.shape.offsets, payloads, strict=True):
            found = self.pool(offset - SLACK, lines + 2 * SLACK)
            assert found[:SLACK] == found[-SLACK:] == CANARY * SLACK
            assert found[SLACK:-SLACK] == payload.ljust(lines, b"\0")
        if self.plan.checksums is not None:
            size, step = self.shape.length, self.shape.chunk_size
            sums = [
                coherence.crc32c(payload[at : min(at + step, size)])
                for payload in payloads
                for at in range(0, size, step)
            ]
            assert self.plan.checksums.tolist() == sums
        self.check_accesses(outcome, write=True)
        return outcome

    def scattered(self, seed: int = 2) -> Outcome:
        """Scatter the bytes that a gather would have written, and check every byte."""
        payloads = self.content(seed)
        for offset, payload in zip(self.shape.offsets, payloads, strict=True):
            self.fill_pool(offset, payload)
        self.fill_fragments([CANARY * self.shape.length] * len(payloads))
        plan = self.plan
        if plan.checksums is not None:
            for i, (offset, length, _) in enumerate(plan.chunks.tolist()):
                plan.checksums[i] = coherence.crc32c(self.pool(offset, length))
        outcome = self.launch(plan, write=False)
        assert self.fragments() == payloads
        assert outcome.bad_count == 0
        self.check_accesses(outcome, write=False)
        return outcome

    def check_accesses(self, outcome: Outcome, *, write: bool) -> None:
        """Check that each byte is accessed once, in aligned words and whole lines of warps."""
        plan, pads = self.plan, outcome.spans["extra"]
        pool = runs(self.pool_addresses(plan.pieces["offset"]), plan.pieces["length"])
        engine = runs(plan.pieces["address"], plan.pieces["length"])
        if write:
            tail = plan.chunks["offset"] + plan.chunks["length"] - 1
            blank = -plan.chunks["length"].astype(np.int64) % 64
            pool += runs(self.pool_addresses(tail)[blank > 0] + 1, blank[blank > 0])
            assert pads.sum() == blank.sum()
        loads = outcome.accesses[outcome.accesses["store"] == 0]
        stores = outcome.accesses[outcome.accesses["store"] == 1]
        assert joined(runs(loads["address"], loads["size"])) == joined(engine if write else pool)
        assert joined(runs(stores["address"], stores["size"])) == joined(pool if write else engine)
        check_coalescing(outcome)

    def check_rows(self, plan: Plan, outcome: Outcome) -> None:
        """Check that rows are written once, and chunks with checksums read once and whole."""
        loads = outcome.accesses[outcome.accesses["store"] == 0]
        stores = outcome.accesses[outcome.accesses["store"] == 1]
        rows = runs(plan.pieces["address"], plan.pieces["length"])
        assert joined(runs(stores["address"], stores["size"])) == joined(rows)
        if plan.checksums is not None:
            chunks = [
                run
                for offset, length, _ in plan.chunks.tolist()
                for run in self._runs(offset, length)
            ]
            assert joined(runs(loads["address"], loads["size"])) == joined(chunks)

    def _runs(self, offset: int, size: int) -> list[tuple[int, int]]:
        edges = [offset, *range((offset // STRIPE + 1) * STRIPE, offset + size, STRIPE)]
        places = self.pool_addresses(np.array(edges, np.uint64)).tolist()
        sizes = np.diff([*edges, offset + size]).tolist()
        return list(zip(places, sizes, strict=True))


def tables(lanes: int) -> NDArray[np.uint32]:
    """Return the tables of checksums for groups of lanes."""
    made = np.zeros(lib.BL_SPAN_TABLE_WORDS, np.uint32)
    lib.bl_spans_tables(lanes, ffi.from_buffer("uint32_t[]", made))
    return made


def runs(starts: NDArray[Any], sizes: NDArray[Any]) -> list[tuple[int, int]]:
    return list(zip(starts.tolist(), sizes.tolist(), strict=True))


def joined(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same bytes as the fewest possible runs; no byte may occur twice."""
    out: list[tuple[int, int]] = []
    for start, size in sorted(found):
        assert not out or start >= out[-1][1], f"byte at {start:#x} twice"
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], start + size)
        else:
            out.append((start, start + size))
    return out


def check_coalescing(outcome: Outcome) -> None:
    """Check that the n-th words that a group's lanes load or store for a span are adjacent."""
    wide = outcome.accesses[outcome.accesses["size"] == 16]
    wide = wide[np.argsort(wide["thread"], kind="stable")]  # the accesses of a lane are in order
    span_and_kind = wide["span"].astype(np.int64) << 1 | wide["store"]
    lane = span_and_kind << 32 | wide["thread"]
    order = np.argsort(lane, kind="stable")
    _, first, counts = np.unique(lane[order], return_index=True, return_counts=True)
    nth = np.arange(len(wide)) - np.repeat(first, counts)
    wide, step = wide[order], span_and_kind[order] << 32 | nth
    order = np.argsort(step, kind="stable")
    address, step = wide["address"][order].astype(np.int64), step[order]
    inside = step[1:] == step[:-1]
    assert (np.diff(address)[inside] == 16).all(), "a step is not one run of words"
