# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The demonstration's measurements: misses and hits of every arm in each repetition, and their
medians.

In a repetition a new prompt is sent to every arm. Engine A has not seen it before and computes it.
Engine B, another process, finds it in the pool, and then again in its own prefix cache. The first
arm changes from one repetition to the next, so that other load slows all equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from .arm import Arm, Setting
from .likeness import faults, identical, loaded_tokens, warnings
from .process import Engine

Reply = dict[str, Any]
Progress = Callable[[str], None]

TRIES = 3
_SHORT = list(range(10, 30))
_ERROR_LENGTH_MAX = 4  # lines of logs


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt through one arm, as replies of ``Engine.generate``.

    ``hit`` is None for an arm without a pool; then ``local`` is from the engine that computed.
    ``saving`` has A's connector's counts from before the miss until everything was saved.
    """

    miss: Reply
    local: Reply
    hit: Reply | None = None
    saving: dict[str, float] = field(default_factory=dict)
    tries: int = 1

    def loaded(self, setting: Setting) -> int:
        """Return the tokens that were loaded. Without a pool these are all that could have been."""
        if self.hit is None:
            return setting.hit_tokens
        return loaded_tokens(self.hit, setting.block_tokens)

    def whole(self, setting: Setting) -> bool:
        """Return whether the hit, if there is one, has all tokens that can be found."""
        return self.loaded(setting) >= setting.hit_tokens

    def identical(self, setting: Setting) -> bool | None:
        """Return whether the hit equals the same computation exactly, or None if that is
        unknown.
        """
        if self.hit is None:
            return True
        return identical(
            self.hit,
            loaded=self.loaded(setting),
            whole=setting.hit_tokens,
            miss=self.miss,
            local=self.local,
        )


class Pair:
    """The engines of an arm: A computes, B loads. An arm without a pool has one engine for both."""

    def __init__(self, arm: Arm, engines: Sequence[Engine]) -> None:
        self.arm = arm
        self._a, self._b = engines[0], engines[-1]

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.arm.name

    def run(self, prompt: list[int]) -> Sample:
        """Run a prompt that neither engine has seen. Raises ChildError."""
        if self._a is self._b:
            return Sample(awake(self._a).generate(prompt), awake(self._a).generate(prompt))
        awake(self._a)
        before = self._figures()
        miss = self._a.generate(prompt)
        self.arm.wait(self._a, before, self.arm.setting.hit_tokens)
        after = self._figures()
        hit = awake(self._b).generate(prompt)
        local = awake(self._b).generate(prompt)
        saving = {name: value - before.get(name, 0) for name, value in after.items()}
        return Sample(miss, local, hit, saving)

    def explain(self, sample: Sample) -> list[str]:
        """Explain why a prompt was not found whole, with counters and the last lines of the
        logs.
        """
        figures = [sample.saving] + ([sample.hit["figures"]] if sample.hit else [])
        setting = self.arm.setting
        first = f"{sample.loaded(setting)} of {setting.hit_tokens} tokens were found: "
        logged = [line for engine in (self._a, self._b) for line in warnings(engine.log())]
        return [first + str(faults(*figures) or "nothing counted"), *logged[-_ERROR_LENGTH_MAX:]]

    def _figures(self) -> dict[str, float]:
        figures: dict[str, float] = self._a.call("figures")["figures"]
        return figures


def awake(engine: Engine) -> Engine:
    """Return the engine after it has just worked, with no KV of other requests in the CPU's cache.

    A process that waited has cold caches and sleeping threads, which would slow the first request.
    The prompt here is shorter than a block, so nothing of it is cached.
    """
    engine.call("flush")
    engine.generate(_SHORT, max_tokens=2)
    return engine


def run(
    pairs: Sequence[Pair],
    prompts: Iterator[list[int]],
    *,
    count: int,
    limit: Callable[[], float],
    progress: Progress,
) -> tuple[dict[str, list[Sample]], list[float]]:
    """Run ``count`` repetitions. Returns the samples of every arm, and the seconds of ``limit``.

    Caches time out when a machine is too busy. The time of a partial hit cannot be compared, so the
    arm runs another prompt, up to :data:`TRIES` in a repetition. The last try counts in any case.
    """
    samples: dict[str, list[Sample]] = {pair.name: [] for pair in pairs}
    limits = []
    for number in range(count):
        first = number % len(pairs)
        prompt = next(prompts)
        limits.append(limit())
        for pair in [*pairs[first:], *pairs[:first]]:
            sample = pair.run(prompt)
            for _ in range(TRIES - 1):
                if sample.whole(pair.arm.setting):
                    break
                for line in pair.explain(sample):
                    progress(f"{pair.name}: {line}")
                progress(f"{pair.name}: another prompt")
                sample = replace(pair.run(next(prompts)), tries=sample.tries + 1)
            samples[pair.name].append(sample)
            progress(f"{number + 1}/{count} {pair.name}: {_brief(sample)}")
    return samples, limits


def _brief(sample: Sample) -> str:
    replies = {"computed": sample.miss, "from the pool": sample.hit, "own cache": sample.local}
    return ", ".join(
        f"{name} {1000 * reply['ttft_s']:.1f} ms" for name, reply in replies.items() if reply
    )


def ttfts(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return the seconds to the first token of every repetition, with the names of the report."""
    columns = {
        "ttft_miss_s": [sample.miss["ttft_s"] for sample in samples],
        "ttft_local_hit_s": [sample.local["ttft_s"] for sample in samples],
    }
    hits = [sample.hit["ttft_s"] for sample in samples if sample.hit]
    return {**columns, "ttft_hit_s": hits} if hits else columns


def medians(columns: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each column."""
    return {name: median(values) for name, values in columns.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile. A single value is both."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third
