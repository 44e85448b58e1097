# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The commands of ``beluga pool`` and ``disk``, and ``mount`` and ``umount``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from beluga import config
from beluga.choices import BLOCK_COUNT_MAX, COHERENCE_MODES, LANE_COUNT_MAX
from beluga.cli.frame import Argument, BadParameter, Legend, Option, OptionGroup, explains
from beluga.cli.options import (
    Json,
    PoolPaths,
    as_bad_value,
    naming_devices,
    open_pool,
    refuse_alone,
    size,
)
from beluga.cli.output import plain, print_facts, print_json, print_note, print_table, progress
from beluga.errors import (
    DeviceMismatchError,
    DeviceMissingError,
    NoDefaultPoolError,
    PoolError,
    TierError,
    TransferError,
)

if TYPE_CHECKING:
    from beluga._ffi import core
    from beluga.pool import DeviceSpec, Geometry, Pool
    from beluga.transfer import EngineFacts


@contextmanager
def scrub_admission(pool: Pool) -> Iterator[tuple[core.bl_io_queue | core.Null, int] | None]:
    """Yield the lowest class of this host's link to the pool, or None if the link cannot be
    used.
    """
    from beluga.transfer import IoHandle, TransferClass, host_link

    try:
        link = host_link(pool)
    except (TransferError, PoolError, OSError):
        yield None
        return
    handle = IoHandle(link)
    try:
        with handle.using() as io_queue:
            yield io_queue, TransferClass.SCRUB
    finally:
        handle.close()
        link.close()


def adopt(path: Annotated[list[Path], Argument()], json: Json = False) -> None:
    """Release disks with blocks of another server to the next server that opens them.

    Use this for a disk whose server will not return. Its blocks stay. A new pool at the location of
    an earlier one needs no such command.

    PATH...: The disks, as in --disk of a server.
    """
    from beluga.tiers import adopt_disk, file_of_tier

    with as_bad_value(TierError):
        for each in path:
            file_of_tier(each)
    for each in path:
        before = adopt_disk(each)
        if json:
            print_json({"disk": str(each), "server": before.name, "pool": before.pool})
        else:
            owner = plain(before.name or before.pool) or "no pool"
            print_note(f"{each} belonged to {owner}; the next server that opens it takes it over")


OptionalPaths = Annotated[
    list[str] | None,
    Argument(
        metavar="[PATH...]",
        help="A device: a devdax node, a file, or a slice of either (PATH@OFFSET+SIZE).",
    ),
]


def new_pool(
    device_size: Annotated[int | None, Option("--size", parser=size)] = None,
    interleave: bool = True,
    coherence: Annotated[list[str] | None, Option(words=COHERENCE_MODES)] = None,
    metadata: str | None = None,
    metadata_coherence: Annotated[str | None, Option(words=COHERENCE_MODES)] = None,
    sparse: bool = False,
    force: bool = False,
    max_blocks: Annotated[int | None, Option(min=1, max=BLOCK_COUNT_MAX)] = None,
    block_bytes: Annotated[int | None, Option(parser=size, min=64)] = None,
    lane_count: Annotated[int | None, Option("--lanes", min=1, max=LANE_COUNT_MAX)] = None,
    bulk_size: Annotated[int | None, Option(parser=size, min=4096, max=64 << 20)] = None,
) -> dict[str, Any]:
    """Return the arguments of Pool.create.

    --size: The size of each device, such as 4G. Default: a device's own size; new files share half
        of the free memory, at most 4 GiB in total.
    --interleave: Distribute stripes over the devices, or fill the devices in order.
    --coherence: hardware (one host's own memory) or software; repeat the option to set it per
        device. Default: hardware for files, software for devdax nodes.
    --metadata PATH: A device of its own for everything but the blocks: sessions, calls and tables.
        It is not interleaved. A new file gets the size that they take.
    --metadata-coherence: The same for the metadata device. hardware there: the caches of all hosts
        that share the pool are coherent for it. Default: hardware for a file, software for a devdax
        node.
    --sparse: Do not allocate the files' space in advance (for tests).
    --force: Format the devices even if they have a pool.
    --max-blocks: The largest number of blocks in the pool. Default: see --block-bytes.
    --block-bytes: The smallest block that will be stored: the table gets an entry for each one that
        fits. Default: 256K.
    --lanes: The largest number of attached clients.
    --bulk-size: The largest call, or part of a longer message, in bytes: 4K to 64M. Each lane takes
        three times as much. Default: 32K, or 64K in pools of 512M and more.
    """
    return dict(locals())


NewPool = Annotated[dict[str, Any], OptionGroup(new_pool)]

