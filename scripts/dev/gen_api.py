#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes docs/reference/api.md, the reference of the Python API, from the docstrings and
annotations of the classes and functions below and from the examples in docs/api/.

With ``--check`` nothing is written; the exit status is 1 if the page is not up to date.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from check_option import is_check  # noqa: E402  beside this file

from beluga import errors  # noqa: E402

TARGET = ROOT / "docs/reference/api.md"
EXAMPLES = ROOT / "docs/api"
INTRODUCTION = """\
# The Python API

Generated from the sources by `scripts/dev/gen_api.py`; do not edit.

The names of `beluga` itself, and the related classes and functions, by subject.
Sizes are in bytes and times in seconds unless a name ends in another unit (`_ns`, `_ms`). Every
error is a `BelugaError`, whose text is one line that includes what to do; [Errors](errors.md) has
the classes, which are in the module `beluga.errors`. Importing `beluga` needs only numpy and cffi.
The package is typed: the examples pass `mypy --strict`, and a test runs them.

## A complete program

Pool, server, blocks from numpy and torch, calls, copies out of an engine's layout, and the router:
"""


class Subject(NamedTuple):
    """A section of the page. ``names`` has, for each module, its classes and functions; a name with
    an example has ``=EXAMPLE`` after it.
    """

    title: str
    text: str
    names: dict[str, str]


SUBJECTS = (
    Subject(
        "Pools",
        "A pool of shared memory: [Concepts](../start/concepts.md).",
        {"beluga": "Pool=pool", "beluga.pool": "DeviceSpec=pool Geometry=pool parse_size"},
    ),
    Subject(
        "Servers",
        "The process that has the index of a pool; there is one at a time. `beluga serve` is one.",
        {
            "beluga": "IndexServer=server Server=method",
            "beluga.rpc": "Quota=server ServerStat=server Calls=server stand_by",
        },
    ),
    Subject(
        "Blocks by key",
        "The key-value cache of a pool: [Concepts](../start/concepts.md).",
        {
            "beluga": "KVCache=cache Namespace=cache",
            "beluga.kvcache": "PutResult=cache GetResult=cache hash_keys explain",
        },
    ),
    Subject(
        "Copies",
        "Copies between an engine's memory and the pool, and the engines that do them: "
        "[Copy engines](../understand/copy-engines.md).",
        {
            "beluga.kvcache": "Run=copies",
            "beluga.transfer": "View=copies BlockLayout=copies Slots=copies Plan=plans "
            "CopyEngine=plans Transfer=plans CpuEngine=plans Link=link LinkSettings=link "
            "TransferClass=link TransferStats=link engine_names",
            "beluga.transfer.arrangements": "vllm",
        },
    ),
    Subject(
        "Cache control",
        "Streaming copies, flushes and checksums of a program's own memory, for tools and tests.",
        {
            "beluga.coherence": "crc32c=memory features fence=memory flush=memory invalidate "
            "isa ntstore_copy=memory"
        },
    ),
    Subject(
        "Remote calls",
        "Functions of a program, called over the pool: [Calls over shared memory](../use/rpc.md).",
        {
            "beluga": "Handlers=handlers Client=handlers AsyncClient=tasks",
            "beluga.rpc": "HandlerInfo=handlers ClientStat=method load_handlers",
        },
    ),
    Subject(
        "Routing",
        "The router as a library, without I/O: "
        "[the router in your process](../use/routing.md#the-router-in-your-process).",
        {
            "beluga.router": "Router=router Worker=router Query=router Choice=router "
            "Policy=policy LoadTracker=router Load=router BlockHasher=router "
            "Constraints=router BusyThresholds=router Indexer=indexer RouterEvent=indexer "
            "Stored=indexer Removed=indexer WorkerMetrics=router "
            "make_policy",
        },
    ),
    Subject(
        "Simulation",
        "Policies on a trace, computed: [Simulation](../use/simulation.md).",
        {
            "beluga.simulate": "Options=simulation Trace=simulation TraceEntry=simulation "
            "Row=simulation make_trace=simulation load_trace simulate=simulation",
            "beluga.router": "ModelCosts=simulation model_costs=simulation",
        },
    ),
    Subject(
        "Connectors",
        "The settings of the engines' connectors, as their options name them: "
        "[vLLM](../use/vllm.md), [SGLang](../use/sglang.md), [LMCache](../use/lmcache.md).",
        {
            "beluga.connectors.vllm.settings": "VllmSettings=connector",
            "beluga.connectors.settings": "EngineSettings=connector",
        },
    ),
)

