# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Imports go only down the layers, sides of cffi name each other, and all has a caller."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import uncalled
from support.shown import ROOT

# ---- Python's imports go only down the layers, which the three lists below define.


# Python, bottom first. A layer is seen from above through its front door: the package itself.
LAYERS = (
    ("errors", "_build", "_checkout", "conventions", "choices"),
    (
        *("_numpy", "_shared", "arguments", "config", "child", "limit", "metrics", "open_files"),
        *("text", "threads"),
    ),
    ("_ffi", "http_server", "listening", "page"),
    ("figures",),
    ("coherence",),
    ("pool",),
    ("rpc",),
    ("index",),
    ("verify",),
    ("transfer",),
    ("tiers",),
    ("kvcache",),
    ("kvbm",),
    ("exporter",),
    ("live",),
    ("admin",),
    ("router",),
    ("connectors",),
    ("disagg",),
    ("replay",),
    ("doctor", "events", "gateway", "simulate"),
    ("cli",),
    ("__main__",),
)
# The same for the subpackages of a package, bottom first. The package's front door is at the top.
INSIDE = {
    "transfer": (
        ("plan", "view"),
        ("layout",),
        ("arrangements", "engine"),  # the interface of engines
        ("link",),
        ("io_handle",),
        ("policy",),
        ("cpu", "dsa", "cuda"),
        ("engines",),
    ),
    "router": (
        ("token_ids", "worker"),
        ("policy",),  # the interface of policies
        ("hashing", "costs", "metrics", "planner", "queue"),
        ("events", "tracker"),
        ("indexer",),
        ("approximate", "feeds"),
        ("policies",),
        ("router",),
        ("decision",),
    ),
}
EXTENSIONS = ("_core",)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# The modules that a layer may import from outside the standard library and numpy.
EXTRAS = {
    "_build": {"cffi"},
    "config": {"tomli", "tomllib"},
    "cli": {"click", "rich", "msgspec", "tomli", "tomllib", "beluga_bench"},
    "rpc": {"msgspec"},
    "router": {"msgspec"},
    "disagg": {"aiohttp", "msgspec", "nats"},
    "events": {"msgspec", "zmq"},
    "admin": {"aiohttp"},
    "http_server": {"aiohttp"},
    "replay": {"msgspec", "rich"},
    "gateway": {
        *("aiohttp", "msgspec", "tokenizers", "transformers", "uvloop", "zmq"),
    },
    "simulate": {"msgspec", "rich"},
    "tiers": {"mooncake", "obstore", "redis"},
    "transfer": {"torch"},
    "kvcache": {"torch"},
    "connectors": {
        *("torch", "vllm", "lmcache", "sglang", "prometheus_client", "obstore", "zmq"),
    },
}


def python_files() -> list[Path]:
    return sorted(path for path in (ROOT / "beluga").rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "beluga").parts[0].removesuffix(".py")


@cache
def imported_modules(path: Path) -> set[str]:
    """Return the absolute names of all modules that a file imports, at whatever depth."""
    package = ["beluga", *path.relative_to(ROOT / "beluga").parts[:-1]]
    texts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            texts |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = ROOT.joinpath(*module.split("."), alias.name)
                is_part = inner.is_dir() or inner.with_suffix(".py").is_file()
                deep = module == "beluga" or (is_part and module.count(".") > 1)
                texts.add(f"{module}.{alias.name}" if deep else module)
    return texts


# aiohttp, which it imports, takes longer to import than all of a command such as get.
SIDE_DOORS = {"beluga.http_server"}


def upward_imports(path: Path) -> list[str]:
    own = layer_of(path)
    wrong = []
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] != "beluga" or parts[1:2] in ([own], []):
            continue
        other = parts[1]
        if other in EXTENSIONS:  # test_python_enters_c_through_one_door
            continue
        if other not in LEVEL or LEVEL[other] >= LEVEL[own]:
            wrong.append(f"{path.relative_to(ROOT)} imports {module}, which is not below {own}")
        elif len(parts) > 2 and module not in SIDE_DOORS:
            wrong.append(f"{path.relative_to(ROOT)} imports {module}, not the layer's front door")
    return wrong


def test_python_imports_go_down_only() -> None:
    paths = [path for path in python_files() if path != ROOT / "beluga/__init__.py"]
    assert [line for path in paths for line in upward_imports(path)] == []


def part_of(package: str, dotted: str) -> tuple[str, int]:
    """Return the part of a package that a module belongs to, and its level."""
    for level, names in enumerate(INSIDE[package]):
        for name in names:
            if f"{dotted}.".startswith(f"beluga.{package}.{name}."):
                return name, level
    return "", len(INSIDE[package])


