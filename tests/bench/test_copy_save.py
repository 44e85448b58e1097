# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga bench copy --save`` writes sizes to a settings file, and leaves the rest as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from beluga_bench import Options, save_crossings
from beluga_bench.paper.copy_save import with_sizes

from beluga import config
from beluga.transfer import ENGINES, CpuEngine, EngineEntry

SIZES = {"dsa-write": 8192, "dsa-read": 4096}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[copy]\ndsa-write = 8192\ndsa-read = 4096\n"),
        ("host = 1", "host = 1\n\n[copy]\ndsa-write = 8192\ndsa-read = 4096\n"),
        (
            "host = 1\n[copy]  # mine\npast = 3\ndsa-read = 1\n\n[serve]\ndsa-read = 1\n",
            "host = 1\n[copy]  # mine\ndsa-write = 8192\ndsa-read = 4096\npast = 3\n\n"
            "[serve]\ndsa-read = 1\n",
        ),
        ("[copy]", "[copy]\ndsa-write = 8192\ndsa-read = 4096\n"),
    ],
)
def test_only_the_sizes_change(before: str, after: str) -> None:
    assert with_sizes(before, SIZES) == after
    assert with_sizes(after, SIZES) == after


def test_measured_sizes_are_those_that_caches_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "beluga.toml"
    monkeypatch.setenv("BELUGA_CONFIG", str(path))
    monkeypatch.setitem(ENGINES, "dsa", EngineEntry(name="dsa", open=CpuEngine, memory="gpu"))
    assert save_crossings(Options(smoke=True)) is None
    monkeypatch.setitem(ENGINES, "toy", EngineEntry(name="toy", open=CpuEngine))
    assert save_crossings(Options(smoke=True)) == path
    assert config.copy_settings().keys() == {"toy-read", "toy-write"}
