# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Create and destroy a pool, and the space that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from beluga._ffi import ffi, lib
from beluga.arguments import StrPath, path_of
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
    STRIPE_SIZE,
    SYSFS,
    Device,
    DeviceSpec,
    SpecLike,
    examine,
    explain,
    file_identity,
    open_device,
    refuse_twice,
    show_size,
)
from beluga.pool.layout import (
    DEVICE_SIZE_MAX,
    Layout,
    NewPoolSettings,
    Superblock,
    fault,
    read_first,
    slice_with_pool,
    wipe_first,
)
from beluga.pool.mapping import Mapping, Member, refuse_mapped
from beluga.pool.runtime import refuse_in_use, runtime_path

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "max"


@dataclass(frozen=True, slots=True)
class Limit:
    """The bytes that are still available, and the name of the limit."""

    what: str
    size: int


def room(directory: StrPath, *, root: StrPath = Path("/")) -> Limit:
    """Return the smallest limit for new files in ``directory``, less a tenth.

    ``root`` is where proc and sys are found.
    """
    smallest = min(limits(directory, root=root), key=lambda limit: limit.size)
    return Limit(smallest.what, max(0, smallest.size) // 10 * 9)


def require_room(size: int, directory: Path, *, root: Path = Path("/")) -> None:
    """Raise NoRoomError unless ``size`` more bytes fit into ``directory``."""
    free = room(directory, root=root)
    if size > free.size:
        raise NoRoomError(
            f"{show_size(size)} do not fit in {directory}: {free.what} leaves "
            f"{show_size(free.size)} (a tenth is reserved); use a smaller size or another "
            "directory"
        )


def limits(directory: StrPath, *, root: StrPath = Path("/")) -> list[Limit]:
    """Return everything that limits files in ``directory``."""
    directory = path_of("directory", directory)
    root = path_of("root", root)
    kind = filesystem(directory, root=root)
    if kind == "hugetlbfs":  # The pages were reserved at boot, so only their number matters.
        return [_huge_pages(directory, root)]
    stat = os.statvfs(directory)
    candidates = [Limit("the filesystem", stat.f_bavail * stat.f_frsize)]
    available = _available_memory(root)
    if available is not None:
        candidates.append(Limit("available memory", available))
    candidates.extend(_control_groups(root))
    return candidates


def filesystem(directory: StrPath, *, root: StrPath = Path("/")) -> str:
    """Return the type of the filesystem that holds ``directory``, or "unknown"."""
    directory = path_of("directory", directory)
    root = path_of("root", root)
    number = directory.stat().st_dev
    device_number = f"{os.major(number)}:{os.minor(number)}"
    kind = "unknown"
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [device_number] and after.split():
            kind = after.split()[0]
    return kind


def _huge_pages(directory: Path, root: Path) -> Limit:
    stat = os.statvfs(directory)
    page = stat.f_bsize
    free = _number(root / f"sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/free_hugepages") or 0
    if stat.f_blocks > 0:  # a mount without its own limit reports 0
        free = min(free, stat.f_bavail)
    return Limit("the number of free huge pages", free * page)


def _available_memory(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and (size := _whole(*value.split()[:1])) is not None:
            return size << 10
    return None


def _control_groups(root: Path) -> Iterator[Limit]:
    """Yield the limit of each group above this process that limits memory, of cgroup v2 and v1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, fields = line.partition(":")
        controllers, separated, path = fields.partition(":")
        if not (number and separated):
            continue
        if controllers == "":
            mounts, names = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _V2
        elif "memory" in controllers.split(","):
            mounts, names = ["sys/fs/cgroup/memory"], _V1
        else:
            continue
        for mount in mounts:
            top = root / mount
            group = top / path.strip("/")
            # A container may show a path that exists only outside, so the walk continues to the
            # parents.
            for folder in (group, *group.parents):
                if folder != top and top not in folder.parents:
                    break
                yield from _group_limit(folder, names)


@dataclass(frozen=True, slots=True)
class _Names:
    limit: str
    usage: str
    cache: tuple[str, str]  # fields of memory.stat whose pages the kernel can drop


_V2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def _group_limit(group: Path, names: _Names) -> Iterator[Limit]:
    limit, usage = _number(group / names.limit), _number(group / names.usage)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in names.cache:
            usage -= _whole(value) or 0
    yield Limit(f"the memory limit of control group {group.name}", limit - usage)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    return _whole(_text(path).strip())


def _whole(text: str = "") -> int | None:
    """Return the kernel's number, or None if the text is not a number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


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


def _choose_size(devices: Sequence[Device], size: int | None) -> int:
    """Return how many bytes of each device are used."""
    if size is not None:
        if size % STRIPE_SIZE or not _SIZE_MIN <= size <= DEVICE_SIZE_MAX:
            raise DeviceSpecError(
                "a device's size (--size; device_size) is a multiple of 2 MiB, from 4 MiB to "
                f"128 TiB, not {size} bytes"
            )
        for device in devices:
            if _fixed_size(device) and device.size < size:
                raise NoRoomError(
                    f"{device} has {show_size(device.size)}, less than {show_size(size)}; use a "
                    "smaller size"
                )
        return size
    sizes = {device.size // STRIPE_SIZE * STRIPE_SIZE for device in devices if device.size > 0}
    if len(sizes) > 1:
        named = ", ".join(f"{device.spec.path} {show_size(device.size)}" for device in devices)
        raise DeviceMismatchError(
            f"devices of different sizes ({named}); name one with --size (Pool.create: device_size)"
        )
    if not sizes:
        return _default_size(devices)
    size = sizes.pop()
    if size < _SIZE_MIN:
        raise NoRoomError(f"{devices[0]} has {show_size(size)}; a device needs at least 4 MiB")
    return size


def _default_size(devices: Sequence[Device]) -> int:
    """Return the device's share of half the room, at most _DEFAULT_TOTAL for all devices."""
    free = min((room(device.spec.path.parent) for device in devices), key=lambda r: r.size)
    share = min(_DEFAULT_TOTAL, free.size // 2) // len(devices)
    if share < _SIZE_MIN:
        raise NoRoomError(
            f"{len(devices)} devices do not fit in {devices[0].spec.path.parent}: {free.what} "
            f"leaves {show_size(free.size)}; use another directory"
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
    growth: dict[int, tuple[Path, int]] = {}
    for device, size in zip(devices, sizes, strict=True):
        if device.kind == "devdax":
            continue
        directory = device.spec.path.parent
        filesystem = directory.stat().st_dev
        first, sum_size = growth.get(filesystem, (directory, 0))
        growth[filesystem] = (first, sum_size + max(0, size - _allocated(device)))
    for directory, sum_size in growth.values():
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
    flags = 0 if device.exists else os.O_CREAT | os.O_EXCL
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
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
    from concurrent.futures import ThreadPoolExecutor, as_completed  # slow to import

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


def destroy(paths: Sequence[SpecLike], *, force: bool = False) -> None:
    """See :meth:`beluga.pool.Pool.destroy`."""
    devices = [examine(DeviceSpec.parse(path)) for path in paths]
    refuse_twice(devices)
    runtime_paths, others = [], list[Device]()
    named: dict[str, list[Device]] = {}  # the devices by pool
    counts: dict[str, int] = {}
    damaged = 0  # devices that may be of any pool
    for device in devices:
        raw = _first(device)
        number = fault(raw)
        if number in (lib.BL_SUPERBLOCK_EMPTY, lib.BL_SUPERBLOCK_FOREIGN):
            raise DeviceForeignError(f"{device} holds no Beluga pool; nothing was destroyed")
        if number == lib.BL_SUPERBLOCK_GOOD:
            superblock = Superblock.of(raw)
            named.setdefault(superblock.pool_id, []).append(device)
            counts[superblock.pool_id] = superblock.geometry.device_count
            if superblock.device_index == 0:
                runtime_paths.append(runtime_path(device, superblock.pool_id))
            else:
                others.append(device)
        else:
            damaged += 1
    if not force:
        _refuse_partial(named, counts, damaged)
    import shutil  # slow to import

    for path in runtime_paths:
        refuse_in_use(path)
    for device in others:
        refuse_mapped(device)
    for device in devices:
        _wipe(device)
    for path in runtime_paths:
        shutil.rmtree(path, ignore_errors=True)


def _refuse_partial(named: dict[str, list[Device]], counts: dict[str, int], damaged: int) -> None:
    """Raise DeviceMismatchError if devices of a pool are missing in the list: they would remain."""
    missing = {pool: counts[pool] - len(devices) for pool, devices in named.items()}
    if sum(missing.values()) <= damaged:
        return
    pool = max(missing, key=lambda pool_id: missing[pool_id])
    raise DeviceMismatchError(
        f"the pool on {named[pool][0]} has {counts[pool]} devices, and {missing[pool]} of them are "
        "not named; name all of them, or destroy these alone with --force (Pool.destroy: "
        "force=True); nothing was destroyed"
    )


def _first(device: Device) -> bytes:
    fd = open_device(device)
    try:
        return read_first(device, fd)
    finally:
        os.close(fd)


def _wipe(device: Device) -> None:
    if device.size >= STRIPE_SIZE:  # A smaller file was truncated; it is only removed below.
        fd = open_device(device)
        try:
            wipe_first(device, fd)
        finally:
            os.close(fd)
    if device.kind == "file" and not device.sliced:
        try:
            device.spec.path.unlink()
        except OSError as error:
            raise explain(error, device.spec.path) from None
