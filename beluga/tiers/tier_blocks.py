# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Where the blocks of a tier lie in its memory, and copies of blocks between two tiers.

Copies to and from a pool go through a copy engine and its plans. Copies between a GPU and other
memory go through the GPU's driver, and between two memories of this host through ``memcpy``.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from beluga.errors import LayoutError, TierError
from beluga.tiers.storage import MemoryType, Storage
from beluga.transfer import BlockLayout, CpuEngine, plan_blocks

if TYPE_CHECKING:
    from beluga.transfer import CopyEngine, CudaDriver

_LINE_SIZE = 64

_memcpy = ctypes.CDLL(None).memcpy  # called without the interpreter's lock
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


@dataclasses.dataclass(frozen=True, slots=True)
class TierBlocks:
    """The blocks of a tier: ``count`` of them, of ``length`` bytes each.

    ``layout`` has their addresses; blocks in a pool have offsets instead, and an ``engine``.
    """

    count: int
    length: int
    type: MemoryType
    storage: Storage | None = None
    layout: BlockLayout | None = None
    engine: CopyEngine | None = None
    driver: CudaDriver | None = None

    @classmethod
    def of_storage(
        cls, storage: Storage, length: int, engine: CopyEngine | None = None
    ) -> TierBlocks:
        """Cut a storage in blocks of ``length`` bytes, one after the other.

        ``engine`` copies blocks of a pool; None takes the CPU. Raises TierError.
        """
        count = storage.size // length if length > 0 else 0
        if not count:
            raise TierError(f"no block of {length} bytes fits into {storage.size} bytes")
        if storage.pool is None:
            view = storage.view((count, length), "U8")
            layout = BlockLayout([view], ("block", "dim"))
            return cls(count, length, storage.type, storage, layout, driver=storage.driver)
        if length % _LINE_SIZE or storage.pool_offset % _LINE_SIZE:
            raise TierError(f"blocks in a pool begin with a line of {_LINE_SIZE} bytes")
        engine = engine or CpuEngine(storage.pool)
        return cls(count, length, storage.type, storage, engine=engine)

    @classmethod
    def of_layout(
        cls,
        layout: BlockLayout,
        memory_type: MemoryType,
        driver: CudaDriver | None = None,
    ) -> TierBlocks:
        """Take an inference engine's blocks, which are scattered over its tensors."""
        return cls(layout.block_count, layout.length, memory_type, layout=layout, driver=driver)

    def offsets(self, blocks: ArrayLike) -> NDArray[np.int64]:
        """Return where blocks begin in the pool. Raises TierError."""
        if self.storage is None or self.storage.pool is None:
            raise TierError("these blocks are not in a pool")
        wanted = np.asarray(blocks, np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.count):
            raise LayoutError(f"blocks {wanted.min()} to {wanted.max()} of {self.count}")
        self.storage.address()  # raises after close()
        return self.storage.pool_offset + wanted * self.length

    def placed(self) -> BlockLayout:
        """Return the layout. Raises TierError for blocks in a pool."""
        if self.layout is None:
            raise TierError("these blocks are in a pool and have no addresses")
        return self.layout


def copy_blocks(
    source: TierBlocks, source_blocks: Sequence[int], target: TierBlocks, blocks: Sequence[int]
) -> None:
    """Copy each of ``source_blocks`` to the block of ``blocks`` in the same place.

    On return the bytes have moved. A GPU copies on a stream of its own: what an engine computes
    must have ended before. Raises LayoutError or a TransferError.
    """
    if source.length != target.length or len(source_blocks) != len(blocks):
        raise LayoutError(
            f"{len(source_blocks)} blocks of {source.length} bytes do not fit {len(blocks)} of "
            f"{target.length}"
        )
    if not blocks:
        return
    if source.engine is None and target.engine is None:
        _copy_addresses(source, source_blocks, target, blocks)
        return
    pooled, other = (target, source) if target.engine is not None else (source, target)
    if other.engine is not None:
        staging = TierBlocks.of_storage(
            Storage.allocate(len(blocks) * source.length), source.length
        )
        every = range(len(blocks))
        copy_blocks(source, source_blocks, staging, every)
        copy_blocks(staging, every, target, blocks)
        return
    writes = pooled is target
    theirs, ours = (source_blocks, blocks) if writes else (blocks, source_blocks)
    layout = other.placed()
    plan = plan_blocks(
        layout.addresses(theirs),
        layout.sizes,
        pooled.offsets(ours),
        owners=layout.owners,
        read_only=layout.read_only,
    )
    engine = pooled.engine
    assert engine is not None  # noqa: S101  for mypy: it was looked at above
    (engine.gather_write(plan) if writes else engine.scatter_read(plan)).wait()


def _copy_addresses(
    source: TierBlocks, source_blocks: Sequence[int], target: TierBlocks, blocks: Sequence[int]
) -> None:
    to, of = target.placed(), source.placed()
    if to.read_only:
        raise LayoutError("the target's memory is read-only")
    runs = _runs(of, source_blocks, to, blocks)
    device = MemoryType.DEVICE in {source.type, target.type}
    driver = target.driver or source.driver
    if not device:
        for source_address, address, length in runs:
            _memcpy(address, source_address, length)
        return
    if driver is None:
        raise LayoutError("a GPU's memory needs a driver to be copied; give its storage one")
    driver.use()
    stream, event = driver.make_stream(urgent=False), driver.make_event()
    try:
        for source_address, address, length in runs:
            driver.copy(address, source_address, length, stream)
        driver.record(event, stream)
        driver.wait(event)
    finally:
        driver.free_event(event)
        driver.end_stream(stream)


def _runs(
    of: BlockLayout, source_blocks: Sequence[int], to: BlockLayout, blocks: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return source address, target address and length of each run that is one on both sides."""
    starts = [np.cumsum(layout.sizes) - layout.sizes for layout in (of, to)]
    cuts = np.union1d(*starts)
    lengths = np.diff(cuts, append=of.length)
    sides = []
    for layout, start, chosen in ((of, starts[0], source_blocks), (to, starts[1], blocks)):
        fragment = np.searchsorted(start, cuts, side="right") - 1
        inner = (cuts - start[fragment]).astype(np.uint64)
        sides.append((layout.addresses(chosen)[:, fragment] + inner).reshape(-1).tolist())
    return list(zip(*sides, np.tile(lengths, len(blocks)).tolist(), strict=True))
