# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prefixes that were sent to each worker, in bounded memory.

A chain of blocks is identified by Python's hash of (id of the chain before it, local hash). An
ordered dictionary has a worker's blocks, and drops the least recently sent ones first. A prefix is
always more recent than its continuation, so the remembered set is closed under prefixes.
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
        """Return the number of remembered blocks of all workers."""
        return sum(len(blocks) for blocks in self._sent.values())

    def add(self, worker: Worker, hashes: Sequence[int]) -> None:
        blocks = self._sent.setdefault(worker, OrderedDict())
        # Reversed, so that the end of a chain is dropped before its prefix
        for chain in reversed(_chains(hashes)):
            blocks[chain] = None
            blocks.move_to_end(chain)
        while len(blocks) > self._blocks_max:
            blocks.popitem(last=False)

    def longest(
        self, hashes: Sequence[int], workers: Container[Worker]
    ) -> tuple[Worker | None, int]:
        """Return the worker among these that received the longest prefix of a request, and its
        length in blocks.
        """
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
