# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Each side of cffi names the other: a header of ``csrc/api`` its Python files, and these the C."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.shown import ROOT

API = sorted((ROOT / "csrc/api").glob("*.h"))


def python_named(comment: str) -> list[str]:
    """Return the Python files and folders that a C comment names."""
    return [text.rstrip(".") for text in re.findall(r"\b(?:beluga|tests)/[\w/.]+", comment)]


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def c_named(path: Path) -> list[str]:
    """Return the C files and folders that a module's docstring names, or else its package's."""
    for one in (path, path.with_name("__init__.py")):
        if named := re.findall(r"csrc/[\w/.]*\w/?", docstring(one)):
            return named
    return []


def functions(header: Path) -> set[str]:
    code = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    return set(re.findall(r"\b(bl_\w+)\(", code))


def callers(names: set[str]) -> list[Path]:
    return [
        path
        for path in sorted((ROOT / "beluga").rglob("*.py"))
        if names & set(re.findall(r"\blib\.(bl_\w+)", path.read_text()))
    ]


def test_each_header_names_python_files_that_exist() -> None:
    assert len(API) >= 15
    named = {path.name: python_named(path.read_text().partition("*/")[0]) for path in API}
    assert [name for name, found in named.items() if not found] == []
    assert [
        (name, one) for name, found in named.items() for one in found if not (ROOT / one).exists()
    ] == []


def test_each_caller_of_c_names_c_files_that_exist() -> None:
    calling = callers({name for path in API for name in functions(path)})
    assert len(calling) >= 35
    named = {str(path.relative_to(ROOT)): c_named(path) for path in calling}
    assert [name for name, found in named.items() if not found] == []
    assert [
        (name, one) for name, found in named.items() for one in found if not (ROOT / one).exists()
    ] == []


def test_a_module_without_a_c_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('"""A package."""\n')
    module = tmp_path / "module.py"
    module.write_text('"""Calls C."""\n')
    assert c_named(module) == []
    (tmp_path / "__init__.py").write_text('"""A package (``csrc/pool/``)."""\n')
    assert c_named(module) == ["csrc/pool/"]
    assert python_named("in beluga/rpc and beluga/index/check.py.") == [
        "beluga/rpc",
        "beluga/index/check.py",
    ]
