# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Builds the limit loops and the stopwatch that times them; ``setup.py`` refers to ``limit``."""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
NAMES = ("limit", "drive")


def cdef() -> str:
    """Return the headers for cffi, without preprocessor lines."""
    lines = [line for name in NAMES for line in (HERE / f"{name}.h").read_text().splitlines()]
    return "\n".join(line for line in lines if not line.startswith("#"))


def limit() -> FFI:
    """Return the builder of the extension."""
    ffi = FFI()
    ffi.cdef(cdef())
    ffi.set_source(
        "beluga_bench._limit",
        "\n".join(f'#include "{name}.c"' for name in NAMES),
        include_dirs=[str(HERE)],
        depends=[str(path) for path in sorted(HERE.glob("*.[ch]")) if path.name != "_limit.c"],
        extra_compile_args=[
            *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wundef", "-Wno-unused-function"),
            *(["-Werror"] if os.environ.get("BELUGA_WERROR") else []),
        ],
    )
    return ffi
