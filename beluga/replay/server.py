# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server process of a replay, a program with a :class:`Job` as its argument.

It reports on stdout once it serves. Its stdin has the engines' metrics, which its exporter shows.
It ends when its stdin does, and so with its parent. Then it removes the directory of the devices,
because a parent that was killed cannot.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack

import msgspec

from beluga.admin import Admin, server_routes
from beluga.errors import BelugaError
from beluga.index import IndexServer
from beluga.pool import Pool
from beluga.replay.process import Job, include, report
from beluga.tiers import TierService, TierSettings


def serve(job: Job) -> None:
    """Serve the pool until stdin ends."""
    options = job.options
    tiers = TierSettings(
        disks=options.disks,
        disk_bytes=options.disk_size,
        remotes=options.remotes,
        offload=options.offload,
        admission=options.admission,
        block_bytes=options.block_size,
        owner="beluga replay",
    )
    with ExitStack() as cleanup:
        pool = cleanup.enter_context(Pool.open(job.devices))
        server = IndexServer(pool)
        routes = server_routes(server, pool)
        admin = Admin(routes, directory=pool.runtime_dir, address=options.admin)
        cleanup.callback(admin.stop)
        admin.start()
        service = TierService(server, pool, tiers) if tiers else None
        cleanup.enter_context(server)
        if service is not None:
            cleanup.callback(service.stop)
            service.start()
        admin.claim()
        report({"ready": True, "page": admin.url})
        for line in sys.stdin.buffer:
            include(line)
        if server.failure is not None:
            raise server.failure


def main() -> None:
    """Do the job, or report in one line why it failed."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    try:
        serve(job)
    except (BelugaError, OSError) as error:
        report({"error": str(error)})
        sys.exit(1)
    finally:
        shutil.rmtree(job.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
