# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Flushes and fences without effect, by site: ``python tests/sim/economy.py [SEEDS]``.

A fence is idle if its process did nothing since the last fence that it would order or complete; an
invalidation is idle if its host had no copy of the line, or an up-to-date one. This is not an
error: a poller cannot predict that nothing has changed. But a site that is nearly always idle may
be superfluous.
"""

import sys
from dataclasses import dataclass

from simulator import Site, play, scenarios, sites

VERBS = ("invalidate", "fence_store", "fence_full")


@dataclass(frozen=True)
class Thrift:
    """A site, how often it was reached, and how often it was idle."""

    site: Site
    done: int
    idle: int


def thrift(seeds: int, names: tuple[str, ...] = ()) -> list[Thrift]:
    """Return every flush and fence of the protocol that ran, those that were idle most often
    first.
    """
    done: dict[int, int] = {}
    idle: dict[int, int] = {}
    for scenario in names or scenarios():
        for seed in range(seeds):
            run = play(scenario, seed)
            for number in range(1, len(run.hits)):
                done[number] = done.get(number, 0) + run.hits[number]
                idle[number] = idle.get(number, 0) + run.idle[number]
    found = [
        Thrift(s, done[s.number], idle[s.number])
        for s in sites()
        if s.verb in VERBS and not s.file.startswith("sim/") and done[s.number]
    ]
    return sorted(found, key=lambda t: (-t.idle / t.done, -t.idle))


def main() -> None:
    """Print the table."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"{'done':>10} {'idle':>10} {'':>5}  site")
    for t in thrift(seeds):
        print(f"{t.done:10} {t.idle:10} {t.idle / t.done:5.0%}  {t.site}")


if __name__ == "__main__":
    main()
