# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server process of a replay, which runs as a program with arguments DIRECTORY DEVICE...

It reports on stdout once it serves, and ends when its stdin does, and so with its parent. Then it
removes DIRECTORY, which holds the devices, because a parent that was killed cannot.
"""

from __future__ import annotations

import shutil
import sys

from beluga.errors import BelugaError
from beluga.meta import MetaServer
from beluga.pool import Pool
from beluga.replay.process import report


def main() -> None:
    """Serve the pool until stdin ends."""
    directory, *devices = sys.argv[1:]
    try:
        with Pool.open(devices) as pool, MetaServer(pool) as server:
            report({"ready": True})
            sys.stdin.buffer.read()
            if server.failure is not None:
                raise server.failure
    except (BelugaError, OSError) as error:
        report({"error": str(error)})
        sys.exit(1)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
