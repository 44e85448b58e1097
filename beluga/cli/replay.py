# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga replay``: replays a trace in a temporary pool and shows the result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga.choices import ENGINE_OFFLOADS, REPLAY_SIZE_MAX, SPEED_MAX, SPEED_MIN
from beluga.cli.frame import Argument, BadParameter, Legend, Option, OptionGroup, explains
from beluga.cli.options import Json, as_bad_value, size
from beluga.cli.output import print_facts, print_json, print_note, progress
from beluga.cli.serve import (
    AdminAddress,
    AdmissionName,
    DiskBytes,
    Disks,
    Offload,
    Remotes,
    refuse_without_tier,
)
from beluga.cli.trace_options import TraceOptions, check_named, trace_options
from beluga.errors import ReplayError, TierError

if TYPE_CHECKING:  # slow to import
    from beluga.replay import Result, TraceRequest
    from beluga.simulate import Reading

_DEFAULT_BLOCK_SIZE = 128 << 10
_OFFLOAD, _ADMISSION = "wait", "always"
_ENGINE_OFFLOAD = "wait"
_ENGINE_BLOCKS_MAX = 1 << 20


def _pool_size(text: str | int) -> int:
    """Parse the size of a pool."""
    value = size(text)
    if value > REPLAY_SIZE_MAX:
        from beluga.pool import show_size

        raise BadParameter(f"'{text}' is too large; give at most {show_size(REPLAY_SIZE_MAX)}")
    return value


_LEGEND = Legend(
    {
        "requests": "the number of replayed requests",
        "client processes": "the number of processes that put and got blocks",
        "seconds": "the duration",
        "hit rate": "the share of looked-up blocks that were found",
        "ideal hit rate": "the same for a pool with room for everything",
        "blocks put": "the number of stored blocks, and the speed per client",
        "blocks got": "the number of fetched blocks, and the speed per client",
        "RPC p50 / p99": "the round-trip time of a ping after each request",
        "put again": "the number of blocks stored again after they were lost",
        "wrong blocks": "the number of blocks with wrong bytes; must be 0",
        "engine hits": "the number of blocks found in the engines' own memory",
        "onboarded": "the number of blocks that requests loaded from the pool",
        "prefetched": "the number of hot blocks loaded before a request needed them",
        "offloaded": "the number of blocks copied from the engines' memory to the pool",
        "evicted": "the number of blocks evicted from the engines' memory",
        "targets missed": "the targets that the engines missed at the end",
    }
)


