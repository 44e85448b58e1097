# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Real engines behind ``beluga gateway``. Clients of OpenAI's SDK get the same results as from the
engine itself. With ``--policy linear``, a pool and KV events, prompts go where their blocks are,
because the gateway hashes the engine's own tokens; and it reports when it cannot follow an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from beluga_bench.vllm.arm import Setting, beluga_connector, beluga_pool
from beluga_bench.vllm.model import model as made_model
from beluga_bench.vllm.port import HOST, free_port
from beluga_bench.vllm.process import Child, environment_of
from beluga_bench.vllm.prompts import prompt
from beluga_bench.vllm.routed import LOCAL_HITS
from beluga_bench.vllm.serve import Server, server
from real_engines import FOLDER, in_vllm, wait_until

from beluga.child import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the packages may have to be installed

SDK_UP_S = 30.0
# The tiny model has none, and without one an engine refuses all chats.
SDK_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<assistant>"
)
# How many tokens the engine puts into a chunk depends on timing.
_BY_CHUNK = {"stream_left_early", "stream_of_bytes", "stream_helper"}
# An engine of a text model has no such path; both respond with 404, the gateway because of the
# model.
_NO_PATH = {"embeddings_unknown_model", "transcription_unknown_model"}
# The engine makes these again for each answer.
_OWN = re.compile(r"^(id|.*_id|created|.*_at|system_fingerprint|permission)$")


def settled(value: Any) -> Any:
    """Return the results without generated names and times."""
    if isinstance(value, dict):
        return {
            name: type(item).__name__ if _OWN.match(str(name)) else settled(item)
            for name, item in value.items()
            if name != "vary"  # the gateway's own answers have no CORS headers
        }
    if isinstance(value, list | tuple):
        return [settled(item) for item in value]
    if isinstance(value, str) and value.startswith('data: {"id"'):  # a line of a stream
        return re.sub(r'"(id|created)": ?("[^"]*"|\d+)', r'"\1"', value)
    if isinstance(value, str):  # only an engine has its other names
        value = re.sub(r" Valid aliases: .*?\.(?=$|')", "", value)
        return re.sub(r"\b0x[0-9a-f]+\b", "ADDRESS", value)
    return value


