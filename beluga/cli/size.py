# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga size``: it advises on the capacities of tiers for a model, and shows how
much of a trace they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer

from beluga.cli.legend import Legend, explains
from beluga.cli.options import Json, Wide, among, as_bad_value, size
from beluga.cli.output import print_facts, print_json, print_table, say
from beluga.cli.trace_options import read_named
from beluga.errors import TierError
from beluga.pool import show_size
from beluga.router import costs
from beluga.simulate import Trace, found_shares
from beluga.tiers import KvShape, SizingAdvice, TierSize, advise, read_model

_DTYPES = ("F32", "F16", "BF16", "FP8", "U8")
_GB = 1e9
_GIB = 1 << 30
_QWEN3_32B = KvShape(64, "BF16", 8, 128)  # the model of beluga simulate's default

Model = Annotated[
    Path | None,
    typer.Argument(
        help="A model's folder or its config.json. Or give --layers and the rest. By default it is "
        "Qwen3-32B."
    ),
]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=size,
        metavar="SIZE",
        help="The size of the pool. Without --memory and --disk, it is what the trace needs.",
    ),
]
Disk = Annotated[
    list[int] | None,
    typer.Option(
        "--disk", parser=size, metavar="SIZE", help="The size of a disk tier. May be repeated."
    ),
]
_NUMBER_MAX = 1 << 20  # of a model's numbers
BlockTokens = Annotated[
    int,
    typer.Option(min=1, max=_NUMBER_MAX, help="How many tokens a block of the engine has."),
]
Layers = Annotated[int, typer.Option(min=0, max=_NUMBER_MAX, help="Layers with attention.")]
KvHeads = Annotated[int, typer.Option(min=0, max=_NUMBER_MAX, help="KV heads of a layer.")]
HeadDim = Annotated[int, typer.Option(min=0, max=_NUMBER_MAX, help="Elements of a head.")]
LatentDim = Annotated[
    int,
    typer.Option(min=0, max=_NUMBER_MAX, help="Elements of a token in a layer, with MLA."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        autocompletion=among(*_DTYPES),
        metavar="|".join(_DTYPES),
        help="The type of the KV cache's elements.",
    ),
]
MemoryBandwidth = Annotated[
    float, typer.Option(min=0.001, max=1e6, help="GB/s from the pool to the engine.")
]
DiskBandwidth = Annotated[
    float | None, typer.Option(min=0.001, max=1e6, help="GB/s from the disk to the engine.")
]
RecomputeMs = Annotated[
    float | None,
    typer.Option(
        min=0.000001, max=1e6, help="How many milliseconds it takes to compute one token."
    ),
]
ModelCosts = Annotated[
    str | None,
    typer.Option(
        autocompletion=among(*costs.MODELS),
        metavar="NAME",
        help=f"Known costs instead: {', '.join(costs.MODELS)}.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="A trace, in any format that `beluga simulate` reads. By default it is the bundled "
        "one, made-up conversations.",
    ),
]
Position = Annotated[
    int,
    typer.Option(min=0, max=10**9, help="The position in the prompt, for --model-costs."),
]


_LEGEND = Legend(
    {
        "tier": "memory (the pool) or a disk",
        "size": "the tier's size, as it was given",
        "blocks": "how many blocks of the model it holds",
        "tokens": "how many tokens these blocks have",
        "--max-blocks": "what to give to beluga pool create, so that the table has room for them",
        "GB/s": "how fast blocks come from the tier, as it was given",
        "ms per token": "how long it takes to bring one token back",
        "pays": "whether that is less than computing the token again",
        "found": "the share of the trace's blocks that this tier and those above it find (LRU)",
    }
)


