# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The folders of ``csrc/`` and the simulator: each includes and uses only folders above it.

Their order is that of the table in ``csrc/README.md``, from the bottom of the architecture to its
top, and then of the table in ``tests/sim/native/README.md``. The test checks the includes and every
use of a function or variable, found in compiled objects (``c_references.py``): between folders, and
inside a folder between files, where a source and its header count as one.
"""

import platform
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from native.build_sim import HEADERS
from support import c_references
from support.c_references import (
    Reference,
    References,
    Seam,
    Tree,
    circles,
    compiled,
)
from support.commands import captured

from beluga._build import CORE_HEADERS, CUDA_HEADERS, DSA_HEADERS

TESTS = Path(__file__).resolve().parents[1]
CSRC = TESTS.parent / "csrc"
CORE = Tree(CSRC)
ALL = Tree(CSRC, TESTS, ("native", "sim/native"))
PAGES = (CSRC / "README.md", TESTS / "sim/native/README.md")
WHOLES = {"core": "beluga.c", "sim": "sim/native/simulator.c"}
HEAP = "sim/native/heap.h"  # replaces malloc() in what is included after it
SEAM = Seam("sim/native", "coherence/sim.h", HEAP)
# Headers that compilers for other machines lack; test_instructions.py compiles both.
ARCHITECTURES = {"coherence/x86.h": "x86_64", "coherence/aarch64.h": "aarch64"}

needs_tools = pytest.mark.skipif(
    bool(c_references.MISSING), reason=f"needs {', '.join(c_references.TOOLS)}"
)


def folders(*pages: Path) -> list[str]:
    """Return the list, bottom first."""
    page = "".join(page.read_text() for page in pages)
    return re.findall(r"^\| `([a-z/]+)/` \|", page, flags=re.MULTILINE)


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def node_of(name: str) -> str:
    """Return a source with its header."""
    return name.rpartition(".")[0]


def arrows_up(found: list[Reference], order: list[str]) -> list[str]:
    """Return references to entries below in the list."""
    level = {folder: number for number, folder in enumerate(order)}
    return [
        f"{one.user} -> {one.used}: {one.how}"
        for one in found
        if one.user not in WHOLES.values()
        and level[folder_of(one.used)] > level[folder_of(one.user)]
    ]


def circles_inside(found: list[Reference], order: list[str]) -> list[str]:
    """Return files of one folder that need each other."""
    wrong = []
    for folder in order:
        links: defaultdict[str, set[str]] = defaultdict(set)
        for one in found:
            if folder == folder_of(one.user) == folder_of(one.used):
                links[node_of(one.user)].add(node_of(one.used))
        wrong += [f"{folder}: {' '.join(group)}" for group in circles(links)]
    return wrong


def arrows_forward(found: list[Reference], page: Path) -> list[str]:
    """Return references in a folder to files that its page lists later, or not at all."""
    folder = page.parent.name
    order = re.findall(r"`(\w+)`", page.read_text().partition("\n## The order\n")[2])
    level = {f"{folder}/{name}": number for number, name in enumerate(order)}
    inside = [one for one in found if folder == folder_of(one.user) == folder_of(one.used)]
    unlisted = {node_of(name) for one in inside for name in (one.user, one.used)} - set(level)
    return sorted(unlisted) + [
        f"{one.user} -> {one.used}: {one.how}"
        for one in inside
        if not unlisted and level[node_of(one.used)] > level[node_of(one.user)]
    ]


def hidden_uses(builds: dict[str, References]) -> list[str]:
    """Return uses of another source's static names, which only work in a unity build."""
    return sorted(
        f"{build.home[user]} uses {used}, which is static in {build.home[used]}"
        for build in builds.values()
        for user, used in build.pairs
        if build.home[user] != build.home[used]
        and build.home[used].endswith(".c")
        and used not in build.shared
    )


