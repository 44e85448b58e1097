# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs that once failed: one small file each in ``regressions/``, replayed by every test run. After
a change of the protocol a seed leads to another schedule; the file still shows what the seed once
found.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from simulator import KINDS, scenarios

FOLDER = Path(__file__).parent / "regressions"


@dataclass(frozen=True)
class Case:
    """One run, and its error when it was found."""

    scenario: str
    seed: int
    kind: str = "software"
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.scenario}:{self.seed}:{self.kind}"


def parse(text: str) -> Case:
    """Parse a case from ``SCENARIO:SEED[:KIND]``. Raises ``ValueError`` for an unknown name."""
    scenario, seed, *kind = text.split(":")
    case = Case(scenario, int(seed), *kind)
    if case.scenario not in scenarios() or case.kind not in KINDS:
        raise ValueError(f"no scenario or kind like this: {text}")
    return case


def keep(case: Case) -> Path:
    """Write a case to a file, which is returned."""
    path = FOLDER / f"{case.scenario}-{case.seed}-{case.kind}.json"
    path.write_text(json.dumps(asdict(case), indent=4) + "\n")
    return path


def kept() -> list[Case]:
    """Return all recorded cases."""
    return [Case(**json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]
