# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reply lines may contain anything and change while they are read: a client accepts a whole line or
none, and returns only replies whose checksum matches, or an error. Forged records and entries
outside the pool's data are misses or errors, and the client survives.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import role
from support.blocks import keys
from support.emulation import fewer
from support.forge import LINE, PAGE, Lane, bulk_payload, line_hash, read, scribble, sealed, write

from beluga._ffi import ffi, lib
from beluga.errors import BadReplyError, BelugaError
from beluga.index import BlockState, IndexClient
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server
from beluga.transfer import CpuEngine

TRUE_WORD = b"the true word"
BULK = lib.BL_MESSAGE_BULK
INLINE = lib.BL_MESSAGE_INLINE_SIZE


class Liar:
    """A server that writes another reply before the right one, as a hostile server could."""

    def __init__(self, directory: Path) -> None:
        self.pool = Pool.create([directory / "a"], device_size=32 << 20, sparse=True, max_blocks=64)
        self.server = Server(self.pool)
        self.server.handle(METHOD_USER, self._answer)
        for method in (lib.BL_METHOD_LOOKUP, lib.BL_METHOD_RESERVE, lib.BL_METHOD_STAT):
            self.server.handle(method, lambda _: self.word)
        self.server.start()
        self.client = Client(self.pool)
        self.word = b""
        self._lie: Callable[[Lane, int], None] | None = None

    def request(self, lie: Callable[[Lane, int], None] | None = None) -> bytes:
        """Return the client's result when ``lie`` writes into the lane while the client waits."""
        self._lane, self._lie = Lane(self.client), lie
        return self.client.call(METHOD_USER)

    def _answer(self, _: bytes) -> bytes:
        lie, self._lie = self._lie, None  # a repeated call gets the right reply
        if lie:
            lie(self._lane, self._sequence())
            time.sleep(0.0005)  # usually the forged reply is read before the right one
        return TRUE_WORD

    def _sequence(self) -> int:
        slots = range(self._lane.slots)
        lines = (read(self.pool, self._lane.request(slot)) for slot in slots)
        return max(int.from_bytes(line[:4], "little") for line in lines)


def reply_line(payload: bytes, sequence: int, key: int, **fields: int) -> bytes:
    struct = ffi.new("bl_reply *", {"size": len(payload), **fields})
    ffi.memmove(struct.payload, payload, len(payload))
    return sealed(bytes(ffi.buffer(struct)), sequence, key)


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    with tempfile.TemporaryDirectory() as directory:
        liar = Liar(Path(directory))
        yield liar
        liar.pool.close()


@settings(max_examples=fewer(150), deadline=None)
@given(
    payload=st.binary(max_size=INLINE),
    flags=st.integers(0, 255),
    size=st.one_of(st.integers(0, INLINE), st.integers(0, 255)),
    status=st.one_of(st.integers(-1100, 10), st.integers(-(1 << 31), (1 << 31) - 1)),
    epoch=st.integers(0, (1 << 32) - 1),
)
def test_any_valid_line_decodes_to_a_reply_or_an_error(
    liar: Liar, *, payload: bytes, flags: int, size: int, status: int, epoch: int
) -> None:
    def lie(lane: Lane, sequence: int) -> None:
        fields = {"flags": flags, "size": size, "status": status, "epoch": epoch}
        write(liar.pool, lane.reply(sequence), reply_line(payload, sequence, lane.key, **fields))

    try:
        received = liar.request(lie)
    except (BelugaError, OSError):
        assert status < 0 or size > INLINE or flags & BULK
    else:
        expected = b"" if flags & BULK else payload.ljust(INLINE, b"\0")[:size]
        assert received == TRUE_WORD or (status >= 0 and received == expected)
    assert liar.request() == TRUE_WORD


@settings(max_examples=fewer(100), deadline=None)
@given(at=st.integers(0, LINE - 1), bit=st.integers(0, 7), piece=st.sampled_from((1, 8, LINE)))
def test_a_torn_reply_is_rejected(liar: Liar, at: int, bit: int, piece: int) -> None:
    def lie(lane: Lane, sequence: int) -> None:
        line = bytearray(reply_line(b"a lie", sequence, lane.key))
        line[at] ^= 1 << bit
        scribble(liar.pool, lane.reply(sequence), bytes(line), piece)

    assert liar.request(lie) == TRUE_WORD


@settings(max_examples=fewer(60), deadline=None)
@given(
    words=st.lists(st.binary(max_size=INLINE), min_size=2, max_size=4),
    times=st.integers(1, 100),
    piece=st.sampled_from((1, 4, 8, 16, 32)),
)
def test_a_reply_that_changes_during_a_read_is_old_or_new(
    liar: Liar, words: list[bytes], times: int, piece: int
) -> None:
    def lie(lane: Lane, sequence: int) -> None:
        lines = [reply_line(word, sequence, lane.key) for word in words]
        for _ in range(times):
            for line in lines:
                scribble(liar.pool, lane.reply(sequence), line, piece)

    assert liar.request(lie) in (*words, TRUE_WORD)


