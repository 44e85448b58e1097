# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The kernels' source, and how a C++ compiler and NVRTC are told to compile it.

``csrc/`` beside the package, or in an installed one the folder ``kernels`` that ``setup.py`` makes
of what they need.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from beluga.errors import EngineUnavailableError

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "kernels"
ROOT = _INSTALLED if _INSTALLED.is_dir() else _HERE.parents[2] / "csrc"

KERNELS = tuple(
    f"bl_{way}{half}{total}"
    for way in ("gather", "scatter")
    for half in ("", "_half")
    for total in ("", "_sum")
)
NVRTC_OPTIONS = (
    "--std=c++17",
    "-default-device",  # the shared headers have prototypes of the C core, which nobody calls here
    f"-I{ROOT}",
    f"-I{ROOT / 'cuda'}",
    f"-I{ROOT / 'cuda' / 'nvrtc'}",
)
HOST_OPTIONS = ("-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas")


def kernel_path() -> Path:
    """``kv_copy.cu``. Raises :class:`~beluga.errors.EngineUnavailableError` if it is not there."""
    path = ROOT / "cuda" / "kv_copy.cu"
    if not path.exists():
        raise EngineUnavailableError(f"the kernels' source is not installed ({path} is missing)")
    return path


def compile_host(source: Path, target: Path, *flags: str) -> None:
    """Compile for this CPU. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise EngineUnavailableError("there is no C++ compiler here (g++) to build the kernels")
    include = (f"-I{ROOT}", f"-I{ROOT / 'cuda'}")
    command = [compiler, *HOST_OPTIONS, *flags, *include, str(source), "-o", str(target)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        first = next(iter(found.stderr.splitlines()), "no message")
        raise EngineUnavailableError(f"{compiler} can not build the kernels: {first}")
