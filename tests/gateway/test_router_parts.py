# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Parts of the gateway, separately: headers, lines, figures, engines and fleets, checks,
waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timezone
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from routed import until

from beluga.errors import NoWorkersError, RouterError
from beluga.gateway import Address, EngineSpec, Limits, read_engines
from beluga.gateway import proxy as relay_module
from beluga.gateway.conversation import Conversation
from beluga.gateway.director import WaitQueue
from beluga.gateway.engine import Engine, GatewayClient, Health
from beluga.gateway.fleet import SETTLED_LOOKS, Fleet, WorkersFile
from beluga.gateway.health import Checker
from beluga.gateway.metrics import Latency, Metrics
from beluga.gateway.parsed_request import ParsedRequest, parse_request
from beluga.gateway.protocol import Refusal, error_event, for_client, for_engine, retry_after_s
from beluga.gateway.proxy import Lines, relay
from beluga.gateway.settings import read_queues, read_url
from beluga.router import Choice, Indexer, Load, Overlap, Query, Worker


class Clock:
    """Replaces the module ``time``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 1000.0
        for module in modules:
            monkeypatch.setattr(f"beluga.gateway.{module}.time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic


# ---- Headers and answers.


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        *[("7", 7.0), ("61", 60.0), ("", 1.0), ("soon", 1.0), ("-3", 1.0), (" 5 ", 5.0)],
        *[("9" * 5000, 60.0), ("1e9", 1.0), ("inf", 1.0), ("nan", 1.0)],
        ("Wed, 21 Oct 2015 07:28:00 +" + "9" * 30, 1.0),  # no offset of any clock
    ],
)
def test_an_engines_requested_pause_is_respected_up_to_a_limit(text: str, wait_s: float) -> None:
    assert retry_after_s({"Retry-After": text}, 60.0) == wait_s


def test_retry_after_may_be_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, "protocol")
    for at, wait_s in ((1030, 30.0), (900, 0.0), (2000, 60.0)):
        text = format_datetime(datetime.fromtimestamp(at, timezone.utc), usegmt=True)
        assert retry_after_s({"Retry-After": text}, 60.0) == wait_s
    assert retry_after_s({}, 0.5) == 0.5


def test_hop_by_hop_headers_are_not_forwarded() -> None:
    both = {"Connection": "close, X-Mine", "X-MINE": "1", "Transfer-Encoding": "chunked", "A": "b"}
    assert dict(for_engine({**both, "Host": "h", "Expect": "100-continue"})) == {"A": "b"}
    assert dict(for_client({**both, "Host": "h"}, "http://e:1")) == {"A": "b", "Host": "h"}
    assert dict(for_client({"A": "b"}, "http://e:1")) == {"A": "b"}


@pytest.mark.parametrize(("retry_s", "message"), [(None, None), (0.2, "1"), (1.0, "1"), (1.5, "2")])
def test_a_refusal_has_a_retry_time(retry_s: float | None, message: str | None) -> None:
    answer = Refusal(503, "no", retry_after_s=retry_s, param="model").response()
    assert answer.status == 503
    assert answer.headers.get("Retry-After") == message
    assert json.loads(cast("bytes", answer.body))["error"] == {
        "message": "no",
        "type": "ServiceUnavailableError",
        "param": "model",
        "code": 503,
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (404, "NotFoundError"),
        (413, "RequestTooLargeError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (502, "BadGatewayError"),
        (503, "ServiceUnavailableError"),
        (504, "GatewayTimeoutError"),
    ],
)
def test_errors_have_the_types_of_the_client_library(status: int, kind: str) -> None:
    body = cast("bytes", Refusal(status, "no").response().body)
    assert json.loads(body)["error"] == {
        "message": "no",
        "type": kind,
        "param": None,
        "code": status,
    }


def test_an_error_event_follows_complete_lines() -> None:
    event = error_event(502, "broke")
    assert event.startswith(b"\ndata: {") and event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["type"] == "BadGatewayError"


# ---- Parsed requests.


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": [1, 2, 3]}, [1, 2, 3]),
        ({"prompt": [[1, 2], [3]]}, [1, 2, 3]),
        ({"input": [7]}, [7]),
        ({"prompt": []}, []),
        ({"prompt": [True, 2]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": ["a", 1]}, None),
        ({"messages": [1, 2]}, None),
    ],
)
def test_tokens_are_ids_or_four_bytes_of_text(
    fields: dict[str, Any], tokens: list[int] | None
) -> None:
    body = json.dumps(fields).encode()
    parsed = parse_request("/v1/completions", body)
    if tokens is None:
        text = json.dumps(next(iter(fields.values())))
        tokens = [int.from_bytes(text[i : i + 4].encode(), "little") for i in range(0, 99, 4)]
        tokens = tokens[: len(text) // 4]
    assert parsed.tokens.tolist() == tokens
    assert parsed.isl == len(tokens)
    assert parsed.body == body


def test_a_body_that_is_not_json_is_forwarded_with_an_estimated_length() -> None:
    parsed = parse_request("/v1/audio", b"x" * 17, is_json=False)
    assert (parsed.isl, len(parsed.tokens), parsed.model, parsed.stream) == (4, 0, None, False)
    assert parse_request("/v1/files", b"").isl == 0


def test_salt_stream_and_model_are_parsed() -> None:
    parsed = parse_request("/p", b'{"model": "m", "stream": true, "cache_salt": "s"}')
    assert (parsed.model, parsed.stream, parsed.salt) == ("m", True, "s")
    parsed = parse_request("/p", b'{"stream": "yes", "cache_salt": 7}')
    assert (parsed.model, parsed.stream, parsed.salt) == (None, False, None)
    assert not parsed.odd


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": 7}', None),
        (b"[", None),
        (b'{"model": "\xff"}', None),
        (b"[" * 100_000, None),
        (b'{"model": "m", "prompt": "\\ud83d"}', "m"),
        (b'{"model": "m", "temperature": NaN}', "m"),
    ],
)
def test_unusual_requests_go_to_an_engine_of_their_model_or_to_any(
    body: bytes, model: str | None
) -> None:
    parsed = parse_request("/p", body)
    assert (parsed.model, parsed.odd, parsed.body) == (model, model is None, body)


FIELDS = ("model", "stream", "messages", "prompt", "input", "cache_salt", "previous_response_id")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(), VALUES, max_size=6))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_any_object_is_parsed(path: str, fields: dict[str, Any]) -> None:
    body, model = json.dumps(fields).encode(), fields.get("model")
    parsed = parse_request(path, body, tokenizer=FakeTokenizer())
    assert (parsed.body, parsed.odd) == (body, not isinstance(model, str | None))
    assert parsed.model == (model or None if not parsed.odd else None)
    assert parsed.stream == (fields.get("stream") is True and not parsed.odd)
    assert parsed.isl == len(parsed.tokens) or parsed.odd


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(body=st.binary(max_size=300), is_json=st.booleans(), encoding=st.sampled_from(("", "gzip")))
def test_any_bytes_are_parsed(body: bytes, is_json: bool, encoding: str) -> None:
    parsed = parse_request("/v1/completions", body, is_json=is_json, encoding=encoding)
    assert parsed.body == body and parsed.isl <= len(body)


def test_a_form_names_its_model() -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n%s\r\n%s\r\n'
    sound = part % (b'file"; filename="a', b"Content-Type: audio/wav\r\n", b"\0\xff")
    for kind in (b"", b"Content-Type: text/plain\r\n"):
        body = sound + part % (b"model", kind, b"org/m") + b"--x--\r\n"
        assert parse_request("/v1/audio/transcriptions", body, is_json=False).model == "org/m"
    assert parse_request("/v1/audio/transcriptions", sound + b"--x--", is_json=False).model is None


class FakeTokenizer:
    """A tokenizer for which each letter is a token."""

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    problem = ""

    def chat(self, conversation: Conversation) -> list[int]:
        if not conversation.messages:
            raise ValueError("no reason")
        return [len(conversation.messages)]


def test_a_tokenizer_is_used_where_it_applies() -> None:
    for body, tokens in (
        (b'{"prompt": "ab"}', [97, 98]),
        (b'{"prompt": ["a", "b"]}', [97, 98]),
        (b'{"prompt": [5]}', [5]),
        (b'{"messages": [{}, {}]}', [2]),
        (b'{"messages": []}', []),  # less than four bytes
        (b"{}", []),
    ):
        assert parse_request("/p", body, tokenizer=FakeTokenizer()).tokens.tolist() == tokens


# ---- Lines of streams.


def test_only_complete_lines_are_forwarded() -> None:
    lines = Lines()
    assert lines.push(b"da") == b""
    assert lines.push(b"ta\nmo") == b"data\n"
    assert lines.push(b"re\n") == b"more\n"
    assert lines.push(b"end") == b""
    assert (lines.remainder(), lines.remainder()) == (b"end", b"")


def test_a_line_that_is_too_long_is_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "HELD_SIZE_MAX", 4)
    lines = Lines()
    assert lines.push(b"1234") == b""
    assert lines.push(b"5") == b"12345"
    assert lines.remainder() == b""
    assert lines.push(b"a\n12345") == b"a\n12345"


def test_events_are_counted_without_the_one_that_ends_a_stream() -> None:
    pieces = [b"data: b\n\n", b"data: [DONE]\n\n", b""]
    written: list[bytes] = []
    counts: list[int] = []
    ends: list[bytes] = []

    class Source:
        has_events = True

        @property
        def ended(self) -> bool:
            return pieces == [b""]

        async def next(self) -> bytes:
            return pieces.pop(0)

    class Target:
        async def write(self, data: bytes) -> None:
            written.append(data)

        async def write_eof(self, data: bytes = b"") -> None:
            written.append(data)
            ends.append(data)

    first = b"data: a\n\ndata: b\n\n"
    asyncio.run(relay(cast("Any", Source()), first, cast("Any", Target()), counts.append))
    assert counts == [2, 1, 0]
    assert b"".join(written) == first + b"data: b\n\ndata: [DONE]\n\n"
    assert ends == written[-1:]  # the end is sent with the last chunk


# ---- Engines and fleets.


def test_an_engine_cools_down_for_its_longest_requested_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "engine")
    engine = Engine(Worker(1), EngineSpec("http://a"))
    assert not engine.ready  # no check has run
    assert engine.passed(0)
    assert engine.ready and engine.cooling_s == 0
    engine.cool_down(5)
    engine.cool_down(2)
    assert not engine.ready and engine.serving and engine.cooling_s == 5
    clock.now += 5
    assert engine.ready and engine.cooling_s == 0
    engine.draining = True
    assert not engine.ready and not engine.serving


def test_a_failure_outdates_the_checks_that_began_before_it() -> None:
    engine = Engine(Worker(1), EngineSpec("http://a"))
    assert engine.why == "not checked yet"
    engine.fail("gone")
    assert (engine.health, engine.why, engine.failures) == (Health.DOWN, "gone", 1)
    assert engine.look.is_set()
    assert not engine.passed(0)
    assert engine.health is Health.DOWN
    assert engine.passed(1)
    assert (engine.health, engine.why) == (Health.UP, "")


def test_expected_cache_hits_of_an_engine_are_summed() -> None:
    engine = Engine(Worker(1), EngineSpec("http://a"))
    engine.expected(0.5, 10)
    engine.expected(0.26, 10)
    assert (engine.hit_tokens, engine.prompt_tokens) == (8, 20)


def fleet_of(*specs: EngineSpec) -> Fleet:
    fleet = Fleet()
    for spec in specs:
        fleet.add(spec).passed(0)
    return fleet


def urls(fleet: Fleet) -> list[str]:
    return [engine.url for engine in fleet if not engine.draining]


A, B, C = (EngineSpec(f"http://{name}") for name in "abc")


def test_a_fleet_lists_an_engine_once_and_reuses_no_number() -> None:
    fleet = fleet_of(A, B)
    with pytest.raises(RouterError, match="already"):
        fleet.add(A)
    first = fleet[1]
    fleet.remove(first)
    fleet.remove(first)
    assert fleet.add(A).worker.worker_id == 3
    assert len(fleet) == 2
    with pytest.raises(NoWorkersError, match="no worker 1"):
        fleet[1]


def test_a_fleets_listener_is_called_once_per_change() -> None:
    fleet, received = Fleet(), []

    def joined(engine: Engine) -> None:
        received.append(f"+{engine.url}")
        if engine.spec == C:
            raise RouterError("no room")

    fleet.on_change(joined=joined, left=lambda engine: received.append(f"-{engine.url}"))
    engine = fleet.add(A)
    with pytest.raises(RouterError, match="no room"):
        fleet.add(C)
    assert urls(fleet) == ["http://a"]
    fleet.remove(engine)
    fleet.remove(engine)
    assert received == ["+http://a", "+http://c", "-http://c", "-http://a"]


def test_a_drained_engine_leaves_with_its_last_request() -> None:
    fleet = fleet_of(A, B)
    busy, idle = fleet
    busy.inflight = 1
    fleet.drain(busy)
    fleet.drain(idle)
    assert list(fleet) == [busy]
    busy.inflight = 0
    fleet.settle(busy)
    assert len(fleet) == 0


def test_a_fleet_is_updated_from_a_list() -> None:
    fleet = fleet_of(A, B)
    by_hand = fleet.add(C)
    fleet.follow([B], [A, B])
    assert urls(fleet) == ["http://b", "http://c"]
    fleet.follow([A, B, C], [B])  # an engine that is already there is not added again
    assert by_hand in list(fleet) and urls(fleet) == ["http://b", "http://c", "http://a"]
    renamed = EngineSpec("http://b", ("m",))
    busy = next(engine for engine in fleet if engine.spec == B)
    busy.inflight = 1
    fleet.follow([A, renamed, C], [A, B, C])
    assert busy not in list(fleet)
    assert {engine.spec for engine in fleet} == {A, renamed, C}


def test_an_engine_with_invalid_new_settings_keeps_the_old_ones() -> None:
    wrong, left = EngineSpec("http://a", events="nonsense"), []

    def joined(engine: Engine) -> None:
        if engine.spec.events is not None:
            raise RouterError("no such endpoint")

    fleet = Fleet()
    fleet.on_change(joined=joined, left=lambda engine: left.append(engine.spec))
    for spec in (A, B):
        fleet.add(spec)
    first = next(iter(fleet))
    assert list(fleet.follow([wrong, C], [A, B])) == [wrong]
    assert [engine.spec for engine in fleet] == [A, C]
    assert next(iter(fleet)) is first
    assert not first.removed and left == [B, wrong]
    assert fleet.follow([A, C], [A, C]) == {}
    assert fleet.follow([C], [A, C]) == {}
    assert [engine.spec for engine in fleet] == [C]


def test_models_are_those_of_available_engines() -> None:
    fleet = fleet_of(EngineSpec("http://a", ("m",)), B)
    named, unnamed = fleet
    unnamed.cards = [{"id": "base"}, {"id": "tuned", "parent": "base"}]
    assert unnamed.models == ("base", "tuned")
    assert fleet.models() == {
        "m": {"id": "m", "object": "model", "owned_by": "beluga"},
        "base": {"id": "base", "object": "model", "owned_by": "beluga"},
        "tuned": {"id": "tuned", "object": "model", "owned_by": "beluga", "parent": "base"},
    }
    assert [fleet.is_adapter(name) for name in ("base", "tuned", "m")] == [False, True, False]
    assert unnamed.models is unnamed.models  # not recreated for each request
    unnamed.cards = [{"id": "base"}]
    assert list(unnamed.models) == ["base"]
    assert not fleet.is_adapter("tuned")
    assert fleet.serving("base") == [unnamed]
    assert fleet.serving(None) == [named, unnamed]
    unnamed.fail("gone")
    assert list(fleet.models()) == ["m"]
    assert fleet.serving("base") == [unnamed]
    unnamed.draining = True
    assert (fleet.serving("base"), fleet.serving(None)) == ([], [named])


# ---- Checks.


class FakeClient:
    """Answers by path: a status and a body."""

    def __init__(self, **answers: tuple[int, bytes]) -> None:
        self.answers = answers

    def get(self, url: str, *, timeout: aiohttp.ClientTimeout) -> Any:
        status, body = self.answers[url.rpartition("/")[2]]

        async def iter_any() -> AsyncIterator[bytes]:
            yield body

        class Answer:
            async def __aenter__(self) -> Any:
                return SimpleNamespace(status=status, content=SimpleNamespace(iter_any=iter_any))

            async def __aexit__(self, *_: object) -> None:
                pass

        return Answer()


MODELS = (200, b'{"data": [{"id": "m"}, 7]}')


@pytest.mark.parametrize(
    ("declared", "health", "models", "why"),
    [
        ((), 200, MODELS, ""),
        ((), 204, MODELS, ""),
        ((), 404, MODELS, ""),
        ((), 300, MODELS, "/health returned 300"),
        ((), 503, MODELS, "/health returned 503"),
        ((), 200, (404, b""), "/v1/models returned 404; give its models with --model"),
        (("m",), 200, (404, b""), ""),
        (("m",), 404, (404, b""), "/health and /v1/models returned 404 and 404"),
        ((), 200, (200, b"[]"), "did not return a list"),
        ((), 200, (200, b'{"data": 1}'), "did not return a list"),
        ((), 200, (200, b"{"), "truncated"),
    ],
)
async def test_a_check_passes_where_an_engine_is_up_and_its_models_are_known(
    declared: tuple[str, ...], health: int, models: tuple[int, bytes], why: str
) -> None:
    fleet, ups = Fleet(), []
    engine = fleet.add(EngineSpec("http://a", declared))
    client = cast("aiohttp.ClientSession", FakeClient(health=(health, b""), models=models))

    async def also(_: Engine) -> None: ...

    checker = Checker(fleet, client, Limits(), up=lambda: ups.append(1), also=also)
    passed = await checker.check(engine)
    assert (passed, engine.health is Health.UP, len(ups)) == (not why, not why, int(not why))
    assert why in engine.why
    assert engine.failures == int(bool(why))
    if passed:
        assert engine.models == ("m",)
        assert await checker.check(engine)
        assert len(ups) == 1  # the engine was up before


async def test_a_defect_does_not_end_the_checks_of_an_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An OverflowError once did: the engine stayed up for ever. The log has it once."""
    fleet, ended = Fleet(), []
    client = cast("aiohttp.ClientSession", FakeClient(health=(200, b""), models=MODELS))

    async def also(engine: Engine) -> None:
        ended.append(engine)
        engine.look.set()
        await asyncio.sleep(0.001)
        raise OverflowError("beyond 64 bits")

    checker = Checker(fleet, client, Limits(), up=lambda: None, also=also)
    fleet.add(EngineSpec("http://a"))
    await until(lambda: len(ended) >= 3)
    await checker.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "a check of http://a could not be finished"
    ]