@settings(max_examples=fewer(60), deadline=None)
@given(
    length=st.integers(1, 4000),
    times=st.integers(0, 60),
    piece=st.sampled_from((1, 8, 64, 4096)),
    claimed=st.one_of(st.none(), st.integers(0, (1 << 32) - 1)),
)
def test_bytes_that_change_during_a_copy_match_the_checksum_or_are_an_error(
    liar: Liar, length: int, times: int, piece: int, claimed: int | None
) -> None:
    right, wrong = bytes([1]) * length, bytes([2]) * length

    def lie(lane: Lane, sequence: int) -> None:
        bulk = bulk_payload(right)
        if claimed is not None:
            bulk = claimed.to_bytes(4, "little") + bulk[4:]
        line = reply_line(bulk, sequence, lane.key, flags=BULK)
        scribble(liar.pool, lane.bulk_out(), right, LINE)
        write(liar.pool, lane.reply(sequence), line)
        for _ in range(times):
            scribble(liar.pool, lane.bulk_out(), wrong, piece)
            scribble(liar.pool, lane.bulk_out(), right, piece)

    try:
        received = liar.request(lie)
    except BadReplyError:
        assert times > 0 or claimed not in (None, length)
    else:
        assert received in (right, TRUE_WORD)
    assert liar.request() == TRUE_WORD


RECORD = st.fixed_dictionaries(
    {
        "offset": st.one_of(st.integers(0, 40 << 20), st.integers(0, (1 << 64) - 1)),
        "generation": st.integers(0, (1 << 64) - 1),
        "length": st.one_of(st.integers(0, 1 << 20), st.integers(0, (1 << 32) - 1)),
        "block": st.one_of(st.integers(0, 70), st.integers(0, (1 << 32) - 1)),
        "state": st.one_of(st.integers(0, 6), st.integers(0, (1 << 32) - 1)),
        "status": st.integers(-1100, 10),
    }
)


@settings(max_examples=fewer(150), deadline=None)
@given(
    count=st.one_of(st.none(), st.integers(0, 10)),
    records=st.one_of(st.lists(RECORD, min_size=4, max_size=4), st.lists(RECORD, max_size=5)),
    spare=st.one_of(st.just(b""), st.binary(max_size=8)),
    aligned=st.booleans(),
)
def test_arbitrary_records_are_inside_the_pool_or_an_error(
    liar: Liar, *, count: int | None, records: list[dict[str, int]], spare: bytes, aligned: bool
) -> None:
    head = ffi.new("bl_block_reply *", {"count": len(records) if count is None else count})
    lines = ffi.new("bl_block_record[]", records)
    for line in lines if aligned else ():
        line.offset &= (1 << 64) - 4096
    liar.word = bytes(ffi.buffer(head)) + bytes(ffi.buffer(lines)) + spare
    index, geometry = IndexClient(liar.client), liar.pool.geometry
    for call in (index.lookup, lambda keys: index.reserve(keys, length=4096)):
        try:
            reply = call(keys(range(4)))
        except (BelugaError, OSError):
            continue
        for grant in getattr(reply, "hits", reply):
            if grant.state.name == "REFUSED":
                continue
            assert geometry.data_offset <= grant.offset
            assert grant.offset + grant.length <= geometry.size
            assert grant.block < geometry.block_count_max
    assert liar.request() == TRUE_WORD


@pytest.mark.parametrize("more", [-8, 8])
def test_checksums_of_another_length_are_an_error(liar: Liar, more: int) -> None:
    liar.word = bytes(ffi.sizeof("bl_index_stat") + more)
    with pytest.raises(BadReplyError):
        IndexClient(liar.client).stat()


WITHIN = [[1, PAGE, 0, 1], [2, PAGE, 1024, 0], [17, 16 * PAGE, 4096, 0]]
BEYOND = [
    [1, PAGE, 1024, 1],  # the checksums are past the end,
    [1, PAGE, 64, 0],
    [1, 2 * PAGE, 0, 0],  # or the payload
    [16, 32 << 20, 0, 0],
    [1, 64 << 20, 16384, 1],
    [0, PAGE, 0, 0],
]

BLOCK, GENERATION = 3, 1 << 40


