# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The page of the Python API is fresh, has an example for each class, and its examples, like the
Python of the other pages, pass mypy --strict. tests/repo/test_shown.py runs them.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.shown import PAGES, ROOT, blocks
from test_exports import EXPORTS
from test_shown import GIVEN

import beluga

sys.path.insert(0, str(ROOT / "scripts/dev"))
import gen_api

# Pages whose Python shows internals and is not a complete program.
PARTS = {"copy-engines.md"}


def test_the_page_is_current() -> None:
    command = [sys.executable, ROOT / "scripts/dev/gen_api.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_every_name_of_the_package_is_on_the_page() -> None:
    assert set(beluga.__all__) - {"BelugaError"} <= {one.name for one in gen_api.ALL}
    assert {one.module for one in gen_api.ALL} <= {
        *EXPORTS,
        "beluga.connectors.settings",
        "beluga.connectors.vllm.settings",
        "beluga.transfer.arrangements",
    }


def test_every_class_has_an_example_and_every_example_a_class() -> None:
    classes = [one for one in gen_api.ALL if inspect.isclass(one.value)]
    assert [one.name for one in classes if not one.example] == []
    files = {path.stem for path in gen_api.EXAMPLES.glob("*.py")}
    assert files == {one.example for one in gen_api.ALL if one.example} | {"program"}


def test_defaults_and_types_are_shown_as_they_are_written() -> None:
    """Defaults were shown as ``<class 'str'>``, ``b`` and ``(pool, split)``, and a tuple was cut
    like parameters.
    """
    shown = re.findall(r"^```py\n(.*?)^```$", gen_api.document(), re.MULTILINE | re.DOTALL)
    wrong = [one for one in shown if re.search(r"<\w|ForwardRef", one)]
    assert wrong == []
    for one in shown:
        if one.endswith("]\n") or "(" not in one:
            continue
        name, _, rest = one.removeprefix("async ").partition("(")
        if name.isidentifier():  # a signature: Python reads it as a function
            plain = re.sub(r"= \.\.\.", "= None", f"def {name}({rest.rstrip()}: ...")
            ast.parse(plain)


def test_every_entry_of_the_page_has_a_description() -> None:
    text = gen_api.document()
    bare = re.findall(r"```py\n([^`]*?)\n```\n\n(?=```|###|\*|$)", text)
    assert [one for one in bare if not one[0].isupper()] == []
    assert re.findall(r":\w+:`|``(?!`)\b", re.sub(r"```.*?```", "", text, flags=re.DOTALL)) == []


def test_every_type_that_the_page_names_is_explained_on_it() -> None:
    """Results, such as that of ``lookup()``, had fields that only the sources named."""
    text = gen_api.document()
    explained = {*re.findall(r"^### (\w+)$", text, re.MULTILINE)}
    explained |= {*re.findall(r"^\| `(\w+)`", text, re.MULTILINE)}
    named = set(gen_api.types_in(text.splitlines()))
    python = {name for one in gen_api.FOREIGN for name in vars(one)} | {"Path", "Event", "Any"}
    errors = {name for name in named if hasattr(beluga.errors, name)}
    assert named - explained - python - errors - gen_api.UNEXPLAINED == set()
    assert {"LookupResult", "HintResult", "Pins", "IndexStat", "Matches"} <= explained


def test_the_page_has_what_the_sources_note_about_a_field() -> None:
    text = gen_api.document()
    assert "* `isl: int`: input sequence length in tokens" in text
    assert "async ping(" in text  # of AsyncClient
    assert text.count("**`with`** calls") >= 4


def test_an_example_of_forty_lines_shows_all_subjects() -> None:
    lines = (gen_api.EXAMPLES / "program.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40
    needed = ("Pool", "IndexServer", "torch", "np.", "Handlers", "Run.of", "Router")
    assert [one for one in needed if one not in "\n".join(lines)] == []


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
