# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs scenarios of the simulator, with all sites unchanged or with one changed."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the commands that import this

from native import _sim

build: ModuleType = _sim  # the build whose scenarios and sites these are
lib = _sim.lib

WRONG_BYTES = -errno.EBADMSG
STUCK = -errno.ETIME

COHERENCE = -lib.BL_SIM_COHERENCE
OWNERSHIP = -lib.BL_SIM_OWNERSHIP
RAW_ACCESS = -lib.BL_SIM_RAW_ACCESS

# The kinds of memory of a run, and their values in bl_sim_config.
KINDS: dict[str, dict[str, int]] = {
    "software": {"coherent": lib.BL_SIM_SOFTWARE},
    "hardware": {"coherent": lib.BL_SIM_COHERENT},
    "mixed": {"coherent": lib.BL_SIM_MIXED},
    "metadata": {"coherent": lib.BL_SIM_METADATA},
}

# The changes of a site: see bl_sim_change.
CHANGES = {
    "left out": lib.BL_SIM_SKIPPED,
    "deferred": lib.BL_SIM_DEFERRED,
    "without its first line": lib.BL_SIM_FIRST_LINE,
    "without its last line": lib.BL_SIM_LAST_LINE,
    "with a line more": lib.BL_SIM_LINE_MORE,
    "in the other half": lib.BL_SIM_OTHER_HALF,
    "true": lib.BL_SIM_TRUE,
    "false": lib.BL_SIM_FALSE,
}

# Prefixes of scenarios that are meant to fail: they show what a protocol must not do.
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
    """A verb or a check in the source, or the text of a condition; ``index`` counts equal ones in
    one function. ``drop``: which value drops the condition, or "either"; empty for others."""

    number: int
    file: str
    line: int
    function: str
    verb: str
    index: int
    drop: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function} {self.verb} {self.index}"


@dataclass(frozen=True)
class Run:
    """The result of one seed: 0 or a negative error, the counters of ``bl_sim_stat``, and by site
    number the stale loads and how often the site did something; an oracle's report; and by site how
    often there was nothing to do. ``matters``, if requested, has by site number and change how
    often the change would have made a difference.
    """

    seed: int
    result: int
    stat: dict[str, int]
    stale: tuple[int, ...]
    hits: tuple[int, ...]
    report: str
    idle: tuple[int, ...]
    matters: tuple[int, ...] = ()


@contextmanager
def using(other: ModuleType) -> Iterator[None]:
    """Use this build of the simulator in the context."""
    global build  # noqa: PLW0603
    before, build = build, other
    sites.cache_clear()
    try:
        yield
    finally:
        build = before
        sites.cache_clear()


@cache
def sites() -> tuple[Site, ...]:
    """Return all sites of this build, in the order of their lines; those of one line from right to
    left, independent of the compiler's order.
    """
    ffi, lib = build.ffi, build.lib
    views = []
    for number in range(1, lib.bl_sim_site_count() + 1):
        view = ffi.new("bl_sim_site *")
        assert lib.bl_sim_site_get(number, view) == 0
        texts = (ffi.string(view.file).decode(), ffi.string(view.function).decode())
        drop, bar, verb = ffi.string(view.verb).decode().partition("|")
        place = (*texts, view.line, view.order, number)
        views.append((*place, *((drop, verb) if bar else ("", drop))))
    found = []
    seen: dict[tuple[str, str, str], int] = {}
    for file, function, line, _, number, drop, verb in sorted(
        views, key=lambda view: (view[0], view[2], -view[3])
    ):
        index = seen.get((file, function, verb), 0)
        seen[file, function, verb] = index + 1
        found.append(Site(number, file, line, function, verb, index, drop))
    return tuple(found)


def site(function: str, verb: str, index: int = 0) -> int:
    """Return the number of the site that a test skips."""
    fit = [s for s in sites() if (s.function, s.verb, s.index) == (function, verb, index)]
    assert len(fit) == 1, f"no single {verb} {index} in {function}"
    return fit[0].number


@cache
def scenarios() -> tuple[str, ...]:
    """Return the names of all scenarios that must pass."""
    names = []
    while name := build.lib.bl_sim_scenario_name(len(names)):
        names.append(build.ffi.string(name).decode())
    return tuple(name for name in names if not name.startswith(WRONG_ON_PURPOSE))


def play(
    scenario: str,
    seed: int,
    *,
    skip: int = 0,
    change: str = "left out",
    coherent: bool = False,
    kind: str = "",
    matters: bool = False,
) -> Run:
    """Run a scenario once, with the site ``skip`` changed; ``kind`` is one of ``KINDS``."""
    ffi, lib = build.ffi, build.lib
    kind = kind or ("hardware" if coherent else "software")
    config = ffi.new("bl_sim_config *", {"seed": seed, "skip_site": skip, **KINDS[kind]})
    config.change = CHANGES[change]
    stat = ffi.new("bl_sim_stat *")
    idle = ffi.new("uint64_t[]", lib.bl_sim_site_count() + 1)
    config.idle = idle
    stale = ffi.new("uint64_t[]", lib.bl_sim_site_count() + 1)
    hits = ffi.new("uint64_t[]", lib.bl_sim_site_count() + 1)
    room = (lib.bl_sim_site_count() + 1) * lib.BL_SIM_CHANGE_COUNT if matters else 0
    matter = ffi.new("uint64_t[]", room)
    if matters:
        config.matters = matter
    result = lib.bl_sim_play(scenario.encode(), config, stat, stale, hits)
    names = [name for name, _ in ffi.typeof("bl_sim_stat").fields if name != "report"]
    counters = {name: getattr(stat, name) for name in names}
    text = ffi.string(stat.report).decode()
    return Run(seed, result, counters, tuple(stale), tuple(hits), text, tuple(idle), tuple(matter))


def describe(result: int) -> str:
    """Describe a result other than 0."""
    known = {
        WRONG_BYTES: "wrong bytes",
        STUCK: "no progress",
        COHERENCE: "coherence",
        OWNERSHIP: "ownership",
        RAW_ACCESS: "raw access",
    }
    return known.get(result) or errno.errorcode.get(-result) or f"error {result}"


def total(runs: list[Run], name: str) -> int:
    """Return a counter, summed over runs."""
    return sum(run.stat[name] for run in runs)


def failures(runs: list[Run]) -> list[tuple[int, int]]:
    """Return (seed, result) of the runs that failed."""
    return [(run.seed, run.result) for run in runs if run.result != 0]


def caught(scenario: str, skip: int, *, seeds: int, coherent: bool = False) -> Run | None:
    """Return the first run that detects the omitted site, or None."""
    runs = (play(scenario, seed, skip=skip, coherent=coherent) for seed in range(seeds))
    return next((run for run in runs if run.result != 0), None)
