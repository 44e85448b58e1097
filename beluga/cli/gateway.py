# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga gateway``: a router in front of engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from beluga.choices import (
    BLOCK_TOKENS_MAX,
    DEFAULT_COST_MODEL,
    PREFILL_RULES,
    QUEUE_ORDERS,
    RANKS,
    RANKS_MAX,
    STEP_TOKENS,
)
from beluga.cli import logs
from beluga.cli.frame import BadParameter, Option
from beluga.cli.options import JsonLines, LogFormat, LogLevel, as_bad_value, need, size
from beluga.cli.output import announce
from beluga.cli.routing_options import (
    GPU_PATH,
    LIST,
    LOCAL_BANDWIDTH,
    SETTINGS_HELP,
    Bandwidth,
    Costs,
    GpuPath,
    LocalBandwidth,
    StepTokens,
    as_bad_policy,
    complete_policy,
    estimator_of,
    list_policies,
)
from beluga.cli.services import Manager
from beluga.conventions import GATEWAY_ADMIN_PORT, GATEWAY_PORT
from beluga.errors import ListenError, QueueError, RouterError

if TYPE_CHECKING:
    from beluga.gateway import Limits, Prefill, Service
    from beluga.listening import Token

Workers = Annotated[
    list[str] | None,
    Option("--worker", metavar="URL", help="An engine. Repeat the option for each engine."),
]
Models = Annotated[
    list[str] | None,
    Option("--model", metavar="NAME=URL,URL", help="A model and the engines that serve it."),
]
Events = Annotated[
    list[str] | None,
    Option(
        "--kv-events",
        metavar="URL=ENDPOINT[,REPLAY]",
        help=(
            "The endpoint where an engine publishes its KV events. Repeat the option for each "
            "data-parallel rank of the engine."
        ),
    ),
]


PoolEvents = Annotated[
    str,
    Option(
        "--pool-events",
        metavar="ENDPOINT,REPLAY",
        help="The endpoints where `beluga serve` publishes the pool's events.",
    ),
]
PoolEventsToken = Annotated[
    Path | None,
    Option(
        "--pool-events-token",
        metavar="FILE",
        help="The first line is the token of the server's --events-token.",
    ),
]

Queues = Annotated[
    list[str] | None,
    Option(
        "--prefill-queue",
        metavar="MODEL=QUEUE",
        help="The queue of a model's prompts for `beluga prefill-worker`.",
    ),
]

