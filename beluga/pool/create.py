# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Creation of a pool: every check comes first, files get their space next, superblocks come last.

If anything fails, existing files are as they were before, and new files are removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceForeignError,
    DeviceMismatchError,
    DeviceSpecError,
    NoRoomError,
    PoolError,
    PoolExistsError,
    raise_for_status,
)
from beluga.pool.device import (
    SYSFS,
    Device,
    examine,
    explain,
    file_identity,
    open_device,
    refuse_twice,
)
from beluga.pool.layout import DEVICE_SIZE_MAX, Layout, NewPoolSettings
from beluga.pool.mapped import refuse_mapped
from beluga.pool.mapping import Mapping, Member
from beluga.pool.room import require_room, room
from beluga.pool.runtime import refuse_in_use, runtime_path
from beluga.pool.spec import STRIPE_SIZE, DeviceSpec, SpecLike, show_size
from beluga.pool.superblock import (
    Superblock,
    fault,
    read_first,
    slice_with_pool,
)

Progress = Callable[[int, int], None]  # called with the bytes done and the total

_SIZE_MIN = 2 * STRIPE_SIZE
_DEFAULT_TOTAL = 4 << 30  # the size of a pool of new files when no size is given
_FORCE = "destroy it with --force (Pool.create: force=True)"
_PIECE = 32 << 20  # bytes pre-faulted at a time


def create(
    paths: Sequence[SpecLike],
    settings: NewPoolSettings,
    *,
    metadata: SpecLike | None = None,
    progress: Progress | None = None,
    sysfs: Path = SYSFS,
) -> Mapping:
    """Make a pool on these devices, with everything but the data on ``metadata`` if that is given.
    Raises a :class:`PoolError`.
    """
    if metadata is None and settings.metadata_coherence is not None:
        raise PoolError(
            "a coherence mode for metadata has no effect without a device of its own; name it with "
            "--metadata (Pool.create: metadata)"
        )
    first = [] if metadata is None else [metadata]
    specs = [DeviceSpec.parse(path) for path in [*first, *paths]]
    if first and not paths:
        raise PoolError("a metadata device alone has no space for blocks; name devices for them")
    if not 1 <= len(specs) <= lib.BL_DEVICE_COUNT_MAX:
        raise PoolError(f"a pool has 1 to {lib.BL_DEVICE_COUNT_MAX} devices, not {len(specs)}")
    devices = [examine(spec, creating=True, sysfs=sysfs) for spec in specs]
    refuse_twice(devices)
    for device in devices:
        _refuse_occupied(device, settings.force)
    data = devices[len(first) :]
    size = _choose_size(data, settings.device_size)
    layout = Layout(len(data), size, settings, metadata_device=bool(first))
    sizes = [layout.geometry.device_size_of(index) for index in range(len(devices))]
    if first:
        _require_metadata_room(devices[0], sizes[0])
    if not settings.sparse:
        _require_room(devices, sizes)
    with ExitStack() as undo:
        ready = [
            _make_file(device, size, settings.sparse, undo)
            for device, size in zip(devices, sizes, strict=True)
        ]
        members = [
            Member(device, layout.superblock(index, device.kind))
            for index, device in enumerate(ready)
        ]
        mapping = Mapping(members)
        undo.callback(mapping.close)
        if settings.sparse:
            _reserve_tables(mapping)
        else:
            _fault_in(mapping, progress)
        new = not any(device.exists for device in devices)
        with mapping.using() as pool:
            raise_for_status(lib.bl_pool_format(pool, mapping.superblocks, new), "formatting")
        undo.pop_all()
    return mapping


def _refuse_occupied(device: Device, force: bool) -> None:
    """Raise a PoolError if creation would destroy data on the device."""
    if not device.exists:
        return
    fd = open_device(device)
    try:
        raw = read_first(device, fd)
        inner = None if force else slice_with_pool(device, fd)
    finally:
        os.close(fd)
    number = fault(raw)
    if number == lib.BL_SUPERBLOCK_GOOD and force:
        superblock = Superblock.of(raw)
        if superblock.device_index == 0:
            refuse_in_use(runtime_path(device, superblock.pool_id))
        else:
            refuse_mapped(device)
    if inner is not None:
        raise PoolExistsError(
            f"{device} holds a pool in its slice at {inner:#x}; use another slice, or {_FORCE}"
        )
    if force or number == lib.BL_SUPERBLOCK_EMPTY:
        return
    if number == lib.BL_SUPERBLOCK_FOREIGN:
        if device.kind == "devdax":  # memory of a devdax node keeps the bytes of its last user
            return
        raise DeviceForeignError(f"{device} holds something other than a Beluga pool; {_FORCE}")
    raise PoolExistsError(f"{device} holds a pool already; open it, or {_FORCE}")


def _fixed_size(device: Device) -> bool:
    """Return whether the device cannot grow."""
    return device.kind == "devdax" or device.sliced


