# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill and decode on different engines, with the pool between them.

A prefill engine computes a prompt's KV and its connector saves it into the pool; the decode engine
finds it there as a prefix. So this package only queues prompts (:class:`TaskQueue`).
"""

from beluga.disagg.prefill import Prefiller, PrefillOutcome
from beluga.disagg.queue import (
    PATHS,
    TASKS_MAX,
    Claim,
    PrefillTask,
    QueueSize,
    TaskQueue,
    Ticket,
    open_queue,
)
from beluga.disagg.worker import PrefillWorker

__all__ = [
    "PATHS",
    "TASKS_MAX",
    "Claim",
    "PrefillOutcome",
    "PrefillTask",
    "PrefillWorker",
    "Prefiller",
    "QueueSize",
    "TaskQueue",
    "Ticket",
    "open_queue",
]
