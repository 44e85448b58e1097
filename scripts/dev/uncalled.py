#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Lists the functions, methods and classes of ``beluga/`` that only tests use.

A use is the name in the code of ``beluga/``, ``bench/`` or ``scripts/``, or in a Python example of
the documents, or the name of a class, alone or with a method, in their text; an import, an entry of
``__all__`` and the definition itself are not uses. Exempt are the API of docs/reference/api.md and
what others call: methods with leading and trailing ``__``, overrides of classes of other packages,
and functions that a decorator registers. A use of a method counts only for the class of its
receiver, its bases and subclasses, where annotations determine that class (receivers.py), and else
for every method of that name: a name that is not listed may also have no caller. C is checked by
``tests/repo/test_rooms.py``, with calls from Python. Exit status 1 if something is listed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs_pages import INTERNAL, NAME
from receivers import Types

ROOT = Path(__file__).resolve().parents[2]
# Decorators that do not register a function. Any other decorator may.
PLAIN = {
    *("property", "cached_property", "staticmethod", "classmethod", "abstractmethod", "setter"),
    *("cache", "lru_cache", "contextmanager", "asynccontextmanager", "dataclass", "overload"),
    *("wraps", "total_ordering", "final"),
}
# Base classes that do not call methods that a subclass defines.
BASES = {"object", "Protocol", "NamedTuple", "Exception", "ABC", "Generic", "Enum"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function, method or class, and the names that its own code uses."""

    place: str
    name: str
    own: Counter[str]
    owner: str  # the class of a method


def uncalled(root: Path) -> list[str]:
    """Return the definitions without a use, each as ``path:line name``."""
    trees = {str(path): parsed(path) for path in code(root)}
    used: Counter[str] = Counter()
    for tree in trees.values():
        used += names_in(tree)
    types = Types(trees)
    free = examples(root) | promised(root)
    ours = set(types.bases) - types.derived(foreign_bases(types))
    return [
        f"{definition.place} {definition.name}"
        for path in sorted((root / "beluga").rglob("*.py"))
        for definition in definitions(path, root, ours)
        if definition.name not in free
        and (
            used[definition.name] <= definition.own[definition.name]
            or is_of_others_only(definition, types, used)
        )
    ]


def is_of_others_only(method: Definition, types: Types, used: Counter[str]) -> bool:
    """Return whether every use of a method's name is on another class."""
    family = types.family(method.owner) if method.owner else set()
    attributes = sum(count for (_, name), count in types.uses.items() if name == method.name)
    return bool(
        family
        and not family & types.protocols
        and used[method.name] == attributes  # no string has it, and no function or variable
        and not any(types.uses[kind, method.name] for kind in (None, *family))
    )


def code(root: Path) -> Iterator[Path]:
    """Yield the project's Python files that are not tests."""
    for folder in ("beluga", "bench", "scripts"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix == ".py" or (path.is_file() and path.suffix == "" and is_python(path)):
                yield path


def is_python(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline().startswith(b"#!/usr/bin/env python")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_in(tree: ast.AST) -> Counter[str]:
    """Return how often each name is used: read, called, or a whole string, as for getattr()."""
    listed = {
        id(text)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        and "__all__" in [getattr(target, "id", "") for target in targets(node)]
        for text in ast.walk(node)
    }
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
        elif isinstance(node, ast.Constant) and id(node) not in listed and is_code(node.value):
            found.update(set(re.findall(r"\w+", node.value)))
    return found


def targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def is_code(value: object) -> bool:
    """Return whether a constant is a dotted name, or an annotation."""
    return isinstance(value, str) and re.fullmatch(r"[\w.:\[\], |]+", value) is not None


def foreign_bases(types: Types) -> set[str]:
    """Return the base classes of other packages that are named with their module."""
    return {base for bases in types.bases.values() for base in bases if "." in base}


def definitions(path: Path, root: Path, ours: set[str]) -> Iterator[Definition]:
    """Yield the definitions in a file to which the rule applies."""
    place = path.relative_to(root)
    tree = parsed(path)
    known = (ours | BASES) - of_others(tree)

    def walk(node: ast.AST, owner: str, *, foreign: bool) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                if not foreign and not is_special(child.name) and not is_registered(child):
                    yield Definition(f"{place}:{child.lineno}", child.name, names_in(child), owner)
                bases = getattr(child, "bases", [])
                inner = child.name if isinstance(child, ast.ClassDef) else ""
                yield from walk(
                    child, inner, foreign=not {base_of(base) for base in bases} <= known
                )
            else:
                yield from walk(child, owner, foreign=foreign)

    yield from walk(tree, "", foreign=False)


def of_others(tree: ast.Module) -> set[str]:
    """Return the names that a file imports from other projects."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.split(".")[0] != "beluga"
        for alias in node.names
    } - BASES


def base_of(node: ast.expr) -> str:
    """Return a base class's name. A name with its module is from another package."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return ast.unparse(node)


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_registered(node: Function | ast.ClassDef) -> bool:
    calls = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
    return not {ast.unparse(call).rpartition(".")[2] for call in calls} <= PLAIN


def promised(root: Path) -> set[str]:
    """Return the names of docs/reference/api.md: classes, functions, and their methods."""
    text = (root / "docs/reference/api.md").read_text()
    names = {path.rpartition(".")[2] for path in NAME.findall(text)}
    methods = {
        member.name
        for path in (root / "beluga").rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and node.name in names
        for member in node.body
        if isinstance(member, Function) and member.name not in INTERNAL.get(node.name, "").split()
    }
    return names | methods


def examples(root: Path) -> set[str]:
    """Return the names in the Python examples of the documents."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = [
        block
        for page in pages
        if page.name != "api.md" and page.is_file()
        for block in re.findall(r"^```py\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    texts += [path.read_text() for path in sorted((root / "docs").rglob("*.py"))]
    texts += [
        span
        for page in pages
        if page.is_file()
        for span in re.findall(r"`((?:beluga\.[\w.]+|[A-Z]\w+)(?:\.\w+)?)`", page.read_text())
    ]
    return {name for text in texts for name in re.findall(r"\w+", text)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    listed = uncalled(ROOT)
    for line in listed:
        print(line)
    return 1 if listed else 0


if __name__ == "__main__":
    sys.exit(main())
