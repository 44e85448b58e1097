# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Mooncake Store under test: its master, the process that owns its memory, and two tiers.

Its processes listen on every address of the machine, whatever their options are. So this program
runs in a network namespace that has only its own loopback interface, and starts all of them there.
It prints its results as JSON.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from remote_stores import blocks, same
from support.blocks import eventually
from support.commands import captured

from beluga.metrics import REGISTRY
from beluga.tiers.remote import RemoteSettings, RemoteTier, open_remote

MASTER = ("127.0.0.1", 50951)
URL = f"mooncake://{MASTER[0]}:{MASTER[1]}?buffer={64 << 20}"
SETTINGS = RemoteSettings(operation_s=20, load_s=40, save_s=40)

OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
status = store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("owner", status, file=sys.stderr, flush=True)
time.sleep(1e9)
"""

# A process of another rack: it saves blocks and is killed.
SAVER = """
import os, sys
from mooncake_scene import SETTINGS, URL, blocks, open_remote
saved = open_remote(URL, settings=SETTINGS).save(*blocks([100_000] * 10, seed=1))
print(int(saved.sum()), flush=True)
os.kill(os.getpid(), 9)
"""


def loopback() -> None:
    """Enable the namespace's loopback interface."""
    get, put, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, get, name))[1]
        fcntl.ioctl(any_socket, put, struct.pack("16sh", b"lo", flags | up))


def listens() -> bool:
    try:
        socket.create_connection(MASTER, 1).close()
    except OSError:
        return False
    return True


def owns(log: Path) -> bool:
    return "owner 0" in log.read_text()


def saved_by_another() -> int:
    ran = captured([sys.executable, "-c", SAVER])
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    return int(next(line for line in ran.stdout.splitlines() if line.isdecimal()))


def state(tier: RemoteTier) -> float:
    return REGISTRY.gauge("beluga_tier_breaker_state", "").value(tier=tier.name)


def observe(stop: Callable[[signal.Signals], None]) -> dict[str, object]:
    """Return the results of two tiers. ``stop`` sends the master a signal."""
    seen: dict[str, object] = {"saved by another": saved_by_another()}
    records, payload = blocks([100_000] * 10, seed=1)
    others, other_payload = blocks([0, 1, 5_000_000], seed=2)
    tier = open_remote(URL, settings=SETTINGS)
    seen["loaded"] = same(tier.load(records["key"]), records, payload)
    seen["missing"] = tier.contains(others["key"]).tolist()
    seen["saved"] = tier.save(others, other_payload).tolist()
    seen["loaded others"] = same(tier.load(others["key"]), others, other_payload)
    seen["state"] = state(tier)
    store = tier._store
    key = records["key"][0].tobytes().hex()
    name = f"beluga-1/{key[:2]}/{key}"
    store.put(name, memoryview(b"no block"))
    seen["wrong"] = tier.load(records["key"][:1]) == [None]
    seen["replaced"] = tier.save(records[:1], payload[:1]).tolist()
    seen["right again"] = same(tier.load(records["key"][:1]), records[:1], payload[:1])
    seen["removed"] = tier.remove(others["key"])
    seen["after that"] = same(tier.load(others["key"]), others, other_payload)
    tier.close()

    hasty = RemoteSettings(operation_s=2, load_s=4, open_s=0.5, open_limit_s=0.5)
    tier = open_remote(URL, settings=hasty)
    seen["before"] = all(same(tier.load(records["key"]), records, payload))
    stop(signal.SIGSTOP)
    seen["stopped"] = sum(same(tier.load(records["key"]), records, payload))
    begun = time.monotonic()
    for _ in range(100):
        seen["stopped"] = sum(same(tier.load(records["key"]), records, payload))
    seen["at once"] = time.monotonic() - begun < hasty.operation_s
    seen["open"] = state(tier) != 0
    stop(signal.SIGCONT)
    seen["back"] = eventually(lambda: all(same(tier.load(records["key"]), records, payload)), 60)
    stop(signal.SIGKILL)
    for _ in range(20):
        seen["killed"] = sum(same(tier.load(records["key"]), records, payload))
    seen["open again"] = state(tier) != 0
    return seen


def main() -> None:
    loopback()
    log = Path(sys.argv[1]) / "log"
    master = shutil.which("mooncake_master", path=sys.argv[2]) or "mooncake_master"
    started = []
    with log.open("w") as output:

        def start(*command: str) -> subprocess.Popen[bytes]:
            started.append(subprocess.Popen(command, stdout=output, stderr=output))
            return started[-1]

        served = start(master, "-rpc_address", MASTER[0], "-rpc_port", str(MASTER[1]))
        try:
            assert eventually(listens, 60), log.read_text()
            start(sys.executable, "-c", OWNER, f"{MASTER[0]}:{MASTER[1]}")
            assert eventually(lambda: owns(log), 60), log.read_text()
            seen = observe(served.send_signal)
        finally:
            for child in started:
                child.kill()
                child.wait()
    print("seen", json.dumps(seen), flush=True)
    os._exit(0)  # a thread of the client library may hang


if __name__ == "__main__":
    main()
