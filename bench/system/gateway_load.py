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

from .gateway import MODEL, LoadRequest, Sample

_KIND = {"Content-Type": "application/json"}


def load(url: str, sent: LoadRequest, *, count: int, rate: float, seed: int) -> Sample:
    """Send ``count`` requests, ``rate`` per second on average. Raises BelugaError if one fails."""
    return asyncio.run(_load(url, _body(sent), count, rate, random.Random(seed)))  # noqa: S311


def _body(sent: LoadRequest) -> bytes:
    """Return a request's body of a size, which has the same prompt each time."""
    fields = {"model": MODEL, "prompt": "", "stream": True, "max_tokens": sent.events}
    left = sent.size - len(msgspec.json.encode(fields))
    sentence = "The whale is white. "
    fields["prompt"] = (sentence * (left // len(sentence) + 1))[:left]
    return msgspec.json.encode(fields)


async def _load(url: str, body: bytes, count: int, rate: float, moments: random.Random) -> Sample:
    loop = asyncio.get_running_loop()
    due = loop.time()
    tasks = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for _ in range(count):
            due += moments.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks.append(loop.create_task(_complete(client, f"{url}/v1/completions", body)))
        times = np.array(await asyncio.gather(*tasks))
    return Sample(times[:, 0], times[:, 1])


async def _complete(client: aiohttp.ClientSession, url: str, body: bytes) -> tuple[float, float]:
    """Return the seconds to the first and to the last byte of the answer's body."""
    sent = time.perf_counter()
    first = 0.0
    last = b""
    async with client.post(url, data=body, headers=_KIND) as answer:
        async for chunk in answer.content.iter_any():
            first = first or time.perf_counter() - sent
            last = chunk
    whole = time.perf_counter() - sent
    if answer.status != 200 or not last.endswith(b"data: [DONE]\n\n"):
        raise BelugaError(f"{url} answers {answer.status}, and ends with {last[-80:]!r}")
    return first, whole
