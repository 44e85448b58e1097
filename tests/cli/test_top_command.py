# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga top`` and ``beluga dashboard``, as a user runs them."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import termios
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from beluga import IndexServer, Pool
from beluga.child import command
from beluga.cli.top_frame import draw_frame
from beluga.live import Note, Observer, SessionFacts, SlowCall, Snapshot, TenantFacts, TierFacts

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def snapshot(shm: Path) -> Snapshot:
    """A snapshot with rows in every table, whose names are hostile."""
    with (
        Pool.create([shm / ("a" * 60)], device_size=32 << 20, sparse=True) as pool,
        IndexServer(pool) as server,
    ):
        served = Observer(server, pool).snapshot()
    name = "\x1b[31mred\r\n" + "n" * 100
    return dataclasses.replace(
        served,
        sessions=(SessionFacts("ab" * 8, 3, None, "vllm", "suspect", 7, 9, None, 1, 2, 3, 4),) * 20,
        tenants=(TenantFacts("cd" * 8, name, 4096, 10, 40960, 10, 20, 30),),
        tiers=(TierFacts(name, None, None, None, 1, 2, 3, "open"),),
        slow_calls=(SlowCall(1.8e9, "lookup", 0, 77, 16, None, "unfinished"),),
        notes=(Note("warn", name),),
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_frame_fits_the_terminal_and_escapes_names(snapshot: Snapshot, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(draw_frame(snapshot, width, failure="no answer"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "\r" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "no answer" in text and "8 of 20" in text
    assert "lookup" in text and "abababab" in text


def test_one_frame_and_one_snapshot(
    run: Run, pool: list[str], server: subprocess.Popen[str]
) -> None:
    shown = run("top", *pool, "--once")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "serving, epoch 1" in shown.stdout
    content = json.loads(run("top", *pool, "--once", "--json").stdout)
    assert content["server"]["pid"] == server.pid
    assert content["rates"]["sessions_attached_total"] == 0


def test_without_a_server_top_fails_with_one_line(run: Run, pool: list[str]) -> None:
    shown = run("top", *pool, "--once")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.count("\n") == 1
    assert "start 'beluga serve'" in shown.stderr


def test_snapshots_continue_with_the_next_server(
    start: Start, pool: list[str], server: subprocess.Popen[str]
) -> None:
    top = start("top", *pool, "--json", "--interval", "0.1")
    assert top.stdout and top.stderr
    assert json.loads(top.stdout.readline())["server"]["epoch"] == 1
    server.kill()
    assert "retrying" in top.stderr.readline()
    start("serve", *pool)
    while (line := top.stdout.readline()) and json.loads(line)["server"]["epoch"] != 2:
        pass
    assert line
    top.send_signal(signal.SIGINT)
    assert top.wait(timeout=20) == 130


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_the_terminal_is_restored_after_q_and_ctrl_c(
    pool: list[str], server: subprocess.Popen[str], end: bytes
) -> None:
    screen, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    top = subprocess.Popen(
        command("beluga.cli.main", "top", *pool, "--interval", "0.1"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  no threads
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    output = b""
    try:
        while b"serving, epoch 1" not in output:
            output += os.read(screen, 4096)
        os.write(screen, end)
        while b"\x1b[?1049l" not in output:  # back to the first screen
            output += os.read(screen, 4096)
        assert top.wait(timeout=20) == (0 if end == b"q" else 130)
    finally:
        top.kill()
        top.wait()
    assert b"Traceback" not in output
    assert termios.tcgetattr(terminal) == before
    os.close(screen)
    os.close(terminal)


def test_the_dashboard_is_the_servers_page_or_its_own(
    start: Start, run: Run, pool: list[str], server: subprocess.Popen[str]
) -> None:
    own = start("dashboard", *pool)
    assert own.stdout
    url = own.stdout.readline().strip()
    with urllib.request.urlopen(f"{url}live", timeout=30) as answer:  # noqa: S310
        assert json.loads(answer.read())["server"]["pid"] == server.pid
    own.send_signal(signal.SIGTERM)
    assert own.wait(timeout=20) == 0
    server.kill()
    server.wait()
    following = start("serve", *pool, "--admin", "0")
    assert following.stderr
    output = following.stderr.readline().split()[2].rstrip(",")
    assert following.stderr.readline().startswith("serving")
    assert json.loads(run("dashboard", *pool, "--json").stdout) == {"url": output}
