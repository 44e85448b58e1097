# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server whose poll loop can be blocked; a program that tests start.

``python stuck_server.py DEVICE...`` serves the pool as ``beluga serve`` does, prints the URL of its
health, and has a method that does not return while the file named by the request exists.
"""

import sys
import time
from pathlib import Path

from beluga.admin import Admin, ServerHealth
from beluga.cli.serve import serve_until_stopped
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Server


def hang(request: bytes) -> bytes:
    while Path(request.decode()).exists():
        time.sleep(0.01)
    return b""


def main() -> None:
    with Pool.open(sys.argv[1:]) as pool:
        server, health = Server(pool), ServerHealth(still_s=2.0)
        server.handle(METHOD_USER, hang)
        admin = Admin(health.routes(), address=("127.0.0.1", 0))
        admin.start()
        print(admin.url, flush=True)
        serve_until_stopped(server, health=health)


if __name__ == "__main__":
    main()
