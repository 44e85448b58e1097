# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Find the kernels' source and compile it by a C++ compiler or NVRTC.

The source is in ``csrc/`` beside the package. An installed package has it in the folder
``kernels``, which ``setup.py`` creates from the necessary files.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from beluga.errors import EngineUnavailableError

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "kernels"
ROOT = _INSTALLED if _INSTALLED.is_dir() else _HERE.parents[3] / "csrc"

KERNELS = tuple(
    f"bl_{kernel}{half}{total}"
    for kernel in ("gather", "scatter")
    for half in ("", "_half")
    for total in ("", "_sum")
)
# cupy adds --device-as-default-execution-space, without which NVRTC rejects the shared headers'
# prototypes of the C core. NVRTC 12.4 rejects the option if it is given twice (12.9 and 13 do not).
NVRTC_OPTIONS = (
    "--std=c++17",
    f"-I{ROOT}",
    f"-I{ROOT / 'cuda'}",
    f"-I{ROOT / 'cuda' / 'nvrtc'}",
)
SHARED = tuple(path for name in ("api", "format") for path in (ROOT / name).glob("*.h"))
HOST_OPTIONS = ("-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas")


def kernel_path() -> Path:
    """Return the path of ``kv_copy.cu``. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    path = ROOT / "cuda" / "kv_copy.cu"
    if not path.exists():
        raise EngineUnavailableError(f"the kernels' source is not installed ({path} is missing)")
    return path


def kernel_text() -> str:
    """Return the text for NVRTC.

    cupy keeps compiled kernels by this text alone, so it has a digest of the headers. Raises the
    errors of :func:`kernel_path`.
    """
    return f"/* {digest()} */\n{kernel_path().read_text(encoding='utf-8')}"


def digest() -> str:
    """Return a digest of all source files of the kernels."""
    found = hashlib.sha256()
    for path in sorted([*(ROOT / "cuda").rglob("*.[ch]*"), *SHARED]):
        found.update(path.read_bytes())
    return found.hexdigest()


def compile_host(source: Path, target: Path, *flags: str) -> None:
    """Compile a source for this CPU. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise EngineUnavailableError("there is no C++ compiler here (g++) to build the kernels")
    include = (f"-I{ROOT}", f"-I{ROOT / 'cuda'}")
    command = [compiler, *HOST_OPTIONS, *flags, *include, str(source), "-o", str(target)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        first = next(iter(found.stderr.splitlines()), "no message")
        raise EngineUnavailableError(f"{compiler} cannot build the kernels: {first}")
