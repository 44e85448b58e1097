# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Block hashes of both eras: the reference's examples, and the input of a hash."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from beluga.errors import RouterError
from beluga.router import BlockHasher, salt_seed, unsigned
from beluga.router.hashing import xxh3

TOKENS = list(range(1, 9))


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_hashes_match_the_examples_of_era_a() -> None:
    hasher = BlockHasher(block_size=4, era="a")
    local = hasher.local(TOKENS)
    assert local == [14643705804678351452, 16777012769546811212]
    assert hasher.sequence(local) == [14643705804678351452, 4945711292740353085]


def test_hashes_match_the_examples_of_era_b() -> None:
    assert salt_seed() == 1389868326933519382
    hasher = BlockHasher(block_size=4)
    local = hasher.local(TOKENS)
    assert local == [8026409477313730465, 4932910930253085737]
    assert hasher.sequence(local) == [8026409477313730465, 12668468526058386974]


def test_a_tail_that_fills_no_block_is_dropped() -> None:
    for hasher in (BlockHasher(block_size=4), BlockHasher(block_size=4, era="a")):
        assert hasher.local(TOKENS[:7]) == hasher.local(TOKENS)[:1]
        assert hasher.local(TOKENS[:3]) == []
        assert hasher.sequence([]) == []


def test_a_salt_is_compact_json_without_what_is_empty() -> None:
    assert salt_seed("", "") == xxh3_64_intdigest(b"{}")
    assert salt_seed("t") == xxh3_64_intdigest(b'{"salt":"t"}')
    assert salt_seed("", "a") == xxh3_64_intdigest(b'{"lora_name":"a"}')
    assert salt_seed("t", "é") == xxh3_64_intdigest('{"salt":"t","lora_name":"é"}'.encode())
    salted = BlockHasher(block_size=4, salt="t", lora_name="a").local(TOKENS)
    assert salted[0] == xxh3_64_intdigest(packed(1, 2, 3, 4), salt_seed("t", "a"))


def test_an_adapter_of_era_a_is_hashed_after_the_tokens() -> None:
    local = BlockHasher(block_size=4, era="a", lora_name="ab").local(TOKENS)
    assert local[0] == xxh3_64_intdigest(packed(1, 2, 3, 4) + b"\x02\0\0\0ab", 1337)


@pytest.mark.parametrize("era", ["a", "b"])
def test_multimodal_objects_count_in_any_order(era: str) -> None:
    hasher = BlockHasher(block_size=4, era=era)  # type: ignore[arg-type]
    plain = hasher.local(TOKENS)
    shown = hasher.local(TOKENS, {1: [9, 3]})
    assert shown[0] == plain[0]
    assert shown[1] != plain[1]
    assert shown == hasher.local(TOKENS, {1: [3, 9]})
    seed = 1337 if era == "a" else salt_seed()
    assert shown[1] == xxh3_64_intdigest(packed(5, 6, 7, 8) + struct.pack("<2Q", 3, 9), seed)


def test_eagle_windows_reach_one_token_further() -> None:
    local = BlockHasher(block_size=4, eagle=True).local([*TOKENS, 9])
    seed = salt_seed()
    assert local == [
        xxh3_64_intdigest(packed(1, 2, 3, 4, 5), seed),
        xxh3_64_intdigest(packed(5, 6, 7, 8, 9), seed),
    ]
    assert BlockHasher(block_size=4, eagle=True).local(TOKENS) == local[:1]


@settings(deadline=None)
@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.integers(1, 9))
def test_lists_and_arrays_have_equal_hashes(tokens: list[int], block_size: int) -> None:
    hasher = BlockHasher(block_size=block_size)
    local = hasher.local(tokens)
    assert local == hasher.local(np.array(tokens, dtype=np.uint32))
    assert local == [
        xxh3_64_intdigest(packed(*tokens[at : at + block_size]), salt_seed())
        for at in range(0, len(tokens) - block_size + 1, block_size)
    ]


def test_a_query_has_both_hashes() -> None:
    query = BlockHasher(block_size=4).query(TOKENS, priority_jump=2.0)
    assert (query.isl, query.block_size, query.priority_jump) == (8, 4, 2.0)
    assert list(query.hashes) == [8026409477313730465, 4932910930253085737]
    assert list(query.sequence) == [8026409477313730465, 12668468526058386974]


def test_signed_hashes_are_the_same_bits() -> None:
    assert unsigned(-1) == (1 << 64) - 1
    assert unsigned(-(1 << 63)) == 1 << 63
    assert unsigned(5) == 5


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1 << 70], ["a"]])
def test_an_invalid_token_is_rejected(tokens: list[int]) -> None:
    with pytest.raises(RouterError, match="32 bits"):
        BlockHasher(block_size=1).local(tokens)


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(RouterError, match="era 'c'"):
        BlockHasher(block_size=4, era="c")  # type: ignore[arg-type]
    with pytest.raises(RouterError, match="does not support a salt"):
        BlockHasher(block_size=4, era="a", salt="x")
    with pytest.raises(RouterError, match="must be at least 1"):
        BlockHasher(block_size=0)


def test_hashes_are_those_of_xxhash() -> None:
    """Each range of sizes has its own algorithm: up to 16, 128, 240 and more bytes, and blocks of
    1,024.
    """
    chance = random.Random(1)
    for size in [*range(1100), 2047, 2048, 2049, 4096, 65537]:
        data = chance.randbytes(size)
        for seed in (0, 1337, chance.getrandbits(64)):
            assert xxh3(data, seed) == xxh3_64_intdigest(data, seed), (size, seed)


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16, 512])
def test_arrays_have_the_hashes_of_each_block(block_size: int, eagle: bool) -> None:
    chance = random.Random(block_size)
    hasher = BlockHasher(block_size=block_size, salt="s", eagle=eagle)
    seed = salt_seed("s")
    for count in (0, 1, block_size, block_size + 1, 5 * block_size, 5 * block_size + 3):
        tokens = np.array([chance.getrandbits(32) for _ in range(count)], np.uint32)
        window = block_size + eagle
        starts = range(0, count - window + 1, block_size)
        wanted = [xxh3_64_intdigest(tokens[at : at + window].tobytes(), seed) for at in starts]
        local = hasher.packed(tokens)
        assert list(local) == wanted == hasher.local([int(token) for token in tokens])
        chained = wanted[:1]
        for block in wanted[1:]:
            chained.append(xxh3_64_intdigest(struct.pack("<QQ", chained[-1], block), 0))
        assert list(hasher.chained(local)) == chained == hasher.sequence(wanted)
