# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A stand-in for a GPU: a library with the functions of libcuda and NVRTC (``stub.cu``).

It is compiled on demand and kept in the user's cache folder. A process may have any number of such
GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from beluga import config
from beluga.errors import EngineUnavailableError
from beluga.transfer import CudaDevice
from beluga.transfer.cuda.nvrtc import ROOT, digest

SOURCE = Path(__file__).with_name("stub.cu")
_OPTIONS = ("-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, with the functions ``stub_`` that control it. Raises
    :class:`~beluga.errors.EngineUnavailableError`."""
    # Machines of several architectures may share a home directory.
    inputs = " ".join((platform.machine(), digest(), *_OPTIONS, SOURCE.read_text()))
    name = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    target = config.cache_dir() / f"cuda-stub-{name}.so"
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            draft = Path(folder) / target.name
            compile_host(SOURCE, draft, "-O2", "-shared", "-fPIC", "-fvisibility=hidden")
            draft.replace(target)
    return ctypes.CDLL(str(target))


class StandIn(CudaDevice):
    """One GPU of the library, or another one. Kernels run on this CPU."""

    def __init__(self, index: int | None = None, name: str = "cuda-host") -> None:
        self.library = library()
        self.index: int = self.library.stub_device() if index is None else index
        path = self.library._name
        super().__init__(self.index, library=path, nvrtc=path, name=name)


def compile_host(source: Path, target: Path, *flags: str) -> None:
    """Compile a source for this CPU. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise EngineUnavailableError("there is no C++ compiler here (g++) to build the kernels")
    include = (f"-I{ROOT}", f"-I{ROOT / 'cuda'}")
    command = [compiler, *_OPTIONS, *flags, *include, str(source), "-o", str(target)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        first = next(iter(completed.stderr.splitlines()), "no message")
        raise EngineUnavailableError(f"{compiler} cannot build the kernels: {first}")
