# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The clients of the gateway's benchmark, which send requests at random times, however slow the
answers are.
"""

from __future__ import annotations

import asyncio
import random
import time

import aiohttp
import msgspec
import numpy as np

from beluga.errors import BelugaError

from .gateway import MODEL, Sample

_PROMPT = "The whale is white. " * 200  # 1,000 tokens at four bytes each
_BODY = msgspec.json.encode({"model": MODEL, "prompt": _PROMPT, "stream": True})
_KIND = {"Content-Type": "application/json"}


def load(url: str, *, count: int, rate: float, seed: int) -> Sample:
    """Send ``count`` requests, ``rate`` per second on average. Raises BelugaError if one fails."""
    return asyncio.run(_load(url, count, rate, random.Random(seed)))  # noqa: S311


async def _load(url: str, count: int, rate: float, moments: random.Random) -> Sample:
    loop = asyncio.get_running_loop()
    due = loop.time()
    asked = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for _ in range(count):
            due += moments.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            asked.append(loop.create_task(_ask(client, f"{url}/v1/completions")))
        times = np.array(await asyncio.gather(*asked))
    return Sample(times[:, 0], times[:, 1])


async def _ask(client: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Return the seconds to the first and to the last byte of the answer's body."""
    sent = time.perf_counter()
    first = 0.0
    last = b""
    async with client.post(url, data=_BODY, headers=_KIND) as answer:
        async for chunk in answer.content.iter_any():
            first = first or time.perf_counter() - sent
            last = chunk
    whole = time.perf_counter() - sent
    if answer.status != 200 or not last.endswith(b"data: [DONE]\n\n"):
        raise BelugaError(f"{url} answers {answer.status}, and ends with {last[-80:]!r}")
    return first, whole
