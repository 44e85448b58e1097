# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The accounts of several workers as arrays of pointers, for C."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from beluga._ffi import ffi, lib
from beluga.router.candidates import Candidates
from beluga.router.load.blocks import ALONE, ActiveBlocks
from beluga.router.load.prefill import ActivePrefills
from beluga.router.worker import Load, Worker


class Account(Protocol):
    """The account of one worker."""

    load: Load
    blocks: ActiveBlocks
    prefills: ActivePrefills


class Group:
    """Several workers with their accounts."""

    def __init__(self, workers: Sequence[Worker], accounts: Sequence[Account]) -> None:
        self.workers = list(workers)
        self._accounts = tuple(accounts)  # keeps the C structs alive
        self._loads = ffi.new("bl_load *[]", [one.load.row for one in accounts])
        self._blocks = ffi.new("bl_active *[]", [one.blocks.handle for one in accounts])
        self._prefills = ffi.new("bl_prefills *[]", [one.prefills.row for one in accounts])

    def refresh(self, now: float) -> None:
        """Update the estimates of remaining prefills."""
        lib.bl_loads_refresh(self._loads, self._prefills, len(self._accounts), now)

    def candidates(self, sequence: array[int], *, reuse: bool) -> Candidates:
        """Return the workers with their loads and with what a request would add to them. Without
        ``reuse`` every block is new.
        """
        made = Candidates(self.workers)
        lib.bl_candidates_fill(
            self._loads,
            self._blocks if reuse else ffi.NULL,
            len(self._accounts),
            ffi.from_buffer("uint64_t[]", sequence),
            len(sequence),
            ALONE,
            len(ALONE),
            made.rows,
        )
        return made
