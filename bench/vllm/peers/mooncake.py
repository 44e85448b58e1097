# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Mooncake Store over TCP, with vLLM's in-tree connector.

Its processes listen on every address of the machine, whatever their options are. So all of them,
with the engines, run in a network namespace that has only its own loopback interface.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..arm import Arm, Setting, wait_a_while
from ..port import HOST
from ..process import Child, environment_of
from .environment import PeerUnavailableError, peers_python

_START_S = 60.0
_RPC_PORT, _METRICS_PORT = 50951, 50952  # in a separate namespace these ports are free
_BUFFER_PROMPTS = 2

# This program enables the loopback interface, reports it, and keeps the namespace alive.
_NAMESPACE = """
import fcntl, socket, struct, time
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    flags = struct.unpack("16sh", fcntl.ioctl(s, GET_FLAGS, struct.pack("16sh", b"lo", 0)))[1]
    fcntl.ioctl(s, SET_FLAGS, struct.pack("16sh", b"lo", flags | UP))
print("up", flush=True)
time.sleep(1e9)
"""

# This program owns the memory. Engines only write to it and read from it.
_HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
host, segment, buffer, master = sys.argv[1:]
status = store.setup(host, "P2PHANDSHAKE", int(segment), int(buffer), "tcp", "", master)
if status:
    sys.exit(f"setup: {status}")
print("holding", flush=True)
time.sleep(1e9)
"""


@contextmanager
def mooncake_arm(setting: Setting) -> Iterator[Arm]:
    """Yield the arm. Raises PeerUnavailableError without the package or namespaces, or
    ChildError.
    """
    python = peers_python("mooncake.store")
    config = setting.folder / "mooncake.json"
    environment = {"MOONCAKE_CONFIG_PATH": str(config), "MC_TCP_BIND_ADDRESS": HOST}
    master = f"{HOST}:{_RPC_PORT}"
    buffer_size = _BUFFER_PROMPTS * setting.hit_bytes + (64 << 20)
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "protocol": "tcp",
                "device_name": "",
                "mode": "standalone-store",
                "global_segment_size": 0,
                "local_buffer_size": buffer_size,
            }
        )
    )
    with _namespace(setting) as inside:

        def child(name: str, *command: str) -> Child:
            return Child(
                [*inside, *command],
                log=setting.folder / f"mooncake-{name}.log",
                environment=environment_of(setting.folder) | environment,
            )

        rpc = ("-rpc_address", HOST, "-rpc_port", str(_RPC_PORT))
        metrics = ("-metrics_host", HOST, "-metrics_port", str(_METRICS_PORT))
        segment_size = setting.pool_bytes + (64 << 20)
        holder = (python, "-Ic", _HOLDER, HOST, str(segment_size), str(buffer_size), master)
        with child("master", str(_master(python)), *rpc, *metrics) as server:
            server.wait_for(lambda: _listens(inside), _START_S, "port")
            with child("holder", *holder) as owner:
                owner.wait_for(lambda: "holding" in owner.log(), _START_S, "memory")
                yield Arm(
                    name="mooncake",
                    setting=setting,
                    python=python,
                    environment=environment,
                    wrapper=inside,
                    wait=wait_a_while,
                    connector={"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
                )


@contextmanager
def _namespace(setting: Setting) -> Iterator[list[str]]:
    """Yield the words that start a command in a private network namespace."""
    own = os.geteuid() == 0
    enter = ["nsenter"] if own else ["nsenter", "--user", "--preserve-credentials"]
    make = ["unshare", "--net"] if own else ["unshare", "--net", "--user", "--map-root-user"]
    if not all(shutil.which(command[0]) for command in (enter, make)):
        raise PeerUnavailableError("no unshare and nsenter here, for a network of its own")
    probe = subprocess.run([*make, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        raise PeerUnavailableError(f"no network of its own: {probe.stderr.strip()}")
    keeper = Child(
        [*make, "python3", "-Ic", _NAMESPACE],
        log=setting.folder / "mooncake-network.log",
    )
    with keeper:
        keeper.wait_for(lambda: "up" in keeper.log().splitlines(), _START_S, "network")
        yield [*enter, "--net", f"--target={keeper.pid}"]


def _master(python: str) -> Path:
    """Return the server's program, which is in the environment's folder."""
    path = Path(python).with_name("mooncake_master")
    if not path.exists():
        raise PeerUnavailableError(f"no {path.name} in its environment")
    return path


def _listens(inside: list[str]) -> bool:
    code = f"import socket; socket.create_connection(({HOST!r}, {_RPC_PORT}), 1).close()"
    command = [*inside, "python3", "-Ic", code]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
