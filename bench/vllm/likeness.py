# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of answers: whether a hit gives the right answer, and why a prompt was not a full
hit.

In bfloat16 an answer depends on the shapes of the computed chunks: the rest of a prompt after a hit
is rounded differently than the whole prompt. So a hit is compared with an answer that was computed
in the same steps: a hit of all blocks with the engine's own cache, and no hit with the miss. A
partial hit cannot be compared.
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


def loaded_tokens(reply: Reply, block_tokens: int) -> int:
    """Return the tokens that were found and also loaded. vLLM counts announced tokens as cached."""
    failed = int(reply.get("figures", {}).get("load_failed_blocks", 0))
    return max(0, int(reply["cached_tokens"]) - failed * block_tokens)


def identical(hit: Reply, *, loaded: int, whole: int, miss: Reply, local: Reply) -> bool | None:
    """Return whether tokens and first-token logprobs of a hit equal those of the same computation
    exactly.

    ``loaded`` of ``whole`` tokens were loaded. Returns None for a partial hit, which cannot be
    compared.
    """
    if loaded >= whole:
        other = local
    elif loaded == 0:
        other = miss
    else:
        return None
    return all(hit[part] == other[part] for part in ("tokens", "logprobs"))


def agreed(results: Iterable[bool | None]) -> bool:
    """Return whether no result of :func:`identical` is False and at least one is True."""
    known = [result for result in results if result is not None]
    return bool(known) and all(known)


def faults(*figures: Mapping[str, float]) -> dict[str, int]:
    """Return the connector's counters that explain a miss. The result is empty if none does."""
    sums = {name: sum(figure.get(name, 0) for figure in figures) for name in _FAULTS}
    return {name: int(value) for name, value in sums.items() if value}


def warnings(log: str) -> list[str]:
    """Return the connector's warnings in an engine's log: which call, why, after how long."""
    return [
        line[line.index("beluga") :]
        for line in log.splitlines()
        if "WARNING" in line and "beluga" in line
    ]
