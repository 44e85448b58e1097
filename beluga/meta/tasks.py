# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Queues of tasks in the pool (``csrc/index/task_call.c``): claims on kept blocks."""

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
    """A claimed task: the block that it is, ``length`` bytes under ``key`` (uint64, (1, 2))."""

    key: NDArray[np.uint64]
    generation: int
    block: int
    length: int
    deliveries: int  # how often it was claimed since the server's start, this time included


class TaskClient:
    """Calls over a :class:`beluga.rpc.Client`, whose session holds the claims; they end with it.

    A queue is a number: the layout of its blocks. All calls raise
    :class:`~beluga.errors.RpcError` if the server does not answer.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._timeout_ns = nanoseconds(client.timeout_s)

    def claim(self, queue: int, *, visible_s: float) -> TaskRecord | None:
        """The oldest task that waits, hidden from others for ``visible_s`` seconds, 600 at most."""
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
        """Hide it for so long from now; 0: let it wait again. False: the claim has run out."""
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

    def count(self, queue: int) -> tuple[int, int]:
        """Tasks of a queue that wait, and that are claimed."""
        out = ffi.new("bl_task_counts *")
        with self._client.lock:
            raise_for_status(
                lib.bl_task_count(self._client.session, queue, out, self._timeout_ns),
                "counting a queue's tasks",
            )
        return out.waiting, out.claimed


def _ms(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), int(lib.BL_TASK_VISIBLE_MAX_MS))
