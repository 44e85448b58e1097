# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The page of the Python API has all names and an example for each subject, and its examples, like
the Python of the other pages, pass mypy --strict. tests/repo/test_shown.py runs them.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.shown import PAGES, ROOT, blocks
from test_exports import EXPORTS
from test_shown import GIVEN

import beluga

sys.path.insert(0, str(ROOT / "scripts/dev"))
from docs_pages import INTERNAL

PAGE = ROOT / "docs/reference/api.md"
NAME = re.compile(r"^\| `((beluga[\w.]*)\.(\w+))` \|", re.MULTILINE)
NAMES = {
    path: getattr(import_module(module), name)
    for path, module, name in NAME.findall(PAGE.read_text(encoding="utf-8"))
}
# Pages whose Python shows internals and is not a complete program.
PARTS = {"copy-engines.md"}


def test_every_name_of_the_page_is_public_and_every_name_of_the_package_is_on_it() -> None:
    assert {f"beluga.{name}" for name in beluga.__all__} - {"beluga.BelugaError"} <= set(NAMES)
    modules = {path.rpartition(".")[0] for path in NAMES}
    assert modules <= {
        *EXPORTS,
        "beluga.connectors.settings",
        "beluga.connectors.vllm.settings",
        "beluga.transfer.arrangements",
    }


def test_every_name_and_every_public_member_has_a_docstring() -> None:
    bare = []
    for path, value in NAMES.items():
        members = vars(value) if inspect.isclass(value) else {}
        hidden = INTERNAL.get(path.rpartition(".")[2], "").split()
        described = {path: value} | {
            f"{path}.{name}": getattr(member, "__func__", member)
            for name, member in members.items()
            if not name.startswith("_") and name not in hidden
        }
        bare += [
            name
            for name, each in described.items()
            if (inspect.isclass(each) or inspect.isroutine(each) or isinstance(each, property))
            and not each.__doc__
        ]
    assert bare == []


def test_internal_members_exist() -> None:
    classes = {path.rpartition(".")[2]: value for path, value in NAMES.items()}
    lacking = [
        (name, member)
        for name, members in INTERNAL.items()
        for member in members.split()
        if not hasattr(classes[name], member)
    ]
    assert lacking == []


def test_every_subject_has_an_example() -> None:
    _, *subjects = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(subjects) > 8
    assert [each.splitlines()[0] for each in subjects if "```python\n" not in each] == []


def test_an_example_of_forty_lines_shows_all_subjects() -> None:
    text = next(block.text for block in blocks(PAGE) if block.language == "python")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 40
    needed = ("Pool", "IndexServer", "torch", "np.", "Handlers", "Run.of", "Router")
    assert [name for name in needed if name not in text] == []


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return mypy's errors for the Python of all pages, as a program that uses the installed
    package.
    """
    folder = tmp_path_factory.mktemp("shown")
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            if block.language != "python" or page.name in PARTS:
                continue
            named = re.match(r"# (\w+\.py)\n", block.text)
            name = named[1] if named else f"{page.stem.replace('-', '_')}_{number}.py"
            (folder / name).write_text(GIVEN.get(page.name, "") + block.text)
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n"
        "[mypy-torch]\nignore_missing_imports = true\n"  # torch is optional
    )
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "."],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(list(Path(folder).glob("*.py"))) > 15
    return ended.stdout + ended.stderr


@pytest.mark.long
def test_documented_programs_pass_mypy_strict(checked: str) -> None:
    assert checked == ""
