# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Shares of tenants and hints: which tenant loses blocks first, and the order of eviction inside a
share, within a budget; hints end with their session.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from models.structures import Shares
from support.blocks import eventually, held, keys
from support.emulation import fewer

from beluga._ffi import lib
from beluga.errors import BadRequestError, BadTypeError, BadValueError
from beluga.index import (
    COMMITTED,
    EVICTIONS,
    OTHERS,
    BlockState,
    HintStat,
    IndexClient,
    IndexServer,
    TenantShare,
    fingerprint_of,
    read_entries,
)
from beluga.kvcache import HintResult, KVCache, Namespace
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20
PAGE = 4096
VICTIM, FLOOD = (Namespace.of(name).fingerprint for name in ("victim", "flood"))


@contextmanager
def serving(
    pool: Pool,
    shares: dict[str, float] | None = None,
    eviction: str = "lru",
    *,
    budget: float = 0.25,
) -> Iterator[tuple[IndexServer, IndexClient]]:
    with (
        IndexServer(pool, shares=shares, eviction=eviction, hint_budget=budget) as server,
        Client(pool) as client,
    ):
        yield server, IndexClient(client)


def put(index: IndexClient, number: int, fingerprint: int = 1, length: int = MIB) -> bool:
    """Put a block unless it is there; a block that is there is touched. Returns whether it was."""
    if index.lookup(keys([number])).hits:
        return True
    (grant,) = index.reserve(keys([number]), length=length, fingerprint=fingerprint)
    assert grant.state is BlockState.GRANTED
    assert index.commit([grant]) == [0]
    return False


def room(server: IndexServer) -> int:
    """How many blocks of a MiB the pool has room for."""
    return server.index_stat().data_bytes // MIB


def by_name(server: IndexServer) -> dict[str, TenantShare]:
    return {share.name: share for share in server.shares()}


