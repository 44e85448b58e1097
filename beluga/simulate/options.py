# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The options of a simulation: workers, their memory, the links between them, and scaling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from beluga import choices
from beluga.errors import SimulateError
from beluga.pool import show_size
from beluga.router import Goals, ModelCosts, costs

MEMORIES = choices.MEMORIES
ENGINES = choices.SIMULATED_ENGINES
GIB = 1 << 30
COUNT_MAX = choices.SIMULATED_COUNT_MAX  # of workers, adapters and devices
SPEED_MIN, SPEED_MAX = choices.SPEED_MIN, choices.SPEED_MAX


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """``count`` more workers (or fewer, if negative) from second ``at_s`` of the replay on."""

    at_s: float
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """A cluster. Sizes are in bytes, speeds in bytes per second. None stands for a default that
    follows from the other values.

    ``model`` has the times of a model on a GPU: see :func:`model_costs`. ``pool`` is the size of
    the shared pool in runs with ``pool`` memory; ``local`` is each worker's own DRAM in runs with
    ``split`` memory, by default an equal part of the pool's size. ``engine`` is chunked or serial.
    ``chunked`` engines batch as vLLM does: a step has at most ``step_tokens`` tokens, of all
    decoding requests and of pieces of prompts. ``serial`` engines prefill one prompt after another
    and do not decode. ``eviction`` is lru, s3fifo or fifo, and ``gpu_path``
    root-complex or switch. ``policy_defaults`` replace the defaults of those settings that a policy
    has. ``ttft_goal_s`` is the objective of reports.
    """

    workers: int = 8
    model: ModelCosts = costs.MODELS[costs.DEFAULT_MODEL]
    engine: str = "chunked"
    hbm: int | None = None  # of each worker, for KV; the model's by default
    pool: int | None = None  # by default 1950 GiB, or the sum of ``local``
    local: int | None = None
    eviction: str = "lru"
    gpu_path: str = "root-complex"
    # from the pool to one worker, in each direction; the GPU path's by default
    bandwidth: float | None = None
    local_bandwidth: float = costs.LOCAL_DRAM
    adapters: int | None = None  # shared by all workers; one for two workers by default
    devices: int | None = None  # memory devices of the pool; one for 256 GiB by default
    step_tokens: int = costs.STEP_TOKENS
    slots: int = 256  # requests that a worker runs at once (vLLM's max_num_seqs)
    offload: bool = True  # whether writing to the pool takes link time
    speed: float = 1.0  # arrivals, as a multiple of the trace's speed
    policy_defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    shuffle: bool = True  # shuffle simultaneous requests by seed
    scale: Scale | None = None
    goals: Goals | None = None  # goals of the planner, whose advice is followed
    ttft_goal_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "step_tokens", "slots"):
            if getattr(self, name) < 1:
                raise SimulateError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("hbm", "pool", "local", "adapters", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SimulateError(f"{name} is {value}, but must be at least 1")
        for name in ("bandwidth", "local_bandwidth", "speed"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SimulateError(f"{name} is {value}, but must be greater than 0")
        for name, allowed in (
            ("engine", ENGINES),
            ("eviction", choices.TIER_ORDERS),
            ("gpu_path", tuple(costs.GPU_PATHS)),
        ):
            if getattr(self, name) not in allowed:
                raise SimulateError(
                    f"{name} is one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )
        if self.scale and self.goals:
            raise SimulateError(
                "workers are added either at a given time or by the planner; choose one"
            )
        if self.scale and self.workers + self.scale.count < 1:
            raise SimulateError(f"scaling by {self.scale.count} leaves no worker")
        self._refuse_huge()

    def _refuse_huge(self) -> None:
        """Raise SimulateError for values with which no simulation would end."""
        for name in ("workers", "adapters", "devices"):
            if (getattr(self, name) or 0) > COUNT_MAX:
                raise SimulateError(f"{name} is at most {COUNT_MAX}, not {getattr(self, name)}")
        if not SPEED_MIN <= self.speed <= SPEED_MAX:
            raise SimulateError(f"speed is from {SPEED_MIN:g} to {SPEED_MAX:g}, not {self.speed:g}")
        if self.scale and self.workers + self.scale.count > COUNT_MAX:
            raise SimulateError(f"scaling by {self.scale.count}: workers is at most {COUNT_MAX}")

    @property
    def pool_bytes(self) -> int:
        """The size of the shared pool."""
        if self.pool is not None:
            return self.pool
        return 1950 * GIB if self.local is None else self.local * self.workers

    @property
    def local_bytes(self) -> int:
        """The size of each worker's own DRAM in runs without a pool."""
        return self.pool_bytes // self.workers if self.local is None else self.local

    @property
    def hbm_bytes(self) -> int:
        """The HBM of each worker for KV."""
        return self.model.hbm_bytes if self.hbm is None else self.hbm

    @property
    def path_speed(self) -> float:
        """The speed between the pool and one worker's GPU."""
        return costs.GPU_PATHS[self.gpu_path] if self.bandwidth is None else self.bandwidth

    @property
    def adapter_count(self) -> int:
        """The number of adapters of all workers together."""
        return max(1, self.workers // 2) if self.adapters is None else self.adapters

    @property
    def device_count(self) -> int:
        """The number of the pool's memory devices."""
        return self.devices or -(-self.pool_bytes // costs.DEVICE_BYTES)

    @property
    def step_s(self) -> float:
        """The overhead of each step of an engine in seconds."""
        return self.model.h / 1e3 if self.engine == "chunked" else 0.0


def unequal_memory(options: Options) -> str | None:
    """Return how the pool differs from all workers' DRAM together, or None if by 1 % or less: a
    pool that wins by its size alone proves nothing.
    """
    whole, split = options.pool_bytes, options.local_bytes * options.workers
    if abs(whole - split) <= 0.01 * whole:
        return None
    return f"the pool has {show_size(whole)}, all DRAM together {show_size(split)}"


def feasibility(options: Options) -> Options:
    """Return the set-up of the reference's replay (docs/understand/benchmarks.md): serial prefill,
    no decode, 470 blocks of HBM, 15,600 blocks in all, 26 GB/s for each worker independent of the
    others, DRAM at 50 GB/s, free writes, and requests in the file's order. It is a guess that
    ``linear`` counted DRAM like HBM there, which reproduces its figures.
    """
    block = 512 * costs.MODELS["qwen3-32b-h200"].kv_bytes_per_token
    return dataclasses.replace(
        options,
        workers=8,
        model=costs.MODELS["qwen3-32b-h200"],
        engine="serial",
        hbm=470 * block,
        pool=8 * 1950 * block,
        local=1950 * block,
        adapters=8,
        devices=1000,
        offload=False,
        shuffle=False,
        policy_defaults={"host_credit": 1.0},
    )


PRESETS = {"feasibility": feasibility}