# ---- The router's own metrics.


def figures(metrics: Metrics) -> dict[str, float]:
    """Return all samples that are not zero, by name and labels, without those of buckets."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.value and not sample.name.endswith(("_bucket", "_created"))
    }


def test_histogram_buckets_separate_values() -> None:
    """No bucket is five times as wide as its lower bound; shares and blocks have suitable
    buckets.
    """
    bounds: dict[str, list[float]] = {}
    for metric in Metrics().registry.collect():
        if metric.type == "histogram":
            for sample in metric.samples:
                if sample.name.endswith("_bucket"):
                    bounds.setdefault(metric.name, []).append(float(sample.labels["le"]))
    for name, limits in bounds.items():
        assert limits == sorted(set(limits)), name
        if name.endswith("hit_rate"):
            assert limits[:-1] == pytest.approx([tenth / 10 for tenth in range(11)])
            continue
        if name.endswith("tokens"):
            assert (limits[0], limits[-2]) == (16, 1 << 20)  # from one block to the longest prompts
        assert max(b / a for a, b in pairwise(limits[:-1])) <= 5, name
    assert len(bounds) >= 6


def test_metrics_count_a_request() -> None:
    metrics = Metrics()
    engine = Engine(Worker(1), EngineSpec("http://a"))
    parsed = ParsedRequest("/p", b"", "m")
    metrics.routed(parsed, Query(40, 16), Choice(Worker(1), Overlap(), 0.25), engine, 0.5)
    metrics.part("scheduling", 0.002)
    metrics.first_token(parsed, engine, 3.0)
    gaps = metrics.gaps()
    gaps.add(0.125, 4)
    metrics.tokens(parsed, engine, gaps, 0.125)
    metrics.ended(parsed, "200", 5)
    metrics.ended(parsed, "broken", 0)
    metrics.prefilled(parsed, "remote")
    metrics.refused(503)
    metrics.retried(engine)
    router, worker = "dynamo_component_router_", "beluga_gateway_worker_"
    assert figures(metrics) == {
        f"{worker}prompt_tokens_total http://a": 40,
        f"{worker}retries_total http://a": 1,
        f"{router}input_sequence_tokens_sum m": 40,
        f"{router}input_sequence_tokens_count m": 1,
        f"{router}kv_hit_rate_sum m": 0.25,
        f"{router}kv_hit_rate_count m": 1,
        f"{router}cached_tokens_sum m": 10,
        f"{router}cached_tokens_count m": 1,
        f"{router}time_to_first_token_seconds_sum m": 3,
        f"{router}time_to_first_token_seconds_count m": 1,
        f"{router}inter_token_latency_seconds_sum m": 0.5,
        f"{router}inter_token_latency_seconds_count m": 4,
        f"{router}output_sequence_tokens_sum m": 5,
        f"{router}output_sequence_tokens_count m": 1,
        f"{router}requests_total m 200": 1,
        f"{router}requests_total m broken": 1,
        "dynamo_frontend_worker_last_time_to_first_token_seconds http://a": 3,
        "dynamo_frontend_worker_last_inter_token_latency_seconds http://a": 0.125,
        "dynamo_routing_latency_seconds_sum": 0.5,
        "dynamo_routing_latency_seconds_count": 1,
        "dynamo_router_overhead_total_ms_sum": 500,
        "dynamo_router_overhead_total_ms_count": 1,
        "dynamo_router_overhead_scheduling_ms_sum": 2,
        "dynamo_router_overhead_scheduling_ms_count": 1,
        "beluga_gateway_prefills_total m remote": 1,
        "beluga_gateway_refused_total 503": 1,
    }
    assert metrics.latencies() == (Latency(3, 1), Latency(0.5, 4))


def test_metrics_of_a_removed_worker_are_dropped() -> None:
    metrics = Metrics()
    engine = Engine(Worker(1), EngineSpec("http://a"))
    engine.passed(0)
    engine.inflight = 2
    load = Load(active_decode_blocks=3, active_prefill_tokens=4, gpu_cache_usage_perc=0.5)
    load.kv_total_blocks = 6
    metrics.state(engine, load)
    assert "dynamo_kv_hit_rate http://a" not in figures(metrics)
    engine.expected(0.5, 10)
    metrics.state(engine, load)
    values = {name.removesuffix(" http://a"): value for name, value in figures(metrics).items()}
    assert values == {
        "dynamo_frontend_worker_active_decode_blocks": 3,
        "dynamo_frontend_worker_active_prefill_tokens": 4,
        "dynamo_kv_hit_rate": 0.5,
        "beluga_gateway_worker_kv_usage_ratio": 0.5,
        "beluga_gateway_worker_kv_blocks": 6,
        "beluga_gateway_worker_up": 1,
        "beluga_gateway_worker_requests": 2,
    }
    load.gpu_prefix_cache_hit_rate = 0.75  # the engine's own measurement has precedence
    metrics.state(engine, load)
    assert figures(metrics)["dynamo_kv_hit_rate http://a"] == 0.75
    metrics.retried(engine)
    metrics.forget(engine)
    assert figures(metrics) == {}
    metrics.retried(engine)
    assert figures(metrics) == {"beluga_gateway_worker_retries_total http://a": 1}


def test_metrics_of_events_have_a_kind_and_an_outcome() -> None:
    metrics = Metrics()
    counts = SimpleNamespace(
        stored=1, repeated=2, parent_not_found=3, invalid=4, refused=5, removed=6, unknown=7
    )
    metrics.kv_events(cast("Indexer", SimpleNamespace(counts=counts)), lost=8, unread=9)
    assert [(name.split(" ", 1)[1], value) for name, value in figures(metrics).items()] == [
        ("stored ok", 1),
        ("stored duplicate", 2),
        ("stored parent_block_not_found", 3),
        ("stored invalid_block", 4),
        ("stored no_room", 5),
        ("removed ok", 6),
        ("removed block_not_found", 7),
        ("message lost", 8),
        ("message unreadable", 9),
    ]


# ---- The wait queue.


class Waiting:
    """A wait queue whose requests are placed when their numbers are allowed."""

    def __init__(self, queued_max: int = 3) -> None:
        self.let_in: set[int] = set()
        self.room = -1  # for that many more; below 0 for any number
        self.tried: list[int] = []
        self.back: list[int] = []
        self.wait_queue: WaitQueue[int] = WaitQueue(
            queued_max, order="fcfs", give_back=self.back.append
        )

    def attempt(self, number: int) -> Callable[[], int | None]:
        def attempt() -> int | None:
            self.tried.append(number)
            if number not in self.let_in or self.room == 0:
                return None
            self.room -= 1
            return number

        return attempt

    async def enter(
        self,
        number: int,
        *,
        patience_s: float = 60.0,
        client: str = "",
        address: str | None = None,
        line: str = "m",
    ) -> asyncio.Task[int]:
        """Add a request that waits, of a client with an address of its own if there is none."""
        task = asyncio.ensure_future(
            self.wait_queue.wait(
                line,
                Query(16, 16),
                self.attempt(number),
                overlap=0,
                patience_s=patience_s,
                client=GatewayClient(client, client if address is None else address),
            )
        )
        await asyncio.sleep(0)
        return task


async def test_requests_leave_the_queue_in_order() -> None:
    waiting = Waiting()
    first, second = await waiting.enter(1), await waiting.enter(2)
    assert (len(waiting.wait_queue), waiting.wait_queue.waiting("m")) == (2, True)
    assert not waiting.wait_queue.waiting("other")
    waiting.let_in = {2}
    waiting.wait_queue.look()
    assert waiting.tried == [1]
    waiting.let_in = {1, 2}
    waiting.wait_queue.look()
    assert (await first, await second) == (1, 2)
    assert (len(waiting.wait_queue), waiting.wait_queue.waiting("m")) == (0, False)


async def test_lines_take_turns() -> None:
    """A worker has room for one request at a time; that of the line served before comes last."""
    waiting = Waiting(queued_max=9)
    tasks = {n: await waiting.enter(n, line=f"m{n % 2}") for n in (1, 3, 5, 2, 4, 6)}
    served: list[int] = []
    while len(served) < len(tasks):
        waiting.let_in, waiting.room = set(tasks), 1
        waiting.wait_queue.look()
        await asyncio.sleep(0)
        served += [n for n, task in tasks.items() if task.done() and n not in served]
    assert served == [1, 2, 3, 4, 5, 6]


async def test_a_request_beyond_the_queue_limit_is_rejected() -> None:
    waiting = Waiting(queued_max=1)
    turn = await waiting.enter(1)
    with pytest.raises(Refusal, match="1 requests are waiting already") as refused:
        await (await waiting.enter(2))
    assert refused.value.response().headers["Retry-After"] == "1"
    turn.cancel()


async def test_no_client_fills_the_queue_alone() -> None:
    """The newest requests of the client with the most are refused, and those of a client that has
    as many are not.
    """
    waiting = Waiting(queued_max=6)
    flood = [await waiting.enter(n, client="a", line=f"m{n % 2}") for n in range(6)]
    others = [await waiting.enter(10 + n, client="b") for n in range(3)]
    third = await waiting.enter(20, client="c")
    assert len(waiting.wait_queue) == 6
    for refused in flood[2:]:
        with pytest.raises(Refusal, match="6 requests are waiting already"):
            await refused
    for client in ("a", "b"):
        with pytest.raises(Refusal, match="6 requests are waiting already"):
            await (await waiting.enter(30, client=client))
    waiting.let_in = {0, 1, 10, 11, 12, 20}
    waiting.wait_queue.look()
    assert [await task for task in (*flood[:2], *others, third)] == [0, 1, 10, 11, 12, 20]
    assert len(waiting.wait_queue) == 0
    assert not any(waiting.wait_queue.waiting(line) for line in ("m", "m0", "m1"))


async def ended(*tasks: asyncio.Task[int]) -> None:
    """Cancel tasks that still wait."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_flood_of_names_does_not_exclude_other_addresses() -> None:
    """Each request of the flood has a name of its own, as a client with many API keys has."""
    waiting = Waiting(queued_max=100)
    flood = [await waiting.enter(n, client=f"{n}", address="1") for n in range(1000)]
    others = [await waiting.enter(1000 + n, client="b", address="2") for n in range(50)]
    await asyncio.sleep(0)
    assert [n for n, task in enumerate(flood) if not task.done()] == list(range(50))
    assert not any(task.done() for task in others)
    for client, address in (("c", "1"), ("b", "2")):
        with pytest.raises(Refusal, match="100 requests are waiting already"):
            await (await waiting.enter(2000, client=client, address=address))
    third = await waiting.enter(2001, client="c", address="3")
    assert not third.done()
    await ended(*flood, *others, third)


