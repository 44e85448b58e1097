# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker in a router (one rank of one engine), with its load and its overlap."""

from __future__ import annotations

import dataclasses
from typing import Generic, NamedTuple, TypeVar

from beluga._ffi import core, ffi

_Number = TypeVar("_Number", int, float)


class Worker(NamedTuple):
    """One data-parallel rank of one engine instance: Dynamo's (worker_id, dp_rank)."""

    worker_id: int
    dp_rank: int = 0


@dataclasses.dataclass(slots=True)
class WorkerMetrics:
    """The metrics that a worker publishes: the fields of Dynamo's first KvMetricsPublisher, in the
    order of its positional call.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0  # 0..1
    gpu_prefix_cache_hit_rate: float = 0.0  # 0..1


_PUBLISHED = tuple(field.name for field in dataclasses.fields(WorkerMetrics))


class _Figure(Generic[_Number]):
    """A counter of a load, stored in its row."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, load: Load, owner: type) -> _Number:
        value: _Number = getattr(load.row, self._name)
        return value

    def __set__(self, load: Load, value: _Number) -> None:
        setattr(load.row, self._name, value)


class Load:
    """The load of a worker: its last published metrics (0 before the first), and the router's count
    of the unfinished requests that it sent there.

    The values are in ``row`` (csrc/api/routing.h), from which C computes the costs of all workers
    at once.
    """

    __slots__ = ("row",)
    __hash__ = None  # type: ignore[assignment]

    request_active_slots = _Figure[int]()
    request_total_slots = _Figure[int]()
    kv_active_blocks = _Figure[int]()
    kv_total_blocks = _Figure[int]()
    num_requests_waiting = _Figure[int]()
    gpu_cache_usage_perc = _Figure[float]()
    gpu_prefix_cache_hit_rate = _Figure[float]()
    active_requests = _Figure[int]()
    active_prefill_tokens = _Figure[int]()  # not yet prefilled, without cached ones
    prefill_s = _Figure[float]()  # seconds that these prefills should still take, where predicted
    active_decode_blocks = _Figure[int]()  # distinct blocks of active requests
    # Prompt tokens of requests before their first token, including cached ones.
    outstanding_tokens = _Figure[int]()

    def __init__(self, **figures: float) -> None:
        """``figures`` are counters by name; the others are 0."""
        self.row: core.bl_load = ffi.new("bl_load *")
        for name, value in figures.items():
            setattr(self.row, name, value)

    @classmethod
    def of(cls, row: core.bl_load) -> Load:
        """Copy a row."""
        load = cls.__new__(cls)
        load.row = ffi.new("bl_load *", row)
        return load

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Load) and self._figures() == other._figures()

    def __repr__(self) -> str:
        return f"Load({', '.join(f'{name}={value}' for name, value in self._figures().items())})"

    @property
    def held_blocks(self) -> int:
        """The blocks of HBM that requests hold. The worker's count includes those of answers, and
        the router's those of waiting prompts.
        """
        row = self.row
        return max(row.active_decode_blocks, row.kv_active_blocks)

    def publish(self, metrics: WorkerMetrics) -> None:
        """Store the metrics that the worker published."""
        for name in _PUBLISHED:
            setattr(self.row, name, getattr(metrics, name))

    def _figures(self) -> dict[str, float]:
        return {name: getattr(self.row, name) for name, _ in ffi.typeof("bl_load").fields}


@dataclasses.dataclass(slots=True)
class Overlap:
    """The leading blocks of a request that are cached, by tier. Each tier counts only the blocks
    *after* those of the tiers before it.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0  # in the pool, which every worker can read

    @property
    def held(self) -> int:
        """The number of leading blocks that the worker itself holds."""
        return self.device + self.host + self.disk

    @property
    def blocks(self) -> int:
        """The number of leading blocks that need not be computed."""
        return self.device + self.host + self.disk + self.shared
