# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The README's shell block, pasted as a whole by a user with an empty home directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from beluga.pool import emulated_paths

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


def block_with(words: str, language: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if words in block)


@pytest.fixture
def pasted(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that has the commands, as after the installation."""
    program = tmp_path / "bin/beluga"
    program.parent.mkdir()
    code = "from beluga.cli.main import main; main()"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    program.chmod(0o755)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("BELUGA_POOL")
    }
    return inherited | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PYTHONPATH": str(ROOT),
    }


def test_the_shell_block_works_when_pasted(pasted: dict[str, str], tmp_path: Path) -> None:
    folder = Path(emulated_paths()[0]).parent
    if folder.exists():
        pytest.skip(f"this user has an emulated pool in {folder}")
    lines = block_with("serve --detach", "shell").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("beluga mount"))
    assert [line.split()[0] for line in lines[:first]] == ["python3", "pip"]
    ended = subprocess.run(
        ["/bin/sh", "-e"],
        input="\n".join(lines[first:]),
        cwd=tmp_path,
        env=pasted,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "forty-two\n" in ended.stdout
    assert not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"bin", "state"}
