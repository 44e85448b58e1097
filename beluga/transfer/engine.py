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
    from collections.abc import Callable, Iterable

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


class CopyEngine(Protocol):
    """Moves bytes between an engine's scattered memory and the pool.

    Plans were checked when they were made; an engine that can not take one raises
    :class:`~beluga.errors.LayoutError` and has moved nothing. Whatever else a start raises, nothing
    of the plan is under way then, unless it is :class:`~beluga.errors.UnsettledError`. Used by one
    thread at a time. It
    may have more than this:

    * ``piece_size``: bytes that it needs to be given at a time to be fast.
    * ``prepare(plan, direction)``, a :class:`Prepared`: makes its tables before a link admits
      anything. Without it each range is given to it as a plan of its own.
    * ``fault``: why it is better not used, or None; of one that leaves its work to others.
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


class Prepared(Protocol):
    """A plan that is ready to be copied: whatever its copies need of tables is made, and lies where
    the engine reads it."""

    def start(self, first: int, end: int) -> Transfer:
        """Copy the chunks from ``first`` to ``end``. Ranges are started in order, each once; the
        next may be started before the last has ended."""
        ...

    def close(self) -> None:
        """No other range is started, and those that were have ended."""
        ...


def prepared(engine: CopyEngine, plan: Plan, direction: Direction) -> Prepared:
    """A plan made ready by the engine's ``prepare``, if it has one; else by :class:`Parts`."""
    prepare: Callable[[Plan, Direction], Prepared] | None = getattr(engine, "prepare", None)
    return Parts(engine, plan, direction) if prepare is None else prepare(plan, direction)


class Parts:
    """For an engine that needs no tables: each range is a plan of its own."""

    def __init__(self, engine: CopyEngine, plan: Plan, direction: Direction) -> None:
        write = direction is Direction.WRITE
        self._copy = engine.gather_write if write else engine.scatter_read
        self._plan = plan

    def start(self, first: int, end: int) -> Transfer:
        """See :class:`Prepared`."""
        return self._copy(self._plan.part(first, end))

    def close(self) -> None:
        """Nothing is held."""


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
