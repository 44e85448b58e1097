# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The program of a benchmark's other process, ``worker CPU DEVICE...``; ``peer.py`` is its
handle.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from beluga import Handlers, IndexServer, KVCache
from beluga.errors import BelugaError
from beluga.events import EventService, EventSettings
from beluga.open_files import require_zmq_files
from beluga.pool import Pool
from beluga.rpc import Server
from beluga.threads import wait_for
from beluga.tiers import TierService, TierSettings

from .._limit import lib
from ..peers.echoes import ECHOES, METHOD
from . import drive
from .lines import lines_of
from .pace import shared_paces


def _write(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _serve(pool: Pool, ends: list[Callable[[], None]], **_: object) -> None:
    """Serve lanes until the process ends."""
    server = Server(pool)
    server.start()
    ends.append(server.stop)
    _write(ready=True)


def _serve_echo(pool: Pool, ends: list[Callable[[], None]], **_: object) -> None:
    """Serve echoes in Python until the process ends: by number and by name."""
    server = Server(pool)
    server.handle(METHOD, lambda request: request)
    server.register(Handlers(echo))
    server.start()
    ends.append(server.stop)
    _write(ready=True)


def echo(data: bytes) -> bytes:
    """Return the same bytes."""
    return data


def _serve_other_echo(
    _: object, ends: list[Callable[[], object]], *, name: str, folder: str, size: int
) -> None:
    """Serve an echo by another library until the process ends."""
    serve = ECHOES[name].serve
    if serve is None:
        raise BelugaError(f"{name} has a server of its own")
    ends.append(serve(folder, size))
    _write(ready=True)


def _serve_index(
    pool: Pool,
    ends: list[Callable[[], None]],
    *,
    endpoints: list[str] | None,
    publisher_cpu: int | None,
) -> None:
    """Serve the index until the process ends. With ``endpoints``, publish the pool's events there,
    by a thread that may run on any core, or on this one only.
    """
    server = IndexServer(pool)
    events = (
        EventService(server, pool, EventSettings(endpoints[0], endpoints[1])) if endpoints else None
    )
    server.start()
    ends.append(server.stop)
    if events is not None:
        everywhere = range(os.cpu_count() or 1)
        os.sched_setaffinity(0, everywhere if publisher_cpu is None else [publisher_cpu])
        events.start()
        ends.insert(0, events.stop)
    _write(ready=True)


def _serve_tiers(  # noqa: PLR0913  a command's fields, by name
    pool: Pool,
    ends: list[Callable[[], None]],
    *,
    block_size: int,
    disk: str | None,
    disk_size: int,
    remote: str | None,
) -> None:
    """Serve the index and the tiers below the pool until the process ends, on all cores."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    settings = TierSettings(
        disks=(disk,) if disk else (),
        disk_bytes=disk_size,
        remotes=(remote,) if remote else (),
        admission="always",
        block_bytes=block_size,
    )
    server = IndexServer(pool)
    service = TierService(server, pool, settings)
    server.start()
    ends.append(server.stop)
    service.start()
    ends.insert(0, service.stop)
    _write(ready=True)


def _flood(
    pool: Pool, ends: list[Callable[[], None]], *, block_size: int, count: int, period_s: float
) -> None:
    """Store new blocks until the process ends, one every ``period_s``, on all cores. After the last
    one, the first ones are removed and stored again.
    """
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    cache = KVCache(pool, namespace="flood", timeout_s=30)
    block = np.random.default_rng(1).integers(0, 256, (1, block_size), np.uint8)
    ending = threading.Event()

    def store() -> None:
        at = time.monotonic()
        for number in itertools.cycle(range(count)):
            if ending.wait(max(0.0, at - time.monotonic())):
                return
            at = max(at + period_s, time.monotonic() - period_s)
            digest = number.to_bytes(16, "big")
            cache.remove([digest])
            cache.put([digest], block)

    thread = threading.Thread(target=store)
    thread.start()
    ends += [ending.set, lambda: wait_for([thread]), cache.close]
    _write(ready=True)


def _outside_loop_ns() -> int:
    """Return the CPU time that this process has spent outside the server's loop."""
    loops = [thread.ident for thread in threading.enumerate() if thread.name == "beluga-server"]
    clocks = [time.pthread_getcpuclockid(ident) for ident in loops if ident is not None]
    return time.process_time_ns() - sum(map(time.clock_gettime_ns, clocks))


def _spent(_: object, __: object, *, since_ns: int) -> None:
    """Send the CPU time that this process has spent outside the server's loop."""
    _write(ready=True)
    _write(outside_loop_ns=_outside_loop_ns() - since_ns)


def _follow(_: object, __: object, *, endpoint: str) -> None:
    """Read the published messages until the process ends."""
    import zmq

    require_zmq_files("a reader of events", sockets=1)
    context = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.subscribe(b"")
    reader.connect(endpoint)

    def follow() -> None:
        while True:
            reader.recv_multipart()

    threading.Thread(target=follow, daemon=True).start()  # the thread ends with the process
    _write(ready=True)


def _answer(pool: Pool, _: object, **lines: int) -> None:
    """Run the replying side of a bare exchange of lines."""
    _write(ready=True)
    _write(status=lib.limit_answer(lines_of(pool, **lines)))


def _load(  # noqa: PLR0913  a command's fields, by name
    pool: Pool,
    _: object,
    *,
    verb: str,
    offsets: list[int],
    size: int,
    period_ns: int,
    duration_s: float,
    pace_file: str | None,
) -> None:
    """Read or write at a fixed rate."""
    offset_array = np.array(offsets, np.uint64)
    paces = None if pace_file is None else shared_paces(pool, Path(pace_file), verb, offset_array)
    driver = drive.Driver(
        drive.Load(
            drive.ours(pool, verb), offset_array, size, paces, period_ns=period_ns, overlaps=True
        )
    )
    _write(ready=True)
    _write(gb_per_s=driver.hold(duration_s) * size / 1e9)


_COMMANDS: dict[str, Callable[..., None]] = {
    "serve": _serve,
    "serve_echo": _serve_echo,
    "serve_other_echo": _serve_other_echo,
    "serve_index": _serve_index,
    "serve_tiers": _serve_tiers,
    "flood": _flood,
    "spent": _spent,
    "follow": _follow,
    "answer": _answer,
    "load": _load,
}


def main() -> None:
    """Execute the commands of standard input, until it ends."""
    os.sched_setaffinity(0, {int(sys.argv[1])})
    ends: list[Callable[[], None]] = []
    with Pool.open(sys.argv[2:]) as pool:
        try:
            for line in sys.stdin:
                command = json.loads(line)
                _COMMANDS[command.pop("do")](pool, ends, **command)
        finally:
            for end in ends:
                end()


if __name__ == "__main__":
    main()
