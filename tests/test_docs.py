# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The documents tell the truth: commands exist, links resolve, every command is mentioned."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from beluga.cli.app import app
from beluga.cli.cxl_rpc import app as cxl_rpc_app

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("csrc/*.md"),
        *ROOT.glob("bench/*.md"),
        *ROOT.glob("bench/results/*.md"),
    )
    if path.is_file()
]


def known_commands() -> dict[str, set[str]]:
    """ "beluga pool info" -> its options, for every command of both programs."""
    found: dict[str, set[str]] = {}

    def walk(name: str, command: object) -> None:
        for child_name, child in getattr(command, "commands", {}).items():
            walk(f"{name} {child_name}", child)
        options = {option for p in getattr(command, "params", ()) for option in p.opts}
        options |= {option for p in getattr(command, "params", ()) for option in p.secondary_opts}
        found[name] = options | {"--help"}

    walk("beluga", typer.main.get_command(app))
    walk("cxl-rpc", typer.main.get_command(cxl_rpc_app))
    return found


KNOWN = known_commands()


def shown_commands(path: Path) -> Iterator[list[str]]:
    """The words of every ``$ command`` line in the fenced blocks of a document."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    for block in fenced:
        lines = iter(re.sub(r"\\\n\s*", " ", block).splitlines())
        for line in lines:
            if line.startswith("$ "):
                command = line[2:]
                while command.count("'") % 2:  # JSON in quotes goes on in the next line
                    command += next(lines)
                yield shlex.split(command, comments=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shown_commands_exist(path: Path) -> None:
    wrong = []
    for words in shown_commands(path):
        if words[0] in ("beluga", "cxl-rpc"):
            depth = next(n for n in (3, 2, 1) if " ".join(words[:n]) in KNOWN)
            options = KNOWN[" ".join(words[:depth])]
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            if depth == 1 or used - options:
                wrong.append(" ".join(words))
        elif words[0].startswith("scripts/") and not (ROOT / words[0]).is_file():
            wrong.append(" ".join(words))
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text())
    wrong = [
        link
        for link in links
        if not re.match(r"[a-z]+:", link) and not (path.parent / link).exists()
    ]
    assert wrong == []


def test_the_readme_mentions_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    leaves = {name for name in KNOWN if not any(other.startswith(name + " ") for other in KNOWN)}
    assert len(leaves) > 10
    assert {name for name in leaves if f"`{name}" not in text} == set()
