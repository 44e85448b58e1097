# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of ``beluga simulate`` and ``beluga gateway`` for policies and their time estimates.
With the same values both choose the same workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import click

from beluga.choices import (
    COST_MODELS,
    GPU_PATHS_GB_PER_S,
    LOCAL_DRAM_GB_PER_S,
)
from beluga.cli.frame import BadParameter, Option
from beluga.cli.options import among
from beluga.errors import RouterError

if TYPE_CHECKING:  # slow to import
    from beluga.router import CostEstimator

LIST = "list"  # a word of --policy: print the policies instead
SETTINGS_HELP = "`--policy list` prints all policies with their settings"


@contextmanager
def as_bad_policy() -> Iterator[None]:
    """Convert the errors of policies to errors of the option."""
    try:
        yield
    except RouterError as error:
        raise BadParameter(f"--policy: {error}") from None


def complete_policy(incomplete: str) -> list[str]:
    """Complete the last name in a list of policies."""
    from beluga.router import POLICIES

    return among(*POLICIES, "default", LIST)(incomplete)


Costs = Annotated[
    str,
    Option(
        "--costs",
        metavar="MODEL",
        words=COST_MODELS,
        help=(
            "The model and its GPU for the time estimates of min-ttft and least-cost, and for how "
            "long a prompt waits for a prefill worker (--model of `beluga simulate`): {words}."
        ),
    ),
]
Bandwidth = Annotated[
    float | None,
    Option(
        metavar="GB/s",
        help="The bandwidth from the pool to one worker. Default: that of --gpu-path.",
    ),
]
LocalBandwidth = Annotated[
    float, Option(metavar="GB/s", help="The bandwidth from a worker's own DRAM to its GPU.")
]
GpuPath = Annotated[
    str,
    Option(
        words=tuple(GPU_PATHS_GB_PER_S),
        help="Where GPUs are attached: root-complex (26 GB/s) or switch (55 GB/s), the paper's O7.",
    ),
]
StepTokens = Annotated[
    int,
    Option(
        min=1,
        help="The most tokens in a step of an engine (vLLM's --max-num-batched-tokens).",
    ),
]

LOCAL_BANDWIDTH = LOCAL_DRAM_GB_PER_S
GPU_PATH = "root-complex"


def list_policies() -> NoReturn:
    """Print every policy and its settings, and end the command."""
    from beluga.router import POLICIES, settings_of

    for name in POLICIES:
        click.echo(name)
        for key, declared in settings_of(name).items():
            click.echo(f"  {key}={declared.default_text} ({declared.range}): {declared.help}")
    raise click.exceptions.Exit(0)


def estimator_of(
    model: str, bandwidth: float | None, local_bandwidth: float, gpu_path: str, step_tokens: int
) -> CostEstimator:
    """Return the estimator for a model with these options. Raises RouterError for an unknown model,
    and BadParameter for an option that is out of range.
    """
    from beluga.router import CostEstimator, costs

    model_costs = costs.model_costs(model)
    path_speed = costs.GPU_PATHS[gpu_path] if bandwidth is None else bandwidth * 1e9
    try:
        return CostEstimator(
            costs=model_costs,
            bytes_per_s=path_speed,
            host_bytes_per_s=local_bandwidth * 1e9,
            step_tokens=step_tokens,
        )
    except RouterError as error:  # the text has the value; add the option
        name, _, what = str(error).partition(" ")
        raise BadParameter(f"--{name.replace('_', '-')} {what}") from None