async def test_clients_of_one_address_are_fair_to_each_other() -> None:
    """Many clients may come through one proxy."""
    waiting = Waiting(queued_max=6)
    flood = [await waiting.enter(n, client="a", address="1") for n in range(4)]
    direct = [await waiting.enter(10 + n, client="d", address="2") for n in range(2)]
    others = [await waiting.enter(20 + n, client=f"b{n}", address="1") for n in range(2)]
    await asyncio.sleep(0)
    assert [task.done() for task in flood] == [False, False, True, True]
    assert not any(task.done() for task in (*others, *direct))
    direct += [await waiting.enter(30, client="e", address="2")]
    await asyncio.sleep(0)
    assert [task.done() for task in flood] == [False, True, True, True]
    assert not any(task.done() for task in (*others, *direct))
    await ended(*flood, *others, *direct)


async def test_a_canceled_request_releases_its_queue_slot() -> None:
    waiting = Waiting()
    turn = await waiting.enter(1)
    waiting.let_in = {1}
    waiting.wait_queue.look()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert waiting.back == [1]
    two = await waiting.enter(2)
    two.cancel()
    with pytest.raises(asyncio.CancelledError):
        await two
    assert waiting.back == [1]
    assert len(waiting.wait_queue) == 0


async def test_the_error_is_that_of_the_tried_worker() -> None:
    waiting = Waiting()

    def fail() -> int | None:
        raise RouterError("no policy")

    failing = asyncio.ensure_future(
        waiting.wait_queue.wait("m", Query(16, 16), fail, overlap=0, patience_s=60)
    )
    await asyncio.sleep(0)
    turn = await waiting.enter(1)
    waiting.let_in = {1}
    waiting.wait_queue.look()
    with pytest.raises(RouterError, match="no policy"):
        await failing
    assert await turn == 1


