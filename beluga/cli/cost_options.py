# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options for a policy's time estimates, shared by ``beluga simulate`` and ``beluga gateway``.
With the same values both choose the same workers.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beluga.choices import (
    COST_MODELS,
    DEFAULT_COST_MODEL,
    GPU_PATHS_GB_PER_S,
    LOCAL_DRAM_GB_PER_S,
    STEP_TOKENS,
)
from beluga.cli.options import among
from beluga.errors import RouterError

if TYPE_CHECKING:  # slow to import
    from beluga.router import CostEstimator

Costs = Annotated[
    str,
    typer.Option(
        "--costs",
        metavar="MODEL",
        autocompletion=among(*COST_MODELS),
        help=(
            "The model and its GPU for the time estimates of min-ttft and least-cost, and for how "
            "long a prompt waits for a prefill worker (--model of `beluga simulate`): "
            f"{', '.join(COST_MODELS)}."
        ),
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        metavar="GB/s",
        help="The bandwidth from the pool to one worker. Default: that of --gpu-path.",
    ),
]
LocalBandwidth = Annotated[
    float, typer.Option(metavar="GB/s", help="The bandwidth from a worker's own DRAM to its GPU.")
]
GpuPath = Annotated[
    str,
    typer.Option(
        autocompletion=among(*GPU_PATHS_GB_PER_S),
        help="Where GPUs are attached: root-complex (26 GB/s) or switch (55 GB/s), the paper's O7.",
    ),
]
StepTokens = Annotated[
    int,
    typer.Option(
        min=1,
        help="The most tokens in a step of an engine (vLLM's --max-num-batched-tokens).",
    ),
]

LOCAL_BANDWIDTH = LOCAL_DRAM_GB_PER_S
GPU_PATH = "root-complex"


def with_estimator(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter ``estimator`` by these options and ``--costs``."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "estimator"
    ]

    @functools.wraps(command)
    def run(*arguments: Any, **given: Any) -> None:
        chosen = [given.pop(one.name, one.default) for one in _ADDED]
        command(*arguments, estimator=_estimator(*chosen), **given)

    # inspect.signature() would follow __wrapped__ to the original parameters.
    del run.__wrapped__
    run.__signature__ = inspect.Signature([*own, *_ADDED])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*own, *_ADDED)}
    return run


_ADDED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("costs_of", DEFAULT_COST_MODEL, Costs),
        ("bandwidth", None, Bandwidth),
        ("local_bandwidth", LOCAL_BANDWIDTH, LocalBandwidth),
        ("gpu_path", GPU_PATH, GpuPath),
        ("step_tokens", STEP_TOKENS, StepTokens),
    )
]


def _estimator(
    model: str, bandwidth: float | None, local_bandwidth: float, gpu_path: str, step_tokens: int
) -> CostEstimator:
    """Return the estimator for a model with these options. Raises RouterError for an unknown model,
    and BadParameter for an option that is out of range.
    """
    from beluga.router import CostEstimator, costs

    known = costs.model_costs(model)
    if gpu_path not in costs.GPU_PATHS:
        raise typer.BadParameter(
            f"--gpu-path is '{gpu_path}'; give one of {', '.join(costs.GPU_PATHS)}"
        )
    path_speed = costs.GPU_PATHS[gpu_path] if bandwidth is None else bandwidth * 1e9
    try:
        return CostEstimator(
            costs=known,
            bytes_per_s=path_speed,
            host_bytes_per_s=local_bandwidth * 1e9,
            step_tokens=step_tokens,
        )
    except RouterError as error:  # the text has the value; add the option
        name, _, what = str(error).partition(" ")
        raise typer.BadParameter(f"--{name.replace('_', '-')} {what}") from None
