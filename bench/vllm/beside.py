# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One request with much KV during the decoding of others: how much longer their tokens take. Three
cases alternate on one engine: the others alone; with a request whose KV is in the engine's own
cache; with the same request when its KV comes from the pool. Both requests compute their last token
in one step, which reads all of that KV. So the second case is the fair baseline of the third: the
difference is what the load costs the others.

The link's setting paces the memory (``Setting.link``): machines with few cores copy slower than
their memory is.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from .arm import Setting, beluga_arm
from .load import Progress
from .prompts import prompt, prompts
from .report import Report, origin
from .station import Station
from .stream import Reply

WAYS = ("alone", "own", "pool")
OTHERS = 16
ANSWER = 128  # tokens of each of the others: a single step is less than one percent of their gaps
_BLOCK = 32  # tokens
_REQUESTED = 24  # tokens of their prompts: less than a block, so that they have no hits
_BEGUN = 0.25  # of their time, after which the large request arrives


def setting_of(setting: Setting, link: str) -> Setting:
    """Return the setting with the link's speed, short blocks, and space for two large prompts."""
    return replace(setting, block_tokens=_BLOCK, pool_tokens=3 * setting.tokens, link=link)


def measure(setting: Setting, *, rounds: int, seed: int, progress: Progress) -> Report:
    """Run the comparison. Raises BelugaError if a process dies or fails."""
    samples: dict[str, list[Reply]] = {way: [] for way in WAYS}
    large = prompt(setting.tokens, seed)
    others = prompts(_REQUESTED, seed + 1)
    with ExitStack() as stack:
        station = Station(stack, stack.enter_context(beluga_arm(setting)))
        progress("starting vLLM: beluga")
        station.ready()
        progress(f"computing {setting.tokens} tokens")
        before = station.figures()
        station.stream([large], max_tokens=1)
        station.wait(before, setting.hit_tokens)

        def run(way: str, due_s: float) -> Reply:
            # They are equal, so that only one of them is saved, because saves are not measured
            # here.
            prompts_sent, due, counts = [next(others)] * OTHERS, [0.0] * OTHERS, [ANSWER] * OTHERS
            if way != "own":
                station.empty()
            if way != "alone":
                prompts_sent, due, counts = [*prompts_sent, large], [*due, due_s], [*counts, 1]
            return station.stream(prompts_sent, due_s=due, max_tokens=counts)

        run("alone", 0)
        due_s = _BEGUN * run("alone", 0)["elapsed_s"]
        for way in ("pool", "own"):  # this touches the memory of their blocks
            run(way, due_s)
        for number in range(rounds):
            # The engine's own cache has the blocks loaded from the pool.
            for way in ("alone", "pool", "own") if number % 2 else ("pool", "own", "alone"):
                samples[way].append(run(way, due_s))
                progress(f"{number + 1}/{rounds} {way}: {_brief(_row(way, samples[way][-1:]))}")
    rows = [_row(way, samples[way]) for way in WAYS]
    return {
        "prompt_tokens": setting.tokens,
        "hit_bytes": setting.hit_bytes,
        "link": setting.link,
        "others": OTHERS,
        "rounds": rounds,
        "rows": rows,
        "gap_p99_rise_s": rows[2]["gap_p99_s"] - rows[1]["gap_p99_s"],
        "passed": _as_planned(rows, setting),
        **origin(setting, "scripts/vllm-demo"),
    }


def _as_planned(rows: list[dict[str, Any]], setting: Setting) -> bool:
    """Return whether the large request was a full hit where it should be. With few tokens the
    engine has too little memory to keep it together with the others.
    """
    hits = [row["cached_tokens"] for row in rows]
    loads = [row["load_bytes"] for row in rows]
    return hits == [0, setting.hit_tokens, setting.hit_tokens] and loads == [
        0,
        0,
        setting.hit_bytes,
    ]


def _row(way: str, replies: list[Reply]) -> dict[str, Any]:
    """Return the gaps between the others' tokens, and the large request's own figures.

    Percentiles are medians over the rounds, so that one round in which the machine stood still does
    not decide.
    """
    gaps = [
        [gap for output in reply["outputs"][:OTHERS] for gap in output["gaps_s"]]
        for reply in replies
    ]
    large = [reply["outputs"][OTHERS] for reply in replies if len(reply["outputs"]) > OTHERS]
    p50, p99 = np.median([np.percentile(of_round, (50, 99)) for of_round in gaps], axis=0)
    return {
        "way": way,
        "gap_p50_s": float(p50),
        "gap_p99_s": float(p99),
        "gap_max_s": max(map(max, gaps)),
        "ttft_s": median(output["ttft_s"] for output in large) if large else None,
        "cached_tokens": min((output["cached_tokens"] for output in large), default=0),
        "load_s": median(reply["figures"]["load_s"] for reply in replies),
        "load_bytes": median(reply["figures"]["load_bytes"] for reply in replies),
        "save_bytes": median(reply["figures"]["save_bytes"] for reply in replies),
    }


def _brief(row: dict[str, Any]) -> str:
    gaps = ", ".join(f"{name} {1000 * row[f'gap_{name}_s']:.1f}" for name in ("p50", "p99", "max"))
    own = f"; its first token after {1000 * row['ttft_s']:.0f} ms" if row["ttft_s"] else ""
    return f"the others' gaps in ms: {gaps}{own}, {row['load_bytes'] / 2**20:.0f} MiB loaded"


def print_lines(report: Report) -> None:
    """Print the comparison as a table."""
    print(f"{OTHERS} requests decode; link {report['link']}, {report['machine']}")
    for row in report["rows"]:
        print(f"{row['way']:>6}: {_brief(row)} in {1000 * row['load_s']:.0f} ms")
    rise = 1000 * report["gap_p99_rise_s"]
    print(f"a load of {report['hit_bytes'] / 2**20:.0f} MiB lengthens their p99 by {rise:.1f} ms")
