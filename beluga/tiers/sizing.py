# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How much of a model's KV cache each tier holds, and when fetching blocks from a tier pays off.

After ``cached`` tokens, a model computes ``new`` tokens in ``b*new + c*new*(cached + new/2)``. The
fixed time of a prefill (``a``) does not count, because the rest of the prompt needs it anyway.

Example: Qwen3-32B on an H200 computes a token in at least 0.077 ms, and has 256 KiB of KV for it. A
tier of 26 GB/s transfers it in 0.010 ms: fetch. A tier of 2 GB/s takes 0.131 ms: recompute, but
fetch after 36,000 cached tokens, where computing takes longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from beluga.errors import TierError
from beluga.pool import BLOCK_COUNT_MAX, STRIPE_SIZE, geometry_for, show_size
from beluga.tiers.disk.file import plan_layout
from beluga.tiers.kv_shape import KvShape

_DEVICE_SIZE_MAX = 1 << 47  # per device of a pool
_PAGE_SIZE, _LINE_SIZE = 4096, 64
_CHUNK_SIZE = 16 << 10  # payload bytes per checksum
_CHECKSUM_SIZE = 4
_SMALLEST_BLOCK = 16 << 10
"""A disk's index is made for blocks of this size, unless they are smaller."""
_SPARE_SHARE = 50
"""One spare table entry per this many blocks, so that the pool runs out of space first."""

_WEIGHT = 0.1  # weight of a new load in the average


@dataclass(frozen=True, slots=True)
class TierAdvice:
    """What a tier of ``size_bytes`` holds. ``max_blocks`` is for ``beluga pool create``.

    ``onboard_ms_per_token`` is the time to fetch a token, if the bandwidth is given; ``pays`` is
    whether that is faster than computing it again.
    """

    name: str
    size_bytes: int
    blocks: int
    tokens: int
    max_blocks: int | None = None
    bytes_per_s: float | None = None
    onboard_ms_per_token: float | None = None
    pays: bool | None = None


@dataclass(frozen=True, slots=True)
class SizingAdvice:
    """The advice for a model. Below ``break_even_bytes_per_s``, computing a token again is faster
    than fetching it.
    """

    bytes_per_token: int
    block_tokens: int
    block_bytes: int
    tiers: list[TierAdvice]
    recompute_ms_per_token: float | None = None
    break_even_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier to advise on: the pool's ``memory`` or a ``disk``, and its bandwidth if given."""

    name: str
    size_bytes: int
    bytes_per_s: float | None = None


def advise(
    shape: KvShape,
    tiers: list[TierSize],
    *,
    block_tokens: int = 16,
    recompute_ms_per_token: float | None = None,
) -> SizingAdvice:
    """Advise on tiers for a model's blocks. Raises TierError or a PoolError for impossible ones."""
    if block_tokens < 1:
        raise TierError(f"block_tokens is {block_tokens}, but a block needs at least one token")
    length = shape.bytes_per_token * block_tokens
    advice = []
    for tier in tiers:
        blocks, max_blocks = _pool(tier, length) if tier.name == "memory" else _disk(tier, length)
        speed = tier.bytes_per_s
        onboard_ms = shape.bytes_per_token / speed * 1e3 if speed else None
        pays = None
        if onboard_ms is not None and recompute_ms_per_token is not None:
            pays = onboard_ms < recompute_ms_per_token
        advice.append(
            TierAdvice(
                tier.name,
                tier.size_bytes,
                blocks,
                blocks * block_tokens,
                max_blocks,
                speed,
                onboard_ms,
                pays,
            )
        )
    break_even = None
    if recompute_ms_per_token is not None:
        if recompute_ms_per_token <= 0:
            raise TierError("--recompute-ms must be greater than 0")
        break_even = shape.bytes_per_token / recompute_ms_per_token * 1e3
    return SizingAdvice(
        shape.bytes_per_token, block_tokens, length, advice, recompute_ms_per_token, break_even
    )


