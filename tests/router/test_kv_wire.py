# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""vLLM's KV events from frames into the index, and the hashes of blocks of both eras."""

import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulation import fewer
from xxhash import xxh3_64_intdigest

from beluga.errors import EventError, RouterError
from beluga.router import BlockHasher, Cleared, Indexer, Removed, Stored, Tier, Worker
from beluga.router import events as wire_module
from beluga.router.events import Frame, WireDecoder, decode_frames, hash_blocks_by, replay_request
from beluga.router.feeds import Subscription
from beluga.router.hashing import salt_seed, unsigned, xxh3

msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed (the extra 'router')")


SIZE = 4


def sums(tokens: Sequence[int], adapter: str, salt: str) -> list[int]:
    """Make hashes that a test can read."""
    blocks = [sum(tokens[at : at + SIZE]) for at in range(0, len(tokens), SIZE)]
    return [block + 1000 * len(adapter) + 100_000 * len(salt) for block in blocks]


def decoder(worker_id: int = 7) -> WireDecoder:
    return WireDecoder(worker_id, block_size=SIZE, hash_blocks=sums)


def payload(*events: Any, ts: float = 1.0, rank: int | None = None) -> bytes:
    return bytes(msgspec.msgpack.encode([ts, list(events), rank]))


def stored(names: list[Any], *, parent: Any = None, first: int = 1, **more: Any) -> dict[str, Any]:
    """Make an event for blocks whose hashes are ``first``, ``first`` + 1, ... by sums()."""
    tokens = [value for at in range(len(names)) for value in (first + at, 0, 0, 0)]
    fields = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent}
    return {**fields, "token_ids": tokens, "block_size": SIZE, "lora_id": None, **more}


ARRAY = ["BlockStored", [11], None, [1, 0, 0, 0], SIZE, None, "GPU"]


def held(*events: Any, salt: str = "") -> tuple[int, int]:
    """Return how many blocks of a prompt of 2 blocks the index finds after events, and how many
    events could not be read.
    """
    hasher, index = BlockHasher(block_size=SIZE, salt=salt), Indexer(workers=2, blocks=100)
    plain = hash_blocks_by(BlockHasher(block_size=SIZE))
    engine = Subscription(index, WireDecoder(7, block_size=SIZE, hash_blocks=plain), replay=False)
    for number, event in enumerate(events):
        engine.received(message(number, event))
    return index.matches(hasher.query(range(1, 9))).of(
        Worker(7)
    ).held, engine.unread + engine.failed


def test_the_pools_blocks_count_although_an_engine_announces_them_as_remote() -> None:
    index = Indexer(workers=2, blocks=100)
    plain = hash_blocks_by(BlockHasher(block_size=SIZE))
    engine = Subscription(index, WireDecoder(7, block_size=SIZE, hash_blocks=plain), replay=False)
    engine.received(message(0, eight(medium="SHARED", locality="REMOTE", ownership="pool:beluga")))
    found = index.matches(BlockHasher(block_size=SIZE).query(range(1, 9)))
    assert (found.shared, found.of(Worker(7)).held) == (2, 0)


PROMPT = list(range(1, 9))
FULL, WINDOW, STATE = (
    {"kv_cache_spec_kind": kind} for kind in ("full_attention", "sliding_window", "mamba")
)
EIGHT = ["BlockStored", [11, 12], None, PROMPT, SIZE, None, "GPU"]


def eight(**more: Any) -> dict[str, Any]:
    return stored([11, 12], **{"token_ids": PROMPT, **more})


REMOVED = {"type": "BlockRemoved", "block_hashes": [11, 12], "medium": "GPU"}