@explains(_LEGEND)
def replay(
    trace: Annotated[Path | None, Argument()] = None,
    clients: Annotated[int, Option(min=1, max=16)] = 2,
    block_bytes: Annotated[int | None, Option(parser=size)] = None,
    pool_bytes: Annotated[int | None, Option(parser=_pool_size)] = None,
    speed: Annotated[float | None, Option(min=SPEED_MIN, max=SPEED_MAX)] = None,
    compare: bool = True,
    disk: Disks = None,
    disk_bytes: DiskBytes = 0,
    remote: Remotes = None,
    offload: Offload = _OFFLOAD,
    admission: AdmissionName = _ADMISSION,
    engine_blocks: Annotated[int, Option(min=0, max=_ENGINE_BLOCKS_MAX)] = 0,
    engine_offload: Annotated[str, Option(words=ENGINE_OFFLOADS)] = _ENGINE_OFFLOAD,
    *,
    reading: Annotated[TraceOptions, OptionGroup(trace_options)],
    admin: AdminAddress = "",
    json: Json = False,
) -> None:
    """Replay a trace: several processes put and get its blocks in a temporary pool.

    With --disk or --remote, the pool offloads evicted blocks to these tiers and fetches them again;
    if the server is killed meanwhile, it is restarted. With --engine-blocks, each process is an
    engine with its own memory. With --admin, a page shows the replay.

    TRACE: A trace, in any format that `beluga simulate` reads. Default: generated, synthetic
        conversations.
    --clients: The number of client processes.
    --block-bytes: The size of a block. Default: 4096, or 128K without a trace.
    --pool-bytes: The size of the pool. Default: everything fits.
    --speed: Replay at this multiple of the trace's own speed. Default: as fast as possible.
    --compare: Compare every fetched byte with the stored one.
    --engine-blocks: Make each process an engine with memory for N blocks. It stores blocks that it
        evicts in the pool, and loads them again from there. 0: a client without memory of its own.
    --engine-offload: When an engine offloads a block: wait offloads it when it is computed and
        evicts it only then, drop may evict it earlier, and watermark offloads the coldest blocks
        when 85 % of the memory is in use.
    """
    from beluga.admin import read_address
    from beluga.replay import ReplayOptions
    from beluga.replay import replay as run_replay

    if engine_offload != _ENGINE_OFFLOAD and not engine_blocks:
        raise BadParameter(
            f"--engine-offload {engine_offload} needs engines with memory; give --engine-blocks"
        )
    _check_tiers(disk, disk_bytes, remote)
    if not (disk or remote):
        refuse_without_tier(offload, admission, usual=(_OFFLOAD, _ADMISSION))
    usual_size = 4096 if trace else _DEFAULT_BLOCK_SIZE
    options = ReplayOptions(
        client_count=clients,
        block_size=usual_size if block_bytes is None else block_bytes,
        pool_size=pool_bytes,
        speed=speed,
        compare=compare,
        disks=tuple(disk or ()),
        disk_size=disk_bytes,
        remotes=tuple(remote or ()),
        offload=offload,
        admission=admission,
        admin=read_address(admin) if admin else None,
        engine_blocks=engine_blocks,
        engine_offload=engine_offload,
    )
    with as_bad_value(ReplayError):
        options.check()
    requests, read = _requests(trace, reading)
    with progress(f"replaying {len(requests):,} requests", shown=not json) as advance:
        result = run_replay(requests, options, note=print_note, advance=advance)
    if json:
        print_json(asdict(result) | {"read": None if read is None else read.facts()})
    else:
        print_facts(_facts(result, clients, compare), _LEGEND)
    if result.verify_errors:
        raise ReplayError(
            f"{result.verify_errors} blocks came back with wrong bytes; check this machine's "
            "memory with 'beluga verify'"
        )


def _check_tiers(disks: list[str] | None, disk_bytes: int, remotes: list[str] | None) -> None:
    """Check disks and stores before reading the trace."""
    from beluga.tiers import TierSettings

    with as_bad_value(TierError):
        tiers = TierSettings(
            disks=tuple(disks or ()), disk_bytes=disk_bytes, remotes=tuple(remotes or ())
        )
        tiers.check()


def _requests(
    trace: Path | None, options: TraceOptions
) -> tuple[list[TraceRequest], Reading | None]:
    """Return the requests of a trace, and how it was read, for display."""
    from beluga.simulate import trace_requests

    check_named(trace, options)
    requests, reading = trace_requests(trace, **options)
    if reading is not None:
        print_note(f"read {reading}")
    return requests, reading


def _facts(result: Result, clients: int, compare: bool) -> dict[str, object]:
    return {
        "requests": result.requests,
        "client processes": clients,
        "seconds": f"{result.seconds:.1f}",
        "hit rate": f"{result.hit_rate:.1%} of {result.blocks_looked_up:,} blocks",
        "ideal hit rate": f"{result.ideal_hit_rate:.1%}",
        "blocks put": _moved(result.blocks_put, result.bytes_put, result.put_gb_per_s),
        "blocks got": _moved(result.blocks_got, result.bytes_got, result.get_gb_per_s),
        "RPC p50 / p99": f"{result.rpc_p50_us:.1f} / {result.rpc_p99_us:.1f} us",
        "put again": result.blocks_put_again,
        "wrong blocks": result.verify_errors if compare else "not compared",
        **_engine_facts(result),
    }


def _engine_facts(result: Result) -> dict[str, object]:
    engines = result.engines
    if engines is None:
        return {}
    return {
        "engine hits": f"{engines.device_hits:,} of {result.blocks_looked_up:,} blocks",
        "onboarded": f"{engines.onboarded:,}",
        "prefetched": f"{engines.prefetched:,}",
        "offloaded": f"{engines.offloaded:,}",
        "evicted": f"{engines.evicted:,}",
        "targets missed": ", ".join(engines.missed_targets) or "none",
    }


def _moved(block_count: int, size: int, gb_per_s: float) -> str:
    rate = f"{gb_per_s:.1f} GB/s" if gb_per_s >= 1 else f"{gb_per_s * 1e3:.0f} MB/s"
    return f"{block_count:,} ({size / 1e9:.2f} GB, {rate} per client)"
