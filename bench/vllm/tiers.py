# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``scripts/vllm-tiers``: prompts that lie only on a disk, or only in Redis, below our
pool and below LMCache's memory.

First every engine computes all prompts, which are saved to the lower tier. Then they are requested
in that order: the engine's own cache is emptied, the memory above has evicted the prompt, and the
time to the first token is that of a load from below. All arms serve the same prompt before the next
one, and a different arm is first each time. The exit status is 1 if an answer differs from that of
the engine's own cache, or if bytes came from another tier.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from ..harness.recorded import write_record
from .arm import Setting, plain_arm
from .below import Below, beluga_disk, beluga_redis, lmcache_disk, lmcache_redis
from .command import positive, progress, run_in_folder
from .likeness import agreed, identical, loaded_tokens
from .measure import quartiles
from .model import SIZES, model
from .peers import PeerUnavailableError
from .prompts import prompts
from .report import Report, origin
from .station import Station

ARMS = {
    "beluga-disk": beluga_disk,
    "lmcache-disk": lmcache_disk,
    "beluga-redis": beluga_redis,
    "lmcache-redis": lmcache_redis,
}
_PYTHON = "BELUGA_VLLM_PYTHON"
_POOL_PROMPTS = 1.5
_WARM_UPS = 1  # prompts whose times do not count
_MORE = 3  # prompts that are stored last, so that the pool has none of the requested ones
_RESULTS = Path(__file__).resolve().parent.parent / "results"


class Tiered:
    """An engine on an arm with a lower tier."""

    def __init__(self, stack: ExitStack, below: Below) -> None:
        self.below, self.station = below, Station(stack, below.arm)
        self.samples: list[dict[str, Any]] = []
        self._misses: dict[int, Any] = {}
        self._wanted = below.medium.wrote()

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.below.arm.name

    def store(self, number: int, prompt: list[int]) -> None:
        """Compute a prompt, and wait until it is saved on the medium."""
        setting = self.below.arm.setting
        before = self.station.figures()
        self._misses[number] = self.station.generate(prompt)
        self.station.wait(before, setting.hit_tokens)
        self._wanted += setting.hit_bytes
        self.below.wait_until_sunk(self._wanted)

    def send(self, number: int, prompt: list[int]) -> None:
        """Request a prompt that only the medium has, and then one that the engine's own cache
        has.
        """
        setting = self.below.arm.setting
        self.station.empty()
        self.below.forget()
        read = self.below.medium.read()
        hit = self.station.generate(prompt)
        read = self.below.medium.read() - read
        local = self.station.generate(prompt)
        loaded = loaded_tokens(hit, setting.block_tokens)
        self.samples.append(
            {
                "arm": self.name,
                "prompt": number,
                "ttft_s": hit["ttft_s"],
                "ttft_local_hit_s": local["ttft_s"],
                "ttft_miss_s": self._misses[number]["ttft_s"],
                "load_s": hit["figures"].get("load_s"),
                "cached_tokens": loaded,
                "bytes_from_below": read,
                "identical": identical(
                    hit,
                    loaded=loaded,
                    whole=setting.hit_tokens,
                    miss=self._misses[number],
                    local=local,
                ),
                "like_computed": hit["tokens"] == self._misses[number]["tokens"],
            }
        )
        progress(
            f"{number + 1} {self.name}: {1000 * hit['ttft_s']:.1f} ms, own cache "
            f"{1000 * local['ttft_s']:.1f} ms, {loaded} tokens, {read / 1e6:.1f} MB"
        )


