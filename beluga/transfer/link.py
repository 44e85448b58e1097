# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A link: the fabric between engines and the pool, which all processes of this host share.

There is a link for each CXL adapter or GPU, and NUMA node, if the devices name them; otherwise
there is one for each pool. A duplex link has a direction for reads and one for writes
(``csrc/iosched/link.c``). Each memory device behind it has a bucket, shared by all links.

A copy costs the time that it takes on the link, in picoseconds, which are its tokens. This is
Seastar's model: an operation takes 1 / (operations per second), and its bytes take 1 / (bytes per
second). The copies of one second may not cost more than a second.

The processes share a small file in this host's own coherent memory, never in the pool. The first
process creates the file atomically. It remains when that process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from beluga import config
from beluga._ffi import core, ffi, lib
from beluga.arguments import StrPath, path_of
from beluga.errors import TransferError, raise_for_status
from beluga.transfer.engine import Direction

if TYPE_CHECKING:
    from beluga.pool import Pool


PICOSECONDS = 10**12  # tokens that a link has per second; as in csrc/iosched/link.c


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one direction: bytes per second, and operations per second (0: they are free).

    Raises TransferError for impossible values.
    """

    bytes_per_s: int
    ops_per_s: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.ops_per_s < 0:
            raise TransferError(f"{self} is not a speed; bytes_per_s must be greater than 0")

    @property
    def operation_ps(self) -> float:
        """The cost of an operation apart from its bytes."""
        return PICOSECONDS / self.ops_per_s if self.ops_per_s else 0.0

    def tokens(self, sizes: ArrayLike, *, operations: int = 1) -> NDArray[np.uint64]:
        """Return the picoseconds that copies of ``sizes`` bytes take, each of ``operations``
        operations.

        0 bytes cost 0, because they do not use the link. Halves are rounded up, as in
        ``bl_price_tokens``: a bucket for two pieces must hold two pieces.
        """
        size = np.asarray(sizes, np.float64)
        fixed = operations * self.operation_ps
        taken = size * (PICOSECONDS / self.bytes_per_s) + fixed * (size > 0)
        return (taken + 0.5).astype(np.uint64)

    def longest(self, tokens: int, *, most: int = 16 << 20) -> int:
        """Return the largest power of two, up to ``most``, that costs at most ``tokens``."""
        size = most
        while size > 1 and int(self.tokens(size)) > tokens:
            size //= 2
        return size


def speed_of(value: Speed | int | dict[str, Any]) -> Speed:
    """Return a speed from bytes per second, or from the fields of one."""
    if isinstance(value, Speed):
        return value
    return Speed(**value) if isinstance(value, dict) else Speed(value)


# The speeds of the Beluga paper: a CXL adapter of 16 lanes, read and written by CPUs; a memory
# device.
READ_SPEED = Speed(46_200_000_000)
WRITE_SPEED = Speed(33_000_000_000)
DEVICE_SPEED = Speed(22_500_000_000)


_SHM = Path("/dev/shm")  # noqa: S108  links_directory rejects directories of other users


def links_directory() -> Path:
    """Return the directory of this user's links, which lies in memory, and create it if necessary.

    Engines of several users that share a link set their own directory. Raises TransferError if the
    directory belongs to another user.
    """
    root = _SHM if os.access(_SHM, os.W_OK) else config.runtime_root()
    path = root / f"beluga-links-{os.geteuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise TransferError(f"{path} belongs to another user; remove it")
    return path


class Segment:
    """The mapped file, and a lock on it: the last process that releases it removes the file."""

    def __init__(self, path: Path, handle: int, memory: mmap.mmap) -> None:
        self.memory = memory
        self._path, self._handle = path, handle
        self._pid = os.getpid()

    def release(self) -> None:
        """Release the lock; the kernel does so for a process that was killed.

        The memory stays mapped while it is referenced.
        """
        if self._handle < 0:
            return
        if self._pid == os.getpid():  # a forked child shares the lock with its parent
            with contextlib.suppress(OSError):  # other processes hold it, or the file was removed
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._path.unlink()
        os.close(self._handle)
        self._handle = -1


def share(path: Path, size: int, fill: Callable[[mmap.mmap], None]) -> Segment:
    """Map the file with ``size`` bytes; ``fill`` writes it if it does not exist. Raises
    TransferError.

    The mode of a new file is its directory's, without the right to execute.
    """
    import tempfile  # slow to import, and only the first process of a host needs it

    while True:
        with contextlib.suppress(FileNotFoundError):
            if (found := _map(path, size)) is not None:
                return found
            continue
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        made = Path(name)
        try:
            os.fchmod(handle, path.parent.stat().st_mode & 0o666)
            os.ftruncate(handle, size)
            with mmap.mmap(handle, size) as memory:
                fill(memory)
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(made, path)
        finally:
            os.close(handle)
            made.unlink()


def _map(path: Path, size: int) -> Segment | None:
    """Map the file, or return None if its last user has just removed it."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise TransferError(
                f"{path} belongs to another version of Beluga; stop the processes that use it, "
                "and remove it"
            )
        fcntl.flock(handle, fcntl.LOCK_SH)
        if os.fstat(handle).st_nlink == 0:
            os.close(handle)
            return None
        return Segment(path, handle, mmap.mmap(handle, size))
    except BaseException:
        os.close(handle)
        raise


