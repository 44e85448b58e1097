# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An engine without a model, to measure the proxies in front of it. It streams ``max_tokens``
events at a fixed pace.

``python -m beluga_bench.system.gateway_engine PORT``.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
from aiohttp import web

from ..vllm.port import HOST
from .gateway import MODEL, PACE_S, PREFILL_S

_EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" w"}]}\n\n'


def main() -> None:
    """Serve until killed."""
    app = web.Application(client_max_size=1 << 20)
    app.add_routes(
        [
            web.get("/health", _health),
            web.get("/v1/models", _models),
            web.post("/v1/completions", _complete),
        ]
    )
    web.run_app(app, host=HOST, port=int(sys.argv[1]), print=None, access_log=None)


async def _health(_: web.Request) -> web.Response:
    return web.Response()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _complete(request: web.Request) -> web.StreamResponse:
    """Send events at times fixed at the start, so that a late one does not delay the others."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    count = msgspec.json.decode(await request.read())["max_tokens"]
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await answer.prepare(request)
    for number in range(count):
        await asyncio.sleep(max(0.0, started + PREFILL_S + number * PACE_S - loop.time()))
        await answer.write(_EVENT)
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer


if __name__ == "__main__":
    main()