def _choose_size(devices: Sequence[Device], wanted: int | None) -> int:
    """Return how many bytes of each device are used."""
    if wanted is not None:
        if wanted % STRIPE_SIZE or not _SIZE_MIN <= wanted <= DEVICE_SIZE_MAX:
            raise DeviceSpecError(
                "a device's size (--size; device_size) is a multiple of 2 MiB, from 4 MiB to "
                f"128 TiB, not {wanted} bytes"
            )
        for device in devices:
            if _fixed_size(device) and device.size < wanted:
                raise NoRoomError(
                    f"{device} has {show_size(device.size)}, less than {show_size(wanted)}; use a "
                    "smaller size"
                )
        return wanted
    sizes = {device.size // STRIPE_SIZE * STRIPE_SIZE for device in devices if device.size > 0}
    if len(sizes) > 1:
        found = ", ".join(f"{device.spec.path} {show_size(device.size)}" for device in devices)
        raise DeviceMismatchError(
            f"devices of different sizes ({found}); name one with --size (Pool.create: device_size)"
        )
    if not sizes:
        return _default_size(devices)
    size = sizes.pop()
    if size < _SIZE_MIN:
        raise NoRoomError(f"{devices[0]} has {show_size(size)}; a device needs at least 4 MiB")
    return size


def _default_size(devices: Sequence[Device]) -> int:
    """Return the device's share of half the room, at most _DEFAULT_TOTAL for all devices."""
    there = min((room(device.spec.path.parent) for device in devices), key=lambda r: r.size)
    share = min(_DEFAULT_TOTAL, there.size // 2) // len(devices)
    if share < _SIZE_MIN:
        raise NoRoomError(
            f"{len(devices)} devices do not fit in {devices[0].spec.path.parent}: {there.what} "
            f"leaves {show_size(there.size)}; use another directory"
        )
    return share // STRIPE_SIZE * STRIPE_SIZE


def _require_metadata_room(device: Device, size: int) -> None:
    """Raise NoRoomError unless the metadata device has ``size`` bytes, or is a file and can
    grow."""
    if _fixed_size(device) and device.size < size:
        raise NoRoomError(
            f"{device} has {show_size(device.size)}, but the metadata of this pool takes "
            f"{show_size(size)}; use a larger device, or fewer --lanes and --max-blocks, or a "
            "larger --block-bytes"
        )


def _require_room(devices: Sequence[Device], sizes: Sequence[int]) -> None:
    """Raise NoRoomError unless the files can grow to these sizes."""
    wanted: dict[int, tuple[Path, int]] = {}
    for device, size in zip(devices, sizes, strict=True):
        if device.kind == "devdax":
            continue
        directory = device.spec.path.parent
        filesystem = directory.stat().st_dev
        there, sum_size = wanted.get(filesystem, (directory, 0))
        wanted[filesystem] = (there, sum_size + max(0, size - _allocated(device)))
    for directory, sum_size in wanted.values():
        require_room(sum_size, directory)


def _allocated(device: Device) -> int:
    """Return the bytes that the file already occupies in the range of the pool."""
    if not device.exists:
        return 0
    if not device.sliced:
        return device.spec.path.stat().st_blocks * 512
    at, end, total = device.spec.offset, device.spec.offset + device.size, 0
    fd = open_device(device)
    try:
        while at < end:
            first = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, first, os.SEEK_HOLE)
            total += max(0, min(at, end) - first)
    except OSError:  # ENXIO: there is no data beyond
        pass
    finally:
        os.close(fd)
    return total


def _make_file(device: Device, size: int, sparse: bool, undo: ExitStack) -> Device:
    """Make or extend the device's file. ``undo`` collects the calls that revert this."""
    if device.kind == "devdax":
        return device
    path = device.spec.path
    made = 0 if device.exists else os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | made, 0o600)
    except FileExistsError:
        raise PoolExistsError(
            f"{path} is a dangling link, or another process has just created it; remove it, or "
            "try again"
        ) from None
    except OSError as error:
        raise explain(error, path) from None
    try:
        if not device.exists:
            undo.callback(path.unlink, missing_ok=True)
        elif device.size < size:
            undo.callback(os.truncate, path, device.size)
        if device.size < size:
            os.ftruncate(fd, size)
        if not sparse:
            os.posix_fallocate(fd, device.spec.offset, size)
        identity = file_identity(os.fstat(fd))
    except OSError as error:
        raise NoRoomError(
            f"{path}: {show_size(size)}: {error.strerror}; use a smaller size or another directory"
        ) from None
    finally:
        os.close(fd)
    return replace(device, size=max(size, device.size), identity=identity)


def _reserve_tables(mapping: Mapping) -> None:
    """Allocate the superblocks and tables of sparse files: a server fails without them."""
    with mapping.using() as pool:
        code = lib.bl_pool_reserve(pool)
    if code < 0:
        superblock = mapping.members[0].superblock
        raise NoRoomError(
            f"{mapping.members[0].device}: no space left for the tables of a sparse pool, "
            f"{show_size(superblock.geometry.data_offset)} ({os.strerror(-code)}); free some there"
        )


def _fault_in(mapping: Mapping, progress: Progress | None) -> None:
    """Fault in every page of the files now, in parallel, so that no request waits for a page
    fault."""
    geometry = mapping.members[0].superblock.geometry
    pieces = [
        (ffi.cast("char *", mapping.addresses[index]) + at, min(_PIECE, size - at))
        for index, member in enumerate(mapping.members)
        if member.device.kind == "file"
        for size in (geometry.device_size_of(index),)
        for at in range(0, size, _PIECE)
    ]
    done, total = 0, sum(size for _, size in pieces)
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:
        waiting = {threads.submit(lib.bl_device_populate, *piece): piece[1] for piece in pieces}
        try:
            for future in as_completed(waiting):
                code = future.result()
                if code < 0:
                    raise NoRoomError(
                        f"memory ran out while files were filled ({os.strerror(-code)}); use a "
                        "smaller size"
                    )
                done += waiting[future]
                if progress is not None:
                    progress(done, total)
        finally:
            threads.shutdown(cancel_futures=True)
