# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of ``beluga simulate`` and ``beluga gateway`` for policies and their time estimates.
With the same values both choose the same workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click

from beluga.choices import GPU_PATHS_GB_PER_S, LOCAL_DRAM_GB_PER_S, STEP_TOKENS
from beluga.cli.frame import BadParameter, Option
from beluga.cli.options import among
from beluga.errors import RouterError

if TYPE_CHECKING:  # slow to import
    from beluga.router import CostEstimator

LIST = "list"  # a word of --policy: print the policies instead


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


def link_options(
    bandwidth: float | None = None,
    local_bandwidth: float = LOCAL_DRAM_GB_PER_S,
    gpu_path: Annotated[str, Option(words=tuple(GPU_PATHS_GB_PER_S))] = "root-complex",
    step_tokens: Annotated[int, Option(min=1)] = STEP_TOKENS,
) -> dict[str, Any]:
    """Return the speeds in bytes per second, and the size of a step.

    --bandwidth GB/s: The bandwidth from the pool to one worker. Default: that of --gpu-path.
    --local-bandwidth GB/s: The bandwidth from a worker's own DRAM to its GPU.
    --gpu-path: Where GPUs are attached: root-complex (26 GB/s) or switch (55 GB/s), the paper's O7.
    --step-tokens: The most tokens in a step of an engine (vLLM's --max-num-batched-tokens).
    """
    return {
        "bandwidth": None if bandwidth is None else bandwidth * 1e9,
        "local_bandwidth": local_bandwidth * 1e9,
        "gpu_path": gpu_path,
        "step_tokens": step_tokens,
    }


def list_policies() -> NoReturn:
    """Print every policy and its settings, and end the command."""
    from beluga.router import POLICIES, settings_of

    for name in POLICIES:
        click.echo(name)
        for key, declared in settings_of(name).items():
            click.echo(f"  {key}={declared.default_text} ({declared.range}): {declared.help}")
    raise click.exceptions.Exit(0)


def estimator_of(
    model: str,
    *,
    bandwidth: float | None,
    local_bandwidth: float,
    gpu_path: str,
    step_tokens: int,
) -> CostEstimator:
    """Return the estimator for a model with these options. Raises BadParameter for one that is out
    of range.
    """
    from beluga.router import CostEstimator, costs

    try:
        return CostEstimator(
            costs=costs.model_costs(model),
            bytes_per_s=costs.GPU_PATHS[gpu_path] if bandwidth is None else bandwidth,
            host_bytes_per_s=local_bandwidth,
            step_tokens=step_tokens,
        )
    except RouterError as error:  # the text has the value; add the option
        name, _, what = str(error).partition(" ")
        raise BadParameter(f"--{name.replace('_', '-')} {what}") from None