RuleName = Annotated[
    str,
    Option(
        words=PREFILL_RULES,
        metavar="RULE",
        help=f"The rule for remote prefill: {', '.join(PREFILL_RULES)}.",
    ),
]
Thresholds = Annotated[
    list[str] | None,
    Option(
        "--prefill-threshold",
        metavar="NAME=NUMBER",
        help="A threshold of the rule, such as effective_max=4096. Repeat the option for others.",
    ),
]
Admin = Annotated[str, Option(metavar="HOST:PORT", help="The operators' address; empty for none.")]
WorkersFile = Annotated[
    Path | None,
    Option(help=("A file with one worker per line. The router reloads it after a change.")),
]
TokenizerPath = Annotated[
    Path | None,
    Option(
        help=(
            "The engines' tokenizer.json, or the folder of their model. With KV events the default "
            "is each engine's own."
        )
    ),
]
ChatTemplate = Annotated[
    Path | None, Option(help="The engines' chat template, if it is not the tokenizer's.")
]
TrustTemplates = Annotated[
    bool,
    Option(
        "--trust-request-chat-template",
        help="Apply chat templates in requests, for engines that have this option.",
    ),
]
PolicyName = Annotated[
    str,
    Option(
        metavar="NAME[:KEY=VALUE,...]",
        completes=complete_policy,
        help=f"The policy, with its settings, such as linear:shared_credit=1. {SETTINGS_HELP}.",
    ),
]
ListenHost = Annotated[str, Option(help="The clients' address.")]
ListenPort = Annotated[int, Option(min=0, max=65535, help="The clients' port; 0 for a free one.")]
BlockSize = Annotated[
    int,
    Option(
        min=0,
        max=BLOCK_TOKENS_MAX,
        help="The tokens per block of the engines. 0: the engines report it.",
    ),
]
IndexRanks = Annotated[
    int,
    Option(
        min=1,
        max=RANKS_MAX,
        help=(
            "The number of workers that the index of caches has room for, counting every "
            "data-parallel rank. More ranks take more memory per block."
        ),
    ),
]
QueueOrder = Annotated[
    str,
    Option(
        words=QUEUE_ORDERS,
        help=f"The order of waiting requests: {', '.join(QUEUE_ORDERS)}.",
    ),
]
QueueThreshold = Annotated[
    float,
    Option(min=0, help="Requests wait while workers have this many batches of prefill; 0: never."),
]
QueueWait = Annotated[float, Option(min=0, help="The longest wait of a request, in seconds.")]
MaxInflight = Annotated[
    int, Option(min=0, help="The largest number of requests per worker; 0 for no limit.")
]
Retries = Annotated[int, Option(min=0, help="How many other workers to try after a failure.")]
Stall = Annotated[
    float,
    Option(
        min=0.1,
        help="Seconds without progress after which an engine, or a client that reads its response, "
        "counts as stalled.",
    ),
]
HealthInterval = Annotated[float, Option(min=0.05, help="Seconds between health checks.")]
Drain = Annotated[float, Option(min=0, help="Seconds that running requests have after SIGTERM.")]
MaxBody = Annotated[int, Option(min=1, help="The largest body of a request, in bytes.")]
BodyWait = Annotated[
    float,
    Option(min=0.1, max=3600, help="Seconds that a client has to send a request's body."),
]
MaxBodies = Annotated[
    int,
    Option(
        parser=size,
        metavar="SIZE",
        help="Memory for the bodies of all requests without a response so far.",
    ),
]
Seed = Annotated[int, Option(help="The seed of the policy's random choices.")]
PrefillWait = Annotated[
    float,
    Option(min=0, help="Seconds that a request waits for a claimed prefill."),
]
Advise = Annotated[
    float,
    Option(min=0, help="Seconds between advice on the number of engines; 0: no advice."),
]
TtftGoal = Annotated[
    float | None,
    Option(min=0.001, help="The objective of the advice: seconds to the first token."),
]
TokenGoal = Annotated[
    float | None, Option(min=0.0001, help="The objective of the advice: seconds between tokens.")
]

AllowHost = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help=(
            "An additional name of this router in requests' Host headers; * accepts all. Repeat "
            "the option for each name."
        ),
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    Option(
        metavar="ORIGIN",
        help="A site whose pages may send forms without an API key, such as https://chat.example.",
    ),
]
AdminToken = Annotated[
    Path | None,
    Option(metavar="FILE", help=("A file with the token required on the operators' address.")),
]
Tls = Annotated[
    str,
    Option(metavar="CERTIFICATE,KEY", help="Use TLS on both addresses, with these PEM files."),
]


