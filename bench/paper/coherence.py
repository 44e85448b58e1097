# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of methods to write and read 16 KiB (the paper's Table 4).

It measures stores followed by each kind of flush, streaming stores, a read after a flush, and a
cached read. On devdax, as root, it also measures plain stores and loads through an uncacheable
mapping, and copies by DSA and by a GPU if there is one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from beluga.errors import BelugaError
from beluga.pool import Pool

from .._limit import lib
from ..gpu.single import gpu_coherence
from ..harness import drive
from ..harness.drive import Driver, Load
from ..harness.ground import coherence_of, ground
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import Options
from ..harness.ratio import race
from ..harness.region import Region, region_of, uniform
from ..harness.row import Recorder, Row, copies, percentiles, speed
from .dsa import dsa_coherence
from .latency import count_of

SIZE = 16 << 10

_DAX = Path("/sys/bus/dax/devices")
_MEMORY = Path("/dev/mem")


def bench_coherence(options: Options) -> list[Row]:
    """Return one row for each method. Beluga's own methods are compared with the limit."""
    with pinned(cores()[0]), ground(options, devices=1) as pool:
        fixed: Row = {
            "memory": memory_of(pool),
            "coherence": coherence_of(pool),
            "bytes": SIZE,
            "depth": 1,
            "threads": 1,
        }
        recorder, region = Recorder("coherence", options, fixed), region_of(pool)
        rows = [_flushed(recorder, region, kind) for kind in ("clflush", "clflushopt", "clwb")]
        rows.append(_ours(recorder, region, "streamed store", "write", "2.41 us"))
        rows.append(_ours(recorder, region, "read after flush", "read", "5.98 us"))
        cached = region.limit("load", np.zeros(1, np.uint64), SIZE)
        rows.append(_bare(recorder, "read cached", cached))
        rows += _uncacheable(recorder, region)
        rows += dsa_coherence(recorder, region, SIZE)
        rows += gpu_coherence(recorder, region, SIZE)
    return rows


def _bare(recorder: Recorder, case: str, driver: Driver) -> Row:
    """Measure an instruction sequence that is not one of Beluga's verbs."""
    recorder.options.report(f"coherence {case}")
    count = count_of(SIZE, recorder.options.smoke)
    driver.count(count)
    ops_per_s = driver.count(count)
    return recorder.row(case, **speed(ops_per_s, SIZE), **percentiles(driver.sample(count)))


def _flushed(recorder: Recorder, region: Region, kind: str) -> Row:
    case = f"store + {kind}"
    if kind != "clflush" and not getattr(lib, f"limit_has_{kind}")():
        return recorder.skipped(case, f"this CPU has no {kind}")
    offsets = uniform(region.span, SIZE, recorder.options.seed)
    return _bare(recorder, case, region.limit(f"store_{kind}", offsets, SIZE))


def _ours(recorder: Recorder, region: Region, case: str, verb: str, paper: str) -> Row:
    """Measure one of Beluga's verbs against the limit."""
    options = recorder.options
    options.report(f"coherence {case}")
    offsets = uniform(region.span, SIZE, options.seed)
    ours, limit = region.ours(verb, offsets, SIZE), region.limit(verb, offsets, SIZE)
    count = count_of(SIZE, options.smoke)
    ratio = race(
        lambda: limit.count(count),
        lambda: ours.count(count),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    return recorder.row(case, paper=paper, **copies(ratio, SIZE), **percentiles(ours.sample(count)))


def _uncacheable(recorder: Recorder, region: Region) -> list[Row]:
    """Measure stores and loads that bypass all caches, or return a row with the reason."""
    cases = {"store uncacheable": "store", "load uncacheable": "load"}
    try:
        with _uncacheable_mapping(region.pool) as base:
            offsets = np.zeros(1, np.uint64)
            return [
                _bare(recorder, case, Driver(Load(drive.bare(name, base), offsets, SIZE)))
                for case, name in cases.items()
            ]
    except (BelugaError, OSError) as error:
        return [recorder.skipped(case, str(error)) for case in cases]


@contextmanager
def _uncacheable_mapping(pool: Pool) -> Iterator[int]:
    """Yield the address of SIZE bytes of the pool's data in an uncacheable mapping.

    The kernel keeps ordinary memory cacheable in every mapping. It maps device memory that it does
    not manage uncacheable through /dev/mem with O_SYNC. Raises BelugaError or OSError.
    """
    device = pool.devices[0]
    if device.kind != "devdax":
        raise BelugaError("only devdax memory can be mapped uncacheable")
    if not _MEMORY.exists():
        raise BelugaError("there is no /dev/mem")
    start = int((_DAX / device.path.name / "mapping0/start").read_text(), 16)
    inside = drive.address_of(pool, pool.geometry.data_offset) - drive.address_of(pool, 0)
    descriptor = os.open(_MEMORY, os.O_RDWR | os.O_SYNC)
    try:
        first_stripe = device.size // device.stripe_count
        offset = start + device.offset + first_stripe + inside
        mapping = mmap.mmap(descriptor, SIZE, offset=offset)
    finally:
        os.close(descriptor)
    view = (ctypes.c_char * SIZE).from_buffer(mapping)
    try:
        yield ctypes.addressof(view)
    finally:
        del view
        mapping.close()
