# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plants damage: every kind that a check of a pool must find, and its consequences.

Lines of a pool are read, changed, given a valid check and written back. The pool has no server. The
one of epoch 2 was killed: the check examines its half, 0; half 1 belongs to the epoch before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from beluga._ffi import ffi, lib
from beluga.pool import Pool

LINE = 64
MASK = (1 << 64) - 1

# A second implementation of csrc/format/line.h: a test must not use the code under test to check
# whether a line is whole.
_ADD = (
    *(0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
    *(0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917),
)
_TIMES = (
    *(0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93),
    *(0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3),
)

HALF, HISTORY = 0, 1
EPOCH = 2
CANDIDATES = 4096
LOBBY = 16384
PAGE = 4096
STRIPE = 2 << 20


def line_hash(words: list[int], key: int) -> int:
    total = (key + 0x9E3779B97F4A7C15) * 0xDA942042E4DD58B5
    total += sum((word ^ a) * t for word, a, t in zip(words, _ADD, _TIMES, strict=True))
    total &= MASK
    total ^= total >> 29
    return (total * 0x9FB21C651E98DF25 & MASK) >> 32


def words_of(raw: bytes) -> list[int]:
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(0, LINE, 8)]


def seal_table(raw: bytes, key: int) -> bytes:
    """Set the check at the end of a line."""
    words = words_of(raw)
    words[7] &= 0xFFFFFFFF
    return raw[:60] + line_hash(words, key).to_bytes(4, "little")


def seal_message(raw: bytes, key: int) -> bytes:
    """Set the check of a line that ends in its check and its sequence."""
    raw = raw[:56] + bytes(4) + raw[:4]
    return raw[:56] + line_hash(words_of(raw), key).to_bytes(4, "little") + raw[60:]


class Lines:
    """The lines of a mapped pool; changes through it can be undone."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._before: dict[int, bytes] = {}

    def at(self, offset: int) -> memoryview:
        """Return the line itself, which may be overwritten."""
        address = lib.bl_pool_address(self.pool.handle, offset)
        view = memoryview(ffi.buffer(address, LINE))
        self._before.setdefault(offset, bytes(view))
        return view

    def read(self, kind: str, offset: int) -> Any:
        """Return a private copy as a struct of the pool format."""
        struct = ffi.new(f"{kind} *")
        ffi.memmove(struct, bytes(self.at(offset)), LINE)
        return struct

    def flip(self, offset: int, byte: int) -> None:
        self.at(offset)[byte] ^= 1

    def forge(
        self,
        kind: str,
        offset: int,
        key: int,
        seal: Callable[[bytes, int], bytes],
        /,
        **fields: Any,
    ) -> None:
        """Write other values into some fields, and correct the check."""
        struct = self.read(kind, offset)
        for name, value in fields.items():
            setattr(struct, name, value)
        self.at(offset)[:] = seal(bytes(ffi.buffer(struct)), key)

    def undo(self) -> None:
        for offset, before in self._before.items():
            self.at(offset)[:] = before
        self._before.clear()


class Ground(Lines):
    """The pool that damage is planted in."""

    def epoch(self, half: int) -> int:
        return half * 256

    def heartbeat(self) -> int:
        return self.epoch(HALF) + 128

    def session(self, lane: int) -> int:
        return self.pool.geometry.session_offset + lane * LINE

    def lane(self, lane: int) -> int:
        return self.pool.geometry.lane_offset + lane * self.pool.geometry.lane_stride

    def request(self, slot: int) -> int:
        return self.lane(0) + PAGE + slot * 128

    def reply(self, slot: int) -> int:
        return self.request(slot) + self.pool.geometry.slot_count * 128

    def mark(self, stripe: int) -> int:
        return self.pool.geometry.extent_offset + stripe * LINE

    def entry(self, block: int) -> int:
        return self.pool.geometry.table_offset + block * LINE

    def name(self, block: int) -> int:
        return self.pool.geometry.name_offset + block * LINE

    @property
    def data(self) -> int:
        return self.pool.geometry.data_offset

    @property
    def free_stripe(self) -> int:
        """Return the first of the stripes at the pool's end, which no extent has."""
        return self.pool.geometry.stripe_count - 72

    def forge_table(self, kind: str, offset: int, key: int, /, **fields: Any) -> None:
        self.forge(kind, offset, key, seal_table, **fields)

    def forge_slot(self, kind: str, offset: int, /, **fields: Any) -> None:
        session = self.read("bl_session_line", self.session(0))
        key = session.nonce + session.epoch * 0xD6E8FEB86659FD93 & MASK
        self.forge(kind, offset, key, seal_message, **fields)

    def forge_entry(self, block: int, /, **fields: Any) -> None:
        self.forge_table("bl_entry", self.entry(block), block, **fields)

    def forge_mark(self, stripe: int, /, **fields: Any) -> None:
        self.forge_table("bl_extent_line", self.mark(stripe), stripe, **fields)

    def open_mark(self, stripe: int, block_size: int, stripes: int, blocks: int) -> None:
        self.forge_mark(
            stripe,
            epoch=EPOCH,
            generation=EPOCH << 40 | 1 << 30 | stripe,
            first_stripe=stripe,
            stripe_count=stripes,
            block_size=block_size,
            block_count=blocks,
            state=1,
        )


