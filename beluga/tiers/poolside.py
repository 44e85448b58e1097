# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool's side (``csrc/kvcache/``) of a move between the pool and a lower tier: blocks of any
namespace, as bytes, with their names.

A tier stores a record and bytes, but no name. A router is notified by name when a block returns to
the pool, so a named block is saved with padding to the end of a page, whose last 64 bytes are a
trailer::

    | payload | zeros | name, 48 bytes | length of the payload, 4 bytes | zeros, 12 bytes |

Its record has the bit :data:`NAMED`, and the total length. Unnamed blocks, including those saved by
versions without names, have no trailer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi, lib
from beluga.errors import raise_for_status
from beluga.index import BLOCK_RECORD, NAME, BlockState
from beluga.rpc import nanoseconds
from beluga.tiers.tier import StoredBlock
from beluga.transfer import CopySettings, TransferClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from beluga._ffi import core
    from beluga.rpc import Client
    from beluga.transfer import IoHandle


_NO_QUEUE = nullcontext(ffi.NULL)

PAGE_SIZE = 4096
NAMED = 1 << 31  # bit in chunk_size, which is never as large
TRAILER: np.dtype[np.void] = np.dtype([("name", NAME), ("length", "<u4"), ("zero", "V12")])


def kinds(records: NDArray[np.void]) -> Iterator[NDArray[np.intp]]:
    """Group records with equal fingerprint, length and chunk_size. Returns the indices of each
    group, in order.
    """
    names = ["fingerprint", "length", "chunk_size"]
    if len(records) == 0:
        return
    if (records[names] == records[0][names]).all():
        yield np.arange(len(records))
        return
    _, which = np.unique(records[names], return_inverse=True)
    for kind in range(int(which.max()) + 1):
        yield np.flatnonzero(which == kind)