# Names that are public only for other parts of Beluga; "__init__": programs do not create it.
INTERNAL = {
    "Pool": "__init__ using handle has_runtime_dir raise_for_status refuse_in_use refuse_removed "
    "run_near host_number reserve before_close",
    "IndexServer": "attach_lower attach_journal detach_lower fail watch reported",
    "Server": "fail watch reported",
    "ServerStat": "__init__",
    "Client": "tell lock session report",
    "ClientStat": "__init__",
    "Handlers": "bind returns",
    "HandlerInfo": "__init__",
    "PutResult": "__init__",
    "GetResult": "__init__",
    "Geometry": "__init__",
    "Calls": "__init__",
    "Run": "rest refuse_wrong",
    "Plan": "__init__ struct refuse_direction refuse_beyond ranges part cut link_ranges",
    "View": "foreign",
    "Link": "price device_bytes",
    "TransferStats": "__init__",
    "Row": "__init__",
    "Indexer": "handle restore dump missing shared_stored shared_removed shared_count "
    "shared_names clear_shared",
    "LoadTracker": "states sweep new_blocks",
    "Router": "candidates",
}


# The subject of all other types that the signatures of the page have; it is found, not listed.
OTHERS = Subject(
    "Other types",
    "Types of parameters and results of the above. Programs get the objects of results from\n"
    "calls, and need not import their classes.",
    {},
)
# Types that the page names and does not explain, because only other parts of Beluga use them.
UNEXPLAINED = {
    *("Candidates", "CopySettings", "CpuTransfer", "CudaArrayInterface", "Device", "IoHandle"),
    *("ReportTotals", "SharedLoads"),
}
# Types of these for which a program gives values; others are results.
MADE = {"Candidate", "Cleared", "Goals", "Scale", "Speed"}
FOREIGN = (builtins, typing, collections.abc, numpy.typing)


class Entry(NamedTuple):
    """A class or function of the page."""

    module: str
    name: str
    example: str
    value: Any


def entries(subject: Subject) -> Iterator[Entry]:
    """Yield a subject's classes and functions, in order."""
    for module, names in subject.names.items():
        for word in names.split():
            name, _, example = word.partition("=")
            yield Entry(module, name, example, getattr(import_module(module), name))


ALL = [entry for subject in SUBJECTS for entry in entries(subject)]
LINKED = {entry.name for entry in ALL}


def linked(name: str) -> str:
    """Return a class as code, with a link to where it is described."""
    short = name.lstrip("~").rpartition(".")[2]
    if hasattr(errors, short):
        return f"[`{short}`](errors.md#classes)"
    return f"[`{short}`](#{short.lower()})" if short in LINKED else f"`{short}`"


def prose(text: str) -> str:
    """Return a docstring as Markdown."""
    parts, literal = [], False
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if literal and block.startswith("    "):
            parts.append(f"```py\n{textwrap.dedent(block)}\n```")
            continue
        literal = block.endswith("::")
        plain = re.sub(r"::$", ":", block)
        plain = re.sub(r":(?:class|exc):`([^`]+)`", lambda found: linked(found[1]), plain)
        plain = re.sub(r":(?:meth|func):`~?([^`]+)`", r"`\1()`", plain)
        plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", plain)
        parts.append(plain.replace("``", "`"))
    return "\n\n".join(parts)