@dataclass(frozen=True)
class Plant:
    kind: str
    plant: Callable[[Ground], object]
    also: set[str] = field(default_factory=set)  # findings that may be consequences
    payload: bool = False


def _overlap_extents(g: Ground) -> None:
    for stripe in (g.free_stripe, g.free_stripe + 1):
        g.open_mark(stripe, 2 * STRIPE, 2, 1)


def _alike(g: Ground, *names: str) -> None:
    """Give block 9 some of block 8's fields."""
    eight = g.read("bl_entry", g.entry(8))
    values = {"key": list(eight.key), "offset": eight.offset, "generation": eight.generation}
    g.forge_entry(9, **{name: values[name] for name in names})


def _beside(g: Ground, by: int) -> None:
    """Move block 8 to overlap its neighbor."""
    g.forge_entry(8, offset=g.read("bl_entry", g.entry(8)).offset + by)


def _session_twice(g: Ground) -> None:
    zero = g.read("bl_session_line", g.session(0))
    g.forge_table("bl_session_line", g.session(1), 1, nonce=zero.nonce, epoch=2, state=1)


def _wrong_slot(kind: str, offset: Callable[[Ground], int]) -> Callable[[Ground], None]:
    def plant(g: Ground) -> None:
        g.forge_slot(kind, offset(g), sequence=g.read(kind, offset(g)).sequence + 1)

    return plant


def _torn(offset: Callable[[Ground], int]) -> Callable[[Ground], None]:
    return lambda g: g.flip(offset(g), 60)


HOMELESS = {"entry-homeless"}


def _epoch(**fields: int) -> Callable[[Ground], None]:
    return lambda g: g.forge_table("bl_epoch_line", g.epoch(HISTORY), HISTORY, **fields)


def _candidate(**fields: int) -> Callable[[Ground], None]:
    return lambda g: g.forge_table("bl_candidate_line", CANDIDATES, 0, **fields)


def _session(**fields: int) -> Callable[[Ground], None]:
    return lambda g: g.forge_table("bl_session_line", g.session(0), 0, **fields)


def _lobby(kind: str, place: int, **fields: int) -> Callable[[Ground], None]:
    return lambda g: g.forge(kind, LOBBY + place, 0, seal_message, **fields)


def _mark(**fields: Any) -> Callable[[Ground], None]:
    return lambda g: g.forge_mark(0, **fields)


def _entry(**fields: Any) -> Callable[[Ground], None]:
    return lambda g: g.forge_entry(8, **fields)


def _reserved(kind: str, offset: Callable[[Ground], int], key: int) -> Callable[[Ground], None]:
    def plant(g: Ground) -> None:
        reserved = g.read(kind, offset(g)).reserved
        g.forge_table(kind, offset(g), key, reserved=7 if isinstance(reserved, int) else [7])

    return plant


def _stray(offset: Callable[[Ground], int]) -> Callable[[Ground], None]:
    return lambda g: g.flip(offset(g), 5)


def _copied(g: Ground) -> None:
    g.at(g.entry(8))[:] = g.at(g.entry(9))


