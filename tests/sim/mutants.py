# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Mutants of the protocol: each changes one thing, and some scenario must detect it.

=========== ======================================================================================
site        its mutants
=========== ======================================================================================
verb, check omitted
verb        in the other half, where the server has two copies of what it reads or writes
not a load  deferred: done after the next verb of its process, where their order can matter
range       without its first line; without its last line; for streams also with one more line
condition   a plain condition of the protocol's C is always ``true`` or always ``false``, where some
            scenario decides it the other way; Python tests cover the other conditions
=========== ======================================================================================

The build lists its sites (``bl_sim_site_get``); conditions.py adds the conditions. Runs without a
mutant show where a change could make a difference. The run that caught a mutant is stored in
known_catches.json and tried first, so that most mutants take one run. A change of the protocol
gives each seed another schedule; then further seeds are run in the scenarios in which the mutant
matters, first in those in which it matters most often per step.
"""

import argparse
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import conditions
import simulator
from children import Death, answers, still_alive
from exemptions import EXEMPTIONS, Name
from simulator import CHANGES, KINDS, Site, describe, play, scenarios, sites

from beluga.child import run_program

SEEDS = 2000  # for each scenario and kind, at most
STEPS = 400_000_000  # steps of the simulator, for one mutant in all scenarios: half a minute or so
COVERAGE_SEEDS = 10
NO_PROTOCOL = ("sim/", "verify/", "check/")  # folders of csrc/
COVERAGE_FIRST = 1_000_000  # seeds that the hunts do not use
KNOWN = Path(__file__).with_name("known_catches.json")
PLACE = struct.Struct("qq")  # scenario, kind and seed of a run


@dataclass(frozen=True)
class Mutant:
    """A site and how it is changed (``simulator.CHANGES``)."""

    site: Site
    change: str

    def __str__(self) -> str:
        return f"{self.site} {self.change}"

    @property
    def name(self) -> str:
        """A name that does not depend on line numbers."""
        site = self.site
        return f"{site.file} {site.function} {site.verb} {site.index} {self.change}"


@dataclass(frozen=True)
class Field:
    """A scenario on a kind of memory; for each site number and change, the number of runs per
    simulator step in which the change would have made a difference.
    """

    scenario: str
    kind: str
    hits: tuple[float, ...]

    def matters(self, mutant: Mutant) -> float:
        """Return this number for one mutant."""
        return self.hits[mutant.site.number * len(CHANGES) + CHANGES[mutant.change]]


@dataclass(frozen=True)
class Catch:
    """The run that detected a mutant; ``scenario`` is empty if none of ``runs`` did. With ``cut``,
    the time ran out.
    """

    runs: int
    scenario: str = ""
    kind: str = ""
    seed: int = 0
    what: str = ""
    cut: bool = False


def name_of(site: Site) -> Name:
    """Return the name that the exemptions give a site."""
    return (site.file, site.function, site.verb, site.index)


def protocol_sites() -> list[Site]:
    """Return the sites of protocol files: all but the simulator's scenarios, ``beluga verify``,
    which tests the memory (test_device_agent.py tests it), and ``pool check``, which only reads.
    """
    return [site for site in sites() if not site.file.startswith(NO_PROTOCOL)]


@cache
def known_catches() -> dict[str, tuple[str, str, int]]:
    """Return the scenario, kind and seed that caught a mutant, by its name."""
    return {name: tuple(run) for name, run in json.loads(KNOWN.read_text()).items()}


def mutants(fields: list[Field]) -> list[Mutant]:
    """Return all mutants: each omission, and each other change where it makes a difference."""
    return [
        mutant
        for mutant in changes()
        if mutant.change == "left out"
        or mutant.name in known_catches()
        or any(field.matters(mutant) for field in fields)
    ]


def changes() -> Iterator[Mutant]:
    """Return every site with every change that exists."""
    for site in protocol_sites():
        if site.drop:
            values = ["true", "false"] if site.drop == "either" else [site.drop]
        else:
            values = [change for change in CHANGES if change not in ("true", "false")]
        for change in values:
            yield Mutant(site, change)


def undecided(found: list[Mutant]) -> list[Mutant]:
    """Return the conditions that never have, in any scenario, the value that drops them."""
    there = {mutant.name for mutant in found}
    return [m for m in changes() if m.site.drop and m.name not in there and not exempt(m)]


def exempt(mutant: Mutant) -> bool:
    """Whether no scenario need detect it. A mutant that was caught once must be caught again."""
    named = name_of(mutant.site) in EXEMPTIONS.get(mutant.change, {})
    return named and mutant.name not in known_catches()


def survey_one(where: tuple[str, str]) -> Field:
    """Survey the sites that a scenario reaches, by runs without a mutant, which must pass."""
    scenario, kind = where
    runs = []
    for seed in range(COVERAGE_FIRST, COVERAGE_FIRST + COVERAGE_SEEDS):
        still_alive()
        runs.append(play(scenario, seed, kind=kind, matters=True))
    wrong = [f"{scenario}:{run.seed}:{kind} {describe(run.result)}" for run in runs if run.result]
    if wrong:
        raise RuntimeError(f"fails without a mutant: {', '.join(wrong)}")
    spent = sum(run.stat["steps"] for run in runs)
    reached = (sum(map(bool, counts)) for counts in zip(*(r.matters for r in runs), strict=True))
    return Field(scenario, kind, tuple(count / spent for count in reached))


def survey(processes: int, only: str = "") -> list[Field]:
    """Survey all scenarios, or those whose name contains ``only``, on all kinds of memory."""
    where = [(scenario, kind) for scenario in scenarios() if only in scenario for kind in KINDS]
    fields = []
    for (scenario, kind), field in answers(where, survey_one, processes=processes):
        if isinstance(field, Death):
            raise RuntimeError(f"{scenario} ({kind}) fails without a mutant: {field}")
        fields.append(field)
    return sorted(fields, key=lambda field: (field.scenario, field.kind))


@dataclass(frozen=True)
class Hunt:
    """One mutant, the scenarios to try, the number of steps, and the deadline (``time.monotonic``;
    0: no limit). ``place`` is shared with the parent: the current run.
    """

    mutant: Mutant
    fields: tuple[Field, ...]
    weights: tuple[int, ...]
    seeds: int
    steps: int
    until_s: float
    place: memoryview


def weight(field: Field, mutant: Mutant) -> int:
    """Return the weight of a scenario in a hunt: it is greater if it caught other mutants of the
    function.
    """
    own = known_catches().get(mutant.name, ("", "", 0))
    like = f"{mutant.site.file} {mutant.site.function} "
    place = (field.scenario, field.kind)
    alike = sum(name.startswith(like) and run[:2] == place for name, run in known_catches().items())
    return 1 + 30 * (own[:2] == place) + min(10, 2 * alike)


def hunts(found: list[Mutant], fields: list[Field], options: argparse.Namespace) -> Iterator[Hunt]:
    """Return the hunt for each mutant."""
    until_s = time.monotonic() + options.seconds if options.seconds else 0.0
    places = memoryview(mmap.mmap(-1, max(1, len(found)) * PLACE.size))
    for i, mutant in enumerate(found):
        known = known_catches().get(mutant.name, ("", "", 0))
        fit = [f for f in fields if f.matters(mutant) or (f.scenario, f.kind) == known[:2]]
        fit.sort(key=lambda f: ((f.scenario, f.kind) != known[:2], -f.matters(mutant)))
        weights = tuple(weight(field, mutant) for field in fit)
        place = places[i * PLACE.size : (i + 1) * PLACE.size]
        yield Hunt(mutant, tuple(fit), weights, options.seeds, options.steps, until_s, place)


def attempt(task: Hunt, field: int, seed: int) -> tuple[str, int]:
    """Try the mutant in one run. Returns the catch or None, and the simulator's steps."""
    mutant, scenario, kind = task.mutant, task.fields[field].scenario, task.fields[field].kind
    PLACE.pack_into(task.place, 0, field, seed)
    still_alive()
    run = play(scenario, seed, skip=mutant.site.number, change=mutant.change, kind=kind)
    if run.result == 0:
        return "", run.stat["steps"] + 1000
    if play(scenario, seed, kind=kind).result != 0:
        raise RuntimeError(f"{scenario}:{seed}:{kind} fails without a mutant")
    return describe(run.result), run.stat["steps"]


