# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which prefixes were sent to which workers, as far as a bounded memory goes.

A chain of blocks is named here by Python's hash of (name of the chain before it, local hash), so a
worker's blocks stand in one ordered dictionary, and the least recently sent leave it first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence

from beluga.router.worker import Worker


class SentPrefixes:
    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._sent: dict[Worker, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Blocks remembered, over all workers."""
        return sum(len(blocks) for blocks in self._sent.values())

    def add(self, worker: Worker, hashes: Sequence[int]) -> None:
        blocks = self._sent.setdefault(worker, OrderedDict())
        for chain in reversed(list(_chains(hashes))):  # so that a prefix leaves after its end
            blocks[chain] = None
            blocks.move_to_end(chain)
        while len(blocks) > self._blocks_max:
            blocks.popitem(last=False)

    def longest(
        self, hashes: Sequence[int], workers: Container[Worker]
    ) -> tuple[Worker | None, int]:
        """Of these workers the one that was sent most of a request, and how many blocks."""
        holders = [(worker, blocks) for worker, blocks in self._sent.items() if worker in workers]
        best, matched = None, 0
        for chain in _chains(hashes):
            holders = [(worker, blocks) for worker, blocks in holders if chain in blocks]
            if not holders:
                break
            best, matched = holders[0][0], matched + 1
        return best, matched

    def forget(self, worker: Worker) -> None:
        self._sent.pop(worker, None)


def _chains(hashes: Sequence[int]) -> Iterator[int]:
    chain = 0
    for block in hashes:
        chain = hash((chain, block))
        yield chain
