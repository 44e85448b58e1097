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
from beluga.router.policy import Candidate, Candidates, Query
from beluga.transfer import DEVICE_SPEED, LinkSettings

# Least-squares fits to operator tables measured by others, for contexts up to 16 k tokens. Values
# for longer contexts are extrapolated.
_AIC = "fit to aiconfigurator's silicon tables (vLLM 0.19, GEMM and attention)"
_LSS = "fit to LLMServingSim's layer tables"
# Fitted to two logs of real vLLM 0.19 (300 ShareGPT requests each): 12 ms for Qwen3-32B on two
# RTX PRO 6000, 4 ms for Llama-3.1-8B on one. Other GPUs are assumed to have their model's.
_STEP_32B = 12.0
_STEP_8B = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of a model on a GPU: a to h in milliseconds, and the source of a to g.

    A prefill takes ``a + b * new + c * new * (cached + new / 2)`` for its tokens, and a step takes
    ``h + e + f * batch + g * context``.
    """

    name: str
    a: float
    b: float
    c: float
    e: float
    f: float
    g: float
    h: float
    kv_bytes_per_token: int  # 2 * layers * KV heads * head size * 2 bytes
    hbm_bytes: int  # memory for KV on the GPUs of one worker
    source: str

    def prefill_ms(self, new: float, cached: float = 0) -> float:
        """Return the milliseconds that one prompt takes by itself; 0 without new tokens."""
        if new <= 0:
            return 0.0
        return self.a + self.b * new + self.c * new * (cached + new / 2)

    def decode_ms(self, batch: int, context: int) -> float:
        """Return the milliseconds, without h, of a step of ``batch`` requests with ``context``
        tokens in total.
        """
        return self.e + self.f * batch + self.g * context


def _kv_bytes(layers: int, heads: int, size: int) -> int:
    return 2 * layers * heads * size * 2


def _hbm(gpu_gb: float, weights_gb: float) -> int:
    """Return the bytes left for KV: vLLM uses nine tenths of a GPU and loads the bf16 weights
    first.
    """
    return int((0.9 * gpu_gb - weights_gb) * 1e9)


_QWEN = _kv_bytes(64, 8, 128)  # config.json of Qwen3-32B; Qwen2.5-32B has the same
_LLAMA = _kv_bytes(32, 8, 128)  # config.json of Llama-3.1-8B
_WEIGHTS_32B, _WEIGHTS_8B = 65.5, 16.1  # GB: the number of parameters * 2 bytes
_H200, _H100, _RTX = 141, 80, 96  # GB, from the makers' data sheets

_TABLE = (
    # 470 blocks of 512 tokens are the reference replay's HBM, near 0.9 * 141 GB less the weights.
    ModelCosts("qwen3-32b-h200", 7.19, 0.07663, 1.521e-6, 18.16, 0.0248, 5.87e-5, _STEP_32B,
               _QWEN, 470 * 512 * _QWEN, _AIC),
    ModelCosts("qwen2.5-32b-h200", 7.21, 0.07700, 1.570e-6, 17.72, 0.0267, 5.74e-5, _STEP_32B,
               _QWEN, _hbm(_H200, _WEIGHTS_32B), _AIC),
    ModelCosts("qwen3-32b-h100", 12.84, 0.07065, 4.669e-6, 24.07, 0.0192, 8.57e-5, _STEP_32B,
               _QWEN, _hbm(_H100, _WEIGHTS_32B), _AIC),
    ModelCosts("llama-3.1-8b-h200", 2.44, 0.01699, 7.24e-7, 4.57, 0.0091, 2.92e-5, _STEP_8B,
               _LLAMA, _hbm(_H200, _WEIGHTS_8B), _AIC),
    ModelCosts("qwen3-32b-rtx-pro-6000", 38.92, 0.13489, 9.14e-6, 45.87, 0.0812, 1.737e-4,
               _STEP_32B, _QWEN, _hbm(_RTX, _WEIGHTS_32B), _LSS),
    ModelCosts("qwen3-32b-rtx-pro-6000-tp2", 22.56, 0.14358, 5.48e-6, 24.48, 0.1238, 8.86e-5,
               _STEP_32B, _QWEN, _hbm(2 * _RTX, _WEIGHTS_32B), _LSS + ", all-reduce at 16 GB/s"),
    ModelCosts("llama-3.1-8b-rtx-pro-6000", 9.88, 0.02898, 2.55e-6, 11.17, 0.0194, 8.72e-5,
               _STEP_8B, _LLAMA, _hbm(_RTX, _WEIGHTS_8B), _LSS),
)  # fmt: skip

# The assumed length of an answer in tokens, which counts like one finished request. The means of
# recorded traces are 211 to 665 (Azure's conversations, Mooncake's, weka's, ShareGPT's).
ANSWER_TOKENS = 512
STEP_TOKENS = 8192  # vLLM's max_num_batched_tokens on large GPUs

MODELS = {costs.name: costs for costs in _TABLE}
DEFAULT_MODEL = "qwen3-32b-h200"

# Bytes per second. Source: the paper. A GPU gets the first from the pool through the CPU's root
# complex; O7 proposes to attach GPUs to the switch, where a PCIe 5.0 x16 link gives 55 GB/s.
GPU_PATHS = {"root-complex": 26e9, "switch": 55e9}
# Source: the paper (LinkSettings). An adapter has 16 lanes in each direction; one memory device.
ADAPTER_READ = float(LinkSettings().read.bytes_per_s)
ADAPTER_WRITE = float(LinkSettings().write.bytes_per_s)
DEVICE = float(DEVICE_SPEED.bytes_per_s)
SWITCH = 1e12  # bytes per second: XConn XC50256 in the paper
DEVICE_BYTES = 256 << 30  # assumed size of a memory device: the paper has 8 TB behind one switch
# Assumed in the reference's replay for a worker's own DRAM: PCIe 5.0 x16 from pinned memory.
LOCAL_DRAM = 50e9


def model_costs(name: str) -> ModelCosts:
    """Return the costs of a model on a GPU, one of ``COST_MODELS``. Raises RouterError with the
    available models.
    """
    if name not in MODELS:
        raise RouterError(
            f"there are no costs for the model {name!r}; choose one of {', '.join(MODELS)}"
        )
    return MODELS[name]


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
    seconds: list[float] = (queue_s + added_s).tolist()
    return seconds


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
        steps = -(-new // self.step_tokens)
        return (self.costs.prefill_ms(new, cached) + steps * self.costs.h) / 1e3

    def device_blocks(self, block_size: int) -> int:
        """Return the number of blocks in a worker's HBM."""
        return max(self.costs.hbm_bytes // (self.costs.kv_bytes_per_token * block_size), 1)

    def answer_s(self) -> float:
        """Return the seconds that decoding an answer takes on a worker whose HBM is half full. This
        is the assumption until answers have ended.
        """
        context = self.costs.hbm_bytes // self.costs.kv_bytes_per_token // 2
        return ANSWER_TOKENS * (self.costs.decode_ms(1, context) + self.costs.h) / 1e3

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
