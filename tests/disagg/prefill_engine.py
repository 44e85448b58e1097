# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A fake of an OpenAI engine for prefill workers, which can stall, fail and refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeEngine:
    """Responds with ``status`` once ``gate`` is open; ``requested`` has what was sent to it."""

    def __init__(self) -> None:
        self.url = ""
        self.requested: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        self.statuses: list[int] = []  # statuses of the next responses, before ``status`` applies
        self.gate = asyncio.Event()
        self.gate.set()

    async def _answer(self, request: web.Request) -> web.Response:
        self.requested.append((request.path, json.loads(await request.read())))
        await self.gate.wait()
        status = self.statuses.pop(0) if self.statuses else self.status
        return web.json_response({"choices": [{"text": "x"}]}, status=status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeEngine]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
