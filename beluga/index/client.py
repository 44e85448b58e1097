# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls of the block index, each with a batch of keys."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.errors import BadReplyError, BadValueError, raise_for_status
from beluga.index.stat import IndexStat
from beluga.rpc import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from beluga.rpc import Client

Keys = "NDArray[np.uint64]"
"""Keys are a C-contiguous uint64 array of shape (count, 2)."""


BLOCK_RECORD = record_dtype("bl_block_record")
"""Location of a block (``bl_block_record`` of ``csrc/format/pool_format.h``)."""


class BlockState(enum.IntEnum):
    """The state of a key in a reply (``bl_block_state``)."""

    MISS = 0
    HIT = 1
    PENDING = 2
    GRANTED = 3
    REFUSED = 4
    BELOW = 5

    @property
    def is_coming(self) -> bool:
        """Whether the block may soon be in the pool: a lower tier has it, or a session is writing
        it.
        """
        return self in {BlockState.BELOW, BlockState.PENDING}


_STATES = tuple(BlockState)


class RemovalReason(enum.IntEnum):
    """Why a key was removed from the index (``bl_removal_reason``)."""

    UNKNOWN = 0
    SPACE = 1
    ENTRY = 2
    REMOVED = 3
    RETIRED = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """The reply for one key: the block's location, or a grant to write it."""

    state: BlockState
    offset: int
    length: int
    generation: int
    block: int
    status: int
    key: tuple[int, int]


class Lookup:
    """The leading hits of a lookup: their ``count``, and the ``state`` of the next key (HIT if
    there is none).

    BELOW is a miss in the pool of a block that a lower tier has, or may have.
    """

    __slots__ = ("_keys", "_records", "count", "state")

    def __init__(
        self,
        count: int,
        state: BlockState,
        records: core.bl_block_record,
        keys: NDArray[np.uint64],
    ) -> None:
        self.count, self.state = count, state
        self._records, self._keys = records, keys

    @property
    def hits(self) -> tuple[Grant, ...]:
        """The hits as a tuple, built at each access; prefer ``count``."""
        return tuple(_grant(self._records[i], self._keys[i]) for i in range(self.count))

    def pins(self) -> Pins:
        """Return the hits of a lookup with ``pin``, to release them in one call."""
        return Pins(self.count, self._records, self.state)


@dataclasses.dataclass(slots=True)
class Pins:
    """The leading hits of a lookup, pinned for its session. ``count`` is 0 after the release.
    ``state`` is that of the next key, as in :class:`Lookup`.
    """

    count: int
    _records: core.bl_block_record = dataclasses.field(repr=False)
    state: BlockState = BlockState.MISS

    def records(self) -> NDArray[np.void]:
        """Return the blocks' locations for another session of this machine: an array of
        :data:`BLOCK_RECORD` of shape (count,).
        """
        size = max(self.count, 0) * BLOCK_RECORD.itemsize
        return np.frombuffer(bytes(ffi.buffer(self._records)[:size]), BLOCK_RECORD)


