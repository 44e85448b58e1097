# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pytest plugin for vLLM's own tests: our connector gets every call of their mock connector.

Those tests run vLLM's real scheduler with a mock that reports loads and their failures. With this
plugin, ours gets the same calls, as the second one in ``MultiConnector`` would, and may not save
what a failed load has left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from tests.v1.kv_connector.unit import utils  # vLLM's

from beluga.connectors.vllm import plugin
from beluga.connectors.vllm.connector import BelugaConnector
from beluga.kvcache import Namespace

plugin.register()

_made: list[BelugaConnector] = []
_tables: dict[str, list[int]] = {}  # of requests whose output is still to come
_wrong: set[int] = set()  # blocks that depend on a reported one and were not recomputed since
_saved: list[int] = []


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
            "kv_connector_extra_config": {"pool": "/nowhere", "timeout_ms": 10},
            "kv_role": "kv_both",
        }
        | given
    )


def create_scheduler(vllm_config: Any, *given: Any, **named: Any) -> Any:
    """Make a scheduler with the policy of the test, which ours would replace."""
    transfer = vllm_config.kv_transfer_config
    policy = transfer.kv_load_failure_policy
    scheduler = _scheduler(vllm_config, *given, **named)
    _made.append(scheduler.connector)
    lookups = scheduler.connector._lookups
    lookups.meet([Namespace({"rank": 0})])  # as its workers would: without, nothing is saved
    lookups.identified("weights")
    scheduler.recompute_kv_load_failures = policy == "recompute"
    return scheduler


for maker in (create_mock_connector, create_vllm_config, create_scheduler):
    setattr(utils, maker.__name__, maker)


@pytest.fixture(autouse=True)
def _next_step_saves_nothing_wrong() -> Iterator[None]:
    """Most of the tests end with the step whose loads fail. Ours saves with the one after it."""
    _tables.clear()
    _wrong.clear()
    made = len(_made)
    yield
    if len(_made) > made:
        check(_made[-1]._schedule.orders({}, []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counters of our connector, and close it."""
    terminalreporter.write_line(f"chained: {len(_made)} schedulers, {len(_saved)} blocks saved")
    for connector in _made:
        connector.shutdown()
