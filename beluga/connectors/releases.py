# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The supported and tested releases of the engines."""

from __future__ import annotations

import re
from dataclasses import dataclass

Release = tuple[int, ...]

_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(\.?(?:dev|a|b|rc))?")


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases of one engine: from ``first`` up to, but not including, ``end``; None means no
    end.
    """

    engine: str
    first: Release
    end: Release | None
    refused: bool  # whether the connector rejects others, in which it would possibly fail

    @property
    def requirement(self) -> str:
        """The requirement in pip's syntax."""
        end = "" if self.end is None else f",<{_shown(self.end)}"
        return f"{self.engine}>={_shown(self.first)}{end}"

    def has(self, version: str) -> bool | None:
        """Whether ``version`` is one of them; None if it is not a version."""
        match = _RELEASE.match(version)
        if match is None:
            return None
        release = tuple(int(part or 0) for part in match.groups()[:3])
        width = len(release)
        first, end = _padded(self.first, width), self.end and _padded(self.end, width)
        early = match[4] is not None  # a pre-release
        if release < first or (release == first and early):
            return False
        return end is None or release < end


def _padded(release: Release, width: int) -> Release:
    return release + (0,) * (width - len(release))


def _shown(release: Release) -> str:
    return ".".join(map(str, release))


RELEASES: dict[str, Releases] = {
    each.engine: each
    for each in (
        Releases("vllm", (0, 32), (0, 34), refused=False),
        Releases("sglang", (0, 5, 20), None, refused=True),
        Releases("lmcache", (0, 5, 6), (0, 6), refused=False),
    )
}
