# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Test two ``vllm serve`` on one pool behind a router that ignores caches, and kill one of them.

::

    python -m beluga_bench.vllm.routed [--model SIZE] [--conversations N] [--turns N]

in vLLM's environment. Conversations grow turn by turn, and each turn is sent to the least loaded
engine: it finds the KV of earlier turns in that engine or in the pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from beluga.errors import BelugaError
from beluga.gateway import Address, Limits, Service, Settings, read_engines

from .arm import BLOCK_TOKENS, Setting, beluga_connector, beluga_pool
from .command import positive, progress, run_in_folder
from .model import SIZES, model
from .port import HOST
from .process import READY_S
from .prompts import prompt
from .report import origin
from .serve import EXTERNAL_HITS, Server, complete, server, wait_until_saved

LOCAL_HITS = "vllm:prefix_cache_hits_total"
ANSWER_TOKENS = 8
HIT_PART = 0.9  # the share of possible hits below which the run fails
_LONG_ANSWER_TOKENS = 400  # the length of an answer during which an engine is killed
_POLL_S = 0.05


class Play:
    """The engines, the router in front of them, and the conversations so far."""

    def __init__(
        self, service: Service, engines: Sequence[Server], paths: Sequence[Path], step: int
    ) -> None:
        self.url = "http://{}:{}".format(*service.address)
        self._service = service
        self._engines = list(engines)
        self._model = engines[0].model
        self._paths = paths
        self._step = step  # how many tokens a turn adds
        self._texts: list[list[int]] = []

    async def up(self, count: int) -> None:
        """Wait until the router sends requests to that many engines. Raises BelugaError."""
        for _ in range(int(READY_S / _POLL_S)):
            if sum(engine.serving for engine in self._service.fleet) == count:
                return
            await asyncio.sleep(_POLL_S)
        raise BelugaError(f"the router does not have {count} engines up")

    def begin(self, count: int, seed: int) -> None:
        """Begin this number of conversations without a common prefix."""
        self._texts = [prompt(self._step, seed + i) for i in range(count)]

    async def turn(self, number: int) -> dict[str, Any]:
        """Send all conversations, then extend each. Returns what was found, and the time to first
        tokens.
        """
        if number:
            await asyncio.to_thread(wait_until_saved, self._paths)
        before = self._hits()
        requests = [
            asyncio.to_thread(complete, self.url, self._model, text, ANSWER_TOKENS)
            for text in self._texts
        ]
        answers = await asyncio.gather(*requests)
        local, pool = (now - then for now, then in zip(self._hits(), before, strict=True))
        before_it = [len(text) - self._step for text in self._texts]
        for i, text in enumerate(self._texts):
            text.extend(prompt(self._step, 10_000 * (number + 1) + i))
        return {
            "found_locally": local,
            "found_in_pool": pool,
            "could_be_found": sum(size // BLOCK_TOKENS * BLOCK_TOKENS for size in before_it),
            "ttft_median_s": statistics.median(answer["ttft_s"] for answer in answers),
        }

    async def lose_engine(self) -> dict[str, Any]:
        """Kill an engine in the middle of an answer. Returns how its client detects it."""
        body = {
            "model": self._model,
            "prompt": self._texts[0],
            "max_tokens": _LONG_ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.url}/v1/completions", json=body) as answer,
        ):
            first = await answer.content.readany()
            busy = next(engine.url for engine in self._service.fleet if engine.inflight)
            victim = next(engine for engine in self._engines if engine.url == busy)
            self._engines.remove(victim)
            await asyncio.to_thread(victim.kill)
            remaining = await answer.content.read()
        return {
            "status": answer.status,
            "began": first.startswith(b"data: "),
            "error_event": b'"error"' in remaining,
            "done": b"[DONE]" in remaining,
        }

    def _hits(self) -> tuple[int, int]:
        return (
            int(sum(engine.metric(LOCAL_HITS) for engine in self._engines)),
            int(sum(engine.metric(EXTERNAL_HITS) for engine in self._engines)),
        )


async def _play(
    setting: Setting, engines: Sequence[Server], paths: Sequence[Path], counts: tuple[int, int]
) -> dict[str, Any]:
    conversations, turns = counts
    settings = Settings(
        policy="least-tokens",
        engines=read_engines(engine.url for engine in engines),
        listen=Address(HOST, 0),
        admin=None,
        advise_s=0,
        limits=Limits(health_interval_s=0.2),
    )
    async with Service(settings) as service:
        play = Play(service, engines, paths, (setting.tokens - _LONG_ANSWER_TOKENS) // (turns + 1))
        await play.up(2)
        play.begin(conversations, seed=1)
        rows = [await play.turn(number) for number in range(turns)]
        progress(json.dumps(rows))
        lost = await play.lose_engine()
        await play.up(1)
        after = await play.turn(turns)
    later = rows[1:]
    return {
        "model": setting.size_name,
        "conversations": conversations,
        "turns": rows,
        "found_part": _part(later),
        "pool_part": _part(later, "found_in_pool"),
        "lost": lost,
        "after": after,
        "after_found_part": _part([after]),
    }


def _part(rows: Sequence[dict[str, Any]], *kinds: str, of: str = "could_be_found") -> float:
    hits = sum(row[kind] for row in rows for kind in kinds or ("found_locally", "found_in_pool"))
    return float(hits / max(1, sum(row[of] for row in rows)))


def passed(report: dict[str, Any]) -> bool:
    """Return whether turns found earlier ones on any engine, and a killed engine was reported as an
    error.
    """
    lost = report["lost"]
    return (
        min(report["found_part"], report["after_found_part"]) >= HIT_PART
        and lost["status"] == 200
        and lost["began"]
        and lost["error_event"]
        and not lost["done"]
    )


def main() -> NoReturn:
    """Run the command, which prints one JSON object."""
    parser = argparse.ArgumentParser(prog="beluga_bench.vllm.routed", description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="mid", help="how large (mid)")
    parser.add_argument("--tokens", type=positive, default=3200, help="of the last turn (3200)")
    parser.add_argument("--conversations", type=positive, default=4)
    parser.add_argument("--turns", type=positive, default=4, help="before an engine is killed (4)")
    options = parser.parse_args()

    def body(folder: Path) -> bool:
        setting = Setting(
            folder=folder,
            model=model(options.model),
            size_name=options.model,
            tokens=options.tokens + _LONG_ANSWER_TOKENS,
            pool_tokens=2 * options.conversations * options.tokens + 4096,
        )
        with ExitStack() as stack:
            paths = stack.enter_context(beluga_pool(setting))
            progress("starting two vllm serve")
            connector = beluga_connector(paths)
            engines = [stack.enter_context(server(setting, name, connector)) for name in "AB"]
            for engine in engines:
                engine.ready()
            for number, engine in enumerate(engines):
                engine.complete(prompt(20, number))  # an engine's very first request is slow
            counts = options.conversations, options.turns
            report = asyncio.run(_play(setting, engines, paths, counts))
        began = origin(setting, "python -m beluga_bench.vllm.routed")
        print(json.dumps(began | report, indent=1))
        return passed(report)

    run_in_folder("vllm-routed", body)


if __name__ == "__main__":
    main()
