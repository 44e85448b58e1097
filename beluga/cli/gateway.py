# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga gateway``: a router in front of engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from beluga.choices import (
    BLOCK_TOKENS_MAX,
    COST_MODELS,
    DEFAULT_COST_MODEL,
    PREFILL_RULES,
    QUEUE_ORDERS,
    RANKS,
    RANKS_MAX,
)
from beluga.cli import logs
from beluga.cli.frame import BadParameter, Option, OptionGroup
from beluga.cli.options import (
    JsonLines,
    LogFormat,
    LogLevel,
    as_bad_value,
    need,
    refuse_alone,
    size,
)
from beluga.cli.output import announce
from beluga.cli.routing_options import (
    LIST,
    as_bad_policy,
    complete_policy,
    estimator_of,
    link_options,
    list_policies,
)
from beluga.cli.services import Manager
from beluga.conventions import GATEWAY_ADMIN_PORT, GATEWAY_PORT
from beluga.errors import ListenError, QueueError, RouterError

if TYPE_CHECKING:
    from beluga.gateway import Service


def _limits(
    queue_wait: Annotated[float, Option(min=0)] = 60.0,
    max_inflight: Annotated[int, Option(min=0)] = 0,
    retries: Annotated[int, Option(min=0)] = 2,
    stall: Annotated[float, Option(min=0.1)] = 600.0,
    health_interval: Annotated[float, Option(min=0.05)] = 2.0,
    drain: Annotated[float, Option(min=0)] = 30.0,
    max_body: Annotated[int, Option(parser=size, min=1)] = 64 << 20,
    max_bodies: Annotated[int, Option(parser=size, min=1)] = 256 << 20,
    body_wait: Annotated[float, Option(min=0.1, max=3600)] = 120.0,
) -> Any:
    """Return the limits of waits and sizes.

    --queue-wait: The longest wait of a request, in seconds.
    --max-inflight: The largest number of requests per worker; 0 for no limit.
    --retries: How many other workers to try after a failure.
    --stall: Seconds without progress after which an engine, or a client that reads its response,
        counts as stalled.
    --health-interval: Seconds between health checks.
    --drain: Seconds that running requests have after SIGTERM.
    --max-body: The largest body of a request, in bytes.
    --max-bodies: Memory for the bodies of all requests without a response so far.
    --body-wait: Seconds that a client has to send a request's body.
    """
    from beluga.gateway import Limits

    if max_bodies < max_body:
        raise BadParameter(f"--max-bodies is {max_bodies}; give at least --max-body, {max_body}")
    return Limits(
        queue_s=queue_wait,
        inflight_max=max_inflight,
        retries=retries,
        stall_s=stall,
        health_interval_s=health_interval,
        drain_s=drain,
        body_size_max=max_body,
        bodies_size_max=max_bodies,
        body_s=body_wait,
    )


_PREFILL_WHEN, _PREFILL_WAIT_S = "isl-bounding", 60.0


@as_bad_value(RouterError)
def _prefill(
    prefill_queue: list[str] | None = None,
    prefill_when: Annotated[str, Option(words=PREFILL_RULES)] = _PREFILL_WHEN,
    prefill_threshold: list[str] | None = None,
    prefill_wait: Annotated[float, Option(min=0)] = _PREFILL_WAIT_S,
) -> Any:
    """Return the queues and the rule of remote prefills.

    --prefill-queue MODEL=QUEUE: The queue of a model's prompts for `beluga prefill-worker`.
    --prefill-when RULE: The rule for remote prefill: {words}.
    --prefill-threshold NAME=NUMBER: A threshold of the rule, such as effective_max=4096. Repeat the
        option for others.
    --prefill-wait: Seconds that a request waits for a claimed prefill.
    """
    from beluga.gateway import Prefill, read_queues, read_thresholds

    given = {
        "prefill_when": prefill_when != _PREFILL_WHEN,
        "prefill_threshold": prefill_threshold,
        "prefill_wait": prefill_wait != _PREFILL_WAIT_S,
    }
    refuse_alone("--prefill-queue", prefill_queue, **given)
    queues, thresholds = read_queues(prefill_queue or ()), read_thresholds(prefill_threshold or ())
    return Prefill(queues, prefill_when, thresholds, prefill_wait)


