# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A request in the simulated cluster."""

from __future__ import annotations

import math

from beluga._ffi import core


class Request:
    """A request. Times are in seconds of the replay, and NaN for an event that has not happened.
    Blocks are the trace's.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "device",
        "done",
        "far",
        "first_token",
        "ids",
        "index",
        "input",
        "kv",
        "left",
        "output",
        "reusable",
        "slots",
        "worker",
    )

    def __init__(
        self,
        index: int,
        arrival: float,
        tokens: tuple[int, int, int],
        ids: core.uint32_p,
        blocks: int,
    ) -> None:
        self.index = index
        self.arrival = arrival
        self.input, self.output, block_tokens = tokens
        self.ids = ids  # the numbers of its whole blocks, for Tier
        self.blocks = blocks  # the number of whole blocks
        # At least one token is always computed, so not all whole blocks may be reusable.
        self.reusable = min(blocks, (self.input - 1) // block_tokens)
        self.slots = -(-(self.input + self.output) // block_tokens)  # slots of HBM, in blocks
        self.worker = -1
        self.device = 0  # blocks found in HBM
        self.far = 0  # further blocks, found in the pool or the worker's DRAM
        self.first_token = math.nan
        self.done = math.nan

    def begin(self, block_tokens: int) -> None:
        """Compute what is left to prefill, once the found blocks are known."""
        self.kv = (self.device + self.far) * block_tokens  # tokens in HBM
        self.left = self.input - self.kv  # tokens to prefill
