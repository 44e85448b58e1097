# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``ping`` of both programs."""

from __future__ import annotations

from typing import Annotated

from beluga.cli.frame import Option
from beluga.cli.options import Host, Json, PoolPaths, Timeout, open_pool
from beluga.cli.output import print_json, print_note


def ping(
    pool: PoolPaths = None,
    host: Host = None,
    timeout: Timeout = 5.0,
    count: Annotated[int, Option(min=1, max=1_000_000)] = 10,
    json: Json = False,
) -> None:
    """Measure round trips to the server.

    --count: The number of round trips.
    """
    from beluga.rpc import Client

    with open_pool(pool) as opened, Client(opened, host=host, timeout_s=timeout) as client:
        trips_us = sorted(client.ping() * 1e6 for _ in range(count))
        epoch = client.stat().epoch
    middle = trips_us[len(trips_us) // 2]
    if json:
        print_json({"epoch": epoch, "count": count, "min_us": trips_us[0], "p50_us": middle})
    else:
        print_note(
            f"epoch {epoch}: {count} round trips, fastest {trips_us[0]:.1f} us, p50 {middle:.1f} us"
        )
