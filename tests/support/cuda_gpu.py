# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A stand-in for a GPU that can be paused and inspected, and blocks to copy with it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from beluga_bench.gpu.host_driver import HostDriver
from support.engines import peek

from beluga.pool import Pool
from beluga.transfer import Plan, plan_blocks
from beluga.transfer.cuda import CudaEngine, DriverError

STRIPE = 2 << 20
PATIENCE_S = 60


class Gpu(HostDriver):
    """Records every copy; while ``gate`` is closed its streams make no progress. Each instance is
    another GPU, unless ``identity`` is given.
    """

    def __init__(
        self, before_register: Callable[[int], None] | None = None, *, identity: str | None = None
    ) -> None:
        super().__init__(before_register=before_register)
        self.identity = identity or f"host-{id(self)}"
        self.gate = threading.Event()
        self.gate.set()
        self.copies: list[tuple[int, int, int]] = []

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.copies.append((target, source, size))
        super().copy(target, source, size, stream)

    def launch(self, kernel: str, grid: Any, job: Any, stream: int) -> None:
        if not self.capturing(stream):
            self._streams[stream].put(lambda: self.gate.wait(PATIENCE_S) and None)
        super().launch(kernel, grid, job, stream)


class FailingGpu(Gpu):
    """The call whose number is in ``fail_at`` (1: the next one) fails before it has done anything.
    While ``silent``, queries of events fail. ``bounced``: nothing is registered.
    """

    def __init__(self, *, bounced: bool = False) -> None:
        self.fail_at, self.silent = 0, False
        super().__init__(before_register=_refuse if bounced else None)

    def _call(self) -> None:
        if self.fail_at > 0:
            self.fail_at -= 1
            if self.fail_at == 0:
                raise DriverError("made up")

    def _listen(self) -> None:
        if self.silent:
            raise DriverError("made up, for good")

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._call()
        super().copy(target, source, size, stream)

    def launch(self, kernel: str, grid: Any, job: Any, stream: int) -> None:
        self._call()
        super().launch(kernel, grid, job, stream)

    def allocate(self, size: int) -> int:
        self._call()
        return super().allocate(size)

    def pin(self, size: int) -> Any:
        self._call()
        return super().pin(size)

    def make_stream(self, *, urgent: bool) -> int:
        self._call()
        return super().make_stream(urgent=urgent)

    def make_event(self) -> int:
        self._call()
        return super().make_event()

    def record(self, event: int, stream: int) -> None:
        self._call()
        super().record(event, stream)

    def follow(self, stream: int, event: int) -> None:
        self._call()
        super().follow(stream, event)

    def ended(self, event: int) -> bool:
        self._listen()
        return super().ended(event)

    def wait(self, event: int) -> None:
        self._listen()
        super().wait(event)


def _refuse(_: int) -> None:
    raise DriverError("made up")


@dataclasses.dataclass
class Blocks:
    """Blocks of 16 fragments of 20 KB, one after the other in the pool, and their memory."""

    memory: Any
    plan: Plan

    @classmethod
    def make(cls, pool: Pool, count: int = 3, *, stripe: int = 0) -> Blocks:
        size, fragments = 20480, 16
        memory = np.random.default_rng(5).integers(0, 256, count * fragments * size, np.uint8)
        addresses = memory.ctypes.data + np.arange(count * fragments) * size
        start = pool.geometry.data_offset + stripe * STRIPE
        offsets = start + np.arange(count) * fragments * size
        plan = plan_blocks(
            addresses.reshape(count, fragments).astype(np.uint64),
            np.full(fragments, size),
            offsets.astype(np.uint64),
            chunk_size=16384,
        )
        return cls(memory, plan)

    def stored(self, pool: Pool) -> bool:
        content = peek(pool, int(self.plan.chunks["offset"][0]), len(self.memory))
        return bool((content == self.memory).all())


def engine_on(pool: Pool, driver: HostDriver, **options: Any) -> CudaEngine:
    options = {"window_size": STRIPE, "driver": driver, "blocks": 2} | options
    return CudaEngine(pool, **options)
