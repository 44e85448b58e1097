# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga size``: advises on tier sizes for a model, and shows the hit rates of a
trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga.choices import COST_MODELS, GPU_PATHS_GB_PER_S
from beluga.cli.frame import Argument, BadParameter, Legend, Option, explains
from beluga.cli.options import Json, Wide, as_bad_value, refuse_alone, size
from beluga.cli.output import print_facts, print_json, print_note, print_table
from beluga.cli.trace_options import read_named, trace_options
from beluga.errors import TierError

if TYPE_CHECKING:  # slow to import
    from beluga.simulate import Trace
    from beluga.tiers import KvShape, SizingAdvice

_DTYPES = ("F32", "F16", "BF16", "FP8", "U8")
_GB = 1e9
_GIB = 1 << 30

_NUMBER_MAX = 1 << 20  # limit of a model's numbers


_LEGEND = Legend(
    {
        "tier": "memory (the pool) or a disk",
        "size": "the tier's size",
        "blocks": "the number of the model's blocks that fit",
        "tokens": "the tokens of these blocks",
        "--max-blocks": "the value for beluga pool create, so that the table has room for them",
        "GB/s": "the tier's bandwidth",
        "ms per token": "the time to fetch one token",
        "pays": "whether that is faster than computing the token again",
        "found": "the share of the trace's blocks that hit in this tier or those above it (LRU)",
    }
)


