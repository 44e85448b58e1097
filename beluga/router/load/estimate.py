# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Estimates a worker's time to the first token from a model's published costs.

The router has the requests that it sent to a worker, but neither the engine's batches nor the load
of the link.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.errors import RouterError
from beluga.router.candidates import Candidates
from beluga.router.load.costs import (
    ANSWER_TOKENS,
    DEFAULT_MODEL,
    GPU_PATHS,
    LOCAL_DRAM,
    MODELS,
    STEP_TOKENS,
    ModelCosts,
)
from beluga.router.policy import Candidate, Query


class Estimate(NamedTuple):
    """The seconds until the first token, in parts, and between later tokens."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    between_tokens_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.added_s

    @property
    def added_s(self) -> float:
        """The time that the worker needs for this request. Copies overlap with the prefills ahead
        of it.
        """
        return max(self.transfer_s - self.queue_s, 0.0) + self.prefill_s


def first_tokens_s(table: NDArray[np.void]) -> list[float]:
    """Return ``ttft_s`` of each row of a table of estimates."""
    queue_s = table["queue_s"]
    added_s = np.maximum(table["transfer_s"] - queue_s, 0.0) + table["prefill_s"]
    found: list[float] = (queue_s + added_s).tolist()
    return found


_ESTIMATE = np.dtype([(name, "f8") for name in Estimate._fields])
_INT64_MAX = (1 << 63) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostEstimator:
    """Estimates with the costs of a model. Blocks in the pool, and blocks fetched from another
    worker, are copied over one link of the given speed; blocks in the worker's own memory over
    another one. At least one token is computed, in steps of at most ``step_tokens``. Raises
    RouterError for a speed or a step that is not greater than 0.
    """

    costs: ModelCosts = MODELS[DEFAULT_MODEL]
    bytes_per_s: float = GPU_PATHS["root-complex"]
    host_bytes_per_s: float = LOCAL_DRAM
    step_tokens: int = STEP_TOKENS
    # the costs as C takes them, by the size of blocks
    _rows: dict[int, core.bl_costs] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, value in (
            ("bandwidth", self.bytes_per_s),
            ("local_bandwidth", self.host_bytes_per_s),
        ):
            if not 0 < value < math.inf:
                raise RouterError(f"{name} is {value}, but must be greater than 0")
        if self.step_tokens < 1:
            raise RouterError(
                f"step_tokens is {self.step_tokens}, but must be at least 1; vLLM has {STEP_TOKENS}"
            )

    def __call__(self, query: Query, candidate: Candidate, fetched: int) -> Estimate:
        return Estimate(*self.table(query, [candidate], [fetched]).tolist()[0])

    def table(
        self, query: Query, candidates: Sequence[Candidate], fetched: Sequence[int] | None = None
    ) -> NDArray[np.void]:
        """Estimate all candidates. Returns a table whose columns are the fields of Estimate
        (csrc/routing/cost.c).
        """
        rows = Candidates.of(candidates)
        table = np.empty(len(rows), _ESTIMATE)
        self._fill(query, rows, fetched, ffi.from_buffer("bl_estimate[]", table))
        return table

    def rows(self, query: Query, candidates: Candidates) -> core.bl_estimate:
        """Return the estimates of all candidates as C has them."""
        rows = ffi.new("bl_estimate[]", len(candidates.workers))
        self._fill(query, candidates, None, rows)
        return rows

    def _fill(
        self,
        query: Query,
        candidates: Candidates,
        fetched: Sequence[int] | None,
        rows: core.bl_estimate,
    ) -> None:
        lib.bl_estimates(
            self._costs(query.block_size),
            query.isl,
            candidates.rows,
            ffi.new("int64_t[]", fetched) if fetched is not None else ffi.NULL,
            len(candidates.workers),
            rows,
        )

    def alone_s(self, new: int, cached: int) -> float:
        """Return the seconds that computing a prompt's new tokens takes on an idle worker."""
        return (self.costs.prefill_ms(new, cached) + self._steps(new) * self.costs.h) / 1e3

    def device_blocks(self, block_size: int) -> int:
        """Return the number of blocks in a worker's HBM."""
        return max(self.costs.hbm_bytes // (self.costs.kv_bytes_per_token * block_size), 1)

    def answer_s(self) -> float:
        """Return the seconds that decoding an answer takes on a worker whose HBM is half full. This
        is the assumption until answers have ended.
        """
        context = self.costs.hbm_bytes // self.costs.kv_bytes_per_token // 2
        return ANSWER_TOKENS * self._step_s(1, context)

    def _costs(self, block_size: int) -> core.bl_costs:
        row = self._rows.get(block_size)
        if row is None:
            row = self._rows[block_size] = ffi.new("bl_costs *")
            for name in "abcefgh":
                setattr(row, name, getattr(self.costs, name))
            row.bytes_per_s, row.host_bytes_per_s = self.bytes_per_s, self.host_bytes_per_s
            row.step_tokens = min(self.step_tokens, _INT64_MAX)
            row.block_tokens = block_size
            row.block_bytes = block_size * self.costs.kv_bytes_per_token
        return row

    def _steps(self, new: int) -> int:
        return -(-new // self.step_tokens)

    def _step_s(self, batch: int, context: int) -> float:
        return (self.costs.decode_ms(batch, context) + self.costs.h) / 1e3