_DEVICES = Legend(
    {
        "device": "the device's number in the pool",
        "path": "its path on this machine, with @OFFSET for a slice",
        "kind": "devdax, or the file's file system; sparse: its space is not allocated",
        "link": "the adapter that connects it, if PATH,link=NAME names one",
        "node": "its NUMA node; a dash if unknown",
        "size": "its size in the pool",
        "stripes": "its number of stripes of 2 MiB",
        "coherence": "hardware (one host's own memory) or software",
        "holds": "data (blocks), metadata (everything else), or both",
    }
)
_POLICY = Legend(
    {
        "copies by": "the copy engine: CPU, DSA or GPU",
        "before a read": "cache maintenance before a read from the pool",
        "after a write": "cache maintenance after a write to the pool",
    }
)


@explains(_DEVICES, _POLICY)
def create(paths: Annotated[list[str], Argument()], *, new: NewPool, json: Json = False) -> None:
    """Format devices as a new, empty pool. Creates files that do not exist.

    PATH...: A device: a devdax node, a file, or a slice of either (PATH@OFFSET+SIZE).
    """
    from beluga.pool import DeviceSpec, Pool, show_size

    by_default = new["device_size"] is None and not any(
        DeviceSpec.parse(path).path.exists() for path in paths
    )
    with naming_devices(), progress("allocating", shown=not json) as advance:
        pool = Pool.create(paths, **new, progress=advance)
    with pool:
        if by_default:
            shown = show_size(pool.geometry.device_size)
            print_note(
                f"each device{' with data' if new['metadata'] else ''} has {shown}: new files "
                "share half of what is free (see --size)"
            )
        _describe(pool, json)


@explains(_DEVICES, _POLICY)
def info(pool: PoolPaths = None, json: Json = False) -> None:
    """Show the layout of a pool."""
    with open_pool(pool) as opened:
        _describe(opened, json)


_CHECK = Legend(
    {
        "epoch": "the number of the current or last server",
        "tables": "the half of the tables that the server uses",
        "serving": "whether it is running",
        "blocks": "the number of committed blocks",
        "bytes": "their size in bytes",
        "extents": "the number of open extents: groups of stripes that hold blocks",
        "sessions": "the number of client sessions",
        "findings": "the number of damaged lines and blocks",
    }
)
_CHECK_FIELDS = {
    "epoch": "epoch",
    "half": "tables",
    "serving": "serving",
    "block_count": "blocks",
    "block_bytes": "bytes",
    "extent_count": "extents",
    "session_count": "sessions",
    "finding_count": "findings",
}


def _checked(facts: Mapping[str, Any]) -> dict[str, object]:
    """Return the results of a check under their displayed names."""
    shown = {word: facts[name] for name, word in _CHECK_FIELDS.items() if name in facts}
    if "tables" in shown:
        shown["tables"] = f"half {facts['half']}"
    if "serving" in shown:
        shown["serving"] = "yes" if facts["serving"] else "no"
    return shown


@explains(_CHECK)
def check(
    pool: PoolPaths = None,
    payload: bool = False,
    repair: bool = False,
    declare_gone: bool = False,
    names: bool = False,
    json: Json = False,
) -> None:
    """Check a pool, with or without a running server. The exit status is 1 if it is damaged.

    --payload: Also read every block and compare its checksums.
    --repair: Drop damaged lines and blocks. No process may use the pool meanwhile.
    --declare-gone: Declare that no process of any host uses the pool.
    --names: Also show the engines' names of blocks.
    """
    from beluga.cli.pool import scrub_admission
    from beluga.index import check_devices, repair_pool
    from beluga.pool import default_specs

    if repair:
        with open_pool(pool) as opened:
            acts, report = repair_pool(opened, payload=payload, declared_gone=declare_gone)
        for act in acts:
            print_note(act)
    else:
        specs = pool or default_specs()
        with naming_devices() if pool else nullcontext():
            report = (
                check_devices(specs, payload=True, admission=scrub_admission)
                if payload
                else check_devices(specs)
            )
    absent = ("superblock-foreign ", "superblock-empty ")
    if report.findings and all(finding.startswith(absent) for finding in report.findings):
        found = report.findings[0].partition(" ")[2]
        raise BadParameter(f"{found}; name a pool, or make one: beluga pool create PATH...")
    facts = asdict(report)
    if names:
        with open_pool(pool) as opened:
            facts["names"] = _names(opened, report.half)
    if json:
        print_json(facts)
    else:
        print_facts(_checked(facts), _CHECK)
        for finding in report.findings:
            print_note(finding)
        for name in facts.get("names", ()):
            print_note(" ".join(f"{what} {value}" for what, value in name.items()))
    if report.finding_count:
        mend = "damaged blocks read as misses; use --repair to drop them"
        foreign = ("superblock-version ", "superblock-format ")
        if all(finding.startswith(foreign) for finding in report.findings):
            mend = "use the Beluga that made the pool, or beluga pool create --force PATH..."
        raise PoolError(f"the check has {report.finding_count} findings; {mend}")