@explains(_LEGEND)
@as_bad_value(TierError)
def size_tiers(
    model: Annotated[Path | None, Argument()] = None,
    memory: Annotated[int | None, Option(parser=size)] = None,
    disk: Annotated[list[int] | None, Option(parser=size)] = None,
    block_tokens: Annotated[int, Option(min=1, max=_NUMBER_MAX)] = 16,
    layers: Annotated[int, Option(min=0, max=_NUMBER_MAX)] = 0,
    kv_heads: Annotated[int, Option(min=0, max=_NUMBER_MAX)] = 0,
    head_dim: Annotated[int, Option(min=0, max=_NUMBER_MAX)] = 0,
    latent_dim: Annotated[int, Option(min=0, max=_NUMBER_MAX)] = 0,
    dtype: Annotated[str | None, Option(words=_DTYPES)] = None,
    memory_bandwidth: Annotated[float, Option(min=0.001, max=1e6)] = GPU_PATHS_GB_PER_S[
        "root-complex"
    ],
    disk_bandwidth: Annotated[float | None, Option(min=0.001, max=1e6)] = None,
    recompute_ms: Annotated[float | None, Option(min=0.000001, max=1e6)] = None,
    model_costs: Annotated[str | None, Option(words=COST_MODELS)] = None,
    position: Annotated[int, Option(min=0, max=10**9)] = 0,
    trace: Path | None = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Show how many blocks and tokens of a model's KV cache each tier holds, how fast a tier must
    be for a fetch to beat computing again, and which share of a trace hits.

    MODEL: A model's folder or its config.json; or give --layers and the other numbers. Default:
        Qwen3-32B.
    --memory: The size of the pool. Default without --disk: the size that the trace needs.
    --disk: The size of a disk tier. May be repeated.
    --block-tokens: The tokens per block of the engine.
    --layers: Layers with attention.
    --kv-heads: KV heads per layer.
    --head-dim: Elements per head.
    --latent-dim: Elements per token and layer, with MLA.
    --dtype: The element type of the KV cache.
    --memory-bandwidth: The bandwidth from the pool to the engine, in GB/s.
    --disk-bandwidth: The bandwidth from the disk to the engine, in GB/s.
    --recompute-ms: The time to compute one token, in milliseconds.
    --model-costs NAME: The costs of a model instead: {words}.
    --position: The position in the prompt, for --model-costs.
    --trace FILE: A trace, in any format that `beluga simulate` reads. Default: generated, synthetic
        conversations.
    """
    from beluga.tiers import TierSize, advise, read_model

    if model is not None and (layers or kv_heads or head_dim or latent_dim):
        raise BadParameter("give a model or its numbers, not both")
    if recompute_ms is not None and model_costs is not None:
        raise BadParameter("--recompute-ms and --model-costs exclude each other; give one of them")
    if latent_dim and (kv_heads or head_dim):
        raise BadParameter("--latent-dim excludes --kv-heads and --head-dim; drop one or the other")
    refuse_alone("--model-costs", model_costs, position=position)
    refuse_alone("--disk", disk, disk_bandwidth=disk_bandwidth)
    numbers = (layers, kv_heads, head_dim, latent_dim)
    shape = read_model(model, dtype) if model is not None else _shape(*numbers, dtype)
    if model_costs is not None:
        recompute_ms = _recompute_ms(model_costs, position)
    calculate = partial(
        advise, shape, block_tokens=block_tokens, recompute_ms_per_token=recompute_ms
    )
    tiers = [] if memory is None else [TierSize("memory", memory, memory_bandwidth * _GB)]
    speed = None if disk_bandwidth is None else disk_bandwidth * _GB
    tiers += [TierSize("disk", each, speed) for each in disk or []]
    # Sizes are checked before anything is printed or read.
    advice = calculate(tiers) if tiers else None
    loaded = read_named(trace, trace_options())
    if model is None and not layers:
        print_note("no model is named; these are the numbers of Qwen3-32B")
    need = loaded.id_count * loaded.block_tokens * shape.bytes_per_token
    if advice is None:
        memory = max(-(-need // _GIB), 1) * _GIB
        advice = calculate([TierSize("memory", memory, memory_bandwidth * _GB)])
    shares = _shares(advice, loaded)
    if json:
        fields = asdict(advice)
        for tier, share in zip(fields["tiers"], shares, strict=True):
            tier["found"] = share
        traced = {
            "name": loaded.name,
            "requests": len(loaded),
            "bytes": need,
            "ideal_hit_rate": loaded.ideal_hit_rate,
        }
        print_json({"model": asdict(shape), **fields, "trace": traced})
        return
    _show(advice, shape, loaded, need, shares, wide=wide)


def _shape(
    layers: int, kv_heads: int, head_dim: int, latent_dim: int, dtype: str | None
) -> KvShape:
    """Return the shape with these numbers, or that of Qwen3-32B if there are none."""
    from beluga.tiers import KvShape

    if layers:
        with as_bad_value(TierError):
            return KvShape(layers, dtype or "BF16", kv_heads, head_dim, latent_dim)
    if kv_heads or head_dim or latent_dim:
        raise BadParameter("the model's numbers need --layers; add it")
    return KvShape(64, dtype or "BF16", 8, 128)


def _shares(advice: SizingAdvice, trace: Trace) -> list[float]:
    """Return the share of a trace that hits in each tier or those above it."""
    from beluga.simulate import found_shares

    tokens = accumulate(tier.tokens for tier in advice.tiers)
    return found_shares(
        trace, [min(count // trace.block_tokens, trace.id_count) for count in tokens]
    )


def _show(
    advice: SizingAdvice,
    shape: KvShape,
    trace: Trace,
    need: int,
    shares: Sequence[float],
    *,
    wide: bool,
) -> None:
    from beluga.pool import show_size

    facts: dict[str, object] = {
        "KV per token": show_size(advice.bytes_per_token),
        "block": f"{advice.block_tokens} tokens, {show_size(advice.block_bytes)}",
    }
    if shape.fixed_kv:
        facts["beside it"] = shape.fixed_kv
    if advice.break_even_bytes_per_s is None:
        facts["break-even"] = "give --recompute-ms or --model-costs"
    else:
        facts["compute one token"] = f"{advice.recompute_ms_per_token:.4g} ms"
        facts["break-even"] = f"{advice.break_even_bytes_per_s / _GB:.3g} GB/s"
    facts["the trace needs"] = f"{show_size(need)} for all of its blocks"
    facts["could be found"] = f"{trace.ideal_hit_rate:.1%} of the blocks of {len(trace):,} prompts"
    print_facts(facts)
    print_table(
        _LEGEND,
        [
            [
                tier.name,
                show_size(tier.size_bytes),
                tier.blocks,
                tier.tokens,
                tier.max_blocks,
                None if tier.bytes_per_s is None else tier.bytes_per_s / _GB,
                tier.onboard_ms_per_token,
                None if tier.pays is None else "yes" if tier.pays else "no",
                f"{share:.1%}",
            ]
            for tier, share in zip(advice.tiers, shares, strict=True)
        ],
        spare=("size", "ms per token"),
        wide=wide,
    )


def _recompute_ms(name: str, position: int) -> float:
    """Return the time that one more token at a position adds to a long prefill."""
    from beluga.router import costs

    model = costs.MODELS[name]
    return model.b + model.c * position