@explains(_LEGEND)
def size_tiers(
    model: Model = None,
    memory: Memory = None,
    disk: Disk = None,
    block_tokens: BlockTokens = 16,
    layers: Layers = 0,
    kv_heads: KvHeads = 0,
    head_dim: HeadDim = 0,
    latent_dim: LatentDim = 0,
    dtype: Dtype = None,
    memory_bandwidth: MemoryBandwidth = costs.GPU_PATHS["root-complex"] / _GB,
    disk_bandwidth: DiskBandwidth = None,
    recompute_ms: RecomputeMs = None,
    model_costs: ModelCosts = None,
    position: Position = 0,
    trace: TraceFile = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Advise how many blocks and tokens of a model's KV cache each tier holds, how fast a tier must
    be so that bringing a token back beats computing it again, and how much of a trace is found.
    """
    if model is not None and (layers or kv_heads or head_dim or latent_dim):
        raise typer.BadParameter("give a model, or its numbers")
    if recompute_ms is not None and model_costs is not None:
        raise typer.BadParameter("give --recompute-ms or --model-costs")
    if model is not None:
        shape = read_model(model, dtype)
    elif layers:
        with as_bad_value(TierError):
            shape = KvShape(layers, dtype or "BF16", kv_heads, head_dim, latent_dim)
    elif kv_heads or head_dim or latent_dim:
        raise typer.BadParameter("give --layers, too")
    else:
        say("no model is named; these are the numbers of Qwen3-32B")
        shape = _QWEN3_32B if dtype is None else KvShape(64, dtype, 8, 128)
    if model_costs is not None:
        recompute_ms = _recompute_ms(model_costs, position)
    loaded = read_named(trace)
    need = loaded.id_count * loaded.block_tokens * shape.bytes_per_token
    if memory is None and not disk:
        memory = max(-(-need // _GIB), 1) * _GIB
    tiers = [] if memory is None else [TierSize("memory", memory, memory_bandwidth * _GB)]
    speed = None if disk_bandwidth is None else disk_bandwidth * _GB
    tiers += [TierSize("disk", each, speed) for each in disk or []]
    advice = advise(shape, tiers, block_tokens=block_tokens, recompute_ms_per_token=recompute_ms)
    found = _found(advice, loaded)
    if json:
        told = asdict(advice)
        for tier, share in zip(told["tiers"], found, strict=True):
            tier["found"] = share
        traced = {
            "name": loaded.name,
            "requests": len(loaded),
            "bytes": need,
            "ideal_hit_rate": loaded.ideal_hit_rate,
        }
        print_json({"model": asdict(shape), **told, "trace": traced})
        return
    _show(advice, shape, loaded, need, found, wide=wide)


def _found(advice: SizingAdvice, trace: Trace) -> list[float]:
    """Return the share of a trace that each tier and those above it find."""
    tokens = accumulate(tier.tokens for tier in advice.tiers)
    return found_shares(trace, [min(one // trace.block_tokens, trace.id_count) for one in tokens])


def _show(
    advice: SizingAdvice,
    shape: KvShape,
    trace: Trace,
    need: int,
    found: Sequence[float],
    *,
    wide: bool,
) -> None:
    facts: dict[str, object] = {
        "KV per token": show_size(advice.bytes_per_token),
        "block": f"{advice.block_tokens} tokens, {show_size(advice.block_bytes)}",
    }
    if shape.beside:
        facts["beside it"] = shape.beside
    if advice.break_even_bytes_per_s is None:
        facts["break-even"] = "give --recompute-ms or --model-costs"
    else:
        facts["compute one token"] = f"{advice.recompute_ms_per_token:.4g} ms"
        facts["break-even"] = f"{advice.break_even_bytes_per_s / _GB:.3g} GB/s"
    facts["the trace needs"] = f"{show_size(need)} for all its blocks"
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
            for tier, share in zip(advice.tiers, found, strict=True)
        ],
        spare=("size", "ms per token"),
        wide=wide,
    )


def _recompute_ms(name: str, position: int) -> float:
    """Return the time that one more token at a position adds to a long prefill."""
    if name not in costs.MODELS:
        raise typer.BadParameter(
            f"no --model-costs {name!r} are known; there are {', '.join(costs.MODELS)}"
        )
    known = costs.MODELS[name]
    return known.b + known.c * position
