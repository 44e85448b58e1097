# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of a copy engine, which takes a plan and says when the bytes have moved.

Every engine passes the same tests (``tests/transfer/engines/test_conformance.py``).
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Protocol

from beluga.errors import UnsettledError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beluga.transfer.plan.plan import Plan


_POLL_S = 0.0005


class Direction(enum.IntEnum):
    """The direction in which bytes move, seen from the inference engine."""

    READ = 0
    """``scatter_read``"""
    WRITE = 1
    """``gather_write``"""


class Transfer(Protocol):
    """A plan that is being executed. The memory of both sides must stay until it has ended."""

    def done(self) -> bool:
        """Has it ended, well or not? If True, nothing of it writes any more, now or later.

        This waits for no device, but may do work that is left to a CPU. An exception means that
        nobody can say whether it has ended.
        """
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, and do the work that is left to a CPU.

        After a write every byte is in the pool's memory, ahead of everything that this thread
        streams next, and the plan's checksums are filled in: the blocks may be published. After a
        read the bytes match the plan's checksums, if it has any; the caller looks at the entries
        again.

        Raises :class:`~beluga.errors.ChecksumError` if the bytes of a read do not match,
        :class:`~beluga.errors.TransferTimeoutError` after ``timeout_s`` (the transfer goes on), and
        :class:`~beluga.errors.TransferError` if the engine failed.
        """
        ...


class Engine(Protocol):
    """Moves bytes between an engine's scattered memory and the pool.

    Plans were checked when they were made. An engine that cannot take a plan raises
    :class:`~beluga.errors.LayoutError` and has moved nothing. If a start raises another error,
    nothing of the plan is under way, unless it is :class:`~beluga.errors.UnsettledError`. An engine
    is used by one thread at a time.

    An engine that is slow to start may have a ``piece_size``: the least number of bytes that a link
    should admit at once. An engine that leaves its work to others may have a ``fault``: the reason
    not to use it, or None.
    """

    @property
    def name(self) -> str:
        """The name of the engine: ``cpu``, ``dsa``, ``cuda``, or ``planned`` for an engine that
        chooses one of several for each plan. A suffix after a hyphen tells two of a kind apart."""
        ...

    def gather_write(self, plan: Plan) -> Transfer:
        """Start a copy from scattered engine memory to the pool. Zeros fill up the last line of a
        block that does not end with a line."""
        ...

    def scatter_read(self, plan: Plan) -> Transfer:
        """Drop this host's cached lines, and start a copy from the pool to scattered memory."""
        ...

    def close(self) -> None:
        """Wait until all copies have ended, and release the engine's resources."""
        ...


def settle(transfers: Iterable[Transfer]) -> None:
    """Wait until none of the transfers writes any more, whether they went well or not.

    Raises :class:`~beluga.errors.UnsettledError` if that is unknown for one of them. The space that
    it writes to must not be given to anybody while this process lives.
    """
    unknown: BaseException | None = None
    for transfer in transfers:
        try:
            while not transfer.done():
                time.sleep(_POLL_S)
        except BaseException as error:  # of any kind: the others have to end, too
            unknown = error
            keep_for_good(transfer)
    if unknown is not None:
        raise UnsettledError(
            f"nobody can say whether a copy still writes ({unknown!r}); its space stays taken "
            "until this process ends: restart it"
        ) from unknown


def keep_for_good(used: object) -> None:
    """Keep memory that a copy may use that never ends, so that nobody else gets it."""
    _kept.append(used)


_kept: list[object] = []
