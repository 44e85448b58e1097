# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Type checkers see the C core and the public interface: stubs, mistakes found, no Any.

mypy runs once, over a file that has a mistake of each kind and reveals the type of every public
name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from test_exports import EXPORTS

from beluga import errors

ROOT = Path(__file__).resolve().parents[2]

# The names that cannot be given a type, each with its reason.
ANY_ALLOWED: dict[str, str] = {}

SPECIAL = ("__call__", "__enter__", "__iter__", "__len__")  # public methods nevertheless

# A line of Python, and a part of mypy's message for it, or None if it is correct.
LINES = {
    'lib.bl_flush(ffi.new("uint64_t[]", 8), 64)': None,
    'lib.bl_flush(ffi.new("uint64_t[]", 8))': 'Too few arguments for "bl_flush"',
    'lib.bl_flush(ffi.new("uint64_t[]", 8), 64, 1)': 'Too many arguments for "bl_flush"',
    'lib.bl_flush(ffi.new("uint64_t[]", 8), 6.4)': 'incompatible type "float"; expected "int"',
    "lib.bl_flsh(ffi.NULL, 64)": '"Lib" has no attribute "bl_flsh"',
    "lib.BL_ERROR_TIMEDOUT": '"Lib" has no attribute "BL_ERROR_TIMEDOUT"',
    "lib.BL_ERROR_TIMEOUT = 3": 'final attribute "BL_ERROR_TIMEOUT"',
    'ffi.new("bl_session_stat *").nonce + 1': None,
    'ffi.new("bl_session_stat *").nunce': '"bl_session_stat" has no attribute "nunce"',
    'ffi.new("bl_session_stat *").nonce.hex()': '"int" has no attribute "hex"',
    'ffi.new("bl_sesion_stat *")': "No overload variant",
    'ffi.new("bl_quota *", {"pin_count": 1})': None,
    'ffi.new("bl_quota *", {"pins": 1})': "No overload variant",
    "beluga.KVCash": 'has no attribute "KVCash"',
    'lib.bl_session_close(ffi.new("bl_session **")[0])': None,
    'lib.bl_session_close(ffi.new("bl_server **")[0])': 'expected "bl_session | Null"',
    'lib.bl_tier_touch(ffi.new("bl_tier **")[0], ffi.new("uint64_t[]", 1), 1)': (
        'incompatible type "uint64_p"; expected "uint32_p'
    ),
}


def attributes(cls: type) -> set[str]:
    """Return the attributes of an object of one of our classes."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "beluga":
            names |= {*vars(base), *vars(base).get("__annotations__", ())}
            if "__init__" in vars(base) and not dataclasses.is_dataclass(base):
                made = inspect.getsource(base.__init__)
                names |= set(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)?(?:, self\.\w+)* = ", made))
    return {each for each in names if not each.startswith("_") or each in SPECIAL}


def own_names(module: ModuleType) -> list[str]:
    """Return the names that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def public(module: ModuleType, names: Iterable[str]) -> Iterator[str]:
    """Return an expression for each of the names, and its members."""
    for name in names:
        value, path = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            yield from public(value, own_names(value))
            continue
        yield path
        if inspect.isclass(value):
            items = len(getattr(value, "__parameters__", ()))
            kind = f"{path}[{', '.join(['object'] * items)}]" if items else path
            yield from (f"instance({kind}).{each}" for each in sorted(attributes(value)))


def all_public() -> list[str]:
    """Return expressions for everything that users may import."""
    modules = [importlib.import_module(name) for name in EXPORTS if name != "beluga._ffi"]
    paths = [path for module in modules for path in public(module, module.__all__)]
    return [*paths, *public(errors, own_names(errors))]


# Any in numpy's own types, in a coroutine's yield and send types, and for arbitrary parameters.
UNTYPED = (
    r"ndarray\[(tuple\[Any, \.\.\.\]|Any), |numpy\.generic\[Any\]"
    r"|_SupportsArray\[numpy\.dtype\[Any\]\]|Coroutine\[Any, Any, |def \(\*Any, \*\*Any\)"
)


def has_any(shown: str) -> bool:
    """Whether a type as printed by mypy contains Any."""
    return re.search(r"\bAny\b", re.sub(UNTYPED, "", shown)) is not None


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return mypy's messages for each line: its errors, or the revealed type."""
    lines = [*LINES, *(f"reveal_type({path})" for path in all_public())]
    head = [
        "from beluga._ffi import ffi, lib",
        *(f"import {name}" for name in [*EXPORTS, "beluga.errors"]),
        "from typing import TypeVar",
        "T = TypeVar('T')",
        "def instance(kind: type[T]) -> T: ...",
    ]
    file = tmp_path_factory.mktemp("typing") / "checked.py"
    file.write_text("\n".join([*head, *lines]) + "\n")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", file]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = dict.fromkeys(lines, "")
    for line in run.stdout.splitlines():
        where, _, text = line.partition(": ")
        name, _, number = where.rpartition(":")
        if name.endswith(file.name) and int(number) > len(head):
            found[lines[int(number) - len(head) - 1]] += text + "\n"
    return found


def test_a_program_outside_the_checkout_sees_the_types(tmp_path: Path) -> None:
    """scripts/dev/setup-env lets type checkers find the editable installation."""
    file = tmp_path / "program.py"
    file.write_text("import beluga\n\nreveal_type(beluga.Pool.open)\n")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--strict", file]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "-> beluga.pool.pool.Pool" in run.stdout, run.stdout
    assert "error" not in run.stdout


@pytest.mark.parametrize(
    ("stub", "extension"),
    [("beluga/_core.pyi", "beluga._core"), ("bench/_limit.pyi", "beluga_bench._limit")],
)
def test_stubs_name_what_the_extensions_have(stub: str, extension: str) -> None:
    """The stubs are generated from the headers that were compiled."""
    text = (ROOT / stub).read_text()
    body = text[text.index("\nclass Lib:") : text.index("\nffi: ")]
    named = set(re.findall(r"^    (?:def )?(\w+)[:(]", body, flags=re.MULTILINE))
    there = set(dir(importlib.import_module(extension).lib))
    assert named == there - {"bl_figures"}


@pytest.mark.parametrize("line", LINES)
def test_mistakes_at_the_boundary_are_found(line: str, reported: dict[str, str]) -> None:
    complaint = LINES[line]
    if complaint is None:
        assert reported[line] == ""
    else:
        assert complaint in reported[line]


def test_public_signatures_have_no_any(reported: dict[str, str]) -> None:
    shown = {path: reported[f"reveal_type({path})"] for path in all_public()}
    assert [path for path, text in shown.items() if "Revealed type" not in text] == []
    found = {path: text for path, text in shown.items() if has_any(text)}
    assert "".join(f"{path}: {found[path]}" for path in found if path not in ANY_ALLOWED) == ""
    assert set(ANY_ALLOWED) <= set(found)


def test_an_any_is_detected() -> None:
    assert has_any("def (x: builtins.dict[builtins.str, Any]) -> None")
    assert has_any("numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]")
    assert not has_any("numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.void]]")
