# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Arms with a tier below their memory, on disk or in Redis: ours, and LMCache with its own.

Both disks are read with direct I/O, and a prompt is removed from both memories before it is sent
again: from ours by the prompts that were stored since, from LMCache's by its own interface.
Counters outside both show that a prompt was really read from below: the bytes that the server's
process has read from a disk, and those that Redis has sent.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .arm import Arm, Setting, arm_on, served_pool
from .peers.environment import PeerUnavailableError
from .peers.lmcache import lmcache
from .port import HOST, free_port
from .process import Child, ChildError, environment_of

_START_S = 60.0
_SINK_S = 120.0
_DISK_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Medium:
    """The lower tier. ``wrote`` and ``read`` count the bytes written to it and read from it."""

    wrote: Callable[[], int]
    read: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Below:
    """An arm, its lower tier, and how to remove all prompts except the last from its memory."""

    arm: Arm
    medium: Medium
    forget: Callable[[], None]

    def wait_until_sunk(self, size: int) -> None:
        """Wait until ``size`` bytes were written in all. Raises ChildError if they are not."""
        deadline = time.monotonic() + _SINK_S
        while (wrote := self.medium.wrote()) < size:
            if time.monotonic() > deadline:
                raise ChildError(f"{self.arm.name} wrote {wrote} of {size} bytes below its memory")
            time.sleep(0.02)


def _nothing() -> None:
    """Do nothing: the pool evicts them by itself."""


@contextmanager
def beluga_disk(setting: Setting, folder: Path) -> Iterator[Below]:
    """Yield our pool with a disk tier in ``folder``."""
    disk = folder / "beluga"
    disk.mkdir()
    options = ("--disk", str(disk), "--disk-bytes", str(_DISK_BYTES))
    with served_pool(setting, "beluga-disk", *options) as (paths, child):
        yield Below(arm_on(paths, setting, "beluga-disk"), _disk(child), _nothing)


@contextmanager
def beluga_redis(setting: Setting, folder: Path) -> Iterator[Below]:
    """Yield our pool over a Redis."""
    with _redis(setting, folder, "beluga") as (port, medium):
        options = ("--remote", f"redis://{HOST}:{port}/0")
        with served_pool(setting, "beluga-redis", *options) as (paths, _):
            yield Below(arm_on(paths, setting, "beluga-redis"), medium, _nothing)


@contextmanager
def lmcache_disk(setting: Setting, folder: Path) -> Iterator[Below]:
    """Yield LMCache over files, by its native adapter."""
    disk = folder / "lmcache"
    disk.mkdir()
    adapter = {"type": "fs_native", "base_path": str(disk), "use_odirect": True}
    with lmcache(setting, "lmcache-disk", json.dumps(adapter)) as server:
        yield Below(server.arm, _disk(server.child), server.forget)


@contextmanager
def lmcache_redis(setting: Setting, folder: Path) -> Iterator[Below]:
    """Yield LMCache over a Redis, by its native adapter."""
    with _redis(setting, folder, "lmcache") as (port, medium):
        adapter = {"type": "resp", "host": HOST, "port": port}
        with lmcache(setting, "lmcache-redis", json.dumps(adapter)) as server:
            yield Below(server.arm, medium, server.forget)


def _disk(child: Child) -> Medium:
    """Return the bytes that a process has moved to and from disks, without the page cache."""

    def count(name: str) -> int:
        for line in Path(f"/proc/{child.pid}/io").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise ChildError("this kernel does not count the bytes of a process")

    return Medium(lambda: count("write_bytes"), lambda: count("read_bytes"))


@contextmanager
def _redis(setting: Setting, folder: Path, name: str) -> Iterator[tuple[int, Medium]]:
    """Yield the port of a new Redis, and what it has sent and received."""
    program = shutil.which("redis-server")
    if program is None:
        raise PeerUnavailableError("there is no redis-server here")
    port = free_port()
    words = [program, "--bind", HOST, "--port", str(port), "--dir", str(folder)]
    with Child(
        [*words, "--save", "", "--appendonly", "no"],
        log=setting.folder / f"{name}-redis.log",
        environment=environment_of(setting.folder),
    ) as child:
        child.wait_for(lambda: bool(_info(port)), _START_S, "answer")
        yield (
            port,
            Medium(
                lambda: _info(port)["total_net_input_bytes"],
                lambda: _info(port)["total_net_output_bytes"],
            ),
        )


def _info(port: int) -> dict[str, int]:
    """Return Redis's counters of bytes; nothing if it does not answer."""
    try:
        with socket.create_connection((HOST, port), timeout=5) as line:
            line.sendall(b"INFO stats\r\n")
            text = b""
            while not text.endswith(b"\r\n") or b"total_net_output_bytes:" not in text:
                text += line.recv(65536)
    except OSError:
        return {}
    fields = (word.split(":", 1) for word in text.decode().split("\r\n") if "_net_" in word)
    return {name: int(value) for name, value in fields if value.isdigit()}