def gateway(
    worker: list[str] | None = None,
    model: list[str] | None = None,
    kv_events: list[str] | None = None,
    pool_events: str = "",
    pool_events_token: Path | None = None,
    policy: Annotated[str, Option(completes=complete_policy)] = "default",
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = GATEWAY_PORT,
    admin: str = f"127.0.0.1:{GATEWAY_ADMIN_PORT}",
    workers_file: Path | None = None,
    tokenizer: Path | None = None,
    chat_template: Path | None = None,
    trust_request_chat_template: bool = False,
    block_size: Annotated[int, Option(min=0, max=BLOCK_TOKENS_MAX)] = 0,
    index_ranks: Annotated[int, Option(min=1, max=RANKS_MAX)] = RANKS,
    queue: Annotated[str, Option(words=QUEUE_ORDERS)] = "fcfs",
    queue_threshold: Annotated[float, Option(min=0)] = 16.0,
    *,
    limits: Annotated[Any, OptionGroup(_limits)],
    seed: int = 0,
    prefill: Annotated[Any, OptionGroup(_prefill)],
    advise: Annotated[float, Option(min=0)] = 180.0,
    ttft_goal: Annotated[float | None, Option(min=0.001)] = None,
    token_goal: Annotated[float | None, Option(min=0.0001)] = None,
    costs: Annotated[str, Option(words=COST_MODELS)] = DEFAULT_COST_MODEL,
    links: Annotated[dict[str, Any], OptionGroup(link_options)],
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    json: JsonLines = False,
    allow_host: list[str] | None = None,
    allow_origin: list[str] | None = None,
    admin_token: Path | None = None,
    tls: str = "",
) -> None:
    """Route requests of OpenAI's API to engines, until SIGTERM or Ctrl-C.

    --worker URL: An engine. Repeat the option for each engine.
    --model NAME=URL,URL: A model and the engines that serve it.
    --kv-events URL=ENDPOINT[,REPLAY]: The endpoint where an engine publishes its KV events. Repeat
        the option for each data-parallel rank of the engine.
    --pool-events ENDPOINT,REPLAY: The endpoints where `beluga serve` publishes the pool's events.
    --pool-events-token FILE: The first line is the token of the server's --events-token.
    --policy NAME[:KEY=VALUE,...]: The policy, with its settings, such as linear:shared_credit=1.
        `--policy list` prints all policies with their settings.
    --host: The clients' address.
    --port: The clients' port; 0 for a free one.
    --admin HOST:PORT: The operators' address; empty for none.
    --workers-file: A file with one worker per line. The router reloads it after a change.
    --tokenizer: The engines' tokenizer.json, or the folder of their model. With KV events the
        default is each engine's own.
    --chat-template: The engines' chat template, if it is not the tokenizer's.
    --trust-request-chat-template: Apply chat templates in requests, for engines that have this
        option.
    --block-size: The tokens per block of the engines. 0: the engines report it.
    --index-ranks: The number of workers that the index of caches has room for, counting every
        data-parallel rank. More ranks take more memory per block.
    --queue: The order of a client's waiting requests: {words}. Clients take turns.
    --queue-threshold: Requests wait while workers have this many batches of prefill; 0: never.
    --seed: The seed of the policy's random choices.
    --advise: Seconds between advice on the number of engines; 0: no advice.
    --ttft-goal: The objective of the advice: seconds to the first token.
    --token-goal: The objective of the advice: seconds between tokens.
    --costs MODEL: The model and its GPU for the time estimates of min-ttft and least-cost, and for
        how long a prompt waits for a prefill worker (--model of `beluga simulate`): {words}.
    --allow-host NAME: An additional name of this router in requests' Host headers; * accepts all.
        Repeat the option for each name.
    --allow-origin ORIGIN: A site whose pages may send forms without an API key, such as
        https://chat.example.
    --admin-token FILE: A file with the token required on the operators' address.
    --tls CERTIFICATE,KEY: Use TLS on both addresses, with these PEM files.
    """
    files = {"workers-file": workers_file, "tokenizer": tokenizer, "chat-template": chat_template}
    for option, path in files.items():
        if path is not None and not path.exists():
            raise BadParameter(f"--{option} {path} does not exist; name a file that does")
    if chat_template is not None and tokenizer is None:
        raise BadParameter("--chat-template needs --tokenizer with the model's folder; add it")
    refuse_alone("--pool-events", pool_events, pool_events_token=pool_events_token)
    if kv_events or pool_events:
        need("router", "zmq")
    logs.begin(log_level, log_format)
    from beluga import gateway as service
    from beluga.listening import read_token
    from beluga.router import Goals

    with as_bad_value(RouterError, excepted=(ListenError, QueueError)):
        settings_of_service = service.Settings(
            policy=_checked_policy(policy),
            estimator=estimator_of(costs, **links),
            engines=service.read_engines(worker or (), model or (), kv_events or ()),
            pool_events=pool_events,
            pool_events_token=read_token(pool_events_token) if pool_events_token else None,
            workers_file=workers_file,
            listen=service.Address(host, port),
            admin=service.Address.parse(admin) if admin else None,
            callers=service.Callers.read(allow_host, allow_origin, admin_token, tls),
            tokenizer=tokenizer,
            chat_template=chat_template,
            trust_request_chat_template=trust_request_chat_template,
            block_size=block_size,
            index_ranks=index_ranks,
            seed=seed,
            advise_s=advise,
            goals=Goals(ttft_s=ttft_goal, between_tokens_s=token_goal),
            prefill=prefill,
            queue=queue,
            queue_threshold=queue_threshold,
            limits=limits,
        )
        service.run(service.serve(settings_of_service, partial(_print_addresses, json=json)))


def _checked_policy(text: str) -> str:
    if text == LIST:
        list_policies()
    from beluga.router import read_policy

    with as_bad_policy():
        return read_policy(text)


def _print_addresses(service: Service, *, json: bool) -> None:
    operators, admin = "", None
    if service.admin_address is not None:
        admin = service.url_of(service.admin_address)
        operators = f"; admin on {admin}"
    url = service.url_of(service.address)
    text = f"routing on {url}{operators}; stop with Ctrl-C"
    announce(text, "routing", json=json, url=url, admin=admin)
    Manager(look_s_max=1.0).ready(f"routing on {url}")