def signature(name: str, value: Any, *, bound: bool = False) -> str:
    """Return a function's signature as it is written, a parameter a line if it is long."""
    found = inspect.signature(value)
    parameters = [
        one.replace(default=_shown(one.default), annotation=_plain(one.annotation))
        for one in list(found.parameters.values())[int(bound) :]
    ]
    before = "async " if inspect.iscoroutinefunction(value) else ""
    text = _text(found.replace(parameters=parameters))
    if len(f"{before}{name}{text}") <= 96:
        return f"{before}{name}{text}"
    result = _text(found.replace(parameters=[])).removeprefix("()")
    bare = inspect.Signature.empty  # no result
    alone = [_text(inspect.Signature([one], return_annotation=bare))[1:-1] for one in parameters]
    lines: list[str] = []
    for one, line in zip(parameters, alone, strict=True):
        starred = any(each.startswith("    *") for each in lines)  # "*" or "*arguments"
        if one.kind is one.KEYWORD_ONLY and not starred:
            lines.append("    *,")
        lines.append(f"    {line.removeprefix('*, ').removesuffix(', /')},")
        if one.kind is one.POSITIONAL_ONLY:
            lines[-1] += " /,"
    return "\n".join([f"{before}{name}(", *lines, f"){result}"])


def _text(found: inspect.Signature) -> str:
    """Return a signature as text: annotations are texts already, and lose their quotes."""
    return str(found).replace("'", "").replace('"', "'")


def _plain(annotation: Any) -> Any:
    return getattr(annotation, "__forward_arg__", annotation)


class _Text:
    """A default value that is shown as this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _shown(default: Any) -> Any:
    if isinstance(default, enum.Enum):
        return _Text(f"{type(default).__name__}.{default.name}")
    if default is inspect.Parameter.empty or isinstance(default, bool | int | float | None):
        return default
    if inspect.isclass(default):
        return _Text(default.__name__)
    text = repr(default).replace("'", '"')
    return _Text("..." if len(text) > 30 or text.startswith("<") else text)


def section(entry: Entry, shown: set[str]) -> Iterator[str]:
    """Yield the lines of a class or function."""
    value, name = entry.value, entry.name
    yield from ("", f"### {name}", "")
    if entry.module:
        yield from (f"`{entry.module}.{name}`", "")
    if not inspect.isclass(value):
        yield from ("```py", signature(name, value), "```", "", prose(value.__doc__ or ""))
        yield from shown_example(entry, shown)
        return
    protocol = getattr(value, "_is_protocol", False)
    made = "__init__" not in INTERNAL.get(name, "").split() and not issubclass(value, enum.Enum)
    made = made and (name in LINKED or name in MADE)
    if made and not protocol:
        yield from ("```py", signature(name, value), "```", "")
    yield prose(vars(value).get("__doc__") or "")
    if protocol:
        yield from ("", "A protocol: a class of yours with these members is one, without a base.")
    yield from members(value)
    yield from shown_example(entry, shown)


def shown_example(entry: Entry, shown: set[str]) -> Iterator[str]:
    """Yield the lines of an entry's example, or a reference to where it was ``shown``."""
    if not entry.example:
        return
    if entry.example in shown:
        first = next(one.name for one in ALL if one.example == entry.example)
        yield from ("", f"*Example:* see [`{first}`](#{first.lower()}).")
    else:
        shown.add(entry.example)
        yield from ("", "*Example:*", "", *example(entry.example))


def example(name: str) -> list[str]:
    return ["```python", (EXAMPLES / f"{name}.py").read_text().rstrip(), "```"]


