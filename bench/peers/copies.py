# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Copies in usual Python, with which the engines are compared.

Each ends as an engine's copy does: a write's bytes are flushed to memory and fenced, and a read
follows the invalidation of this host's cached copies.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from beluga._ffi import core, ffi, lib

from ..harness.scene import Scene, Work

Operation = tuple[Callable[[int], None], Sequence[int]]
"""A function that copies the block of a number, and the numbers."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: ``make`` returns an operation over a work's blocks; ``missing`` has the reason if it
    cannot.
    """

    name: str
    make: Callable[[Scene, Work], Operation]
    missing: Callable[[], str | None] = lambda: None


class _Arrays:
    """Return a work's blocks as arrays: pages of the engine's memory, runs of the pool's."""

    def __init__(self, scene: Scene, work: Work) -> None:
        fragment = work.fragment_size
        pages = len(scene.memory) // fragment
        self.pages = scene.memory[: pages * fragment].reshape(pages, fragment)
        near = (work.private_addresses - np.uint64(scene.memory.ctypes.data)) // np.uint64(fragment)
        self.indices = near.astype(np.int64).reshape(-1, work.row_count)
        self.near = work.private_addresses.reshape(-1, work.row_count).tolist()
        self.far = work.pool_addresses.reshape(-1, work.row_count).tolist()
        self.blocks = [
            np.frombuffer(
                memoryview(ffi.buffer(ffi.cast("uint8_t *", far[0]), work.size)), np.uint8
            ).reshape(work.row_count, fragment)
            for far in self.far
        ]
        self.buffer = np.zeros((work.row_count, fragment), np.uint8)
        self.offsets = work.offsets
        self.size, self.writes = work.size, work.case == "gather_write"

    def address(self, block: int) -> core.void_p:
        return ffi.cast("void *", self.far[block][0])

    def flush(self, block: int) -> None:
        lib.bl_flush(self.address(block), self.size)
        lib.bl_fence()

    def drop(self, block: int) -> None:
        lib.bl_drop(self.address(block), self.size)


def _indexed(scene: Scene, work: Work) -> Operation:
    """Make one indexed copy to or from a contiguous array, and one contiguous copy."""
    at = _Arrays(scene, work)

    def write(block: int) -> None:
        np.take(at.pages, at.indices[block], axis=0, out=at.buffer, mode="clip")
        np.copyto(at.blocks[block], at.buffer)
        at.flush(block)

    def read(block: int) -> None:
        at.drop(block)
        np.copyto(at.buffer, at.blocks[block])
        at.pages[at.indices[block]] = at.buffer

    return write if at.writes else read, range(len(at.far))


def _torch(scene: Scene, work: Work) -> Operation:
    """Make the same copies by torch."""
    import torch

    at = _Arrays(scene, work)
    pages, buffer = torch.from_numpy(at.pages), torch.from_numpy(at.buffer)
    indices = torch.from_numpy(at.indices)
    blocks = [torch.from_numpy(block) for block in at.blocks]

    def write(block: int) -> None:
        torch.index_select(pages, 0, indices[block], out=buffer)
        blocks[block].copy_(buffer)
        at.flush(block)

    def read(block: int) -> None:
        at.drop(block)
        buffer.copy_(blocks[block])
        pages.index_copy_(0, indices[block], buffer)

    return write if at.writes else read, range(len(at.far))


def _memcpy(scene: Scene, work: Work) -> Operation:
    """Make a Python loop with a memmove for each fragment."""
    at, fragment = _Arrays(scene, work), work.fragment_size
    move = ctypes.memmove

    def write(block: int) -> None:
        for near, far in zip(at.near[block], at.far[block], strict=True):
            move(far, near, fragment)
        at.flush(block)

    def read(block: int) -> None:
        at.drop(block)
        for near, far in zip(at.near[block], at.far[block], strict=True):
            move(near, far, fragment)

    return write if at.writes else read, range(len(at.far))


def _bounce(scene: Scene, work: Work) -> Operation:
    """Make two steps, as in the paper's Exp 9: to a private buffer, then by one pool copy of
    ours.
    """
    at = _Arrays(scene, work)
    buffer = ffi.from_buffer("uint8_t[]", at.buffer, require_writable=True)
    handle = scene.pool.handle

    def write(block: int) -> None:
        np.take(at.pages, at.indices[block], axis=0, out=at.buffer, mode="clip")
        lib.bl_pool_write(handle, at.offsets[block], buffer, at.size)

    def read(block: int) -> None:
        lib.bl_pool_read(handle, at.offsets[block], buffer, at.size)
        at.pages[at.indices[block]] = at.buffer

    return write if at.writes else read, range(len(at.far))


def _no_torch() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed"


PEERS = (
    Peer("numpy indexed copy + contiguous copy", _indexed),
    Peer("torch indexed copy + contiguous copy", _torch, _no_torch),
    Peer("Python loop of memcpys", _memcpy),
    Peer("two-step bounce", _bounce),
)
