# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga prefill-worker``: feeds one engine from a prefill queue."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated
from urllib.parse import urlsplit

from beluga.cli import logs
from beluga.cli.frame import BadParameter, Option
from beluga.cli.options import JsonLines, LogFormat, LogLevel
from beluga.cli.output import announce
from beluga.listening import shown_url


def prefill_worker(
    engine: str,
    queue: str,
    name: str,
    concurrency: Annotated[int, Option(min=1)] = 2,
    visibility: Annotated[float, Option(min=1)] = 30.0,
    timeout: Annotated[float, Option(min=1)] = 120.0,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    json: JsonLines = False,
) -> None:
    """Prefill the prompts that a router queues, and store their KV in the pool, until SIGTERM or
    Ctrl-C.

    --engine: The engine's address, as http://HOST:PORT.
    --queue: The queue: nats://HOST:PORT, pool, or pool:PATH:PATH.
    --name: The queue's name, which is the model's name in the router.
    --concurrency: The number of prompts that the engine gets at a time.
    --visibility: Seconds after which a dead worker's task goes to another worker.
    --timeout: The longest time of a prefill, in seconds.
    """
    try:
        address = urlsplit(engine)
        valid = address.scheme in ("http", "https") and bool(address.hostname)
        valid = valid and address.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise BadParameter(
            f"--engine {shown_url(engine)} is not an address; write http://HOST:PORT"
        )
    if not name:
        raise BadParameter("--name is empty; give the model's name in the router")
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
    shown = shown_url(engine)
    announce(f"prefilling on {shown}; stop with Ctrl-C", "prefilling", json=json, engine=shown)
    try:
        await worker.run()
    finally:
        await opened.close()
    stat = worker.stat
    announce(
        f"stopped: {stat.done} done, {stat.refused} refused, {stat.given_back} returned",
        "stopped",
        json=json,
        done=stat.done,
        refused=stat.refused,
        given_back=stat.given_back,
    )
