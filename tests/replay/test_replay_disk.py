# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays through a pool that is too small, with a disk below it: stored blocks stay hits."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.blocks import eventually
from test_replay import TRACES, pool_directory, wait_for_children

from beluga.errors import NoServerError
from beluga.index import IndexClient
from beluga.pool import Pool
from beluga.replay import TraceRequest, write_trace
from beluga.rpc import Client

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of 2,000 blocks that are all requested twice."""
    once = [TraceRequest(0, 50 * 512, 1, [n * 100 + i for i in range(50)]) for n in range(40)]
    write_trace(once + once, tmp_path / "trace.jsonl")
    return tmp_path / "trace.jsonl"


def options(disk: Path) -> list[str]:
    """A pool for about a quarter of the blocks, which all fit on the disk."""
    return [
        *("--json", "--block-bytes", "64K", "--pool-bytes", "64M"),
        *("--disk", str(disk), "--disk-bytes", "400M"),
    ]


def judge(stdout: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(stdout)
    assert (result["verify_errors"], result["blocks_put_again"]) == (0, 0)
    assert result["blocks_refused"] == 0
    return result


def test_every_block_that_was_stored_is_a_hit(run: Run, trace: Path, tmp_path: Path) -> None:
    ended = run("replay", trace, *options(tmp_path / "disk"), "--clients", "1")
    assert ended.returncode == 0, ended.stderr
    result = judge(ended.stdout)
    assert result["hit_rate"] == result["ideal_hit_rate"]
    assert not (tmp_path / "disk").exists(), "no other pool has a use for its blocks"


@pytest.mark.long
def test_two_clients_and_a_second_replay_on_the_same_disk(
    run: Run, trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/blocks").touch()  # a file that exists is not removed
    for _ in range(2):
        ended = run("replay", trace, *options(tmp_path / "disk"), "--clients", "2")
        assert ended.returncode == 0, ended.stderr
        result = judge(ended.stdout)
        assert result["hit_rate"] == pytest.approx(result["ideal_hit_rate"], abs=0.02)


@pytest.mark.long
def test_a_folder_works_as_a_remote_store(run: Run, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    sizes = ["--block-bytes", "64K", "--pool-bytes", "64M"]
    store = f"file://{tmp_path}/store"
    ended = run("replay", trace, "--json", *sizes, "--remote", store, "--clients", "1")
    assert ended.returncode == 0, ended.stderr
    result = judge(ended.stdout)
    assert result["hit_rate"] == result["ideal_hit_rate"]


def has_stored(devices: list[Path], epoch: int) -> bool:
    """Return whether a server of this epoch serves, and has committed blocks."""
    try:
        with Pool.open(devices) as pool, Client(pool, timeout_s=60) as client:
            return client.stat().epoch == epoch and IndexClient(client).stat().commit_count > 0
    except NoServerError:
        return False


def kill_servers(replay: subprocess.Popen[str], count: int, pause_s: float) -> None:
    """Kill the replay's server, and each that is started after it, ``count`` times.

    Each one has stored blocks and served for ``pause_s`` more seconds, because a server that dies
    during its start ends the replay.
    """
    for epoch in range(1, count + 1):
        ((pid, command),) = wait_for_children(replay.pid, "beluga.replay.server", 1)
        devices = sorted(pool_directory(command).glob("device.[0-9]"))
        assert eventually(functools.partial(has_stored, devices, epoch), timeout_s=60)
        time.sleep(pause_s)
        ((pid, _),) = wait_for_children(replay.pid, "beluga.replay.server", 1)
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_killed_server_loses_no_blocks(start: Start, tmp_path: Path) -> None:
    once = [
        TraceRequest(1000 * n, 50 * 512, 1, [n * 100 + i for i in range(50)]) for n in range(40)
    ]
    again = [
        TraceRequest(1000 * (40 + n), 50 * 512, 1, request.hash_ids)
        for n, request in enumerate(once)
    ]
    write_trace(once + again, tmp_path / "trace.jsonl")
    replay = start("replay", tmp_path / "trace.jsonl", *options(tmp_path / "disk"), "--speed", "4")
    kill_servers(replay, 2, 0.5)
    stdout, stderr = replay.communicate(timeout=120)
    assert replay.returncode == 0, stderr
    result = judge(stdout)
    assert result["server_restarts"] == 2
    assert result["hit_rate"] == pytest.approx(result["ideal_hit_rate"], abs=0.02)


def test_a_disk_without_a_size_is_refused(run: Run, trace: Path, tmp_path: Path) -> None:
    refused = run("replay", trace, "--disk", str(tmp_path / "disk"))
    assert refused.returncode == 2
    assert "give --disk and --disk-bytes" in refused.stderr


@pytest.mark.slow
def test_the_conversation_trace_with_a_tenth_of_its_blocks_in_the_pool(
    start: Start, tmp_path: Path
) -> None:
    trace = TRACES / "mooncake/conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"no {trace.name} beside the checkout")
    sizes = ["--pool-bytes", "80M", "--disk", str(tmp_path / "disk"), "--disk-bytes", "2G"]
    replay = start("replay", trace, "--json", *sizes)
    kill_servers(replay, 2, 4.0)
    stdout, stderr = replay.communicate(timeout=280)
    assert replay.returncode == 0, stderr
    result = judge(stdout)
    assert result["requests"] == 12031
    assert result["hit_rate"] == pytest.approx(result["ideal_hit_rate"], abs=0.005)
