# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The variants: other block sizes, a pool that is not interleaved (the paper's Exp 8), and copies
without a link scheduler, compared with the default engine.

Each variant has its own engine and pool. For each prompt it alternates with an engine of blocks of
128 tokens on an interleaved pool: the prompt is computed and saved, found in the pool, and found in
the engine's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from .arm import MEMORY, Setting, beluga_arm
from .likeness import agreed, faults, identical, loaded_tokens
from .limit import limit_loop
from .load import Progress
from .prompts import prompts
from .station import Station, in_turn
from .stream import Reply
from .summary import Row

VARIANTS: dict[str, dict[str, Any]] = {
    "blocks-32": {"block_tokens": 32},
    "blocks-256": {"block_tokens": 256},
    "not-interleaved": {"interleave": False},
    "link-off": {"link": "off"},
}
_WARMUPS = 1  # prompts that touch an engine's memory once


def compare(
    setting: Setting, names: Sequence[str], *, repetitions: int, seed: int, progress: Progress
) -> list[Row]:
    """Return a row for each variant, and one of the usual engine for comparison."""
    if not names:
        return []
    rows: list[Row] = []
    fresh = prompts(setting.tokens, seed)
    with ExitStack() as stack:
        usual = _station(stack, setting, "usual")
        loop = stack.enter_context(limit_loop(MEMORY, setting.hit_bytes))
        for name in names:
            progress(f"starting vLLM: {name}")
            with ExitStack() as inner:
                other = _station(inner, replace(setting, **VARIANTS[name]), name)
                limits: list[float] = []
                samples: dict[str, list[dict[str, Reply]]] = {"usual": [], name: []}
                for number in range(-_WARMUPS, repetitions):
                    prompt = next(fresh)
                    limits.append(loop.seconds())
                    for station in in_turn([usual, other], number):
                        sample = _sample(station, prompt)
                        _explain(station, sample, progress)
                        if number >= 0:
                            samples[station.name].append(sample)
                for station in (usual, other):
                    row = _row(name, station, samples[station.name], median(limits))
                    progress(
                        f"{name}, {station.name}: {1000 * row['ttft_hit_s']:.1f} ms from the pool"
                    )
                    rows.append(row)
    return rows


def _station(stack: ExitStack, setting: Setting, name: str) -> Station:
    arm = stack.enter_context(beluga_arm(setting))
    station = Station(stack, replace(arm, name=name))
    station.ready()
    return station


def _sample(station: Station, prompt: list[int]) -> dict[str, Reply]:
    before = station.figures()
    station.empty()
    miss = station.generate(prompt)
    station.wait(before, station.arm.setting.hit_tokens)
    after = station.figures()
    station.empty()
    return {
        "miss": miss,
        "hit": station.generate(prompt),
        "local": station.generate(prompt),
        "saving": {name: value - before[name] for name, value in after.items()},
    }


def _loaded(station: Station, sample: dict[str, Reply]) -> int:
    return loaded_tokens(sample["hit"], station.arm.setting.block_tokens)


def _identical(station: Station, sample: dict[str, Reply]) -> bool | None:
    return identical(
        sample["hit"],
        loaded=_loaded(station, sample),
        whole=station.arm.setting.hit_tokens,
        miss=sample["miss"],
        local=sample["local"],
    )


def _explain(station: Station, sample: dict[str, Reply], progress: Progress) -> None:
    """Explain why a prompt was not found whole, with counters and the lines of the engine's log."""
    whole, loaded = station.arm.setting.hit_tokens, _loaded(station, sample)
    if loaded >= whole:
        return
    counted = faults(sample["saving"], sample["hit"]["figures"])
    progress(
        f"{station.name}: {loaded} of {whole} tokens were found: {counted or 'nothing counted'}"
    )
    for line in station.warnings():
        progress(f"    {line}")


def _row(
    variant: str, station: Station, samples: Sequence[dict[str, Reply]], limit_s: float
) -> Row:
    def values(kind: str, column: str) -> Iterator[float]:
        return (sample[kind][column] for sample in samples)

    setting = station.arm.setting
    loads = [sample["hit"]["figures"] for sample in samples]
    likeness = [_identical(station, sample) for sample in samples]
    return {
        "variant": variant,
        "arm": station.name,
        "block_tokens": setting.block_tokens,
        "interleave": setting.interleave,
        "length": setting.tokens,
        "repetitions": len(samples),
        "full_tokens": setting.hit_tokens,
        "hit_tokens": min(_loaded(station, sample) for sample in samples),
        "ttft_miss_s": median(values("miss", "ttft_s")),
        "ttft_hit_s": median(values("hit", "ttft_s")),
        "ttft_local_hit_s": median(values("local", "ttft_s")),
        "load_s": median(figures["load_s"] for figures in loads),
        "load_bytes": median(figures["load_bytes"] for figures in loads),
        "load_limit_s": limit_s,
        "outputs_identical": agreed(likeness),
        "faults": faults(
            *(part for sample in samples for part in (sample["saving"], sample["hit"]["figures"]))
        ),
    }
