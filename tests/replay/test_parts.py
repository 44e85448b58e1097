# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Traces: they are read, rejected with the line number, and have an ideal hit rate.

Contents of replayed blocks: every kind of wrong byte is detected.

The parts of a replay, each separately: sizes, shares, the dispatcher, children, and a client's
work.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.refusals import Refusal, refusals
from support.virtual_clock import Clock

import beluga.child
from beluga.errors import ReplayError, TraceError
from beluga.index import BlockState
from beluga.pool import STRIPE_SIZE
from beluga.replay import (
    Conversations,
    ReplayOptions,
    client,
    ideal_hit_rate,
    make_workload,
    process,
    run,
)
from beluga.replay import blocks as blocks_module
from beluga.replay import read_trace as read
from beluga.replay.blocks import Contents, digests
from beluga.replay.client import ReplayWorker
from beluga.replay.process import Dispatcher, Job, Process, pool_size_for, report, tickets
from beluga.replay.run import summarize
from beluga.replay.trace import TraceRequest, write_trace

GOOD = '{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [4, 5]}\n'
TRACES = Path(__file__).resolve().parent.parent.parent.parent / "shared/traces"


def request(*blocks: int) -> TraceRequest:
    return TraceRequest(timestamp=0, input_length=1, output_length=1, hash_ids=list(blocks))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = make_workload(Conversations(conversation_count=3))
    write_trace(requests, tmp_path / "trace")
    assert read(tmp_path / "trace") == requests


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not json", "malformed"),
        ('{"timestamp": 1}', "missing required field"),
        (GOOD.replace("[4, 5]", '"45"'), "hash_ids"),
        (GOOD.replace("[4, 5]", "[-1]"), "below 0"),
        (GOOD.replace("[4, 5]", "[9223372036854775808]"), "63 bits"),
        (GOOD.strip()[:-1], "truncated"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(GOOD + "\n" + line + "\n" + GOOD)
    with pytest.raises(TraceError, match=f"^{trace}:3: .*{what}") as caught:
        read(trace)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "holds no requests"), ("\n\n", "holds no requests"), (None, "No such file")],
)
def test_an_empty_trace_is_refused(tmp_path: Path, text: str | None, what: str) -> None:
    if text is not None:
        (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError, match=what):
        read(tmp_path / "trace")


def test_ideal_hits_are_leading_blocks_of_earlier_requests() -> None:
    assert ideal_hit_rate([request(1, 2), request(1, 2, 3), request(9, 1, 2)]) == 2 / 8


def test_ideal_hit_rate_of_the_conversation_trace() -> None:
    trace = TRACES / "mooncake/conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"no {trace.name} beside the checkout")
    requests = read(trace)
    assert len(requests) == 12031
    assert round(ideal_hit_rate(requests), 3) == 0.366


def test_a_workload_is_the_same_every_time_and_shares_prefixes() -> None:
    shape = Conversations(conversation_count=20, turn_count=4)
    requests = make_workload(shape)
    assert requests == make_workload(shape)
    assert make_workload(Conversations(seed=2)) != make_workload(Conversations(seed=1))
    assert len(requests) == 80
    assert [r.timestamp for r in requests] == sorted(r.timestamp for r in requests)
    assert ideal_hit_rate(requests) > 0.5


def test_a_line_without_end_is_refused_as_it_is_read() -> None:
    with pytest.raises(TraceError, match="/dev/zero:1: a line of 16777216 bytes or more"):
        read(Path("/dev/zero"))