def plant(pool: Pool, half: int, key: Any, fingerprint: int, case: list[int]) -> bytes:
    """Return a record and a matching entry."""
    pages, length, chunk_size = case[:3]
    offset = pool.geometry.size - pages * PAGE
    fields = {"generation": GENERATION, "offset": offset, "length": length}
    entry = ffi.new(
        "bl_entry *",
        {
            **fields,
            "key": [int(word) for word in key[0]],
            "fingerprint": fingerprint,
            "chunk_size": chunk_size,
            "state": lib.BL_ENTRY_COMMITTED,
        },
    )
    raw = bytes(ffi.buffer(entry))[:60] + bytes(4)
    number = half * pool.geometry.block_count_max + BLOCK
    line = raw[:60] + line_hash(raw, BLOCK).to_bytes(4, "little")
    write(pool, pool.geometry.table_offset + number * LINE, line)
    fields["length"] = min(length, max(pages, 1) * PAGE)  # fits, whatever the entry contains
    record = ffi.new("bl_block_record *", {**fields, "block": BLOCK})
    return bytes(ffi.buffer(record))


def lie(directory: str, cases: list[list[int]]) -> None:
    """Be a hostile server and its client. Try every case with every function that reads or writes.

    A case is [end, length, chunk_size, verify]: a record ``end`` pages before the end of the pool's
    data, and a matching entry, for blocks of that shape. Prints a line for each call and its
    result, so a call that ends the process is named in the last line.
    """
    pool = Pool.create([Path(directory) / "a"], device_size=16 << 20, sparse=True, max_blocks=64)
    word = b""
    states = {
        lib.BL_METHOD_LOOKUP: BlockState.HIT,
        lib.BL_METHOD_RESERVE: BlockState.GRANTED,
        lib.BL_METHOD_COMMIT: BlockState.HIT,
    }
    head = bytes(ffi.buffer(ffi.new("bl_block_reply *", {"count": 1})))

    def handler(state: BlockState) -> Callable[[bytes], bytes]:
        return lambda _: head + word[:24] + int(state).to_bytes(4, "little") + word[28:]

    server = Server(pool)
    for method, state in states.items():
        server.handle(method, handler(state))
    for method in (lib.BL_METHOD_RELEASE, lib.BL_METHOD_ABORT):
        server.handle(method, lambda _: head)
    server.start()
    client = Client(pool)
    half = client.stat().epoch % 2
    for case in cases:
        _, length, chunk_size, verify = case
        target = np.zeros((1, length), np.uint8)
        for engine in (None, CpuEngine(pool)):
            settings = {} if engine is None else {"engine": engine}
            cache = KVCache(
                client,
                namespace="liar",
                chunk_size=chunk_size,
                check_checksums=bool(verify),
                **settings,
            )
            key = cache.keys([bytes(16)])
            word = plant(pool, half, key, cache.fingerprint, case)
            index = IndexClient(client)
            calls: dict[str, Callable[[], object]] = {
                "get": lambda c=cache, k=key, t=target: c.get(k, t).hits,
                "put": lambda c=cache, k=key, t=target: c.put(k, t).stored,
                "lookup": lambda m=index, k=key: len(m.lookup(k).hits),
            }
            for name, call in calls.items():
                print(json.dumps([case, name, engine is not None]), flush=True)
                try:
                    outcome: object = call()
                except BelugaError as error:
                    outcome = type(error).__name__
                print(json.dumps(outcome), flush=True)
    pool.close()


def outcomes(directory: Path, cases: list[list[int]]) -> list[tuple[str, object]]:
    """Return the calls and their results."""
    ended = role.run(lie, directory, cases, timeout_s=120)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, (lines[-1:], ended.stderr[-2000:])
    assert len(lines) == len(cases) * 12
    return [(call[1], outcome) for call, outcome in zip(lines[::2], lines[1::2], strict=True)]


def test_a_forged_record_past_the_end_of_the_pool_is_no_hit(shm: Path) -> None:
    for call, outcome in outcomes(shm, BEYOND):
        if call == "lookup":  # the caller does not specify the length of the chunks
            assert outcome in (1, "BadReplyError")
        else:
            assert outcome in (0, "BadReplyError"), call


def test_a_block_within_the_bounds_is_accepted(shm: Path) -> None:
    outcome = outcomes(shm, WITHIN)
    assert {answer for call, answer in outcome if call in ("get", "lookup")} == {1}
    assert {answer for call, answer in outcome if call == "put"} == {1}


def look_up_a_late_hit(path: str) -> None:
    pool = Pool.create([path], device_size=16 << 20, sparse=True, max_blocks=64)
    server = Server(pool)
    server.handle(lib.BL_METHOD_LOOKUP, lambda _: bytes(4) + (1).to_bytes(4, "little"))
    server.start()
    try:
        IndexClient(Client(pool)).lookup(keys([1]))
    except BadReplyError:
        print("refused")
    pool.close()


def test_a_reply_with_a_hit_after_the_hits_is_rejected(shm: Path) -> None:
    """The client would request the remaining keys forever."""
    ended = role.run(look_up_a_late_hit, shm / "a", timeout_s=20)
    assert ended.stdout.strip() == "refused", ended.stderr
