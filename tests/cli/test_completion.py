# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The shell completes the values of options: the words that ``--help`` lists."""

from __future__ import annotations

from typing import Any

import beluga_bench
import click
import pytest

from beluga.cli.app import app, cxl_rpc
from beluga.router import POLICIES
from beluga.simulate import ENGINES, MEMORIES, ORDERS

PROGRAMS = {"beluga": app, "cxl-rpc": cxl_rpc}


def completed(words: tuple[str, ...], option: str, incomplete: str = "") -> list[str]:
    command: Any = app.at(words)
    (found,) = [one for one in command.params if option in (*one.opts, one.name)]
    ctx = click.Context(command, resilient_parsing=True)
    return [one.value for one in found.shell_complete(ctx, incomplete)]


@pytest.mark.parametrize(
    ("words", "option", "values"),
    [
        (("simulate",), "--policy", {*POLICIES, "default", "list"}),
        (("simulate",), "--eviction", set(ORDERS)),
        (("simulate",), "--memory", {*MEMORIES, "both"}),
        (("simulate",), "--engine", set(ENGINES)),
        (("gateway",), "--policy", {*POLICIES, "default", "list"}),
        (("gateway",), "--gpu-path", {"root-complex", "switch"}),
        (("serve",), "--eviction", {"lru", "s3fifo"}),
        (("bench",), "names", {*beluga_bench.BENCHES, "all", "report"}),
        (("verify",), "--role", {"a", "b"}),
    ],
)
def test_values_are_completed(words: tuple[str, ...], option: str, values: set[str]) -> None:
    assert set(completed(words, option)) == values
    one = max(values)
    assert one in completed(words, option, one[:-1])
    assert completed(words, option, "nothing") == []


def test_the_last_of_several_values_is_completed() -> None:
    assert completed(("simulate",), "--policy", "random,lin") == ["random,linear"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_that_lists_its_words_completes_them(name: str) -> None:
    """``--offload wait|drop``: the shell completes the values that the help shows between bars."""
    root: Any = PROGRAMS[name]
    lacking = []
    for words in root.leaves():
        command = root.at(words)
        ctx = click.Context(command, resilient_parsing=True)
        for one in command.params:
            shown = str(one.metavar or "")
            if "|" not in shown:
                continue
            found = {item.value for item in one.shell_complete(ctx, "")}
            if found != set(shown.split("|")):
                lacking.append(f"{' '.join(words)} {one.opts[0]}: {shown}")
    assert lacking == []