def upward_inside(path: Path) -> list[str]:
    package, own = layer_of(path), ".".join(path.relative_to(ROOT).with_suffix("").parts)
    part, level = part_of(package, own.removesuffix(".__init__"))
    return [
        f"{path.relative_to(ROOT)} imports {module}, which is not below {package}.{part}"
        for module in imported_modules(path)
        if f"{module}.".startswith(f"beluga.{package}.")
        for other, below in [part_of(package, module)]
        if other != part and below >= level
    ]


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_go_down_only(package: str) -> None:
    paths = sorted((ROOT / "beluga" / package).rglob("*.py"))
    assert [line for path in paths for line in upward_inside(path)] == []


@pytest.mark.parametrize("package", INSIDE)
def test_every_part_of_a_package_is_listed(package: str) -> None:
    dotted = [f"beluga.{package}.{name}" for names in INSIDE[package] for name in names]
    files = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files()
    }
    inside = [path for path in files if layer_of(path) == package and path.name != "__init__.py"]
    assert [str(path) for path in inside if not part_of(package, files[path])[0]] == []
    assert all(any(f"{name}.".startswith(f"{one}.") for name in files.values()) for one in dotted)


def test_every_python_layer_is_listed() -> None:
    known = {*LEVEL, "__init__"}
    assert {layer_of(path) for path in python_files()} <= known


@pytest.mark.parametrize("module", EXTENSIONS)
def test_python_enters_c_through_one_door(module: str) -> None:
    users = [path.name for path in python_files() if f"beluga.{module}" in imported_modules(path)]
    assert users in ([], ["_ffi.py"])


def test_optional_packages_stay_in_their_layers() -> None:
    always = {"beluga", "numpy"}
    outside = set().union({"cupy", "matplotlib"}, *EXTRAS.values())
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files()
        for name in {module.split(".")[0] for module in imported_modules(path)} & outside
        if name not in always | EXTRAS.get(layer_of(path), set())
    ]
    assert wrong == []


def test_only_config_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT / "beluga"))
        for path in python_files()
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    }
    assert readers <= {"config.py", "_build.py"}


# ---- Each side of cffi names the other: a header of ``csrc/api`` its Python files, and these
# the C.


API = sorted((ROOT / "csrc/api").glob("*.h"))


def python_named(comment: str) -> list[str]:
    """Return the Python files and folders that a C comment names."""
    return [text.rstrip(".") for text in re.findall(r"\b(?:beluga|tests)/[\w/.]+", comment)]


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def c_named(path: Path) -> list[str]:
    """Return the C files and folders that a module's docstring names, or else its package's."""
    for module in (path, path.with_name("__init__.py")):
        if named := re.findall(r"csrc/[\w/.]*\w/?", docstring(module)):
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


# ---- Nothing of ``beluga/`` has tests as its only callers (``scripts/dev/uncalled.py``).


@pytest.mark.long
def test_everything_has_a_caller_outside_tests() -> None:
    assert uncalled.uncalled(ROOT) == []


def test_functions_without_a_caller_are_listed(tmp_path: Path) -> None:
    tree = {
        "beluga/__init__.py": "from beluga.one import alone\n__all__ = ['alone', 'used']\n",
        "beluga/one.py": (
            "import logging\n"
            "def alone(n):\n    return alone(n - 1)\n"
            "def used(): ...\n"
            "def shown(): ...\n"
            "def offered(): ...\n"
            "def by_script(): ...\n"
            "class Described:\n    def known(self): ...\n"
            "@app.command()\ndef command(): ...\n"
            "class Reader(logging.Handler):\n    def emit(self): ...\n"
            "class Kind:\n"
            "    def __len__(self): ...\n"
            "    @property\n    def lonely(self): ...\n"
            "    def by_name(self): ...\n"
            "getattr(Kind(), 'by_name')(Reader, used())\n"
        ),
        "scripts/some": "#!/usr/bin/env python3\nby_script()\n",
        "tests/test_one.py": "alone(), Kind().lonely\n",
        "docs/reference/api.md": "| `beluga.one.offered` | is offered |\n",
        "docs/page.md": "```py\nshown()\n```\n`Described.known` is described.\n",
    }
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert uncalled.uncalled(tmp_path) == ["beluga/one.py:2 alone", "beluga/one.py:17 lonely"]


def test_a_method_is_listed_if_each_use_of_its_name_is_on_another_class(tmp_path: Path) -> None:
    (tmp_path / "beluga").mkdir()
    (tmp_path / "docs/reference").mkdir(parents=True)
    (tmp_path / "docs/reference/api.md").write_text("")
    (tmp_path / "beluga/one.py").write_text(
        "class Base:\n"
        "    def merge(self): ...\n"
        "    def stop(self): ...\n"
        "    def look(self): ...\n"
        "class Sub(Base): ...\n"
        "class Other:\n"
        "    def merge(self): ...\n"
        "    def stop(self): ...\n"
        "    def look(self): ...\n"
        "def use(other: Other, sub: Sub | None, unknown):\n"
        "    other.merge(), sub.stop(), Other().stop(), unknown.look()\n"
        "use(Base)\n"
    )
    assert uncalled.uncalled(tmp_path) == ["beluga/one.py:2 merge"]
