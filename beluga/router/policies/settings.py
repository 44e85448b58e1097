# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The settings of the policies, defined once: ``beluga simulate`` and ``beluga gateway`` make their
options from these fields, and both make their policies with them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from beluga.errors import RouterError


def _setting(text: str, default: Any = None, *, zero: bool = True, most: float = math.inf) -> Any:
    """Return a field with its help. ``zero`` says whether the setting may be 0, ``most`` how much
    it may be.
    """
    return dataclasses.field(default=default, metadata={"help": text, "zero": zero, "most": most})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The settings of all policies. None means the policy's own default; a policy gets only the
    settings that it has. Raises RouterError for a number that is out of range.
    """

    credit: float | None = _setting("How much a block in a worker's own GPU memory counts.")
    host_credit: float | None = _setting("How much a block in a worker's own DRAM counts.")
    disk_credit: float | None = _setting("How much a block on a worker's own disk counts.")
    shared_credit: float = _setting(
        "How much linear and lmetric credit a block in the pool, 0 to 1.", 0.5, most=1.0
    )
    decay: float | None = _setting("How fast --credit falls as a worker's prefills accumulate.")
    prefill_scale: float | None = _setting("The weight of prefills beside decode blocks.")
    request_cost: float | None = _setting("What each request of a worker costs, in blocks.")
    temperature: float | None = _setting("The temperature of a random draw; 0 takes the best.")
    track_prefill: bool | None = _setting("Whether prefills that wait count.")
    decode_router: bool | None = _setting("Whether workers only decode: credits lower the decode.")
    balance_abs: int | None = _setting("Loads are apart if they differ by more requests.")
    balance_rel: float | None = _setting("Loads are apart only above this ratio.")
    usage_spread: float | None = _setting("Loads are apart if cache usages differ by more.")
    usage_ceiling: float | None = _setting("Loads are apart if a cache usage is greater.")
    cache_threshold: float | None = _setting(
        "The share of a prompt that must match what was sent to a worker.", most=1.0
    )
    tree_blocks_max: int | None = _setting("How many sent blocks are remembered.", zero=False)
    fetch_threshold: float | None = _setting(
        "A worker fetches a prefix that is longer than its own by this ratio."
    )
    ttft_objective_s: float | None = _setting(
        "The goal for the TTFT: min-ttft refuses what would take longer, planners add workers.",
        zero=False,
    )
    between_tokens_objective_s: float | None = _setting(
        "The goal for the time between tokens: min-ttft refuses what would take longer.",
        zero=False,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), "at least" if field.metadata["zero"] else ">"
            if value is None or isinstance(value, bool):
                continue
            if not 0 <= value < math.inf or (value == 0 and not field.metadata["zero"]):
                raise RouterError(f"{field.name} has to be {least} 0, and finite, not {value}")
            if value > field.metadata["most"]:
                raise RouterError(
                    f"{field.name} is from 0 to {field.metadata['most']}, not {value}"
                )

    def given(self) -> dict[str, object]:
        """Return the settings that have a value, by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    def chosen(self) -> dict[str, object]:
        """Return the settings that differ from the defaults, by name."""
        usual = PolicySettings()
        return {
            name: value for name, value in self.given().items() if value != getattr(usual, name)
        }
