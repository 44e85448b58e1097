# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill and decode on different engines, with the pool between them.

A prefill engine computes a prompt's KV and its connector saves it into the pool; the decode engine
finds it there as a prefix. So this package only queues prompts (:class:`TaskQueue`).
"""

from beluga.disagg.prefill import Decide, Prefiller, PrefillOutcome
from beluga.disagg.queue import (
    MAX_AGE_S,
    PATHS,
    TASK_SIZE_MAX,
    TASKS_MAX,
    VISIBILITY_S,
    Claim,
    PrefillTask,
    QueueSize,
    TaskQueue,
    Ticket,
    decode_task,
    encode_task,
    open_queue,
    queue_name,
)
from beluga.disagg.worker import PrefillWorker, WorkerStat

__all__ = [
    "MAX_AGE_S",
    "PATHS",
    "TASKS_MAX",
    "TASK_SIZE_MAX",
    "VISIBILITY_S",
    "Claim",
    "Decide",
    "PrefillOutcome",
    "PrefillTask",
    "PrefillWorker",
    "Prefiller",
    "QueueSize",
    "TaskQueue",
    "Ticket",
    "WorkerStat",
    "decode_task",
    "encode_task",
    "open_queue",
    "queue_name",
]
