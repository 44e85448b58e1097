# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Work for the lower tiers (``csrc/index/lower.c``), as their service receives it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import ffi, lib, record_dtype
from beluga.errors import raise_for_status
from beluga.rpc import nanoseconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.rpc import Client

LOWER_RECORD = record_dtype("bl_lower_record")
"""A work item (``bl_lower_record``). Items of the kinds ONBOARD, PREFETCH and COLD have key, tiers
and stale. A removal has key, generation, block, and its tier as a bit in ``tiers``.
"""

LOWER_NOTE = record_dtype("bl_lower_note")
"""The outcome of a work item (``bl_lower_note``). ``stored`` and ``lost`` are tiers as bits.
``generation`` and ``block`` are those of a finished offload or removal. ``ended`` is set when a key
is no longer needed, and ``removal`` is a :class:`Removal`.
"""


class Work(enum.IntEnum):
    """The kinds of work items (``bl_lower_kind``)."""

    OFFLOAD = 0
    ONBOARD = 1
    PREFETCH = 2
    REMOVE = 3
    RETRY = 4
    COLD = 5


class Removal(enum.IntEnum):
    """The outcomes of a removal (``bl_removal``)."""

    NONE = 0
    DONE = 1
    FAILED = 2
    REPLACED = 3


class LowerWork:
    """Takes work items from the server and reports their outcomes.

    All calls use one session. When it ends, the server reclaims unfinished items. All raise
    :class:`~beluga.errors.RpcError` if the server does not reply.
    """

    def __init__(self, client: Client, token: int) -> None:
        self._client, self._token = client, token
        self._timeout_ns = nanoseconds(client.timeout_s)

    def take(self, kind: Work, count: int, *, tier: int = 0) -> NDArray[np.void]:
        """Take at most ``count`` items, oldest first: an array of :data:`LOWER_RECORD`. Items of
        the kind RETRY are those of lower tier ``tier``, from 1 on.
        """
        records = np.zeros(count, LOWER_RECORD)
        pointer = ffi.from_buffer("bl_lower_record[]", records, require_writable=True)
        with self._client.lock:
            found = raise_for_status(
                lib.bl_lower_take(
                    self._client.session, self._token, kind, tier, pointer, count, self._timeout_ns
                ),
                "taking work for lower tiers",
            )
        return records[:found]

    def report(self, notes: NDArray[np.void]) -> None:
        """Report outcomes: an array of :data:`LOWER_NOTE`."""
        if not len(notes):
            return
        pointer = ffi.from_buffer("bl_lower_note[]", np.ascontiguousarray(notes))
        with self._client.lock:
            raise_for_status(
                lib.bl_lower_report(
                    self._client.session, self._token, pointer, len(notes), self._timeout_ns
                ),
                "reporting to the server",
            )