def hunt(task: Hunt) -> Catch:
    """Try the stored run, then seed after seed, until one fails that passes without the mutant. The
    scenarios share the steps by their weights, so the short ones have more seeds. The limit is in
    steps, so that the result does not depend on the machine.
    """
    known = known_catches().get(task.mutant.name)
    if known and task.fields and (task.fields[0].scenario, task.fields[0].kind) == known[:2]:
        what, _ = attempt(task, 0, known[2])
        if what:
            return Catch(1, *known, what)
    weights = task.weights
    seeds = [0] * len(task.fields)
    steps = [0] * len(task.fields)
    while sum(steps) < task.steps:
        left = [i for i, seed in enumerate(seeds) if seed < task.seeds]
        if not left:
            break
        if task.until_s and time.monotonic() > task.until_s:
            return Catch(sum(seeds), cut=True)
        i = min(left, key=lambda i: steps[i] / weights[i])
        seed = seeds[i]
        what, spent = attempt(task, i, seed)
        steps[i] += spent
        seeds[i] += 1
        if what:
            return Catch(sum(seeds), task.fields[i].scenario, task.fields[i].kind, seed, what)
    return Catch(sum(seeds))


def caught(task: Hunt, answer: Catch | Death) -> Catch:
    """Return the result of a hunt. The survey has shown that no scenario dies without a mutant."""
    if isinstance(answer, Catch):
        return answer
    field, seed = PLACE.unpack_from(task.place)
    return Catch(0, task.fields[field].scenario, task.fields[field].kind, seed, str(answer))


