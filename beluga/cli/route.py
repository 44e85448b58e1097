# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga route``: a router in front of engines."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beluga.cli.options import need
from beluga.cli.output import say
from beluga.router import ORDERS, POLICIES, RULES, Goals

if TYPE_CHECKING:
    from beluga.route import Service

Workers = Annotated[
    list[str] | None, typer.Option("--worker", metavar="URL", help="An engine; repeat for each.")
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME=URL,URL", help="A model and the engines that have it."),
]
Events = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-events", metavar="URL=ENDPOINT[,REPLAY]", help="Where an engine announces its blocks."
    ),
]


Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--prefill-queue",
        metavar="MODEL=QUEUE",
        help="Where a model's prompts wait for `beluga prefill-worker`.",
    ),
]

RuleName = Annotated[str, typer.Option(help=f"Remote prefill by rule: {', '.join(RULES)}.")]
Admin = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where operators come; empty: nowhere.")
]
WorkersFile = Annotated[
    Path | None, typer.Option(help="A file that names workers, a line each; it is watched.")
]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="The engines' tokenizer.json, or their model's directory.")
]


def route(
    worker: Workers = None,
    model: Models = None,
    kv_events: Events = None,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}.")] = "least-tokens",
    host: Annotated[str, typer.Option(help="Where clients come.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8080,
    admin: Admin = "127.0.0.1:8081",
    workers_file: WorkersFile = None,
    tokenizer: TokenizerPath = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block, as engines say.")] = 16,
    queue: Annotated[str, typer.Option(help=f"Order of waiting: {', '.join(ORDERS)}.")] = "fcfs",
    queue_threshold: Annotated[
        float, typer.Option(min=0, help="Wait above so many batches of prefill; 0: never.")
    ] = 16.0,
    queue_wait: Annotated[float, typer.Option(min=0, help="Seconds to wait at most.")] = 60.0,
    max_inflight: Annotated[int, typer.Option(min=0, help="Requests per worker; 0: any.")] = 0,
    retries: Annotated[int, typer.Option(min=0, help="Other workers tried.")] = 2,
    stall: Annotated[float, typer.Option(min=0.1, help="Seconds of silence of an engine.")] = 600.0,
    health_interval: Annotated[float, typer.Option(min=0.05, help="Seconds.")] = 2.0,
    drain: Annotated[float, typer.Option(min=0, help="Seconds for requests at SIGTERM.")] = 30.0,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 64 << 20,
    seed: Annotated[int, typer.Option(help="Of the policy's chance.")] = 0,
    prefill_queue: Queues = None,
    prefill_when: RuleName = "isl-bounding",
    prefill_wait: Annotated[float, typer.Option(min=0, help="Seconds for a prefill.")] = 60.0,
    advise: Annotated[
        float, typer.Option(min=0, help="Seconds between advice on the number of engines; 0: none.")
    ] = 180.0,
    ttft_goal: Annotated[
        float | None, typer.Option(min=0, help="Seconds to a first token that advice keeps to.")
    ] = None,
    token_goal: Annotated[
        float | None, typer.Option(min=0, help="Seconds between tokens that advice keeps to.")
    ] = None,
) -> None:
    """Send requests of OpenAI's API to engines, until SIGTERM or Ctrl-C."""
    need("router", "aiohttp", "prometheus_client", "xxhash", *(["zmq"] if kv_events else []))
    from beluga import route as routing

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = routing.Settings(
        policy=policy,
        engines=routing.read_engines(worker or (), model or (), kv_events or ()),
        workers_file=workers_file,
        listen=routing.Address(host, port),
        admin=routing.Address.parse(admin) if admin else None,
        tokenizer=tokenizer,
        block_size=block_size,
        seed=seed,
        advise_s=advise,
        goals=Goals(ttft_s=ttft_goal, between_tokens_s=token_goal),
        prefill=routing.Prefill(
            routing.read_queues(prefill_queue or ()), prefill_when, prefill_wait
        ),
        queue=queue,
        queue_threshold=queue_threshold,
        limits=routing.Limits(
            queue_s=queue_wait,
            inflight_max=max_inflight,
            retries=retries,
            stall_s=stall,
            health_interval_s=health_interval,
            drain_s=drain,
            body_size_max=max_body,
        ),
    )
    asyncio.run(routing.serve(settings, _say_where))


def _say_where(service: Service) -> None:
    host, port = service.address
    operators = ""
    if service.admin_address is not None:
        operators = "; admin on http://{}:{}".format(*service.admin_address)
    say(f"routing on http://{host}:{port}{operators}; stop with Ctrl-C")
