# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the policies share: the declaration of settings, the seeded generator, and the choice."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any, ClassVar

from beluga.errors import NoWorkersError
from beluga.router.policy import Candidate, Candidates, Choice, Query


@dataclasses.dataclass(frozen=True, slots=True)
class PolicySetting:
    """A setting of a policy: its default, meaning and range. A default of None means that the
    setting is off; its values are then numbers with fractions.
    """

    default: float | bool | None
    help: str
    value_min: float = 0.0
    value_max: float = math.inf
    above_min: bool = False  # whether values must be greater than the minimum

    @property
    def range(self) -> str:
        """The allowed values in words."""
        if isinstance(self.default, bool):
            return "true or false"
        start = "a whole number, " if isinstance(self.default, int) else ""
        if math.isfinite(self.value_max):
            return f"{start}{self.value_min:g} to {self.value_max:.10g}"
        return (
            f"above {self.value_min:g}" if self.above_min else f"{start}{self.value_min:g} or more"
        )

    @property
    def default_text(self) -> str:
        """The default as it is written on the command line."""
        if self.default is None or isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}"

    def read(self, value: object) -> float | bool | None:
        """Convert a value, or its text. Raises ValueError if it is not in the range."""
        text = str(value).lower()
        if self.default is None and text == "none":
            return None
        if isinstance(self.default, bool):
            return {"true": True, "false": False}[text] if text in ("true", "false") else _refused()
        number = int(text) if isinstance(self.default, int) else float(text)
        fits = self.value_min <= number <= self.value_max and math.isfinite(number)
        return number if fits and not (self.above_min and number == self.value_min) else _refused()


def _refused() -> float:
    raise ValueError


def setting(
    default: float | bool | None,
    text: str,
    *,
    value_min: float = 0.0,
    value_max: float = math.inf,
    above_min: bool = False,
) -> Any:
    """Declare a field of a policy that ``--policy NAME:KEY=VALUE`` sets."""
    declared = PolicySetting(default, text, value_min, value_max, above_min)
    return dataclasses.field(default=default, metadata={"setting": declared})


@dataclasses.dataclass(kw_only=True)
class SeededPolicy(ABC):
    """A policy with a random generator: the same seed gives the same choices."""

    seed: int = 0
    random: Random = dataclasses.field(init=False, repr=False)

    name: ClassVar[str]  # on the command line and in logs
    uses_overlap: ClassVar[bool]  # False: callers need not query an index of caches
    uses_estimator: ClassVar[bool] = False  # whether it has the field ``estimator``

    def __post_init__(self) -> None:
        self.random = Random(self.seed)  # noqa: S311  ties between workers, not secrets

    @abstractmethod
    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        """Choose a candidate. Raises the errors of :class:`beluga.router.Policy`."""


def as_table(candidates: Sequence[Candidate]) -> Candidates:
    """Convert candidates to a table. Raises NoWorkersError if there are none."""
    if not candidates:
        raise NoWorkersError(
            "no worker may take the request; add one, or wait until one is healthy"
        )
    return Candidates.of(candidates)


def lowest(costs: Sequence[float], random: Random) -> int:
    """Return the index of the lowest cost; equal costs are equally likely."""
    best = min(costs)
    if costs.count(best) == 1:
        return costs.index(best)
    return random.choice([index for index, cost in enumerate(costs) if cost == best])


def draw(costs: Sequence[float], temperature: float, random: Random) -> int:
    """Return the index of a random cost. At temperature 0 it is the lowest, with random ties;
    otherwise Dynamo's softmax over costs scaled to 0..1: p_i ~ exp(-(cost_i - min) / ((max - min) *
    temperature)).
    """
    if temperature <= 0:
        return lowest(costs, random)
    cost_min, cost_max = min(costs), max(costs)
    if cost_min == cost_max:
        return random.randrange(len(costs))
    scale = (cost_max - cost_min) * temperature
    sums = list(accumulate(math.exp((cost_min - cost) / scale) for cost in costs))
    sample = random.random() * sums[-1]
    return next(index for index, reached in enumerate(sums) if reached >= sample)


def choice_of(
    query: Query, candidate: Candidate, cost: float = 0.0, costs: Sequence[float] = ()
) -> Choice:
    """Return the choice of a candidate, with the share of the request that its cached blocks save.
    ``costs`` are those of all candidates.
    """
    cached = min(candidate.overlap.blocks * query.block_size, query.isl)
    hit_rate = cached / query.isl if cached else 0.0
    return Choice(candidate.worker, candidate.overlap, hit_rate, cost, costs=costs)