def misplaced(tree: Tree, wholes: list[str], order: list[str]) -> list[str]:
    """Return sources that no unity build includes or that another file includes, and folders out of
    order.
    """
    named = [name for whole in wholes for name in tree.includes(whole)]
    listed = [name for name in named if name not in (*wholes, HEAP)]
    there = [name for name in tree.names if name.endswith(".c") and name not in wholes]
    wrong = [f"{name} is not in {wholes[-1]}" for name in there if name not in listed]
    wrong += [
        f"{name} includes {other}"
        for name in tree.names
        for other in tree.includes(name)
        if name not in wholes and other.endswith(".c")
    ]
    levels = [order.index(folder_of(name)) for name in listed]
    return wrong + (
        [] if levels == sorted(levels) else [f"{wholes[-1]} is not in the list's order"]
    )


@cache
def core_build(tree: Tree, folder: Path) -> References:
    return compiled(tree, folder, more=c_references.CALLBACK)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, References]:
    folder = tmp_path_factory.mktemp("objects")
    return {
        "core": core_build(CORE, folder),
        "sim": compiled(ALL, folder, WHOLES["sim"], c_references.CALLBACK),
    }


@pytest.fixture(scope="module")
def found(both: dict[str, References]) -> list[Reference]:
    return c_references.references(ALL, both, SEAM)


def without_user(tree: Tree, builds: list[References], headers: tuple[str, ...]) -> list[str]:
    """Return the functions that no other function, macro or user of these headers calls."""
    used = {used for build in builds for user, used in build.pairs if user != used}
    texts = {name: tree.code(name) for name in tree.names}
    macros = " ".join(re.findall(r"#define(?:.*\\\n)*.*", "\n".join(texts.values())))
    outside = " ".join([macros, *(texts[name] for name in headers)])
    begun = re.findall(
        r"__attribute__\(\(constructor\)\) static \w+ (\w+)", " ".join(texts.values())
    )
    return [
        name
        for name, file in {
            name: file for build in builds for name, file in build.home.items()
        }.items()
        if name not in used
        and name not in begun
        and re.search(rf"^[a-z][\w *]*\b{name}\(", texts[file], flags=re.MULTILINE)
        and not re.search(rf"\b{name}\b", outside)
    ]


@needs_tools
def test_every_function_has_a_user(both: dict[str, References]) -> None:
    of_tests = (ALL.name_of(CSRC / path) for path in HEADERS)
    headers = (*CORE_HEADERS, *DSA_HEADERS, *CUDA_HEADERS, *of_tests)
    assert without_user(ALL, list(both.values()), tuple(filter(None, headers))) == []


def without_caller(headers: tuple[str, ...], both: dict[str, References]) -> list[str]:
    """Return the functions of these headers that only tests and the simulator call."""
    core = both["core"]
    used = {used for user, used in core.pairs if user != used}
    python = {
        word
        for folder in ("beluga", "bench")
        for path in (CSRC.parent / folder).rglob("*.py")
        for word in re.findall(r"\bbl_\w+", path.read_text())
    }
    return [
        name
        for header in headers
        for name in re.findall(r"^[a-z][\w *]*?\b(bl_\w+)\(", CORE.code(header), re.MULTILINE)
        if name not in used | python
    ]


@needs_tools
def test_every_function_for_python_has_a_caller_outside_tests(
    both: dict[str, References],
) -> None:
    headers = tuple(name for name in (*CORE_HEADERS, *DSA_HEADERS) if name.startswith("api/"))
    assert without_caller(headers, both) == []


