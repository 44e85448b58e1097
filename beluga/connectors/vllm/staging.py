# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engine's blocks as memory that copy engines can read and write.

On a CPU, and on a GPU that the CUDA engine can drive (``DeviceSource``), the blocks are such memory
already. On any other accelerator they pass through a buffer in pinned host memory, which costs one
more copy. A step's results are complete when its stream has passed the mark set after it. A load is
complete before anything that the engine queues on its stream later.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.connectors.vllm.layout import GroupLayout
from beluga.errors import EngineUnavailableError
from beluga.kvcache import Run
from beluga.transfer import CudaDevice, CudaEngine, tensor_start

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator, Sequence

    from beluga.connectors.vllm.layout import Pieces
    from beluga.pool import Pool
    from beluga.transfer import CopyEngine


class BlockSource:
    """Blocks in this process's own memory. One thread at a time uses it, except for
    :meth:`mark`. Each group of layers has a layout; they are numbered from 0. With ``scattered``
    blocks may have other pieces than those of a layout.
    """

    scattered = True

    def __init__(self, *layouts: Pieces) -> None:
        self.layouts = layouts

    def mark(self) -> None:
        """Record that a step was given to the device. Later copies wait for its end."""

    def engine(self, pool: Pool) -> CopyEngine | None:
        """Create the engine that copies between the runs and this pool; None means the CPU."""
        del pool
        return None

    def read(self, block_ids: Sequence[int], group: int = 0) -> Run:
        """Return the blocks' bytes as they are now."""
        return self.layouts[group].run(block_ids)

    @contextlib.contextmanager
    def write(self, block_ids: Sequence[int], group: int = 0) -> Iterator[Run]:
        """Yield memory to be filled with the blocks' bytes. The engine has them afterwards."""
        yield self.layouts[group].run(block_ids)

    def close(self) -> None:
        """Free the device's resources. No copy may be running."""


