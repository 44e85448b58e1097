# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays by real processes: everything is counted and checked, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.emulation import long

from beluga.child import command
from beluga.replay import Conversations, TraceRequest, make_workload, write_trace

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]

TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of 60 requests over 3 seconds."""
    path = tmp_path / "trace.jsonl"
    shape = Conversations(conversation_count=15, turn_count=4, turn_interval_ms=400)
    write_trace(make_workload(shape), path)
    return path


def children(pid: int) -> list[tuple[int, str]]:
    """Return (pid, command line) of the processes that pid started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode("latin-1")
        except OSError:
            continue
        if parent == pid:
            found.append((int(stat.parent.name), command))
    return found


def wait_for_children(pid: int, module: str, count: int) -> list[tuple[int, str]]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [child for child in children(pid) if module in child[1]]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {count} processes of {module}")


def wait_until_gone(processes: list[tuple[int, str]]) -> None:
    """Wait until the processes have ended. One that was starting when its parent ended may take
    longer.
    """
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid, _ in processes):
        assert time.monotonic() < deadline, "a process of the replay is still there"
        time.sleep(0.05)


def pool_directory(command: str) -> Path:
    found = re.search(r"(/[^\" ]*)/device\.0", command)
    assert found
    return Path(found[1])


def test_a_replay_counts_and_verifies(run: Run, trace: Path) -> None:
    ended = run("replay", trace, "--json", "--clients", "2")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["requests"] == 60
    assert result["verify_errors"] == 0
    assert result["blocks_refused"] == 0
    assert result["bytes_got"] == result["blocks_hit"] * 4096
    assert result["hit_rate"] <= result["ideal_hit_rate"] + 0.001
    assert result["rpc_p50_us"] <= result["rpc_p99_us"]


@pytest.mark.long
def test_one_client_reaches_the_ideal(run: Run, trace: Path) -> None:
    result = json.loads(run("replay", trace, "--json", "--clients", "1").stdout)
    assert result["hit_rate"] == pytest.approx(result["ideal_hit_rate"])
    assert result["blocks_put"] == result["blocks_looked_up"] - result["blocks_hit"]


@pytest.mark.long
def test_a_pool_that_is_too_small_only_costs_hits(run: Run, tmp_path: Path) -> None:
    blocks = [TraceRequest(0, 50 * 512, 1, [n * 100 + i for i in range(50)]) for n in range(40)]
    write_trace(blocks + blocks, tmp_path / "trace")
    sizes = ["--block-bytes", "64K", "--pool-bytes", "64M"]
    ended = run("replay", tmp_path / "trace", "--json", *sizes)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["hit_rate"] < result["ideal_hit_rate"]
    assert result["verify_errors"] == 0


def test_a_pool_without_room_for_tables_is_refused(run: Run, trace: Path) -> None:
    refused = run("replay", trace, "--pool-bytes", "4M")
    assert refused.returncode == 1
    assert "give at least" in refused.stderr
    assert refused.stderr.count("\n") == 1, "nothing was read, and no bar of what never began"


def test_a_block_of_no_bytes_is_refused(run: Run, trace: Path) -> None:
    refused = run("replay", trace, "--block-bytes", "0", "--json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "a block of 0 bytes" in refused.stderr


def test_text_output_is_a_table(run: Run, trace: Path) -> None:
    ended = run("replay", trace, "--block-bytes", "4096")
    assert ended.returncode == 0, ended.stderr
    for row in ("requests", "hit rate", "blocks put", "blocks got", "RPC p50 / p99"):
        assert row in ended.stdout
    assert "wrong blocks" in ended.stdout


@pytest.mark.parametrize("module", ["beluga.replay.client", long("beluga.replay.server")])
def test_a_killed_process_ends_the_replay(start: Start, trace: Path, module: str) -> None:
    replay = start("replay", trace, "--json", "--speed", "0.05")
    server = wait_for_children(replay.pid, "beluga.replay.server", 1)
    clients = wait_for_children(replay.pid, "beluga.replay.client", 2)
    victim = server[0] if module.endswith("server") else clients[0]
    os.kill(victim[0], signal.SIGKILL)
    _, stderr = replay.communicate(timeout=60)
    assert replay.returncode == 1
    assert "Traceback" not in stderr
    assert stderr.count("beluga: error: ") == 1
    assert not pool_directory(server[0][1]).exists()
    wait_until_gone(server + clients)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), long(signal.SIGTERM, 143), long(signal.SIGHUP, 129)],
)
def test_a_stopped_replay_leaves_nothing(
    start: Start, trace: Path, number: signal.Signals, status: int
) -> None:
    replay = start("replay", trace, "--json", "--speed", "0.05")
    server = wait_for_children(replay.pid, "beluga.replay.server", 1)
    clients = wait_for_children(replay.pid, "beluga.replay.client", 2)
    replay.send_signal(number)
    _, stderr = replay.communicate(timeout=60)
    assert replay.returncode == status
    assert "Traceback" not in stderr
    assert not pool_directory(server[0][1]).exists()
    wait_until_gone(server + clients)


def test_a_killed_replay_leaves_nothing(start: Start, trace: Path) -> None:
    replay = start("replay", trace, "--json", "--speed", "0.05")
    server = wait_for_children(replay.pid, "beluga.replay.server", 1)
    clients = wait_for_children(replay.pid, "beluga.replay.client", 2)
    replay.kill()
    replay.wait()
    wait_until_gone(server + clients)
    assert not pool_directory(server[0][1]).exists()


def killed_group(trace: Path) -> Path:
    """Kill a replay with all its processes; return the folder that its pool lay in."""
    replay = subprocess.Popen(
        command("beluga.cli.main", "replay", str(trace), "--json", "--speed", "0.05"),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    server = wait_for_children(replay.pid, "beluga.replay.server", 1)
    wait_for_children(replay.pid, "beluga.replay.client", 2)
    left = pool_directory(server[0][1])
    os.killpg(replay.pid, signal.SIGKILL)
    replay.wait()
    wait_until_gone(server)
    return left


@pytest.mark.long
def test_files_of_a_killed_replay_are_removed_by_the_next(run: Run, trace: Path) -> None:
    # Any other replay on this machine removes it, too, so there are several attempts.
    left = next((path for path in (killed_group(trace) for _ in range(5)) if path.exists()), None)
    assert left is not None
    assert run("replay", trace, "--json").returncode == 0
    assert not left.exists()


@pytest.mark.slow
def test_the_conversation_trace_has_its_expected_hits(run: Run) -> None:
    trace = TRACES / "mooncake/conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"no {trace.name} beside the checkout")
    ended = run("replay", trace, "--json", "--clients", "2")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["requests"] == 12031
    assert result["verify_errors"] == 0
    assert result["hit_rate"] == pytest.approx(result["ideal_hit_rate"], abs=0.005)
