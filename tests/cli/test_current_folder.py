# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""No command, and no child process of one, imports anything from the folder where it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from beluga.replay import Conversations, make_workload, write_trace

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
PACKAGES = ("beluga", "beluga_bench", "numpy", "click", "msgspec", "rich", "cffi", "aiohttp")
STANDARD = ("json", "struct", "random", "runpy", "queue", "copy")
TRAP = "open({mark!r}, 'a').write(__name__ + ' '); raise SystemExit('imported from ' + __file__)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a package of every name that a command might import."""
    hostile = tmp_path / "hostile"
    for name in (*PACKAGES, *STANDARD):
        (hostile / name).mkdir(parents=True)
        (hostile / name / "__init__.py").write_text(TRAP.format(mark=str(hostile / "imported")))
    write_trace(make_workload(Conversations(conversation_count=5)), hostile / "trace")
    return hostile


def check(folder: Path, *words: str | Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200"}
    ended = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    mark = folder / "imported"
    assert not mark.exists(), f"imported from the current folder: {mark.read_text()}"
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "beluga --help",
        "beluga replay trace --json",
        "beluga bench rpc --smoke --coherence hardware",
        "cxl-rpc bench --smoke --coherence hardware",
        pytest.param("beluga bench scheduler --smoke", marks=pytest.mark.slow),
        pytest.param("beluga bench gateway --smoke", marks=pytest.mark.slow),
    ],
)
def test_a_command_imports_nothing_from_there(folder: Path, words: str) -> None:
    name, *arguments = words.split()
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed beside {sys.executable}")
    check(folder, BIN / name, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["demo", "demo-gpu"])
def test_a_demo_imports_nothing_from_there(folder: Path, script: str) -> None:
    check(folder, ROOT / "scripts" / script, "--json")


def test_programs_are_started_by_child_py_alone() -> None:
    """``python -m`` and ``python -c`` look into the current folder first."""
    sources = [path for name in ("beluga", "bench") for path in (ROOT / name).rglob("*.py")]
    scripts = [
        path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    wrong = [path for path in sources if re.search(r'"-[mc]", ', path.read_text())]
    wrong += [path for path in scripts if "-m beluga" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in wrong] == []
