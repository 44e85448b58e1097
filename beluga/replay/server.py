# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server process of a replay: ``python -m beluga.replay.server DEVICE...``.

Says so on stdout once it serves, and ends when its stdin does: with its parent, however that ends.
"""

from __future__ import annotations

import sys

from beluga.errors import BelugaError
from beluga.meta import MetaServer
from beluga.pool import Pool
from beluga.replay.process import report, stay_with_parent


def main() -> None:
    """Serve the pool until stdin ends."""
    stay_with_parent()
    try:
        with Pool.open(sys.argv[1:]) as pool, MetaServer(pool) as server:
            report({"ready": True})
            sys.stdin.buffer.read()
            if server.failure is not None:
                raise server.failure
    except (BelugaError, OSError) as error:
        report({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