@pytest.mark.parametrize(
    ("events", "salt", "blocks"),
    [
        pytest.param([EIGHT], "", 2, id="an array"),
        pytest.param([[*EIGHT, {"session_id": "s"}]], "", 2, id="a map in an array"),
        pytest.param([[*EIGHT, {"cache_salt": "a"}]], "a", 2, id="a salt in an array"),
        pytest.param([[*EIGHT, {"cache_salt": "a"}]], "", 0, id="another tenant's, in an array"),
        pytest.param([eight(cache_salt="a")], "a", 2, id="a salt in a map"),
        pytest.param([eight(cache_salt="a")], "", 0, id="another tenant's, in a map"),
        pytest.param([eight(token_ids=[[t, t + 1] for t in PROMPT])], "", 2, id="pairs of tokens"),
        pytest.param([eight(lookahead_token_ids=[[5], [9]])], "", 2, id="tokens after blocks"),
        pytest.param(
            [
                eight(lookahead_token_ids=[[5], [9]]),
                eight(block_hashes=[11, 13], lookahead_token_ids=[[5], [8]]),
                REMOVED | {"block_hashes": [13]},
            ],
            "",
            2,
            id="two blocks that differ by the token after them",
        ),
        pytest.param([eight(lora_id=5)], "", 0, id="an adapter's number"),
        pytest.param(
            [eight(group_idx=0, **WINDOW), eight(group_idx=1, **FULL)], "", 2, id="second group"
        ),
        pytest.param([eight(group_idx=0, **WINDOW)], "", 0, id="only a window"),
        pytest.param([eight(group_idx=0, **STATE)], "", 0, id="only states"),
        pytest.param(
            [
                eight(group_idx=0, **WINDOW),
                eight(group_idx=1, **FULL),
                {**REMOVED, "group_idx": 0},
            ],
            "",
            2,
            id="a window is removed",
        ),
        pytest.param(
            [eight(group_idx=0, **FULL), eight(group_idx=2, **FULL), {**REMOVED, "group_idx": 0}],
            "",
            0,
            id="the first full attention counts",
        ),
        pytest.param([eight(group_idx=1)], "", 0, id="groups without kinds"),
        pytest.param([eight(locality="REMOTE", ownership="b")], "", 0, id="not local"),
        pytest.param(
            [eight(locality="REMOTE", medium="STORAGE")], "", 0, id="another worker's disk"
        ),
    ],
)
def test_events_of_engines_are_read(events: list[Any], salt: str, blocks: int) -> None:
    assert held(*events, salt=salt) == (blocks, 0)


def test_frames_with_and_without_topic() -> None:
    number = (258).to_bytes(8, "big")
    assert decode_frames([b"kv", number, b"x"]) == Frame(b"kv", 258, b"x")
    assert decode_frames([b"", b"kv", number, b"x"]) == Frame(b"kv", 258, b"x")
    assert decode_frames([number, b"x"]) == Frame(b"", 258, b"x")
    end = decode_frames([b"", b"", b"\xff" * 8, b""])
    assert end.ends_replay
    assert not decode_frames([b"", number, b""]).ends_replay
    assert replay_request(258) == [b"", number]


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", b"123", b"x"], [b"1"] * 4, [b""] * 6])
def test_other_frames_are_errors(frames: list[bytes]) -> None:
    with pytest.raises(EventError, match="frames"):
        decode_frames(frames)


