# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The end of commands, and the packages that they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]

WITHOUT = "import sys; sys.modules[{name!r}] = None; "


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["typer", "rich", "msgspec"])
def test_a_missing_tool_is_named(name: str) -> None:
    ended = python(WITHOUT.format(name=name) + "from beluga.cli.main import main; main()")
    assert ended.returncode == 1
    assert ended.stderr == f"beluga: error: the commands need {name}; pip install beluga-kv\n"


@pytest.mark.parametrize("module", ["pool", "rpc", "meta", "kvcache", "primitives"])
def test_the_library_needs_no_tools(module: str) -> None:
    without = "".join(WITHOUT.format(name=name) for name in ("typer", "rich", "msgspec", "torch"))
    assert python(without + f"import beluga, beluga.{module}").returncode == 0


@pytest.mark.parametrize("arguments", [["no-such-command"], ["ping", "--no-such-option"], []])
def test_nonsense_is_a_usage_error(run: Run, arguments: list[str]) -> None:
    refused = run(*arguments)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_an_error_of_the_system_is_one_line(run: Run, pool: list[str], tmp_path: Path) -> None:
    refused = run("put", "key", tmp_path / "nothing", *pool)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "No such file" in refused.stderr


def test_a_reader_that_goes_away_is_no_traceback(pool: list[str]) -> None:
    command = f"{sys.executable} -m beluga.cli.main pool info {' '.join(pool)} | true"
    ended = subprocess.run(
        ["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ended.stderr
