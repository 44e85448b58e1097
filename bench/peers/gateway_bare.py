# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The bare proxy: the minimum that a proxy of two engines must do with aiohttp and the gateway's
event loop. It is the limit of ``gateway``.

``python -m beluga_bench.peers.gateway_bare PORT ENGINE ENGINE``. It uses the engines in turn,
without models, accounts, retries or metrics.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from beluga.gateway.service import run

from ..vllm.port import HOST


def main() -> None:
    """Serve until killed."""
    turns = itertools.cycle(sys.argv[2:])

    async def client(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            app["client"] = session
            yield

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        url = next(turns) + request.path_qs
        kind = {"Content-Type": request.content_type}
        async with request.app["client"].post(url, data=body, headers=kind) as source:
            target = web.StreamResponse(
                status=source.status, headers={"Content-Type": source.headers["Content-Type"]}
            )
            await target.prepare(request)
            async for chunk in source.content.iter_any():
                await target.write(chunk)
            await target.write_eof()
        return target

    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.cleanup_ctx.append(client)
    app.add_routes([web.get("/ready", ready), web.post("/{path:.*}", handle)])
    run(_serve(app, int(sys.argv[1])))


async def _serve(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
