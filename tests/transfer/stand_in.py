# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Simulates a machine with a DSA, for tests of the choice of engines."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable

import pytest
from support.soft_dsa import soft_engine

from beluga._ffi import ffi, lib
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import ENGINES, DsaEngine
from beluga.transfer.dsa import Portal, limits_of


def working(pool: Pool) -> DsaEngine:
    """Open a queue in software."""
    return soft_engine(pool)


def refusing(pool: Pool) -> DsaEngine:
    """Open a queue that accepts no descriptor."""
    reading, writing = os.pipe()
    os.close(reading)
    return _written_to(pool, writing)


def silent(pool: Pool) -> DsaEngine:
    """Open a queue that accepts some descriptors and never completes them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    engine = _written_to(pool, os.dup(ours.fileno()))
    ours.close()
    _ENDS.append(theirs)
    return engine


_ENDS: list[socket.socket] = []


def _written_to(pool: Pool, file: int) -> DsaEngine:
    limits = limits_of(size_max=STRIPE_SIZE, batch_max=0, depth=4)
    out = ffi.new("bl_dsa_queue **")
    assert lib.bl_dsa_queue_open(file, lib.BL_DSA_WRITE, limits, out) == 0
    return DsaEngine(pool, Portal(out[0], limits, text="stand-in"))


def install(patch: pytest.MonkeyPatch, opened: Callable[[Pool], DsaEngine] = working) -> None:
    """Make the queue available on this machine from now on."""
    entry = dataclasses.replace(
        ENGINES["dsa"], why_none=lambda: None, open=lambda pool, threads: opened(pool)
    )
    patch.setitem(ENGINES, "dsa", entry)
