# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pytest plugin: coverage records each line under the test that runs, with its fixtures.

Coverage's own ``dynamic_context = test_function`` records only lines that run below a test
function. It misses fixtures and the threads that they start.
"""

from collections.abc import Generator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Name a test's set-up, call and end by the name by which pytest selects it."""
    running = coverage.Coverage.current()
    assert running is not None
    running.switch_context(item.nodeid.partition("[")[0])
    try:
        return (yield)
    finally:
        running.switch_context("")