def test_maps_and_arrays_decode_to_the_same_events() -> None:
    as_map = decoder().batch(
        payload(
            stored([11, 12], parent=10, medium="CPU", lora_name="ab"),
            {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
            rank=3,
        )
    )
    as_array = decoder().batch(
        payload(
            ["BlockStored", [11, 12], 10, [1, 0, 0, 0, 2, 0, 0, 0], SIZE, None, "CPU", "ab"],
            ["BlockRemoved", [11], "GPU"],
            ["AllBlocksCleared"],
            rank=3,
        )
    )
    assert as_map == as_array
    assert (as_map.failed, as_map.worker) == ([], Worker(7, 3))
    first, second, third = as_map.events
    assert (first.data, first.tier) == (Stored([11, 12], [2001, 2002], 10), Tier.HOST)
    assert (second.data, second.tier) == (Removed([11]), Tier.DEVICE)
    assert third.data == Cleared()


def test_a_batch_may_be_a_map() -> None:
    form = {"ts": 2, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": None}
    batch = decoder().batch(msgspec.msgpack.encode(form))
    short = decoder().batch(msgspec.msgpack.encode([1.0, [stored([11])]]))
    assert [event.worker for event in short.events] == [Worker(7, 0)]
    assert (batch.worker, len(batch.events)) == (Worker(7), 1)


def test_digests_and_integers_name_the_same_block() -> None:
    digest = bytes(range(32))
    number = int.from_bytes(digest[-8:], "big")
    as_bytes = decoder().batch(payload(stored([digest], parent=digest[::-1]))).events
    as_ints = decoder().batch(payload(stored([number], parent=0x0706050403020100))).events
    assert as_bytes == as_ints
    negative = decoder().batch(payload(stored([-1]))).events[0].data
    assert negative == Stored([(1 << 64) - 1], [1])


def test_a_block_without_tokens_must_be_known() -> None:
    event = stored([11], medium="CPU", token_ids=[], block_size=0)
    assert decoder().batch(payload(event)).events[0].data == Stored([11], None)


def test_blocks_are_hashed_as_the_router_hashes_prompts() -> None:
    hasher = BlockHasher(block_size=SIZE)
    tokens = list(range(1, 9))
    wire = WireDecoder(7, block_size=SIZE, hash_blocks=hash_blocks_by(hasher))
    index = Indexer(workers=2, blocks=10)
    events = wire.batch(payload(stored([11, 12], token_ids=tokens))).events
    for event in events:
        index.apply(event)
    assert index.matches(hasher.query(tokens)).of(Worker(7)).device == 2
    with_adapter = wire.batch(payload(stored([11, 12], token_ids=tokens, lora_name="ab")))
    data = with_adapter.events[0].data
    assert isinstance(data, Stored)
    assert data.tokens_hashes == BlockHasher(block_size=SIZE, lora_name="ab").local(tokens)


def test_blocks_with_extra_keys_are_never_matched() -> None:
    plain = [["ab"], None]
    image = [["ab"], ["ab", ["cat", 1]]]
    embedded = [["ab"], ["ab", b"digest"]]
    for keys, same in ((plain, True), (image, False), (embedded, False)):
        event = stored([11, 12], lora_name="ab", extra_keys=keys)
        data = decoder().batch(payload(event)).events[0].data
        assert isinstance(data, Stored) and data.tokens_hashes is not None
        assert data.tokens_hashes[0] == 2001
        assert (data.tokens_hashes[1] == 2002) == same


@pytest.mark.parametrize("adapter", ["", "ab", "salt"])
def test_blocks_are_salted_from_the_first_on(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, always = decoder(), [adapter] if adapter else []

    def local_hashes(names: list[Any], *keys: Any, **more: Any) -> list[int]:
        lora = {"lora_name": adapter or None, "extra_keys": [key or None for key in keys]}
        (event,) = wire.batch(payload(stored(names, **lora, **more))).events
        assert isinstance(event.data, Stored) and event.data.tokens_hashes is not None
        return [digest - 1000 * len(adapter) for digest in event.data.tokens_hashes]

    assert local_hashes([11, 12], [*always, "salt"], always) == [400_001, 400_002]
    assert local_hashes([13], always, parent=12, first=3) == [400_003]
    assert local_hashes([14], always, parent=bytes(24) + (13).to_bytes(8, "big"), first=4) == [
        400_004
    ]
    assert local_hashes([21], always) == [1]
    assert local_hashes([22], always, parent=21, first=2) == [2]
    (shown,) = local_hashes([15], [*always, ["cat", 1]], parent=14, first=5)
    assert shown not in (5, 400_005)
    monkeypatch.setattr(wire_module, "SALTED_MAX", 1)
    assert local_hashes([16], always, parent=15, first=6) == [400_006]
    assert local_hashes([17], always, parent=14, first=7) == [7]  # dropped
    assert local_hashes([17], always, parent=16, first=7) == [400_007]
    wire.batch(payload({"type": "AllBlocksCleared"}))
    assert local_hashes([18], always, parent=17, first=8) == [8]


def test_an_unreadable_event_does_not_affect_its_batch() -> None:
    bad: list[Any] = [
        {"type": "BlockStolen"},
        {"type": ["BlockStored"]},
        {"type": "BlockStored"},
        stored([11], block_size=SIZE + 1),
        stored([11], token_ids=[1, 2, 3]),
        stored([11], medium="TAPE"),
        stored(["name"]),
        stored([1.5]),
        stored([11], extra_keys=[None, ["more"]]),
        stored([11], extra_keys=7),
        [],
        ["BlockStored"],
        5,
        None,
        "BlockStored",
        stored([11], tenant="a"),
        stored([11], kv_cache_spec_kind="spiral"),
        stored([11], locality="NEARBY"),
        stored([11], group_idx="0"),
        stored([11], cache_salt=7),
        stored([11], lora_name=["ab"]),
        stored([11], token_ids=[[1, 2], [2, 3], [3, 4], 4]),
        stored([11], token_ids=[[1, 2, 3]] * 4),
        stored([11], token_ids=[1.5, 0, 0, 0]),
        [*ARRAY, {"cache_salt": "a", "tenant": "b"}],
        [*ARRAY, None, None, 0, *[None] * 6, "more"],
    ]
    batch = decoder().batch(payload(*bad, stored([11])))
    assert len(batch.failed) == len(bad)
    assert str(batch.failed[0]) == "there is no KV event 'BlockStolen': {'type': 'BlockStolen'}"
    assert [event.data for event in batch.events] == [Stored([11], [1])]


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (5, "is not a batch"),
        ({"ts": 1}, "is not a batch"),
        ([1.0, 5], "is not a batch"),
        ([], "is not a batch"),
        ([1.0], "is not a batch"),
        (["x", []], "no time"),
        ([float("inf"), []], "no time"),
        ([float("nan"), []], "no time"),
        ([1.0, [], None, "more"], "more than 3 known values"),
        ({"ts": 1.0, "events": [], "tenant": "a"}, "more than 3 known values"),
        ([1.0, [], "x"], "rank that is not a number"),
        ([1.0, [], -1], "of rank -1"),
        ([1.0, [], 1 << 16], "of rank 65536"),
    ],
)
def test_errors_of_a_batch_are_reported(form: Any, why: str) -> None:
    with pytest.raises(EventError, match=why):
        decoder().batch(msgspec.msgpack.encode(form))


def test_a_payload_that_is_not_msgpack_is_an_error() -> None:
    for bad in (b"", b"\xc1", b"\x93\x01", b"\x91" * 100_000):
        with pytest.raises(EventError):
            decoder().batch(bad)
    with pytest.raises(RouterError, match="block_size"):
        WireDecoder(1, block_size=0, hash_blocks=sums)
    WireDecoder(1, block_size=1, hash_blocks=sums)  # the least block size


def test_a_decoder_detects_the_hash_form_only_if_allowed() -> None:
    """The router may have detected another size than the decoder's initial one."""
    requests: list[int] = []
    known = {SIZE: sums}

    def learn(size: int) -> Any:
        requests.append(size)
        return known.get(size)

    wire = WireDecoder(7, block_size=SIZE, hash_blocks=sums, learn=learn)
    for _ in range(2):
        assert wire.batch(payload(stored([1]))).failed == []
    assert requests == [SIZE]  # one warning is enough
    known = {8: sums}
    wire.resize(8, sums)
    assert len(wire.batch(payload(stored([2]))).failed) == 1
    assert requests == [SIZE, SIZE]
    other = WireDecoder(8, block_size=SIZE, hash_blocks=sums, learn=learn)
    assert len(other.batch(payload(stored([1]))).failed) == 1


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
names = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
fields = st.sampled_from(["block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"])


@settings(max_examples=fewer(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary()
    | st.lists(
        junk
        | st.tuples(names, junk, junk, junk, junk)
        | st.builds(
            lambda name, values: {"type": name, **values}, names, st.dictionaries(fields, junk)
        )
    ).map(lambda events: payload(*events))
)
def test_junk_input_causes_no_failure(message: bytes) -> None:
    index = Indexer(workers=2, blocks=10)
    subscription = Subscription(index, decoder(), replay=True)
    subscription.received([b"", (0).to_bytes(8, "big"), message])
    assert index.stat().blocks <= 10


def message(number: int, *events: Any, ts: float | None = None) -> list[bytes]:
    body = payload(*events, ts=float(number) if ts is None else ts)
    return [b"kv-events", number.to_bytes(8, "big"), body]


def test_subscription_fills_gaps_by_replay() -> None:
    index = Indexer(workers=2, blocks=100)
    subscription = Subscription(index, decoder(), replay=True)
    subscription.received(message(0, stored([11])))
    subscription.received(message(3, stored([13], parent=12, first=3)))
    assert subscription.wanted == replay_request(1)
    assert index.find_matches([1, 2, 3]).held[Worker(7)].device == 1
    for number, event in ((1, stored([12], parent=11, first=2)), (2, stored([99], first=9))):
        assert not subscription.replayed(message(number, event))
    assert subscription.wanted is None
    assert subscription.replayed([b"", b"", b"\xff" * 8, b""])
    assert index.find_matches([1, 2, 3]).held[Worker(7)].device == 3
    assert (subscription.feed.gaps, subscription.feed.lost, subscription.failed) == (1, 0, 0)


def test_a_subscription_continues_without_a_replay() -> None:
    index = Indexer(workers=2, blocks=100)
    subscription = Subscription(index, decoder(), replay=False)
    subscription.received(message(4, stored([11])))
    assert subscription.wanted is None
    assert index.find_matches([1]).held.keys() == {Worker(7)}
    subscription.received(message(6, stored([13], parent=12)))
    assert (subscription.feed.gaps, subscription.feed.lost, subscription.failed) == (2, 5, 1)
    waiting = Subscription(Indexer(workers=2, blocks=100), decoder(), replay=True)
    waiting.received(message(4, stored([11])))
    waiting.replay_failed()
    assert waiting.wanted is None


def test_restarted_engine_has_an_empty_cache() -> None:
    index = Indexer(workers=2, blocks=100)
    subscription = Subscription(index, decoder(), replay=False)
    for number in range(3):
        subscription.received(message(number, stored([11 + number], first=1 + number)))
    subscription.received(message(0, stored([21], first=7), ts=-50.0))  # its clock was set back
    assert index.find_matches([1]).held == {}
    assert index.find_matches([7]).held.keys() == {Worker(7)}
    assert subscription.feed.restarts == 1
    assert subscription.feed.repeated == 0


def test_a_message_with_the_highest_number_does_not_hide_a_restart() -> None:
    index = Indexer(workers=2, blocks=100)
    subscription = Subscription(index, decoder(), replay=False)
    subscription.received(message(0, stored([11])))
    subscription.received(message(1, ts=float("inf")))
    subscription.received(message(1, stored([12], first=2)))
    subscription.received(message(0, stored([21], first=7), ts=50.0))
    assert (subscription.unread, subscription.feed.restarts) == (1, 1)
    assert index.find_matches([7]).held.keys() == {Worker(7)}


def test_malformed_messages_are_counted() -> None:
    subscription = Subscription(Indexer(workers=2, blocks=100), decoder(), replay=True)
    subscription.received([b"x"])
    subscription.received([b"", (0).to_bytes(8, "big"), b"\xc1"])
    subscription.received(message(0, {"type": "?"}, stored([1])))
    assert subscription.unread == 3
    subscription.received([b"", b"\xff" * 8, payload(stored([1]))])  # this number ends replays
    assert subscription.unread == 4
    assert not subscription.replayed([b"x"])


# ---- Hashes of blocks

TOKENS = list(range(1, 9))


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


@pytest.mark.parametrize(
    ("era", "local", "sequence"),
    [
        ("a", [14643705804678351452, 16777012769546811212], 4945711292740353085),
        ("b", [8026409477313730465, 4932910930253085737], 12668468526058386974),
    ],
)
def test_hashes_match_the_examples_of_the_reference(
    era: str, local: list[int], sequence: int
) -> None:
    hasher = BlockHasher(block_size=4, era=era)  # type: ignore[arg-type]
    assert hasher.local(TOKENS) == local
    assert hasher.sequence(local) == [local[0], sequence]
    # A tail that fills no block is dropped.
    assert hasher.local(TOKENS[:7]) == local[:1]
    assert hasher.local(TOKENS[:3]) == hasher.sequence([]) == []
    if era == "b":
        assert salt_seed() == 1389868326933519382
        query = hasher.query(TOKENS)
        assert (query.isl, query.block_size) == (8, 4)
        assert (list(query.hashes), list(query.sequence)) == (local, [local[0], sequence])


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


@pytest.mark.parametrize("block_size", [1, 4, 16, 512])
def test_arrays_have_the_hashes_of_each_block(block_size: int) -> None:
    chance = random.Random(block_size)
    hasher = BlockHasher(block_size=block_size, salt="s")
    seed = salt_seed("s")
    for count in (0, 1, block_size, block_size + 1, 5 * block_size, 5 * block_size + 3):
        tokens = np.array([chance.getrandbits(32) for _ in range(count)], np.uint32)
        starts = range(0, count - block_size + 1, block_size)
        wanted = [xxh3_64_intdigest(tokens[at : at + block_size].tobytes(), seed) for at in starts]
        local = hasher.packed(tokens)
        assert list(local) == wanted == hasher.local([int(token) for token in tokens])
        chained = wanted[:1]
        for block in wanted[1:]:
            chained.append(xxh3_64_intdigest(struct.pack("<QQ", chained[-1], block), 0))
        assert list(hasher.chained(local)) == chained == hasher.sequence(wanted)
