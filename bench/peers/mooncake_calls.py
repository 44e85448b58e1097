# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls of Mooncake's master, ``mooncake_calls MASTER CPU CPU``: is one key present?

Mooncake's processes listen on every address of the machine, whatever their options are. So this
program runs in a network namespace that has only its own loopback interface, and starts the master
there, on the first CPU. Its own threads run on the second one. It makes as many calls as a line of
its input says, and prints the nanoseconds of each as JSON.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import time
from typing import Any

_MASTER = ("127.0.0.1", 50951)
_START_S = 60.0
_BYTES = 16 << 20  # of the store, and of its buffer
_KEY = "beluga-bench"
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def _enable_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, _GET_FLAGS, name))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", b"lo", flags | _UP))


def _listens() -> bool:
    try:
        socket.create_connection(_MASTER, 1).close()
    except OSError:
        return False
    return True


def _sampled(store: Any, count: int) -> list[int]:
    """Return the nanoseconds of calls."""
    at = [time.perf_counter_ns()]
    for _ in range(count):
        if store.is_exist(_KEY) != 1:
            raise SystemExit("mooncake_calls: the key has gone")
        at.append(time.perf_counter_ns())
    return [after - before for before, after in itertools.pairwise(at)]


def main() -> None:
    program, server_core, client_core = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _enable_loopback()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the client library logs to standard output
    os.sched_setaffinity(0, {server_core})
    command = [program, "-rpc_address", _MASTER[0], "-rpc_port", str(_MASTER[1])]
    master = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        os.sched_setaffinity(0, {client_core})
        until = time.monotonic() + _START_S
        while not _listens():
            if time.monotonic() > until or master.poll() is not None:
                raise SystemExit("mooncake_calls: the master does not listen")
            time.sleep(0.05)
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        address = f"{_MASTER[0]}:{_MASTER[1]}"
        if store.setup("127.0.0.1", "P2PHANDSHAKE", _BYTES, _BYTES, "tcp", "", address) != 0:
            raise SystemExit("mooncake_calls: the client cannot be set up")
        if store.put(_KEY, b"a value") != 0:
            raise SystemExit("mooncake_calls: a key cannot be put")
        print("ready", file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(_sampled(store, int(line))), file=replies, flush=True)
    finally:
        master.kill()
        master.wait()
    os._exit(0)  # a thread of the client library may hang


if __name__ == "__main__":
    main()
