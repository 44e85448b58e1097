# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pytest plugin for vLLM's own tests of its scheduler: our connector gets every call of the
connector that those tests register, with preemptions and failed allocations. Blocks that it saves
in a step must have been computed or loaded by earlier steps: a block of a preempted request may
belong to another request in the same step.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from tests.v1.core import utils as core  # vLLM's
from tests.v1.kv_connector.unit import utils

from beluga.connectors.vllm.connector import BelugaConnector
from beluga.kvcache import Namespace

_made: list[BelugaConnector] = []
_saved: list[int] = []
_preempted: list[str] = []


class Chained(utils.MockKVConnector):  # type: ignore[misc]
    """The tests' connector, after which ours gets each call."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = copy.copy(vllm_config)
        config.kv_transfer_config = transfer = copy.copy(vllm_config.kv_transfer_config)
        transfer.kv_connector = "BelugaConnector"
        transfer.kv_connector_extra_config = {"pool": "/nowhere", "timeout_ms": 10}
        self.ours = BelugaConnector(config, role, kv_cache_config)
        self.contents: dict[int, bytes] = {}  # block number to the digest whose KV it has
        self.loads: set[str] = set()  # requests whose first blocks are loaded before they run
        _made.append(self.ours)
        lookups = self.ours._lookups
        lookups.meet([Namespace({"rank": 0})])  # as its workers would: without, nothing is saved
        lookups.identified("weights")

    def bind_kv_cache_manager(self, manager: Any) -> None:
        super().bind_kv_cache_manager(manager)
        self.ours.bind_kv_cache_manager(manager)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
        self.ours.get_num_new_matched_tokens(request, computed)
        return super().get_num_new_matched_tokens(request, computed)

    def update_state_after_alloc(self, request: Any, blocks: Any, count: int) -> None:
        super().update_state_after_alloc(request, blocks, count)
        self.ours.update_state_after_alloc(request, blocks, 0)
        if count:
            self.loads.add(request.request_id)

    def build_connector_meta(self, output: Any) -> Any:
        orders: Any = self.ours.build_connector_meta(output).orders  # type: ignore[attr-defined]
        for save in orders.saves:
            digests = [row.tobytes() for row in save.packed()]
            contents = [self.contents.get(block) for block in save.block_ids]
            assert contents == digests, f"{save.request} saves what its blocks do not have"
            _saved.extend(save.block_ids)
        for name, count in output.num_scheduled_tokens.items():
            self._compute(name, count)
        _preempted.extend(output.preempted_req_ids or ())
        return super().build_connector_meta(output)

    def _compute(self, name: str, count: int) -> None:
        """Record the content of a request's blocks after its step."""
        request = self.ours._schedule._requests[name].request
        size, start = self.ours._block_size, request.num_computed_tokens
        table = self.ours._block_ids_of(name)
        whole = (start + count) // size
        digests = list(self.ours._lookups.digests(request, 0, whole))
        first = 0 if name in self.loads else start // size
        self.loads.discard(name)
        for index, block in enumerate(table[first : -(-(start + count) // size)], first):
            self.contents[block] = digests[index] if index < whole else b""

    def update_connector_output(self, output: Any) -> None:
        output.kv_connector_worker_meta = None
        self.ours.update_connector_output(output)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self.ours.request_finished(request, block_ids)
        return super().request_finished(request, block_ids)


_scheduler = core.create_scheduler


def create_scheduler(*given: Any, **named: Any) -> Any:
    """Make a scheduler of a local model."""
    return _scheduler(
        *given, **({} if given else {"model": os.environ["BELUGA_TEST_MODEL"]}) | named
    )


core.create_scheduler = create_scheduler
utils.KVConnectorFactory._registry["MockKVConnector"] = lambda: Chained


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counters of our connector, and close it."""
    counts = len(_made), len(_preempted), len(_saved)
    terminalreporter.write_line(
        "chained: {} schedulers, {} preemptions, {} blocks saved".format(*counts)
    )
    for connector in _made:
        connector.shutdown()
