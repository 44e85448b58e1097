#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes the type stubs of the C extensions from the headers that cffi compiles them from.

``beluga/_core.pyi`` and ``bench/_limit.pyi`` give every function, constant and structure its type,
so that mypy checks what Python passes to C. ``setup.py`` writes each with its extension.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pycparser import c_ast, c_parser

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import _build_limit  # noqa: E402

from beluga import _build  # noqa: E402  not installed where this runs

CORE = (*_build.CORE_HEADERS, *_build.DSA_HEADERS, *_build.CUDA_HEADERS)

# Each extension's stub, and the declarations that it is built from.
STUBS = {
    "beluga._core": (ROOT / "beluga/_core.pyi", lambda: _build.cdef(CORE) + _build.CALLBACKS),
    "beluga_bench._limit": (ROOT / "bench/_limit.pyi", _build_limit.cdef),
}

_INTEGERS = ("char", "uint8_t", "uint16_t", "uint32_t", "uint64_t", "int32_t", "int64_t")
_ADDRESSES = ("size_t", "uintptr_t")
_POINTERS = {name: f"{name.removesuffix('_t')}_p" for name in (*_INTEGERS, "double", "void")}

_TOP = '''\
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Made from the C headers by scripts/dev/gen_stubs.py when the extension is built.

A class here stands for a structure, a pointer to one and an array of them; `bl_x_init` is what
`ffi.new` fills a `bl_x` with. Only `ffi` and `lib` exist at run time.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypedDict, TypeVar, overload

from beluga._cdata import BufferLike as BufferLike
from beluga._cdata import CBuffer as CBuffer
from beluga._cdata import CData as CData
from beluga._cdata import CItems as CItems
from beluga._cdata import CNumber as CNumber
from beluga._cdata import CNumbers as CNumbers
from beluga._cdata import CPointer as CPointer
from beluga._cdata import CStruct as CStruct
from beluga._cdata import Null as Null
'''

_METHODS = """\
    error: type[Exception]
    NULL: Final[Null]
    errno: int

    def sizeof(self, what: _Type | CData, /) -> int: ...
    def typeof(self, kind: str, /) -> Any: ...
    def offsetof(self, kind: _Type, /, *fields: str | int) -> int: ...
    def string(self, text: char_p, maxlen: int = ...) -> bytes: ...
    def unpack(self, pointer: CItems[_T], length: int) -> Sequence[_T]: ...
    def buffer(self, pointer: CData, size: int = ...) -> CBuffer: ...
    def memmove(self, target: CData | BufferLike, source: CData | BufferLike, n: int) -> None: ...
    def gc(self, pointer: _C, destructor: Callable[[_C], object], size: int = ...) -> _C: ...
    def new_handle(self, what: object, /) -> void_p: ...
    def from_handle(self, handle: CData, /) -> Any: ...  # whatever new_handle() was given
    def addressof(self, library: Lib, name: str, /) -> void_p: ...
    def def_extern(
        self, name: str = ..., error: int = ..., onerror: Callable[..., object] | None = ...
    ) -> Callable[[_F], _F]: ...
    @overload
    def from_buffer(self, buffer: BufferLike, /) -> char_p: ...
"""


@dataclass
class Declarations:
    """The names that C declarations declare, in their order."""

    structs: dict[str, c_ast.Struct] = field(default_factory=dict)
    functions: dict[str, c_ast.FuncDecl] = field(default_factory=dict)
    callbacks: dict[str, c_ast.FuncDecl] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)


