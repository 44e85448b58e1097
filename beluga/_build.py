# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Builds the C core with cffi, which reads the headers that C compiles; a filter drops what only
the preprocessor understands. ``setup.py`` names ``core``; tests build the core again, over the
simulator's verbs (``tests/native``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

CORE_HEADERS = (
    "format/pool_format.h",
    "format/block_limit.h",
    "format/placement.h",
    "api/error.h",
    "api/coherence.h",
    "api/figures.h",
    "api/pool.h",
    "api/rpc.h",
    "api/index.h",
    "api/iosched.h",
    "api/transfer.h",
    "api/disk.h",
    "api/kvcache.h",
    "api/check.h",
    "api/verify.h",
    "api/prefix.h",
    "api/routing.h",
    "index/hash.h",
    "index/evict_policy.h",
    "index/tier.h",
)
QUEUE_HEADERS = ("format/dsa.h", "api/dsa_queue.h")
# The simulator has its own device. The last one is for the queue in software that tests have.
DSA_HEADERS = (*QUEUE_HEADERS, "api/dsa.h", "dsa/execute.h")
CUDA_HEADERS = ("api/cuda.h",)  # the simulator has no GPU

WARNINGS = ["-Wall", "-Wextra", "-Wundef", "-Wvla", "-Wno-unused-function"]


def cdef(headers: tuple[str | Path, ...]) -> str:
    """Return the headers as cffi reads them: without preprocessor lines. Relative paths are in
    ``csrc/``.
    """
    lines = [line for name in headers for line in (CSRC / name).read_text().splitlines()]
    return "\n".join(line for line in lines if not line.startswith("#"))


def format_hash() -> int:
    """Return 64 bits over every declaration of the pool format; comments and white space do not
    count.
    """
    text = re.sub(r"/\*.*?\*/", " ", cdef(("format/pool_format.h",)), flags=re.DOTALL)
    digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
    return int.from_bytes(digest[:8], "little")


# A comment of a field that begins with the name of its metric.
_FIGURE = re.compile(r"\w+ (\w+); +/\* ([a-z_]+(?:{\w+=\"\w+\"})?): (.*?) ?\*/", re.DOTALL)


def figures() -> str:
    """Return the table of api/figures.h as a string of C: lines of struct, field, metric and
    meaning.
    """
    text = (CSRC / "api/figures.h").read_text()
    rows = [
        [name, field, metric, re.sub(r"\s*\n\s*\* ", " ", meaning)]
        for body, name in re.findall(r"typedef struct \w+ {(.*?)^} (\w+);", text, re.DOTALL | re.M)
        for field, metric, meaning in _FIGURE.findall(body)
    ]
    return json.dumps("\n".join("\t".join(row) for row in rows))


# The calls from C into Python: a handler that was registered there (beluga/rpc/server.py), and a
# copy engine (beluga/kvcache/engine.py).
CALLBACKS = """
extern "Python" int bl_python_handler(void *context, bl_call *call);
extern "Python" int bl_python_engine_start(void *context, const bl_plan *plan, int write,
                                           void **copy);
extern "Python" int bl_python_engine_wait(void *context, void *copy);
"""


def builder(
    name: str,
    headers: tuple[str | Path, ...],
    source: str = "beluga.c",
    folders: tuple[Path, ...] = (CSRC,),
    flags: tuple[str, ...] = (),
) -> FFI:
    """Return the builder of the extension ``name`` from a C file in one of the folders."""
    ffi = FFI()
    ffi.cdef(cdef(headers))
    ffi.cdef(CALLBACKS)
    ffi.cdef("extern const char *const bl_figures;")
    strict = ["-Werror"] if os.environ.get("BELUGA_WERROR") else []
    ffi.set_source(
        name,
        f'#include "{source}"\nstatic const char *const bl_figures = {figures()};\n',
        include_dirs=[str(folder) for folder in folders],
        define_macros=[("BL_FORMAT_HASH", f"0x{format_hash():016x}ull")],
        depends=[str(path) for folder in folders for path in sorted(folder.rglob("*.[ch]"))],
        # Without fused operations, so that costs are the same on every machine, and as in Python.
        extra_compile_args=[
            *("-std=gnu11", "-O2", "-ffp-contract=off", "-fvisibility=hidden"),
            *(*WARNINGS, *strict, *flags),
        ],
        libraries=["pthread", "m", "dl"],
    )
    return ffi


def core() -> FFI:
    """Return the builder of ``_core``, which has the verbs of ``csrc/coherence/coherence.h`` as
    instructions.
    """
    return builder("beluga._core", (*CORE_HEADERS, *DSA_HEADERS, *CUDA_HEADERS))
