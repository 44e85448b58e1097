# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prints which requested keys the service takes: at once, just before a minute has passed, and
after it. This process serves ``POOL``, with the clock of ``wound_clock.c``.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from beluga import Client, IndexServer, Pool
from beluga.index import IndexClient, LowerWork, Work

STORE = 2  # the bit of the tier


def main() -> None:
    wind = ctypes.CDLL(None).wind
    with Pool.create([sys.argv[1]], device_size=16 << 20, sparse=True) as pool:
        server = IndexServer(pool)
        token = server.attach_lower(10, wait=False, unknown=STORE, names=["store"])
        with server, Client(pool) as client:
            server.lower_reported()
            work = LowerWork(client, token)
            for first, seconds in ((0, 0), (10, 50), (20, 70)):
                numbers = range(first, first + 3)
                IndexClient(client).onboard(np.array([(n, n) for n in numbers], np.uint64))
                wind(seconds)
                print([int(key[0]) for key in work.take(Work.COLD, 10)["key"]])
            print(server.lower_stat().wanted_count)


if __name__ == "__main__":
    main()
