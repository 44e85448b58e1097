# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engine's blocks as memory that the pool's engines copy from and to.

On a CPU they are that. On a GPU that the CUDA engine can drive they are too (``device.py``); on any
other accelerator they go through a buffer in pinned host memory: a copy more, and the same bytes.
What a step has computed is complete when its stream has passed the mark set after it; what is
loaded is there before anything that the engine queues on its stream later.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.kvcache import Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from beluga.connectors.vllm.layout import BlockLayout
    from beluga.pool import Pool
    from beluga.transfer import Engine


class Source:
    """Blocks in this process's own memory. Used by one thread at a time, :meth:`mark` apart."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.block_size = layout.block_size

    def mark(self) -> None:
        """A step has been given to the device: what is moved from now on waits for its end."""

    def engine(self, pool: Pool) -> Engine | None:
        """Who copies between the runs and this pool; None for the CPU."""
        del pool
        return None

    def read(self, block_ids: Sequence[int]) -> Run:
        """Their bytes, as they are now."""
        return self.layout.run(block_ids)

    @contextlib.contextmanager
    def write(self, block_ids: Sequence[int]) -> Iterator[Run]:
        """Memory to be filled with their bytes; the engine has them after the block."""
        yield self.layout.run(block_ids)

    def close(self) -> None:
        """Give back what is the device's; nothing is being moved."""


class StagedSource(Source):
    """Blocks in a device's memory, by way of a buffer of this process.

    ``own_stream``: copy beside the engine's stream, after the mark, and wait for the copies; else
    the engine's stream does them in its order.
    """

    def __init__(self, layout: BlockLayout, *, own_stream: bool) -> None:
        import torch

        super().__init__(layout)
        self._torch = torch
        self._device = layout.tensors[0].device
        self._views = [self._view(tensor, piece) for tensor, piece in layout.parts]
        self._buffer: Any = torch.empty((0, layout.block_size), dtype=torch.uint8)
        self._stream: Any = None
        self._marked: Any = None
        if own_stream and self._device.type != "cpu":
            self._stream = torch.Stream(self._device)

    def mark(self) -> None:
        """Remember how far the engine's stream has to get."""
        if self._device.type != "cpu":
            event = self._torch.Event(self._device)
            event.record()
            self._marked = event

    def read(self, block_ids: Sequence[int]) -> Run:
        """Copy them out, after the mark, and wait for it."""
        ids = self._torch.as_tensor(block_ids, device=self._device)
        host = self._host(len(block_ids))
        with self._beside():
            place = 0
            for view in self._views:
                part = host[:, place : place + view.shape[1]]
                part.copy_(view.index_select(0, ids), non_blocking=True)
                place += view.shape[1]
        self._wait()
        return self._run(host)

    @contextlib.contextmanager
    def write(self, block_ids: Sequence[int]) -> Iterator[Run]:
        """A buffer to be filled; it is then copied in, after the mark, and waited for."""
        host = self._host(len(block_ids))
        yield self._run(host)
        ids = self._torch.as_tensor(block_ids, device=self._device)
        with self._beside():
            place = 0
            for view in self._views:
                part = host[:, place : place + view.shape[1]]
                view.index_copy_(0, ids, part.to(self._device, non_blocking=True))
                place += view.shape[1]
        self._wait()  # the buffer is filled anew by the next load

    def _view(self, tensor: Any, piece: Any) -> Any:
        """A piece of every block: bytes of shape (blocks, piece)."""
        storage = tensor.untyped_storage()
        flat = self._torch.empty(0, dtype=self._torch.uint8, device=self._device).set_(storage)
        offset = piece.address - storage.data_ptr()
        shape = (self.layout.block_count, piece.size)
        return flat.as_strided(shape, (piece.stride, 1), offset)

    def _host(self, count: int) -> Any:
        if len(self._buffer) < count:
            pinned = self._device.type != "cpu"
            shape = (count, self.block_size)
            self._buffer = self._torch.empty(shape, dtype=self._torch.uint8, pin_memory=pinned)
        return self._buffer[:count]

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        """Where copies run. The steps before the mark still read and write these blocks, so no
        stream but the engine's own may touch the blocks before it has passed the mark."""
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
        count = len(host)
        fragments = np.empty((count, 2), dtype=np.uint64)
        fragments[:, 0] = host.data_ptr() + np.arange(count, dtype=np.uint64) * self.block_size
        fragments[:, 1] = self.block_size
        return Run(count, self.block_size, 1, fragments, [host])