def walked(pool: Pool, epoch: int) -> Counter[int]:
    """The space of the committed blocks by fingerprint, from their entries in the pool. Their
    chunks have no checksums.
    """
    sizes: Counter[int] = Counter()
    for lines in read_entries(pool, epoch % 2):
        for line in lines[lines["state"] == COMMITTED]:
            sizes[int(line["fingerprint"])] += -(-int(line["length"]) // PAGE) * PAGE
    return sizes


def requests(pool: Pool, shares: dict[str, float], eviction: str, *, floods: int) -> int:
    """Request a victim's blocks repeatedly, each time after ``floods`` puts of another tenant's new
    blocks; put misses. Returns the hits.
    """
    hits, fresh, random = 0, 10_000, Random(1)
    with serving(pool, shares, eviction) as (server, index):
        count = room(server) // 4  # 25 %, within its share of 30 %
        for _ in range(10 * count):
            for _ in range(floods):
                fresh += 1
                put(index, fresh, FLOOD)
            hits += put(index, random.randrange(count), VICTIM)
        if floods and "victim" in shares:
            assert by_name(server)["victim"].evictions == 0
            assert by_name(server)[OTHERS].evictions > 0
        index.remove(keys(range(count)))
    return hits


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_flood_costs_a_tenant_within_its_share_no_hit(pool: Pool, eviction: str) -> None:
    shares = {"victim": 0.3}
    alone = requests(pool, shares, eviction, floods=0)
    assert requests(pool, shares, eviction, floods=10) == alone > 0
    if eviction == "lru":
        assert requests(pool, {"idle": 0.01}, eviction, floods=10) < alone / 2, "this is no flood"


def test_a_flood_of_small_blocks_evicts_no_table_lines_of_others(pool: Pool) -> None:
    lines = pool.geometry.block_count_max
    with serving(pool, {"victim": 0.3}) as (server, index):
        for number in range(lines // 4):
            put(index, number, VICTIM, PAGE)
        for number in range(1000, 1000 + 2 * lines):
            put(index, number, FLOOD, PAGE)
        assert held(index, range(lines // 4)) == set(range(lines // 4))
        assert server.index_stat().table_evict_count > 0


@pytest.mark.parametrize("length", [PAGE, 3 * MIB // 4, 5 * MIB])
def test_a_flood_of_other_sizes_evicts_no_blocks_of_others(pool: Pool, length: int) -> None:
    with serving(pool, {"victim": 0.3}) as (server, index):
        own = range(room(server) // 5)
        for number in own:
            put(index, number, VICTIM)
            put(index, 1000 + number, FLOOD)  # blocks of both tenants are adjacent
        for number in range(2000, 2000 + 4 * room(server)):
            put(index, number, FLOOD, length)
        assert held(index, own) == set(own)


def test_others_use_an_unused_share_until_its_tenant_needs_it(pool: Pool) -> None:
    with serving(pool, {"victim": 0.3, "idle": 0.5}) as (server, index):
        count = room(server)
        for number in range(1000, 1000 + count):
            put(index, number, FLOOD)
        assert by_name(server)[OTHERS].used_bytes == count * MIB
        assert server.index_stat().evict_count == 0, "nobody wants this room"
        for number in range(count):
            put(index, number, VICTIM)
        shares = by_name(server)
        assert shares["victim"].bytes // MIB == int(count * 0.3)
        # Both tenants use the idle share; the one that uses more of it loses blocks first.
        assert shares["victim"].used_bytes > shares["victim"].bytes
        lent = [shares[name].used_bytes - shares[name].bytes for name in ("victim", OTHERS)]
        assert abs(lent[0] - lent[1]) <= MIB


def test_a_tenant_within_its_share_evicts_its_own_coldest_blocks(pool: Pool) -> None:
    with serving(pool, {"victim": 0.5}) as (server, index):
        half = room(server) // 2
        for number in range(half):
            put(index, number, VICTIM)
        for number in range(1000, 1000 + room(server) - half):
            put(index, number, FLOOD)
        put(index, 500, VICTIM)
        assert 0 not in held(index, [0])
        put(index, 2000, FLOOD)
        assert held(index, [1000, 1001, 1, 2]) == {1001, 1, 2}


def test_a_successor_counts_what_each_tenant_has_in_the_pool(pool: Pool) -> None:
    shares = {"victim": 0.3, f"{FLOOD:016x}": 0.4, "nobody": 0.1}
    other = Namespace.of("other").fingerprint
    with serving(pool, shares) as (_, index):
        for number in range(40):
            length = (PAGE, MIB, 3 * PAGE // 2)[number % 3]
            put(index, number, (VICTIM, FLOOD, other)[number * 7 % 3], length)
        index.remove(keys(range(0, 40, 5)))
    with serving(pool, shares) as (server, index):
        by_tenant, counts = by_name(server), walked(pool, server.stat().epoch)
        for name, fingerprint in ("victim", VICTIM), (f"{FLOOD:016x}", FLOOD), (OTHERS, other):
            assert by_tenant[name].used_bytes == counts[fingerprint] > 0
        assert by_tenant["nobody"] == TenantShare(
            "nobody", by_tenant["nobody"].bytes, 0, 0, 0, by_tenant["nobody"].hint_bytes, 0
        )
        assert sum(share.blocks for share in by_tenant.values()) == 32
        for number in range(100, 100 + 2 * room(server)):  # the successor protects, too
            put(index, number, other)
        assert by_name(server)["victim"].used_bytes == counts[VICTIM]


def test_a_tenants_namespaces_have_one_share() -> None:
    fields = {"model": "a", "tenant": "acme"}
    first, second = Namespace(fields, salt="x"), Namespace({**fields, "model": "b"})
    assert first.fingerprint >> 32 == second.fingerprint >> 32
    assert first.fingerprint != second.fingerprint
    assert Namespace.of("a").of_tenant("acme").digest != Namespace.of("a").digest
    assert Namespace.of("a").of_tenant("") == Namespace.of("a")
    assert fingerprint_of({"name": "a"}, b"\1" * 16) == int.from_bytes(b"\1" * 8, "little")
    with pytest.raises(BadTypeError, match="the tenant of a namespace is 3; give its name as text"):
        Namespace({"tenant": 3})


def test_tenants_are_identified_by_name_with_any_namespace_and_salt(pool: Pool) -> None:
    with serving(pool, {"acme": 0.2}) as (server, index):
        for number, salt in enumerate(("", "x", "y")):
            own = Namespace({"model": "m"}, salt=salt).of_tenant("acme")
            put(index, number, own.fingerprint)
        put(index, 100, Namespace({"model": "m"}).fingerprint)
        assert by_name(server)["acme"].blocks == 3
        assert by_name(server)[OTHERS].blocks == 1


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ({"a": 0.0}, "the share of 'a' is 0 %; give more than 0 and at most 100"),
        ({"a": 1.5}, "the share of 'a' is 150 %; give more than 0 and at most 100"),
        ({"a": float("nan")}, "the share of 'a' is nan %"),
        ({"a": 0.7, "b": 0.4}, "the shares add up to 110 % of the pool; give at most 100 %"),
        ({"": 0.1}, "the name of a share is ''; give a tenant's"),
        ({OTHERS: 0.1}, "the name of a share is 'others'; give a tenant's"),
        ({"a\n": 0.1}, "the name of a share is 'a.*; give a tenant's"),
        ({f"t{n}": 0.01 for n in range(32)}, "32 shares are too many; give 31 at most"),
    ],
)
def test_invalid_shares_are_rejected(pool: Pool, shares: dict[str, float], why: str) -> None:
    with pytest.raises(BadValueError, match=why):
        IndexServer(pool, shares=shares)
    for wrong in {1: 0.3}, {"a": "30%"}, ["a"]:
        with pytest.raises(BadTypeError):
            IndexServer(pool, shares=wrong)  # type: ignore[arg-type]


def test_shares_may_cover_the_whole_pool(pool: Pool) -> None:
    shares = {f"t{n}": 0.03 for n in range(30)} | {"victim": 0.1}
    with serving(pool, shares) as (server, index):
        assert by_name(server)[OTHERS].bytes == 0
        put(index, 1, VICTIM)
        for number in range(1000, 1000 + 2 * room(server)):
            put(index, number, FLOOD)
        assert held(index, [1]) == {1}
        assert server.index_stat().block_count == room(server)


class SharesMachine(RuleBasedStateMachine):
    """Blocks of one size against the model, which predicts each victim."""

    names = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        directory = Path(self.cleanup.enter_context(tempfile.TemporaryDirectory()))
        self.pool = self.cleanup.enter_context(
            Pool.create([directory / "a"], device_size=32 * MIB, sparse=True, max_blocks=64)
        )
        self.shares = {"a": 0.25, "b": 0.5}
        self.prints = [Namespace.of(name).fingerprint for name in ("others", *self.names)]
        self.start()
        count = room(self.server)
        shares_mib = [share.bytes / MIB for share in self.server.shares()]
        self.model = Shares(shares_mib, count)
        self.epochs: list[int] = []  # the blocks in the order of their commits

    def start(self) -> None:
        self.server = IndexServer(self.pool, shares=self.shares)
        self.server.start()
        self.session = Client(self.pool)
        self.index = IndexClient(self.session)

    def teardown(self) -> None:
        self.pool.close()
        self.cleanup.close()

    @rule(share=st.integers(0, 2), first=st.integers(0, 20), count=st.integers(1, 6))
    def puts(self, share: int, first: int, count: int) -> None:
        batch = [100 * share + first + position for position in range(count)]
        grants = self.index.reserve(keys(batch), length=MIB, fingerprint=self.prints[share])
        new = []
        for number, grant in zip(batch, grants, strict=True):
            if number in self.model.share:
                assert grant.state is BlockState.HIT
            elif grant.state is BlockState.GRANTED:
                self.model.take(number, share)
                new.append((number, grant))
        assert len(new) == sum(grant.state is BlockState.GRANTED for grant in grants)
        assert self.index.commit([grant for _, grant in new]) == [0] * len(new)
        for number, _ in reversed(new):
            self.model.touch(number)
        self.epochs = [n for n in self.epochs if n in self.model.share] + [n for n, _ in new]

    @rule(share=st.integers(0, 2), first=st.integers(0, 25), count=st.integers(1, 6))
    def looks_up(self, share: int, first: int, count: int) -> None:
        batch = [100 * share + first + position for position in range(count)]
        hits = len(self.index.lookup(keys(batch)).hits)
        for number in reversed(batch[:hits]):
            self.model.touch(number)

    @rule(share=st.integers(0, 2), first=st.integers(0, 25))
    def removes(self, share: int, first: int) -> None:
        number = 100 * share + first
        there = number in self.model.share
        assert self.index.remove(keys([number])) == there
        if there:
            self.model.leave(number)

    @rule()
    def replaces_the_server(self) -> None:
        self.session.close()
        self.server.stop()
        self.start()
        assert eventually(lambda: self.server.stat().inherited_count == 0)
        for number in self.epochs:  # after a takeover the order is that of the grants
            if number in self.model.share:
                self.model.touch(number)

    @invariant()
    def the_counts_are_the_models(self) -> None:
        shares = self.server.shares()
        assert [share.blocks for share in shares] == self.model.used
        assert [share.used_bytes for share in shares] == [n * MIB for n in self.model.used]

    @invariant()
    def the_pool_has_the_models_blocks(self) -> None:
        entries = walked(self.pool, self.server.stat().epoch)
        for share, fingerprint in enumerate(self.prints):
            assert entries[fingerprint] == self.model.used[share] * MIB

    @rule()
    def finds_what_the_model_has(self) -> None:
        for number in sorted(self.model.share):
            assert len(self.index.lookup(keys([number])).hits) == 1, number
            self.model.touch(number)


SharesMachine.TestCase.settings = settings(
    max_examples=fewer(40), stateful_step_count=40, deadline=None
)
test_the_choice_of_victims_agrees_with_the_model = SharesMachine.TestCase


# ---- Hints


LOW, HIGH, PINNED = lib.BL_LEVEL_LOW, lib.BL_LEVEL_HIGH, lib.BL_LEVEL_PINNED
NORMAL = lib.BL_LEVEL_NORMAL
ACME = Namespace.of("acme").fingerprint


def fill(server: IndexServer, index: IndexClient) -> int:
    """Fill the pool with blocks, and return their number."""
    for number in range(room(server)):
        put(index, number)
    return room(server)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_low_blocks_are_evicted_first_and_high_ones_last(pool: Pool, eviction: str) -> None:
    with serving(pool, eviction=eviction) as (server, index):
        count = fill(server, index)
        high, low = range(4), range(count - 4, count)  # the coldest, and the newest
        assert index.hint(keys(high), level=HIGH) == (4, 0)
        assert index.hint(keys(low), level=LOW) == (4, 0)
        for number in range(1000, 1004):
            put(index, number)
        assert held(index, low) == set()
        for number in range(2000, 2000 + count - 4):
            put(index, number)
        assert held(index, high) == set(high)
        assert server.hints().hint_count == 4


def test_low_blocks_of_a_chain_are_evicted_from_its_end(pool: Pool) -> None:
    with serving(pool) as (server, index):
        fill(server, index)
        index.hint(keys(range(10, 13)), level=LOW)
        for number in (12, 11, 10):
            put(index, 1000 + number)
            assert number not in held(index, [number])


def test_pinned_blocks_are_evicted_only_as_the_last_resort(pool: Pool) -> None:
    with serving(pool, budget=0.9) as (server, index):
        count = fill(server, index)
        pinned = range(0, count, 2)  # every second block: no gap is two blocks wide
        assert index.hint(keys(pinned), level=PINNED) == (len(pinned), 0)
        for number in range(1000, 1000 + 2 * count):
            put(index, number)
        assert held(index, pinned) == set(pinned)
        put(index, 5000, length=2 * MIB)  # granted nevertheless: hints deny space to no session
        assert held(index, [5000]) == {5000}
        assert len(held(index, pinned)) < len(pinned)


def test_a_budget_bounds_what_hints_favor(pool: Pool) -> None:
    with serving(pool, budget=0.25) as (server, index):
        count = fill(server, index)
        budget = int(count * 0.25)
        assert index.hint(keys(range(count)), level=PINNED) == (budget, count - budget)
        assert server.hints().favored_bytes == budget * MIB
        assert server.hints().refuse_count == count - budget
        assert index.hint(keys(range(count)), level=LOW) == (count, 0), "this needs no budget"
        assert server.hints().favored_bytes == 0
        index.hint(keys(range(2)), level=HIGH)
        index.remove(keys(range(2)))
        assert server.hints().favored_bytes == 0
        assert index.hint(keys([2]), level=NORMAL) == (1, 0)
        assert server.hints().hint_count == count - 3


def test_the_budget_is_that_of_the_blocks_tenant(pool: Pool) -> None:
    with serving(pool, shares={"acme": 0.4}) as (server, index):
        own = range(int(room(server) * 0.2))
        for number in own:
            put(index, number, ACME)
        for number in range(1000, 1000 + 3 * room(server)):
            put(index, number, FLOOD)
        flood = [n for n in range(1000, 1000 + 3 * room(server)) if n in held(index, [n])]
        given, _ = index.hint(keys(flood), level=PINNED)
        assert given == int(room(server) * 0.6 * 0.25)
        others, acme = server.shares()
        assert (others.hinted_bytes, acme.hinted_bytes) == (given * MIB, 0)
        assert others.hinted_bytes <= others.hint_bytes < others.hinted_bytes + MIB
        assert acme.hint_bytes == pytest.approx(0.25 * acme.bytes, abs=1)
        assert index.hint(keys(own[:2]), level=PINNED) == (2, 0), "the flood took this budget"
        for number in range(9000, 9000 + room(server)):
            put(index, number, FLOOD)
        assert held(index, own) == set(own), "pins of one tenant cost another one blocks"


def test_a_budget_favors_the_leading_blocks_of_a_chain(
    pool: Pool,
) -> None:
    with serving(pool, budget=0.25) as (server, index):
        big = range(room(server))
        for number in big:
            put(index, number)
        budget = server.shares()[0].hint_bytes // MIB
        assert index.hint(keys(big), level=HIGH) == (budget, len(big) - budget)
        for number in range(10_000, 10_000 + 2 * room(server)):
            put(index, number)
        assert held(index, big) == set(big[:budget])


def test_a_budget_favors_the_leading_blocks_of_many_calls(shm: Path) -> None:
    pool = Pool.create([shm / "a"], device_size=64 << 20, sparse=True, max_blocks=2000)
    with pool, serving(pool, budget=0.03) as (server, index):
        for number in range(1000):
            put(index, number, length=4096)
        budget = server.shares()[0].hint_bytes // 4096
        assert lib.BL_CALL_KEYS_MAX < budget < 1000 - lib.BL_CALL_KEYS_MAX
        assert index.hint(keys(range(1000)), level=PINNED) == (budget, 1000 - budget)
        index.hint(keys(range(budget, 1000)), level=NORMAL)
        assert server.hints().favored_bytes == budget * 4096, "none of the last was favored"


def test_a_small_share_has_a_nonzero_budget(pool: Pool) -> None:
    with serving(pool, shares={"acme": 0.01}, budget=0.5) as (server, index):
        for number in range(10):
            put(index, number, ACME, length=4096)
        assert index.hint(keys(range(10)), level=HIGH) == (10, 0)
        assert 10 * 4096 == server.shares()[1].hinted_bytes < 300_000
        assert server.shares()[1].hint_bytes == server.shares()[1].bytes // 2 < 1_000_000


def test_a_block_becomes_the_coldest_when_its_hint_expires(pool: Pool) -> None:
    with serving(pool) as (server, index):
        count = fill(server, index)
        index.hint(keys([count - 1]), level=PINNED, ttl_ms=1)
        index.hint(keys([count - 2]), level=PINNED, ttl_ms=3_600_000)
        index.hint(keys([count - 3]), level=NORMAL, ttl_ms=1)

        def expired() -> bool:
            index.hint(keys([10_000]), level=NORMAL)  # a new hint replaces earlier ones
            return server.hints().expire_count == 2

        assert eventually(expired)
        assert server.hints().favored_bytes == MIB
        for number in (1000, 1001):
            put(index, number)
        assert held(index, range(count)) == {*range(count - 3), count - 2}


def test_a_hit_restarts_the_lifetime_of_a_hint(pool: Pool) -> None:
    with serving(pool) as (server, index):
        fill(server, index)
        index.hint(keys([5]), level=PINNED, ttl_ms=600_000)
        index.hint(keys([6]), level=PINNED, ttl_ms=1)
        assert eventually(lambda: not _hinted(server, index, 1))
        assert server.hints().hint_count == 1


def _hinted(server: IndexServer, index: IndexClient, minimum: int) -> bool:
    index.lookup(keys([5]))
    index.hint(keys([10_000]), level=NORMAL)
    return server.hints().hint_count > minimum


def test_hints_end_with_their_session(
    pool: Pool, server: IndexServer, attach: Callable[[], IndexClient]
) -> None:
    index = attach()
    count = fill(server, index)
    with Client(pool) as client:
        other = IndexClient(client)
        assert other.hint(keys(range(3)), level=PINNED) == (3, 0)
        assert other.hint(keys([count - 1]), level=LOW) == (1, 0)
        assert index.hint(keys([2]), level=HIGH) == (1, 0), "the last hint counts"
        assert server.hints().hint_count == 4
    assert eventually(lambda: server.hints().hint_count == 1)
    assert server.hints().favored_bytes == MIB
    for number in range(1000, 1000 + 2 * count):
        put(index, number)
    assert held(index, range(count)) == {2}


def test_hints_end_with_the_server(pool: Pool) -> None:
    with serving(pool) as (server, index):
        count = fill(server, index)
        index.hint(keys([0, 1]), level=PINNED)
    with serving(pool) as (server, index):
        assert server.hints() == HintStat(0, 0, 0, 0, 0, 0)
        for number in range(1000, 1000 + count):
            put(index, number)
        assert held(index, [0, 1]) == set()


def test_hints_of_absent_keys_do_nothing_and_are_counted(
    server: IndexServer, index: IndexClient
) -> None:
    (grant,) = index.reserve(keys([1]), length=MIB)
    assert index.hint(keys(range(1000)), level=PINNED) == (0, 0), "it is not committed"
    assert server.hints() == HintStat(0, 0, 0, 1000, 0, 0)
    index.abort([grant])


def test_a_pinned_hint_and_a_reader_keep_a_block_together(
    server: IndexServer, index: IndexClient
) -> None:
    count = fill(server, index)
    pins = index.lookup(keys([0]), pin=True).hits
    index.hint(keys([0]), level=LOW)
    for number in range(1000, 1000 + 2 * count):
        put(index, number)
    assert held(index, [0]) == {0}, "a reader's pin holds in spite of a hint"
    assert index.release(pins) == 1
    put(index, 5000)
    assert held(index, [0]) == set()


def test_a_session_gives_a_bounded_number_of_hints(shm: Path) -> None:
    count, most = 16_400, 16_384
    digests = [number.to_bytes(16, "little") for number in range(count)]
    with (
        Pool.create([shm / "a"], device_size=256 * MIB, sparse=True, max_blocks=1 << 15) as pool,
        IndexServer(pool),
        KVCache(pool, namespace="a") as cache,
        KVCache(pool, namespace="b") as other,
    ):
        assert cache.put(digests, [bytes(64)] * count).stored == count
        assert cache.hint(digests, priority="low").given == most
        assert cache.hint(digests, priority="low").given == most
        assert other.put(digests[:1], [bytes(64)]).stored == 1
        assert other.hint(digests[:1], priority="low").given == 1  # it has its own bound


def test_an_invalid_level_is_rejected(index: IndexClient) -> None:
    with pytest.raises(BadRequestError):
        index.hint(keys([1]), level=4)


def test_a_cache_sends_hints_and_rejects_invalid_ones(pool: Pool, server: IndexServer) -> None:
    digests = [bytes([n]) * 16 for n in range(4)]
    with KVCache(pool, namespace="a", tenant="acme") as cache:
        cache.put(digests[:3], [bytearray(4096)] * 3)
        assert cache.hint(digests, priority="high", ttl=60) == HintResult(3, 0, 1, 0)
        assert cache.hint(digests, pin=True, prefetch=True).given == 3
        assert cache.hint([]) == HintResult(0, 0, 0, 0)
        for wrong, why in (
            ({"priority": "urgent"}, "the priority of a hint is 'urgent'; give low, normal, high"),
            ({"ttl": 0}, "the ttl of a hint is 0; give seconds, from 0.001"),
            ({"ttl": float("nan")}, "the ttl of a hint is nan"),
            ({"ttl": True}, "the ttl of a hint is True"),
            ({"pin": True, "priority": "low"}, "a hint has both pin and low priority"),
        ):
            with pytest.raises(BadValueError, match=why):
                cache.hint(digests, **wrong)  # type: ignore[arg-type]
        for wrong in {"priority": 1}, {"ttl": "1"}, {"pin": 1}:
            with pytest.raises(BadTypeError):
                cache.hint(digests, **wrong)  # type: ignore[arg-type]
    for budget in (-0.1, 1.5, float("nan")):
        with pytest.raises(BadValueError, match="hint_budget is"):
            IndexServer(pool, hint_budget=budget)
