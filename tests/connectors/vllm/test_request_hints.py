# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The hints that requests carry over HTTP: which blocks get them, and what is ignored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import BLOCK_TOKENS, extend, request
from real_engines import in_vllm
from scene import LOGGER, TOKENS, Engine
from support.blocks import eventually

from beluga import IndexServer, KVCache, Pool
from beluga.connectors.hints import FAVOR_S, NO_HINT, RequestHint, read_hint
from beluga.connectors.vllm import hints as hints_module
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.hints import ACTION, Requests
from beluga.connectors.vllm.steps import HintedBlocks, Orders
from beluga.errors import BadTypeError, BadValueError
from beluga.kvcache import HintResult

BLOCK_BYTES = 4096  # space of a block in the pool: one page
Make = Callable[..., Engine]


class Given:
    """Records the hints that blocks are given: (number of blocks, priority, ttl, pin)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, str, float | None, bool]] = []
        hint = KVCache.hint

        def noted(cache: KVCache, digests: Any, **given: Any) -> HintResult:
            result = hint(cache, digests, **given)
            self.calls.append((result.given, given["priority"], given["ttl"], given["pin"]))
            return result

        monkeypatch.setattr(KVCache, "hint", noted)

    def take(self, count: int) -> list[tuple[int, str, float | None, bool]]:
        """Wait for that many hints and return them."""
        assert eventually(lambda: len(self.calls) >= count)
        taken, self.calls = self.calls, []
        return taken


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    return Given(monkeypatch)


def hinted_request(name: str, hint: object, tokens: list[int] = TOKENS, **fields: Any) -> Any:
    """Make a request with a hint among its transfer parameters."""
    made = request(name, tokens)
    vars(made).update(kv_transfer_params={"beluga": hint}, **fields)
    return made


def further(tokens: list[int], blocks: int) -> list[int]:
    """Return a longer prompt."""
    return tokens + list(range(1000, 1000 + blocks * BLOCK_TOKENS))


def test_blocks_that_a_request_saves_get_its_hint(
    server: IndexServer, make: Make, given: Given
) -> None:
    engine = make()
    engine.run(request("plain", TOKENS[::-1]), 1, fill=7)
    engine.run(hinted_request("empty", {}, further(TOKENS[::-1], 1)), 6, fill=8)
    engine.run(hinted_request("a", {"pin": True, "ttl": 60}), 1, fill=7)
    assert given.take(1) == [(5, "normal", 60, True)], "the others were before it"
    assert server.hints().hint_count == 5
    assert server.hints().favored_bytes == 5 * BLOCK_BYTES
    assert engine.worker._worker.saves._counters.take()["hinted_blocks"] == 5
    engine.run(hinted_request("b", {"priority": "high"}, list(range(40))), 3, fill=7)
    assert given.take(1) == [(10, "high", FAVOR_S, False)], "an hour after the last use"


def test_hit_blocks_are_favored_and_never_evicted_earlier(
    server: IndexServer, make: Make, given: Given
) -> None:
    """A batch job shares its system prompt with other requests."""
    make().run(request("everybody", TOKENS), 1, fill=7)
    engine, longer = make(), further(TOKENS, 2)
    assert engine.run(hinted_request("batch", {"priority": "low"}, longer), 1, fill=8) == 20
    assert given.take(1) == [(2, "low", None, False)], "only what it has stored itself"
    engine.run(hinted_request("short", {"ttl": 1}, further(longer, 1)), 1, fill=8)
    assert given.take(1) == [(1, "normal", 1, False)]
    engine.run(hinted_request("short pin", {"pin": True, "ttl": 1}, further(longer, 1)), 1, fill=8)
    assert given.take(1) == [(8, "normal", FAVOR_S, True)]


def test_blocks_in_the_engines_own_cache_get_the_hint_too(
    server: IndexServer, make: Make, given: Given
) -> None:
    engine = make()
    engine.run(request("a", TOKENS), 1, fill=7)
    made = hinted_request("b", {"pin": True})
    engine.scheduler.get_num_new_matched_tokens(made, 4 * BLOCK_TOKENS)
    engine.block_ids["b"] = [1, 2, 3, 4, 9, 10]
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 9, 10],))
    engine.scheduler.update_state_after_alloc(made, blocks, BLOCK_TOKENS)
    made.num_computed_tokens = 5 * BLOCK_TOKENS
    engine.step(made)
    assert given.take(1) == [(5, "normal", FAVOR_S, True)]


def test_a_session_s_later_request_hints_its_earlier_blocks(
    server: IndexServer, make: Make, given: Given
) -> None:
    """The last request of a session releases exactly the blocks of the session."""
    make().run(request("everybody", TOKENS), 1, fill=7)
    engine, first = make(), further(TOKENS, 2)

    def run(name: str, hint: dict[str, Any], tokens: list[int], session: str) -> None:
        engine.run(hinted_request(name, hint, tokens, session_id=session), 1, fill=8)

    run("1", {"pin": True}, first, "s")
    assert given.take(2) == [(5, "normal", FAVOR_S, True), (2, "normal", FAVOR_S, True)]
    last = further(first, 2)
    run("2", {"priority": "low"}, last, "s")
    assert given.take(2) == [(2, "low", None, False), (2, "low", None, False)]
    run("3", {"priority": "low"}, further(last, 1), "other")
    assert given.take(1) == [(1, "low", None, False)]
    others = list(range(500, 500 + 5 * BLOCK_TOKENS))
    engine.run(request("others", others), 8, fill=7)
    run("4", {"priority": "low"}, further(others, 1), "s")  # the session begins again
    assert given.take(1) == [(1, "low", None, False)], "it has no blocks of others"


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints_module, "SESSIONS_MAX", 3)
    requests = Requests(ConnectorCounters(), LOGGER)
    made = request("a", TOKENS)
    for name in "0", "1", "2", "3", "4" * 300, 7:  # the last two are not names
        made.session_id = name
        requests.own_from(made, 0)
    for name, there in ("0", False), ("1", True), ("3", True), ("4" * 300, False), (7, False):
        made.session_id = name
        assert requests.begun(made) is there


def test_a_preempted_request_hints_its_hits_once(
    server: IndexServer, make: Make, given: Given
) -> None:
    make().run(request("a", TOKENS), 1, fill=7)
    engine, made = make(), hinted_request("b", {"pin": True})
    engine.start(made, 1)
    engine.step(made)
    assert given.take(1) == [(5, "normal", FAVOR_S, True)]
    engine.report()
    made.num_computed_tokens = 0
    engine.start(made, 8)
    engine.step(made, preempted={"b"})
    engine.finish(made)
    engine.run(hinted_request("c", {"priority": "low"}, list(range(40))), 3, fill=8)
    assert given.take(1) == [(10, "low", None, False)], "nothing was hinted before it"


OURS = SimpleNamespace(action_type=ACTION, action_version="1", payload={"priority": "low"})
OTHERS = SimpleNamespace(action_type="kv.evict", action_version="1.0", payload={"peer": 1})
SOURCE = {"source_control_endpoint": "tcp://host:1", "block_hashes": [1, 2]}
FETCH_1 = SimpleNamespace(action_type="kv.fetch", action_version="1.0", payload=SOURCE)
FETCH_2 = SimpleNamespace(action_type="kv.fetch", action_version="2.0", payload=SOURCE)
BRIDGED = {"protocol_version": "1.0", "message_id": "m", "actions": [vars(FETCH_1)]}
PIN = {"beluga": {"pin": True}}
FIELDS: list[tuple[dict[str, Any], RequestHint]] = [
    ({"priority": 0}, NO_HINT),
    ({"priority": -1}, RequestHint("high")),
    ({"priority": 5, "kv_transfer_params": {"do_remote_prefill": False}}, RequestHint("low")),
    ({"priority": "1"}, NO_HINT),
    ({"priority": 5, "kv_transfer_params": PIN}, RequestHint(pin=True)),
    *(({"kv_transfer_params": wrong}, NO_HINT) for wrong in ("beluga", ["beluga"], None, {})),
    # a program's envelope
    (
        {"kv_transfer_params": PIN, "kv_hints": SimpleNamespace(actions=[OURS, OTHERS])},
        RequestHint("low"),
    ),
    (
        {"kv_transfer_params": PIN, "kv_hints": SimpleNamespace(actions=[OTHERS])},
        RequestHint(pin=True),
    ),
    # an action of Dynamo's router
    ({"kv_hints": SimpleNamespace(actions=[FETCH_1])}, RequestHint(prefetch=True)),
    ({"kv_hints": SimpleNamespace(actions=[FETCH_1, OURS])}, RequestHint("low", prefetch=True)),
    ({"kv_hints": SimpleNamespace(actions=[FETCH_2])}, NO_HINT),
    ({"kv_transfer_params": {"kv_hint": BRIDGED} | PIN}, RequestHint(pin=True, prefetch=True)),
    *(
        ({"kv_transfer_params": {"kv_hint": wrong}}, NO_HINT)
        for wrong in (7, [], {"actions": 7}, {"actions": [7]}, {"actions": {"kv.fetch": "1.0"}})
    ),
]


@pytest.mark.parametrize(("fields", "hint"), FIELDS, ids=str)
def test_a_request_s_hint_is_read_from_its_fields(
    fields: dict[str, Any], hint: RequestHint
) -> None:
    made = request("a", TOKENS)
    vars(made).update(fields)
    assert Requests(ConnectorCounters(), LOGGER).hint(made) == hint


WRONG = [
    (7, BadTypeError, "a hint is a int; give an object with priority, ttl, pin, prefetch"),
    ([{"pin": True}], BadTypeError, "a hint is a list"),
    ({"prio": "low"}, BadValueError, "a hint has the field prio; it has priority, ttl, pin"),
    ({7: 1}, BadValueError, "a hint has the field 7"),
    ({"priority": "urgent"}, BadValueError, "'urgent'; give low, normal, high"),
    ({"priority": None}, BadTypeError, "priority is None"),
    ({"priority": ["low"] * 1000}, BadTypeError, "priority of a hint is a list; give a short text"),
    ({"priority": "l" * 100}, BadTypeError, "priority of a hint is a str; give a short text"),
    ({"ttl": 0.5}, BadValueError, "the ttl of a request's hint is 0.5; give seconds, from 1 to"),
    ({"ttl": 86401}, BadValueError, "the ttl of a request's hint is 86401"),
    ({"ttl": float("nan")}, BadValueError, "is nan"),
    ({"ttl": float("inf")}, BadValueError, "is inf"),
    ({"ttl": 10**400}, BadValueError, "the ttl of a hint is 1000000"),
    ({"ttl": True}, BadValueError, "is True"),
    ({"ttl": "60"}, BadTypeError, "ttl is '60'"),
    ({"pin": 1}, BadTypeError, "pin is 1; give a bool"),
    ({"pin": True, "priority": "low"}, BadValueError, "give one of the two"),
    ({"prefetch": "yes"}, BadTypeError, "prefetch is 'yes'; give true or false"),
]


@pytest.mark.parametrize(("hint", "error", "why"), WRONG, ids=[str(case[0])[:30] for case in WRONG])
def test_a_malformed_hint_is_a_one_line_error(
    hint: object, error: type[Exception], why: str
) -> None:
    with pytest.raises(error) as refused:
        read_hint(hint)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_a_malformed_hint_is_logged_and_the_request_continues(
    server: IndexServer, make: Make, given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    for number, (hint, _, _) in enumerate(WRONG):
        made = hinted_request(f"wrong {number}", hint, list(range(100 * number, 100 * number + 9)))
        engine.scheduler.on_new_request(made)
        assert engine.run(made, 1, fill=7) == 0
    huge = hinted_request("huge", {"ttl": 10**5000}, list(range(5000, 5009)))  # too long for a text
    engine.run(huge, 1, fill=7)
    lines = [record.getMessage() for record in caplog.records if "hint" in record.getMessage()]
    assert lines == [f"beluga: a request's hint is ignored: {WRONG[0][2]}"]
    assert engine.scheduler._counters.take()["hints_ignored"] == len(WRONG) + 1
    assert given.calls == []


def test_a_hostile_client_cannot_exceed_the_tenants_budget(
    pool: Pool, make: Make, given: Given
) -> None:
    with IndexServer(pool, hint_budget=0.0) as server:
        engine = make(tenant="acme")
        engine.run(hinted_request("a", {"pin": True, "ttl": 86400}), 1, fill=7)
        assert given.take(1) == [(0, "normal", 86400, True)]
        assert server.hints().favored_bytes == 0
        assert eventually(lambda: engine.worker._counters.take().get("hint_refused_blocks") == 5)


def test_hints_that_a_full_queue_or_a_lost_server_drops_are_counted(
    pool: Pool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = HintedBlocks(RequestHint(pin=True), bytes(96), 3)
    with IndexServer(pool):
        engine = make(retry_s=60.0)
    counters = engine.worker._counters
    engine.worker._worker.save(Orders(hints=[hint]))
    assert eventually(lambda: counters.take().get("hint_skipped_blocks") == 3)
    monkeypatch.setattr("beluga.connectors.vllm.saves.HINTS_MAX", 0)
    engine.worker._worker.saves.hint([hint])
    assert counters.take() == {"hint_skipped_blocks": 3}


def test_a_waiting_request_prefetches_on_request_or_in_a_session(
    server: IndexServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, calls in (({}, 1), ({"onboard_ms": 0}, 0)):  # the latter waits for no lower tier
        other = make(**options)
        before = server.stat().call_count
        other.scheduler.on_new_request(hinted_request("a", {"prefetch": True}))
        assert server.stat().call_count == before + calls
    engine, requested = make(), list[int]()
    monkeypatch.setattr(
        engine.scheduler._lookups, "prefetch", lambda digests: requested.append(len(digests))
    )
    engine.scheduler.on_new_request(request("plain", TOKENS))
    first = hinted_request("first", {}, session_id="s")
    engine.scheduler.on_new_request(first)
    assert requested == []
    engine.scheduler.on_new_request(hinted_request("asks", {"prefetch": True}))
    assert requested == [5]
    engine.run(first, 1, fill=7)
    following = hinted_request("second", {}, session_id="s")
    extend(following, list(range(BLOCK_TOKENS)))
    engine.scheduler.on_new_request(following)
    assert requested == [5, 6]
    for name in "plain", "asks", "second":  # the requests are aborted before they start
        ended = request(name, TOKENS)
        assert engine.scheduler.request_finished(ended, []) == (False, None)
    assert engine.scheduler._schedule._requests == {}


@pytest.mark.slow
@pytest.mark.timeout(1500)  # the packages may have to be downloaded
def test_hints_in_http_requests_reach_the_connector(vllm_python: str) -> None:
    """With vLLM's own classes, from the body of a request to the scheduler's request."""
    assert in_vllm(vllm_python, "hints") == {
        "chat": ["normal", 600.0, True, True, True],
        "completion": ["low", None, False, False, True],
        "priority": ["high", None, False, False, False],
        "envelope": ["high", 60.0, False, False, False],
        "extra": ["normal", None, False, False, False],
    }
