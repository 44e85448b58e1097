# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A fake of vLLM's rules for hybrid models: full attention, a window of two blocks, and a state.

Blocks of attention have UNIT tokens, which a hash covers, too. A state has two of them, so a prefix
is resumed at multiples of two blocks.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from vllm_parts import BLOCK_TOKENS as UNIT

STEP = 2 * UNIT
NULL = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    name: str
    block_size: int


@dataclasses.dataclass(frozen=True)
class StateSpec(Spec):
    mamba_cache_mode: str = "align"


SPECS = (Spec("full", UNIT), Spec("window", UNIT), StateSpec("state", STEP))


@dataclasses.dataclass
class KVCacheConfig:
    """vLLM's configuration of these groups, with scratch memory before the state's group."""

    num_blocks: int = 64
    prefix_cacheable_group_ids: tuple[int, ...] = (0, 1, 3)


class Store:
    """vLLM's view of which blocks exist."""

    def __init__(self, unit: int, exists: set[tuple[int, bytes]]) -> None:
        assert unit == UNIT
        self.exists = exists


class Rules:
    def __init__(self) -> None:
        self.kv_cache_groups = [SimpleNamespace(kv_cache_spec=one) for one in SPECS]

    @classmethod
    def from_kv_cache_config(cls, _config: Any, _vllm: Any, step: int, unit: int) -> Rules:
        assert (step, unit) == (STEP, UNIT)
        return cls()

    eagle_group_ids: frozenset[int] = frozenset()
    enable_partial_hash_hits = False

    def align_lookup_length(self, tokens: int) -> int:
        return tokens // STEP * STEP

    def lookup_mask(self, tokens: int) -> tuple[None, list[bool], None]:
        assert tokens % STEP == 0
        return None, [True] * (tokens // UNIT), None

    def load_mask(self, _: Any, tokens: int) -> tuple[list[bool], ...]:
        blocks, states = tokens // UNIT, tokens // STEP
        return (
            [True] * blocks,
            [place >= blocks - 2 for place in range(blocks)],
            [place == states - 1 for place in range(states)],
        )

    def store_mask(self, tokens: int, start: int, prompt: int) -> tuple[list[bool] | None, ...]:
        last = (prompt - 1) // STEP * STEP // UNIT
        window = [last - 2 <= place < last for place in range(start // UNIT, tokens // UNIT)]
        return None, window, [False] * (tokens // STEP - start // STEP)

    def block_hashes_for_spec(self, hashes: list[bytes], spec: Spec) -> list[bytes]:
        each = spec.block_size // UNIT
        return hashes[each - 1 :: each]

    def find_longest_cache_hit(self, hashes: list[bytes], limit: int, store: Store) -> Any:
        for tokens in range(limit, 0, -STEP):
            masks = self.load_mask(hashes, tokens)
            names = {
                (group, self.block_hashes_for_spec(hashes, SPECS[group])[place])
                for group, mask in enumerate(masks)
                for place, wanted in enumerate(mask)
                if wanted
            }
            if names <= store.exists:
                return masks, tokens
        return (), 0


class FineRules(Rules):
    """The rules of a model without a window that resumes inside blocks, after any unit: full
    attention and a state, with blocks of STEP tokens.
    """

    enable_partial_hash_hits = True

    def __init__(self) -> None:
        specs = Spec("full", STEP), StateSpec("state", STEP)
        self.kv_cache_groups = [SimpleNamespace(kv_cache_spec=one) for one in specs]

    def align_lookup_length(self, tokens: int) -> int:
        return tokens // UNIT * UNIT

    def lookup_mask(self, tokens: int) -> Any:
        return None, None

    def load_mask(self, _: Any, tokens: int) -> Any:
        blocks = -(-tokens // STEP)
        return [True] * blocks, [place == blocks - 1 for place in range(blocks)]

    def store_mask(self, tokens: int, start: int, prompt: int) -> Any:
        return None, [False] * (tokens // STEP - start // STEP)

    def find_longest_cache_hit(self, hashes: list[bytes], limit: int, store: Store) -> Any:
        for tokens in range(limit, 0, -UNIT):
            ends = [*range(STEP, tokens, STEP), tokens]
            names = {(0, hashes[end // UNIT - 1]) for end in ends}
            if names | {(1, hashes[tokens // UNIT - 1])} <= store.exists:
                return (), tokens
        return (), 0


class BlockPool:
    """vLLM's blocks, with the number of their users."""

    def __init__(self, count: int) -> None:
        self.blocks = list(range(count))
        self.users = [0] * count

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.users[block] > 0
            self.users[block] -= 1

    def pinned(self) -> set[int]:
        return {block for block, users in enumerate(self.users) if users}


def modules() -> dict[str, dict[str, Any]]:
    """Return the contents of vLLM's modules that the rules come from."""
    return {
        "distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator": {
            "ExternalCachedBlockPool": Store,
            "MooncakeStoreCoordinator": Rules,
        },
        "v1.core.kv_cache_coordinator": {
            "replay_boundaries": lambda tokens, _, *, use_eagle: (tokens - 1 - use_eagle * STEP,)
        },
        "v1.core.kv_cache_utils": {
            "resolve_kv_cache_block_sizes": lambda _config, _vllm: (STEP, UNIT)
        },
    }