async def test_a_request_is_rejected_after_its_wait_time() -> None:
    waiting = Waiting()
    turn = await waiting.enter(1, patience_s=0.01)
    with pytest.raises(Refusal, match=r"for 0\.01 s"):
        await turn
    waiting.wait_queue.look()
    assert waiting.tried == []


async def test_the_earliest_check_wakes_the_queue() -> None:
    waiting = Waiting()
    waiting.let_in = {1, 2}
    turn = await waiting.enter(1)
    waiting.wait_queue.look_in(50)
    waiting.wait_queue.look_in(0.01)
    waiting.wait_queue.look_in(60)
    assert await asyncio.wait_for(turn, 20) == 1
    two = await waiting.enter(2)
    waiting.wait_queue.look_in(0.01)  # a timer that has fired does not prevent a new one
    assert await asyncio.wait_for(two, 20) == 2


# ---- Texts.


def test_ports_are_from_1_to_65535() -> None:
    assert Address.parse("a:65535") == Address("a", 65535)
    assert Address.parse("a:0").port == 0
    with pytest.raises(RouterError, match="HOST:PORT"):
        Address.parse("a:65536")


def test_urls_are_reduced_to_their_base() -> None:
    assert read_url(" https://a:1/base/v1/ ") == "https://a:1/base"
    for wrong in ("http://a?x", "http://a#x"):
        with pytest.raises(RouterError, match="query or fragment"):
            read_url(wrong)
    assert read_engines(["http://a"], [], ["http://a=tcp://e"])[0].replay is None


