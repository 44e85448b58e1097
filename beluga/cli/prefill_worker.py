# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga prefill-worker``: it feeds one engine from a prefill queue."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated
from urllib.parse import urlsplit

import typer

from beluga.cli import logs
from beluga.cli.options import JsonLines, LogFormat, LogLevel, need
from beluga.cli.output import announce


def prefill_worker(
    engine: Annotated[str, typer.Option(help="The engine's address, as http://HOST:PORT.")],
    queue: Annotated[
        str, typer.Option(help="The queue: nats://HOST:PORT, pool, or pool:PATH:PATH.")
    ],
    name: Annotated[
        str, typer.Option(help="The queue's name, which is the model's name in the router.")
    ],
    concurrency: Annotated[
        int, typer.Option(min=1, help="How many prompts the engine has at a time.")
    ] = 2,
    visibility: Annotated[
        float,
        typer.Option(
            min=1, help="After how many seconds a dead worker's task goes to another worker."
        ),
    ] = 30.0,
    timeout: Annotated[
        float, typer.Option(min=1, help="How many seconds a prefill may take.")
    ] = 120.0,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    json: JsonLines = False,
) -> None:
    """Prefill the prompts that a router queues into the pool, until SIGTERM or Ctrl-C."""
    address = urlsplit(engine)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise typer.BadParameter(f"--engine {engine} is no address; write http://HOST:PORT")
    need("router", "aiohttp")
    logs.begin(log_level, log_format)
    asyncio.run(_work(engine, queue, name, concurrency, visibility, timeout, json=json))


async def _work(
    engine: str,
    url: str,
    name: str,
    concurrency: int,
    visibility_s: float,
    timeout_s: float,
    *,
    json: bool,
) -> None:
    from beluga.disagg import PrefillWorker, open_queue

    opened = await open_queue(url, name, visibility_s=visibility_s)
    worker = PrefillWorker(
        opened,
        engine,
        visibility_s=visibility_s,
        concurrency=concurrency,
        timeout_s=timeout_s,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    text = f"prefilling on {engine}; stop with Ctrl-C"
    announce(text, "prefilling", json=json, engine=engine)
    try:
        await worker.run()
    finally:
        await opened.close()
    stat = worker.stat
    announce(
        f"stopped: {stat.done} done, {stat.refused} refused, {stat.given_back} given back",
        "stopped",
        json=json,
        done=stat.done,
        refused=stat.refused,
        given_back=stat.given_back,
    )
