# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A command's module is imported when the command runs, and not for another command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beluga_bench
import pytest
from click.testing import CliRunner

from beluga import choices, router, simulate
from beluga.cli.app import app, cxl_rpc

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = """
import atexit, json, sys
atexit.register(lambda: json.dump(list(sys.modules), open({path!r}, "w")))
from beluga.cli.main import main
sys.argv = ["beluga", *{arguments!r}]
main()
"""
PROGRAMS = [pytest.param(app, id="beluga"), pytest.param(cxl_rpc, id="cxl-rpc")]
# Modules of commands, and what else a command should not wait for.
COMMANDS = {f"beluga.cli.{one}" for one in ("block", "bench", "pool", "ping", "serve", "stat")}
SLOW = COMMANDS | {f"beluga.{one}" for one in ("tiers", "transfer", "router", "simulate")}

Loaded = Callable[..., set[str]]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """Runs ``beluga`` and returns the modules that it has imported when it ends."""

    def run(*arguments: str, settings: str = "", **environment: str) -> set[str]:
        path, file = tmp_path / "modules", tmp_path / "beluga.toml"
        file.write_text(settings)
        subprocess.run(
            [sys.executable, "-c", RECORDED.format(path=str(path), arguments=arguments)],
            cwd=ROOT,
            env=os.environ | {"BELUGA_CONFIG": str(file)} | environment,
            capture_output=True,
            check=False,
        )
        return set(json.loads(path.read_text()))

    return run


@pytest.mark.parametrize("words", [("--help",), ("pool", "--help"), ("--version",)])
def test_the_help_of_a_group_imports_no_core(loaded: Loaded, words: tuple[str, ...]) -> None:
    """numpy alone takes as long as all the rest of it."""
    heavy = {"numpy", "rich", "beluga._ffi", "beluga.pool"}
    assert not loaded(*words) & ((SLOW - COMMANDS) | heavy)


MODULES_MAX = 250  # Python 3.11 needs 150


@pytest.mark.parametrize("words", list(app.leaves()))
def test_the_help_of_a_command_imports_neither_numpy_nor_the_core(
    loaded: Loaded, words: tuple[str, ...]
) -> None:
    """Modules are counted, because the time of a start depends on the machine."""
    modules = loaded(*words, "--help")
    assert "click" in modules
    assert not modules & {"numpy", "rich", "beluga._ffi", "beluga.pool", "beluga_bench"}
    assert len(modules) < MODULES_MAX


def test_choices_in_help_match_the_modules_that_implement_them() -> None:
    assert choices.PREFILL_RULES == router.RULES
    assert choices.BLOCK_TOKENS_MAX == router.BlockHasher.BLOCK_SIZE_MAX
    assert (choices.RANKS, choices.RANKS_MAX) == (
        router.Indexer.WORKERS,
        router.Indexer.WORKERS_MOST,
    )
    assert tuple(router.costs.MODELS) == choices.COST_MODELS
    assert choices.DEFAULT_COST_MODEL == router.costs.DEFAULT_MODEL
    assert {name: speed * 1e9 for name, speed in choices.GPU_PATHS_GB_PER_S.items()} == (
        router.costs.GPU_PATHS
    )
    assert choices.LOCAL_DRAM_GB_PER_S * 1e9 == router.costs.LOCAL_DRAM
    assert choices.STEP_TOKENS == router.costs.STEP_TOKENS
    assert tuple(simulate.ORDERS) == choices.TIER_ORDERS
    assert tuple(simulate.PRESETS) == choices.PRESETS
    assert choices.TRACE_FORMATS == simulate.FORMATS
    assert tuple(simulate.TIME_UNITS) == choices.TIME_UNITS
    assert tuple(beluga_bench.BENCHES) == choices.BENCHES


def test_completion_imports_no_core(loaded: Loaded) -> None:
    environment = {
        "_BELUGA_COMPLETE": "bash_complete",
        "COMP_WORDS": "beluga st",
        "COMP_CWORD": "1",
    }
    assert not loaded(**environment) & (SLOW - COMMANDS)


@pytest.mark.parametrize("command", ["ping", "stat"])
def test_a_command_imports_its_own_module(
    loaded: Loaded, server: object, pool: list[str], command: str
) -> None:
    """A host for all commands in beluga.toml does not change that."""
    modules = loaded(command, *pool, "--json", settings="host = 0")
    assert modules & SLOW == {f"beluga.cli.{command}"}
    assert "rich" not in modules  # JSON needs no tables


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_help_of_a_group_lists_its_commands(program: Any) -> None:
    shown = " ".join(CliRunner().invoke(program, ["--help"]).stdout.split())
    for words in program.leaves():
        assert program.at(words).help
        if len(words) == 1:
            text = program.at(words).help.partition("\n\n")[0]
            assert f"{words[0]} {' '.join(text.split())}" in shown


@pytest.mark.parametrize("program", PROGRAMS)
def test_command_names_resolve_to_their_modules(program: Any) -> None:
    root: Any = program
    leaves = list(root.leaves())
    assert len(leaves) == len(set(leaves)) > 3
    for words in leaves:
        found = root.at(words)
        assert (found.name, hasattr(found, "commands")) == (words[-1], False)
