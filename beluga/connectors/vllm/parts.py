# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The part of a block on a rank, and the ranks with the same part.

Tensor parallelism divides the KV heads among ranks. If there are more ranks than heads, several
have the same head; multi-head latent attention has one "head", which is the same on all ranks. A
part is named by its heads, so equal bytes have one name whatever the number of ranks, and ranks
with the same part share the work of storing it. If vLLM does not report a layer's heads, a part
belongs to a single rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPart:
    """A rank's part of every block: its number among the parts, and its name in the namespace.

    ``copies`` ranks have it, and this one is number ``copy`` of them. ``heads`` is how many KV
    heads the model has, ``first`` and ``count`` which of them are in the part; 0 if the part is its
    rank's alone.
    """

    number: int
    name: str
    copies: int = 1
    copy: int = 0
    heads: int = 0
    first: int = 0
    count: int = 0

    def stores(self, digests: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which blocks this rank stores, because each is stored by only one of the ranks
        with the part. ``digests`` has shape (count, size).
        """
        chosen: NDArray[np.bool_] = digests[:, 0] % self.copies == self.copy
        return chosen


def part_of(
    vllm_config: Any, specs: Iterable[Any], *, tp_rank: int, pp_rank: int, model_heads: int
) -> BlockPart:
    """Return the part of a rank whose layers have these specs. ``model_heads`` is the number of KV
    heads that the model has before it is divided, or 0.
    """
    parallel = vllm_config.parallel_config
    size = parallel.tensor_parallel_size
    heads = 0 if _divided_otherwise(vllm_config) else _heads(specs, size, model_heads)
    if heads == 0:
        return BlockPart(pp_rank * size + tp_rank, f"{tp_rank}/{size}")
    copies, each = max(1, size // heads), max(1, heads // size)
    number = tp_rank // copies
    return BlockPart(
        number=pp_rank * (size // copies) + number,
        name=heads_name(number * each, each, heads),
        copies=copies,
        copy=tp_rank % copies,
        heads=heads,
        first=number * each,
        count=each,
    )


def heads_name(first: int, count: int, heads: int) -> str:
    """Return the name of the part with these heads."""
    return f"heads {first}-{first + count}/{heads}"


def _divided_otherwise(vllm_config: Any) -> bool:
    """Return whether ranks divide tokens, too, or have layers of a second model."""
    parallel = vllm_config.parallel_config
    speculative = getattr(vllm_config, "speculative_config", None)
    return (
        parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1
        or getattr(speculative, "draft_model_config", None) is not None
    )


def _heads(specs: Iterable[Any], size: int, model_heads: int) -> int:
    """Return how many KV heads all layers have before they are divided among ``size`` ranks, or 0
    if that is not the same for all, or not known.
    """
    counts = {_heads_of(spec, size, model_heads) for spec in specs}
    return counts.pop() if len(counts) == 1 else 0


def _heads_of(spec: Any, size: int, model_heads: int) -> int:
    each = getattr(spec, "num_kv_heads", 0)
    heads = getattr(spec, "max_tp_shards", None)  # vLLM sets it where it differs from the model's
    if heads is None:
        latent = type(spec).__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec")
        heads = 0 if latent else model_heads
    if not heads or (heads % size and size % heads) or each != max(1, heads // size):
        return 0
    return int(heads)


def distinct(namespaces: Sequence[Any]) -> tuple[Any, ...]:
    """Return the namespaces of the parts: those of the ranks in their order, once each."""
    return tuple({namespace.digest: namespace for namespace in namespaces}.values())
