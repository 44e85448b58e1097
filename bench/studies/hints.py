# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gain of hints on sessions with pauses: LRU, hints and Belady's MIN, compared.

``python -m beluga_bench.studies.hints TRACES OUT``. ``--smoke`` instead of TRACES runs a few
generated sessions.

weka's sessions share one pool, whose size is a fraction of their distinct blocks; requests run one
after another in the order of their times. The pool evicts and applies hints as the server does
(``hinted.py``; a test compares it with a server). Results are computed, not
measured. A client is an agent of one session, without information about other sessions or the
future:

* ``keep``: each request's hint favors its blocks until they have been unused for that many seconds.
  Hints beyond the budget are rejected.
* ``left``: a request that rewrites its session's history releases the blocks that it no longer has.
* ``end``: the last request of a session releases the session's blocks.
* ``turn``: when an answer ends the turn, a human responds next. Until the session continues, its
  blocks are evicted first.

A request's hint is for the blocks that it stores and those that its session has stored, as in
vLLM's connector (:mod:`beluga.connectors.vllm.hints`); no block of weka's belongs to two sessions.
The hint for the end of a turn comes after the answer, so a program has to give it
(``KVCache.hint``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from beluga.child import run_program
from beluga.simulate.trace import Trace, TraceEntry, make_trace

from ..harness.recorded import computed, write_record
from .hinted import LEVELS, HintedPool
from .tiers_policy import bound

_POOLS = (0.05, 0.1, 0.2)  # fractions of the distinct blocks
_BUDGETS = (0.25, 0.5, 0.9)


class Step(NamedTuple):
    """A request of a session: its time, its blocks, and the client's information for hints."""

    at_s: float
    session: int
    ids: np.ndarray
    last: bool  # the last request of its session
    ends_turn: bool  # the next turn waits for a human


class Strategy(NamedTuple):
    """The hints that all clients give. ``ttl_s`` is that of ``keep``; 0 keeps nothing."""

    ttl_s: float = 0.0
    left: bool = False
    end: bool = False
    turn: bool = False

    def __str__(self) -> str:
        words = [f"keep {self.ttl_s:g} s"] * (self.ttl_s > 0) + ["left"] * self.left
        return " + ".join(words + ["end"] * self.end + ["turn"] * self.turn)


NONE = Strategy()


class Result(NamedTuple):
    """One run. ``hit`` is the share of all blocks requested, as leading blocks; ``of_gap`` is what
    hints gain of what MIN gains over LRU. ``favored`` is the largest share of the pool that hints
    favored, and ``refused`` the hints beyond the budget, per block requested.
    """

    pool: float
    policy: str
    budget: float | None
    hit: float
    of_gap: float | None
    favored: float
    refused: float


class _Request(msgspec.Struct):
    t: float
    input_tokens: int = msgspec.field(name="in")
    hash_ids: list[int]
    stop: str = ""


class _Session(msgspec.Struct):
    block_size: int
    requests: list[_Request]


def sessions(folder: Path) -> list[list[_Request]]:
    """Return weka's sessions."""
    files = sorted(folder.glob("*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=_Session).requests for file in files]


def made_sessions(count: int = 8, turns: int = 12) -> list[list[_Request]]:
    """Make sessions that grow, with pauses."""
    chance, sessions = Random(0), list[list[_Request]]()  # noqa: S311  an order, not secrets
    for _ in range(count):
        now, length, requests = 0.0, 10, list[_Request]()
        for turn in range(turns):
            human = turn % 4 == 3
            ids = list(range(length))
            requests.append(_Request(now, 64 * length, ids, "end_turn" if human else "tool_use"))
            now += chance.expovariate(1 / (600 if human else 10))
            length += chance.randint(1, 5)
        sessions.append(requests)
    return sessions


def steps_of(sessions: list[list[_Request]]) -> tuple[list[Step], Trace]:
    """Return the requests of all sessions by time, and the same as a trace."""
    entries: list[tuple[float, int, int, TraceEntry]] = []
    offset = 0
    for session, requests in enumerate(sessions):
        for turn, agent in enumerate(requests):
            blocks = [block + offset for block in agent.hash_ids]
            entry = TraceEntry(agent.t, max(agent.input_tokens, 64 * len(blocks)), 1, blocks)
            entries.append((agent.t, session, turn, entry))
        offset += 1 + max(max(request.hash_ids, default=0) for request in requests)
    entries.sort(key=lambda item: item[0])
    trace = make_trace("weka", 64, [entry for *_, entry in entries], 1.0)
    steps = []
    for (at_s, session, turn, _), first, count in zip(
        entries, trace.first, trace.count, strict=True
    ):
        requests = sessions[session]
        last, ends = turn == len(requests) - 1, requests[turn].stop == "end_turn"
        steps.append(Step(at_s, session, trace.ids[first : first + count], last, ends))
    return steps, trace


class _Clients:
    """The agents, and what their sessions have stored."""

    def __init__(self, pool: HintedPool, strategy: Strategy) -> None:
        self._pool, self._strategy = pool, strategy
        self._former: dict[int, np.ndarray] = {}  # a session's last prompt
        self._away: set[int] = set()  # sessions in a pause

    def serve(self, step: Step) -> int:
        """Run a request. Returns its hits."""
        hits = self._pool.look_up(step.at_s, step.ids)
        self._pool.put(step.at_s, step.ids)
        self._hint(step)
        return hits

    def _hint(self, step: Step) -> None:
        strategy, low = self._strategy, LEVELS["low"]
        former, back = self._former.get(step.session), step.session in self._away
        self._former[step.session] = step.ids
        self._away.discard(step.session)
        if strategy.left and former is not None:
            dropped = np.setdiff1d(former, step.ids)  # in ascending order, parents first
            self._pool.hint(step.at_s, dropped, low)
        if strategy.end and step.last:
            self._pool.hint(step.at_s, step.ids, low)
            return
        if strategy.turn and step.ends_turn:
            self._away.add(step.session)
            self._pool.hint(step.at_s, step.ids, low)
            return
        if strategy.ttl_s:
            self._pool.hint(step.at_s, step.ids, LEVELS["high"], strategy.ttl_s)
        elif back:
            self._pool.hint(step.at_s, step.ids, LEVELS["normal"])


def run(
    steps: list[Step],
    trace: Trace,
    share: float,
    *,
    budget: float = 0.0,
    strategy: Strategy = NONE,
) -> tuple[float, float, float]:
    """Return the share of blocks that are hit, the largest share of the pool that was favored, and
    the hints refused per block.
    """
    capacity = int(share * trace.id_count)
    pool = HintedPool(trace.id_count, capacity, int(budget * capacity))
    clients, requested = _Clients(pool, strategy), sum(trace.count)
    hits = sum(clients.serve(step) for step in steps)
    if pool.favored_max > int(budget * capacity):
        raise RuntimeError(f"hints favored {pool.favored_max} blocks, more than their budget")
    return hits / requested, pool.favored_max / capacity, pool.refused / requested


def strategies() -> Iterator[tuple[float, Strategy]]:
    """Yield the budgets and strategies that are compared."""
    yield 0.25, Strategy(left=True)
    yield 0.25, Strategy(end=True)
    yield 0.25, Strategy(turn=True)
    yield 0.25, Strategy(left=True, end=True)
    yield 0.25, Strategy(left=True, end=True, turn=True)
    for budget in _BUDGETS:
        yield budget, Strategy(60.0)
        yield budget, Strategy(600.0)
        yield budget, Strategy(600.0, left=True, end=True)
        yield budget, Strategy(600.0, left=True, end=True, turn=True)


def compare(steps: list[Step], trace: Trace, share: float) -> list[Result]:
    """Run everything in a pool of a share of the blocks."""
    results = []
    lru = run(steps, trace, share)[0]
    best = bound(trace, int(share * trace.id_count))
    results.append(Result(share, "lru", None, round(lru, 4), 0.0, 0.0, 0.0))
    for budget, strategy in strategies():
        hit, favored, refused = run(steps, trace, share, budget=budget, strategy=strategy)
        gap = (hit - lru) / (best - lru) if best > lru else None
        numbers = [None if x is None else round(x, 4) for x in (hit, gap, favored, refused)]
        results.append(Result(share, str(strategy), budget, *numbers))  # type: ignore[arg-type]
    results.append(Result(share, "belady", None, round(best, 4), 1.0, 0.0, 0.0))
    return results


def main(source: str, target: str) -> None:
    """Run all, and write the results after each size."""
    smoke = source == "--smoke"
    steps, trace = steps_of(made_sessions() if smoke else sessions(Path(source) / "weka"))
    report = {
        **computed(f"python -m beluga_bench.studies.hints {Path(source).name} {Path(target).name}"),
        "requests": len(steps),
        "blocks": trace.id_count,
        "requested": sum(trace.count),
        "unlimited": round(1 - trace.id_count / sum(trace.count), 4),
    }
    results: list[Result] = []
    for share in (0.1,) if smoke else _POOLS:
        results += compare(steps, trace, share)
        rows = [result._asdict() for result in results]
        write_record(Path(target), {**report, "rows": rows})
        print(f"a pool of {share:.0%}: {len(results)} results", file=sys.stderr)


if __name__ == "__main__":
    run_program(partial(main, *sys.argv[1:]))
