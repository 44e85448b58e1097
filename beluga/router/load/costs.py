# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The costs of prefill, decode and transfers: every constant of the policies and of the simulator,
each with its source. No other file has such constants.

In milliseconds, with ``n`` new tokens after ``kv`` cached ones, and ``B`` requests that decode over
``K`` tokens of context in total::

    prefill = a + b*n + c*n*(kv + n/2)        decode step = e + f*B + g*K

A step that does both costs ``prefill + f*B + g*K``; ``h`` is added to every step of an engine.
"""

from __future__ import annotations

import dataclasses

from beluga.errors import RouterError
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
