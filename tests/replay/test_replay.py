# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replays by real processes: everything is counted and checked, and nothing is left behind.
Engines' own memory matches a model; with a disk below a pool that is too small, stored blocks stay
hits.
"""

import functools
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.blocks import eventually
from support.emulation import long

from beluga.child import command
from beluga.errors import NoServerError, ReplayError
from beluga.index import IndexClient
from beluga.pool import Pool
from beluga.replay import Conversations, TraceRequest, client, make_workload
from beluga.replay.trace import write_trace
from beluga.rpc import Client

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
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode("latin-1")
        except OSError:
            continue
        if parent == pid:
            processes.append((int(stat.parent.name), command))
    return processes


def wait_for_children(pid: int, module: str, count: int) -> list[tuple[int, str]]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        matching = [child for child in children(pid) if module in child[1]]
        if len(matching) == count:
            return matching
        time.sleep(0.05)
    raise AssertionError(f"no {count} processes of {module}")


def wait_until_ended(processes: list[tuple[int, str]]) -> None:
    """Wait until the processes have ended. One that was starting when its parent ended may take
    longer.
    """
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid, _ in processes):
        assert time.monotonic() < deadline, "a process of the replay is still there"
        time.sleep(0.05)


def pool_directory(command: str) -> Path:
    match = re.search(r"(/[^\" ]*)/device\.0", command)
    assert match
    return Path(match[1])


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
    assert refused.returncode == 2
    assert "give at least" in refused.stderr
    assert refused.stderr.count("\n") == 1, "nothing was read, and no bar of what never began"


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
    wait_until_ended(server + clients)


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
    wait_until_ended(server + clients)


def test_a_killed_replay_leaves_nothing(start: Start, trace: Path) -> None:
    replay = start("replay", trace, "--json", "--speed", "0.05")
    server = wait_for_children(replay.pid, "beluga.replay.server", 1)
    clients = wait_for_children(replay.pid, "beluga.replay.client", 2)
    replay.kill()
    replay.wait()
    wait_until_ended(server + clients)
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
    wait_until_ended(server)
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


BLOCKS = 12  # the engine's memory, in blocks
HOT = 3  # touches within a short time
WAIT_S = 60
PROMPTS = [
    *[[1, 2, 3]] * HOT,
    [1, 2, 3, 4, 5],
    # as large as the memory: all others are evicted, and 1 to 3 are onboarded again
    list(range(100, 112)),
    [1, 2, 3, 6],
    [200, 201, 202, 203],
    [1, 2, 3, 4, 5],
    list(range(100, 108)),
    [100, 101, 300],
]


class Model:
    """An engine's memory: chains are evicted from their ends, those of old requests first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parents: dict[int, int | None] = {}  # of the blocks in memory
        self.ticks: dict[int, int] = {}
        self.saved: set[int] = set()
        self.touches: Counter[int] = Counter()
        self.counts = Counter[str]()

    def bring(self, keys: Sequence[int]) -> int:
        """Bring all keys into memory. Returns the number of misses."""
        missing = [key for key in keys if key not in self.parents]
        while len(self.parents) + len(missing) > self.size:
            parents = {self.parents[key] for key in self.parents}
            ends = [key for key in self.parents if key not in parents and key not in keys]
            del self.parents[min(ends, key=self.ticks.__getitem__)]
            self.counts["evicted"] += 1
        self.parents |= {key: above for above, key in zip((None, *keys), keys, strict=False)}
        for key in reversed(keys):
            self.ticks[key] = len(self.ticks) + max(self.ticks.values(), default=0) + 1
        return len(missing)

    def serve(self, keys: Sequence[int], upcoming: Sequence[int]) -> None:
        self.touches.update(keys)
        self.counts["device_hits"] += sum(key in self.parents for key in keys)
        self.counts["onboarded"] += sum(
            key in self.saved and key not in self.parents for key in keys
        )
        self.counts["offloaded"] += sum(key not in self.saved for key in keys)
        self.bring(keys)
        self.saved |= set(keys)
        hot = [key for key in upcoming if self.touches[key] >= HOT]
        if not set(hot) <= set(self.parents):
            self.counts["prefetched"] += self.bring(hot)