def _names(pool: Pool, half: int) -> list[dict[str, int | str | None]]:
    """Return the names of all named blocks, with hashes in hexadecimal."""
    from beluga.index import NAME_PARENT, read_names

    shown: list[dict[str, int | str | None]] = []
    for _, block, _, name in read_names(pool, half).tolist():
        block_hash, parent, contents, space, tokens, rank, rank_count, flags, _ = name
        shown.append(
            {
                "block": block,
                "hash": f"{block_hash:016x}",
                "parent": f"{parent:016x}" if flags & NAME_PARENT else None,
                "tokens_hash": f"{contents:016x}",
                "space": f"{space:016x}",
                "tokens": tokens,
                "rank": rank,
                "ranks": rank_count,
            }
        )
    return shown


def destroy(
    paths: OptionalPaths = None,
    yes: bool = False,
    force: bool = False,
    json: Json = False,
) -> None:
    """Wipe the superblocks of a pool, and remove the devices that are files.

    Without a path, destroy the default pool and unmount it.

    --yes: Do not ask for confirmation.
    --force: Destroy these devices even if others of their pool remain.
    """
    from beluga.pool import DeviceSpec, Pool, default_specs, emulated_paths, remove_default

    specs = paths or [str(spec) for spec in default_specs()]
    if not yes:
        peek = getattr(sys.stdin.buffer, "peek", None)  # of a file or a pipe
        if peek is not None and not sys.stdin.isatty() and not peek(1):
            raise BadParameter("there is nobody to confirm it; give --yes")
        click.confirm(f"Destroy the pool on {', '.join(specs)}?", abort=True, err=True)
    emulated = set(emulated_paths())
    with naming_devices() if paths else nullcontext():
        Pool.destroy(specs, force=force)
    if emulated == set(specs):
        with suppress(OSError):  # the folder has other files
            Path(specs[0]).parent.rmdir()
    named = {DeviceSpec.parse(spec).path for spec in specs}
    forgotten = named == {spec.path for spec in _remembered()} and remove_default()
    if json:
        print_json({"destroyed": specs, "forgotten": forgotten})
    else:
        print_note(f"destroyed: {', '.join(specs)}")


def _remembered() -> list[DeviceSpec]:
    """Return the mounted pool's devices; none if the record cannot be read."""
    from beluga.pool import stored_specs

    try:
        return stored_specs()
    except NoDefaultPoolError:
        return []


@explains(_DEVICES, _POLICY)
def mount(
    paths: OptionalPaths = None,
    create_first: Annotated[bool, Option("--create")] = False,
    *,
    new: NewPool,
    json: Json = False,
) -> None:
    """Check or (--create) format devices, show the mapping, and make them the default pool.

    Without a path, use the emulated pool: two files in /dev/shm.

    --create: Format the devices.
    """
    from beluga.pool import emulated_paths, storing_default

    metadata = new["metadata"]
    if metadata and not paths:
        raise BadParameter("--metadata goes with devices for the blocks; name them, too: PATH...")
    names = {"device_size": "size", "interleave": "no-interleave", "lane_count": "lanes"}
    given = {name: value != new_pool()[name] for name, value in new.items() if name != "metadata"}
    refuse_alone("--create", create_first, **{names.get(n, n): given[n] for n in given})
    data = paths or emulated_paths()
    specs = [metadata, *data] if metadata else data
    with naming_devices() if paths else nullcontext(), storing_default(specs):
        if create_first:
            if not paths:
                Path(specs[0]).parent.mkdir(mode=0o700, exist_ok=True)
            create(data, new=new, json=json)
        else:
            _show_existing(specs, json, made=paths is not None, metadata=metadata)
    _report_overrides(specs)


def _report_overrides(specs: list[str]) -> None:
    """Report if other settings override the mounted pool."""
    named = config.pool_paths()
    if named and set(named) != set(specs):
        source = "BELUGA_POOL" if config.environment_pool_paths() else "beluga.toml"
        print_note(f"other commands use {', '.join(named)}: {source} overrides the mounted pool")


