# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reads the load metrics of engines, in the form that Dynamo's workers publish.

Engines do not publish to a router; they serve ``GET /metrics``. The format identifies the engine:
vLLM and SGLang send Prometheus text with their own names, TensorRT-LLM a JSON list of the
iterations since the last request. The values of several ranks are added.

Names and forms are those of vLLM's engine V1, SGLang 0.5 (``--enable-metrics``;
srt/observability/metrics_collector.py) and TensorRT-LLM 1.x (``enable_iter_perf_stats: true``;
tensorrt_llm/serve/openai_server.py, executor/iteration statistics).

All responses are untrusted. This module does no I/O.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from beluga.errors import RouterError
from beluga.router.worker import WorkerMetrics

_SPACE = "beluga_vllm_space_info"
_STARTED = "process_start_time_seconds"
_FIGURE_MAX = 1e15  # larger values cannot be counts


class LoadReport(NamedTuple):
    """The load report of an engine. ``block_size`` is in tokens, or 0 if unknown. ``metrics`` is
    None if nothing happened since the last report. ``space`` identifies its blocks in a pool;
    Beluga's connector reports it. ``ranks`` is the number of data-parallel ranks with metrics, and
    ``started_s`` the start of the process in Unix time, if reported.
    """

    engine: str
    metrics: WorkerMetrics | None
    block_size: int = 0
    space: int | None = None
    ranks: int = 1
    started_s: float | None = None


@dataclasses.dataclass(frozen=True)
class _Names:
    """The names of one engine's metrics in Prometheus text.

    ``name{label}`` is a label's value. Of several names the first existing one counts, but those of
    ``cached`` are added. Series that differ only in the labels ``same`` repeat one value, once per
    rank. Series with one of the labels ``part`` are parts of another series. ``rank`` is the label
    of data-parallel ranks.
    """

    engine: str
    running: str
    waiting: str
    usage: tuple[str, ...]
    blocks: tuple[str, ...]
    block_size: tuple[str, ...]
    looked_up: str  # prompt tokens
    cached: tuple[str, ...]  # prompt tokens that were in a cache
    rank: str
    same: tuple[str, ...] = ()
    part: str = ""


_ENGINES = (
    _Names(
        "vLLM",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        # the second name is that of V0
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        blocks=("vllm:cache_config_info{num_gpu_blocks}",),
        block_size=("vllm:cache_config_info{block_size}",),
        looked_up="vllm:prefix_cache_queries_total",
        cached=("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"),
        rank="engine",
    ),
    _Names(
        "SGLang",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        usage=("sglang:token_usage",),
        # Before 0.5.11 both were labels of one metric.
        blocks=("sglang:num_pages", "sglang:cache_config_info{num_pages}"),
        block_size=("sglang:page_size", "sglang:cache_config_info{page_size}"),
        looked_up="sglang:prompt_tokens_total",
        cached=("sglang:cached_tokens_total",),  # by cache_source
        rank="dp_rank",
        same=("tp_rank", "pp_rank", "moe_ep_rank"),
        part="priority",
    ),
)

