# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks of a hybrid model: what each group of layers needs, so that a prefix can be resumed.

A request resumes only where every group can: full attention needs the whole prefix, a window the
blocks before that place, a recurrent layer the one block with its state there. vLLM's own
coordinator for key-value stores defines which blocks these are, for hits, loads and saves, and is
used unchanged. Here a block of the prefix is as long as the least common multiple of the groups'
blocks, which is where vLLM resumes. With ``--prefix-match-unit`` it resumes inside blocks, too, and
a block of the prefix is one unit.

A block is saved under the hash of its prefix, which may end inside it, and the number of its
group. vLLM takes the blocks of windows and states back while the request still runs. So the blocks
that a step computes are pinned in that step, and freed when the workers have saved them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.core.kv_cache_coordinator import replay_boundaries
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from beluga.connectors.vllm.blocks import PinnedPrefix
from beluga.connectors.vllm.events import GroupBlocks
from beluga.connectors.vllm.media import private_from
from beluga.connectors.vllm.steps import BlockRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from beluga.connectors.vllm.blocks import Offer
    from beluga.connectors.vllm.counters import ConnectorCounters
    from beluga.connectors.vllm.events import Announcements
    from beluga.connectors.vllm.lookups import Lookups

_NULL = 0  # the block id in tables for a missing block
_POOL = 1  # the bit of the pool among the tiers


@dataclasses.dataclass(frozen=True, slots=True)
class PinnedBlock:
    """A block that is pinned until it is saved: its group, the tokens up to its end or up to the
    place in it where a request resumes, its id.
    """

    group: int
    end: int
    block: int


@dataclasses.dataclass(slots=True)
class Holding:
    """The blocks that are pinned for one request, by their ends in tokens, up to ``tokens``."""

    tokens: int = 0
    blocks: dict[int, list[PinnedBlock]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )


class Groups:
    """Plans with vLLM's rules. ``table_of(request id)`` returns a request's blocks in each of the
    engine's groups; ``pool()`` is vLLM's pool of blocks. ``extra_keys_of(request, first, last,
    size)`` returns what the hashes of blocks of that many tokens cover in addition to tokens.
    """

    whole = True

    def __init__(  # noqa: PLR0913  keyword-only but the first three
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        lookups: Lookups,
        *,
        table_of: Callable[[str], Any],
        pool: Callable[[], Any],
        extra_keys_of: Callable[[Any, int, int, int], Sequence[Sequence[Any] | None]],
        counters: ConnectorCounters,
        announcements: Announcements | None = None,
    ) -> None:
        self._whole, self._unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._rules = MooncakeStoreCoordinator.from_kv_cache_config(
            kv_cache_config, vllm_config, self._whole, self._unit
        )
        self._splits = bool(self._rules.enable_partial_hash_hits)
        self.block_size = self._unit if self._splits else self._whole
        self._specs = [group.kv_cache_spec for group in self._rules.kv_cache_groups]
        self._sizes = [int(spec.block_size) for spec in self._specs]
        self._rows: tuple[int, ...] = kv_cache_config.prefix_cacheable_group_ids
        self._lookups, self._table_of, self._pool = lookups, table_of, pool
        self._extra_keys_of, self._announcements = extra_keys_of, announcements
        self._counters = counters
        self._holdings: dict[str, Holding] = {}
        self._tickets: dict[int, tuple[list[int], int]] = {}  # blocks, and ranks that save them
        self._issued = 0

    @property
    def saving(self) -> bool:
        """Whether the workers have unfinished saves."""
        return bool(self._tickets)

    def find(self, request: Any, local: int) -> PinnedPrefix | None:
        """Return the longest prefix that all groups can resume: with what lower tiers have, and
        otherwise with what the pool has.
        """
        start = local * self.block_size
        limit = self._rules.align_lookup_length(request.num_tokens - 1)
        if limit <= start:
            return None
        masks = self._rules.lookup_mask(limit)
        ends_by_group = [*self._masked(masks, start, limit), *self._inside(start, limit)]
        requested = [
            digest
            for group, ends in ends_by_group
            for digest in self._digests(request, group, ends)
        ]
        tiers = self._lookups.tiers(requested)
        if tiers is None:
            return PinnedPrefix([], 0)
        names = [(group, end) for group, ends in ends_by_group for end in ends]
        in_pool = self._resumable(request, local, limit, names, (tiers & _POOL).astype(bool))
        if not (tiers > _POOL).any():
            return in_pool
        anywhere = self._resumable(request, local, limit, names, tiers.astype(bool))
        if anywhere is None or (in_pool is not None and in_pool.blocks >= anywhere.blocks):
            return in_pool
        return dataclasses.replace(anywhere, otherwise=in_pool)

    def digests(self, request: Any, first: int, last: int) -> list[bytes]:
        """Return those that vLLM's rules need, group by group."""
        return [
            digest
            for group, ends in self._needed(request, first, last)
            for digest in self._digests(request, group, ends)
        ]

    def loads(self, request: Any, first: int, last: int, table: Any) -> list[BlockRange]:
        """Return a range for each group that needs blocks. If vLLM has no blocks for what its
        rules need, the range is empty, and its load fails.
        """
        ranges = []
        for group, ends in self._needed(request, first, last):
            digests = b"".join(self._digests(request, group, ends))
            ids = [table[self._rows[group]][self._number(group, end)] for end in ends]
            if _NULL in ids:
                return [BlockRange(request.request_id, b"", [])]
            ranges.append(BlockRange(request.request_id, digests, ids, group=group))
        return ranges

    def hold(self, request: Any, tokens: int, loaded: range, offers: Sequence[Offer]) -> int:
        """Pin the blocks that the step completes, as far as vLLM's rules retain them, and the
        states that it offers. Returns the lowest end of a new block, in tokens, or 0.
        """
        holding = self._holdings.setdefault(request.request_id, Holding())
        after = min(request.num_computed_tokens + tokens, self.hashed(request) * self.block_size)
        after = after // self._whole * self._whole
        new: list[PinnedBlock] = []
        if after > holding.tokens:
            masks = self._rules.store_mask(after, holding.tokens, request.num_prompt_tokens)
            ends_by_group = dict(self._masked(masks, holding.tokens, after))
            for group, ends in self._junction(request, holding.tokens, after):
                ends_by_group[group] = sorted({*ends_by_group.get(group, ()), *ends})
            for group, ends in sorted(ends_by_group.items()):
                new += self._of_table(request, group, ends)
            holding.tokens = after
        new += self._states(request, offers)
        for held in new:
            if held.block != _NULL and -(-held.end // self.block_size) - 1 not in loaded:
                holding.blocks[held.end].append(held)
                self._pin(held.block)
        return min((held.end for held in new), default=0)

    def saves(self, request: Any, first: int, last: int, table: Any) -> list[BlockRange]:
        """Return a range for each group with blocks that are held in this part of the prefix."""
        holding = self._holdings.get(request.request_id)
        if holding is None:
            return []
        ends = [
            end for end in holding.blocks if first * self.block_size < end <= last * self.block_size
        ]
        by_group = defaultdict(list)
        for end in sorted(ends):
            for held in holding.blocks.pop(end):
                by_group[held.group].append(held)
        ranges = []
        for group, blocks in sorted(by_group.items()):
            digests = self._digests(request, group, [held.end for held in blocks])
            self._announce(request, group, dict(zip(digests, blocks, strict=True)))
            ids = [held.block for held in blocks]
            self._issued += 1
            self._tickets[self._issued] = (ids, self._lookups.worker_count)
            ranges.append(
                BlockRange(
                    request.request_id,
                    b"".join(digests),
                    ids,
                    group=group,
                    ticket=self._issued,
                )
            )
        return ranges

    def drop(self, request: Any) -> None:
        """Free the kept blocks that are not scheduled to be saved."""
        holding = self._holdings.pop(request.request_id, None)
        if holding is not None:
            self._free([held.block for many in holding.blocks.values() for held in many])

    def ended(self, tickets: Mapping[int, int]) -> None:
        """Free the blocks of saves that have ended on all ranks."""
        for ticket, ranks in tickets.items():
            ids, left = self._tickets.pop(ticket, ([], ranks))
            if left > ranks:
                self._tickets[ticket] = (ids, left - ranks)
            else:
                self._free(ids)

    def hashed(self, request: Any) -> int:
        """Return how many blocks are full and hashed."""
        return int(len(request.block_hashes) * self._unit // self.block_size)

    def room(self, table: Any) -> int:
        """Return the most tokens of any group."""
        return max(
            len(table[row]) * size for row, size in zip(self._rows, self._sizes, strict=True)
        )

    def ids(self, table: Any, first: int, last: int | None) -> Sequence[int]:
        """Return the blocks of all groups."""
        numbers: list[int] = []
        for row, size in zip(self._rows, self._sizes, strict=True):
            start = first * self.block_size // size
            stop = None if last is None else -(-last * self.block_size // size)
            part = table[row][start:stop]
            numbers += [block for block in part if block != _NULL]
        return numbers

    def first_block(
        self, table: Any, last: int | None, find: Callable[[Sequence[int]], int | None]
    ) -> int | None:
        """Return 0 if a block is found in any group, because all that follows may depend on it."""
        return None if find(self.ids(table, 0, last)) is None else 0

    def copied(self, table: Any) -> list[list[int]]:
        """Return a copy of the table."""
        return [list(row) for row in table]

    def _resumable(
        self,
        request: Any,
        local: int,
        limit: int,
        names: list[tuple[int, int]],
        present: NDArray[np.bool_],
    ) -> PinnedPrefix | None:
        """Return what resumes the longest prefix of which these blocks are present, in addition to
        those that the engine has.
        """
        there = [name for name, is_present in zip(names, present, strict=True) if is_present]
        for group, size in enumerate(self._sizes):
            there += [(group, end) for end in range(size, local * self.block_size + 1, size)]
        exists = {(group, self._hash(request, end)) for group, end in there}
        store = ExternalCachedBlockPool(self._unit, exists)
        _, tokens = self._rules.find_longest_cache_hit(request.block_hashes, limit, store)
        last = tokens // self.block_size
        if last <= local:
            return None
        return PinnedPrefix(self.digests(request, local, last), last - local, whole=True)

    def _needed(self, request: Any, first: int, last: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the blocks of [first, last) that a request reads if it resumes after block
        ``last``.
        """
        tokens = last * self.block_size
        masks = self._rules.load_mask(request.block_hashes, tokens)
        for group, mask in enumerate(masks):
            start = first * self.block_size // self._sizes[group]
            numbers = [number for number, wanted in enumerate(mask) if wanted and number >= start]
            if numbers:
                yield group, [min(self._end(group, number), tokens) for number in numbers]

    def _states(self, request: Any, offers: Sequence[Offer]) -> list[PinnedBlock]:
        """Return the states of offers at places where later requests are likely to resume: the end
        of this one's prompt, and where its prompt leaves that of another one. A state is as large
        as the KV of thousands of tokens, so no other is saved, whatever vLLM keeps itself. With a
        state inside a block goes what the other groups have between it and their last whole block.
        """
        states, inside = list[PinnedBlock](), set[int]()
        likely = self._likely(request) if offers else set()
        for row, block, end in offers:
            if row not in self._rows or end not in likely:
                self._counters.add(save_states_left=1)
                continue
            states.append(PinnedBlock(self._rows.index(row), end, block))
            if end % self._whole:
                inside.add(end)
        for end in inside:
            for group, size in enumerate(self._sizes):
                if not hasattr(self._specs[group], "mamba_cache_mode"):
                    start = end // self._whole * self._whole
                    ends = [*range(start + size, end, size), end]
                    states += self._of_table(request, group, ends)
        return states

    def _likely(self, request: Any) -> set[int]:
        eagle = bool(self._rules.eagle_group_ids)
        boundaries = replay_boundaries(request.num_prompt_tokens, self._whole, use_eagle=eagle)
        resumptions = *boundaries, request.shared_prefix_boundary
        size = self.block_size
        return {end // size * size for end in resumptions} | {
            end // self._whole * self._whole for end in resumptions
        }

    def _of_table(self, request: Any, group: int, ends: Sequence[int]) -> list[PinnedBlock]:
        """Return blocks that a request has now."""
        row = self._table_of(request.request_id)[self._rows[group]]
        numbers = [(end, self._number(group, end)) for end in ends]
        return [PinnedBlock(group, end, row[n]) for end, n in numbers if n < len(row)]

    def _junction(self, request: Any, start: int, stop: int) -> Iterator[tuple[int, list[int]]]:
        """Yield what of tokens [start, stop) resumes a request where this one's prompt leaves that
        of another one, which vLLM keeps, too. States are offered instead.
        """
        tokens = request.shared_prefix_boundary // self._whole * self._whole
        if tokens <= start:
            return
        for group, mask in enumerate(self._rules.load_mask(request.block_hashes, tokens)):
            size = self._sizes[group]
            part = [n for n in range(start // size, min(len(mask), stop // size)) if mask[n]]
            if part and not hasattr(self._specs[group], "mamba_cache_mode"):
                yield group, [self._end(group, number) for number in part]

    def _masked(
        self, masks: Sequence[list[bool] | None], start: int, stop: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the ends of each group's blocks of tokens [start, stop) that its mask has. A mask
        begins with the block at ``start`` or with the prefix, as its length shows, or is None for
        all.
        """
        for group, mask in enumerate(masks):
            size = self._sizes[group]
            numbers = range(start // size, stop // size)
            if mask is not None:
                numbers_of_mask = range(stop // size - len(mask), stop // size)
                wanted_numbers = {
                    n for n, wanted in zip(numbers_of_mask, mask, strict=True) if wanted
                }
                part = [number for number in numbers if number in wanted_numbers]
            else:
                part = list(numbers)
            if part:
                yield group, [self._end(group, number) for number in part]

    def _inside(self, start: int, stop: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the places inside each group's blocks of tokens [start, stop) where a request may
        resume.
        """
        for group, size in enumerate(self._sizes if self._splits else ()):
            ends = [end for end in range(start + self._unit, stop + 1, self._unit) if end % size]
            if ends:
                yield group, ends

    def _end(self, group: int, number: int) -> int:
        return (number + 1) * self._sizes[group]

    def _number(self, group: int, end: int) -> int:
        """Return which of a group's blocks has the token before ``end``."""
        return -(-end // self._sizes[group]) - 1

    def _hash(self, request: Any, end: int) -> bytes:
        """Return vLLM's hash of the prefix up to ``end``."""
        return bytes(request.block_hashes[end // self._unit - 1])

    def _digests(self, request: Any, group: int, ends: Sequence[int]) -> list[bytes]:
        return self._lookups.digests_of(
            request,
            [self._hash(request, end) for end in ends],
            [end // self._unit - 1 for end in ends],
            size=self._unit,
            group=group,
        )

    def _announce(self, request: Any, group: int, blocks: Mapping[bytes, PinnedBlock]) -> None:
        """Announce blocks that others may find, by their digests, when they are stored."""
        if self._announcements is None:
            return
        size = self._sizes[group]
        private = private_from(request, size)
        named = GroupBlocks(
            self._rows[group],
            size,
            self._rules.block_hashes_for_spec(request.block_hashes, self._specs[group]),
        )
        for digest, held in blocks.items():
            number, remainder = divmod(held.end, size)
            if remainder == 0 and (private is None or number <= private):
                (keys,) = self._extra_keys_of(request, number - 1, number, size)
                self._announcements.ordered(digest, request, number - 1, keys, group=named)

    def _pin(self, block: int) -> None:
        pool = self._pool()
        pool.touch([pool.blocks[block]])

    def _free(self, ids: list[int]) -> None:
        """Free blocks, the last of a prefix first, so that it is evicted first."""
        if ids:
            pool = self._pool()
            pool.free_blocks([pool.blocks[block] for block in reversed(ids)])
