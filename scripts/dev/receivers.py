# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The classes whose members a program uses, as far as annotations determine them (for uncalled.py).

``Types(trees)`` reads all modules. ``uses`` then has, for each attribute that is read or called,
the class of its receiver; None if the annotations do not determine it. Names of classes are unique
in this project, so a class is its name.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Generic types whose members have the type of an argument: its index.
ITEMS = {
    **dict.fromkeys(("list", "set", "frozenset", "tuple", "deque", "Sequence", "Iterable"), 0),
    **dict.fromkeys(("Iterator", "Generator", "Collection", "AsyncIterator", "type"), 0),
}
OPEN = {"Any", "object", "Self", "Callable", "Protocol"}  # types that determine no class


class Types:
    """The classes of a program, with the types of their members, and of its functions."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.bases: dict[str, set[str]] = {}
        self.members: dict[str, dict[str, ast.expr | str | None]] = {}
        self.returns: dict[str, ast.expr | None] = {}
        self.protocols: set[str] = set()
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._read_class(node)
            for node in tree.body:
                if isinstance(node, Function):
                    known = self.returns.get(node.name, node.returns)
                    same = known and node.returns and ast.dump(known) == ast.dump(node.returns)
                    self.returns[node.name] = node.returns if same else None
        self.uses: Counter[tuple[str | None, str]] = Counter()
        for tree in trees.values():
            self._module(tree)

    def family(self, name: str) -> set[str]:
        """Return a class with all its bases and subclasses among ours."""
        found, fresh = {name}, {name}
        while fresh:
            near = {base for cls in fresh for base in self.bases.get(cls, ())}
            near |= {sub for sub, bases in self.bases.items() if bases & fresh}
            fresh = (near & set(self.bases)) - found
            found |= fresh
        return found

    def derived(self, names: set[str]) -> set[str]:
        """Return these classes and all that are derived from them."""
        found = set(names)
        while more := {sub for sub, bases in self.bases.items() if bases & found} - found:
            found |= more
        return found

    def _read_class(self, node: ast.ClassDef) -> None:
        self.bases[node.name] = {
            ast.unparse(base) if isinstance(base, ast.Attribute) else _simple(base) or ""
            for base in node.bases
        }
        if "Protocol" in self.bases[node.name]:
            self.protocols.add(node.name)
        members = self.members.setdefault(node.name, {})
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                members[child.target.id] = child.annotation
            elif isinstance(child, Function):
                is_property = any(
                    (_simple(mark) or "").endswith("property") for mark in child.decorator_list
                )
                members[child.name] = child.returns if is_property else f"call:{child.name}"
                self.returns[f"{node.name}.{child.name}"] = child.returns
                self._read_attributes(child, node.name)

    def _read_attributes(self, method: Function, cls: str) -> None:
        """Read the attributes that a method assigns to self: of a parameter, or a new object."""
        given = _parameters(method)
        for node in ast.walk(method):
            targets: list[ast.expr] = []
            value: ast.expr | None = None
            if isinstance(node, ast.AnnAssign):
                targets, value = [node.target], node.annotation
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = list(zip(target.elts, node.value.elts, strict=False))
                    for named, made in pairs:
                        if isinstance(made, ast.Name):
                            self._attribute(cls, named, given.get(made.id))
                        elif isinstance(made, ast.Call) and isinstance(made.func, ast.Name):
                            self._attribute(cls, named, f"made:{made.func.id}")
            for target in targets:
                self._attribute(cls, target, value)

    def _attribute(self, cls: str, target: ast.expr, kind: ast.expr | str | None) -> None:
        is_own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
        if is_own and target.value.id == "self" and kind is not None:  # type: ignore[attr-defined]
            self.members[cls].setdefault(target.attr, kind)  # type: ignore[attr-defined]

    def _module(self, tree: ast.Module) -> None:
        self._body(tree.body, {}, "")

    def _body(self, body: list[ast.stmt], env: dict[str, ast.expr | str], cls: str) -> None:
        """Record the uses in statements; ``env`` has the types of names."""
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._body(node.body, dict(env), node.name)
            elif isinstance(node, Function):
                inner: dict[str, ast.expr | str] = {**env, **_parameters(node)}
                if cls and "staticmethod" not in map(_simple, node.decorator_list):
                    first = [*node.args.posonlyargs, *node.args.args]
                    if first:
                        inner[first[0].arg] = cls
                for value in [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]:
                    if value is not None:
                        self._record(value, env)
                self._body(node.body, inner, "")
            else:
                self._statement(node, env, cls)

    def _statement(self, node: ast.stmt, env: dict[str, ast.expr | str], cls: str) -> None:
        for name, kind in self._bound(node, env):
            same = name not in env or self._of(env[name]) == self._of(kind)
            env[name] = kind if same else "?"  # another class in another branch
        for field in ast.iter_child_nodes(node):
            if isinstance(field, ast.expr | ast.withitem | ast.keyword):
                self._record(field, env)
            elif isinstance(field, ast.match_case | ast.ExceptHandler):
                for part in ast.iter_child_nodes(field):
                    if not isinstance(part, ast.stmt):
                        self._record(part, env)
                self._body(field.body, env, cls)
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        self._body(inner, env, cls)

    def _bound(
        self, node: ast.stmt, env: Mapping[str, ast.expr | str]
    ) -> Iterator[tuple[str, ast.expr | str]]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        kind = self.kind(node.value, env) if name is target else None
                        yield name.id, kind or "?"
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                for name in ast.walk(item.optional_vars) if item.optional_vars else ():
                    if isinstance(name, ast.Name):
                        entered = self.kind(item.context_expr, env)
                        ours = entered in self.members and name is item.optional_vars
                        plain = ours and "__enter__" in self.members.get(entered or "", {})
                        yield name.id, (entered or "?") if plain else "?"
        elif isinstance(node, ast.For | ast.AsyncFor):
            for name in ast.walk(node.target):
                if isinstance(name, ast.Name):
                    yield name.id, "?"

    def _record(self, tree: ast.AST, env: Mapping[str, ast.expr | str]) -> None:
        names = dict(env)
        for node in ast.walk(tree):  # names of comprehensions and lambdas are unknown
            if isinstance(node, ast.comprehension):
                names |= {n.id: "?" for n in ast.walk(node.target) if isinstance(n, ast.Name)}
            elif isinstance(node, ast.Lambda):
                names |= {argument.arg: "?" for argument in node.args.args}
            elif isinstance(node, ast.NamedExpr):
                names[node.target.id] = self.kind(node.value, names) or "?"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self.uses[self.kind(node.value, names), node.attr] += 1

    def kind(  # noqa: PLR0911
        self, node: ast.expr, env: Mapping[str, ast.expr | str]
    ) -> str | None:
        """Return the class of an expression's value; None if it is not known."""
        if isinstance(node, ast.Await):
            return self.kind(node.value, env)
        if isinstance(node, ast.Constant):
            return type(node.value).__name__
        if isinstance(node, ast.Name):
            if node.id in env:
                return self._of(env[node.id])
            return node.id if node.id in self.members else None
        if isinstance(node, ast.Attribute):
            owner = self.kind(node.value, env)
            return self._member(owner, node.attr) if owner else None
        if isinstance(node, ast.Call):
            return self._called(node.func, env)
        return None

    def _called(self, function: ast.expr, env: Mapping[str, ast.expr | str]) -> str | None:
        if isinstance(function, ast.Name) and function.id not in env:
            if function.id in self.members:
                return function.id
            return self._of(self.returns.get(function.id))
        if isinstance(function, ast.Attribute):
            owner = self.kind(function.value, env)
            for cls in [owner, *self._ancestors(owner)] if owner else ():
                returns = self.returns.get(f"{cls}.{function.attr}")
                if returns is not None:
                    return owner if _simple(returns) == "Self" else self._of(returns)
        return None

    def _member(self, cls: str, name: str) -> str | None:
        for ancestor in [cls, *self._ancestors(cls)]:
            kind = self.members.get(ancestor, {}).get(name)
            if kind is not None and not str(kind).startswith("call:"):
                return self._of(kind)
        return None

    def _ancestors(self, cls: str | None) -> Iterator[str]:
        for base in self.bases.get(cls or "", ()):
            if base in self.members:
                yield base
                yield from self._ancestors(base)

    def _of(self, kind: ast.expr | str | None) -> str | None:
        """Return the class of an annotation; a name or None of an option counts as the class."""
        if kind is None or kind == "?":
            return None
        if isinstance(kind, str) and kind.startswith("made:"):
            name = kind.removeprefix("made:")
            return self._of(name if name in self.members else self.returns.get(name))
        if isinstance(kind, str):
            return kind if kind in self.members and kind not in self.protocols else None
        if isinstance(kind, ast.BinOp):
            sides = {_simple(side) for side in (kind.left, kind.right)} - {"None"}
            name = sides.pop() if len(sides) == 1 else None
        else:
            name = _simple(kind)
        return None if name in OPEN or name in self.protocols else name


def _parameters(node: Function) -> dict[str, ast.expr | str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    every += [rest for rest in (node.args.vararg, node.args.kwarg) if rest]
    plain = {each.arg: each.annotation or "?" for each in every}
    for rest in (node.args.vararg, node.args.kwarg):
        if rest:
            plain[rest.arg] = "?"
    return plain


def _simple(node: ast.expr) -> str | None:
    """Return the last part of a name, without its arguments."""
    if isinstance(node, ast.Constant):
        return "None" if node.value is None else str(node.value).rpartition(".")[2]
    if isinstance(node, ast.Subscript):
        return _simple(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