class SessionCalls:
    """Calls over a session, each with the client's timeout."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._timeout_ns = nanoseconds(client.timeout_s)

    def _call(self, doing: str, function: Callable[..., int], *arguments: object) -> int:
        """Call a function of C with the session and the timeout, and return its result. Raises the
        error of a negative one.
        """
        status = function(self._client.session, *arguments, self._timeout_ns)
        return raise_for_status(status, doing)


class IndexClient(SessionCalls):
    """The calls of the block index over a :class:`beluga.rpc.Client`, with that client's timeout.

    All calls raise :class:`~beluga.errors.RpcError` if the server does not reply, and
    :class:`~beluga.errors.NoMethodError` if it has no index.
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)

    def lookup(self, keys: NDArray[np.uint64], *, pin: bool = False, peek: bool = False) -> Lookup:
        """Find the leading keys that are committed. With ``pin`` they are pinned until
        :meth:`release`; with ``peek`` this counts in no figure, and not as a use of the blocks.
        """
        words, key_count = _words(keys), len(keys)
        flags = (lib.BL_LOOKUP_PIN if pin else 0) | (lib.BL_LOOKUP_PEEK if peek else 0)
        records = ffi.new("bl_block_record[]", key_count)
        state = ffi.new("uint32_t *")
        count = lib.bl_lookup(
            self._client.session, words, key_count, flags, records, state, self._timeout_ns
        )
        if count < 0:
            raise_for_status(count, "looking blocks up")
        return Lookup(count, _STATES[state[0]], records, keys)

    def pin(self, keys: NDArray[np.uint64]) -> Pins:
        """Pin the leading keys that are committed."""
        return self.lookup(keys, pin=True).pins()

    def unpin(self, pins: Pins) -> int:
        """Release these pins and return how many were released. A second call does nothing."""
        count, pins.count = min(pins.count, len(pins._records)), 0
        if count <= 0:
            return 0
        return self._call("releasing blocks", lib.bl_release_blocks, pins._records, count)

    def reserve(
        self, keys: NDArray[np.uint64], *, length: int, fingerprint: int = 0, chunk_size: int = 0
    ) -> list[Grant]:
        """Request grants to write ``length`` bytes under each key.

        The state of each reply is HIT, GRANTED, PENDING or REFUSED. A grant ends with
        :meth:`commit`, :meth:`abort`, or the session.
        """
        words = _words(keys)
        records = ffi.new("bl_block_record[]", len(keys))
        request = ffi.new(
            "bl_block_request *",
            {"fingerprint": fingerprint, "length": length, "chunk_size": chunk_size},
        )
        self._call("reserving blocks", lib.bl_reserve, words, len(keys), request, records)
        return [_grant(records[i], keys[i]) for i in range(len(keys))]

    def commit(self, grants: Sequence[Grant], *, checksums_crc: int = 0) -> list[int]:
        """Publish written blocks. Returns 0 for each grant, or a negative error if the grant was
        lost.
        """
        commits = _commits(grants, checksums_crc)
        statuses = ffi.new("int32_t[]", len(grants))
        self._call("committing blocks", lib.bl_commit_blocks, commits, len(grants), statuses)
        return list(statuses)

    def abort(self, grants: Sequence[Grant]) -> int:
        """Return grants, to whose space the caller must no longer write. Returns how many were
        valid.
        """
        return self._call("aborting blocks", lib.bl_abort_blocks, _commits(grants, 0), len(grants))

    def release(self, hits: Sequence[Grant]) -> int:
        """Release the pins of a lookup. Returns how many were released."""
        records = ffi.new(
            "bl_block_record[]",
            [{"generation": hit.generation, "block": hit.block} for hit in hits],
        )
        return self._call("releasing blocks", lib.bl_release_blocks, records, len(hits))

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove blocks and return how many the pool had. Pinned blocks keep their bytes until
        released.

        The pool remembers removals that lower tiers have not executed yet, so those copies never
        come back. Raises :class:`~beluga.errors.RemovalsFullError` if it remembers too many
        already.
        """
        return self._call("removing blocks", lib.bl_remove_blocks, _words(keys), len(keys))

    def hint(self, keys: NDArray[np.uint64], *, level: int, ttl_ms: int = 0) -> tuple[int, int]:
        """Give blocks a hint (``bl_level``) that lasts ``ttl_ms`` after their last use.

        Returns how many blocks got it, and how many were refused because a budget is used up. The
        pool does not have the others.
        """
        refused = ffi.new("uint32_t *")
        count = self._call(
            "giving hints", lib.bl_hint_blocks, _words(keys), len(keys), level, ttl_ms, refused
        )
        return count - int(refused[0]), int(refused[0])

    def removing(self, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return which lower tiers have yet to remove each key, as bits: ``1 << n`` is tier n."""
        return self._bits("requesting removals", lib.bl_removing, keys)

    def onboard(self, keys: NDArray[np.uint64], *, prefetch: bool = False) -> int:
        """Start to onboard leading keys from lower tiers. Returns how many the pool has or will
        get.

        A lookup returns PENDING until a block arrives or its fetch fails. Blocks to ``prefetch``
        have lower priority than those that a caller waits for.
        """
        kind = lib.BL_LOWER_PREFETCH if prefetch else lib.BL_LOWER_ONBOARD
        return self._call("onboarding blocks", lib.bl_onboard, _words(keys), len(keys), kind)

    def tiers(self, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return the tiers that have each key, as bits: 1 is the pool, ``1 << n`` is lower tier
        n.
        """
        return self._bits("requesting tiers", lib.bl_tiers, keys)

    def _bits(
        self, doing: str, function: Callable[..., int], keys: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        bits = np.zeros(len(keys), np.uint8)
        out = ffi.from_buffer("uint8_t[]", bits, require_writable=True)
        self._call(doing, function, _words(keys), len(keys), out)
        return bits

    def removal_reasons(self, keys: NDArray[np.uint64]) -> list[RemovalReason]:
        """Return why keys were removed from the index, as far as this server remembers. Keys in the
        index have no reason.
        """
        words: list[int] = []
        for first in range(0, len(keys), lib.BL_CALL_KEYS_MAX):
            part = np.ascontiguousarray(keys[first : first + lib.BL_CALL_KEYS_MAX], np.uint64)
            head = ffi.new("bl_block_request *", {"count": len(part)})
            request = bytes(ffi.buffer(head)) + part.tobytes()
            reply = self._client.call(lib.BL_METHOD_REMOVAL_REASONS, request)
            reasons = reply[ffi.sizeof("bl_block_reply") :]
            if len(reasons) != len(part) or max(reasons) >= len(RemovalReason):
                raise BadReplyError(
                    "the server's list of removed keys is invalid; run one version of Beluga"
                )
            words += reasons
        return [RemovalReason(word) for word in words]

    def stat(self) -> IndexStat:
        """Return the server's counters."""
        out = ffi.new("bl_index_stat *")
        self._call("requesting counters", lib.bl_index_get_stat, out)
        return IndexStat.of(out)


def _words(keys: NDArray[np.uint64]) -> core.uint64_p:
    is_table = isinstance(keys, np.ndarray) and keys.dtype == np.uint64 and keys.ndim == 2
    if not is_table or keys.shape[1] != 2:
        raise BadValueError(
            "keys must be a uint64 array of shape (count, 2); use beluga.kvcache.fold"
        )
    return ffi.from_buffer("uint64_t[]", np.ascontiguousarray(keys))


def _grant(record: core.bl_block_record, key: NDArray[np.uint64]) -> Grant:
    return Grant(
        state=BlockState(record.state),
        offset=record.offset,
        length=record.length,
        generation=record.generation,
        block=record.block,
        status=record.status,
        key=(int(key[0]), int(key[1])),
    )


def _commits(grants: Sequence[Grant], checksums_crc: int) -> core.bl_commit:
    return ffi.new(
        "bl_commit[]",
        [
            {
                "key": grant.key,
                "generation": grant.generation,
                "block": grant.block,
                "checksums_crc": checksums_crc,
            }
            for grant in grants
        ],
    )
