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
DISCIPLINE = -lib.BL_SIM_DISCIPLINE
OWNERSHIP = -lib.BL_SIM_OWNERSHIP
RAW_ACCESS = -lib.BL_SIM_RAW_ACCESS

# What a run's memory is like, and what that is in bl_sim_config.
KINDS: dict[str, dict[str, int]] = {
    "non-coherent": {"coherent": lib.BL_SIM_NON_COHERENT},
    "coherent": {"coherent": lib.BL_SIM_COHERENT},
    "mixed": {"coherent": lib.BL_SIM_MIXED},
}

# Show what a protocol must not do: they are meant to go wrong. By how their names begin.
WRONG_ON_PURPOSE = (
    "stray_store",
    "raw_access",
    "two_writers",
    "stale_store",
    "verify_bare_",
    "device_zombie",
)


@dataclass(frozen=True)
class Site:
    """A verb or a check in the source; ``index`` counts equal ones in one function."""

    number: int
    file: str
    line: int
    function: str
    verb: str
    index: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function} {self.verb} {self.index}"


@dataclass(frozen=True)
class Run:
    """What came of one seed: 0 or a negative error, the counters of ``bl_sim_stat``, and by site
    number the stale loads and how often the site did something; what an oracle says of it; and
    by site how often there was nothing to do."""

    seed: int
    result: int
    stat: dict[str, int]
    stale: tuple[int, ...]
    hits: tuple[int, ...]
    report: str
    idle: tuple[int, ...]


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
    for file, function, verb, line, number in sorted(views, key=lambda v: (v[0], v[3], v[4])):
        index = seen.get((file, function, verb), 0)
        seen[file, function, verb] = index + 1
        found.append(Site(number, file, line, function, verb, index))
    return tuple(found)


def site(function: str, verb: str, index: int = 0) -> int:
    """The number of the site that a test wants to skip."""
    fit = [s for s in sites() if (s.function, s.verb, s.index) == (function, verb, index)]
    assert len(fit) == 1, f"no single {verb} {index} in {function}"
    return fit[0].number


@cache
def scenarios() -> tuple[str, ...]:
    """The names of all scenarios that have to come out right."""
    names = []
    while (name := lib.bl_sim_scenario_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return tuple(name for name in names if not name.startswith(WRONG_ON_PURPOSE))


def play(scenario: str, seed: int, *, skip: int = 0, coherent: bool = False, kind: str = "") -> Run:
    """One run of a scenario; ``kind`` is one of ``KINDS``."""
    kind = kind or ("coherent" if coherent else "non-coherent")
    config = ffi.new("bl_sim_config *", {"seed": seed, "skip_site": skip, **KINDS[kind]})
    stat = ffi.new("bl_sim_stat *")
    idle = ffi.new("uint64_t[]", lib.bl_sim_site_count() + 1)
    config.idle = idle
    stale = ffi.new("uint64_t[]", lib.bl_sim_site_count() + 1)
    hits = ffi.new("uint64_t[]", lib.bl_sim_site_count() + 1)
    result = lib.bl_sim_play(scenario.encode(), config, stat, stale, hits)
    names = [name for name, _ in ffi.typeof("bl_sim_stat").fields if name != "report"]
    counters = {name: getattr(stat, name) for name in names}
    text = ffi.string(stat.report).decode()
    return Run(seed, result, counters, tuple(stale), tuple(hits), text, tuple(idle))


def told(result: int) -> str:
    """What a result other than 0 says."""
    known = {
        WRONG_BYTES: "wrong bytes",
        STUCK: "no progress",
        DISCIPLINE: "discipline",
        OWNERSHIP: "ownership",
        RAW_ACCESS: "raw access",
    }
    return known.get(result) or errno.errorcode.get(-result) or f"error {result}"


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
