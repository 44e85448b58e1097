# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface to CUDA: a dozen calls, so that the code above it also runs without a GPU.

``device.py`` implements it for a GPU. Addresses and handles are plain integers; those of other
libraries' streams are found without importing these libraries.

The kernels' source is in ``csrc/`` beside the package. An installed package has it in the folder
``kernels``, which ``setup.py`` creates from the necessary files.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from beluga.errors import EngineUnavailableError, TransferError


class DriverError(TransferError):
    """A CUDA call failed; the error does not affect later calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The number and size of a launch's thread blocks."""

    blocks: int
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """Memory of this process that the GPU reaches at ``address``."""

    array: NDArray[np.uint8]
    address: int


class Driver(Protocol):
    """All calls except :meth:`wait` return at once; failed ones raise :class:`DriverError`."""

    @property
    def name(self) -> str:
        """The name ``cuda``, with the stand-in for a GPU after a hyphen if there is one."""
        ...

    @property
    def identity(self) -> str:
        """The identity of the device, under which measurements are kept."""
        ...

    def use(self) -> None:
        """Make the device current for the calling thread."""
        ...

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes of GPU memory and return the address."""
        ...

    def free(self, address: int) -> None: ...

    def pin(self, size: int) -> Pinned: ...

    def unpin(self, pinned: Pinned) -> None: ...

    def register(self, address: int, size: int) -> int:
        """Map memory of this process, page-locked, for the GPU and return its address there.

        The address is valid for every driver of that GPU, and stays valid when this one closes.
        """
        ...

    def unregister(self, address: int) -> None:
        """End a registration. This works on a driver that is closed, too."""
        ...

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes by a copy engine of the GPU, in stream order."""
        ...

    def launch(self, kernel: str, grid: Grid, job: NDArray[np.void], stream: int) -> None:
        """Launch a kernel of ``csrc/cuda/kv_copy.cu``; ``job`` is of type JOB."""
        ...

    def make_stream(self, *, urgent: bool) -> int:
        """Make a stream that waits for no other; ``urgent`` streams have priority."""
        ...

    def end_stream(self, stream: int) -> None: ...

    def capturing(self, stream: int) -> bool:
        """Return whether the stream is being captured into a graph."""
        ...

    def make_event(self) -> int: ...

    def free_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def follow(self, stream: int, event: int) -> None:
        """Make later work on ``stream`` wait for the event's last recording.

        The event may be freed or recorded again meanwhile.
        """
        ...

    def ended(self, event: int) -> bool:
        """Return whether all work before the event has ended. Raises :class:`DriverError` if any
        failed."""
        ...

    def wait(self, event: int) -> None:
        """Block until :meth:`ended` is true."""
        ...

    def elapsed_s(self, first: int, second: int) -> float:
        """Return the seconds between two events that have ended."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class TorchStream(Protocol):
    """``torch.cuda.Stream``."""

    cuda_stream: int


@runtime_checkable
class CupyStream(Protocol):
    """``cupy.cuda.Stream`` and ``ExternalStream``."""

    ptr: int


@runtime_checkable
class ForeignStream(Protocol):
    """Anything with the protocol of cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = int | TorchStream | CupyStream | ForeignStream


def stream_handle(stream: StreamLike) -> int:
    """Return the ``cudaStream_t``. The stream must exist until the transfer has ended.

    Raises :class:`~beluga.errors.TransferError` for other objects than streams.
    """
    if isinstance(stream, int):
        return stream
    if isinstance(stream, TorchStream):
        return int(stream.cuda_stream)
    if isinstance(stream, ForeignStream):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, CupyStream):
        return int(stream.ptr)
    raise TransferError(
        f"{stream!r} is not a CUDA stream; give a handle, or a stream of torch or cupy"
    )


_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "kernels"
ROOT = _INSTALLED if _INSTALLED.is_dir() else _HERE.parents[2] / "csrc"

KERNELS = tuple(
    f"bl_{kernel}{half}{total}"
    for kernel in ("gather", "scatter")
    for half in ("", "_half")
    for total in ("", "_sum")
)
# cupy adds --device-as-default-execution-space, without which NVRTC rejects the shared headers'
# prototypes of the C core. NVRTC 12.4 rejects the option if it is given twice (12.9 and 13 do not).
NVRTC_OPTIONS = (
    "--std=c++17",
    f"-I{ROOT}",
    f"-I{ROOT / 'cuda'}",
    f"-I{ROOT / 'cuda' / 'nvrtc'}",
)
SHARED = tuple(path for name in ("api", "format") for path in (ROOT / name).glob("*.h"))


def kernel_path() -> Path:
    """Return the path of ``kv_copy.cu``. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    path = ROOT / "cuda" / "kv_copy.cu"
    if not path.exists():
        raise EngineUnavailableError(f"the kernels' source is not installed ({path} is missing)")
    return path


def kernel_text() -> str:
    """Return the text for NVRTC.

    cupy keeps compiled kernels by this text alone, so it has a digest of the headers. Raises the
    errors of :func:`kernel_path`.
    """
    return f"/* {digest()} */\n{kernel_path().read_text(encoding='utf-8')}"


def digest() -> str:
    """Return a digest of all source files of the kernels."""
    found = hashlib.sha256()
    for path in sorted([*(ROOT / "cuda").rglob("*.[ch]*"), *SHARED]):
        found.update(path.read_bytes())
    return found.hexdigest()
