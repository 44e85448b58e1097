"""Send requests to the worker that has least to do."""

from beluga.router import BlockHasher, LoadTracker, Router, Worker, make_policy

hasher = BlockHasher(block_size=16)
router = Router(make_policy("least-tokens"), tracker=LoadTracker())
for number in range(2):
    router.add_worker(Worker(number))

first = router.route("request 1", hasher.query(range(640)), now=0.0, expected_output=100)
second = router.route("request 2", hasher.query(range(64)), now=0.1)
print(first.worker.worker_id != second.worker.worker_id)  # True: the first one is busy
router.tracker.prefill_done("request 1", now=0.3)  # its first token came
router.tracker.free("request 1", now=0.9)  # its answer has ended
print(router.tracker.load(first.worker).active_prefill_tokens)  # 0