def test_the_workload_is_made_of_120_conversations_of_ten_turns() -> None:
    requests = make_workload(Conversations())
    assert len(requests) == 1200
    assert len({tuple(request.hash_ids[:12]) for request in requests}) == 3
    assert {len(request.hash_ids[:12]) for request in requests} == {12}
    answers = {request.output_length // 16 for request in requests}
    assert answers == set(range(1, 9))
    assert all(request.input_length == 16 * len(request.hash_ids) for request in requests)
    assert all(request.output_length % 16 == 0 for request in requests)
    # Conversations start within the 5 s that one takes, with half a second between turns on
    # average.
    assert requests[0].timestamp < 500
    assert 5000 < requests[-1].timestamp < 20000
    firsts = [each for each in requests if len(each.hash_ids) * 16 - each.output_length == 12 * 16]
    assert len(firsts) == 120
    assert 4000 < max(first.timestamp for first in firsts) < 5000
    spans = [request.timestamp for request in requests if request not in firsts]
    assert sum(spans) / len(spans) == pytest.approx(2500 + 5 * 500, rel=0.1)


IDS = np.array([0, 1, 2, 1 << 40], np.uint64)


def flipped(blocks: np.ndarray, index: int) -> np.ndarray:
    blocks.view(np.uint8)[2, index] ^= 1
    return blocks


def rolled(blocks: np.ndarray) -> np.ndarray:
    blocks[1] = np.roll(blocks[1], 8)
    return blocks


@pytest.mark.parametrize(
    ("change", "wrong_count"),
    [
        (lambda blocks: blocks, 0),
        *((lambda blocks, index=index: flipped(blocks, index), 1) for index in (0, 1, 2047, 4095)),
        (rolled, 1),  # lines in the wrong place
        (lambda blocks: blocks[::-1].copy(), len(IDS)),
        (np.zeros_like, len(IDS)),
    ],
)
def test_every_kind_of_wrong_byte_is_detected(
    change: Callable[[np.ndarray], np.ndarray], wrong_count: int
) -> None:
    blocks = np.empty((len(IDS), 512), np.uint64)
    Contents(4096).fill(IDS, blocks)
    assert Contents(4096).wrong_count(IDS, change(blocks)) == wrong_count


def test_digests_are_distinct_and_reproducible() -> None:
    ids = np.arange(10_000, dtype=np.uint64)
    made = digests(ids)
    assert made.shape == (10_000, 16)
    assert len({bytes(row) for row in made}) == 10_000
    assert bytes(digests(ids[5:6])[0]) == bytes(made[5])


def test_ids_are_mixed_like_splitmix64() -> None:
    """The first outputs of seed 0 are published, and other words follow from them."""
    assert digests(np.array([0], np.uint64)).view(np.uint64)[0, 0] == 0xE220A8397B1DCDAF
    filled = np.empty((1, 8), np.uint64)
    Contents(64).fill(np.array([0], np.uint64), filled)
    assert [int(word) for word in filled[0, :3]] == [
        0xE220A8397B1DCDAF * odd % (1 << 64) for odd in (1, 3, 5)
    ]


MIB = 1 << 20


def requests(*ids: Sequence[int], apart_ms: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(100 + n * apart_ms, 1, 1, list(chain)) for n, chain in enumerate(ids)]


def replay(trace: list[TraceRequest], block_size: int, **moved: Any) -> Any:
    options = run.ReplayOptions(block_size=block_size, client_count=1)
    advance = moved.get("advance", lambda done, total: None)
    return run.replay(trace, options, note=print, advance=advance)


def smallest(blocks: int, total: int | None) -> Any:
    return pool_size_for(requests(range(blocks)), 4096, total)


# ---- Sizes.


@pytest.mark.parametrize(
    ("blocks", "total", "expected"),
    [
        # 8 KiB plus 4 % and two lines per block, and 8 MiB of lanes, make 13 MB per device; then
        # five stripes.
        (1000, None, (2024, 16, 11 * STRIPE_SIZE)),
        (10, 64 * MIB + 4095, (1034, 16, 32 * MIB)),  # a given size is cut into stripes
        (10, 67 * MIB, (1034, 16, 32 * MIB)),
        # 16 lanes of 512 KiB and 1034 blocks of 128 bytes are 4 stripes.
        (10, 24 * MIB, (1034, 16, 12 * MIB)),
    ],
)
def test_a_pool_has_room_for_every_block_its_checksums_and_tables(
    blocks: int, total: int | None, expected: tuple[int, int, int]
) -> None:
    size = smallest(blocks, total)
    assert (size.block_count_max, size.lane_count, size.device_size) == expected
    assert size.total_size == 2 * size.device_size


def test_large_blocks_waste_little() -> None:
    size = pool_size_for(requests(range(100)), MIB, None)
    stored = 1124 * (MIB + 4096)
    assert stored < size.total_size < 1.03 * stored


@refusals(
    (lambda: smallest(10, 24 * MIB - 1), ReplayError, "of 24.0 MiB has no room", "at least 24 MiB"),
    (lambda: smallest(1 << 16, 30 * MIB), ReplayError, "at least 32 MiB"),
    *(
        (lambda size=size: replay([], size), ReplayError, f"of {size} bytes is too small or uneven")
        for size in (0, 56, 63, 68)
    ),
)
def test_impossible_sizes_are_refused(refusal: Refusal) -> None:
    refusal()


# ---- Results.

TALLY = {
    "request_count": 1, "looked_up_count": 8, "hit_count": 2, "got_count": 2, "put_count": 6,
    "refused_count": 1, "wrong_count": 3, "mismatch_count": 4, "get_s": 0.5, "put_s": 2.0,
    "rpc_ns": [1000, 3000],
}  # fmt: skip


def test_the_clients_tallies_are_summed() -> None:
    summary = summarize(requests([1, 2], [1, 2]), 10**9, 7.0, [TALLY, {**TALLY, "rpc_ns": [2000]}])
    assert (summary.requests, summary.blocks_looked_up, summary.blocks_hit) == (2, 16, 4)
    assert (summary.hit_rate, summary.ideal_hit_rate) == (0.25, 0.5)
    assert (summary.blocks_put, summary.blocks_refused) == (12, 2)
    assert (summary.bytes_put, summary.bytes_got) == (12 * 10**9, 4 * 10**9)
    assert (summary.verify_errors, summary.mismatches, summary.seconds) == (6, 8, 7)
    assert (summary.put_gb_per_s, summary.get_gb_per_s) == (3, 4)
    assert (summary.rpc_p50_us, summary.rpc_p99_us) == (2, pytest.approx(2.98))


def test_a_client_without_work_has_no_rates() -> None:
    idle: dict[str, Any] = dict.fromkeys(TALLY, 0) | {"rpc_ns": []}
    summary = summarize(requests([1]), 4096, 1.0, [idle])
    assert (summary.hit_rate, summary.put_gb_per_s, summary.get_gb_per_s) == (0, 0, 0)
    assert (summary.rpc_p50_us, summary.rpc_p99_us) == (0, 0)


# ---- The dispatcher.


def dispatched(dispatcher: Dispatcher) -> list[int]:
    end = os.dup(dispatcher.read_end)
    dispatcher.start()
    try:
        return list(tickets(end, 60.0, lambda: None))
    finally:
        os.close(end)
        dispatcher.stop()


def test_every_request_number_is_dispatched_once_in_order() -> None:
    assert dispatched(Dispatcher(requests(*[[n] for n in range(300)]), None)) == list(range(300))


def test_numbers_are_sent_at_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("beluga.replay.process.time", clock)
    dispatcher = Dispatcher(requests([1], [2], [3], apart_ms=1500), 3.0)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock.now_s += seconds + 0.125  # the request is behind schedule

    dispatcher._stopped = SimpleNamespace(  # type: ignore[assignment]
        wait=wait, is_set=lambda: False, set=lambda: None
    )
    assert dispatched(dispatcher) == [0, 1, 2]
    assert waited == pytest.approx([0, 0.375, 0.375])


def test_a_stopped_dispatcher_sends_no_more_numbers() -> None:
    dispatcher = Dispatcher(requests([1], [2], apart_ms=1e9), 1.0)
    end = os.dup(dispatcher.read_end)
    dispatcher.start()
    numbers = tickets(end, 60.0, lambda: None)
    assert next(numbers) == 0
    dispatcher.stop()
    assert list(numbers) == []
    os.close(end)


def test_a_dispatcher_that_never_began_closes_its_pipe() -> None:
    dispatcher = Dispatcher(requests([1]), None)
    ends = (dispatcher.read_end, dispatcher._write_end)
    dispatcher.stop()
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


# ---- Children.


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A child that runs a line of Python."""
    with ExitStack() as cleanup:

        def start(code: str, stdin: int = subprocess.PIPE) -> Process:
            monkeypatch.setattr(beluga.child, "command", lambda *_: [sys.executable, "-c", code])
            made = Process("the child", "module", [], stdin)
            cleanup.callback(made.stop)
            return made

        yield start


def test_children_report_by_lines(child: Any) -> None:
    made = child("print('{\"done\": 3}')")
    assert made.next_report() == {"done": 3}
    with pytest.raises(
        ReplayError, match="the child ended before its work was done: exit status 0"
    ):
        made.next_report()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('print(\'{"error": "no luck"}\')', "^the child: no luck$"),
        ("import sys; sys.stdout.write('{\"done\"'); sys.exit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_the_reason_of_a_childs_end_is_reported(child: Any, code: str, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        child(code).next_report()


HANGS = "import signal; signal.pause()"


HANGS = "import signal; signal.pause()"


@pytest.mark.parametrize(
    ("code", "stdin", "status"),
    [
        ("sys.stdin.read(); sys.exit(7)", subprocess.PIPE, 7),  # by the end of its stdin
        (HANGS, subprocess.PIPE, -signal.SIGKILL),
        (HANGS, subprocess.DEVNULL, -signal.SIGTERM),  # without its own stdin
    ],
)
def test_a_stopped_child_ends(
    child: Any, monkeypatch: pytest.MonkeyPatch, code: str, stdin: int, status: int
) -> None:
    monkeypatch.setattr(process, "_STOP_TIMEOUT_S", 0.01 if status == -signal.SIGKILL else 60)
    made = child("import sys; print('{\"ready\": 1}', flush=True); " + code, stdin)
    assert made.next_report()
    made.stop()
    assert made._child.returncode == status
    assert made.stdout.closed


def test_ctrl_c_is_not_delivered_to_children(child: Any) -> None:
    made = child(
        "import json, signal; "
        "print(json.dumps({'blocked': 2 in signal.pthread_sigmask(signal.SIG_BLOCK, [])}))"
    )
    assert made.next_report() == {"blocked": True}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_report_is_one_line_and_a_dead_parent_ends_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(process.sys, "stdout", SimpleNamespace(fileno=lambda: write))
    report({"done": 3})
    assert os.read(read, 100) == b'{"done":3}\n'
    os.close(read)
    with pytest.raises(SystemExit) as ended:
        report({"done": 4})
    assert ended.value.code == 1
    os.close(write)


# ---- All together.


def clients_of(*messages: tuple[int, Any], clients: int = 2) -> Any:
    made = object.__new__(run._Processes)
    made._clients = [None] * clients  # type: ignore[list-item]
    made._messages = run.queue.Queue()
    made._again = False
    for message in messages:
        made._messages.put(message)
    return made


def test_progress_is_the_sum_of_all_clients() -> None:
    done: list[int] = []
    tally = {"request_count": 5}
    lines = clients_of((0, {"done": 2}), (1, {"done": 3}), (0, {"done": 4}), (1, {"tally": tally}),
                 (0, {"tally": {"request_count": 4}})).watch(done.append)  # fmt: skip
    assert done == [2, 5, 7, 9, 9]
    assert lines == [tally, {"request_count": 4}]


def test_the_first_failure_ends_the_replay() -> None:
    with pytest.raises(ReplayError, match="gone"):
        clients_of((0, {"done": 2}), (2, ReplayError("gone"))).watch(lambda done: None)


def test_reports_of_a_process_are_read_until_its_result_or_end() -> None:
    made = clients_of()
    reports = iter([{"done": 1}, {"tally": {}}, {"done": 9}])
    made._read_reports(1, SimpleNamespace(next_report=lambda: next(reports)))
    assert [made._messages.get() for _ in range(2)] == [(1, {"done": 1}), (1, {"tally": {}})]
    assert next(reports) == {"done": 9}

    def fail() -> None:
        raise ReplayError("gone")

    made._read_reports(0, SimpleNamespace(next_report=fail))
    index, error = made._messages.get()
    assert (index, str(error)) == (0, "gone")


@pytest.mark.parametrize(("size", "free", "message"), [(10, 10, 0), (11, 10, 1)])
def test_the_pool_is_in_memory_if_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, free: int, message: int
) -> None:
    monkeypatch.setattr(run, "_MEMORY", tmp_path)
    monkeypatch.setattr(run, "room", lambda path: SimpleNamespace(size=free))
    calls: list[str] = []
    parent = run._choose_parent(size, calls.append)
    assert len(calls) == message
    assert parent == (Path(run.tempfile.gettempdir()) if message else tmp_path)
    monkeypatch.setattr(run, "_MEMORY", tmp_path / "none")
    assert run._choose_parent(1, calls.append) == Path(run.tempfile.gettempdir())


def test_the_smallest_block_is_replayed(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[int, ...]] = []
    summary = replay(requests([1, 2], [1, 2, 3]), 64, advance=lambda *move: moves.append(move))
    assert (summary.blocks_looked_up, summary.blocks_hit, summary.blocks_put) == (5, 2, 3)
    assert (summary.bytes_put, summary.bytes_got) == (3 * 64, 2 * 64)
    assert moves[-1] == (2, 2)
    assert 0 < summary.seconds < 1000


# ---- A client.


class Cache:
    """Blocks by key. Some are being written during a number of calls, or are returned changed."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, np.ndarray] = {}
        self.pending: dict[bytes, int] = {}
        self.gets = self.puts = 0

    def get(self, keys: np.ndarray, blocks: np.ndarray) -> Any:
        self.gets += 1
        states = []
        for key, block in zip(map(bytes, keys), blocks, strict=True):
            if key in self.pending:
                self.pending[key] -= 1
                if self.pending[key] < 0:
                    del self.pending[key]
                states.append(BlockState.PENDING)
            elif key in self.blocks:
                block[:] = self.blocks[key]
                states.append(BlockState.HIT)
                continue
            else:
                states.append(BlockState.MISS)
            break
        hits = states.count(BlockState.HIT)
        states += [BlockState.MISS] * (len(keys) - len(states))
        return SimpleNamespace(hits=hits, states=states, mismatches=2)

    def put(self, keys: np.ndarray, blocks: np.ndarray) -> Any:
        self.puts += 1
        for key, block in zip(map(bytes, keys), blocks, strict=True):
            self.blocks[key] = block.copy()
        return SimpleNamespace(
            stored=len(keys),
            refused=1,
            states=np.full(len(keys), BlockState.GRANTED, np.uint8),
            statuses=np.zeros(len(keys), np.int32),
        )


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    made = Cache()
    monkeypatch.setattr(client, "KVCache", lambda *_, **__: made)
    clock = SharedClock()
    for module in (client, blocks_module):
        monkeypatch.setattr(module, "time", clock)
    clock.cache = made
    return made


class SharedClock(Clock):
    """A clock on which a get takes a quarter of a millisecond and a put one millisecond."""

    cache: Cache

    def perf_counter(self) -> float:
        return self.now_s + self.cache.gets / 4096 + self.cache.puts / 1024


def job(devices: Sequence[str] = (), trace: str = "", *, compare: bool = True) -> Job:
    options = ReplayOptions(block_size=64, compare=compare)
    return Job(options, "", list(devices), trace, "test")


def worker(*, compare: bool = True) -> ReplayWorker:
    connection: Any = SimpleNamespace(ping=lambda: 2.5e-6, report=SimpleNamespace())
    return ReplayWorker(connection, job(compare=compare))


def key(block: int) -> bytes:
    return bytes(digests(np.array([block], np.uint64))[0])


def test_a_client_gets_present_blocks_and_puts_the_rest(cache: Cache) -> None:
    made = worker()
    for request in requests([1, 2], [1, 2, 3], [1, 2]):
        made.replay(request)
    tally = made.tally
    assert (tally.request_count, tally.looked_up_count, tally.hit_count) == (3, 7, 4)
    assert (tally.put_count, tally.refused_count) == (3, 2)
    assert (tally.wrong_count, tally.mismatch_count) == (0, 6)
    assert tally.rpc_ns == [2500] * 3
    assert tally.get_s == pytest.approx(3 / 4096)
    assert tally.put_s == pytest.approx(2 / 1024)
    expected = np.empty((1, 8), np.uint64)
    Contents(64).fill(np.array([3], np.uint64), expected)
    assert (cache.blocks[key(3)] == expected).all()


@pytest.mark.parametrize("compare", [True, False])
def test_wrong_bytes_are_counted(cache: Cache, compare: bool) -> None:
    made = worker(compare=compare)
    made.replay(requests([1, 2, 3])[0])
    cache.blocks[key(2)][5] ^= np.uint64(1)
    del cache.blocks[key(3)]
    made.replay(requests([1, 2, 3])[0])
    assert made.tally.wrong_count == compare


def test_a_pending_block_is_waited_for(cache: Cache) -> None:
    made = worker()
    made.replay(requests([1, 2, 3])[0])
    cache.pending[key(2)] = 3
    made.replay(requests([1, 2, 3])[0])
    assert (made.tally.hit_count, made.tally.put_count) == (3, 3)
    assert client.time.slept == [0.0002] * 4  # type: ignore[attr-defined]


def test_a_block_that_is_written_for_too_long_is_put(cache: Cache) -> None:
    made = worker()
    cache.pending[key(1)] = 1 << 30
    made.replay(requests([1])[0])
    assert (made.tally.hit_count, made.tally.put_count) == (0, 1)
    clock: Any = client.time
    assert 0.1 <= clock.now_s - 1000 + cache.gets / 4096 <= 0.102


def test_a_client_reports_its_progress_ten_times_a_second(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(client, "report", lambda message: calls.append(dict(message)))
    monkeypatch.setattr(client, "read_trace", lambda path: requests(*[[n] for n in range(5)]))
    for name in ("Pool", "Client"):
        monkeypatch.setattr(client, name, Context)

    def numbers(descriptor: int, idle_s: float, idle: Any) -> Any:
        for number in range(5):
            client.time.sleep(0.06)
            yield number

    monkeypatch.setattr(client, "tickets", numbers)
    monkeypatch.setattr(client, "sys", SimpleNamespace(stdin=SimpleNamespace(fileno=lambda: 0)))
    client.work(job())
    assert calls[0] == {"ready": True}
    assert calls[1:-1] == [{"done": 2}, {"done": 4}]
    assert calls[-1]["tally"]["request_count"] == 5


class Context(SimpleNamespace):
    """A pool, or a connection to its server, as a context manager."""

    def __init__(self, *_: object) -> None:
        super().__init__(ping=lambda: 0.0, report=SimpleNamespace())

    @classmethod
    def open(cls, devices: object) -> Context:
        return cls()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_client_reports_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(client, "report", calls.append)
    argument = msgspec.json.encode(job(["/none"], "/none/trace")).decode()
    monkeypatch.setattr(client.sys, "argv", ["client", argument])
    with pytest.raises(SystemExit) as ended:
        client.main()
    assert ended.value.code == 1
    [message] = calls
    assert "/none/trace: No such file" in message["error"]
