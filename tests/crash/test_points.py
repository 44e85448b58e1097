# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Crash points have unique names, and are armed by the environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from points import named
from support.emulation import PATIENCE

from beluga._ffi import ffi, lib

HEARTBEATS = """
import sys
from beluga.pool import Pool
from beluga.rpc import Client, Server
with Pool.open(sys.argv[1:]) as pool, Server(pool), Client(pool) as client:
    print("attached", flush=True)
    client.ping()
    print("answered", flush=True)
"""


def run(paths: list[Path], point: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEARTBEATS, *map(str, paths)],
        env=os.environ | {"BELUGA_CRASH": point},
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )


@pytest.fixture(autouse=True)
def pool_on_disk(paths: list[Path]) -> None:
    from beluga.pool import Pool

    Pool.create(paths, device_size=8 << 20, sparse=True).close()


def test_the_build_lists_every_point_of_the_source_once() -> None:
    points, lines = named(), named("line")
    assert len(points) == len(set(points)) >= 60
    assert lines == [name for name in points if name.endswith("line")]
    assert len(lines) >= 12
    for name in points:
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", name)
        armed = lib.bl_crash_arm(name.encode(), 1 << 30, 0, 0)
        assert lib.bl_crash_arm(ffi.NULL, 0, 0, 0) == 0
        assert armed == 0, name


def test_a_process_dies_at_the_requested_passage(paths: list[Path]) -> None:
    first = run(paths, "serve.fenced")
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, "attached\n")
    later = run(paths, "call.sent:2")
    assert (later.returncode, later.stdout) == (0, "attached\nanswered\n")


def test_a_process_stops_at_the_requested_point_and_continues(paths: list[Path]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HEARTBEATS, *map(str, paths)],
        env=os.environ | {"BELUGA_CRASH": "call.sent:stop"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=120 * PATIENCE)[0] == "attached\nanswered\n"
    assert process.returncode == 0


@pytest.mark.parametrize("point", ["no.such", "call.sent:x", "call.sent:0", "call.sent:1:2:kill"])
def test_a_point_that_is_not_there_is_refused(paths: list[Path], point: str) -> None:
    result = run(paths, point)
    assert result.returncode == 1
    assert f"BELUGA_CRASH={point}" in result.stderr