_SAMPLE = re.compile(r'([\w:]+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_Series = dict[frozenset[tuple[str, str]], float]


def read_load(answer: str) -> LoadReport | None:
    """Read an engine's response to ``GET /metrics``. Returns None if it has no known metrics.

    vLLM and SGLang do not report how many requests they run at once; ``request_total_slots`` is
    then 0. Raises RouterError for malformed metrics.
    """
    if answer.lstrip()[:1] == "[":
        return _of_iterations(answer)
    for names in _ENGINES:
        if names.running in answer and (report := _of_text(names, answer)) is not None:
            return report
    return None


def _of_text(names: _Names, text: str) -> LoadReport | None:
    """Return the metrics of one engine in Prometheus text, or None if there are none."""
    figures = _figures(names, text)
    if names.running not in figures:
        return None

    def total(*choice: str) -> float:
        """Return the sum of the first existing series of these names."""
        name = next((name for name in choice if name in figures), choice[0])
        return _figure(f"the sum of {name}", sum(figures.get(name, {}).values()))

    def first(choice: Iterable[str]) -> list[float]:
        return next((list(figures[name].values()) for name in choice if name in figures), [])

    usage, sizes = first(names.usage), first(names.block_size)
    metrics = _metrics(
        active=total(names.running),
        waiting=total(names.waiting),
        usage=sum(usage) / max(len(usage), 1),
        blocks=total(*names.blocks),
        looked_up=total(names.looked_up),
        cached=sum(total(name) for name in names.cached),
    )
    ranks = {value for key in figures[names.running] for label, value in key if label == names.rank}
    return LoadReport(
        names.engine,
        metrics,
        int(max(sizes, default=0)),
        _space(text),
        max(len(ranks), 1),
        next((value for _, _, value in _samples(text, (_STARTED,))), None),
    )


def _space(text: str) -> int | None:
    for _, labels, _ in _samples(text, (_SPACE,)):
        reading = labels.get("space", "")
        if re.fullmatch("[0-9a-f]{16}", reading) is None:
            raise RouterError(f"{_SPACE} is {reading!r:.40}")
        return int(reading, 16)
    return None


def _figures(names: _Names, text: str) -> dict[str, _Series]:
    """Return the requested series by name, each summed over its parts."""
    of_labels: dict[str, list[tuple[str, str]]] = {}
    for wanted in (*names.blocks, *names.block_size):
        name, brace, label = wanted.rstrip("}").partition("{")
        if brace:
            of_labels.setdefault(name, []).append((wanted, label))
    plain = {names.running, names.waiting, names.looked_up}
    plain.update(names.usage, names.blocks, names.block_size, names.cached)
    figures: dict[str, _Series] = {}
    for name, labels, value in _samples(text, plain | of_labels.keys()):
        if names.part and labels.get(names.part):
            continue
        key = frozenset(item for item in labels.items() if item[0] not in names.same)
        if name in plain:
            series = figures.setdefault(name, {})
            series[key] = max(value, series.get(key, 0.0))
        for wanted, label in of_labels.get(name, ()):
            reading = labels.get(label, "")  # vLLM reports "None" until it has a value
            if reading.isdecimal() and len(reading) < 16:
                figures.setdefault(wanted, {})[key] = float(reading)
    return figures


def _samples(text: str, wanted: Collection[str]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Return the samples with a requested name. Raises RouterError for a malformed one."""
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in wanted:
            continue
        match = _SAMPLE.fullmatch(line.rstrip())
        if match is None:
            raise RouterError(f"the metrics have a malformed sample: {line[:80]!r}")
        labels = dict(_LABEL.findall(match[2] or ""))
        yield name, labels, _figure(name, match[3])


def _of_iterations(answer: str) -> LoadReport:
    """Read TensorRT-LLM's report: the last iteration of each rank counts."""
    try:
        rows = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise RouterError(f"the metrics are not JSON: {error!s:.80}") from None
    last: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if not isinstance(row, dict) or "numActiveRequests" not in row:
            raise RouterError(
                f"the metrics have an entry that is not an iteration of TensorRT-LLM: {row!r:.80}"
            )
        last[int(_field(row, "attentionDpRank"))] = row
    if not last:
        return LoadReport("TensorRT-LLM", None)

    def total(name: str, part: str = "") -> float:
        values = (_field(row.get(part) or {} if part else row, name) for row in last.values())
        return _figure(f"the sum of {name}", sum(values))

    batches, cache = "inflightBatchingStats", "kvCacheStats"
    active = total("numActiveRequests")
    if len(last) > 1:  # each row repeats the first rank's values, except for its own batch
        active = total("numScheduledRequests", batches) + total("numPausedRequests", batches)
    blocks, used = total("maxNumBlocks", cache), total("usedNumBlocks", cache)
    reused = total("reusedBlocks", cache)
    metrics = _metrics(
        active=active,
        waiting=total("numQueuedRequests"),
        usage=used / blocks if blocks else 0.0,
        blocks=blocks,
        looked_up=reused + total("missedBlocks", cache),
        cached=reused,
        slots=total("maxNumActiveRequests"),
    )
    size = max(_field(row.get(cache) or {}, "tokensPerBlock") for row in last.values())
    return LoadReport("TensorRT-LLM", metrics, int(size))


def _metrics(  # noqa: PLR0913  keyword-only
    *,
    active: float,
    waiting: float,
    usage: float,
    blocks: float,
    looked_up: float,
    cached: float,
    slots: float = 0.0,
) -> WorkerMetrics:
    usage = min(usage, 1.0)
    return WorkerMetrics(
        request_active_slots=int(active),
        request_total_slots=int(slots),
        kv_active_blocks=round(usage * blocks),
        kv_total_blocks=int(blocks),
        num_requests_waiting=int(waiting),
        gpu_cache_usage_perc=usage,
        gpu_prefix_cache_hit_rate=min(cached / looked_up, 1.0) if looked_up else 0.0,
    )


def _field(row: Any, name: str) -> float:
    """Return a value of an iteration; 0 if it is missing."""
    if not isinstance(row, dict):
        raise RouterError(f"an iteration of the metrics has no valid {name}: {row!r:.80}")
    value = row.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RouterError(f"{name} is {value!r:.40}")
    return _figure(name, value)


def _figure(name: str, reading: str | float) -> float:
    try:
        value = float(reading)
    except (ValueError, OverflowError):
        value = -1.0
    if not 0 <= value <= _FIGURE_MAX:  # also false for NaN
        raise RouterError(f"{name} is {reading!r:.40}")
    return value
