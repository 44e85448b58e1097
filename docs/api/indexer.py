"""Send a request to the worker that has the prompt's blocks."""

from beluga.router import BlockHasher, Indexer, Router, RouterEvent, Stored, Worker, make_policy

hasher, indexer = BlockHasher(block_size=16), Indexer(workers=8, blocks=10_000)
prompt = hasher.query(range(160))  # its 10 blocks by the hashes of their tokens
names = list(range(1000, 1010))  # what the engine calls them
indexer.apply(RouterEvent(Worker(1), Stored(names, prompt.hashes)))

router = Router(make_policy("linear", credit=1.0), find_matches=indexer.matches)
for number in range(2):
    router.add_worker(Worker(number))
choice = router.route("request", prompt)
print(choice.worker.worker_id, choice.hit_rate)  # 1 1.0