def members(value: type) -> Iterator[str]:
    """Yield the public attributes and methods that a class and its bases in Beluga define."""
    if issubclass(value, enum.Enum):
        yield from ("", ", ".join(f"`{one.name}`" for one in value) + ".")
        return
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        yield ""
        comments = comments_of(value)
        for field, kind in fields(value).items():
            meaning = f": {comments[field]}" if field in comments else ""
            yield f"* `{field}: {kind}`{meaning}"
    for enter, leave, word in (
        ("__enter__", "close", "with"),
        ("__aenter__", "close", "async with"),
    ):
        if hasattr(value, enter) and not getattr(value, "_is_protocol", False):
            begin = "calls `start()` at its begin and `stop()`" if hasattr(value, "stop") else ""
            yield from ("", f"**`{word}`** {begin or f'calls `{leave}()`'} at its end.")
    seen = set(INTERNAL.get(value.__name__, "").split())
    for base in (one for one in value.__mro__ if one.__module__.startswith("beluga")):
        for name, one in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            inner = one.__func__ if isinstance(one, classmethod | staticmethod) else one
            if isinstance(one, property):
                kind = inspect.signature(one.fget).return_annotation if one.fget else ""
                yield from ("", f"**`{name}`** `: {kind}`", "", prose(one.__doc__ or ""))
            elif inspect.isfunction(inner):
                text = signature(name, inner, bound=not isinstance(one, staticmethod))
                if "core.bl_" in text:  # converts a record of the C core
                    continue
                yield from ("", "```py", text, "```", "", prose(inner.__doc__ or ""))


def fields(value: type) -> dict[str, str]:
    """Return the fields of a record with their types as they are written."""
    found: dict[str, str] = {}
    for base in reversed(value.__mro__):
        if base.__module__.startswith("beluga"):
            found |= {
                name: str(getattr(kind, "__forward_arg__", kind))
                for name, kind in vars(base).get("__annotations__", {}).items()
                if not name.startswith("_")
            }
    return found


def comments_of(value: type) -> dict[str, str]:
    """Return the comments of a record's fields in the source: behind a field, or above it."""
    found: dict[str, str] = {}
    for base in reversed(value.__mro__):
        if not base.__module__.startswith("beluga"):
            continue
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            field = re.match(r"    (\w+): [^#]*?(?:  # (.*))?$", line)
            if field and (comment := field[2] or " ".join(above)):
                found[field[1]] = prose(comment.rstrip("."))
            alone = re.match(r"    # (?!noqa|type:)(.*)", line)
            above = [*above, alone[1]] if alone else []
    return found


def types_in(lines: list[str]) -> list[str]:
    """Return the names of types in the signatures and fields of these lines."""
    text = "\n".join(lines)
    shown = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown += re.findall(r"^(?:\* `\w+|\*\*`\w+`\*\* `): ([^`]+)`", text, re.MULTILINE)
    plain = re.sub(r"'[^']*'|<[^>]*>", "", "\n".join(shown))
    return list(dict.fromkeys(re.findall(r"(?<![\w.])[A-Z]\w*[a-z]\w*", plain)))


def resolved(name: str, value: Any) -> tuple[str, Any]:
    """Return the module and the object of a type that the annotations of ``value`` name. The
    module is empty if it is none of Beluga's.
    """
    classes = getattr(value, "__mro__", [value])
    used = [getattr(one, "__module__", getattr(one, "__name__", "")) for one in classes]
    modules = [sys.modules[one] for one in used if one.startswith("beluga")]
    if name == "Buffer" or not any(hasattr(one, name) for one in FOREIGN):
        modules += [one for key, one in sorted(sys.modules.items()) if key.startswith("beluga.")]
    for module in modules:
        kind = vars(module).get(name)
        if kind is None or any(kind is getattr(one, name, None) for one in FOREIGN):
            continue
        if inspect.isclass(kind) and not typing.get_origin(kind):
            return (kind.__module__, kind) if kind.__module__.startswith("beluga") else ("", kind)
        if name in assigned(module.__name__):
            return module.__name__, kind
    return "", None


def assigned(module: str) -> dict[str, tuple[str, str]]:
    """Return the aliases of types that a module defines: their definitions and descriptions."""
    found: dict[str, tuple[str, str]] = {}
    body = ast.parse(Path(sys.modules[module].__file__ or "").read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name):
            continue
        meaning = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            meaning = str(after.value.value)
        found[target.id] = (ast.unparse(node.value).strip("'"), meaning)
    return found


