# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One request on its way through the simulated cluster."""

from __future__ import annotations

import math

from beluga._ffi import core


class Request:
    """Times are in seconds of the replay; a block is the trace's; NaN: not yet, or never."""

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
        self.ids = ids  # of its whole blocks, for Tier
        self.blocks = blocks  # how many
        # of them: at least one token is always computed
        self.reusable = min(blocks, (self.input - 1) // block_tokens)
        self.slots = -(-(self.input + self.output) // block_tokens)  # of HBM, in blocks
        self.worker = -1
        self.device = 0  # blocks that HBM had
        self.far = 0  # blocks beyond, that the pool or the worker's DRAM had
        self.first_token = math.nan
        self.done = math.nan

    def begin(self, block_tokens: int) -> None:
        """What was found is known: this is left to compute."""
        self.kv = (self.device + self.far) * block_tokens  # tokens that are in HBM
        self.left = self.input - self.kv  # tokens to prefill
