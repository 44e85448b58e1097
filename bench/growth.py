# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Scale, on paper: what fills up first as hosts and pools are added; ``python -m
beluga_bench.growth`` prints the table of docs/benchmarks.md.

What a call costs the pool's server and the router is measured here; what links carry is the
paper's word (beluga/router/load/costs.py); how much work there is, the conversation trace's: its
mean prompt, and the hit rate and the arrivals that the simulator has for it at twice its speed.
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

from beluga import Client, MetaServer
from beluga.meta import MetaClient
from beluga.pool import Pool
from beluga.router import Query, Router, Worker, costs, make_policy

from .options import SOFTWARE

GPUS = 16 * 8  # of one switch
_ROUNDS = 300
_BLOCK_TOKENS = 16  # vLLM's, and so the pool's
_ADAPTERS_PER_GPU = 0.5
_DEVICES = 32  # 8 TB behind one switch, as the paper has it


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one GPU asks for."""

    requests_per_s: float = 0.85  # 3.4/s, twice as fast, over 8 GPUs
    prompt_tokens: int = 12035
    hit_rate: float = 0.22  # in the pool, beyond HBM

    @property
    def keys(self) -> int:
        """That a request looks up."""
        return self.prompt_tokens // _BLOCK_TOKENS

    @property
    def bytes(self) -> float:
        """Of a request's KV: Qwen3-32B."""
        return self.prompt_tokens * costs.MODELS[costs.DEFAULT_MODEL].kv_bytes_per_token


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Seconds on this machine."""

    key_s: float  # of the server and its client, for one key of a call
    route_s: float  # of a request's way through the router, beside HTTP


def measure(work: Work) -> Measured:
    """Keys of a call in a pool of files; decisions for as many workers as a switch has."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        key_s = _key_s(Path(folder) / "pool", work.keys)
    return Measured(key_s, _route_s(work))


def _key_s(path: Path, count: int) -> float:
    """Looked up, pinned and released."""
    keys = np.arange(1, 2 * count + 1, dtype=np.uint64).reshape(count, 2)
    size, rule = 64 << 20, SOFTWARE  # as a pool of several hosts has it
    with Pool.create([path], device_size=size, max_blocks=4 * count, coherence=rule) as pool:
        server = MetaServer(pool)
        server.start()
        with Client(pool) as client:
            meta = MetaClient(client)
            meta.commit(meta.reserve(keys, length=4096))
            seconds = _least_s(lambda: meta.unpin(meta.pin(keys)))
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
    """Of many rounds the fastest: what it costs a thread that nobody disturbs."""
    taken = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        do()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def table(work: Work, found: Measured) -> list[tuple[str, float, float, str]]:
    """Of each resource: what 128 GPUs ask of it, what it has, and its unit."""
    rate = work.requests_per_s * GPUS
    read = rate * work.hit_rate * work.bytes / 1e9
    write = rate * (1 - work.hit_rate) * work.bytes / 1e9
    adapters = GPUS * _ADAPTERS_PER_GPU
    # looked up and released once; the rest is reserved and committed, taken to cost the same
    calls = rate * work.keys * 2 * (1 + (1 - work.hit_rate))
    return [
        ("GPU paths, onboarding", read, GPUS * costs.GPU_PATHS["root-complex"] / 1e9, "GB/s"),
        ("adapters, read", read, adapters * costs.ADAPTER_READ / 1e9, "GB/s"),
        ("adapters, written", write, adapters * costs.ADAPTER_WRITE / 1e9, "GB/s"),
        ("32 memory devices", read + write, _DEVICES * costs.DEVICE / 1e9, "GB/s"),
        ("the switch", read + write, costs.SWITCH / 1e9, "GB/s"),
        ("the pool's server, one thread", calls / 1e6, 1e-6 / found.key_s, "M keys/s"),
        ("a router, one process", rate, 1 / found.route_s, "requests/s"),
    ]


def main() -> None:
    """Measure, and print the table."""
    work = Work()
    found = measure(work)
    write = sys.stdout.write
    write(f"measured: {1e9 * found.key_s:.0f} ns a key, {1e6 * found.route_s:.0f} us a decision\n")
    write("| resource | 128 GPUs ask for | it has | used | full at |\n|---|---|---|---|---|\n")
    for name, asked, has, unit in table(work, found):
        write(
            f"| {name} | {asked:.3g} {unit} | {has:.3g} {unit} | {asked / has:.1%} "
            f"| {GPUS * has / asked:,.0f} GPUs |\n"
        )


if __name__ == "__main__":
    main()
