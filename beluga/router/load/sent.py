# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prefixes that were sent to each worker, in bounded memory.

A chain of blocks is named here by Python's hash of (name of the chain before it, local hash). So an
ordered dictionary has a worker's blocks, and the least recently sent ones leave it first. A prefix
is always younger than what follows it, so the remembered set is closed under prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from beluga.router.load.blocks import leading
from beluga.router.worker import Worker


class SentPrefixes:
    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._sent: dict[Worker, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Return how many blocks are remembered, over all workers."""
        return sum(len(blocks) for blocks in self._sent.values())

    def add(self, worker: Worker, hashes: Sequence[int]) -> None:
        blocks = self._sent.setdefault(worker, OrderedDict())
        for chain in reversed(_chains(hashes)):  # reversed, so that a prefix leaves after its end
            blocks[chain] = None
            blocks.move_to_end(chain)
        while len(blocks) > self._blocks_max:
            blocks.popitem(last=False)

    def longest(
        self, hashes: Sequence[int], workers: Container[Worker]
    ) -> tuple[Worker | None, int]:
        """Return the worker, of these, that was sent most of a request, and how many blocks."""
        chains = _chains(hashes)
        best, matched = None, 0
        for worker, blocks in self._sent.items():
            if worker in workers and matched < len(chains) and chains[matched] in blocks:
                best, matched = worker, leading(chains, blocks)
        return best, matched

    def forget(self, worker: Worker) -> None:
        self._sent.pop(worker, None)


def _chains(hashes: Sequence[int]) -> list[int]:
    chains, chain = [], 0
    for block in hashes:
        chain = hash((chain, block))
        chains.append(chain)
    return chains
