# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The jobs of the processes of a replay."""

from __future__ import annotations

import msgspec


class Job(msgspec.Struct, frozen=True):
    """A client's only argument, passed as JSON."""

    devices: list[str]
    trace: str
    block_size: int  # bytes
    compare: bool
    namespace: str  # only of this replay: a disk may still have the blocks of others
    patient: bool  # wait for a server that is restarted, and for tiers with a backlog
    client_count: int = 1
    engine_blocks: int = 0  # of an engine's own memory; 0 is a client without one
    engine_offload: str = "wait"


class ServerJob(msgspec.Struct, frozen=True):
    """The server's only argument, passed as JSON. ``directory`` is removed at the end."""

    directory: str
    devices: list[str]
    disks: list[str]
    disk_bytes: int
    remotes: list[str]
    offload: str
    admission: str
    block_size: int
    admin: tuple[str, int] | None  # the address of the page, over TCP
