# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The settings of the policies, defined once: ``beluga simulate`` and ``beluga gateway`` generate
their options from these fields, and make their policies with them. They are apart from the
policies, because the help of these commands needs neither those nor numpy.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from beluga.errors import RouterError


def _setting(text: str, default: Any = None, *, zero: bool = True, most: float = math.inf) -> Any:
    """Return a field with its help text. ``zero`` allows 0, and ``most`` is the upper bound."""
    return dataclasses.field(default=default, metadata={"help": text, "zero": zero, "most": most})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The settings of all policies. None means the policy's own default; a policy gets only the
    settings that it has. Raises RouterError for a number that is out of range.
    """

    credit: float | None = _setting("The weight of a block in a worker's own GPU memory.")
    host_credit: float | None = _setting("The weight of a block in a worker's own DRAM.")
    disk_credit: float | None = _setting("The weight of a block on a worker's own disk.")
    shared_credit: float = _setting(
        "The weight of a block in the pool for linear and lmetric, 0 to 1.", 0.5, most=1.0
    )
    decay: float | None = _setting("How fast --credit decreases as a worker's prefills accumulate.")
    prefill_scale: float | None = _setting("The weight of prefills relative to decode blocks.")
    request_cost: float | None = _setting("The cost of each request of a worker, in blocks.")
    temperature: float | None = _setting("The temperature of a random choice; 0 takes the best.")
    track_prefill: bool | None = _setting("Whether waiting prefills count.")
    decode_router: bool | None = _setting(
        "Whether workers only decode; credits then reduce decode blocks."
    )
    balance_abs: int | None = _setting("Loads are unbalanced if they differ by more requests.")
    balance_rel: float | None = _setting("Loads are unbalanced only above this ratio.")
    usage_spread: float | None = _setting("Loads are unbalanced if cache usages differ by more.")
    usage_ceiling: float | None = _setting("Loads are unbalanced if a cache usage is greater.")
    cache_threshold: float | None = _setting(
        "The share of a prompt that must match what was sent to a worker.", most=1.0
    )
    tree_blocks_max: int | None = _setting(
        "How many sent blocks to remember per worker.", zero=False
    )
    fetch_threshold: float | None = _setting(
        "A worker fetches a prefix that is longer than its own by this ratio."
    )
    ttft_objective_s: float | None = _setting(
        "The TTFT objective: min-ttft refuses requests that would exceed it, planners add workers.",
        zero=False,
    )
    between_tokens_objective_s: float | None = _setting(
        "The objective for the time between tokens: min-ttft refuses requests that would exceed it."
        "",
        zero=False,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), "at least" if field.metadata["zero"] else ">"
            if value is None or isinstance(value, bool):
                continue
            if not 0 <= value < math.inf or (value == 0 and not field.metadata["zero"]):
                raise RouterError(f"{field.name} is {value}, but must be {least} 0 and finite")
            if value > field.metadata["most"]:
                raise RouterError(
                    f"{field.name} is {value}, but must be from 0 to {field.metadata['most']}"
                )

    def given(self) -> dict[str, object]:
        """Return the settings that are not None, by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def chosen(self) -> dict[str, object]:
        """Return the settings that differ from the defaults, by name."""
        usual = PolicySettings()
        return {
            name: value for name, value in self.given().items() if value != getattr(usual, name)
        }
