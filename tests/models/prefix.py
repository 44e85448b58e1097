# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A naive index of KV events: every worker has a set of names, and a block's name is its whole
path.
"""

from beluga.router.events import Cleared, Removed, RouterEvent, Stored, Tier
from beluga.router.worker import Overlap, Worker

Path = tuple[int, ...]  # tokens hashes from the first block on
POOL = Worker(-1)


class NaiveIndex:
    """apply() returns whether all of the event could be applied."""

    def __init__(self) -> None:
        self.names: dict[Worker, dict[int, Path]] = {}
        self.held: dict[Worker, set[tuple[int, Tier]]] = {}  # by name and tier

    def _name(self, owner: Worker, publisher: Worker, name: int) -> Path | None:
        found = self.names.get(owner, {}).get(name)
        return self.names.get(publisher, {}).get(name) if found is None else found

    def _store(self, owner: Worker, tier: Tier, name: int, path: Path) -> None:
        names, held = self.names.setdefault(owner, {}), self.held.setdefault(owner, set())
        if names.get(name, path) != path:
            held -= {(name, other) for other in Tier}
        names[name] = path
        held.add((name, tier))

    def _remove(self, owner: Worker, tier: Tier, name: int) -> bool:
        held = self.held.get(owner, set())
        if (name, tier) not in held:
            return False
        held.remove((name, tier))
        if not any((name, other) in held for other in Tier):
            del self.names[owner][name]
        return True

    def apply(self, event: RouterEvent) -> bool:
        data = event.data
        owner = POOL if event.tier is Tier.SHARED else event.worker
        if isinstance(data, Cleared):
            self.names.pop(event.worker, None)
            self.held.pop(event.worker, None)
            return True
        if isinstance(data, Removed):
            unknown = [n for n in data.block_hashes if not self._remove(owner, event.tier, n)]
            return not unknown
        assert isinstance(data, Stored)
        if data.tokens_hashes is None:
            known = True
            for name in data.block_hashes:
                path = self._name(owner, event.worker, name)
                if path is None:
                    known = False
                else:
                    self._store(owner, event.tier, name, path)
            return known
        path: Path | None = ()
        if data.parent_hash is not None:
            if data.parent_hash in data.block_hashes:
                return False
            path = self._name(owner, event.worker, data.parent_hash)
        if path is None:
            return False
        for name, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            path = (*path, local)
            self._store(owner, event.tier, name, path)
        return True

    def _blocks(self, owner: Worker, tier: Tier) -> set[Path]:
        names = self.names.get(owner, {})
        return {names[name] for name, where in self.held.get(owner, ()) if where is tier}

    def find(self, hashes: list[int]) -> tuple[dict[Worker, Overlap], int]:
        """Return the overlaps of workers that have blocks of the request, and the pool's leading
        blocks.
        """

        def run(blocks: set[Path], start: int) -> int:
            end = start
            while end < len(hashes) and tuple(hashes[: end + 1]) in blocks:
                end += 1
            return end - start

        pool = self._blocks(POOL, Tier.SHARED)
        found: dict[Worker, Overlap] = {}
        for worker in self.held.keys() - {POOL}:
            device = run(self._blocks(worker, Tier.DEVICE), 0)
            host = run(self._blocks(worker, Tier.HOST), device)
            disk = run(self._blocks(worker, Tier.DISK), device + host)
            own = device + host + disk
            if own:
                found[worker] = Overlap(device, host, disk, run(pool, own))
        return found, run(pool, 0)
