# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Opens a prefill queue by its address on a command line."""

from __future__ import annotations

from beluga.disagg.queue import VISIBILITY_S, TaskQueue
from beluga.errors import QueueError
from beluga.listening import shown_url


async def open_queue(url: str, name: str, *, visibility_s: float = VISIBILITY_S) -> TaskQueue:
    """Open the queue ``name`` at ``nats://host:port`` (with TLS at ``tls://host:port``), or in a
    pool: ``pool`` (the default pool), or ``pool:/dev/shm/a:/dev/shm/b`` (its devices). The queue is
    made if it does not exist.

    Raises QueueError for any other address, if no server answers, or if a package is missing.
    """
    scheme = url.partition(":")[0]
    if scheme in ("nats", "tls"):
        try:
            from beluga.disagg.nats_queue import NatsQueue
        except ImportError as error:
            raise QueueError(
                f"{error.name} is missing; install it with: pip install 'beluga-kv[router]'"
            ) from error
        return await NatsQueue.open(url, name, visibility_s=visibility_s)
    if scheme == "pool":
        from beluga.disagg.pool_queue import PoolQueue

        paths = url.partition(":")[2]
        return await PoolQueue.open(paths, name, visibility_s=visibility_s)
    raise QueueError(
        f"'{shown_url(url)}' is not a prefill queue; give nats://HOST:PORT, tls://HOST:PORT, pool, "
        "or pool:PATH:PATH"
    )