def at(memory: mmap.mmap, offset: int) -> core.uint8_p:
    """Return a pointer into the memory, to be cast; ``memory`` must outlive it."""
    return ffi.from_buffer("uint8_t[]", memory) + offset


TAU_NS = 5_000_000  # Seastar's: the longest time that a waking class has the link alone
GOAL_NS = 750_000  # Seastar's latency goal; the flow ratio is updated every 100 goals
BURST = 10 << 20  # Seastar's: bytes that a class with a limited bandwidth may be ahead of it


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStat:
    """The fields of ``bl_queue_stat`` in ``csrc/api/iosched.h``."""

    queued: int
    in_flight: int
    pending: int
    polls: int
    yields: int
    lost: int
    stalls: int
    stalled_ns: int
    stall_ns: int
    flow_ratio: float


def queue_stat(stat: core.bl_queue_stat) -> QueueStat:
    """Convert the C struct."""
    return QueueStat(*(getattr(stat, field.name) for field in dataclasses.fields(QueueStat)))


class LinkDirection:
    """One direction of a link: a bucket of picoseconds, a tree of classes, and a member for each
    engine.

    The direction lies in ``memory`` (of a :class:`~beluga.transfer.Link`), or in its own memory.
    ``limit`` is the capacity of its bucket, and ``forgiving`` is the head start of a waking class,
    times its shares; both are picoseconds. If the bucket is capped, ``limit`` also bounds the work
    in flight.
    """

    def __init__(
        self,
        memory: core.bl_direction | None = None,
        *,
        limit: int,
        forgiving: int = TAU_NS * 1000,
        capped: bool = False,
        now_ns: int,
    ) -> None:
        self.handle = ffi.new("bl_direction *") if memory is None else memory
        status = lib.bl_direction_init(self.handle, limit, forgiving, capped, now_ns)
        raise_for_status(status, "making a link")

    @classmethod
    def at(cls, memory: core.bl_direction) -> LinkDirection:
        """Return the existing direction in this memory."""
        direction = object.__new__(cls)
        direction.handle = memory
        return direction

    def add(self, shares: int, *, parent: int = 0) -> int:
        """Add a class, which becomes a group once it is another's ``parent``. Return its number."""
        return raise_for_status(lib.bl_direction_add(self.handle, parent, shares), "adding a class")

    def set_shares(self, node: int, shares: int) -> None:
        """Change a class's shares from the next piece on."""
        raise_for_status(lib.bl_direction_set_shares(self.handle, node, shares), "setting shares")

    def limit(
        self, node: int, bytes_per_s: int, *, burst: int = BURST, now_ns: int | None = None
    ) -> None:
        """Limit the bandwidth of a class or group; 0 lifts the limit."""
        now = lib.bl_io_queue_now_ns() if now_ns is None else now_ns
        raise_for_status(
            lib.bl_direction_limit(self.handle, node, bytes_per_s, burst, now), "limiting a class"
        )

    def bytes_of(self, node: int) -> int:
        """Return the bytes that were admitted so far."""
        return int(self.handle.nodes[node].bytes)


