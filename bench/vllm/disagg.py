# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure prefill and decode on two ``vllm serve`` with a pool between them, compared with one
engine that does both.

::

    python -m beluga_bench.vllm.disagg [--model SIZE] [--tokens N] [--requests N]

in vLLM's environment. The queue is the pool's own. All engines share this machine's cores, so
splitting the work cannot increase throughput: the measurement shows the overhead of queue and pool,
and that decode engines compute none of the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from beluga.disagg import Prefiller, PrefillOutcome, PrefillTask, PrefillWorker, open_queue

from .arm import Setting, beluga_connector, beluga_pool
from .command import positive, progress, run_in_folder
from .model import SIZES, model
from .prompts import prompt
from .report import origin
from .serve import EXTERNAL_HITS, Server, server

ANSWER_TOKENS = 16
AT_ONCE = 2  # requests at a time: one for each engine of the pair
_PREFILL_S = 300.0  # so the decode engine prefills nothing


@dataclasses.dataclass(slots=True)
class Row:
    """One arm with all its requests."""

    name: str
    elapsed_s: float
    ttft_s: list[float]
    courses: list[str]

    def report(self) -> dict[str, Any]:
        """Return requests per second, and the times from sending a request to its first token."""
        return {
            "arm": self.name,
            "requests": len(self.ttft_s),
            "qps": len(self.ttft_s) / self.elapsed_s,
            "ttft_median_s": statistics.median(self.ttft_s),
            "ttft_max_s": max(self.ttft_s),
            "courses": {course: self.courses.count(course) for course in set(self.courses)},
        }


async def _run(
    name: str, decode: Server, prefiller: Prefiller | None, prompts: Sequence[list[int]]
) -> Row:
    """Send all prompts, AT_ONCE of them at a time."""
    turns = asyncio.Semaphore(AT_ONCE)
    row = Row(name, 0.0, [], [])

    async def run(tokens: list[int]) -> None:
        async with turns:
            sent_s = time.perf_counter()
            course = PrefillOutcome.LOCAL
            if prefiller is not None:
                course = await prefiller.prefill(
                    lambda deadline: PrefillTask(
                        request_id=uuid.uuid4().hex,
                        model=decode.model,
                        tokens=tokens,
                        deadline=deadline,
                    ),
                    lambda *_: True,
                    tokens=len(tokens),
                    local_s=_PREFILL_S,
                )
            waited = time.perf_counter() - sent_s
            answer = await asyncio.to_thread(decode.complete, tokens, ANSWER_TOKENS)
            row.ttft_s.append(waited + answer["ttft_s"])
            row.courses.append(course.value)

    started = time.perf_counter()
    await asyncio.gather(*map(run, prompts))
    row.elapsed_s = time.perf_counter() - started
    return row


async def _both(
    paths: Sequence[Path], engines: Sequence[Server], prompts: Sequence[Sequence[list[int]]]
) -> list[Row]:
    """Run one engine alone and then the pair, in turns of that many prompts."""
    url = ":".join(map(str, ["pool", *paths]))
    alone, other = engines
    sender, taker = [await open_queue(url, "model") for _ in range(2)]
    worker = PrefillWorker(taker, alone.url, concurrency=1)
    working = asyncio.create_task(worker.run())
    prefiller = Prefiller(sender, timeout_s=_PREFILL_S)
    rows = []
    for turn in range(0, len(prompts), 2):
        rows.append(await _run("one engine", alone, None, prompts[turn]))
        rows.append(await _run("prefill and decode", other, prefiller, prompts[turn + 1]))
        progress(json.dumps([row.report() for row in rows[-2:]]))
    worker.stop()
    await working
    for queue in (sender, taker):
        await queue.close()
    return rows


def measure(setting: Setting, *, requests: int, turns: int, seed: int) -> dict[str, Any]:
    """Measure both arms in turns, with new prompts each time. Raises BelugaError."""
    with ExitStack() as stack:
        paths = stack.enter_context(beluga_pool(setting))
        progress("starting two vllm serve")
        connector = beluga_connector(paths)
        engines = [
            stack.enter_context(server(setting, name, connector)) for name in ("prefill", "decode")
        ]
        for engine in engines:
            engine.ready()
        for number, engine in enumerate(engines):
            # an engine's very first request is slow
            engine.complete(prompt(300, seed - 1 - number))
        texts = [
            [prompt(setting.tokens, seed + 1000 * turn + i) for i in range(requests)]
            for turn in range(2 * turns)
        ]
        rows = asyncio.run(_both(paths, engines, texts))
        hits = engines[1].metric(EXTERNAL_HITS)
    arms = [
        Row(
            name,
            sum(row.elapsed_s for row in rows if row.name == name),
            [ttft for row in rows if row.name == name for ttft in row.ttft_s],
            [course for row in rows if row.name == name for course in row.courses],
        ).report()
        for name in ("one engine", "prefill and decode")
    ]
    return {
        "model": setting.size_name,
        "prompt_tokens": setting.tokens,
        "answer_tokens": ANSWER_TOKENS,
        "at_once": AT_ONCE,
        "turns": turns,
        "decode_hit_part": hits / (requests * turns * setting.tokens),
        "arms": arms,
    }


def main() -> NoReturn:
    """Run the command, which prints one JSON object."""
    parser = argparse.ArgumentParser(prog="beluga_bench.vllm.disagg", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="mid", help="how large (mid)")
    parser.add_argument("--tokens", type=positive, default=1921, help="of a prompt (1921)")
    parser.add_argument("--requests", type=positive, default=4, help="in a turn (4)")
    parser.add_argument("--turns", type=positive, default=3, help="of each arm (3)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    def body(folder: Path) -> bool:
        setting = Setting(
            folder=folder,
            model=model(options.model),
            size_name=options.model,
            tokens=options.tokens,
            pool_tokens=2 * options.turns * options.requests * options.tokens + 4096,
        )
        report = measure(setting, requests=options.requests, turns=options.turns, seed=options.seed)
        began = origin(setting, "python -m beluga_bench.vllm.disagg")
        print(json.dumps(began | report, indent=1))
        return True

    run_in_folder("vllm-disagg", body)


if __name__ == "__main__":
    main()
