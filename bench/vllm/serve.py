# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The demonstration with two ``vllm serve`` over HTTP, which users start, and their own metrics."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from beluga.child import command
from beluga.errors import BelugaError
from beluga.index import IndexClient
from beluga.pool import Pool
from beluga.rpc import Client

from .arm import Setting, beluga_connector, beluga_pool
from .port import HOST, free_port
from .process import READY_S, Child, environment_of, options_of
from .prompts import prompt

EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
TRANSFERRED = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
_SAVED_S = 60.0
_STILL_S = 1.0
_ANSWER_S = 600.0


def complete(url: str, model: str, tokens: list[int], max_tokens: int) -> dict[str, Any]:
    """Stream a completion. Returns the seconds to its first token, its text, and the first token's
    logprobs.
    """
    body = {
        "model": model,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logprobs": 5,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(  # noqa: S310  a loopback address, made here
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started = time.perf_counter()
    first_s = 0.0
    choices: list[dict[str, Any]] = []
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310
        for line in answer:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - started
                choices += json.loads(line[6:])["choices"]
    return {
        "ttft_s": first_s,
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": choices[0]["logprobs"]["top_logprobs"][0],
    }


class Server:
    """A running ``vllm serve``."""

    def __init__(self, child: Child, port: int, model: str) -> None:
        self._child = child
        self.url = f"http://{HOST}:{port}"
        self.model = model

    def ready(self) -> None:
        """Wait until it answers. Raises ChildError if it ends instead."""
        self._child.wait_for(self._healthy, READY_S, "answer over HTTP")

    def complete(self, tokens: list[int], max_tokens: int = 8) -> dict[str, Any]:
        """See :func:`complete`."""
        return complete(self.url, self.model, tokens, max_tokens)

    def kill(self) -> None:
        """Kill it, which simulates a crash."""
        self._child.kill()

    def metric(self, name: str) -> float:
        """Return the sum of a counter over its labels, or of one ``name{label="value"}``; otherwise
        0.
        """
        name, _, label = name.rstrip("}").partition("{")
        lines = self._get("/metrics").splitlines()
        rows = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(row.rpartition(" ")[2]) for row in rows if label in row)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:  # noqa: S310
            return str(answer.read().decode())

    def _healthy(self) -> bool:
        try:
            self._get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True


@contextmanager
def server(setting: Setting, name: str, connector: dict[str, Any], **more: Any) -> Iterator[Server]:
    """Start a ``vllm serve`` and yield it before it is ready. ``more`` are other options of it.
    Raises ChildError.
    """
    options = options_of(setting.model, setting.size, tokens=setting.tokens, connector=connector)
    options |= more
    model = str(options.pop("model"))
    port = free_port()
    words = command("vllm.entrypoints.cli.main", "serve", model, python=setting.python)
    words += ["--host", HOST, "--port", str(port)]
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []  # false options are already the default
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    environment = environment_of(setting.folder) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with Child(words, log=setting.folder / f"{name}.log", environment=environment) as child:
        yield Server(child, port, model)


def compare_servers(
    setting: Setting, *, seed: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Compute a prompt on one server and find it on the other. Raises BelugaError if it is not
    found.
    """
    with ExitStack() as stack:
        paths = stack.enter_context(beluga_pool(setting))
        progress("starting two vllm serve")
        connector = beluga_connector(paths)
        a, b = (
            stack.enter_context(server(setting, name, connector)) for name in ("serve-A", "serve-B")
        )
        for each in (a, b):
            each.ready()
        for each in (a, b):
            each.complete(prompt(20, seed + 1))  # an engine's very first request is slow
        tokens = prompt(setting.tokens, seed)
        miss = a.complete(tokens)
        wait_until_saved(paths)
        hit = b.complete(tokens)
        counted = {name: b.metric(name) for name in (EXTERNAL_HITS, TRANSFERRED)}
        local = b.complete(tokens)
        report = {
            "prompt_tokens": setting.tokens,
            "hit_tokens": int(counted[EXTERNAL_HITS]),
            "ttft_miss_s": miss["ttft_s"],
            "ttft_hit_s": hit["ttft_s"],
            "ttft_local_hit_s": local["ttft_s"],
            "outputs_identical": all(hit[part] == local[part] for part in ("text", "logprobs")),
            "metrics": counted,
            "metrics_of_first": {name: a.metric(name) for name in counted},
        }
    wrong = {name: value for name, value in counted.items() if value != setting.hit_tokens}
    if wrong or not report["outputs_identical"]:
        raise BelugaError(f"{setting.hit_tokens} tokens should be hit: {json.dumps(report)}")
    return report


def wait_until_saved(paths: Sequence[Path]) -> None:
    """Wait until the pool has blocks, and no new ones for a while."""
    deadline = time.monotonic() + _SAVED_S
    with Pool.open(paths) as pool, Client(pool) as client:
        index = IndexClient(client)
        count, since = 0, time.monotonic()
        while count == 0 or time.monotonic() - since < _STILL_S:
            if time.monotonic() > deadline:
                raise BelugaError(f"nothing was saved within {_SAVED_S:.0f} s")
            time.sleep(0.05)
            now = index.stat().block_count
            if now != count:
                count, since = now, time.monotonic()