def folded(seen: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the chunks of a stream merged: for each choice the kinds of its
    chunks in order, and its text.
    """
    kinds: dict[Any, list[Any]] = {}
    texts: dict[Any, str] = {}

    def note(whose: Any, kind: Any, text: str | None) -> None:
        if kind not in kinds.setdefault(whose, [])[-1:]:
            kinds[whose].append(kind)
        texts[whose] = texts.get(whose, "") + (text or "")

    for name, fields in seen["chunks"]:
        for choice in fields.get("choices") or ():
            part = choice.get("delta") or choice
            kind = [name, part.get("role"), bool(part.get("tool_calls"))]
            note(choice["index"], kind, part.get("content") or part.get("text"))
            if choice.get("finish_reason"):  # alone, or with the last token
                note((choice["index"], "end"), choice["finish_reason"], None)
        if not fields.get("choices"):
            delta = fields.get("delta")
            kind = [name, fields.get("type"), fields.get("usage")]
            note("all", kind, delta if isinstance(delta, str) else None)
    return {**seen, "chunks": [kinds, texts]}


async def both(engine_url: str, name: str) -> dict[str, tuple[Any, Any]]:
    """Run all cases with the engine and with the gateway. Returns the differences."""
    # these need the router's packages and OpenAI's SDK
    from support.sdk_cases import CASES, Caller, calling, observe

    from beluga.gateway import Address, Limits, Service, Settings, read_engines

    settings = Settings(
        policy="least-tokens",
        engines=read_engines([engine_url]),
        listen=Address("127.0.0.1", 0),
        admin=None,
        advise_s=0,
        limits=Limits(health_interval_s=0.2),
    )
    different = {}
    async with Service(settings) as service:
        url = "http://{}:{}".format(*service.address)
        deadline = asyncio.get_running_loop().time() + SDK_UP_S
        while not any(engine.serving for engine in service.fleet):
            assert asyncio.get_running_loop().time() < deadline, "the engine is not up"
            await asyncio.sleep(0.05)
        async with calling(engine_url, name) as straight, calling(url, name) as through:
            # Its first request is slow, and fills its cache.
            assert "result" in await observe(Caller.chat, *straight)
            for case, run in CASES.items():
                if case in _BY_CHUNK | _NO_PATH:
                    continue
                expected = settled(folded(await observe(run, *straight)))
                observed = settled(folded(await observe(run, *through)))
                if observed != expected:
                    different[case] = expected, observed
        while any(engine.inflight for engine in service.fleet):
            assert asyncio.get_running_loop().time() < deadline + 600, "a request is left running"
            await asyncio.sleep(0.05)
    return different


def test_requests_behave_as_without_the_gateway_on_a_real_engine(
    vllm_python: str, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp", reason="the router's packages are not installed")
    pytest.importorskip("openai", reason="OpenAI's SDK is not installed")
    made = made_model("tiny", vllm_python)
    setting = Setting(
        folder=tmp_path, model=made, size_name="tiny", tokens=2048, python=vllm_python
    )
    template = tmp_path / "chat_template.jinja"
    template.write_text(SDK_TEMPLATE)
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with server(setting, "sdk", None, chat_template=str(template), **options) as engine:
        engine.ready()
        different = asyncio.run(both(engine.url, engine.model))
        running = engine.metric("vllm:num_requests_running")
    for name, (expected, observed) in different.items():
        print(f"{name}\n  straight {expected}\n  gateway  {observed}")
    # The gateway rejects forms with 415; vLLM responds with 400.
    assert sorted(different) == ["raw_other_kind", "raw_text_kind"]
    assert running == 0


ANSWER_TOKENS = 1
PATHS = {
    "completions.create": "/v1/completions",
    "chat.completions.create": "/v1/chat/completions",
    "responses.create": "/v1/responses",
}
Call = tuple[str, dict[str, Any]]  # a method of the SDK and its arguments


def random_words(seed: int, count: int = 120) -> str:
    """Return that many random words; with another seed all words differ."""
    letters = random.Random(seed)
    return " ".join(
        "".join(letters.choices("etaoinshrdlu", k=letters.randint(2, 9))) for _ in range(count)
    )


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


WEATHER = {
    "description": "Tells the weather of a place.",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": []},
}
TOOLS = [{"type": "function", "function": WEATHER}]
FLAT_TOOLS = [{"type": "function", **WEATHER, "strict": True}]
ARGUMENTS = '{"place": "the sea", "days": [1, 2]}'


def _complete(**more: Any) -> Call:
    return "completions.create", {"max_tokens": ANSWER_TOKENS, **more}


def _chat(*messages: dict[str, Any], **more: Any) -> Call:
    given = {"messages": list(messages), "max_completion_tokens": ANSWER_TOKENS, **more}
    return "chat.completions.create", given


def _respond(content: Any, **more: Any) -> Call:
    return "responses.create", {"input": content, "max_output_tokens": ANSWER_TOKENS, **more}


def _chat_after_a_call(seed: int) -> Call:
    function = {"name": "weather", "arguments": ARGUMENTS}
    call = {"type": "function", "id": "call_1", "function": function}
    answer = [{"type": "text", "text": "It is"}, {"type": "text", "text": "warm."}]
    return _chat(
        user(random_words(seed)),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": answer},
        tools=TOOLS,
    )


def _response_after_a_call(seed: int) -> Call:
    name = {"call_id": "call_1"}
    return _respond(
        [
            user(random_words(seed)),
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
            {"type": "function_call", **name, "name": "weather", "arguments": ARGUMENTS},
            {"type": "function_call_output", **name, "output": "It is warm."},
            {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
        ],
        tools=FLAT_TOOLS,
    )  # fmt: skip


KINDS: dict[str, Callable[[int], Call]] = {
    "completion": lambda seed: _complete(prompt=random_words(seed)),
    "completion of ids": lambda seed: _complete(prompt=prompt(300, seed)),
    "streamed completion": lambda seed: _complete(prompt=random_words(seed), stream=True),
    "chat": lambda seed: _chat(
        {"role": "system", "content": "Be brief."}, user(random_words(seed))
    ),
    "streamed chat": lambda seed: _chat(user(random_words(seed)), stream=True),
    "chat in parts": lambda seed: _chat(
        user([{"type": "text", "text": random_words(seed)}, {"type": "text", "text": "Why?"}])
    ),
    "chat with a developer": lambda seed: _chat(
        user(random_words(seed)), {"role": "developer", "content": "Be brief."}, user("Why?")
    ),
    "chat with tools": lambda seed: _chat(user(random_words(seed)), tools=TOOLS),
    "chat after a call": _chat_after_a_call,
    "chat with settings": lambda seed: _chat(
        user(random_words(seed)),
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"mood": "calm", "unset": None}},
    ),
    "chat that goes on": lambda seed: _chat(
        user(random_words(seed)),
        {"role": "assistant", "content": "It is"},
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    ),
    "response": lambda seed: _respond(random_words(seed)),
    "response with tools": lambda seed: _respond(
        [user(random_words(seed))], instructions="Be brief.", tools=FLAT_TOOLS
    ),
    "response after a call": _response_after_a_call,
    "response with reasoning": lambda seed: _respond(
        random_words(seed), reasoning={"effort": "high"}
    ),
}
"""By name: a call for a seed. Equal seeds give equal prompts."""


def request(call: Call) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that the SDK sends for a call."""
    method, arguments = call
    body = {name: value for name, value in arguments.items() if name != "extra_body"}
    return PATHS[method], body | arguments.get("extra_body", {})


PROMPT_COUNT = 20  # per kind; each goes to one of the engines first
REPORTED_S = 10.0  # limit until the operator is informed
START_S = 120.0
REPORTED_LATEST_S = 60.0
TEMPLATE = """\
{{- bos_token -}}
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- if mood is defined %}<mood>{{ mood }}</mood>{% endif %}
{%- if unset is defined %}<unset>{% endif %}
{%- if enable_thinking is defined %}<think>{{ enable_thinking }} {{ reasoning_effort }}{% endif %}
{%- for message in messages %}
<{{ message.role }}>{{ message.content }}
{%- if message.reasoning is defined %}<thought>{{ message.reasoning }}{% endif %}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}
{%- if not loop.last or add_generation_prompt %}</{{ message.role }}>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


@pytest.fixture(scope="module")
def model(tiny_model: Path, memory_root: Path) -> Iterator[Path]:
    """The model with a chat template, and a tokenizer that begins each text with a token."""
    folder = Path(tempfile.mkdtemp(prefix="beluga-vllm-model-", dir=memory_root))
    for file in tiny_model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    made = json.loads((tiny_model / "tokenizer.json").read_text())
    begin, text = (
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(made))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Gateway:
    """A running ``beluga gateway``."""

    def __init__(self, child: Child, port: int, admin: int) -> None:
        self.child = child
        self.url = f"http://{HOST}:{port}"
        self._admin = f"http://{HOST}:{admin}"

    def ready(self) -> None:
        """Wait until all engines are up."""
        self.child.wait_for(lambda: "routing on" in self.child.log(), START_S, "start")
        self.child.wait_for(lambda: all(w["health"] == "up" for w in self.workers()), START_S, "up")

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = json.loads(get(f"{self._admin}/workers"))
        return workers

    def block_sizes(self) -> set[int]:
        return {worker["block_size"] for worker in self.workers()}

    def metrics(self) -> str:
        return get(f"{self.url}/metrics")

    def metric(self, start: str) -> float:
        """Return the sum of the metrics whose lines start with this."""
        lines = self.metrics().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


class Site:
    """The engines, their events' endpoints, and gateways in front of them."""

    def __init__(self, folder: Path, python: str, model: Path) -> None:
        self.folder, self.python, self.model = folder, python, model
        self.engines: list[Server] = []
        self.events: list[str] = []  # for --kv-events

    @contextlib.contextmanager
    def gateway(self, *options: str | Path, followed: bool = True) -> Iterator[Gateway]:
        """Start ``beluga gateway`` as documented, with these additional options."""
        port, admin = free_port(), free_port()
        words = ["gateway", "--policy", "linear", "--port", port, "--admin", f"{HOST}:{admin}"]
        for engine in self.engines:
            words += ["--worker", engine.url]
        for events in self.events if followed else ():
            words += ["--kv-events", events]
        line = command("beluga.cli.main", *map(str, [*words, *options]), python=self.python)
        log = self.folder / f"gateway-{port}.log"
        with Child(line, log=log, environment=environment_of(self.folder)) as child:
            yield Gateway(child, port, admin)


@pytest.fixture(scope="module")
def site(model: Path, vllm_python: str, memory_root: Path) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="beluga-vllm-followed-", dir=memory_root))
    count = 2 * len(KINDS) * PROMPT_COUNT * 1024  # tokens, more than all prompts have
    setting = Setting(
        folder=folder,
        model=model,
        size_name="tiny",
        tokens=4096,
        python=vllm_python,
        pool_tokens=count,
    )
    site = Site(folder, vllm_python, model)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        paths = stack.enter_context(beluga_pool(setting))
        for name in "AB":
            events, replay = free_port(), free_port()
            announced = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            engine = stack.enter_context(
                server(
                    setting,
                    name,
                    beluga_connector(paths),
                    kv_events_config=announced,
                    kv_cache_memory_bytes=count * setting.size.token_bytes(),
                    enable_auto_tool_choice=True,
                    tool_call_parser="hermes",
                    trust_request_chat_template=True,
                    enable_scale_out=True,  # to tokenize a request
                )
            )
            site.engines.append(engine)
            site.events.append(f"{engine.url}=tcp://{HOST}:{events},tcp://{HOST}:{replay}")
        for engine in site.engines:
            engine.ready()
        yield site