_PAGE = 4096
_HEADER = _PAGE  # the settings, as JSON
_DIRECTION_SIZE = -(-ffi.sizeof("bl_direction") // _PAGE) * _PAGE


class TransferClass(enum.IntEnum):
    """Classes of transfers; the number is that of the class in a direction."""

    ONBOARD = 1
    """Pool to engine, while a request waits."""
    PREFETCH = 2
    """Pool to engine, ahead of a request."""
    OFFLOAD = 3
    """Engine to pool, best effort."""
    SCRUB = 4
    """Maintenance of the blocks in the pool."""


SHARES = (1000, 200, 100, 10)


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSettings:
    """The speed of a link and the shares of its classes; the paper's speeds are the default.

    ``piece_size`` is the largest piece that is admitted at once, in bytes; ``pieces`` of that size
    may be in flight in each direction. ``device`` is the speed of each memory device behind the
    link; None if the devices are not slower than the link. ``shares`` has one number per
    :class:`TransferClass`, in order. If ``capped``, new pieces wait for completed ones, so a link
    that is slower than its settings is not flooded. Otherwise the rate alone limits them, and costs
    grow when the link lags behind (the flow ratio).
    """

    read: Speed = READ_SPEED
    write: Speed = WRITE_SPEED
    device: Speed | None = DEVICE_SPEED
    duplex: bool = True
    piece_size: int = 256 << 10
    pieces: int = 2
    shares: tuple[int, ...] = SHARES
    tau_ns: int = TAU_NS
    capped: bool = True

    def __post_init__(self) -> None:
        if min(self.piece_size, self.pieces) <= 0 or self.tau_ns < 0:
            raise TransferError(f"{self} is invalid; see LinkSettings")
        if len(self.shares) != len(TransferClass):
            raise TransferError(f"{self} is invalid; see LinkSettings")
        if any(not 0 < share < 1 << 31 for share in self.shares):
            raise TransferError(f"shares must be whole numbers of at least 1, not {self.shares}")


class Link:
    """A link of this host, attached to by name.

    The first process's ``settings`` apply to all processes; :attr:`settings` has them. With a
    ``pool``, copies also count for the memory devices that they access. Raises TransferError if the
    shared file is unusable.
    """

    def __init__(
        self,
        name: str,
        settings: LinkSettings | None = None,
        *,
        node: int | None = None,
        pool: Pool | None = None,
        directory: StrPath | None = None,
    ) -> None:
        directory = None if directory is None else path_of("directory", directory)
        self.name = name
        self.path = link_path(name, node, directory)
        where = self.path.parent
        wanted = settings or LinkSettings()
        self._shared = [
            share(self.path, _HEADER + 2 * _DIRECTION_SIZE, lambda memory: _fill(memory, wanted))
        ]
        self._memory = self._shared[0].memory
        self.settings = _read(self._memory, self.path)
        self.directions = self._find_directions()
        self.pool = pool
        self.devices: list[core.bl_tokens] = (
            [] if pool is None else self._attach_devices(where, pool)
        )
        self._since = (
            time.monotonic(),
            tuple(int(direction.handle.used) for direction in self.directions),
        )

    def price(self) -> core.bl_price:
        """Return the price of pieces, a ``bl_price *``, which the caller has to reference."""
        settings = self.settings
        speeds = (settings.read, settings.write)
        device = settings.device
        return ffi.new(
            "bl_price *",
            {
                "byte_ps": [PICOSECONDS / speed.bytes_per_s for speed in speeds],
                "piece_ps": [speed.operation_ps for speed in speeds],
                "device_byte_ps": 0.0 if device is None else PICOSECONDS / device.bytes_per_s,
                "device_piece_ps": 0.0 if device is None else device.operation_ps,
                "piece_size": settings.piece_size,
                "piece_count": settings.pieces,
            },
        )

    def close(self) -> None:
        """Release the shared memory; the handles of the link have been closed.

        The last process of the host removes the file.
        """
        for segment in self._shared:
            segment.release()

    def set_shares(self, kind: TransferClass, shares: int) -> None:
        """Set a class's shares for all processes, from the next piece on."""
        for direction in self.directions:
            direction.set_shares(kind, shares)

    def limit(self, kind: TransferClass, bytes_per_s: int) -> None:
        """Limit a class's bandwidth in each direction for all processes; 0 lifts the limit."""
        for direction in self.directions:
            direction.limit(kind, bytes_per_s)

    def bytes_of(self, kind: TransferClass) -> tuple[int, int]:
        """Return the bytes that all processes have read and written so far."""
        read, write = self.directions
        return read.bytes_of(kind), write.bytes_of(kind) if self.settings.duplex else 0

    def pieces_of(self, kind: TransferClass) -> tuple[int, int]:
        """Return how many pieces of all processes were admitted, to read and to write."""
        read, write = (int(direction.handle.nodes[kind].pieces) for direction in self.directions)
        return read, write if self.settings.duplex else 0

    def utilisation(self) -> tuple[float, float]:
        """Return the share of each direction's time that was admitted to copies of all processes.

        The time counts from the last call, or from attaching.
        """
        now, used = (
            time.monotonic(),
            tuple(int(direction.handle.used) for direction in self.directions),
        )
        (before, since), self._since = self._since, (now, used)
        elapsed = max(now - before, 1e-9) * PICOSECONDS
        read, write = ((u - s) / elapsed for u, s in zip(used, since, strict=True))
        return read, write

    def _find_directions(self) -> tuple[LinkDirection, LinkDirection]:
        found = [LinkDirection.at(_direction_at(self._memory, place)) for place in Direction]
        for direction in found:
            if not lib.bl_direction_valid(
                direction.handle
            ) or direction.handle.node_count != 1 + len(TransferClass):
                raise TransferError(
                    f"{self.path} is damaged; stop the processes that use it, and remove it"
                )
        return (found[0], found[1]) if self.settings.duplex else (found[0], found[0])

    def _attach_devices(self, where: Path, pool: Pool) -> list[core.bl_tokens]:
        if self.settings.device is None:
            return []
        if len(pool.devices) > lib.BL_LINK_DEVICES:
            raise TransferError(f"a link has at most {lib.BL_LINK_DEVICES} devices")
        found = []
        for device in pool.devices:
            path = where / f"device-{_file_name(str(device.path.resolve()))}"
            self._shared.append(share(path, _PAGE, self._fill_device))
            bucket = ffi.cast("bl_tokens *", at(self._shared[-1].memory, 0))
            if bucket.rate != PICOSECONDS:
                raise TransferError(
                    f"{path} is damaged; stop the processes that use it, and remove it"
                )
            found.append(bucket)
        return found

    def _fill_device(self, memory: mmap.mmap) -> None:
        settings = self.settings
        assert settings.device is not None  # noqa: S101  otherwise there are none
        limit = settings.pieces * int(settings.device.tokens(settings.piece_size))
        bucket = ffi.cast("bl_tokens *", at(memory, 0))
        status = lib.bl_tokens_init(bucket, PICOSECONDS, limit, 1, 0, lib.bl_io_queue_now_ns())
        raise_for_status(status, "making a device's bucket")


def link_path(name: str, node: int | None, directory: Path | None) -> Path:
    """Return the shared file of a link."""
    where = links_directory() if directory is None else directory
    return where / f"link-{_file_name(name)}{'' if node is None else f'-node{node}'}"


def _direction_at(memory: mmap.mmap, direction: Direction) -> core.bl_direction:
    return ffi.cast("bl_direction *", at(memory, _HEADER + direction * _DIRECTION_SIZE))


def _fill(memory: mmap.mmap, settings: LinkSettings) -> None:
    """Write the first process's settings for all processes."""
    for place, speed in zip(Direction, (settings.read, settings.write), strict=True):
        direction = LinkDirection(
            _direction_at(memory, place),
            limit=settings.pieces * int(speed.tokens(settings.piece_size)),
            forgiving=settings.tau_ns * (PICOSECONDS // 10**9),
            capped=settings.capped,
            now_ns=lib.bl_io_queue_now_ns(),
        )
        for shares in settings.shares:
            direction.add(shares)
    text = json.dumps(dataclasses.asdict(settings)).encode()
    memory[: len(text)] = text


def _read(memory: mmap.mmap, path: Path) -> LinkSettings:
    try:
        fields = json.loads(memory[:_HEADER].rstrip(b"\0"))
        for name in ("read", "write", "device"):
            fields[name] = None if fields[name] is None else speed_of(fields[name])
        return LinkSettings(**{**fields, "shares": tuple(fields["shares"])})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TransferError(
            f"{path} is damaged; stop the processes that use it, and remove it"
        ) from error


def _file_name(name: str) -> str:
    """Return a file name for a link or device, whose name may be a path. Different names have
    different files.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.]{0,63}", name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '_', name)[-40:]}-{digest}"


AUTO = "auto"
_CORE_BYTES_PER_S = 32_000_000_000
"""More than one core can stream (measured: 15 GB/s on an EPYC). A link that is declared too slow
would delay engines when nothing else uses it. The number of pieces in flight bounds them instead.
"""
_CORES_MOST = 16
"""The number of cores that saturate a host's memory."""
_TAU_NS = 1_000_000
"""A fifth of Seastar's 5 ms, because the declared speed of the link is some five times the real
one.
"""


def host_link(
    pool: Pool, settings: LinkSettings | None = None, *, directory: StrPath | None = None
) -> Link:
    """Return this host's link to a pool, which all its processes share.

    The settings of the first process apply; None takes those of :func:`settings_for`. A pool's own
    link lies with its lock files, and is removed with them. Raises TransferError if the shared file
    is unusable, and a PoolError if its directory is.
    """
    name, node, place = _location(pool)
    return Link(
        name, settings or settings_for(pool), node=node, pool=pool, directory=directory or place
    )


def host_link_now(pool: Pool) -> Link | None:
    """Return this host's link to a pool as engines share it now, or None if there is none.

    Unlike :func:`host_link` it creates none, so its caller does not determine the settings of later
    engines.
    """
    name, node, directory = _location(pool)
    return host_link(pool) if link_path(name, node, directory).exists() else None


def _location(pool: Pool) -> tuple[str, int | None, Path | None]:
    """Return the name, the NUMA node and the directory of the link; see :class:`Link`."""
    adapters = {device.link for device in pool.data_devices}
    nodes = {device.node for device in pool.data_devices}
    adapter = adapters.pop() if len(adapters) == 1 else None
    return (
        adapter or f"pool-{pool.id}",
        nodes.pop() if len(nodes) == 1 else None,
        None if adapter else pool.runtime_dir,
    )


def settings_for(pool: Pool) -> LinkSettings:
    """Return the paper's speeds for CXL memory.

    Files lie in this host's own memory, which shares its bandwidth between reads and writes. Their
    link is not duplex, is at most as fast as the host's cores, and has one piece in flight more
    than the host has cores.
    """
    if all(device.kind == "devdax" for device in pool.data_devices):
        return LinkSettings()
    cores = min(len(os.sched_getaffinity(0)), _CORES_MOST)
    speed = Speed(cores * _CORE_BYTES_PER_S)
    return LinkSettings(
        read=speed, write=speed, device=None, duplex=False, pieces=cores + 1, tau_ns=_TAU_NS
    )


def parse_settings(text: str) -> LinkSettings | None:
    """Parse a user's link setting.

    ``auto`` is None; ``20`` means 20 GB/s for reads and writes together, and ``46.2/33`` separate
    speeds of reads and writes. Raises TransferError.
    """
    if text == AUTO:
        return None
    try:
        speeds = [Speed(int(float(part) * 1e9)) for part in text.split("/")]
    except (ValueError, OverflowError) as error:
        raise TransferError(f"{text!r} is not a link speed; use {_FORMS}") from error
    if len(speeds) > 2:
        raise TransferError(f"{text!r} is not a link speed; use {_FORMS}")
    return LinkSettings(
        read=speeds[0],
        write=speeds[-1],
        device=None,
        duplex=len(speeds) == 2,
    )


_FORMS = f"{AUTO}, or GB/s, as 20 or 46.2/33 (reads/writes)"
