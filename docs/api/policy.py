"""Route by a policy of one's own."""

from collections.abc import Sequence

from beluga.errors import NoWorkersError
from beluga.router import BlockHasher, Candidate, Choice, Query, Router, Worker


class MostBlocks:
    """Choose the worker that has most of the prompt; of equal ones, the one with least to do."""

    name = "most-blocks"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        if not candidates:
            raise NoWorkersError("there is no worker; add one")
        best = min(candidates, key=lambda one: (-one.overlap.blocks, one.load.active_requests))
        hit_rate = best.overlap.blocks * query.block_size / query.isl
        return Choice(best.worker, best.overlap, hit_rate=hit_rate, cost=1.0 - hit_rate)


router = Router(MostBlocks())
for number in range(2):
    router.add_worker(Worker(number))
query = BlockHasher(block_size=16).query(range(160))
choices = [router.route(request, query) for request in ("first", "second")]
print(len({choice.worker for choice in choices}))  # 2: without an index no worker has any block
