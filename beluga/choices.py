# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The words and defaults of settings that the help of commands shows.

They are apart from the modules that implement them, because the help needs neither these nor numpy.
"""

EVICTIONS = ("lru", "s3fifo")
"""The eviction policies of a server (csrc/index/evict.h)."""

OFFLOADS = ("drop", "wait")
"""What happens to a block that would be evicted before it was offered to the lower tiers."""

ADMISSIONS = ("adaptive", "always", "second-touch", "sketch")
"""The policies by which lower tiers admit blocks (beluga/tiers/admission.py)."""

COHERENCE_MODES = ("hardware", "software")
"""The coherence of a pool's devices."""

QUEUE_ORDERS = ("fcfs", "lcfs", "wspt")
"""The orders of a router's waiting requests (beluga/router/queue.py)."""

PREFILL_RULES = (
    *("always-remote", "length-and-queue", "length", "isl-bounding", "prefill-load"),
    *("isl-or-load", "roomy"),
)
"""The rules by which a router prefills remotely (beluga/router/decision.py)."""

BLOCK_TOKENS_MAX = 1 << 16
RANKS, RANKS_MAX = 63, 1023
"""The limit of an engine's block size, and the number of ranks in a router's index of caches."""

COST_MODELS = (
    *("qwen3-32b-h200", "qwen2.5-32b-h200", "qwen3-32b-h100", "llama-3.1-8b-h200"),
    *("qwen3-32b-rtx-pro-6000", "qwen3-32b-rtx-pro-6000-tp2", "llama-3.1-8b-rtx-pro-6000"),
)
"""The models and GPUs with known costs (beluga/router/costs.py)."""

DEFAULT_COST_MODEL = "qwen3-32b-h200"
GPU_PATHS_GB_PER_S = {"root-complex": 26.0, "switch": 55.0}
LOCAL_DRAM_GB_PER_S = 50.0
STEP_TOKENS = 8192
"""The defaults of time estimates, in 1e9 bytes per second; costs.py has their sources."""

MEMORIES = ("pool", "split")
SIMULATED_ENGINES = ("chunked", "serial")
TIER_ORDERS = ("lru", "s3fifo", "fifo")
PRESETS = ("feasibility",)
SIMULATED_COUNT_MAX = 1 << 16
SPEED_MIN, SPEED_MAX = 1e-6, 1e6
"""The options of a simulation (beluga/simulate/options.py), and the range of a replay's speed."""

TRACE_FORMATS = ("mooncake", "weka", "azure", "burstgpt", "vllm", "sharegpt", "openai")
TIME_UNITS = ("s", "ms")
"""The formats of traces (beluga/simulate/formats.py), and the units of their times."""

ENGINE_OFFLOADS = ("wait", "drop", "watermark")
"""When an emulated engine offloads a block (beluga/kvbm/manager.py)."""

BENCHES = (
    *("coherence", "latency", "bandwidth", "rpc", "rpc-peers", "recovery", "copy", "scheduler"),
    *("gateway", "index", "indexer", "blocks", "events", "tiers-disk", "tiers-pool"),
    "tiers-remote",
)
"""The benchmarks (bench/__init__.py)."""

LANE_COUNT_MAX = 4096
BLOCK_COUNT_MAX = (1 << 32) - 1
REPLAY_SIZE_MAX = 1 << 48  # bytes of all devices of the pool of a replay
"""Limits of a new pool."""

SILENT_S = 2.0
"""A server of another machine is replaced once its heartbeat has not moved for this many seconds.

A server of this machine whose process lives is replaced after 15 times as long.
"""
