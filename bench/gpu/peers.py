# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure plain CUDA for comparison: cudaMemcpyAsync for each fragment, or all in one
cudaMemcpyBatchAsync.

The peers copy between pinned memory and the GPU, without pool, flush and checksum. They are
compared with the CUDA engine without its cache maintenance. Both are timed from the call in Python
until its completion is observed. ``ratio_to_peer`` is ours / the peer's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

from beluga.transfer import CudaDevice, CudaEngine, Plan
from beluga.transfer.cuda import DriverError
from beluga.transfer.cuda.device import Pinned

from ..harness.ratio import Once, race, rate
from ..harness.row import Recorder, Row, percentiles, speed
from .batch import MemcpyBatch

EACH, BATCH = "cudaMemcpyAsync per fragment", "cudaMemcpyBatchAsync"


def peer_rows(
    recorder: Recorder, driver: CudaDevice, engine: CudaEngine, pinned: Pinned, plan: Plan
) -> list[Row]:
    """Return a row of each peer for each direction that ``plan`` has; its pieces have one
    length.
    """
    rows = []
    stream, event = driver.make_stream(urgent=True), driver.make_event()

    def finish() -> None:
        driver.record(event, stream)
        driver.wait(event)

    for case in ("sparse_read",) if plan.sparse else ("gather_write", "scatter_read"):
        write = case == "gather_write"
        start = engine.gather_write if write else engine.scatter_read
        pairs, size = _pairs(plan, int(pinned.array.ctypes.data), write=write)

        def ours(start: Callable[..., object] = start) -> None:
            start(plan, stream=stream).wait()  # type: ignore[attr-defined]

        def each(pairs: list[tuple[int, int]] = pairs, size: int = size) -> None:
            for target, source in pairs:
                driver.copy(target, source, size, stream)
            finish()

        rows.append(_row(recorder, case, EACH, each, ours, plan))
        try:
            if driver.name != "cuda":
                raise DriverError("what stands in for the GPU has no such call")
            batch = MemcpyBatch(pairs, size)

            def together(batch: MemcpyBatch = batch) -> None:
                batch.start(stream)
                finish()

            rows.append(_row(recorder, case, BATCH, together, ours, plan))
        except (OSError, DriverError) as error:
            rows.append(recorder.skipped(case, str(error), peer=BATCH))
    driver.free_event(event)
    driver.end_stream(stream)
    return rows


def _pairs(plan: Plan, host: int, *, write: bool) -> tuple[list[tuple[int, int]], int]:
    """Return (target, source) of each fragment of the plan, and its bytes.

    A fragment that the plan cuts at a stripe is still one.
    """
    size = int(plan.pieces["length"].max())
    near = (int(plan.pieces["address"].min()) + np.arange(plan.size // size) * size).tolist()
    far = (host + np.arange(len(near)) * size).tolist()
    return list(zip(*((far, near) if write else (near, far)), strict=True)), size


def _row(  # noqa: PLR0913, PLR0917  one row's own
    recorder: Recorder, case: str, name: str, peer: Once, ours: Once, plan: Plan
) -> Row:
    options = recorder.options
    options.report(f"copy {case}, {name}, {plan.size} bytes")
    count = 1 if options.smoke else 20
    ratio = race(
        lambda: rate(peer, count),
        lambda: rate(ours, count),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    times = np.zeros(count + 1, np.uint64)
    times[0] = perf_counter_ns()
    for index in range(1, count + 1):
        peer()
        times[index] = perf_counter_ns()
    size = int(plan.pieces["length"].max())
    return recorder.row(
        case,
        peer=name,
        crc=False,
        bytes=plan.size,
        threads=1,
        fragment_bytes=size,
        fragments=plan.size // size,
        ratio_to_peer=round(ratio.ratio, 3),
        **speed(ratio.limit, plan.size),
        **percentiles(np.diff(times)),
    )