def _pool(tier: TierSize, length: int) -> tuple[int, int]:
    """Return how many blocks fit into a pool on one device, and the table entries that they need.

    The table takes space itself, so it is sized for the blocks that fit beside it.
    """
    chunks = -(-length // _CHUNK_SIZE)
    padded = -(-length // _LINE_SIZE) * _LINE_SIZE
    stored = padded + chunks * _CHECKSUM_SIZE if chunks > 1 else length
    size = tier.size_bytes // STRIPE_SIZE * STRIPE_SIZE
    if not 2 * STRIPE_SIZE <= size <= _DEVICE_SIZE_MAX:
        raise TierError(
            f"--memory {show_size(tier.size_bytes)} is out of range for a pool; give 4 MiB to "
            f"{show_size(_DEVICE_SIZE_MAX)}"
        )
    wanted = max(1, min(size // stored, BLOCK_COUNT_MAX))
    for _ in range(2):
        fit = _fitting(geometry_for(1, size, wanted).data_size, stored)
        if fit == 0:
            break
        wanted = min(fit + fit // _SPARE_SHARE + 1, BLOCK_COUNT_MAX)
    if fit == 0:
        raise _too_small(tier, length)
    return fit, wanted


def _disk(tier: TierSize, length: int) -> tuple[int, None]:
    layout = plan_layout(tier.size_bytes, min(length, _SMALLEST_BLOCK), "size")
    fit = min(layout.slot_count, _fitting(layout.stripe_count * STRIPE_SIZE, length))
    if fit == 0:
        raise _too_small(tier, length)
    return fit, None


def _too_small(tier: TierSize, length: int) -> TierError:
    return TierError(
        f"{tier.name} of {show_size(tier.size_bytes)} holds no block of {show_size(length)}"
    )


def _fitting(size: int, stored: int) -> int:
    """Return how many blocks fit; each takes whole pages."""
    return size // (-(-stored // _PAGE_SIZE) * _PAGE_SIZE)


class FetchRule(Protocol):
    """Decides whether a fetch pays off."""

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return whether to fetch ``new`` tokens, of ``size`` bytes, after ``cached`` ones."""


class AlwaysFetch:
    """Fetches whatever a tier has."""

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Fetches tokens that take longer to compute. ``b_ms`` and ``c_ms`` are those of the model, as
    in ``beluga.router.costs``. Raises TierError if one is negative or not finite.
    """

    b_ms: float
    c_ms: float

    def __post_init__(self) -> None:
        for value in (self.b_ms, self.c_ms):
            if not 0 <= value < math.inf:
                raise TierError(
                    f"a prefill cost of {value} ms is invalid; give a finite number of at least 0"
                )

    def compute_s(self, cached: int, new: int) -> float:
        """Return the seconds that computing the tokens takes."""
        return (self.b_ms * new + self.c_ms * new * (cached + new / 2)) / 1e3

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return whether transferring the bytes is faster than computing the tokens; never for a
        tier without bandwidth.
        """
        if bandwidth <= 0:
            return False
        return latency_s + size / bandwidth < self.compute_s(cached, new)


class MeasuredBandwidth:
    """The measured bandwidth of a tier: an exponential average over its loads, weighted by size. It
    starts at ``assumed`` bytes per second.
    """

    def __init__(self, assumed: float) -> None:
        if not 0 < assumed < math.inf:
            raise TierError(f"a bandwidth must be greater than 0, but is {assumed}")
        self._bytes, self._seconds = assumed, 1.0
        self._known = False

    def note(self, size: int, seconds: float) -> None:
        """Add a load. The first one replaces the assumed bandwidth."""
        if size <= 0 or seconds <= 0:
            return
        weight = _WEIGHT if self._known else 1.0
        self._known = True
        self._bytes += weight * (size - self._bytes)
        self._seconds += weight * (seconds - self._seconds)

    @property
    def bytes_per_s(self) -> float:
        """The current average."""
        return self._bytes / self._seconds
