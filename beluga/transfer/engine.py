# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a copy engine is: it takes a plan, and says when its bytes have moved.

Every engine passes the same tests (``tests/transfer/test_conformance.py``).
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
    """Of the bytes, seen from the engine."""

    READ = 0
    """``scatter_read``"""
    WRITE = 1
    """``gather_write``"""


class Transfer(Protocol):
    """A plan that is being executed. Its memory on both sides must stay until it has ended."""

    def done(self) -> bool:
        """Has it ended, well or not? True: nothing of it writes any more, now or later.

        Waits for no device; what is left to be done by a CPU may be done here. What it raises means
        that nobody can say.
        """
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, and do what remains to be done by a CPU.

        After a write every byte is in the pool's memory, ahead of whatever this thread streams
        next, and the plan's checksums are filled in: the blocks may be published. After a read
        the bytes are those that the plan's checksums are of, if it has any; the caller looks at
        the entries again.

        Raises :class:`~beluga.errors.ChecksumError` where a read's bytes are not,
        :class:`~beluga.errors.TransferTimeoutError` after ``timeout_s`` (it goes on), and
        :class:`~beluga.errors.TransferError` if the engine failed.
        """
        ...


class Engine(Protocol):
    """Moves bytes between an engine's scattered memory and the pool.

    Plans were checked when they were made; an engine that can not take one raises
    :class:`~beluga.errors.LayoutError` and has moved nothing. Whatever else a start raises, nothing
    of the plan is under way then, unless it is :class:`~beluga.errors.UnsettledError`. Used by one
    thread at a time. One
    that is slow to start may have a ``piece_size``: bytes that a link lets on in one go, at least.
    One that leaves its work to others may have a ``fault``: why it is better not used, or None.
    """

    @property
    def name(self) -> str:
        """``cpu``, ``dsa`` or ``cuda``, with what tells two of a kind apart after a hyphen; or
        ``planned``: one of several, as each plan is best served."""
        ...

    def gather_write(self, plan: Plan) -> Transfer:
        """Scattered engine memory to the pool. A block that does not end with a line has its last
        line filled up with zeros."""
        ...

    def scatter_read(self, plan: Plan) -> Transfer:
        """The pool to scattered engine memory, after what this host holds of it was dropped."""
        ...

    def close(self) -> None:
        """Give back what the engine holds, once the copies that it started have ended."""
        ...


def settle(transfers: Iterable[Transfer]) -> None:
    """Wait until nothing of them writes any more, whether they went well or not.

    Raises :class:`~beluga.errors.UnsettledError` where that can not be said of one: the space that
    it writes to must not be given to anybody while this process lives.
    """
    unknown: BaseException | None = None
    for transfer in transfers:
        try:
            while not transfer.done():
                time.sleep(_POLL_S)
        except BaseException as error:  # whatever it is: the others have to end, too
            unknown = error
            keep_for_good(transfer)
    if unknown is not None:
        raise UnsettledError(
            f"nobody can say whether a copy still writes ({unknown!r}); its space stays taken "
            "until this process ends: restart it"
        ) from unknown


def keep_for_good(used: object) -> None:
    """A copy that may never end uses this memory: nobody else must get it in this process."""
    _kept.append(used)


_kept: list[object] = []
