# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A short run of each benchmark, shared by the tests of its rows."""

import os
import tempfile
from collections.abc import Callable
from functools import cache

import pytest
from beluga_bench import BENCHES, Options, Row
from support.leftovers import leftovers


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Row]]:
    """Return the rows of a benchmark in smoke mode by its name. It runs once, and must clean up."""

    @cache
    def run(name: str) -> list[Row]:
        folder = tmp_path_factory.mktemp("smoke")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder))
            rows = BENCHES[name](Options(smoke=True))
        assert leftovers("bench", os.getpid()) == set()
        assert not list(folder.iterdir())
        return rows

    return run
