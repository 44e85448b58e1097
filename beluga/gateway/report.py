# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reports of engines: vLLM's own metrics, read after every health check, as the figures that
Dynamo's workers publish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import aiohttp

from beluga.gateway.engine import Engine
from beluga.gateway.settings import Limits
from beluga.router import LoadTracker, WorkerMetrics

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the current name, and V0's
_CONFIG = "vllm:cache_config_info"
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
_WANTED = (_RUNNING, _WAITING, *_USAGE, _CONFIG, _QUERIES, *_HITS)


class Reports:
    """Reads ``/metrics`` of engines into the load tracker."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        tracker: LoadTracker,
        limits: Limits,
        learn: Callable[[int], object],
    ) -> None:
        """``learn`` gets the block sizes that engines tell."""
        self._client = client
        self._tracker = tracker
        self._learn = learn
        self._timeout = aiohttp.ClientTimeout(total=limits.health_timeout_s)

    async def read(self, engine: Engine) -> None:
        """Read one engine's metrics, which replace its earlier ones. Raises one of
        ``health.FAILURES``.
        """
        metrics = None
        try:
            async with self._client.get(f"{engine.url}/metrics", timeout=self._timeout) as answer:
                if answer.status == 200:
                    text = await answer.text()
                    metrics = worker_metrics(text)
                    engine.block_size = block_size(text)
                    if engine.block_size:
                        self._learn(engine.block_size)
        finally:
            self._tracker.publish(engine.worker, metrics)


def worker_metrics(text: str) -> WorkerMetrics | None:
    """Return the figures in a page of vLLM's metrics, summed over its ranks, or None if there are
    none. vLLM does not report how many requests it takes at once, so ``request_total_slots`` stays
    0.
    """
    sums: dict[str, float] = {}
    ranks = blocks = 0
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in _WANTED:
            continue
        if name == _CONFIG:
            blocks += _label(line, "num_gpu_blocks")
        value = _value(line)
        sums[name] = sums.get(name, 0.0) + value
        ranks += name == _RUNNING
    if not ranks:
        return None
    usage = next((sums[name] for name in _USAGE if name in sums), 0.0) / ranks
    return WorkerMetrics(
        request_active_slots=int(sums[_RUNNING]),
        kv_active_blocks=round(usage * blocks),
        kv_total_blocks=blocks,
        num_requests_waiting=int(sums.get(_WAITING, 0)),
        gpu_cache_usage_perc=usage,
        gpu_prefix_cache_hit_rate=_hit_rate(sums),
    )


def block_size(text: str) -> int:
    """Return the tokens in a block by a page of vLLM's metrics, or 0 if it does not say."""
    for line in text.splitlines():
        if line.startswith(_CONFIG):
            return _label(line, "block_size")
    return 0


def _hit_rate(sums: Mapping[str, float]) -> float:
    """Return the tokens found in the engine's cache or a pool, per token looked up: 0..1."""
    queries = sums.get(_QUERIES, 0.0)
    return min(sum(sums.get(name, 0.0) for name in _HITS) / queries, 1.0) if queries else 0.0


def _value(line: str) -> float:
    try:
        value = float(line.rpartition("}")[2].split()[0] if "}" in line else line.split()[1])
    except (ValueError, IndexError):
        return 0.0
    return value if math.isfinite(value) else 0.0


def _label(line: str, label: str) -> int:
    text = line.partition(f'{label}="')[2].partition('"')[0]
    return int(text) if text.isdecimal() else 0
