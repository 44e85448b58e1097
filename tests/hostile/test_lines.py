# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Lobby lines and entries may contain anything, and entries may change while they are read."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulation import fewer
from support.forge import LINE, line_hash, read, restless, sealed, write

from beluga._ffi import ffi, lib
from beluga.index import IndexClient, IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import Client

LENGTH = 8192
NAMES = [bytes([number]) * 16 for number in range(4)]
ODD_HOST, NEW_HOST = 40, 41
WORD = st.integers(0, (1 << 64) - 1)
HALF_WORD = st.integers(0, (1 << 32) - 1)


class Target:
    """A server with a few blocks, and their reader."""

    def __init__(self, directory: Path) -> None:
        self.pool = Pool.create(
            [directory / "a"],
            device_size=32 << 20,
            sparse=True,
            max_blocks=64,
            lane_count=8,
            coherence="software",
        )
        self.server = IndexServer(self.pool)
        self.server.start()
        self.cache = KVCache(self.pool, namespace="hostile")
        self.blocks = np.arange(len(NAMES) * LENGTH, dtype=np.uint32).astype(np.uint8)
        self.blocks = self.blocks.reshape(len(NAMES), LENGTH) * np.uint8(3)
        assert self.cache.put(NAMES, self.blocks).stored == len(NAMES)

    def entry(self, number: int) -> int:
        """Return the offset of a block's entry."""
        geometry, half = self.pool.geometry, self.cache.client.stat().epoch % 2
        (hit,) = IndexClient(self.cache.client).lookup(self.cache.keys([NAMES[number]])).hits
        return geometry.table_offset + (half * geometry.block_count_max + hit.block) * LINE

    def get(self, number: int) -> bool:
        """Return whether a block is a hit; checks that its bytes are correct."""
        room = np.zeros((1, LENGTH), dtype=np.uint8)
        if self.cache.get([NAMES[number]], room).hits == 0:
            return False
        assert (room[0] == self.blocks[number]).all()
        return True


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as directory:
        target = Target(Path(directory))
        yield target
        target.cache.close()
        target.pool.close()


def lobby(host: int, line: int) -> int:
    return int(lib.BL_LOBBY_OFFSET) + host * int(lib.BL_LOBBY_STRIDE) + line * 128


@settings(max_examples=fewer(30), deadline=None)
@given(
    sequence=st.integers(0, 100),
    fields=st.fixed_dictionaries(
        {
            "status": st.integers(-1100, 10),
            "nonce": WORD,
            "epoch": st.one_of(st.just(1), WORD),
            "lane": st.one_of(st.integers(0, 8), HALF_WORD),
        }
    ),
    half=st.integers(0, 1),
)
def test_a_reply_to_another_client_assigns_no_lane(
    target: Target, sequence: int, fields: dict[str, int], half: int
) -> None:
    struct = ffi.new("bl_lobby_reply *", fields)
    write(target.pool, lobby(NEW_HOST, 1 + half), sealed(bytes(ffi.buffer(struct)), sequence, 0))
    with Client(target.pool, host=NEW_HOST) as client:
        client.ping()
        assert client.stat().lane < target.pool.geometry.lane_count


def forged(entry: bytes, block: int, fields: dict[str, int]) -> bytes:
    """Return the entry with other fields and a valid check; its key is the block's number."""
    struct = ffi.new("bl_entry *")
    ffi.memmove(struct, entry, LINE)
    for name, value in fields.items():
        setattr(struct, name, value)
    struct.check = 0
    line = bytes(ffi.buffer(struct))
    return line[:60] + line_hash(line, block).to_bytes(4, "little")


@settings(max_examples=fewer(60), deadline=None)
@given(
    fields=st.dictionaries(
        st.sampled_from(
            ("generation", "fingerprint", "length", "chunk_size", "checksums_crc", "state")
        ),
        st.one_of(st.integers(0, 3), st.integers(0, 1 << 20), HALF_WORD),
        max_size=3,
    ),
    elsewhere=st.booleans(),
    piece=st.sampled_from((1, 8, 16, 32, LINE)),
)
def test_an_entry_that_changes_during_a_read_yields_correct_bytes_or_a_miss(
    target: Target, fields: dict[str, int], elsewhere: bool, piece: int
) -> None:
    place, other = target.entry(0), target.entry(1)
    entry = read(target.pool, place)
    if elsewhere:  # another block's bytes, with their checksums
        struct = ffi.new("bl_entry *")
        ffi.memmove(struct, read(target.pool, other), LINE)
        fields = {"offset": struct.offset, "checksums_crc": struct.checksums_crc, **fields}
    geometry = target.pool.geometry
    block = (place - geometry.table_offset) // LINE % geometry.block_count_max
    assert forged(entry, block, {}) == entry
    with restless(target.pool, place, (entry, forged(entry, block, fields)), piece):
        for _ in range(5):
            target.get(0)
            assert target.get(1)
    assert target.get(0)


@pytest.mark.parametrize("name", ["generation", "fingerprint", "state"])
def test_an_entry_of_another_block_is_a_miss(target: Target, name: str) -> None:
    place, geometry = target.entry(0), target.pool.geometry
    block = (place - geometry.table_offset) // LINE % geometry.block_count_max
    entry = read(target.pool, place)
    struct = ffi.new("bl_entry *")
    ffi.memmove(struct, entry, LINE)
    write(target.pool, place, forged(entry, block, {name: getattr(struct, name) + 1}))
    assert not target.get(0)
    write(target.pool, place, entry)
    assert target.get(0)


@settings(max_examples=fewer(150), deadline=None)
@given(
    sequence=HALF_WORD,
    fields=st.fixed_dictionaries(
        {
            "operation": st.one_of(st.integers(0, 3), HALF_WORD),
            "nonce": st.one_of(st.integers(0, 3), WORD),
            "old_nonce": st.one_of(st.integers(0, 3), WORD),
            "host": st.one_of(st.just(ODD_HOST), HALF_WORD),
            "pid": HALF_WORD,
            "epoch": st.one_of(st.just(1), WORD),
        }
    ),
    boot_id=st.lists(WORD, min_size=2, max_size=2),
    torn=st.one_of(st.none(), st.integers(0, LINE - 1)),
)
def test_arbitrary_requests_of_one_host_do_not_affect_others(
    target: Target, sequence: int, fields: dict[str, int], boot_id: list[int], torn: int | None
) -> None:
    # the last test of this pool, because it may use up the lanes
    struct = ffi.new("bl_lobby_request *", {**fields, "boot_id": boot_id})
    line = bytearray(sealed(bytes(ffi.buffer(struct)), sequence, 0))
    if torn is not None:
        line[torn] ^= 1
    write(target.pool, lobby(ODD_HOST, 0), bytes(line))
    assert target.get(0)
    assert target.server.failure is None
