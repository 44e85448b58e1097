# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Names of blocks in lower tiers: the pool tells routers of a block again when it comes back.

A tier keeps a record and bytes, and knows nothing of names. A block with a name is saved with bytes
behind it up to the end of a page, of which the last 64 are a trailer::

    | payload | zeros | name, 48 bytes | length of the payload, 4 bytes | zeros, 12 bytes |

Its record has the bit :data:`NAMED`, and the length of all this. Blocks without a name, among them
those that were saved before there were names, have no trailer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beluga.index import NAME
from beluga.tiers.tier import StoredBlock

PAGE_SIZE = 4096
NAMED = 1 << 31  # in chunk_size, which is never as large
TRAILER: np.dtype[np.void] = np.dtype([("name", NAME), ("length", "<u4"), ("zero", "V12")])


def padded(length: int) -> int:
    """Return the size of whole pages that hold so many bytes."""
    return -(-length // PAGE_SIZE) * PAGE_SIZE


def named_length(length: int) -> int:
    """Return how many bytes a block with a name has."""
    return padded(length + TRAILER.itemsize)


def add_names(blocks: NDArray[np.void], rows: NDArray[np.uint8], names: NDArray[np.void]) -> None:
    """Add names to blocks of one length that are to be saved. ``blocks`` are of
    :data:`beluga.tiers.BLOCK`, and ``rows`` have :func:`named_length` bytes at least.
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
    """Return a loaded block without its trailer, and with its name. Returns None if it has a
    trailer that was never written: it is a miss.
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
    """Return the names of blocks as a put takes them, or None if there are none."""
    if all(block.name is None for block in blocks):
        return None
    names = np.zeros(len(blocks), NAME)
    for place, block in enumerate(blocks):
        if block.name is not None:
            names[place] = block.name
    return names