class PoolSide:
    """Reads and writes blocks of a pool over one session. Thread-safe.

    ``handle`` is the I/O handle of the host's link, which throttles the copies; None means no
    limit.
    """

    def __init__(self, client: Client, handle: IoHandle | None) -> None:
        self._client, self._handle = client, handle
        self._timeout_ns = nanoseconds(client.timeout_s)
        self._settings = CopySettings.default(client.pool).struct(1)

    def read(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Read blocks of one kind from their recorded locations, in the class OFFLOAD.

        ``records`` are of :data:`~beluga.index.LOWER_RECORD`; block i is read into ``payload[i]``.
        Returns which blocks are valid: a block that was evicted meanwhile is not. Reading neither
        pins a block nor counts as a use.
        """
        locations = np.zeros(len(records), BLOCK_RECORD)
        for name in ("offset", "generation", "block", "length"):
            locations[name] = records[name]
        locations["state"] = BlockState.HIT
        fragments = np.empty((len(records), 2), np.uint64)
        fragments[:, 0] = _address(payload) + np.arange(len(records), dtype=np.uint64) * np.uint64(
            payload.strides[0]
        )
        fragments[:, 1] = records["length"]
        states = np.zeros(len(records), np.uint8)
        out = ffi.from_buffer("uint8_t[]", states, require_writable=True)
        mismatches = ffi.new("uint64_t *")
        keys = np.ascontiguousarray(records["key"])  # the batch refers to its address
        with self._queue() as io_queue:
            batch = self._batch(records[0], keys, fragments, io_queue, TransferClass.OFFLOAD)
            batch.records = ffi.from_buffer("bl_block_record[]", locations)
            code = lib.bl_kv_get(self._client.session, batch, out, mismatches)
        raise_for_status(code, "reading blocks for a lower tier")
        hits: NDArray[np.bool_] = states == BlockState.HIT
        return hits

    def write(self, blocks: Sequence[StoredBlock], kind: TransferClass) -> NDArray[np.uint8]:
        """Put blocks of one kind into the pool, with their names. Returns the state of each, as a
        put does.
        """
        keys = np.array([block.record["key"] for block in blocks], np.uint64)
        fragments = np.array(
            [(_address(block.payload), len(block.payload)) for block in blocks], np.uint64
        )
        states, statuses = np.zeros(len(blocks), np.uint8), np.zeros(len(blocks), np.int32)
        out = (
            ffi.from_buffer("uint8_t[]", states, require_writable=True),
            ffi.from_buffer("int32_t[]", statuses, require_writable=True),
        )
        names = names_of(blocks)
        with self._queue() as io_queue:
            batch = self._batch(blocks[0].record, keys, fragments, io_queue, kind)
            if names is not None:
                batch.names = ffi.from_buffer("bl_name[]", names)
            code = lib.bl_kv_put(self._client.session, batch, *out)
        raise_for_status(code, "storing blocks of a lower tier")
        return states

    def _queue(self) -> AbstractContextManager[core.bl_io_queue | core.Null]:
        return _NO_QUEUE if self._handle is None else self._handle.using()

    def _batch(
        self,
        record: np.void,
        keys: NDArray[np.uint64],
        fragments: NDArray[np.uint64],
        io_queue: core.bl_io_queue | core.Null,
        kind: TransferClass,
    ) -> core.bl_kv_batch:
        return ffi.new(
            "bl_kv_batch *",
            {
                "keys": ffi.from_buffer("uint64_t[]", keys),
                "fragments": ffi.from_buffer("bl_fragment[]", fragments),
                "fingerprint": int(record["fingerprint"]),
                "timeout_ns": self._timeout_ns,
                "count": len(fragments),
                "fragment_count": 1,
                "length": int(record["length"]),
                "chunk_size": int(record["chunk_size"]),
                "check_checksums": True,
                "settings": self._settings,
                "io_queue": io_queue,
                "transfer_class": kind,
                "reserve_flags": lib.BL_RESERVE_BROUGHT,
            },
        )


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def padded(length: int) -> int:
    """Round a length up to whole pages."""
    return -(-length // PAGE_SIZE) * PAGE_SIZE


def named_length(length: int) -> int:
    """Return the size of a named block with its trailer."""
    return padded(length + TRAILER.itemsize)


def add_names(blocks: NDArray[np.void], rows: NDArray[np.uint8], names: NDArray[np.void]) -> None:
    """Add names to blocks of one length before they are saved. ``blocks`` are of
    :data:`beluga.tiers.BLOCK`, and ``rows`` have at least :func:`named_length` bytes.
    """
    for row in np.flatnonzero(names["block_tokens"]).tolist():
        length = int(blocks["length"][row])
        end = named_length(length)
        trailer = np.zeros(1, TRAILER)
        trailer["name"], trailer["length"] = names[row], length
        rows[row, length:end] = 0
        rows[row, end - TRAILER.itemsize : end] = trailer.view(np.uint8)
        blocks["length"][row] = end
        blocks["chunk_size"][row] |= np.uint32(NAMED)


def take_name(block: StoredBlock) -> StoredBlock | None:
    """Return a loaded block without its trailer, but with its name. Returns None, which is a miss,
    if its trailer is invalid.
    """
    record = block.record.copy()
    if not int(record["chunk_size"]) & NAMED:
        return block
    size = int(record["length"])
    if size < TRAILER.itemsize or size != len(block.payload):
        return None
    trailer = block.payload[size - TRAILER.itemsize :].copy().view(TRAILER)[0]
    length = int(trailer["length"])
    if named_length(length) != size:
        return None
    record["length"], record["chunk_size"] = length, int(record["chunk_size"]) ^ NAMED
    return dataclasses.replace(
        block, record=record, payload=block.payload[:length], name=trailer["name"]
    )


def names_of(blocks: Sequence[StoredBlock]) -> NDArray[np.void] | None:
    """Return the names of blocks as a put expects them, or None if no block has one."""
    if all(block.name is None for block in blocks):
        return None
    names = np.zeros(len(blocks), NAME)
    for row, block in enumerate(blocks):
        if block.name is not None:
            names[row] = block.name
    return names