def remember(catches: dict[str, Catch], there: set[str]) -> None:
    """Write the catching runs; mutants that no longer exist are dropped."""
    known_catches.cache_clear()  # another run may have stored something meanwhile
    known = {name: run for name, run in known_catches().items() if name in there}
    known |= {name: (c.scenario, c.kind, c.seed) for name, c in catches.items() if c.scenario}
    lines = [f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(known.items())]
    KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def arguments_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each scenario (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="for each mutant (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0, help="for all together (no limit)")
    parser.add_argument("--kind", choices=(*CHANGES, "condition"), help="only mutants like this")
    parser.add_argument("--site", default="", help="only mutants whose line contains this text")
    parser.add_argument("--scenario", default="", help="only scenarios whose name contains this")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="one object per mutant")
    parser.add_argument(
        "--undecided", action="store_true", help="only list the conditions that nobody tries"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--remembered", action="store_true", help="only mutants caught before")
    which.add_argument("--new", action="store_true", help="only mutants never caught before")
    parser.add_argument("--update", action="store_true", help="remember what was caught where")
    return parser.parse_args(arguments)


def report(
    options: argparse.Namespace, catches: dict[str, Catch], tried: int, exempted: int, never: int
) -> int:
    """Print the totals, and return the exit status."""
    count = sum(bool(catch.scenario) for catch in catches.values())
    cut = sum(catch.cut for catch in catches.values())
    if not options.json:
        print(f"{exempted} mutants are exempt, with reasons in tests/sim/exemptions.txt")
        print(f"{never} conditions are decided one way in all scenarios: --undecided lists them")
        if cut:
            print(f"no time for {cut}")
    print(f"caught {count} of {tried - cut}")
    return 0 if count == tried - cut else 1


def run(options: argparse.Namespace) -> int:
    """Try the mutants that the options choose."""
    fields = survey(options.processes, options.scenario)
    everything = mutants(fields)
    kinds = ("true", "false") if options.kind == "condition" else (options.kind,)
    chosen = [
        mutant
        for mutant in everything
        if (not options.kind or mutant.change in kinds)
        and options.site in str(mutant)
        and not (options.remembered and mutant.name not in known_catches())
        and not (options.new and mutant.name in known_catches())
    ]
    never = undecided(everything)
    if options.undecided:
        print(*never, sep="\n")
        return 0
    tried = [mutant for mutant in chosen if not exempt(mutant)]
    there = {mutant.name for mutant in everything if not exempt(mutant)}
    catches: dict[str, Catch] = {}
    for task, answer in answers(hunts(tried, fields, options), hunt, processes=options.processes):
        catch = catches[task.mutant.name] = caught(task, answer)
        if options.json:
            print(json.dumps({"mutant": str(task.mutant), **asdict(catch)}), flush=True)
        elif not catch.scenario:
            word = "no time" if catch.cut else "survived"
            print(f"{word}, {catch.runs} runs: {task.mutant}", flush=True)
        if options.update and catch.runs > 1:
            remember(catches, there)
    if options.update:
        remember(catches, there)
    return report(options, catches, len(tried), len(chosen) - len(tried), len(never))


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 0 if all mutants were caught, or the time ran out."""
    options = arguments_of(arguments)
    with simulator.using(conditions.build()):
        return run(options)


if __name__ == "__main__":
    run_program(main)
