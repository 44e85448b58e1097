# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engine's blocks in GPU memory, which the CUDA engine copies directly.

Blocks are given by their GPU addresses. Kernels gather them into the pool and scatter them out of
it, on the connector's own stream, concurrently with the engine's. Until the pool's windows are
registered (in the background), the CUDA engine uses bounce buffers; no request waits for that. A
stored block is published after the CPU has done the cache maintenance that the policy table
requires for a GPU's writes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.staging import BlockSource, StagedSource
from beluga.errors import EngineUnavailableError
from beluga.transfer import CudaEngine, CupyDriver

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator, Sequence

    from beluga.connectors.vllm.layout import Pieces
    from beluga.kvcache import Run
    from beluga.pool import Pool
    from beluga.transfer import CudaDriver


class DeviceSource(BlockSource):
    """Blocks that the CUDA engine can access. With ``urgent``, its stream has priority over others.
    With ``beside`` a load waits for what the engine had queued at the last :meth:`mark`; otherwise
    it waits for everything queued when the load begins. The source closes ``driver``.
    """

    def __init__(self, *layouts: Pieces, driver: CudaDriver, urgent: bool, beside: bool) -> None:
        super().__init__(*layouts)
        self._driver, self._beside = driver, beside
        self._device = layouts[0].tensors[0].device
        self._stream = driver.make_stream(urgent=urgent)
        self._marked = driver.make_event()

    def engine(self, pool: Pool) -> CudaEngine:
        """Make an engine for the pool, which closes it. Raises
        :class:`~beluga.errors.TransferError`.
        """
        return CudaEngine(pool, stream=self._stream, driver=self._driver)

    def mark(self) -> None:
        """Record the current end of the engine's stream."""
        self._driver.record(self._marked, engine_stream(self._device))

    def read(self, block_ids: Sequence[int], group: int = 0) -> Run:
        """Return the blocks' addresses. A copy from there waits for the mark."""
        self._driver.follow(self._stream, self._marked)
        return super().read(block_ids, group)

    @contextlib.contextmanager
    def write(self, block_ids: Sequence[int], group: int = 0) -> Iterator[Run]:
        """Yield the blocks' addresses. A copy to there waits for everything that the engine still
        does with them.
        """
        if not self._beside:
            self.mark()
        self._driver.follow(self._stream, self._marked)
        yield self.layouts[group].run(block_ids)

    def close(self) -> None:
        """Free the stream and the event. No copy may be running, and the pools must be closed."""
        self._driver.free_event(self._marked)
        self._driver.end_stream(self._stream)
        self._driver.close()


def engine_stream(device: object) -> int:
    """Return the stream on which the engine computes, on the calling thread."""
    from torch.cuda import current_stream

    return int(current_stream(device).cuda_stream)


def source_of(
    *layouts: Pieces, urgent: bool, own_stream: bool, logger: logging.Logger
) -> BlockSource:
    """Return the source for the device that holds the blocks. With ``own_stream`` copies run
    concurrently with the engine; otherwise the engine waits for them. ``urgent``: a request waits
    for them. A GPU without cupy is staged through host memory, with a warning.
    """
    groups = [one for one in layouts if isinstance(one, GroupLayout)]
    device = groups[0].device
    if device == "cpu":
        return BlockSource(*layouts)
    if device == "cuda":
        try:
            driver = CupyDriver(layouts[0].tensors[0].device.index or 0)
        except EngineUnavailableError as error:
            logger.warning("beluga: blocks are staged in host memory: %s", error)
        else:
            return DeviceSource(*layouts, driver=driver, urgent=urgent, beside=own_stream)
    return StagedSource(*groups, own_stream=own_stream)