def parse(text: str) -> Declarations:
    """Return the declarations in text for cffi."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL).replace('extern "Python"', " ")
    known = "".join(f"typedef int {name};\n" for name in (*_INTEGERS[1:], *_ADDRESSES))
    declarations = Declarations()
    for node in c_parser.CParser().parse(known + text).ext:
        kind = node.type
        if isinstance(kind, c_ast.TypeDecl):
            kind = kind.type
        if isinstance(kind, c_ast.Struct):
            name = node.name or kind.name
            if kind.decls or name not in declarations.structs:
                declarations.structs[name] = kind
        elif isinstance(kind, c_ast.Enum):
            declarations.constants += [item.name for item in kind.values.enumerators]
        elif isinstance(kind, c_ast.FuncDecl):
            declarations.functions[node.name] = kind
        elif isinstance(kind, c_ast.PtrDecl) and isinstance(kind.type, c_ast.FuncDecl):
            declarations.callbacks[node.name] = kind.type
    return declarations


def _name(node: c_ast.Node) -> str:
    """Return the type of a declarator: "uint32_t", "void", "bl_pool", or a callback."""
    base = node.type
    return base.name if isinstance(base, c_ast.Struct | c_ast.Enum) else base.names[-1]


def _fields(struct: c_ast.Struct | c_ast.Union) -> Iterator[c_ast.Decl]:
    """Return the fields, with those of unions and structures in it that have no name."""
    for each in struct.decls:
        if isinstance(each.type, c_ast.Struct | c_ast.Union):
            yield from _fields(each.type)
        else:
            yield each


def _new(of: str, given: str, result: str) -> str:
    head = f'def new(self, of: Literal["{of}"], init: {given} = ..., /)'
    return f"    @overload\n    {head} -> {result}: ..."


def _cast(to: str, result: str) -> str:
    head = f'def cast(self, to: Literal["{to}"], what: CData | int, /)'
    return f"    @overload\n    {head} -> {result}: ..."


def _viewed(of: str, result: str) -> str:
    given = f'of: Literal["{of}"], buffer: BufferLike, require_writable: bool = ...'
    head = f"def from_buffer(self, {given})"
    return f"    @overload\n    {head} -> {result}: ..."


class Stub:
    """Generates the text of a stub."""

    def __init__(self, found: Declarations) -> None:
        self._found = found

    def text(self) -> str:
        """Return the whole file."""
        names = sorted(_POINTERS.values())
        lines = [_TOP.rstrip()]
        lines += [f"from beluga._cdata import {name} as {name}" for name in names]
        for name, kind in self._found.callbacks.items():
            arguments = ", ".join(self._value(each.type) for each in kind.args.params)
            lines += ["", f"{name} = Callable[[{arguments}], {self._value(kind.type)}]"]
        for name, struct in self._found.structs.items():
            lines += ["", *self._struct(name, struct)]
        lines += ["", *self._names(), "", *self._ffi(), "", *self._lib()]
        lines += ["", "ffi: Final[Ffi]", "lib: Final[Lib]"]
        return "\n".join(lines) + "\n"

    def _value(self, node: c_ast.Node) -> str:
        """Return the type that Python reads from C: of a result, a field, an item."""
        if isinstance(node, c_ast.TypeDecl):
            name = _name(node)
            if name in self._found.structs or name in self._found.callbacks:
                return name
            return {"void": "None", "char": "bytes", "double": "float"}.get(name, "int")
        item = node.type
        if isinstance(item, c_ast.TypeDecl):
            name = _name(item)
            return name if name in self._found.structs else _POINTERS[name]
        return f"CPointer[{self._value(item)}]"

    def _taken(self, node: c_ast.Node) -> str:
        """Return the type that a parameter takes from Python."""
        if isinstance(node, c_ast.TypeDecl):
            return self._value(node)
        kinds = [self._value(node)]
        if isinstance(node, c_ast.PtrDecl):
            kinds.append("Null")
        if isinstance(node.type, c_ast.TypeDecl):
            name = _name(node.type)
            if name == "void":
                kinds = ["CData"]
            if "const" in node.type.quals:
                kinds += self._copied(name)
        return " | ".join(kinds)

    def _copied(self, name: str) -> list[str]:
        """Return the type that cffi converts to an array for a call that only reads it."""
        if name in ("void", "char", "uint8_t"):
            return ["bytes"]
        if name not in self._found.structs:
            return ["Sequence[int]"]
        return [f"Sequence[{name}]"] if self._found.structs[name].decls else []

    def _field(self, node: c_ast.Node) -> str:
        kind = self._value(node)
        return f"{kind} | Null" if isinstance(node, c_ast.PtrDecl) else kind

    def _filled(self, node: c_ast.Node) -> str:
        """Return the type that fills a field in a new structure."""
        kind = self._field(node)
        if isinstance(node, c_ast.ArrayDecl):
            item = node.type
            if isinstance(item, c_ast.TypeDecl) and _name(item) in ("char", "uint8_t"):
                return f"{kind} | bytes | Sequence[{self._value(item)}]"
            return f"{kind} | Sequence[{self._filled(item)}]"
        if kind in self._found.structs:
            return f"{kind} | {kind}_init"
        return kind

    def _struct(self, name: str, struct: c_ast.Struct) -> list[str]:
        if not struct.decls:
            return [f"class {name}(CStruct): ..."]
        fields = list(_fields(struct))
        lines = [f"class {name}(CStruct):"]
        lines += [f"    {each.name}: {self._field(each.type)}" for each in fields]
        lines += ["", f"class {name}_init(TypedDict, total=False):"]
        lines += [f"    {each.name}: {self._filled(each.type)}" for each in fields]
        return lines

    def _names(self) -> list[str]:
        """Return the names of all types that have a size, and variables for types."""
        known = [name for name, struct in self._found.structs.items() if struct.decls]
        lines = ["_Type = Literal["]
        lines += [f'    "{name}",' for name in (*_INTEGERS, *_ADDRESSES, "double", *known)]
        lines += ["]", '_C = TypeVar("_C", bound=CData)', '_T = TypeVar("_T")']
        return [*lines, '_F = TypeVar("_F", bound=Callable[..., Any])']

    def _ffi(self) -> list[str]:
        """Return the class of `ffi`: what it makes depends on the name of a type of C."""
        pairs = [(name, kind) for name, kind in _POINTERS.items() if name != "void"]
        known = [name for name, struct in self._found.structs.items() if struct.decls]
        new, cast, viewed = list[str](), list[str](), list[str]()
        for name, kind in pairs:
            item = {"char": "bytes", "double": "float"}.get(name, "int")
            raw = " | bytes" if name in ("char", "uint8_t") else ""
            new.append(_new(f"{name} *", item, kind))
            new.append(_new(f"{name}[]", f"int | Sequence[{item}]{raw}", kind))
        for name in known:
            filled = f"{name} | {name}_init"
            new.append(_new(f"{name} *", filled, name))
            new.append(_new(f"{name}[]", f"int | Sequence[{filled}]", name))
        viewed += [_viewed(f"{name}[]", kind) for name, kind in pairs]
        viewed += [_viewed(f"{name}[]", name) for name in known]
        pairs += [(name, name) for name in self._found.structs] + [("void", "void_p")]
        for name, kind in pairs:
            given = "CData" if name == "void" else f"{kind} | Null"
            new.append(_new(f"{name} **", given, f"CPointer[{kind}]"))
            new.append(_new(f"{name} *[]", f"int | Sequence[{given}]", f"CPointer[{kind}]"))
            cast.append(_cast(f'{name} *", "volatile {name} *', kind))
        cast += [_cast(name, name) for name in self._found.callbacks]
        cast += [_cast(name, "CNumber") for name in (*_INTEGERS, *_ADDRESSES)]
        return ["class Ffi:", *_METHODS.splitlines(), *viewed, *new, *cast]

    def _lib(self) -> list[str]:
        lines = ["class Lib:"]
        lines += [f"    {name}: Final[int]" for name in self._found.constants]
        for name, kind in self._found.functions.items():
            given = [
                f"{each.name}: {self._taken(each.type)}"
                for each in (kind.args.params if kind.args else ())
                if each.name is not None  # (void)
            ]
            result = self._value(kind.type)
            lines.append(f"    def {name}({', '.join(['self', *given, '/'])}) -> {result}: ...")
        return lines


def stub_of(extension: str) -> str:
    """Return the stub of an extension."""
    return Stub(parse(STUBS[extension][1]())).text()


def main() -> None:
    """Write all stubs."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for extension, (path, _) in STUBS.items():
        path.write_text(stub_of(extension))


if __name__ == "__main__":
    main()
