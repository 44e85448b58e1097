# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Finds which file of the C core uses which, from its includes and the symbols of compiled objects.
The object is the whole core in one piece, as it is built, but without optimization and with every
function and every variable in its own section. So each relocation names who refers (its section)
and what is referred to: a call, an address that is taken, a table of handlers, a constant. The
debugging information names the file in which each of them is defined, also for what stands in
headers. References are between files; the text of the sources alone does not show it.
"""

import bisect
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = ("gcc", "readelf", "nm")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
FLAGS = (
    *("-std=gnu11", "-O0", "-g", "-w", "-c", "-fvisibility=hidden", "-DBL_FORMAT_HASH=0ull"),
    *("-ffunction-sections", "-fdata-sections"),
    *("-fkeep-static-functions", "-fkeep-inline-functions"),  # including unused ones
)
# The code that cffi adds to the core: the entry from Python.
CALLBACK = "static int bl_python_handler(void *c, bl_call *k) { return c != (void *)k; }\n"


def code_of(path: Path) -> str:
    """Return C without its comments."""
    return re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)


class Tree:
    """C sources: those of a folder, and those of folders below another one, if any.

    A source's name is its path below the first or the second folder, as includes have it.
    """

    def __init__(self, csrc: Path, more: Path | None = None, below: tuple[str, ...] = ()) -> None:
        self.roots = (csrc, *([more] if more else ()))
        self._folders = (csrc, *(more / name for name in below if more))

    @property
    def names(self) -> list[str]:
        """Every source and header: ``folder/file``, or ``beluga.c``."""
        paths = [path for folder in self._folders for path in folder.rglob("*.[ch]")]
        return sorted(filter(None, map(self.name_of, paths)))

    def name_of(self, path: Path) -> str | None:
        """Return the name of a source."""
        inside = any(path.is_relative_to(folder) for folder in self._folders)
        roots = [root for root in self.roots if inside and path.is_relative_to(root)]
        return str(path.relative_to(roots[0])) if roots else None

    def code(self, name: str) -> str:
        """Return the code of a source, without its comments."""
        return code_of(next(root / name for root in self.roots if (root / name).exists()))

    def includes(self, name: str) -> list[str]:
        """Return what a source includes, except for the system's headers."""
        return re.findall(r'^\s*#include "([^"]+)"', self.code(name), flags=re.MULTILINE)


@dataclass
class References:
    """The references of one build: which name uses which, in which file each name is defined, and
    which names other objects could see.
    """

    pairs: set[tuple[str, str]] = field(default_factory=set)
    home: dict[str, str] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)


def compiled(tree: Tree, folder: Path, whole: str = "beluga.c", more: str = "") -> References:
    """Compile the source that includes the others. Returns its references; the object stays in the
    folder.
    """
    source, target = folder / "whole.c", folder / "whole.o"
    source.write_text(f'#include "{whole}"\n{more}')
    roots = [f"-I{root}" for root in tree.roots]
    command = ["gcc", *FLAGS, *roots, str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return _read(target, tree)


def _output(*command: str) -> list[str]:
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return ended.stdout.splitlines()


class _Symbols:
    """The functions and data of an object, by section and address."""

    def __init__(self, target: Path) -> None:
        section = re.compile(r"\s*\[\s*(\d+)\]\s+(\S+)")
        listed = map(section.match, _output("readelf", "-SW", str(target)))
        sections = {match[1]: match[2] for match in listed if match}
        self.names: set[str] = set()
        self.shared: set[str] = set()
        self._by_section: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for line in _output("readelf", "-sW", str(target)):
            match line.split():
                case [_, value, _, "FUNC" | "OBJECT", binding, _, index, name] if index.isdigit():
                    self.names.add(name)
                    self._by_section[sections[index]].append((int(value, 16), name))
                    if binding == "GLOBAL":
                        self.shared.add(name)
        for symbols in self._by_section.values():
            symbols.sort()

    def at(self, section: str, offset: int) -> str | None:
        """Return the name at this address."""
        symbols = self._by_section.get(section, [])
        number = bisect.bisect_right(symbols, (offset, "\x7f"))
        return symbols[number - 1][1] if number else None


def _read(target: Path, tree: Tree) -> References:
    symbols = _Symbols(target)
    references = References(shared=symbols.shared)
    for line in _output("nm", "-l", str(target)):
        name, tab, location = line.partition("\t")
        home = tree.name_of(Path(location.rpartition(":")[0]))
        if tab and home:
            references.home[name.split()[-1]] = home
    section = ""
    for line in _output("readelf", "-rW", str(target)):
        if heading := re.match(r"Relocation section '\.rela([^']+)'", line):
            section = heading[1]
        elif not section.startswith((".debug", ".eh_frame")):
            _relocation(line.split(), section, symbols, references)
    return references


def _relocation(words: list[str], section: str, symbols: _Symbols, references: References) -> None:
    match words:
        case [offset, _, kind, _, name, *addend] if re.fullmatch("[0-9a-f]+", offset):
            user = symbols.at(section, int(offset, 16))
            used: str | None = name
            if name.startswith("."):  # a section, for a name that is local to this object
                add = int("".join(addend) or "0", 16)
                used = symbols.at(name, max(0, add + (4 if "PC32" in kind or "PLT" in kind else 0)))
            if user in references.home and used in references.home and used in symbols.names:
                references.pairs.add((str(user), str(used)))


@dataclass(frozen=True)
class Seam:
    """Describes how the simulator, the top folder, replaces lower code: for their users, the
    functions that ``header`` declares, and those that the other build has in a file of a lower
    folder, belong to that header or file, although ``folder`` has their bodies. ``heap`` has those
    of malloc() and free(), for all files.
    """

    folder: str
    header: str
    heap: str


@dataclass(frozen=True)
class Reference:
    """One file uses another; ``how``: an include, or the used names."""

    user: str
    used: str
    how: str


def references(
    tree: Tree, builds: Mapping[str, References], seam: Seam | None = None
) -> list[Reference]:
    """Return all of them, between different files. The first build is the one without the
    simulator.
    """
    first = next(iter(builds.values()), References())
    declared = set[str]()
    if seam:
        declared = set(re.findall(r"\b(\w+)\(", tree.code(seam.header)))
    uses = set()
    for build in builds.values():
        for user, used in build.pairs:
            home = build.home[used]
            if seam and home.startswith(f"{seam.folder}/"):
                home = first.home.get(used, seam.header if used in declared else home)
            if home != build.home[user] and not (seam and home == seam.heap):
                uses.add(Reference(build.home[user], home, f"{user} uses {used}"))
    for name in tree.names:
        uses |= {Reference(name, other, "includes it") for other in tree.includes(name)}
    return sorted(uses, key=lambda use: (use.user, use.used, use.how))


def circles(links: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other (strongly connected, of two at least)."""
    reach = {node: {node} for node in links}
    changed = True
    while changed:
        changed = False
        for node, others in links.items():
            more = set().union(*(reach.get(other, {other}) for other in others)) - reach[node]
            reach[node] |= more
            changed = changed or bool(more)
    groups = {
        tuple(sorted(other for other in reach[node] if node in reach.get(other, ())))
        for node in links
    }
    return sorted(list(group) for group in groups if len(group) > 1)
