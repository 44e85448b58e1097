# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Compile the kernels for a GPU by NVRTC, once: the cubin is kept in the user's cache folder.

The kernels' source is in ``csrc/`` beside the package. An installed package has it in the folder
``kernels``, which ``setup.py`` creates from the necessary files.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from beluga import config
from beluga.errors import EngineUnavailableError

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "kernels"
ROOT = _INSTALLED if _INSTALLED.is_dir() else _HERE.parents[2] / "csrc"

# The last one is for prototypes of the C core in shared headers, which NVRTC otherwise rejects.
OPTIONS = (
    "--std=c++17",
    f"-I{ROOT}",
    f"-I{ROOT / 'cuda'}",
    f"-I{ROOT / 'cuda' / 'nvrtc'}",
    "-default-device",
)
_PATTERN = "libnvrtc.so.*"
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_TOOLKIT = Path("/usr/local/cuda/lib64")
MISSING = "the CUDA engine needs NVRTC; pip install 'beluga-kv[cuda13]' (or [cuda12])"


def kernel_path() -> Path:
    """Return the path of ``kv_copy.cu``. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    path = ROOT / "cuda" / "kv_copy.cu"
    if not path.exists():
        raise EngineUnavailableError(f"the kernels' source is not installed ({path} is missing)")
    return path


def digest() -> str:
    """Return a digest of all source files of the kernels."""
    found = hashlib.sha256()
    headers = [path for name in ("api", "format") for path in (ROOT / name).glob("*.h")]
    cuda = ROOT / "cuda"
    for path in sorted([*cuda.glob("*.cu*"), *(cuda / "nvrtc").glob("*.h"), *headers]):
        found.update(path.read_bytes())
    return found.hexdigest()


def installed() -> Iterator[str]:
    """Yield the paths of NVRTC libraries: of NVIDIA's wheels, of torch, of a toolkit."""
    for folder in map(Path, sys.path):
        for pattern in (f"nvidia/*/lib/{_PATTERN}", f"torch/lib/{_PATTERN}"):
            yield from map(str, sorted(folder.glob(pattern), reverse=True))
    yield from map(str, sorted(_TOOLKIT.glob(_PATTERN), reverse=True))


class Nvrtc:
    """One NVRTC library. Raises OSError if it cannot be loaded."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, architecture: str) -> bytes:
        """Return the kernels' cubin for an architecture such as ``sm_90``.

        Raises :class:`~beluga.errors.EngineUnavailableError`.
        """
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        text = kernel_path().read_bytes()
        self._call("CreateProgram", ctypes.byref(program), text, b"kv_copy.cu", 0, None, None)
        options = [*OPTIONS, f"-arch={architecture}"]
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        try:
            if self._library.nvrtcCompileProgram(program, len(options), given):
                self._call("GetProgramLogSize", program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value)
                self._call("GetProgramLog", program, log)
                lines = log.value.decode(errors="replace").splitlines()
                first = next(iter(lines), "no message")
                raise EngineUnavailableError(
                    f"the kernels cannot be compiled for {architecture} by NVRTC "
                    f"{'.'.join(map(str, self.version))}: {first}"
                )
            self._call("GetCUBINSize", program, ctypes.byref(size))
            cubin = ctypes.create_string_buffer(size.value)
            self._call("GetCUBIN", program, cubin)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))
        return cubin.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"nvrtc{name}")(*arguments)
        if status:
            raise EngineUnavailableError(f"nvrtc{name} failed with status {status}")


def find(path: str | None, cuda: int) -> Nvrtc:
    """Return the NVRTC of a path, or the first installed one that is not newer than a driver for
    this major version of CUDA. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    newer: Nvrtc | None = None
    for each in [path] if path else [*installed(), *_SONAMES]:
        try:
            found = Nvrtc(each)
        except OSError:
            continue
        if found.version[0] <= cuda:
            return found
        newer = newer or found
    if newer is not None:
        raise EngineUnavailableError(
            f"NVRTC {newer.version[0]} needs a newer driver than this one, of CUDA {cuda}; "
            f"pip install 'beluga-kv[cuda{cuda}]'"
        )
    raise EngineUnavailableError(MISSING)


def cubin_path(nvrtc: Nvrtc, architecture: str) -> Path:
    """Return where the cubin is kept: its name depends on everything that it is made of."""
    inputs = " ".join((digest(), architecture, *map(str, nvrtc.version)))
    key = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    return config.cache_dir() / f"kernels-{architecture}-{key}.cubin"


def keep(path: Path, cubin: bytes) -> None:
    """Write a cubin, at once; without such a folder it is not kept."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        Path(draft).replace(path)
    except OSError:
        return
