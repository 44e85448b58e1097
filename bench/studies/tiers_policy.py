# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of eviction and admission.

``python -m beluga_bench.studies.tiers_policy TRACES OUT``.

Requests of a trace run one after another through a pool and a disk below it. Eviction is the
server's C code (csrc/index/evict.h), admission is the code of beluga/tiers. Results are computed,
not measured. ``--smoke`` instead of TRACES runs a small generated trace.

A request's hits are its leading blocks that are in the pool or on the disk. Then all its blocks are
in the pool; those that were in neither are offered to the disk, which evicts by the same policy.

The bound is Belady's MIN for one memory of the pool's and the disk's blocks together, which may
refuse blocks. It is exact for prefixes: a request that uses a block also uses its parent, so a
parent's next use is never later than its child's, and with the deeper block first among equals MIN
never evicts a parent before its child. So every block hit is a hit of the prefix.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi
from beluga.child import run_program
from beluga.index import EVICTIONS
from beluga.simulate import Trace, TraceEntry, load_trace, make_trace
from beluga.simulate.memory import SimulatedTier
from beluga.tiers.admission import ADMISSIONS, Adaptive, Admission

from ..harness.recorded import computed, write_record

_POOLS = (0.02, 0.05, 0.1, 0.2)  # fractions of the trace's distinct blocks
_DISKS = (0.1, 0.3, 1.0)
_SHOWN = {(0.02, 0.1), (0.02, 0.3), (0.1, 0.1), (0.1, 0.3), (0.1, 1.0), (0.2, 1.0)}  # recorded
_FILES = ("mooncake/conversation_trace.jsonl", "weka", "llmservingsim/*.jsonl")
_NEVER = 1 << 40
DEFAULT = ("lru", "adaptive")


class Result(NamedTuple):
    """One run. The hits are shares of all blocks that the trace requests. ``written`` is the
    disk's writes per different block of the trace, and ``written_per_hit`` the writes per block of
    the disk that was hit later, at least once.
    """

    trace: str
    pool: float
    disk: float
    eviction: str
    admission: str
    hit: float
    pool_hit: float
    disk_hit: float
    written: float
    written_per_hit: float | None
    bound: float


def without_reuse(requests: int = 33_000) -> Trace:
    """Make a trace without reuse."""
    chance = Random(0)  # noqa: S311  lengths, not secrets
    first, prompts = 0, []
    for number in range(requests):
        count = chance.randint(1, 60)
        prompts.append(TraceEntry(float(number), 512 * count, 100, range(first, first + count)))
        first += count
    return make_trace("without reuse", 512, prompts, 1.0)


def shared_prompt(requests: int = 2000) -> Trace:
    """Make a trace in which all requests share 32 blocks, without other reuse."""
    prompts = []
    for number in range(requests):
        own = range(1000 + 40 * number, 1040 + 40 * number)
        prompts.append(TraceEntry(float(number), 72 * 512, 100, [*range(32), *own]))
    return make_trace("shared prompt", 512, prompts, 1.0)


def conversations(users: int = 60, turns: int = 10) -> Trace:
    """Make a small trace of conversations that continue at random."""
    chance = Random(0)  # noqa: S311  an order, not secrets
    length = [0] * users
    prompts = []
    for number in range(users * turns):
        user = chance.randrange(users)
        length[user] += chance.randint(1, 4)
        blocks = range(user * 1000, user * 1000 + length[user])
        prompts.append(TraceEntry(float(number), 512 * len(blocks), 100, blocks))
    return make_trace("conversations", 512, prompts, 1.0)


def bound(trace: Trace, capacity: int) -> float:
    """Return the share of blocks that Belady's MIN hits."""
    count = sum(trace.count)
    ids = trace.ids[:count].tolist()
    request = np.repeat(np.arange(len(trace)), trace.count).tolist()
    depth = (np.arange(count) - np.repeat(trace.first, trace.count)).tolist()
    following, latest = [_NEVER] * count, dict[int, int]()
    for at in range(count - 1, -1, -1):
        following[at] = latest.get(ids[at], _NEVER)
        latest[ids[at]] = request[at]
    inside: dict[int, tuple[int, int, int]] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for at, block in enumerate(ids):
        hits += block in inside
        inside[block] = rank = (-following[at], -depth[at], block)
        heapq.heappush(farthest, rank)
        while len(inside) > capacity:
            rank = heapq.heappop(farthest)
            if inside.get(rank[2]) == rank:  # otherwise it was used since
                del inside[rank[2]]
    return hits / count


