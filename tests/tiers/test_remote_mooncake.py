# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier over a real Mooncake Store, in a network namespace (``mooncake_scene.py``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from beluga.errors import TierError
from beluga.tiers.remote import open_remote

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SEEN = {
    "saved by another": 10,
    "loaded": [True] * 10,
    "missing": [False] * 3,
    "saved": [True] * 3,
    "loaded others": [True] * 3,
    "state": 0,
    "wrong": True,
    "replaced": [True],
    "right again": [True],
    "removed": 3,
    "after that": [False] * 3,
    "before": True,
    "stopped": 0,
    "at once": True,
    "open": True,
    "back": True,
    "killed": 0,
    "open again": True,
}


def need_namespace() -> list[str]:
    """Return the words that run a command in a network namespace of its own, or skip the test."""
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child"]
    if os.geteuid():
        command += ["--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no network namespace can be made here")
    return command


@pytest.mark.slow
def test_two_racks_share_a_mooncake_store_that_stops_and_dies(tmp_path: Path) -> None:
    unshare = need_namespace()
    setup = subprocess.run(
        [ROOT / "scripts/dev/setup-mooncake"], stdout=subprocess.PIPE, text=True, check=False
    )
    if setup.returncode:
        pytest.skip("Mooncake Store cannot be installed here")
    packages = Path(setup.stdout.strip())
    ran = subprocess.run(
        [*unshare, sys.executable, FOLDER / "mooncake_scene.py", tmp_path, packages / "bin"],
        env={**os.environ, "PYTHONPATH": f"{FOLDER}:{FOLDER.parent}:{packages}"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("seen ")]
    assert lines, ran.stderr[-5000:]
    assert json.loads(lines[0].removeprefix("seen ")) == SEEN


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("mooncake://master", "mooncake://HOST:PORT"),
        ("mooncake://master:1?segment=1", "no option segment"),
        ("mooncake://master:1?buffer=1GiB", "a number of bytes"),
    ],
)
def test_an_invalid_url_is_a_one_line_error(
    url: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = type(sys)("mooncake.store")
    package.MooncakeDistributedStore = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", type(sys)("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    with pytest.raises(TierError, match=reason):
        open_remote(url)
