# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sites that the simulator need not catch when they are skipped, each with its reason.

A site is named by file, function, verb and its place among equal verbs of that function. Nothing
stands here because no test for it was found: a mutant that survives is a missing test or a needless
fence, and resolved as one of them.
"""

from __future__ import annotations

Name = tuple[str, str, str, int]

_HINT = "a hint to the hardware: the load that follows reads the same line, only later"
_TOOL = "not part of the protocol: a tool that a person runs over a pool, tested on real files"
_RARE = "without it one session may have two turns before another; 'turns' sees it in 1 of 500 runs"

EXEMPTIONS: dict[Name, str] = {
    ("server.c", "bl_server_round", "fence_full", 0): _RARE,
    ("server.c", "bl_lane_gather", "prefetch_line", 0): _HINT,
    ("lane.c", "bl_lane_take", "prefetch_line", 0): _HINT,
}