class Sdk:
    """OpenAI's SDK, in a process of the environment that contains it."""

    def __init__(self, python: str, model: Path) -> None:
        self._model = str(model)
        self._process = subprocess.Popen(
            [python, FOLDER / "vllm_role.py", "sdk_calls"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, *calls: tuple[str, Call]) -> None:
        """Call the servers at these URLs, all at once."""
        assert self._process.stdin
        assert self._process.stdout
        requested = [
            [url, method, {"model": self._model, **arguments}] for url, (method, arguments) in calls
        ]
        self._process.stdin.write(json.dumps(requested) + "\n")
        self._process.stdin.flush()
        assert json.loads(self._process.stdout.readline()) == [None] * len(calls)

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def sdk(vllm_python: str, model: Path) -> Iterator[Sdk]:
    sdk = Sdk(vllm_python, model)
    yield sdk
    sdk.close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310  loopback
        return str(answer.read().decode())


def post(url: str, body: Any) -> Any:
    requested = urllib.request.Request(  # noqa: S310  loopback
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(requested, timeout=60) as answer:  # noqa: S310  loopback
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.read().decode()}") from None


def served(engine: Server) -> int:
    return int(engine.metric("vllm:request_success_total"))


def wait_until_followed(gateway: Gateway) -> None:
    """Wait until the engines' events have arrived: there are some, and no more arrive."""
    seen = [0.0, time.monotonic()]

    def still() -> bool:
        count = gateway.metric('dynamo_component_kv_cache_events_applied{event_type="stored"')
        if count != seen[0]:
            seen[:] = count, time.monotonic()
        return count > 0 and time.monotonic() - seen[1] > 1.0

    wait_until(still, REPORTED_LATEST_S, "the engines' events")


@pytest.mark.parametrize("given", [True, False], ids=["--tokenizer", "the engines' own"])
def test_repeated_prompts_are_routed_to_the_engine_with_their_blocks(
    site: Site, sdk: Sdk, given: bool
) -> None:
    with site.gateway(*(("--tokenizer", site.model) if given else ())) as gateway:
        gateway.ready()
        wait_until(lambda: gateway.block_sizes() == {128}, REPORTED_S, "the block size")
        prompts = range(PROMPT_COUNT)
        own = 100_000 * given
        firsts = {kind: own + 1000 * position for position, kind in enumerate(KINDS, 1)}
        for kind, first in firsts.items():
            sdk.call(*((site.engines[n % 2].url, KINDS[kind](first + n)) for n in prompts))
        wait_until_followed(gateway)
        hits = sum(engine.metric(LOCAL_HITS) for engine in site.engines)
        routed: dict[str, int] = {}
        for kind, first in firsts.items():
            routed[kind] = 0
            for mine, engine in enumerate(site.engines):
                before = served(engine)
                for number in prompts[mine::2]:
                    sdk.call((gateway.url, KINDS[kind](first + number)))
                routed[kind] += served(engine) - before
        hits = sum(engine.metric(LOCAL_HITS) for engine in site.engines) - hits
        assert gateway.metric("dynamo_component_router_cached_tokens_sum") == pytest.approx(
            hits, rel=0.05
        )
        problems = [worker["problems"] for worker in gateway.workers()]
    assert problems == [{}, {}]
    assert {kind: count for kind, count in routed.items() if count < 0.95 * PROMPT_COUNT} == {}


LOOP = "{% for m in messages %}"
PARTS_TEMPLATE = LOOP + "{% for p in m.content %}[{{ p }}]{% endfor %}{% endfor %}"
MORE_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a template that looks at parts": (
        "/v1/chat/completions", {"messages": [user("a b")], "chat_template": PARTS_TEMPLATE}),
    "a template that knows developers": (
        "/v1/chat/completions",
        {"messages": [user("a"), {"role": "developer", "content": "b"}],
         "chat_template": LOOP + "{{ m.role == 'developer' }}{{ m }}{% endfor %}"}),
    "special tokens in a chat": (
        "/v1/chat/completions", {"messages": [user("a")], "add_special_tokens": True}),
    "no special tokens": ("/v1/completions", {"prompt": "a b c", "add_special_tokens": False}),
    "empty calls, reasoning": (
        "/v1/chat/completions",
        {"messages": [user("a"), {"role": "assistant", "content": "b", "tool_calls": [],
                                  "reasoning_content": "c"}, user("d")]}),
    "odd arguments of calls": (
        "/v1/chat/completions",
        {"messages": [user("a"), {"role": "assistant", "tool_calls": [
            {"id": str(i), "type": "function", "function": {"name": "f", "arguments": text}}
            for i, text in enumerate(("", "{", "[1]", '{"a": "ä"}'))]}]}),
    "a billing line": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."},
                      user("a")]}),
    "a response's unfinished answer": (
        "/v1/responses",
        {"input": [user("a"), {"type": "message", "role": "assistant", "id": "msg_1",
                               "status": "incomplete",
                               "content": [{"type": "output_text", "text": "It",
                                            "annotations": []}]}]}),
    "a response's reasoning": (
        "/v1/responses",
        {"input": [user("a"),
                   {"type": "reasoning", "id": "rs_1", "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}]},
                   {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                   {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": "b"},
                   {"role": "assistant", "content": "c"}, user("d")]}),
    "a response's developer": (
        "/v1/responses",
        {"instructions": "a", "input": [{"role": "developer", "content": "b"}, user("c")]}),
}  # fmt: skip


def rendered(engine: Server, path: str, body: Any) -> list[int]:
    """Return the engine's tokens of a request."""
    answer = post(f"{engine.url}{path}/render", {"model": engine.model, **body})
    made = answer[0] if isinstance(answer, list) else answer
    tokens: list[int] = made["token_ids"]
    return tokens


def hashed(site: Site, requests: Sequence[tuple[str, Any]]) -> list[list[int]]:
    """Return the tokens that the gateway hashes of requests."""
    given = {"tokenizer": str(site.model), "requests": requests}
    hashes: list[list[int]] = in_vllm(site.python, "hashed_tokens", given=given)
    return hashes


def test_the_gateway_hashes_the_tokens_that_the_engine_makes(site: Site) -> None:
    requests = {kind: request(call(5)) for kind, call in KINDS.items()} | MORE_REQUESTS
    engine = site.engines[0]
    expected = {name: rendered(engine, *requested) for name, requested in requests.items()}
    got = dict(zip(requests, hashed(site, list(requests.values())), strict=True))
    assert {name for name in requests if got[name] != expected[name]} == set()
    prompt = random_words(7)
    answer = post(f"{engine.url}/tokenize", {"model": engine.model, "messages": [user(prompt)]})
    requested = ("/v1/chat/completions", {"messages": [user(prompt)]})
    assert hashed(site, [requested]) == [answer["tokens"]]


def no_events(site: Site) -> Any:
    return site.gateway("--tokenizer", site.model, followed=False)


def silent_events(site: Site) -> Any:
    nobody = [f"{engine.url}=tcp://{HOST}:{free_port()}" for engine in site.engines]
    options = [word for text in nobody for word in ("--kv-events", text)]
    return site.gateway("--tokenizer", site.model, *options, followed=False)


def other_blocks(site: Site) -> Any:
    return site.gateway("--tokenizer", site.model, "--block-size", "16")


def no_template(site: Site) -> Any:
    plain = site.folder / "plain"
    plain.mkdir(exist_ok=True)
    for file in site.model.iterdir():
        if file.name != "chat_template.jinja":
            shutil.copy(file, plain)
    return site.gateway("--tokenizer", plain)


def other_template(site: Site) -> Any:
    other = site.folder / "other.jinja"
    other.write_text(TEMPLATE + "!")
    return site.gateway("--tokenizer", site.model, "--chat-template", other)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (no_events, "events", "there are no KV events"),
        (silent_events, "events", "no process publishes KV events"),
        (other_blocks, "block_size", "it has blocks of 128 tokens, but the router has 16"),
        (no_template, "template", "no chat template"),
        (other_template, "template", "it computes other tokens for a conversation"),
    ],
)
def test_the_reason_of_a_failure_is_logged(
    site: Site, wrong: Callable[[Site], Any], kind: str, text: str
) -> None:
    with wrong(site) as gateway:
        gateway.child.wait_for(lambda: "routing on" in gateway.child.log(), START_S, "start")

        def reported() -> bool:
            metrics = gateway.metrics()
            return all(
                text in worker["problems"].get(kind, "")
                and f'problem="{kind}",worker="{worker["url"]}"}} 1.0' in metrics
                and any(
                    worker["url"] in line and text in line
                    for line in gateway.child.log().splitlines()
                )
                for worker in gateway.workers()
            )

        wait_until(reported, REPORTED_S, f"{kind} in the log, the metrics and GET /workers")