def test_a_model_has_one_queue() -> None:
    assert read_queues(["m=pool", "n=nats://h"]) == (("m", "pool"), ("n", "nats://h"))
    for wrong, message in (
        (["m"], "not MODEL=QUEUE"),
        (["=pool"], "not MODEL"),
        (["m="], "not MODEL"),
    ):
        with pytest.raises(RouterError, match=message):
            read_queues(wrong)
    with pytest.raises(RouterError, match="two prefill queues"):
        read_queues(["m=pool", "m=pool"])


def follow(path: Path, *texts: str | None) -> tuple[WorkersFile, list[list[str]]]:
    """Check a workers file after each change; None: no change. Also returns the engines that could
    get requests after each check.
    """
    fleet = Fleet()
    watched, left = WorkersFile(path, fleet), []
    for text in texts:
        if text is not None:
            path.write_text(text)
        with contextlib.suppress(RouterError):
            watched.read()
        left.append([engine.url for engine in fleet if not engine.draining])
    return watched, left


TWO = "http://a:8000\nhttp://b:8000\n"
BOTH = ["http://a:8000", "http://b:8000"]


@pytest.mark.parametrize("size", range(len(TWO)))
def test_rewriting_a_workers_file_in_place_drains_no_worker(tmp_path: Path, size: int) -> None:
    slow = [TWO[:size], *[None] * (SETTLED_LOOKS - 1)]
    _, left = follow(tmp_path / "workers", TWO, *slow, TWO, *[None] * SETTLED_LOOKS)
    assert left == [BOTH] * len(left)


