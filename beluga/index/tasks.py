# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Task queues in the pool (``csrc/index/task_call.c``): a task is a block that is not evicted and
that workers claim.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import ffi, lib
from beluga.errors import NoGrantError, raise_for_status
from beluga.rpc import nanoseconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.rpc import Client


@dataclasses.dataclass(frozen=True, slots=True)
class TaskRecord:
    """A claimed task: the block with ``key`` (uint64, shape (1, 2)), of ``length`` bytes."""

    key: NDArray[np.uint64]
    generation: int
    block: int
    length: int
    deliveries: int  # claims since the server's start, including this one


class TaskClient:
    """Task calls over a :class:`beluga.rpc.Client`. Its session holds the claims, which end with
    it.

    A queue is identified by a number: the fingerprint of its blocks. All calls raise
    :class:`~beluga.errors.RpcError` if the server does not reply.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._timeout_ns = nanoseconds(client.timeout_s)

    def claim(self, queue: int, *, visible_s: float) -> TaskRecord | None:
        """Claim the oldest waiting task. It is hidden from other workers for ``visible_s`` seconds
        (at most 600).
        """
        out = ffi.new("bl_task *")
        with self._client.lock:
            raise_for_status(
                lib.bl_task_claim(
                    self._client.session, queue, _ms(visible_s), out, self._timeout_ns
                ),
                "claiming a task",
            )
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
        what = ffi.new("bl_task *", {"generation": task.generation, "block": task.block})
        with self._client.lock:
            try:
                raise_for_status(
                    lib.bl_task_extend(
                        self._client.session, what, _ms(visible_s), self._timeout_ns
                    ),
                    "extending a claim",
                )
            except NoGrantError:
                return False
        return True

    def withdraw(self, key: NDArray[np.uint64]) -> bool:
        """Remove a task unless a worker has claimed it. Returns False if one has claimed or
        finished it. A new server has no record of earlier claims.
        """
        words = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(key, np.uint64))
        with self._client.lock:
            count: int = raise_for_status(
                lib.bl_task_withdraw(self._client.session, words, self._timeout_ns),
                "withdrawing a task",
            )
        return count > 0

    def count(self, queue: int) -> tuple[int, int]:
        """Return the number of waiting and of claimed tasks in a queue."""
        out = ffi.new("bl_task_counts *")
        with self._client.lock:
            raise_for_status(
                lib.bl_task_count(self._client.session, queue, out, self._timeout_ns),
                "counting a queue's tasks",
            )
        return out.waiting, out.claimed


def _ms(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), int(lib.BL_TASK_VISIBLE_MAX_MS))