def _show_existing(specs: list[str], json: bool, *, made: bool, metadata: str | None) -> None:
    """Show a pool that should exist. ``made``: the user named its devices. Raises
    DeviceMismatchError if ``metadata`` is not its metadata device.
    """
    from beluga.pool import DeviceSpec, Pool, refuse_missing

    try:
        with Pool.open(specs) as pool:
            if metadata is not None:
                _refuse_other_metadata(pool, DeviceSpec.parse(metadata))
            _describe(pool, json)
    except DeviceMissingError as error:
        if made:
            raise
        mounted = _remembered()
        if {spec.path for spec in mounted} == {DeviceSpec.parse(spec).path for spec in specs}:
            refuse_missing(mounted)
        raise DeviceMissingError(
            f"there is no emulated pool in {Path(specs[0]).parent} yet; create one with 'beluga "
            "mount --create', or name the devices of another: 'beluga mount PATH...'"
        ) from error


def _refuse_other_metadata(pool: Pool, named: DeviceSpec) -> None:
    """Raise DeviceMismatchError unless the pool has that metadata device."""
    first = pool.devices[0]
    if first.holds != "metadata":
        raise DeviceMismatchError(
            f"pool {pool.id[:8]} has its metadata on the devices of its blocks, not on "
            f"{named.path}; mount it without --metadata"
        )
    if (first.path, first.offset) != (named.path, named.offset):
        raise DeviceMismatchError(
            f"{named.path} is not the metadata device of pool {pool.id[:8]}; that is {first.path}"
        )


def umount(json: Json = False) -> None:
    """Forget the default pool. The data stays."""
    from beluga.pool import remove_default

    if not remove_default():
        raise NoDefaultPoolError("no pool is mounted; there is nothing to do")
    if json:
        print_json({"forgotten": True})


def _describe(pool: Pool, json: bool) -> None:
    from beluga.pool import show_size
    from beluga.transfer import default_threads, engine_facts, policy

    geometry, probed = pool.geometry, policy.probe()
    copies = engine_facts(pool, default_threads())
    rows = {
        str(initiator): {step: str(what) for step, what in asdict(probed.row(initiator)).items()}
        for initiator in policy.Initiator
    }
    if json:
        print_json(
            {
                "pool": pool.id,
                "created_s": pool.created_s,
                "geometry": asdict(geometry),
                "devices": [asdict(device) for device in pool.devices],
                "policy": asdict(probed) | {"rows": rows},
                "engines": {name: asdict(facts) for name, facts in copies.items()},
            }
        )
        return
    print_facts(
        {
            "pool": pool.id,
            "for blocks": show_size(geometry.data_size),
            "max blocks": _table(geometry),
            "lanes": f"{geometry.lane_count} of {geometry.slot_count} slots",
            "stripes": "interleaved" if geometry.interleaved else "device after device",
            **({"metadata": f"on {pool.devices[0].path}"} if geometry.metadata_device else {}),
            "memory": f"{probed.memory} ({probed.memory_source})",
            "DDIO": f"{probed.ddio} ({probed.ddio_source})",
            "engines": _engines(copies),
        }
    )
    print_table(
        _DEVICES,
        [
            [
                device.index,
                str(device.path) + (f"@{device.offset:#x}" if device.offset else ""),
                device.kind + (", sparse" if device.sparse else ""),
                device.link,
                device.node,
                show_size(device.size),
                device.stripe_count,
                device.coherence,
                device.holds,
            ]
            for device in pool.devices
        ],
    )
    print_table(
        _POLICY,
        [[name, row["before_read"], row["after_write"]] for name, row in rows.items()],
    )


def _table(geometry: Geometry) -> str:
    """Describe how many blocks fit into the table, and below which block size it is the limit."""
    from beluga.pool import show_size

    smallest = max(geometry.data_size // geometry.block_count_max, 1)
    return (
        f"{geometry.block_count_max:,}: blocks of less than {show_size(smallest)} fill the table "
        "before the space (--block-bytes)"
    )


def _engines(copies: dict[str, EngineFacts]) -> str:
    """Describe the copy engines in one line."""
    missing = [name for name, facts in copies.items() if facts.why_none is not None]
    shown = [
        "cpu",
        *(_engine(name, facts) for name, facts in copies.items() if name not in missing),
    ]
    if missing:
        shown[-1] += f" (not here: {', '.join(missing)}; --json has the reasons)"
    return "; ".join(shown)


def _engine(name: str, facts: EngineFacts) -> str:
    from beluga.pool import show_size

    if facts.memory != "host":
        return f"{name} for blocks in {facts.memory.upper()} memory"
    sizes = [
        f"never {what}" if size is None else f"from {show_size(size)} {what}"
        for what, size in (("written", facts.written), ("read", facts.read))
    ]
    source = "as measured" if facts.measured else "by default"
    return f"{name} ({facts.device}) {', '.join(sizes)}, {source}"
