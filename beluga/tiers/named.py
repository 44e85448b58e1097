# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Stores names of blocks in lower tiers, so that routers are notified when a block returns to the
pool.

A tier stores a record and bytes, but no name. So a named block is saved with padding to the end of
a page, whose last 64 bytes are a trailer::

    | payload | zeros | name, 48 bytes | length of the payload, 4 bytes | zeros, 12 bytes |

Its record has the bit :data:`NAMED`, and the total length. Unnamed blocks, including those saved by
versions without names, have no trailer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beluga.index import NAME
from beluga.tiers.tier import StoredBlock

PAGE_SIZE = 4096
NAMED = 1 << 31  # bit in chunk_size, which is never as large
TRAILER: np.dtype[np.void] = np.dtype([("name", NAME), ("length", "<u4"), ("zero", "V12")])


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
    for place in np.flatnonzero(names["block_tokens"]).tolist():
        length = int(blocks["length"][place])
        end = named_length(length)
        trailer = np.zeros(1, TRAILER)
        trailer["name"], trailer["length"] = names[place], length
        rows[place, length:end] = 0
        rows[place, end - TRAILER.itemsize : end] = trailer.view(np.uint8)
        blocks["length"][place] = end
        blocks["chunk_size"][place] |= np.uint32(NAMED)


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
    for place, block in enumerate(blocks):
        if block.name is not None:
            names[place] = block.name
    return names
