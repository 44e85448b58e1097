# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Imports and includes go down the layers only. The two lists below are all the data there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# Python, bottom first. A layer is seen from above through its front door: the package itself.
LAYERS = (
    ("errors", "_build", "_shared", "config", "child"),
    ("_ffi",),
    ("primitives", "lease"),
    ("pool",),
    ("rpc",),
    ("meta",),
    ("verify",),
    ("transfer",),
    ("kvcache",),
    ("connectors",),
    ("router",),
    ("disagg",),
    ("replay",),
    ("route", "simulate"),
    ("cli",),
)
EXTENSIONS = ("_core", "_sim")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# What a layer may import from outside the standard library and numpy.
EXTRAS = {
    "_build": {"cffi"},
    "cli": {"typer", "rich", "msgspec", "beluga_bench"},
    "router": {"msgspec", "xxhash"},
    "disagg": {"aiohttp", "msgspec", "nats"},
    "replay": {"msgspec", "rich"},
    "route": {"aiohttp", "msgspec", "prometheus_client", "tokenizers", "transformers", "zmq"},
    "simulate": {"matplotlib", "msgspec", "rich"},
    "transfer": {"cupy", "torch"},
    "kvcache": {"torch"},
    "connectors": {"torch", "vllm", "lmcache", "sglang", "prometheus_client"},
}

SIM_LAYER = 99  # the simulator stands above everything that runs in it


def python_files() -> list[Path]:
    return sorted(path for path in (ROOT / "beluga").rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT / "beluga").parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """The absolute names of all modules a file imports, at whatever depth."""
    package = ["beluga", *path.relative_to(ROOT / "beluga").parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "beluga":
                found |= {f"beluga.{alias.name}" for alias in node.names}
            else:
                found.add(module)
    return found


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
        elif len(parts) > 2:
            wrong.append(f"{path.relative_to(ROOT)} imports {module}, not the layer's front door")
    return wrong


def test_python_imports_go_down_only() -> None:
    paths = [path for path in python_files() if path != ROOT / "beluga/__init__.py"]
    assert [line for path in paths for line in upward_imports(path)] == []


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


def code_of(path: Path) -> str:
    """C without its comments."""
    return re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', code_of(path), flags=re.MULTILINE)


def c_layers() -> dict[str, int]:
    """The layer of every file that the list in beluga.c names, or that those include.

    A header which is not named there has the layer of its .c file, or else of its lowest user.
    """
    layers: dict[str, int] = {}
    level = 0
    for line in (CSRC / "beluga.c").read_text().splitlines():
        if heading := re.match(r"/\* L(\d)", line):
            level = int(heading[1])
        elif line.startswith("#ifdef BL_SIM"):
            level = SIM_LAYER
        elif include := re.match(r'#include "([^"]+)"', line):
            layers[include[1]] = level
    for name in list(layers):
        if name.endswith(".c") and (CSRC / name).with_suffix(".h").exists():
            layers.setdefault(name.removesuffix(".c") + ".h", layers[name])
    waiting = sorted(layers, key=lambda name: layers[name])
    while waiting:
        user = waiting.pop(0)
        new = [name for name in includes(CSRC / user) if name not in layers]
        layers |= dict.fromkeys(new, layers[user])
        waiting = new + waiting
    return layers


def test_every_c_file_is_in_the_unity_build() -> None:
    present = {path.name for path in CSRC.glob("*.[ch]")} - {"beluga.c"}
    assert present == set(c_layers())


def test_c_files_include_lower_layers_only() -> None:
    layers = c_layers()
    wrong = [
        f"{name} includes {other}"
        for name, level in layers.items()
        for other in includes(CSRC / name)
        if other in layers and layers[other] > level
    ]
    assert wrong == []


def test_only_the_unity_build_includes_c_files() -> None:
    wrong = [
        f"{name} includes {other}"
        for name in c_layers()
        for other in includes(CSRC / name)
        if other.endswith(".c")
    ]
    assert wrong == []


def test_c_files_call_lower_layers_only() -> None:
    """A function is defined in one layer and named in no lower one, prototypes apart."""
    layers = c_layers()
    defined: dict[str, int] = {}
    for name, level in layers.items():
        if name.endswith(".c"):
            pattern = r"^[a-z][\w \*\n]*?\b(bl_\w+)\([^;{}]*\)\s*\{"
            for function in re.findall(pattern, code_of(CSRC / name), flags=re.MULTILINE):
                defined.setdefault(function, level)  # the simulator has bodies of its own
    assert len(defined) > 20
    wrong = [
        f"{name} (L{level}) names {used} of L{defined[used]}"
        for name, level in layers.items()
        if name.endswith(".c")
        for used in sorted(set(re.findall(r"\bbl_\w+\b", code_of(CSRC / name))))
        if defined.get(used, 0) > level
    ]
    assert wrong == []
