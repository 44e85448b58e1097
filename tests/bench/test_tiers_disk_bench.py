# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The disk tier's benchmark: both engines compared with fio, or one row that reports the missing
fio.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from beluga_bench import BENCHES, Options, Row


def test_both_engines_are_compared_with_fio(smoke: Callable[[str], list[Row]]) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    rows = smoke("tiers-disk")
    read = [row for row in rows if str(row["case"]).endswith("read")]
    assert {row["case"] for row in read} == {"random read", "sequential read"}
    assert {row["engine"] for row in read} == {"uring", "threads"}
    assert {row["engine"] for row in rows if row["case"] == "save"} == {"uring", "threads"}
    beside = [row for row in rows if str(row["case"]).startswith("load beside saves")]
    assert len(beside) == 2
    for row in rows:
        if not str(row["note"]).startswith("skipped: "):
            assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]
    assert rows[-1]["case"] == "index rebuild"


def test_without_fio_a_row_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (row,) = BENCHES["tiers-disk"](Options(smoke=True))
    assert "apt-get install fio" in str(row["note"])
