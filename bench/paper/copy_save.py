# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga bench copy --save``: measure from how many bytes on each copy engine is faster than the
CPU, and write these sizes to the table ``[copy]`` of beluga.toml.

The copies are like those of caches: the bytes are not in the CPU's cache, and have checksums.
"""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from beluga import config
from beluga._ffi import ffi, lib
from beluga.errors import EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import (
    ENGINES,
    NEVER,
    CopyEngine,
    CpuEngine,
    Direction,
    Plan,
    default_threads,
    plan_blocks,
)

from ..harness.ground import ground
from ..harness.options import Options

_SIZES = tuple(4096 << step for step in range(11))  # 4 KiB to 4 MiB
_FRAGMENT = 64 << 10
_ROUNDS = 9


def save_crossings(options: Options) -> Path | None:
    """Measure, and write the sizes. Returns the file, or None if the CPU is the only engine here.

    Raises OSError if the file cannot be written.
    """
    with ground(options, devices=1) as pool:
        sizes: dict[str, int] = {}
        for entry in ENGINES.values():
            if entry.name == "cpu" or entry.memory != "host":
                continue
            try:
                engine = entry.open(pool, 1)
            except EngineUnavailableError as error:
                options.report(f"{entry.name}: {error}")
                continue
            try:
                sizes |= _crossings(pool, entry.name, engine, options)
            finally:
                engine.close()
    if not sizes:
        return None
    path = config.settings_file() or config.settings_paths()[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    path.write_text(with_sizes(text, sizes))
    return path


def with_sizes(text: str, sizes: dict[str, int]) -> str:
    """Return the settings file ``text`` with these sizes in its table ``[copy]``; everything else
    stays.
    """
    lines = "".join(f"{name} = {size}\n" for name, size in sizes.items())
    names = "|".join(map(re.escape, sizes))
    table = re.search(r"^\[copy\][^\n]*\n?(?:(?!\[).*\n?)*", text, re.MULTILINE)
    if table is None:
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        return f"{text}{gap}[copy]\n{lines}"
    others = re.sub(rf"^(?:{names})\s*=.*\n?", "", table[0], flags=re.MULTILINE)
    head, newline, tail = others.partition("\n")
    return text[: table.start()] + head + (newline or "\n") + lines + tail + text[table.end() :]


def _crossings(pool: Pool, name: str, engine: CopyEngine, options: Options) -> dict[str, int]:
    """Return the size from which on the engine is faster, for each direction."""
    crossings = {}
    for direction in Direction:
        # A put of the CPU uses one thread
        threads = 1 if direction is Direction.WRITE else default_threads()
        crossing = NEVER
        for size in reversed(_SIZES):
            options.report(f"copy {name}, {direction.name.lower()} {size} bytes")
            plan = _plan(pool, size)
            ours, cpu = _times(plan, direction, engine, CpuEngine(pool, threads))
            if ours >= cpu:
                break
            crossing = size
        crossings[f"{name}-{direction.name.lower()}"] = crossing
    return crossings


def _plan(pool: Pool, size: int) -> Plan:
    fragment = min(size, _FRAGMENT)
    memory = np.ones(2 * size, np.uint8)
    starts = memory.ctypes.data + 2 * fragment * np.arange(size // fragment, dtype=np.uint64)
    return plan_blocks(
        starts[None],
        np.full(len(starts), fragment),
        np.array([pool.geometry.data_offset]),
        chunk_size=lib.BL_CHUNK_SIZE,
        owners=(memory,),
    )


def _times(plan: Plan, direction: Direction, *engines: CopyEngine) -> list[float]:
    """Return the median seconds of a copy by each engine, measured alternately."""
    engines[-1].gather_write(plan).wait()  # the bytes and checksums for reads
    (memory,) = cast("tuple[NDArray[np.uint8]]", plan.owners)
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(_ROUNDS):
        for engine, its in zip(engines, times, strict=True):
            lib.bl_flush(ffi.from_buffer(memory), memory.size)
            lib.bl_fence()
            move = engine.gather_write if direction is Direction.WRITE else engine.scatter_read
            start = time.perf_counter()
            move(plan).wait()
            its.append(time.perf_counter() - start)
    return [statistics.median(its) for its in times]
