# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of a copy engine, which executes a plan and reports its completion.

Every engine passes the same tests (``tests/transfer/engines/test_conformance.py``).
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Protocol

from beluga.errors import UnsettledError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga.transfer.plan import Plan


_POLL_S = 0.0005


class Direction(enum.IntEnum):
    """The direction of a copy, from the view of the inference engine."""

    READ = 0
    """``scatter_read``"""
    WRITE = 1
    """``gather_write``"""


class Transfer(Protocol):
    """A plan that is being executed. The memory of both sides must stay valid until it has
    ended."""

    def done(self) -> bool:
        """Return whether it has ended, successfully or not. If True, it writes no more bytes.

        This waits for no device, but may do the CPU's part of the work. After an exception it is
        unknown whether it has ended.
        """
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, and do the CPU's part of the work.

        After a write, every byte is in the pool's memory before this thread's next streamed store,
        and the plan's checksums are filled in: the blocks may be published. After a read, the bytes
        match the plan's checksums, if it has any; the caller checks the entries again.

        Raises :class:`~beluga.errors.ChecksumError` if the bytes of a read do not match,
        :class:`~beluga.errors.TransferTimeoutError` after ``timeout_s`` (the transfer continues),
        and :class:`~beluga.errors.TransferError` if the engine failed.
        """
        ...


class CopyEngine(Protocol):
    """Moves bytes between an engine's scattered memory and the pool.

    Plans are checked when they are made; an engine that cannot execute one raises
    :class:`~beluga.errors.LayoutError` and copies nothing. After any other exception of a start, no
    copy of the plan is in progress, unless it is :class:`~beluga.errors.UnsettledError`. One thread
    at a time uses an engine. It may have further members:

    * ``piece_size``: the bytes per start that it needs to be fast.
    * ``fault``: why it should not be used, or None; for an engine that falls back to the CPU.
    """

    @property
    def name(self) -> str:
        """The name of the engine: ``cpu``, ``dsa``, ``cuda``, or ``planned`` for an engine that
        chooses one of several for each plan. A suffix after a hyphen distinguishes two of a
        kind."""
        ...

    def gather_write(self, plan: Plan) -> Transfer:
        """Start a copy from scattered engine memory to the pool. A partial last line of a block is
        padded with zeros."""
        ...

    def scatter_read(self, plan: Plan) -> Transfer:
        """Drop this host's cached lines, and start a copy from the pool to scattered memory."""
        ...

    def close(self) -> None:
        """Wait until all copies have ended, and release the engine's resources."""
        ...


def settle(transfers: Iterable[Transfer]) -> None:
    """Wait until none of the transfers writes any more, successful or not.

    Raises :class:`~beluga.errors.UnsettledError` if that is unknown for one of them. The space that
    it writes to must not be reused while this process exists.
    """
    unknown: BaseException | None = None
    for transfer in transfers:
        try:
            while not transfer.done():
                time.sleep(_POLL_S)
        except BaseException as error:  # of any type: the others have to end, too
            unknown = error
            keep_for_good(transfer)
    if unknown is not None:
        raise UnsettledError(
            f"it is unknown whether a copy still writes ({unknown!r}); its space stays allocated "
            "until this process ends: restart it"
        ) from unknown


def keep_for_good(used: object) -> None:
    """Keep the memory of a copy that may never end, so that it is not reused."""
    _kept.append(used)


_kept: list[object] = []