class StagedSource(BlockSource):
    """Blocks in a device's memory, copied through a buffer of this process.

    With ``own_stream`` copies run concurrently with the engine's stream, after the mark, and this
    thread waits for them; otherwise the engine's stream runs them in its order.
    """

    scattered = False

    def __init__(self, *layouts: GroupLayout, own_stream: bool) -> None:
        import torch

        super().__init__(*layouts)
        self._torch = torch
        self._device = layouts[0].tensors[0].device
        self._views = [
            [self._view(tensor, piece, layout.block_count) for tensor, piece in layout.owned_pieces]
            for layout in layouts
        ]
        self._buffer: Any = torch.empty(0, dtype=torch.uint8)
        self._stream: Any = None
        self._marked: Any = None
        if own_stream and self._device.type != "cpu":
            self._stream = torch.Stream(self._device)

    def mark(self) -> None:
        """Record the current end of the engine's stream."""
        if self._device.type != "cpu":
            event = self._torch.Event(self._device)
            event.record()
            self._marked = event

    def read(self, block_ids: Sequence[int], group: int = 0) -> Run:
        """Copy the blocks out, after the mark, and wait for the copies."""
        ids = self._torch.as_tensor(block_ids, device=self._device)
        host = self._host(len(block_ids), group)
        with self._copy_stream():
            offset = 0
            for view in self._views[group]:
                part = host[:, offset : offset + view.shape[1]]
                part.copy_(view.index_select(0, ids), non_blocking=True)
                offset += view.shape[1]
        self._wait()
        return self._run(host)

    @contextlib.contextmanager
    def write(self, block_ids: Sequence[int], group: int = 0) -> Iterator[Run]:
        """Yield a buffer to be filled. It is then copied in, after the mark, and waited for."""
        host = self._host(len(block_ids), group)
        yield self._run(host)
        ids = self._torch.as_tensor(block_ids, device=self._device)
        with self._copy_stream():
            offset = 0
            for view in self._views[group]:
                part = host[:, offset : offset + view.shape[1]]
                view.index_copy_(0, ids, part.to(self._device, non_blocking=True))
                offset += view.shape[1]
        self._wait()  # the next load refills the buffer

    def _view(self, tensor: Any, piece: Any, count: int) -> Any:
        """Return a piece of every block as bytes of shape (blocks, piece)."""
        storage = tensor.untyped_storage()
        flat = self._torch.empty(0, dtype=self._torch.uint8, device=self._device).set_(storage)
        offset = piece.address - storage.data_ptr()
        return flat.as_strided((count, piece.size), (piece.stride, 1), offset)

    def _host(self, count: int, group: int) -> Any:
        """Return a part of the buffer, as bytes of shape (blocks, size of a block)."""
        size = self.layouts[group].block_size
        if len(self._buffer) < count * size:
            pinned = self._device.type != "cpu"
            self._buffer = self._torch.empty(
                count * size, dtype=self._torch.uint8, pin_memory=pinned
            )
        return self._buffer[: count * size].view(count, size)

    def _copy_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the stream for copies. The steps before the mark still read and write these
        blocks, so any stream but the engine's own must wait for the mark.
        """
        if self._stream is None:
            return contextlib.nullcontext()
        if self._marked is not None:
            self._stream.wait_event(self._marked)
        stream: contextlib.AbstractContextManager[Any] = self._stream
        return stream

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        elif self._device.type != "cpu":
            self._torch.accelerator.current_stream(self._device).synchronize()

    def _run(self, host: Any) -> Run:
        count, size = host.shape
        fragments = np.empty((count, 2), dtype=np.uint64)
        fragments[:, 0] = tensor_start(host) + np.arange(count, dtype=np.uint64) * size
        fragments[:, 1] = size
        return Run(count, size, 1, fragments, [host])


class DeviceSource(BlockSource):
    """Blocks in GPU memory, which the CUDA engine copies directly. Kernels gather them into the
    pool and scatter them out of it, on the connector's own stream, concurrently with the engine's.
    Until the pool's windows are registered (in the background), the CUDA engine uses bounce
    buffers; no request waits for that. A stored block is published after the CPU has done the cache
    maintenance that the policy table requires for a GPU's writes.

    With ``urgent``, its stream has priority over others.
    With ``concurrent`` a load waits for what the engine had queued at the last :meth:`mark`;
    otherwise it waits for everything queued when the load begins.
    """

    def __init__(self, *layouts: Pieces, gpu: CudaDevice, urgent: bool, concurrent: bool) -> None:
        super().__init__(*layouts)
        self._gpu, self._concurrent = gpu, concurrent
        self._device = layouts[0].tensors[0].device
        self._stream = gpu.make_stream(urgent=urgent)
        self._marked = gpu.make_event()

    def engine(self, pool: Pool) -> CudaEngine:
        """Make an engine for the pool, which closes it. Raises
        :class:`~beluga.errors.TransferError`.
        """
        return CudaEngine(pool, self._gpu, self._stream)

    def mark(self) -> None:
        """Record the current end of the engine's stream."""
        self._gpu.record(self._marked, engine_stream(self._device))

    def read(self, block_ids: Sequence[int], group: int = 0) -> Run:
        """Return the blocks' addresses. A copy from there waits for the mark."""
        self._gpu.follow(self._stream, self._marked)
        return super().read(block_ids, group)

    @contextlib.contextmanager
    def write(self, block_ids: Sequence[int], group: int = 0) -> Iterator[Run]:
        """Yield the blocks' addresses. A copy to there waits for everything that the engine still
        does with them.
        """
        if not self._concurrent:
            self.mark()
        self._gpu.follow(self._stream, self._marked)
        yield self.layouts[group].run(block_ids)

    def close(self) -> None:
        """Free the stream and the event. No copy may be running, and the pools must be closed."""
        self._gpu.free_event(self._marked)
        self._gpu.end_stream(self._stream)


def engine_stream(device: object) -> int:
    """Return the stream on which the engine computes, on the calling thread."""
    from torch.cuda import current_stream

    return int(current_stream(device).cuda_stream)


def source_of(
    *layouts: Pieces, urgent: bool, own_stream: bool, logger: logging.Logger
) -> BlockSource:
    """Return the source for the device that holds the blocks. With ``own_stream`` copies run
    concurrently with the engine; otherwise the engine waits for them. ``urgent``: a request waits
    for them. A GPU without NVRTC is staged through host memory, with a warning.
    """
    groups = [layout for layout in layouts if isinstance(layout, GroupLayout)]
    device = groups[0].device
    if device == "cpu":
        return BlockSource(*layouts)
    if device == "cuda":
        try:
            gpu = CudaDevice(layouts[0].tensors[0].device.index or 0)
        except EngineUnavailableError as error:
            logger.warning("beluga: blocks are staged in host memory: %s", error)
        else:
            return DeviceSource(*layouts, gpu=gpu, urgent=urgent, concurrent=own_stream)
    return StagedSource(*groups, own_stream=own_stream)
