# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The growth table: which resource is exhausted first as hosts and pools are added. ``python -m
beluga_bench.studies.growth`` prints the table of docs/understand/benchmarks.md.

The costs of a call for the pool's server and for the router are measured here. The speeds of links
are those of the paper (beluga/router/costs.py). The amount of work is that of the conversation
trace: its mean prompt, and the hit rate and arrivals that the simulator finds for it at twice its
speed.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from beluga import Client, IndexServer
from beluga.child import run_program
from beluga.index import IndexClient
from beluga.pool import Pool
from beluga.router import Query, Router, Worker, costs, make_policy

from ..harness.options import SOFTWARE

GPUS = 16 * 8  # GPUs behind one switch
_ROUNDS = 300
_BLOCK_TOKENS = 16  # vLLM's block size, and so the pool's
_ADAPTERS_PER_GPU = 0.5
_DEVICES = 32  # 8 TB behind one switch in the paper


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The work of one GPU."""

    requests_per_s: float = 0.85  # 3.4 per second at twice the speed, over 8 GPUs
    prompt_tokens: int = 12035
    hit_rate: float = 0.22  # hits in the pool, beyond HBM

    @property
    def keys(self) -> int:
        """The number of keys that a request looks up."""
        return self.prompt_tokens // _BLOCK_TOKENS

    @property
    def bytes(self) -> float:
        """The bytes of a request's KV with Qwen3-32B."""
        return self.prompt_tokens * costs.MODELS[costs.DEFAULT_MODEL].kv_bytes_per_token


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that were measured on this machine."""

    key_s: float  # one key of a call, for the server and its client
    route_s: float  # routing one request, without HTTP


def measure(work: Work) -> Measured:
    """Measure the keys of calls in a pool of files, and decisions among as many workers as a switch
    has.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        key_s = _key_s(Path(folder) / "pool", work.keys)
    return Measured(key_s, _route_s(work))


def _key_s(path: Path, count: int) -> float:
    """Return the seconds to look up, pin and release one key."""
    keys = np.arange(1, 2 * count + 1, dtype=np.uint64).reshape(count, 2)
    size, rule = 64 << 20, SOFTWARE  # a pool of several hosts has software coherence
    with Pool.create([path], device_size=size, max_blocks=4 * count, coherence=rule) as pool:
        server = IndexServer(pool)
        server.start()
        with Client(pool) as client:
            index = IndexClient(client)
            index.commit(index.reserve(keys, length=4096))
            seconds = _least_s(lambda: index.unpin(index.pin(keys)))
        server.stop()
    return seconds / 2 / count


def _route_s(work: Work) -> float:
    router = Router(make_policy("least-tokens"))
    for number in range(GPUS):
        router.add_worker(Worker(number))
    sequence = list(range(work.keys))
    chance = Random(0)  # noqa: S311  lengths, not secrets

    def route() -> None:
        query = Query(chance.randrange(1, 2 * work.prompt_tokens), 16, sequence, sequence)
        router.route(0, query)
        router.tracker.free(0)

    return _least_s(route)


def _least_s(do: Callable[[], object]) -> float:
    """Return the fastest of many rounds, which is the cost for an undisturbed thread."""
    times_s = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        do()
        times_s.append(time.perf_counter() - begun)
    return min(times_s)


def table(work: Work, measured: Measured) -> list[tuple[str, float, float, str]]:
    """Return for each resource how much 128 GPUs use, how much it provides, and the unit."""
    rate = work.requests_per_s * GPUS
    read = rate * work.hit_rate * work.bytes / 1e9
    write = rate * (1 - work.hit_rate) * work.bytes / 1e9
    adapters = GPUS * _ADAPTERS_PER_GPU
    # Hits are looked up and released. Other blocks are also reserved and committed, at the same
    # assumed cost.
    calls = rate * work.keys * 2 * (1 + (1 - work.hit_rate))
    return [
        ("GPU paths, onboarding", read, GPUS * costs.GPU_PATHS["root-complex"] / 1e9, "GB/s"),
        ("adapters, read", read, adapters * costs.ADAPTER_READ / 1e9, "GB/s"),
        ("adapters, written", write, adapters * costs.ADAPTER_WRITE / 1e9, "GB/s"),
        ("32 memory devices", read + write, _DEVICES * costs.DEVICE / 1e9, "GB/s"),
        ("the switch", read + write, costs.SWITCH / 1e9, "GB/s"),
        ("the pool's server, one thread", calls / 1e6, 1e-6 / measured.key_s, "M keys/s"),
        ("a router, one process", rate, 1 / measured.route_s, "requests/s"),
    ]


def main() -> None:
    """Measure, and print the table."""
    work = Work()
    measured = measure(work)
    write = sys.stdout.write
    write(
        f"measured: {1e9 * measured.key_s:.0f} ns per key, "
        f"{1e6 * measured.route_s:.0f} us per decision\n"
    )
    write("| resource | 128 GPUs need | it has | used | full at |\n|---|---|---|---|---|\n")
    for name, needed, has, unit in table(work, measured):
        write(
            f"| {name} | {needed:.3g} {unit} | {has:.3g} {unit} | {needed / has:.1%} "
            f"| {GPUS * has / needed:,.0f} GPUs |\n"
        )


if __name__ == "__main__":
    run_program(main)
