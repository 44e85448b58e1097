# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What an operator uses: ``stat``, ``trace``, ``quota``, ``drain``, ``top`` and ``dashboard``."""

import dataclasses
import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.blocks import eventually, keys

from beluga import Client, IndexServer, KVCache, Pool
from beluga.child import command
from beluga.cli.top_frame import draw_frame
from beluga.index import IndexClient
from beluga.live import Note, Observer, Snapshot
from beluga.live.snapshot import SessionFacts, TenantFacts, TierFacts
from beluga.rpc import TracedCall

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
Server = subprocess.Popen


@pytest.fixture
def opened(pool: list[str]) -> Iterator[Pool]:
    with Pool.open(pool[1::2]) as opened:
        yield opened


def value(run: Run, *words: object) -> Any:
    ended = run(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def narrow(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines())


def test_stat_prints_text(run: Run, pool: list[str], server: Server[str], opened: Pool) -> None:
    with KVCache(opened, namespace="x") as cache:
        cache.put([b"0123456789abcdef"], [bytes(4096)])
        cache.get([b"0123456789abcdef"], [bytearray(4096)])
        cache.client.report.kind = "vllm"
        cache.client.call(16, (1).to_bytes(8, "little") + bytes(8))  # the session's report
        text = run("stat", *pool).stdout
        stat = value(run, "stat", *pool)
    assert "100.0% of 1" in text
    assert "1, 4 KiB; 0 pinned, 0 being written" in text
    assert "quarantined" in text and "nothing" in text
    assert narrow(text)
    (client,) = stat["sessions"]
    assert (client["pid"], client["kind"], client["host"]) == (os.getpid(), "vllm", 0)
    assert client["name"] == Path("/proc/self/comm").read_text().strip()
    assert str(os.getpid()) in text and "vllm" in text
    assert (stat["hit_rate"], stat["epoch"], stat["draining"]) == (1.0, 1, False)
    assert stat["quarantine"] == [] and stat["block_count"] == 1


def test_stat_prints_quarantined_space_and_the_reason(
    run: Run, pool: list[str], opened: Pool
) -> None:
    with IndexServer(opened) as first:
        client = Client(opened)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    with IndexServer(opened):
        text = run("stat", *pool).stdout
        stat = value(run, "stat", *pool)
        assert narrow(text)
        words = " ".join(text.split())
        assert "quarantined: its lane of the session on lane 0 (host 0), suspect for" in words
        assert "it is from epoch 1, has not attached again and is not proven dead" in words
        assert "Freed by: the end of the process on host 0." in words
        assert (
            "sessions of earlier epochs may still write there. Freed by: the end of all 1" in words
        )
        first, together = stat["quarantine"]
        assert (first["lane"], first["host"], first["bytes"]) == (0, 0, None)
        assert together["bytes"] == stat["held_bytes"] >= 1 << 20
        client.close()
        assert eventually(lambda: value(run, "stat", *pool)["quarantine"] == [])


def test_trace_shows_the_calls_of_a_killed_server(
    start: Start, run: Run, pool: list[str], server: Server[str]
) -> None:
    run("put", "key", "-", *pool, stdin="some bytes")
    assert "it serves" in run("trace", *pool).stderr
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert eventually(lambda: "was killed, or hangs" in run("trace", *pool).stderr)
    shown = run("trace", *pool)
    assert narrow(shown.stdout)
    heading, *lines = shown.stdout.splitlines()
    assert heading.split()[:4] == ["time", "host:pid:lane", "method", "keys"]
    assert [line.split()[2] for line in lines[-2:]] == ["reserve", "commit"]
    result = value(run, "trace", *pool, "--method", "commit")
    assert (result["pid"], result["ended"], result["alive"]) == (server.pid, False, False)
    (commit,) = result["calls"]
    assert (commit["method"], commit["keys"], commit["status"]) == ("commit", 1, "ok")
    assert value(run, "trace", *pool, "--slow", 60_000)["calls"] == []
    assert len(value(run, "trace", *pool, "--slowest", "--last", 1)["calls"]) == 1
    assert value(run, "trace", *pool, "--session", commit["nonce"])["calls"][-1] == commit
    again = start("serve", *pool)
    assert again.stderr and again.stderr.readline().startswith("serving, epoch 2")
    before = value(run, "trace", *pool, "--before")
    assert (before["epoch"], before["calls"][-1]["method"]) == (1, "commit")


def test_trace_follows_new_calls(
    start: Start, run: Run, pool: list[str], server: Server[str]
) -> None:
    following = start("trace", *pool, "--follow", "--json", "--method", "ping")
    assert following.stdout
    run("ping", *pool, "--count", 2)
    calls = [json.loads(following.stdout.readline()) for _ in range(2)]
    assert [call["method"] for call in calls] == ["ping", "ping"]
    assert calls[0]["sequence"] < calls[1]["sequence"]


def test_quota_is_shown_and_changed_without_a_restart(
    run: Run, pool: list[str], server: Server[str], opened: Pool
) -> None:
    with Client(opened) as client:
        index = IndexClient(client)
        index.reserve(keys([1]), length=4096)
        assert "no limit" in run("quota", *pool).stdout
        changed = run("quota", *pool, "--set", "grants=1", "--set", "bytes=1M")
        assert "until the server ends" in changed.stderr
        result = value(run, "quota", *pool)
        assert result["quota"] == {"grants": 1, "pins": 0, "bytes": 1 << 20, "calls_per_s": 0}
        assert [(session["grant_count"], session["bytes"]) for session in result["sessions"]] == [
            (1, 4096)
        ]
        assert index.reserve(keys([2]), length=4096)[0].status < 0
        assert value(run, "quota", *pool, "--set", "grants=0")["quota"]["bytes"] == 1 << 20
        assert eventually(lambda: index.reserve(keys([2]), length=4096)[0].status == 0)
        text = run("quota", *pool).stdout
    assert narrow(text) and "1 MiB" in text


def test_drain_waits_for_pending_writes(
    start: Start, run: Run, pool: list[str], server: Server[str], opened: Pool
) -> None:
    run("put", "key", "-", *pool, stdin="some bytes")
    with Client(opened) as client:
        index = IndexClient(client)
        grants = index.reserve(keys([1]), length=4096)
        late = run("drain", *pool, "--timeout", 0.5)
        assert late.returncode == 1
        assert "not drained in 0.5 s: 1 blocks are being written" in late.stderr
        waiting = start("drain", *pool)
        assert waiting.stderr and "1 blocks are being written" in waiting.stderr.readline()
        refused = run("put", "other", "-", *pool, stdin="more bytes")
        assert refused.returncode == 1
        assert "the pool is being drained for maintenance" in refused.stderr
        assert run("get", "key", *pool).stdout == "some bytes"
        assert "draining: puts are refused" in run("stat", *pool).stdout
        assert index.commit(grants) == [0]
    assert "drained: nothing is being written; 2 blocks stay" in waiting.communicate(timeout=60)[1]
    assert waiting.returncode == 0
    assert value(run, "drain", *pool)["done"]
    assert run("drain", *pool, "--undo").stderr == "new blocks are accepted again\n"
    assert run("put", "other", "-", *pool, stdin="more bytes").returncode == 0


def test_drain_continues_when_a_writer_is_killed(
    start: Start, run: Run, pool: list[str], server: Server[str], opened: Pool
) -> None:
    code = (
        "import sys\n"
        "from beluga import Client, Pool\n"
        "from beluga.index import IndexClient\n"
        "from numpy import ones\n"
        "with Pool.open(sys.argv[1:]) as pool, Client(pool) as client:\n"
        "    IndexClient(client).reserve(ones((1, 2), 'u8'), length=4096)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, *pool[1::2]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        waiting = start("drain", *pool)
        assert waiting.stderr and "1 blocks are being written" in waiting.stderr.readline()
        writer.kill()
    waiting.communicate(timeout=60)
    assert waiting.returncode == 0


def test_a_drained_pool_has_everything_in_its_lower_tier(
    start: Start, run: Run, pool: list[str], tmp_path: Path
) -> None:
    """Adaptive admission does not take blocks that were never requested; draining saves them."""
    below = ["--disk", f"{tmp_path}/disk", "--disk-bytes", "16M", "--admission", "second-touch"]
    server = start("serve", *pool, *below)
    assert server.stderr and server.stderr.readline().startswith("serving")
    for number in range(5):
        run("put", f"key {number}", "-", *pool, stdin=f"bytes {number}")
    name = f"disk:{tmp_path}/disk"

    def saved() -> int:
        return int(value(run, "stat", *pool)["lower_tiers"]["tiers"].get(name, {}).get("blocks", 0))

    drained = run("drain", *pool)
    assert "5 blocks were compared, and all of them are in a lower tier" in drained.stderr
    assert eventually(lambda: saved() == 5)


def test_drain_counts_the_blocks_that_its_tiers_have_no_room_for(
    start: Start, run: Run, pool: list[str], tmp_path: Path
) -> None:
    """A block that is saved evicts an earlier one, so a comparison of each alone finds them all."""
    Pool.create(pool[1::2], device_size=24 << 20, force=True).close()
    below = ["--disk", f"{tmp_path}/disk", "--disk-bytes", "16M", "--admission", "always"]
    server = start("serve", *pool, *below)
    assert server.stderr and server.stderr.readline().startswith("serving")
    with Pool.open(pool[1::2]) as opened, KVCache(opened, namespace="x") as cache:
        for number in range(30):
            blocks = [bytes([number]) * (1 << 20)]
            assert cache.put([number.to_bytes(16, "big")], blocks).stored == 1
    drained = run("drain", *pool, "--json")
    state = json.loads(drained.stdout)
    assert (drained.returncode, state["looked"]) == (1, 30)
    assert 14 <= state["missing"] < 30
    assert state["missing_bytes"] == state["missing"] << 20
    shown = run("drain", *pool)
    assert shown.returncode == 1
    assert f"{state['missing']} of them are only in the pool, for which" in shown.stderr


def test_a_block_below_the_pool_is_removed_from_there(
    start: Start, run: Run, pool: list[str], tmp_path: Path
) -> None:
    Pool.create(pool[1::2], device_size=24 << 20, force=True, max_blocks=4).close()
    below = ["--disk", f"{tmp_path}/disk", "--disk-bytes", "16M", "--admission", "always"]
    server = start("serve", *pool, *below)
    assert server.stderr and server.stderr.readline().startswith("serving")
    run("put", "key", "-", *pool, stdin="some bytes")
    run("drain", *pool)  # now it is in a lower tier
    run("drain", *pool, "--undo")
    with Pool.open(pool[1::2]) as opened, KVCache(opened, namespace="other") as cache:
        for number in range(4):  # each one needs a line of the table
            assert cache.put([number.to_bytes(16, "big")], [b"other"]).stored == 1
    expected = "key: miss, below: the pool does not have it, but a lower tier has"
    assert eventually(lambda: run("explain", "key", *pool).stdout.startswith(expected))
    removed = run("rm", "key", *pool)
    assert removed.returncode == 0
    assert removed.stderr == ("removed: 1 of 1; 1 of them only from a lower tier\n")
    assert eventually(lambda: run("explain", "key", *pool).stdout.startswith("key: miss, removed"))
    assert run("rm", "key", *pool).returncode == 1


@pytest.fixture
def snapshot(shm: Path) -> Snapshot:
    """A snapshot with rows in every table, whose names are hostile."""
    with (
        Pool.create([shm / ("a" * 60)], device_size=32 << 20, sparse=True) as pool,
        IndexServer(pool) as server,
    ):
        served = Observer(server, pool).snapshot()
    name = "\x1b[31mred\r\n" + "n" * 100
    suspect = SessionFacts(
        *("ab" * 8, 1, 0, 3, None, "vllm", "suspect", "heartbeat"),
        *(7.0, 8.0, 9, 2, 1, 3, 4, None),
    )
    slow = TracedCall(1, 1.8e9, 0, 77, 0, "ab" * 8, "lookup", 16, "unfinished", None, 0)
    return dataclasses.replace(
        served,
        sessions=(suspect,) * 20,
        tenants=(TenantFacts("cd" * 8, name, 4096, 10, 40960, 10, 20, 30),),
        tiers=(TierFacts(name, None, None, None, 1, 2, 3, "open"),),
        slow_calls=(slow,),
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
