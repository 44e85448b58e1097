# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A prefill worker for tests that dies with its task: it claims one, prints it, and sleeps.

claimer.py URL QUEUE VISIBILITY_S
"""

from __future__ import annotations

import asyncio
import sys
import time

from beluga.disagg import open_queue


async def main(url: str, name: str, visibility_s: float) -> None:
    queue = await open_queue(url, name, visibility_s=visibility_s)
    claim = await queue.dequeue_task(timeout=60)
    assert claim
    print(claim.task.request_id, flush=True)
    time.sleep(600)  # the worker runs here until it is killed


asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
