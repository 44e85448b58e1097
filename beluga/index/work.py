# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Work that the server hands out: to the service of the lower tiers (``csrc/index/lower.c``), and
to the workers of task queues (``csrc/index/task_call.c``). A task is a block that is not evicted
and that workers claim.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import ffi, lib, record_dtype
from beluga.errors import NoGrantError
from beluga.index.client import SessionCalls

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.rpc import Client


LOWER_RECORD = record_dtype("bl_lower_record")
"""A work item (``bl_lower_record``). Items of the kinds ONBOARD, PREFETCH and COLD have key, tiers
and stale. A removal has key, generation, block, and its tier as a bit in ``tiers``.
"""

LOWER_NOTE = record_dtype("bl_lower_note")
"""The outcome of a work item (``bl_lower_note``). ``stored`` and ``lost`` are tiers as bits.
``generation`` and ``block`` are those of a finished offload or removal. ``ended`` is set when a key
is no longer needed, and ``removal`` is a :class:`Removal`.
"""


class Work(enum.IntEnum):
    """The kinds of work items (``bl_lower_kind``)."""

    OFFLOAD = 0
    ONBOARD = 1
    PREFETCH = 2
    REMOVE = 3
    RETRY = 4
    COLD = 5


class Removal(enum.IntEnum):
    """The outcomes of a removal (``bl_removal``)."""

    NONE = 0
    DONE = 1
    FAILED = 2
    REPLACED = 3


class LowerWork(SessionCalls):
    """Takes work items from the server and reports their outcomes.

    All calls use one session. When it ends, the server reclaims unfinished items. All raise
    :class:`~beluga.errors.RpcError` if the server does not reply.
    """

    def __init__(self, client: Client, token: int) -> None:
        super().__init__(client)
        self._token = token

    def take(self, kind: Work, count: int, *, tier: int = 0) -> NDArray[np.void]:
        """Take at most ``count`` items, oldest first: an array of :data:`LOWER_RECORD`. Items of
        the kind RETRY are those of lower tier ``tier``, from 1 on.
        """
        records = np.zeros(count, LOWER_RECORD)
        pointer = ffi.from_buffer("bl_lower_record[]", records, require_writable=True)
        taken = self._call(
            "taking work for lower tiers",
            *(lib.bl_lower_take, self._token, kind, tier, pointer, count),
        )
        return records[:taken]

    def report(self, notes: NDArray[np.void]) -> None:
        """Report outcomes: an array of :data:`LOWER_NOTE`."""
        if not len(notes):
            return
        pointer = ffi.from_buffer("bl_lower_note[]", np.ascontiguousarray(notes))
        self._call("reporting to the server", lib.bl_lower_report, self._token, pointer, len(notes))


@dataclasses.dataclass(frozen=True, slots=True)
class TaskRecord:
    """A claimed task: the block with ``key`` (uint64, shape (1, 2)), of ``length`` bytes."""

    key: NDArray[np.uint64]
    generation: int
    block: int
    length: int
    deliveries: int  # claims since the server's start, including this one


class TaskClient(SessionCalls):
    """Task calls over a :class:`beluga.rpc.Client`. Its session holds the claims, which end with
    it.

    A queue is identified by a number: the fingerprint of its blocks. All calls raise
    :class:`~beluga.errors.RpcError` if the server does not reply.
    """

    def claim(self, queue: int, *, visible_s: float) -> TaskRecord | None:
        """Claim the oldest waiting task. It is hidden from other workers for ``visible_s`` seconds
        (at most 600).
        """
        out = ffi.new("bl_task *")
        self._call("claiming a task", lib.bl_task_claim, queue, _ms(visible_s), out)
        if out.deliveries == 0:
            return None
        return TaskRecord(
            key=np.array([[out.key[0], out.key[1]]], np.uint64),
            generation=out.generation,
            block=out.block,
            length=out.length,
            deliveries=out.deliveries,
        )

    def extend(self, task: TaskRecord, *, visible_s: float) -> bool:
        """Hide the task for ``visible_s`` seconds from now; 0 makes it claimable again. Returns
        False if the claim has expired.
        """
        record = ffi.new("bl_task *", {"generation": task.generation, "block": task.block})
        try:
            self._call("extending a claim", lib.bl_task_extend, record, _ms(visible_s))
        except NoGrantError:
            return False
        return True

    def withdraw(self, key: NDArray[np.uint64]) -> bool:
        """Remove a task unless a worker has claimed it. Returns False if one has claimed or
        finished it. A new server has no record of earlier claims.
        """
        words = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(key, np.uint64))
        return self._call("withdrawing a task", lib.bl_task_withdraw, words) > 0

    def count(self, queue: int) -> tuple[int, int]:
        """Return the number of waiting and of claimed tasks in a queue."""
        out = ffi.new("bl_task_counts *")
        self._call("counting a queue's tasks", lib.bl_task_count, queue, out)
        return out.waiting, out.claimed


def _ms(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), int(lib.BL_TASK_VISIBLE_MAX_MS))