def measure(setting: Setting, options: argparse.Namespace, disk: Path) -> Report:
    """Run all arms on the same prompts. Raises BelugaError if a process dies or fails."""
    skipped: dict[str, str] = {}
    begun = origin(setting, "scripts/vllm-tiers")
    fresh = prompts(setting.tokens, options.seed)
    with ExitStack() as stack:
        tiered: list[Tiered] = []
        for name in options.arms:
            try:
                below = stack.enter_context(ARMS[name](setting, disk))
            except PeerUnavailableError as error:
                skipped[name] = str(error)
                progress(f"{name}: skipped, {error}")
                continue
            progress(f"starting vLLM: {name}")
            tiered.append(Tiered(stack, below))
            tiered[-1].station.ready()
        plain = Station(stack, stack.enter_context(plain_arm(setting)))
        plain.ready()
        stored = [next(fresh) for _ in range(_WARM_UPS + options.repetitions)]
        later = [next(fresh) for _ in range(_MORE)]
        for number, prompt in enumerate([*stored, *later]):
            progress(f"storing {number + 1} of {len(stored) + len(later)}")
            for arm in tiered:
                arm.store(number, prompt)
        computed: list[float] = []
        for number, prompt in enumerate(stored):
            plain.empty()
            computed.append(plain.generate(prompt)["ttft_s"])
            first = number % len(tiered)
            for arm in [*tiered[first:], *tiered[:first]]:
                arm.send(number, prompt)
            if number < _WARM_UPS:
                computed.clear()
                for arm in tiered:
                    arm.samples.clear()
    rows = [sample for arm in tiered for sample in arm.samples]
    return {
        **begun,
        "seed": options.seed,
        "prompt_tokens": setting.tokens,
        "hit_tokens": setting.hit_tokens,
        "hit_bytes": setting.hit_bytes,
        "pool_tokens": setting.pool_tokens,
        "ttft_recompute_s": median(computed),
        "skipped": skipped,
        "summary": [medians_of(arm.name, arm.samples) for arm in tiered],
        "ratios": ratios(rows),
        "passed": whole(rows, setting.hit_tokens, setting.hit_bytes),
        "rows": rows,
    }


def medians_of(name: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of an arm's samples."""
    times = [sample["ttft_s"] for sample in samples]
    return {
        "arm": name,
        "ttft_s": median(times),
        "quartiles_s": quartiles(times),
        "over_local_hit_s": median(
            sample["ttft_s"] - sample["ttft_local_hit_s"] for sample in samples
        ),
        "ttft_local_hit_s": median(sample["ttft_local_hit_s"] for sample in samples),
        "ttft_miss_s": median(sample["ttft_miss_s"] for sample in samples),
        "bytes_from_below": min(sample["bytes_from_below"] for sample in samples),
        "identical": agreed(sample["identical"] for sample in samples),
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many times as fast ours is, pair by pair, for each medium with both arms."""
    times = {(row["arm"], row["prompt"]): row["ttft_s"] for row in rows}
    by_medium = {}
    for medium in ("disk", "redis"):
        pairs = [
            times[f"lmcache-{medium}", number] / seconds
            for (arm, number), seconds in times.items()
            if arm == f"beluga-{medium}" and (f"lmcache-{medium}", number) in times
        ]
        if pairs:
            by_medium[medium] = {"pairs": len(pairs), "median": median(pairs), "min": min(pairs)}
    return by_medium


def whole(rows: list[dict[str, Any]], hit_tokens: int, hit_bytes: int) -> bool:
    """Return whether every prompt was loaded completely from the lower tier, with the right
    answer.
    """
    return all(
        row["identical"]
        and row["cached_tokens"] >= hit_tokens
        and row["bytes_from_below"] >= hit_bytes
        for row in rows
    )


def main() -> NoReturn:
    """Run the command."""
    options = _options()
    run_in_folder("vllm-tiers", lambda folder: _run(options, folder))


def _run(options: argparse.Namespace, folder: Path) -> bool:
    python = os.environ.get(_PYTHON, sys.executable)
    setting = Setting(
        folder=folder,
        model=model(options.model, python),
        size_name=options.model,
        tokens=options.tokens,
        python=python,
        pool_tokens=int(_POOL_PROMPTS * options.tokens),
        timeout_ms=5000,
    )
    disk = Path(tempfile.mkdtemp(prefix="beluga-vllm-tiers-", dir=options.disk))
    try:
        report = measure(setting, options, disk)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    text = json.dumps(report, indent=1)
    if options.results is not None:
        write_record(options.results / "vllm-tiers.json", report)
    print(text if options.json else json.dumps({**report, "rows": len(report["rows"])}, indent=1))
    return bool(report["passed"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/vllm-tiers", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print every sample")
    add("--arms", choices=ARMS, nargs="+", default=list(ARMS), help="which (all)")
    add("--tokens", type=_tokens, default=2049, help="of a prompt (2049)")
    add("--repetitions", type=positive, default=10, help="prompts that are requested (10)")
    add("--model", choices=SIZES, default="wide", help="how large (wide)")
    add("--disk", type=Path, default=Path.cwd(), help="a folder on the disk (the current one)")
    add("--results", type=Path, nargs="?", const=_RESULTS, help="folder for the JSON")
    add("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    return parser.parse_args()


def _tokens(text: str) -> int:
    if not 129 <= int(text) <= 16000:
        raise argparse.ArgumentTypeError("129 to 16000: more than one block of the KV cache")
    return int(text)


if __name__ == "__main__":
    main()
