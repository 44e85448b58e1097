# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The demonstration's report: one JSON object, or a table as text."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..harness.machine import cores, cpu_model, version
from .arm import Setting
from .likeness import agreed
from .measure import Sample, medians, quartiles, ttfts

Report = dict[str, Any]

_LOADING = ("load_s", "load_bytes")  # counters of B's hit
_SAVING = ("save_hook_s", "save_cpu_s", "save_bytes")  # counters of A's miss and the saves after it


def report_of(
    setting: Setting,
    samples: Mapping[str, Sequence[Sample]],
    limits: Sequence[float],
    skipped: Mapping[str, str],
) -> Report:
    """Return medians over the repetitions, in seconds and bytes. ``skipped`` has the reason for
    each peer that did not run.
    """
    own = samples["beluga"]
    times = ttfts(own)
    peers = {name: ttfts(of_arm) for name, of_arm in samples.items() if _is_peer(name)}
    everyone = {name: ttfts(of_arm) for name, of_arm in samples.items()}
    figures = {name: [s.hit["figures"].get(name, 0) for s in own if s.hit] for name in _LOADING}
    figures |= {name: [sample.saving.get(name, 0) for sample in own] for name in _SAVING}
    return {
        "prompt_tokens": setting.tokens,
        "hit_tokens": _hit_tokens(own, setting),
        "repetitions": len(own),
        **medians(times),
        "ttft_recompute_s": median(everyone["plain"]["ttft_miss_s"]),
        "outputs_identical": agreed(sample.identical(setting) for sample in own),
        **medians(figures),
        "load_limit_s": median(limits) * median(figures["load_bytes"]) / setting.hit_bytes,
        "limit_bytes_per_s": setting.hit_bytes / median(limits),
        "peers": {name: median(of_arm["ttft_hit_s"]) for name, of_arm in peers.items()},
        "peers_hit_tokens": {name: _hit_tokens(samples[name], setting) for name in peers},
        "peers_skipped": dict(skipped),
        "tried_again": {
            name: sum(sample.tries - 1 for sample in of_arm) for name, of_arm in samples.items()
        },
        "quartiles": {
            name: {column: quartiles(values) for column, values in columns.items()}
            for name, columns in everyone.items()
        },
        "ttfts": everyone,
        **origin(setting, "scripts/vllm-demo"),
    }


def origin(setting: Setting, program: str) -> Report:
    """Return the conditions of the measurement: the command, which is this program with this
    process's options, the day, model, threads, machine and commit.
    """
    return {
        "command": " ".join([program, *sys.argv[1:]]),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "model": setting.size_name,
        "threads": len(cores()),
        "machine": cpu_model(),
        "commit": version(),
    }


def _is_peer(name: str) -> bool:
    return name not in ("beluga", "plain")


def _hit_tokens(samples: Sequence[Sample], setting: Setting) -> int:
    """Return the fewest of any repetition, because a median could hide one miss among hits."""
    return min(sample.loaded(setting) for sample in samples)


def print_table(report: Report) -> None:
    """Print the comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{report['prompt_tokens']} tokens, {report['machine']}")
    for heading in ("time to first token", "median", "quartiles", "of recomputing"):
        table.add_column(heading, justify="left" if heading.startswith("time") else "right")
    recompute = report["ttft_recompute_s"]
    for label, arm, column in _rows(report):
        values = report["ttfts"][arm][column]
        low, high = quartiles(values)
        table.add_row(
            label,
            _ms(median(values)),
            f"{_ms(low)} - {_ms(high)}",
            f"{median(values) / recompute:.2%}",
        )
    console.print(table)
    console.print(_summary(report), highlight=False)
    for name, why in report["peers_skipped"].items():
        console.print(f"{name}: skipped, {why}", highlight=False)


def _rows(report: Report) -> list[tuple[str, str, str]]:
    rows = [
        ("vLLM alone, recomputed", "plain", "ttft_miss_s"),
        ("vLLM's own prefix cache", "beluga", "ttft_local_hit_s"),
        ("Beluga, computed and saved", "beluga", "ttft_miss_s"),
        ("Beluga, from the pool", "beluga", "ttft_hit_s"),
    ]
    return rows + [(f"{name}, from its pool", name, "ttft_hit_s") for name in report["peers"]]


def _summary(report: Report) -> str:
    extra = report["ttft_hit_s"] - report["ttft_local_hit_s"]
    miss = report["ttft_miss_s"]
    same = "identical" if report["outputs_identical"] else "NOT IDENTICAL"
    return (
        f"{report['hit_tokens']} of {report['prompt_tokens']} tokens from the pool, outputs {same} "
        f"to those of vLLM's own cache in {report['repetitions']} repetitions\n"
        f"a hit takes {_ms(extra)} longer than one in vLLM's own cache, whose KV is read from "
        f"memory, too; loading {report['load_bytes'] / 1e6:.1f} MB took {_ms(report['load_s'])}, "
        f"a bare copy loop {_ms(report['load_limit_s'])}\n"
        f"saving: {report['save_hook_s'] / miss:.2%} of the miss in the connector's hooks, "
        f"{report['save_cpu_s'] / miss:.2%} in CPU time of its thread"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
