# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Get the handles of other libraries' streams without importing those libraries."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

from beluga.errors import TransferError


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
