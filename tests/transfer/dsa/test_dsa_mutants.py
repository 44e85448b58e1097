# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The schedules of ``dsa_schedule.py`` detect bugs planted in the DSA engine's resumption.

Each bug is a change of one line of a copy of the C core, which is compiled and run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dsa_build import GCC, built, opened_pool
from dsa_schedule import Library, Schedule, WrongBytesError, play

from beluga.pool import Pool

pytestmark = pytest.mark.slow

TRIES = 40

# Each entry is a file, a line, and its replacement.
MUTANTS = {
    "none": ("", "", ""),
    "a resumed copy starts its sum anew": (
        "dsa/work.c",
        "work->crc = (uint32_t)record->crc;",
        "work->crc = bytes < descriptor->size ? 0 : (uint32_t)record->crc;",
    ),
    "a resumed copy keeps the seed it began with": (
        "dsa/work.c",
        "if (bl_dsa_opcode(descriptor) == BL_DSA_COPY_CRC)",
        "if (bl_dsa_opcode(descriptor) == BL_DSA_COPY_CRC && bytes == descriptor->size)",
    ),
    "a resumed copy skips a byte": (
        "dsa/work.c",
        "work->done += bytes;",
        "work->done += bytes + (bytes > 0 && bytes < descriptor->size);",
    ),
    "a resumed copy repeats a byte": (
        "dsa/work.c",
        "work->done += bytes;",
        "work->done += bytes - (bytes > 1 && bytes < descriptor->size);",
    ),
    "only the target moves on": (
        "dsa/work.c",
        "uint64_t memory = piece->address + work->done;",
        "uint64_t memory = piece->address;",
    ),
    "a fault counts as done": (
        "dsa/work.c",
        "if (status == BL_DSA_SUCCESS) {",
        "if (status == BL_DSA_SUCCESS || status == BL_DSA_PAGE_FAULT) {",
    ),
    "what a batch did not reach counts as done": (
        "dsa/work.c",
        "if (status == BL_DSA_SUCCESS) {",
        "if (status == BL_DSA_SUCCESS || status == BL_DSA_NONE) {",
    ),
    "a record answers for its neighbour's work": (
        "dsa/engine.c",
        "bl_dsa_record record = bl_dsa_record_look(&group->records[i]);",
        "bl_dsa_record record = bl_dsa_record_look(&group->records[i ^ (group->count > 1 && "
        "i + 1 < group->count)]);",
    ),
    "the last line is not blanked": (
        "dsa/work.c",
        "return transfer->is_read ? 0 : bl_dsa_work_blank(work);",
        "return 0;",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.skipif(not GCC, reason="needs gcc")
def test_a_planted_bug_is_detected(long_pool: Pool, tmp_path: Path, name: str) -> None:
    library = built(tmp_path, [MUTANTS[name]] if name != "none" else [])
    with opened_pool(library, long_pool) as handle:
        if name == "none":
            play_all(library, handle, long_pool)
        else:
            with pytest.raises(WrongBytesError):
                play_all(library, handle, long_pool)


def play_all(library: Library, handle: Any, pool: Pool) -> None:
    """Schedules with page faults and batches that end early, with one descriptor and with many."""
    rng = np.random.default_rng(3)
    for seed in range(TRIES):
        schedule = Schedule(
            seed=seed,
            sizes=tuple(rng.integers(1, 3000, rng.integers(2, 9)).tolist()),
            block_count=3,
            chunk_size=1024,
            part=10**6,
            size_max=4096,
            batch_max=(0, 32)[seed % 2],
            depth=8,
            flush=1,
            faults={"fault": 20_000, "list_fault": 20_000, "reorder": 30_000, "late": 10_000},
        )
        play(library, handle, pool, schedule)