def test_a_removed_worker_is_dropped_once_the_file_is_stable(tmp_path: Path) -> None:
    line = "http://b:8000\n"
    _, left = follow(tmp_path / "workers", TWO, line, *[None] * SETTLED_LOOKS)
    assert left == [BOTH] * (SETTLED_LOOKS + 1) + [["http://b:8000"]]


def test_a_worker_with_a_complete_line_is_added_before_the_file_is_stable(tmp_path: Path) -> None:
    _, left = follow(tmp_path / "workers", TWO, TWO + "http://c:80", TWO + "http://c:8000\n")
    assert left == [BOTH, BOTH, [*BOTH, "http://c:8000"]]


def test_an_unterminated_last_line_is_read_once_the_file_is_stable(tmp_path: Path) -> None:
    text = TWO + "http://c:8000"
    _, left = follow(tmp_path / "workers", TWO, text, *[None] * SETTLED_LOOKS)
    assert left == [BOTH] * (SETTLED_LOOKS + 1) + [[*BOTH, "http://c:8000"]]


@pytest.mark.parametrize("text", ["", "\n", "# all are gone\n", "http://a:8000\nhtt"])
def test_a_workers_file_without_a_valid_worker_keeps_the_former_ones(
    tmp_path: Path, text: str
) -> None:
    watched, left = follow(tmp_path / "workers", TWO, text, *[None] * 5)
    assert left == [BOTH] * len(left)
    with pytest.raises(RouterError, match=r"write the line 'none'|htt"):
        watched.read()


def test_the_line_none_in_a_workers_file_removes_all(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    _, left = follow(path, TWO, "# for the night\nnone\n", *[None] * SETTLED_LOOKS, TWO)
    assert left == [BOTH] * (SETTLED_LOOKS + 1) + [[], BOTH]
    path.write_text("none\nhttp://a:8000\n")
    with pytest.raises(RouterError, match="line 1: 'none' cannot be combined with workers"):
        WorkersFile(path, Fleet()).read()


def test_an_unreadable_workers_file_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    texts = ["nonsense\n", "nonsense\n", "http://a\n", "nonsense\n"]

    async def sleep(_: float) -> None:
        if not texts:
            raise asyncio.CancelledError
        path.write_text(texts.pop(0))

    monkeypatch.setattr("beluga.gateway.fleet.asyncio", SimpleNamespace(sleep=sleep))
    fleet = Fleet()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(WorkersFile(path, fleet).watch())
    assert len([record for record in caplog.records if "nonsense" in record.message]) == 2
    assert urls(fleet) == ["http://a"]
