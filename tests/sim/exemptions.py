# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The mutants that the simulator need not detect, from exemptions.txt."""

import re
from pathlib import Path

Name = tuple[str, str, str, int]
"""The file, function, verb or condition of a site, and its index among equal ones there."""

_MUTANT = re.compile(r"(\S+) (\S+) (.+) (\d+) (\D+)")


def _rows() -> list[tuple[Name, str, str]]:
    """Return the site, the change and the reason of each exemption."""
    text = Path(__file__).with_suffix(".txt").read_text()
    rows = []
    for paragraph in text.split("\n\n")[1:]:
        reason, *mutants = (" ".join(row.split()) for row in re.split(r"\n {4}(?! )", paragraph))
        for mutant in mutants:
            match = _MUTANT.fullmatch(mutant)
            assert match is not None, mutant
            file, function, verb, index, change = match.groups()
            rows.append(((file, function, verb, int(index)), change, reason))
    return rows


EXEMPT = _rows()


def _of(change: str) -> dict[Name, str]:
    return {name: reason for name, given, reason in EXEMPT if given == change}


# A fence, an invalidation or a hint that may be omitted: if it is late, or covers a part of its
# range, or another range, it does more than nothing.
_WEAK = ("fence_store", "fence_full", "invalidate", "prefetch_line", "prefetch_range")
_NO_WORSE = {name: reason for name, reason in _of("left out").items() if name[2] in _WEAK}

# The exempt sites of each change in simulator.CHANGES.
EXEMPTIONS: dict[str, dict[Name, str]] = {
    "left out": _of("left out"),
    "with a line more": _of("with a line more"),
    "true": _of("true"),
    "false": _of("false"),
    "deferred": _NO_WORSE | _of("deferred"),
    "without its first line": _NO_WORSE,
    "without its last line": _NO_WORSE | _of("without its last line"),
    "in the other half": _NO_WORSE | _of("in the other half"),
}