def _payload(byte: int) -> Callable[[Ground], None]:
    """Write into block 8's stored bytes: payload, or the checksums behind it."""

    def plant(g: Ground) -> None:
        start = g.read("bl_entry", g.entry(8)).offset
        g.flip(start + byte // LINE * LINE, byte % LINE)

    return plant


REQUEST, REPLY = "bl_request", "bl_reply"
LENGTH = 100_000
VECTOR = (LENGTH + LINE - 1) // LINE * LINE

PLANTS = (
    Plant("epoch-damaged", lambda g: g.flip(g.epoch(HISTORY), 3)),
    Plant("epoch-damaged", lambda g: g.flip(g.epoch(HISTORY), 61)),
    Plant("epoch-half", _epoch(epoch=2)),
    Plant("epoch-half", _epoch(epoch=0)),
    Plant("epoch-state", _epoch(state=9)),
    Plant("epoch-state", _epoch(state=0)),
    Plant("epoch-nonsense", _epoch(host=64)),
    Plant("epoch-nonsense", _epoch(nonce=0)),
    Plant("epoch-future", _epoch(epoch=(1 << 24) + 1), {"heartbeat-strange"}),
    Plant("heartbeat-damaged", lambda g: g.flip(g.heartbeat(), 0)),
    Plant(
        "heartbeat-strange",
        lambda g: g.forge_table("bl_heartbeat_line", g.heartbeat(), 77, nonce=77),
    ),
    Plant("epoch-damaged", lambda g: g.flip(g.epoch(HISTORY) + LINE, 3)),
    Plant("candidate-damaged", lambda g: g.flip(CANDIDATES, 9)),
    Plant("candidate-damaged", lambda g: g.flip(CANDIDATES + LINE, 9)),
    Plant("candidate-nonsense", _candidate(ballot=65)),
    Plant("candidate-nonsense", _candidate(accepted=1 << 40)),
    Plant("candidate-nonsense", _candidate(nonce=0)),
    Plant("candidate-nonsense", _candidate(host=64)),
    Plant("candidate-nonsense", _candidate(epoch=0)),
    Plant("candidate-future", _candidate(epoch=1 << 24)),
    Plant("lobby-request-damaged", lambda g: g.flip(LOBBY, 9)),
    Plant("lobby-request-damaged", _torn(lambda _: LOBBY)),
    Plant("lobby-request-nonsense", _lobby("bl_lobby_request", 0, operation=9)),
    Plant("lobby-request-nonsense", _lobby("bl_lobby_request", 0, nonce=0)),
    Plant("lobby-request-future", _lobby("bl_lobby_request", 0, epoch=99)),
    Plant("lobby-request-host", _lobby("bl_lobby_request", 0, host=5)),
    Plant("lobby-reply-damaged", lambda g: g.flip(LOBBY + 128, 9)),
    Plant("lobby-reply-damaged", _torn(lambda _: LOBBY + 128)),
    Plant("lobby-reply-nonsense", _lobby("bl_lobby_reply", 128, lane=1 << 20)),
    Plant("lobby-reply-nonsense", _lobby("bl_lobby_reply", 128, status=5)),
    Plant("lobby-reply-nonsense", _lobby("bl_lobby_reply", 128, live_count=1 << 20)),
    Plant("lobby-reply-future", _lobby("bl_lobby_reply", 128, epoch=99)),
    Plant("session-damaged", lambda g: g.flip(g.session(0), 30)),
    Plant("session-state", _session(state=7)),
    Plant("session-host", _session(host=64)),
    Plant("session-nonsense", _session(nonce=0)),
    Plant("session-nonsense", _session(epoch=0)),
    Plant("session-future", _session(epoch=99)),
    Plant("session-twice", _session_twice),
    Plant("lane-heartbeat-damaged", lambda g: g.flip(g.lane(0), 2)),
    Plant("request-damaged", lambda g: g.flip(g.request(3), 20)),
    Plant("request-damaged", _torn(lambda g: g.request(3))),
    Plant("request-nonsense", lambda g: g.forge_slot(REQUEST, g.request(3), size=41)),
    Plant("request-nonsense", lambda g: g.forge_slot(REQUEST, g.request(3), flags=2)),
    Plant("request-nonsense", _wrong_slot(REQUEST, lambda g: g.request(3))),
    Plant("reply-damaged", lambda g: g.flip(g.reply(3), 20)),
    Plant("reply-damaged", _torn(lambda g: g.reply(3))),
    Plant("reply-nonsense", lambda g: g.forge_slot(REPLY, g.reply(3), size=41)),
    Plant("reply-nonsense", _wrong_slot(REPLY, lambda g: g.reply(3))),
    Plant("extent-damaged", lambda g: g.flip(g.mark(0), 20), HOMELESS),
    Plant("extent-place", _mark(first_stripe=1), HOMELESS),
    Plant("extent-state", _mark(state=9), HOMELESS),
    Plant("extent-size", _mark(stripe_count=0), HOMELESS),
    Plant("extent-size", _mark(stripe_count=65), HOMELESS),
    Plant("extent-size", _mark(block_size=0), HOMELESS),
    Plant("extent-size", _mark(block_size=4097), HOMELESS),
    Plant("extent-beyond", lambda g: g.open_mark(g.free_stripe + 71, 2 * STRIPE, 2, 1)),
    Plant("extent-fit", lambda g: g.open_mark(g.free_stripe, STRIPE, 2, 3)),
    Plant("extent-fit", lambda g: g.open_mark(g.free_stripe, 3 * STRIPE, 2, 0)),
    Plant("extent-overlap", _overlap_extents),
    Plant("extent-future", _mark(epoch=99), HOMELESS),
    Plant("extent-future", _mark(generation=99 << 40), HOMELESS),
    *(Plant("entry-damaged", lambda g, b=b: g.flip(g.entry(8), b)) for b in (0, 17, 25, 40, 60)),
    Plant("entry-damaged", _copied),
    Plant("entry-state", _entry(state=5)),
    Plant("entry-length", _entry(length=0)),
    Plant("entry-length", _entry(length=(1 << 32) - 1, chunk_size=0)),
    Plant("entry-chunk", _entry(chunk_size=63)),
    Plant("entry-unaligned", lambda g: g.forge_entry(8, offset=g.data + 64)),
    Plant("entry-beyond", _entry(offset=0)),
    Plant("entry-beyond", lambda g: g.forge_entry(8, offset=g.pool.geometry.size)),
    Plant("entry-beyond", _entry(offset=(1 << 64) - 4096)),
    Plant("entry-future", _entry(generation=3 << 40)),
    Plant("entry-homeless", lambda g: g.forge_entry(8, offset=g.data + g.free_stripe * STRIPE)),
    Plant("entry-homeless", _mark(state=2)),  # a retired extent has no blocks
    Plant("entry-overlap", lambda g: _alike(g, "offset")),
    *(Plant("entry-overlap", lambda g, by=by: _beside(g, by)) for by in (-PAGE, PAGE)),
    Plant("entry-twice", lambda g: _alike(g, "key")),
    Plant("entry-generation", lambda g: _alike(g, "generation")),
    Plant("checksums-damaged", _payload(VECTOR + 2), payload=True),
    Plant("checksums-damaged", _entry(checksums_crc=1), payload=True),
    Plant("payload-damaged", _payload(64_000), payload=True),
    Plant("payload-damaged", _payload(LENGTH - 1), payload=True),
    Plant("reserved", _reserved("bl_epoch_line", lambda g: g.epoch(HISTORY), HISTORY)),
    Plant("reserved", _reserved("bl_session_line", lambda g: g.session(0), 0)),
    Plant("reserved", _reserved("bl_extent_line", lambda g: g.mark(0), 0), HOMELESS),
    Plant("reserved", lambda g: g.forge_table("bl_entry", g.entry(8), 8, flags=4)),
    Plant("reserved", lambda g: g.forge_table("bl_name_line", g.name(8), 8, reserved=1)),
    Plant("name-damaged", lambda g: g.flip(g.name(8), 9)),
    Plant(
        "name-future",
        lambda g: g.forge_table("bl_name_line", g.name(8), 8, generation=(EPOCH + 1) << 40),
    ),
    Plant("reserved", lambda g: g.forge_slot(REQUEST, g.request(3), reserved=1)),
    Plant("stray", _stray(lambda g: g.heartbeat() + LINE)),
    Plant("stray", _stray(lambda _: LOBBY + LINE)),
    Plant("stray", _stray(lambda g: g.lane(0) + LINE)),
    Plant("stray", _stray(lambda g: g.mark(0) + 2 * g.pool.geometry.stripe_count * LINE)),
)