def public_module(name: str, value: Any) -> str:
    """Return the package that exports a class, or an empty text."""
    for key, module in sorted(sys.modules.items()):
        exported = key.startswith("beluga") and name in getattr(module, "__all__", ())
        if exported and getattr(module, name, None) is value:
            return key
    return ""


def constants(text: str) -> Iterator[str]:
    """Yield the rows of the constants that the text names: words, and tuples of words."""
    for name in sorted(set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", text))):
        for key, module in sorted(sys.modules.items()):
            value = vars(module).get(name) if key.startswith("beluga.") else None
            if isinstance(value, tuple) and all(isinstance(one, str) for one in value):
                words = ", ".join(f'`"{one}"`' for one in value)
                package = public_module(name, value)
                yield f"| `{name}` | {words} | {f'`{package}.{name}`' if package else ''} |"
                break


def other_types(named: list[tuple[str, Any]], text: str) -> list[str]:
    """Return the section of the types that others name, and of the constants in the text.
    ``named`` has each type with its user.
    """
    classes: list[str] = []
    rows = ["| type or constant | definition | meaning |", "| --- | --- | --- |"]
    seen: set[tuple[str, str]] = set()
    while named:
        name, user = named.pop(0)
        module, kind = resolved(name, user)
        if not module or (module, name) in seen or name in LINKED | UNEXPLAINED:
            continue
        if hasattr(errors, name):
            continue
        seen.add((module, name))
        protocol = getattr(kind, "_is_protocol", False)
        if inspect.isclass(kind) and not protocol:
            described = list(section(Entry(public_module(name, kind), name, "", kind), set()))
            classes.append("\n".join(described))
            named += [(one, kind) for one in types_in(described)]
            continue
        definition, meaning = ("", kind.__doc__ or "") if protocol else assigned(module)[name]
        named += [(one, sys.modules[module]) for one in re.findall(r"\b[A-Z]\w+", definition)]
        shown = f"`{definition}`".replace("|", "\\|") if definition else "a protocol"
        first = prose(meaning).partition("\n\n")[0].replace("\n", " ")
        package = "" if name not in [row.split("`")[1] for row in rows[2:]] else f" ({module})"
        rows.append(f"| `{name}`{package} | {shown} | {first} |")
    title = ["", f"## {OTHERS.title}", "", OTHERS.text, ""]
    return [
        *title,
        *rows,
        *constants(text),
        *sorted(classes, key=lambda one: one.split()[1].lower()),
    ]


def document() -> str:
    """Return the whole page."""
    shown = {"program"}
    lines = [INTRODUCTION, *example("program")]
    named: list[tuple[str, Any]] = []
    for subject in SUBJECTS:
        lines += ["", f"## {subject.title}", "", subject.text]
        for entry in entries(subject):
            described = list(section(entry, shown))
            named += [(name, entry.value) for name in types_in(described)]
            lines += described
    lines += other_types(named, "\n".join(lines))
    others = set(re.findall(r"^### (\w+)$", "\n".join(lines), re.MULTILINE)) - LINKED
    page = "\n".join(lines).rstrip() + "\n"
    parts = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else joined(part, others) for part in parts)


def joined(text: str, others: set[str]) -> str:
    """Return a part of the page without superfluous lines, with links to the other types."""
    named = re.sub(
        r"(?<![\[*] )(?<!\[)`(\w+)`(?!\])",
        lambda found: f"[`{found[1]}`](#{found[1].lower()})" if found[1] in others else found[0],
        text,
    )
    return re.sub(r"\n{3,}", "\n\n", named)


def main() -> int:
    check = is_check(__doc__)
    text = document()
    if not check:
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        print("docs/reference/api.md is stale; run scripts/dev/gen_api.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
