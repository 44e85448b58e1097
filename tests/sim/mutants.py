# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Mutants of the protocol: each leaves out one verb or check, and some scenario must notice it.

Which sites there are is the build's word (``bl_sim_site_get``). A mutant is tried in the scenarios
in which its site does something, those first in which it does so most often for their time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from children import Death, answers, still_alive
from exemptions import EXEMPTIONS, Name
from simulator import KINDS, Site, play, scenarios, sites, told

SEEDS = 2000  # of each scenario and kind, at most
STEPS = 400_000_000  # of the simulator, for one mutant in all scenarios: half a minute or so
COVERAGE_SEEDS = 30
NO_PROTOCOL = ("sim_", "verify", "check", "repair")  # how the names of such files begin
COVERAGE_FIRST = 1_000_000  # other seeds than those that hunt

# Where mutants are caught that show in one run of 30 (recover.c) or 250 (house.c): looked for there
# first, from a seed on that has shown them, and in so many runs that they show even after a change
# of the protocol that gives each seed other schedules.
RARE: dict[Name, tuple[str, str, range]] = {
    ("house.c", "bl_lobby_look", "verify", 0): ("lobby", "coherent", range(380, 1880)),
    ("recover.c", "bl_recover_extents", "stream_line", 0): (
        "system",
        "non-coherent",
        range(86, 386),
    ),
}


@dataclass(frozen=True)
class Field:
    """A scenario on a kind of memory; how often each site did something in a second of it."""

    scenario: str
    kind: str
    hits: tuple[float, ...]


@dataclass(frozen=True)
class Catch:
    """Who noticed a mutant; ``scenario`` is empty if nobody did in all ``runs``."""

    runs: int
    scenario: str = ""
    kind: str = ""
    seed: int = 0
    what: str = ""


def name_of(site: Site) -> Name:
    """How the exemptions name a site."""
    return (site.file, site.function, site.verb, site.index)


def protocol_sites() -> list[Site]:
    """The sites of protocol files: all but the simulator's scenarios, ``beluga verify``, which
    tries the memory and is tried in test_verify.py, and ``pool check``, which only looks."""
    return [site for site in sites() if not site.file.startswith(NO_PROTOCOL)]


def mutants() -> list[Site]:
    """The sites that somebody has to miss."""
    return [site for site in protocol_sites() if name_of(site) not in EXEMPTIONS]


def survey_one(where: tuple[str, str]) -> Field:
    """Which sites a scenario reaches: runs without a mutant, which have to come out right."""
    scenario, kind = where
    start = time.process_time()
    runs = []
    for seed in range(COVERAGE_FIRST, COVERAGE_FIRST + COVERAGE_SEEDS):
        still_alive()
        runs.append(play(scenario, seed, kind=kind))
    wrong = [f"{scenario}:{run.seed}:{kind} {told(run.result)}" for run in runs if run.result]
    if wrong:
        raise RuntimeError(f"fails without a mutant: {', '.join(wrong)}")
    spent = time.process_time() - start
    reached = (sum(run.hits[number] > 0 for run in runs) for number in range(len(runs[0].hits)))
    return Field(scenario, kind, tuple(count / spent for count in reached))


def survey(processes: int) -> list[Field]:
    """All scenarios on all kinds of memory."""
    where = [(scenario, kind) for scenario in scenarios() for kind in KINDS]
    fields = []
    for (scenario, kind), field in answers(where, survey_one, processes=processes):
        if isinstance(field, Death):
            raise RuntimeError(f"{scenario} ({kind}) fails without a mutant: {field}")
        fields.append(field)
    return sorted(fields, key=lambda field: (field.scenario, field.kind))


@dataclass(frozen=True)
class Hunt:
    """One mutant, where to look for it, and until when (``time.monotonic``; 0: no limit)."""

    site: Site
    fields: tuple[Field, ...]
    seeds: int
    until_s: float


def hunts(found: list[Site], fields: list[Field], seeds: int, until_s: float) -> Iterator[Hunt]:
    """The hunt for each mutant."""
    for site in found:
        fit = [field for field in fields if field.hits[site.number] > 0]
        fit.sort(key=lambda field: -field.hits[site.number])
        yield Hunt(site, tuple(fit), seeds, until_s)


def attempt(site: Site, scenario: str, kind: str, seed: int) -> tuple[str, int]:
    """What came of one run without the site, or nothing, and the simulator's steps in it."""
    run = play(scenario, seed, skip=site.number, kind=kind)
    if run.result == 0:
        return "", run.stat["steps"] + 1000
    if play(scenario, seed, kind=kind).result != 0:
        raise RuntimeError(f"{scenario}:{seed}:{kind} fails without a mutant")
    return told(run.result), run.stat["steps"]


def hunt(task: Hunt) -> Catch:
    """Seed after seed, until one goes wrong that is right without the mutant. The scenarios share
    the steps evenly, so the short ones have more seeds; counted in steps, what a hunt finds does
    not depend on the machine."""
    if rare := RARE.get(name_of(task.site)):
        scenario, kind, likely = rare
        for number, seed in enumerate(likely, 1):
            still_alive()
            what, _ = attempt(task.site, scenario, kind, seed)
            if what:
                return Catch(number, scenario, kind, seed, what)
    seeds = [0] * len(task.fields)
    steps = [0] * len(task.fields)
    while sum(steps) < STEPS:
        left = [i for i, seed in enumerate(seeds) if seed < task.seeds]
        if not left or (task.until_s and time.monotonic() > task.until_s):
            break
        i = min(left, key=steps.__getitem__)
        field, seed = task.fields[i], seeds[i]
        still_alive()
        what, spent = attempt(task.site, field.scenario, field.kind, seed)
        steps[i] += spent
        seeds[i] += 1
        if what:
            return Catch(sum(seeds), field.scenario, field.kind, seed, what)
    return Catch(sum(seeds))


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 if all mutants were caught."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each scenario (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0, help="for all together (no limit)")
    parser.add_argument("--site", default="", help="only places that contain this text")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="one object per mutant")
    options = parser.parse_args(arguments)
    until_s = time.monotonic() + options.seconds if options.seconds else 0.0
    chosen = [site for site in mutants() if options.site in str(site)]
    fields = survey(options.processes)
    count = 0
    for task, answer in answers(
        hunts(chosen, fields, options.seeds, until_s), hunt, processes=options.processes
    ):
        catch = answer
        if isinstance(answer, Death):  # the survey has shown that none dies without a mutant
            catch = Catch(0, task.fields[0].scenario, what=str(answer))
        count += bool(catch.scenario)
        if options.json:
            print(json.dumps({"site": str(task.site), **asdict(catch)}), flush=True)
        elif not catch.scenario:
            print(f"survived {catch.runs} runs: {task.site}", flush=True)
    if not options.json:
        print(f"{len(EXEMPTIONS)} sites are exempt, with reasons, in tests/sim/exemptions.py")
    print(f"caught {count} of {len(chosen)}")
    return 0 if count == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