def modeled(prompts: Sequence[Sequence[int]], upcoming: Sequence[int] = ()) -> dict[str, int]:
    model = Model(BLOCKS)
    for prompt, after in zip(prompts, [*prompts[1:], upcoming], strict=True):
        model.serve(prompt, after)
    names = ("device_hits", "onboarded", "prefetched", "offloaded", "evicted")
    return {name: model.counts[name] for name in names}


def trace_of(path: Path, prompts: Sequence[Sequence[int]], last_ms: int = 0) -> Path:
    times = [0] * (len(prompts) - 1) + [last_ms]
    write_trace(
        [
            TraceRequest(at, 16 * len(ids), 1, list(ids))
            for at, ids in zip(times, prompts, strict=True)
        ],
        path,
    )
    return path


def test_an_engine_moves_the_blocks_that_the_model_moves(run: Run, tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace", PROMPTS)
    ended = run("replay", trace, "--json", "--clients", 1, "--engine-blocks", BLOCKS)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    missed = result["engines"].pop("missed_targets")
    assert result["engines"] == modeled(PROMPTS) and all(modeled(PROMPTS).values())
    assert all("its target is" in text for text in missed)
    assert (result["verify_errors"], result["blocks_put_again"]) == (0, 0)
    assert result["hit_rate"] == result["ideal_hit_rate"]
    assert result["blocks_put"] == result["engines"]["offloaded"]
    assert result["blocks_got"] == result["engines"]["onboarded"] + result["engines"]["prefetched"]


def scraped(url: str) -> dict[str, float]:
    """Return the series of engines, without their labels ``engine`` and ``tier``."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    values = {}
    for line in lines:
        if line.startswith("beluga_kvbm_"):
            series, _, value = line.rpartition(" ")
            assert 'engine="0"' in series
            assert 'tier="device"' in series
            series = re.sub(r'(engine|tier)="[^"]*",?', "", series).replace(",}", "}")
            values[series.removesuffix("{}")] = float(value)
    return values


def test_the_exporter_shows_what_the_engine_did(start: Start, tmp_path: Path) -> None:
    """The last request of the trace is hours later: until then the page can be read."""
    prompts = [*PROMPTS, [1]]
    trace = trace_of(tmp_path / "trace", prompts, last_ms=10**7)
    replay = start(
        *("replay", trace, "--json", "--clients", 1, "--engine-blocks", BLOCKS),
        *("--speed", 1, "--admin", "0"),
    )
    assert replay.stderr is not None
    url = next(match[1] for line in replay.stderr if (match := re.search(r"page at (\S+)", line)))
    expected = modeled(PROMPTS, upcoming=[1])
    requested = sum(map(len, PROMPTS))
    totals = {
        "beluga_kvbm_hit_blocks_total": expected["device_hits"],
        'beluga_kvbm_moved_blocks_total{kind="onboard"}': expected["onboarded"],
        'beluga_kvbm_moved_blocks_total{kind="offload"}': expected["offloaded"],
        'beluga_kvbm_moved_blocks_total{kind="prefetch"}': expected["prefetched"],
        "beluga_kvbm_evicted_blocks_total": expected["evicted"],
        "beluga_kvbm_heat_ratio_count": requested,
        # first touches have a heat of exactly 1/2
        'beluga_kvbm_heat_ratio_bucket{le="0.5"}': len({key for ids in PROMPTS for key in ids}),
        'beluga_kvbm_heat_ratio_bucket{le="+Inf"}': requested,
    }
    until, values = time.monotonic() + WAIT_S, {}
    while any(values.get(name) != value for name, value in totals.items()):
        assert time.monotonic() < until, {name: values.get(name) for name in totals}
        time.sleep(0.1)
        values = scraped(url.rstrip("/"))
    assert values["beluga_kvbm_blocks"] == BLOCKS
    assert values["beluga_kvbm_available_blocks"] == BLOCKS, "no request is under way"
    assert values["beluga_kvbm_inflight_blocks"] == 0
    assert values["beluga_kvbm_usage_ratio"] == 1
    assert (values["beluga_kvbm_watermark_ratio"], values["beluga_kvbm_offload_due"]) == (0.85, 1)
    assert values["beluga_kvbm_prefetch_heat_ratio"] == 0.7
    assert values['beluga_kvbm_target{target="available_share_min"}'] == 0.1
    assert values['beluga_kvbm_target_missed{target="available_share_min"}'] == 0
    assert values["beluga_kvbm_allocation_seconds_count"] > 0


@pytest.mark.parametrize("policy", ["wait", "drop", "watermark"])
def test_engines_that_share_a_pool_get_right_bytes(run: Run, tmp_path: Path, policy: str) -> None:
    shape = Conversations(conversation_count=15, turn_count=4)
    write_trace(make_workload(shape), tmp_path / "trace")
    ended = run(
        *("replay", tmp_path / "trace", "--json", "--clients", 2),
        *("--engine-blocks", 60, "--engine-offload", policy),
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["requests"], result["verify_errors"], result["mismatches"]) == (60, 0, 0)
    assert result["engines"]["offloaded"] == result["blocks_put"] > 0
    assert result["engines"]["onboarded"] > 0
    if policy == "wait":
        assert result["blocks_put_again"] == 0


def test_an_engine_that_does_not_hold_the_longest_request_is_refused(
    run: Run, tmp_path: Path
) -> None:
    trace = trace_of(tmp_path / "trace", [[1, 2, 3], [1, 2, 2, 2]])
    refused = run("replay", trace, "--engine-blocks", 2)
    assert refused.returncode == 2
    assert "an engine of 2 blocks is too small for a request of 3" in refused.stderr
    assert "--engine-blocks 3" in refused.stderr
    ended = run("replay", trace, "--json", "--engine-blocks", 3, "--clients", 1)
    assert json.loads(ended.stdout)["blocks_hit"] == 4, "each place of a block that comes twice"


def test_an_engine_without_memory_reports_the_required_size() -> None:
    with pytest.raises(
        ReplayError, match=r"needs 4194304 TiB of memory.*give fewer --engine-blocks"
    ):
        client._allocated(1 << 20, 1 << 42)


def test_an_offload_policy_without_engines_is_refused(run: Run) -> None:
    refused = run("replay", "--engine-offload", "drop")
    assert refused.returncode == 2
    assert "give --engine-blocks" in " ".join(refused.stderr.split())


# ---- A disk below the pool


@pytest.fixture
def reread_trace(tmp_path: Path) -> Path:
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


def test_every_block_that_was_stored_is_a_hit(run: Run, reread_trace: Path, tmp_path: Path) -> None:
    ended = run("replay", reread_trace, *options(tmp_path / "disk"), "--clients", "1")
    assert ended.returncode == 0, ended.stderr
    result = judge(ended.stdout)
    assert result["hit_rate"] == result["ideal_hit_rate"]
    assert not (tmp_path / "disk").exists(), "no other pool has a use for its blocks"


@pytest.mark.long
def test_two_clients_and_a_second_replay_on_the_same_disk(
    run: Run, reread_trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/blocks").touch()  # a file that exists is not removed
    for _ in range(2):
        ended = run("replay", reread_trace, *options(tmp_path / "disk"), "--clients", "2")
        assert ended.returncode == 0, ended.stderr
        result = judge(ended.stdout)
        assert result["hit_rate"] == pytest.approx(result["ideal_hit_rate"], abs=0.02)


@pytest.mark.long
def test_a_folder_works_as_a_remote_store(run: Run, reread_trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    sizes = ["--block-bytes", "64K", "--pool-bytes", "64M"]
    store = f"file://{tmp_path}/store"
    ended = run("replay", reread_trace, "--json", *sizes, "--remote", store, "--clients", "1")
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


def test_a_disk_without_a_size_is_refused(run: Run, reread_trace: Path, tmp_path: Path) -> None:
    refused = run("replay", reread_trace, "--disk", str(tmp_path / "disk"))
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
    replay = start("replay", reread_trace, "--json", *sizes)
    kill_servers(replay, 2, 4.0)
    stdout, stderr = replay.communicate(timeout=280)
    assert replay.returncode == 0, stderr
    result = judge(stdout)
    assert result["requests"] == 12031
    assert result["hit_rate"] == pytest.approx(result["ideal_hit_rate"], abs=0.005)