def gateway(
    worker: Workers = None,
    model: Models = None,
    kv_events: Events = None,
    pool_events: PoolEvents = "",
    pool_events_token: PoolEventsToken = None,
    policy: PolicyName = "default",
    host: ListenHost = "127.0.0.1",
    port: ListenPort = GATEWAY_PORT,
    admin: Admin = f"127.0.0.1:{GATEWAY_ADMIN_PORT}",
    workers_file: WorkersFile = None,
    tokenizer: TokenizerPath = None,
    chat_template: ChatTemplate = None,
    trust_request_chat_template: TrustTemplates = False,
    block_size: BlockSize = 0,
    index_ranks: IndexRanks = RANKS,
    queue: QueueOrder = "fcfs",
    queue_threshold: QueueThreshold = 16.0,
    queue_wait: QueueWait = 60.0,
    max_inflight: MaxInflight = 0,
    retries: Retries = 2,
    stall: Stall = 600.0,
    health_interval: HealthInterval = 2.0,
    drain: Drain = 30.0,
    max_body: MaxBody = 64 << 20,
    max_bodies: MaxBodies = 256 << 20,
    body_wait: BodyWait = 120.0,
    seed: Seed = 0,
    prefill_queue: Queues = None,
    prefill_when: RuleName = "isl-bounding",
    prefill_threshold: Thresholds = None,
    prefill_wait: PrefillWait = 60.0,
    advise: Advise = 180.0,
    ttft_goal: TtftGoal = None,
    token_goal: TokenGoal = None,
    costs: Costs = DEFAULT_COST_MODEL,
    bandwidth: Bandwidth = None,
    local_bandwidth: LocalBandwidth = LOCAL_BANDWIDTH,
    gpu_path: GpuPath = GPU_PATH,
    step_tokens: StepTokens = STEP_TOKENS,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    json: JsonLines = False,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    admin_token: AdminToken = None,
    tls: Tls = "",
) -> None:
    """Route requests of OpenAI's API to engines, until SIGTERM or Ctrl-C."""
    files = {"workers-file": workers_file, "tokenizer": tokenizer, "chat-template": chat_template}
    for option, path in files.items():
        if path is not None and not path.exists():
            raise BadParameter(f"--{option} {path} does not exist; name a file that does")
    if chat_template is not None and tokenizer is None:
        raise BadParameter("--chat-template needs --tokenizer with the model's folder; add it")
    service = _begin(log_level, log_format, events=bool(kv_events or pool_events))
    with as_bad_value(RouterError, excepted=(ListenError, QueueError)):
        settings_of_service = service.Settings(
            policy=_checked_policy(policy),
            estimator=estimator_of(costs, bandwidth, local_bandwidth, gpu_path, step_tokens),
            engines=service.read_engines(worker or (), model or (), kv_events or ()),
            pool_events=pool_events,
            pool_events_token=_token(pool_events_token),
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
            **_advice(advise, ttft_goal, token_goal),
            prefill=_prefill(prefill_queue, prefill_when, prefill_threshold, prefill_wait),
            queue=queue,
            queue_threshold=queue_threshold,
            limits=_limits(
                queue_wait,
                max_inflight,
                retries,
                stall,
                health_interval,
                drain,
                (max_body, max_bodies, body_wait),
            ),
        )
        service.run(service.serve(settings_of_service, partial(_print_addresses, json=json)))


def _token(path: Path | None) -> Token | None:
    from beluga.listening import read_token

    return read_token(path) if path else None


def _checked_policy(text: str) -> str:
    if text == LIST:
        list_policies()
    from beluga.router import read_policy

    with as_bad_policy():
        return read_policy(text)


def _advice(
    interval_s: float, ttft_goal: float | None, token_goal: float | None
) -> dict[str, object]:
    from beluga.router import Goals

    goals = Goals(ttft_s=ttft_goal, between_tokens_s=token_goal)
    return {"advise_s": interval_s, "goals": goals}


def _prefill(
    queues: list[str] | None, rule: str, thresholds: list[str] | None, wait_s: float
) -> Prefill:
    from beluga import gateway as service

    return service.Prefill(
        service.read_queues(queues or ()), rule, service.read_thresholds(thresholds or ()), wait_s
    )


def _limits(
    queue_s: float,
    inflight_max: int,
    retries: int,
    stall_s: float,
    health_interval_s: float,
    drain_s: float,
    bodies: tuple[int, int, float],
) -> Limits:
    from beluga import gateway as service

    return service.Limits(
        queue_s=queue_s,
        inflight_max=inflight_max,
        retries=retries,
        stall_s=stall_s,
        health_interval_s=health_interval_s,
        drain_s=drain_s,
        body_size_max=bodies[0],
        bodies_size_max=bodies[1],
        body_s=bodies[2],
    )


def _begin(log_level: str | None, log_format: str | None, *, events: bool) -> Any:
    """Fail if a package is missing, and start the log. Returns the module beluga.gateway."""
    need("router", "prometheus_client", *(["zmq"] if events else []))
    logs.begin(log_level, log_format)
    from beluga import gateway as service

    return service


def _print_addresses(service: Service, *, json: bool) -> None:
    operators, admin = "", None
    if service.admin_address is not None:
        admin = service.url_of(service.admin_address)
        operators = f"; admin on {admin}"
    url = service.url_of(service.address)
    text = f"routing on {url}{operators}; stop with Ctrl-C"
    announce(text, "routing", json=json, url=url, admin=admin)
    Manager(look_s_max=1.0).ready(f"routing on {url}")
