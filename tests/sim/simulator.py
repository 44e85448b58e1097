# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs scenarios of the simulator, with every site at work or with one skipped."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from beluga._sim import ffi, lib

WRONG_BYTES = -errno.EBADMSG
STUCK = -errno.ETIME


@dataclass(frozen=True)
class Site:
    """A verb or a check in the source; ``index`` counts equal ones in one function."""

    number: int
    file: str
    function: str
    verb: str
    index: int


@dataclass(frozen=True)
class Run:
    """What came of one seed: 0 or a negative error, and the counters of ``bl_sim_stat``."""

    seed: int
    result: int
    stat: dict[str, int]
    stale: tuple[int, ...]


@cache
def sites() -> tuple[Site, ...]:
    """All sites of this build, in the order of their lines."""
    views = []
    for number in range(1, lib.bl_sim_site_count() + 1):
        view = ffi.new("bl_sim_site *")
        assert lib.bl_sim_site_get(number, view) == 0
        texts = (Path(ffi.string(view.file).decode()).name, ffi.string(view.function).decode())
        views.append((*texts, ffi.string(view.verb).decode(), view.line, number))
    found = []
    seen: dict[tuple[str, str, str], int] = {}
    for file, function, verb, _, number in sorted(views, key=lambda v: (v[0], v[3], v[4])):
        index = seen.get((file, function, verb), 0)
        seen[file, function, verb] = index + 1
        found.append(Site(number, file, function, verb, index))
    return tuple(found)


def site(function: str, verb: str, index: int = 0) -> int:
    """The number of the site that a test wants to skip."""
    fit = [s for s in sites() if (s.function, s.verb, s.index) == (function, verb, index)]
    assert len(fit) == 1, f"no single {verb} {index} in {function}"
    return fit[0].number


def play(scenario: str, seed: int, *, skip: int = 0, coherent: bool = False) -> Run:
    """One run of a scenario."""
    config = ffi.new("bl_sim_config *", {"seed": seed, "skip_site": skip, "coherent": coherent})
    stat = ffi.new("bl_sim_stat *")
    stale = ffi.new("uint64_t[]", lib.bl_sim_site_count() + 1)
    result = lib.bl_sim_play(scenario.encode(), config, stat, stale)
    names = [name for name, _ in ffi.typeof("bl_sim_stat").fields]
    return Run(seed, result, {name: getattr(stat, name) for name in names}, tuple(stale))


def total(runs: list[Run], name: str) -> int:
    """A counter, summed over runs."""
    return sum(run.stat[name] for run in runs)


def failures(runs: list[Run]) -> list[tuple[int, int]]:
    """(seed, result) of the runs that failed."""
    return [(run.seed, run.result) for run in runs if run.result != 0]


def caught(scenario: str, skip: int, *, seeds: int, coherent: bool = False) -> Run | None:
    """The first run that notices the missing site, or None."""
    runs = (play(scenario, seed, skip=skip, coherent=coherent) for seed in range(seeds))
    return next((run for run in runs if run.result != 0), None)
