# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tiers' benchmark: rows of each store compared with its bare client, or a reason."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

import pytest
from beluga_bench import BENCHES, Options, Row

THERE = {
    "file": importlib.util.find_spec("obstore") is not None,
    "redis": importlib.util.find_spec("redis") is not None
    and shutil.which("redis-server") is not None,
}


def test_each_store_is_compared_with_its_bare_client(smoke: Callable[[str], list[Row]]) -> None:
    rows = smoke("tiers-remote")
    for engine, there in THERE.items():
        mine = [row for row in rows if row["engine"] == engine]
        if not there:
            assert [str(row["note"]).startswith("skipped: ") for row in mine] == [True]
            continue
        assert [row["case"] for row in mine] == ["save", "load"]
        for row in mine:
            assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]


def test_without_a_server_a_row_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("PATH", "/nowhere")
    rows = BENCHES["tiers-remote"](Options(smoke=True))
    assert "apt-get install redis-server" in str(rows[-1]["note"])