@needs_tools
def test_a_function_without_a_user_is_found(tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    (csrc / "base").mkdir(parents=True)
    (csrc / "base/low.h").write_text("int offered(int n);\n#define WITH(n) by_macro(n)\n")
    (csrc / "base/low.c").write_text(
        "static inline int alone(int n) { return n ? alone(n - 1) : 0; }\n"
        "static int used(int n) { return n; }\n"
        "int by_macro(int n) { return n; }\n"
        "__attribute__((constructor)) static void begun(void) { used(1); }\n"
        "int offered(int n) { return n; }\n"
    )
    (csrc / "beluga.c").write_text('#include "base/low.c"\ntypedef void bl_call;\n')
    tree = Tree(csrc)
    builds = [core_build(tree, tmp_path)]
    assert without_user(tree, builds, ("base/low.h",)) == ["alone"]
    assert sorted(without_user(tree, builds, ())) == ["alone", "offered"]


def test_every_folder_is_listed_and_states_its_purpose() -> None:
    there = {folder_of(name) for name in ALL.names} - {"", "cuda/nvrtc"} | {"cuda"}
    assert set(folders(*PAGES)) == there
    for folder in folders(*PAGES):
        page = CSRC / folder if (CSRC / folder).exists() else TESTS / folder
        text = (page / "README.md").read_text()
        lines = text.partition("\n## ")[0].strip().splitlines()
        assert 3 <= len(lines) <= 12, f"{folder}/README.md"


def test_every_source_is_included_in_layer_order() -> None:
    assert misplaced(CORE, ["beluga.c"], folders(*PAGES)) == []
    assert misplaced(ALL, list(WHOLES.values()), folders(*PAGES)) == []


@needs_tools
def test_every_symbol_of_the_objects_has_its_file(both: dict[str, References]) -> None:
    assert len(both["core"].pairs) > 2000
    assert len(both["sim"].pairs) > 3000
    lost = {
        name
        for build in both.values()
        for name in build.shared
        if name.startswith("bl_") and name not in build.home
    }
    assert lost == set()


@needs_tools
def test_no_include_and_no_call_leads_to_a_higher_layer(found: list[Reference]) -> None:
    assert arrows_up(found, folders(*PAGES)) == []


@needs_tools
def test_no_folder_has_a_circle_inside(found: list[Reference]) -> None:
    assert circles_inside(found, folders(*PAGES)) == []


@needs_tools
def test_the_files_of_the_index_are_in_the_order_of_their_list(found: list[Reference]) -> None:
    assert arrows_forward(found, CSRC / "index/README.md") == []


@needs_tools
def test_functions_used_by_other_files_are_not_static(both: dict[str, References]) -> None:
    assert hidden_uses(both) == []


@needs_tools
@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-UBL_SIM", "-DBL_SIM=1"], ids=["core", "sim"])
def test_every_file_includes_what_it_uses(flag: str) -> None:
    wrong = []
    for name in ALL.names:
        only_sim = name.startswith(("sim/", "native/")) or name == SEAM.header
        if name in WHOLES.values() or name.startswith("cuda/") or (only_sim and flag == "-UBL_SIM"):
            continue
        if ARCHITECTURES.get(name, platform.machine()) != platform.machine():
            continue
        first = f'#include "{HEAP}"\n' if flag == "-DBL_SIM=1" else ""
        command = ["gcc", "-x", "c", "-std=gnu11", "-D_GNU_SOURCE", "-DBL_FORMAT_HASH=0ull", flag]
        command += [
            "-w",
            "-Werror=implicit-function-declaration",
            "-fsyntax-only",
            f"-I{CSRC}",
            f"-I{TESTS}",
        ]
        text = f'{first}#include "{name}"\n'
        done = captured([*command, "-"], input=text)
        if done.returncode:
            wrong.append(next(line for line in done.stderr.splitlines() if "error" in line))
    assert wrong == []


# The test of the test: small trees, each with the expected findings.

BASE = "int low(int n);\n"
LOW = '#include "base/low.h"\nint low(int n) { return n; }\n'
TOP = "int high(int n);\n"
HIGH = '#include "top/high.h"\n#include "base/low.h"\nint high(int n) { return low(n); }\n'
PROTOTYPE = "int high(int n);\n"
PLANTED = {
    "nothing": ({}, []),
    "an include": (
        {"base/low.c": '#include "top/high.h"\n' + LOW},
        ["base/low.c -> top/high.h: includes it"],
    ),
    "a call": (
        {"base/low.c": PROTOTYPE + LOW.replace("return n", "return high(n)")},
        ["base/low.c -> top/high.c: low uses high"],
    ),
    "a call from a header": (
        {"base/low.h": BASE + PROTOTYPE + "static inline int lower(int n) { return high(n); }\n"},
        ["base/low.h -> top/high.c: lower uses high"],
    ),
    "an address in a table": (
        {"base/low.c": LOW + PROTOTYPE + "int (*const calls[])(int) = {low, high};\n"},
        ["base/low.c -> top/high.c: calls uses high"],
    ),
    "a datum": (
        {
            "base/low.c": "extern int mark;\n" + LOW.replace("return n", "return mark"),
            "top/high.c": HIGH + "int mark = 1;\n",
        },
        ["base/low.c -> top/high.c: low uses mark"],
    ),
    "a circle by calls": (
        {
            "base/low.c": LOW.replace("{", "{ int near(int n); n = near(n);"),
            "base/near.c": "int low(int n);\nint near(int n) { return n ? low(n - 1) : 0; }\n",
        },
        ["base: base/low base/near"],
    ),
    "a circle by a call and an include": (
        {
            "base/low.c": LOW.replace("{", "{ int near(int n); n = near(n);"),
            "base/near.c": '#include "base/low.h"\nint near(int n) { return n; }\n',
        },
        ["base: base/low base/near"],
    ),
    "a static of another file": (
        {
            "base/low.c": LOW.replace("int low", "static int low"),
            "base/low.h": BASE.replace("int low", "static int low"),
        },
        ["top/high.c uses low, which is static in base/low.c"],
    ),
    "an include of a source": (
        {"top/high.c": HIGH.replace("base/low.h", "base/low.c")},
        ["top/high.c includes base/low.c"],
    ),
    "a source that is not in the whole": (
        {"top/more.c": "int more;\n"},
        ["top/more.c is not in beluga.c"],
    ),
}


def test_a_file_that_uses_a_later_one_is_found(tmp_path: Path) -> None:
    page = tmp_path / "index/README.md"
    page.parent.mkdir()
    page.write_text("# index\n\n## The order\n\n`low` `high`\n")
    used = Reference("index/low.c", "index/high.c", "low uses high")
    assert arrows_forward([used], page) == ["index/low.c -> index/high.c: low uses high"]
    assert arrows_forward([Reference("index/high.c", "index/low.h", "includes it")], page) == []
    assert arrows_forward([Reference("index/new.c", "index/low.h", "")], page) == ["index/new"]


@needs_tools
@pytest.mark.parametrize("what", PLANTED)
def test_planted_violations_are_detected(what: str, tmp_path: Path) -> None:
    changes, expected = PLANTED[what]
    tree = {
        "README.md": "| `base/` | low |\n| `top/` | high |\n",
        "base/low.h": BASE,
        "base/low.c": LOW,
        "top/high.h": TOP,
        "top/high.c": HIGH,
        **changes,
    }
    named = [name for name in tree if name.endswith(".c") and name != "top/more.c"]
    tree["beluga.c"] = "".join(f'#include "{name}"\n' for name in sorted(named))
    for name, text in tree.items():
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        once = "#pragma once\n" if name.endswith(".h") else ""
        (tmp_path / "csrc" / name).write_text(once + text)
    csrc = tmp_path / "csrc"
    order, planted = folders(csrc / "README.md"), Tree(csrc)
    wrong = misplaced(planted, ["beluga.c"], order)
    if not wrong:
        built = {"core": compiled(planted, tmp_path)}
        all_found = c_references.references(planted, built)
        wrong = [
            *arrows_up(all_found, order),
            *circles_inside(all_found, order),
            *hidden_uses(built),
        ]
    assert wrong == expected