def _keys(count: int) -> NDArray[np.uint64]:
    """Return a key for each block of a trace."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ numbers >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(32)
    return np.stack([numbers, numbers * np.uint64(0x94D049BB133111EB)], axis=1)


class _Hierarchy:
    """A pool and a disk, and what is counted in them."""

    def __init__(self, trace: Trace, sizes: tuple[int, int], eviction: str, admission: str) -> None:
        self.trace = trace
        self.pool, self.disk = (SimulatedTier(trace.id_count, size, eviction) for size in sizes)
        self.pool_hits = self.disk_hits = self.written = 0
        self.policy: Admission = (
            Adaptive(warm_up=2 * sizes[0], pool_hits=lambda: self.pool_hits)
            if admission == "adaptive"
            else ADMISSIONS[admission]()
        )
        self._keys = _keys(trace.id_count)
        self._base = ffi.from_buffer("uint32_t[]", trace.ids)
        self.fresh = np.zeros(trace.id_count, np.bool_)  # written, and not hit since
        self.useful = 0  # writes that were hit later

    def run(self) -> None:
        """Run all requests."""
        for first, count in zip(self.trace.first, self.trace.count, strict=True):
            if count:
                self._serve(first, count)

    def _serve(self, first: int, count: int) -> None:
        ids = self._base + first
        lead = from_disk = 0
        while lead < count:
            hits = self.pool.lead(ids + lead, count - lead)
            lead += hits
            self.pool_hits += hits
            deeper = self.disk.lead(ids + lead, count - lead)
            if not hits and not deeper:
                break
            self._hit_disk(self.trace.ids[first + lead : first + lead + deeper])
            lead += deeper
            from_disk += deeper
        self.disk_hits += from_disk
        self.policy.hit(from_disk)
        self.disk.touch(ids, count)
        missed = [at for at in range(first + lead, first + count) if not self._has(at)]
        self.pool.put(ids, count)
        if missed:
            self._offer(self.trace.ids[missed])

    def _has(self, at: int) -> bool:
        """Return whether a tier has a block after the leading ones."""
        block = self._base + at
        return bool(self.pool.lead(block, 1) or self.disk.lead(block, 1))

    def _hit_disk(self, blocks: NDArray[np.uint32]) -> None:
        self.useful += int(np.count_nonzero(self.fresh[blocks]))
        self.fresh[blocks] = False

    def _offer(self, blocks: NDArray[np.uint32]) -> None:
        admitted = np.ascontiguousarray(blocks[self.policy.admit(self._keys[blocks])])
        if len(admitted):
            pointer = ffi.from_buffer("uint32_t[]", admitted)
            self.written += self.disk.put(pointer, len(admitted))
            self.fresh[admitted] = True


def compare(
    trace: Trace, pools: tuple[float, ...] = _POOLS, disks: tuple[float, ...] = _DISKS
) -> Iterator[Result]:
    """Run a trace with each eviction and admission, and without a disk."""
    limit = cache(lambda blocks: bound(trace, blocks))
    total = sum(trace.count)
    for pool in pools:
        for disk in (0.0, *disks):
            sizes = (max(1, int(pool * trace.id_count)), int(disk * trace.id_count))
            for eviction in EVICTIONS:
                for admission in ADMISSIONS if disk else ("none",):
                    tiers = _Hierarchy(trace, sizes, eviction, admission if disk else "always")
                    tiers.run()
                    pool_hit, disk_hit = tiers.pool_hits / total, tiers.disk_hits / total
                    yield Result(
                        trace.name, pool, disk, eviction, admission,
                        round(pool_hit + disk_hit, 5), round(pool_hit, 5), round(disk_hit, 5),
                        round(tiers.written / trace.id_count, 5),
                        round(tiers.written / tiers.useful, 3) if tiers.useful else None,
                        round(limit(sum(sizes)), 5),
                    )  # fmt: skip


def judge(results: list[Result]) -> list[dict[str, object]]:
    """Return, for each trace, the default's mean hit rate and that of the best pair of policies,
    and the default's worst case.
    """
    rows = []
    for trace in dict.fromkeys(result.trace for result in results):
        cases: dict[tuple[float, float], dict[tuple[str, str], Result]] = {}
        for result in results:
            if result.trace == trace and result.disk:
                pair = (result.eviction, result.admission)
                cases.setdefault((result.pool, result.disk), {})[pair] = result
        pairs = next(iter(cases.values()))
        means = {p: sum(case[p].hit for case in cases.values()) / len(cases) for p in pairs}
        best = max(means, key=lambda pair: means[pair])
        ratios = {
            size: case[DEFAULT].hit / hit_max
            for size, case in cases.items()
            if (hit_max := max(result.hit for result in case.values())) > 0
        }
        worst = min(ratios, key=lambda size: ratios[size]) if ratios else None
        rows.append(
            {
                "trace": trace,
                "default_hit": round(means[DEFAULT], 4),
                "best": "/".join(best),
                "best_hit": round(means[best], 4),
                "ratio": round(means[DEFAULT] / means[best], 4) if means[best] else None,
                "worst_ratio": round(ratios[worst], 4) if worst else None,
                "worst_at": list(worst) if worst else None,
                "written": round(max(case[DEFAULT].written for case in cases.values()), 4),
            }
        )
    return rows


def traces(folder: Path) -> Iterator[Trace]:
    """Yield the traces with blocks, and those that are generated."""
    for pattern in _FILES:
        for path in sorted(folder.glob(pattern)):
            yield load_trace(path)
    yield without_reuse()
    yield shared_prompt()


def main(source: str, target: str) -> None:
    """Run all, and write the results after each trace."""
    smoke = source == "--smoke"
    chosen = iter([conversations(), without_reuse(100)]) if smoke else traces(Path(source))
    report = computed(
        f"python -m beluga_bench.studies.tiers_policy {Path(source).name} {Path(target).name}"
    )
    results: list[Result] = []
    for trace in chosen:
        few = smoke or trace.name == "without reuse"  # nothing depends on the sizes there
        results += compare(trace, (0.1,), (0.3,)) if few else compare(trace)
        print(f"{trace.name}: {len(results)} results", file=sys.stderr)
        rows = [
            result._asdict()
            for result in results
            if result.disk == 0 or (result.pool, result.disk) in _SHOWN
        ]
        write_record(Path(target), {**report, "judged": judge(results), "rows": rows})


if __name__ == "__main__":
    run_program(partial(main, *sys.argv[1:]))
