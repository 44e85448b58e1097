# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The classical mutants of a Python file: each changes one place and nothing else.

A mutant replaces one expression or statement by text of its own, so line numbers stay as they are.
Docstrings, annotations, imports for type checkers, log calls and ``__repr__`` have no mutants: no
behavior depends on them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
_LOGGERS = ("log", "logger", "logging")


@dataclass(frozen=True)
class Mutant:
    """One change: the characters from ``start`` to ``end`` of the file become ``text``."""

    path: Path
    line: int
    operator: str
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the file with the change."""
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator} -> {self.text or 'nothing'!r}"


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self.source = source
        self.found: list[Mutant] = []
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._bytes = source.encode()

    def _at(self, line: int, column: int) -> int:
        """Return the index of a character; ast counts columns in bytes."""
        return len(self._bytes[: self._starts[line - 1] + column].decode())

    def _text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def _replace(self, node: ast.expr | ast.stmt, operator: str, text: str) -> None:
        start = self._at(node.lineno, node.col_offset)
        end = self._at(node.end_lineno or 0, node.end_col_offset or 0)
        self.found.append(Mutant(self.path, node.lineno, operator, start, end, text))

    def _drop(self, node: ast.stmt) -> None:
        self._replace(node, f"drop {type(node).__name__.lower()}", "pass")

    # ---- What has no mutants.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name == "__repr__":
            return
        for value in [*node.args.defaults, *node.args.kw_defaults]:
            if value is not None:
                self.visit(value)
        self._body(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._body(node.body)

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def _body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    # ---- Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(value, ast.Call):
            return  # a docstring, or a name that is only inspected
        callee = self._text(value.func)
        if callee.split(".")[0] in _LOGGERS:
            return
        self._drop(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._drop(node)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop(node)
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._drop(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "break", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "continue", "break")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and not node.value.value):
            return  # None and empty values are equivalent here
        self._replace(node, "return", "return None")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if self._text(node.test) == "TYPE_CHECKING":
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    # ---- Expressions.

    def _condition(self, node: ast.expr) -> None:
        """Return the negation of an expression without an operator mutant."""
        if not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            self._replace(node, "condition", f"(not ({self._text(node)}))")

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self._text(node.left), self._text(node.comparators[0])
            operator = _COMPARISONS[type(node.ops[0])]
            self._replace(node, "comparison", f"({left} {operator} {right})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator = " or " if isinstance(node.op, ast.And) else " and "
        parts = [f"({self._text(value)})" for value in node.values]
        self._replace(node, "boolean", f"({operator.join(parts)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace(node, "unary", f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operator = _ARITHMETIC.get(type(node.op))
        words = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str | bytes)
        if operator is not None and not words:
            left, right = self._text(node.left), self._text(node.right)
            self._replace(node, "arithmetic", f"({left} {operator} {right})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, "constant", str(node.value + 1))
        elif isinstance(node.value, float):
            self._replace(node, "constant", repr(node.value * 2 + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # messages


def mutants_of(path: Path, name: Path) -> Iterator[Mutant]:
    """Return all mutants of the file at ``path``, called ``name``, that still compile."""
    source = path.read_text()
    finder = _Finder(name, source)
    finder.visit(ast.parse(source))
    for mutant in finder.found:
        try:
            compile(mutant.apply(source), str(path), "exec")
        except SyntaxError:
            continue
        yield mutant
