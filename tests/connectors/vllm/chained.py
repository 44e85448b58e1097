# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pytest plugin for vLLM's own tests: our connector gets every call of theirs.

``BELUGA_TEST_CHAINED`` is the connector. With "mocks", tests run vLLM's real scheduler with a mock
that reports loads and their failures. Ours gets the same calls, as the second one in
``MultiConnector`` would, and may not save what a failed load has left. With "scheduler", they have
preemptions and failed allocations. Blocks that ours saves in a step must have been computed or
loaded by earlier steps: a block of a preempted request may belong to another request in the same
step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from tests.v1.kv_connector.unit import utils  # vLLM's

from beluga.connectors.vllm import plugin
from beluga.connectors.vllm.connector import BelugaConnector
from beluga.kvcache import Namespace

SETTINGS = {"pool": "/nowhere", "timeout_ms": 10}

_made: list[BelugaConnector] = []
_tables: dict[str, list[int]] = {}  # of requests whose output is still to come
_wrong: set[int] = set()  # blocks that depend on a reported one and were not recomputed since
_saved: list[int] = []
_preempted: list[str] = []


def chain(ours: BelugaConnector) -> None:
    """Let a connector save, as its workers would."""
    _made.append(ours)
    ours._lookups.meet([Namespace({"rank": 0})])
    ours._lookups.identified("weights")


# ---- After a mock.


class Hook(Mock):
    """One hook of the mock. Ours gets the call after it."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        made = super().__call__(*given, **named)
        ours = _made[-1]
        hook = self._mock_name or self._mock_new_name
        if hook == "get_num_new_matched_tokens":
            ours.get_num_new_matched_tokens(*given, **named)
        elif hook == "update_state_after_alloc":
            request, blocks, _ = given
            ours.update_state_after_alloc(request, blocks, 0)
        elif hook == "build_connector_meta":
            (output,) = given
            check(ours.build_connector_meta(output).orders)  # type: ignore[attr-defined]
            _tables.clear()
            for name, tracked in ours._schedule._requests.items():
                _tables[name] = list(ours._block_ids_of(name))
                if name in output.num_scheduled_tokens:
                    first = tracked.request.num_computed_tokens // ours._block_size
                    _wrong.difference_update(_tables[name][first:])
        elif hook == "update_connector_output":
            (output,) = given
            for ids in _tables.values():
                bad = [index for index, id_ in enumerate(ids) if id_ in output.invalid_block_ids]
                _wrong.update(ids[min(bad, default=len(ids)) :])
            output.kv_connector_worker_meta = None
            ours.update_connector_output(output)
        elif hook == "request_finished":
            ours.request_finished(*given)  # without workers the blocks would not be released
        return made


def check(orders: Any) -> None:
    """Check that nothing is saved that a failed load has left."""
    saves = {block for save in orders.saves for block in save.block_ids}
    assert not saves & _wrong, "blocks that depend on a failed load are saved"
    _saved.extend(saves)


HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
_mock, _config, _scheduler = (
    utils.create_mock_connector,
    utils.create_vllm_config,
    utils.create_scheduler,
)


def create_mock_connector() -> Mock:
    mock = _mock()
    for hook in HOOKS:
        setattr(mock, hook, Hook(name=hook))
    mock.has_pending_push_work.return_value = False
    return mock


def create_vllm_config(**given: Any) -> Any:
    """Make a configuration of a local model, with our connector."""
    return _config(
        **{
            "model": os.environ["BELUGA_TEST_MODEL"],
            "kv_connector": "BelugaConnector",
            "kv_connector_extra_config": SETTINGS,
            "kv_role": "kv_both",
        }
        | given
    )


def create_scheduler(vllm_config: Any, *given: Any, **named: Any) -> Any:
    """Make a scheduler with the policy of the test, which ours would replace."""
    transfer = vllm_config.kv_transfer_config
    policy = transfer.kv_load_failure_policy
    scheduler = _scheduler(vllm_config, *given, **named)
    chain(scheduler.connector)
    scheduler.recompute_kv_load_failures = policy == "recompute"
    return scheduler


@pytest.fixture(autouse=True)
def _next_step_saves_nothing_wrong() -> Iterator[None]:
    """Most of the tests end with the step whose loads fail. Ours saves with the one after it."""
    _tables.clear()
    _wrong.clear()
    made = len(_made)
    yield
    if WITH_MOCKS and len(_made) > made:
        check(_made[-1]._schedule.orders({}, []))


# ---- After the connector of vLLM's tests of its scheduler.


class Chained(utils.MockKVConnector):  # type: ignore[misc]
    """The tests' connector, after which ours gets each call."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = copy.copy(vllm_config)
        config.kv_transfer_config = transfer = copy.copy(vllm_config.kv_transfer_config)
        transfer.kv_connector = "BelugaConnector"
        transfer.kv_connector_extra_config = SETTINGS
        self.ours = BelugaConnector(config, role, kv_cache_config)
        self.contents: dict[int, bytes] = {}  # block number to the digest whose KV it has
        self.loads: set[str] = set()  # requests whose first blocks are loaded before they run
        chain(self.ours)

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


def create_local_scheduler(*given: Any, **named: Any) -> Any:
    """Make a scheduler of a local model."""
    return _core_scheduler(
        *given, **({} if given else {"model": os.environ["BELUGA_TEST_MODEL"]}) | named
    )


WITH_MOCKS = os.environ["BELUGA_TEST_CHAINED"] == "mocks"
if WITH_MOCKS:
    plugin.register()
    for maker in (create_mock_connector, create_vllm_config, create_scheduler):
        setattr(utils, maker.__name__, maker)
else:
    from tests.v1.core import utils as core

    _core_scheduler = core.create_scheduler
    core.create_scheduler = create_local_scheduler
    utils.KVConnectorFactory._registry["MockKVConnector"] = lambda: Chained


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counters of our connector, and close it."""
    counts = len(_made), len(_preempted), len(_saved)
    terminalreporter.write_line(
        "chained: {} schedulers, {} preemptions, {} blocks saved".format(*counts)
    )
    for connector in _made:
        connector.shutdown()
