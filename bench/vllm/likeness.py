# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Whether a hit answers as it must, and why a prompt was not found whole.

In bfloat16 an answer depends on the shapes of the chunks that were computed: what a hit leaves to
compute rounds otherwise than all of the prompt does. So a hit is held against what was computed in
the same steps: one of all blocks against the engine's own cache, none at all against the miss. Of a
part nothing can be said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Reply = dict[str, Any]

_FAULTS = (
    "lookup_failures",
    "load_failures",
    "save_failures",
    "load_failed_blocks",
    "mismatches",
    "save_skipped_blocks",
)


def found_tokens(reply: Reply, block_tokens: int) -> int:
    """Of a prompt, what was found and also loaded: vLLM counts as cached what it was promised."""
    failed = int(reply.get("figures", {}).get("load_failed_blocks", 0))
    return max(0, int(reply["cached_tokens"]) - failed * block_tokens)


def identical(hit: Reply, *, found: int, whole: int, miss: Reply, local: Reply) -> bool | None:
    """Tokens and first-token logprobs of a hit are, bit for bit, those of the same computation.

    ``found`` of ``whole`` tokens were loaded. None where only a part was: nothing is like it.
    """
    if found >= whole:
        other = local
    elif found == 0:
        other = miss
    else:
        return None
    return all(hit[part] == other[part] for part in ("tokens", "logprobs"))


def agreed(results: Iterable[bool | None]) -> bool:
    """Of several of :func:`identical`: none differed, and something could be said of one."""
    known = [one for one in results if one is not None]
    return bool(known) and all(known)


def faults(*figures: Mapping[str, float]) -> dict[str, int]:
    """What of these counters of the connector explains a miss; empty if nothing does."""
    sums = {name: sum(one.get(name, 0) for one in figures) for name in _FAULTS}
    return {name: int(value) for name, value in sums.items() if value}


def warnings(log: str) -> list[str]:
    """The connector's own warnings in an engine's log: which call, why, after how long."""
    return [
        line[line.index("beluga") :]
        for line in log.splitlines()
        if "WARNING" in line and "beluga" in line
    ]
