# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Build the C core: one source, two extensions.

``_core`` has the verbs of ``csrc/coherence/coherence.h`` as instructions. ``_sim`` has them as a
simulator of hosts whose caches are not coherent. cffi reads the headers that C compiles; a
four-line filter drops what only the preprocessor understands. ``setup.py`` names ``core`` and
``sim``.
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
# The simulator has its own device.
DSA_HEADERS = (*QUEUE_HEADERS, "api/dsa.h")
# The simulator also exports the pure structures, so that models can be compared with them, and a
# queue with fault injection.
SIM_HEADERS = (
    *CORE_HEADERS,
    *QUEUE_HEADERS,
    "dsa/faults.h",
    "space/pages.h",
    "space/victims.h",
    "space/extent.h",
    "index/evict.h",
    "index/pins.h",
    "index/tasks.h",
    "api/sim.h",
)

WARNINGS = ["-Wall", "-Wextra", "-Wundef", "-Wvla", "-Wno-unused-function"]


def cdef(headers: tuple[str, ...]) -> str:
    """Return the headers as cffi reads them: without preprocessor lines."""
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


# The only call from C into Python: a handler that was registered there (beluga/rpc/server.py).
CALLBACKS = 'extern "Python" int bl_python_handler(void *context, bl_call *call);'


def builder(
    name: str, headers: tuple[str, ...], macros: list[tuple[str, str]], source: Path = CSRC
) -> FFI:
    """Return the builder of the extension ``beluga.NAME`` from the C of a folder."""
    ffi = FFI()
    ffi.cdef(cdef(headers))
    ffi.cdef(CALLBACKS)
    ffi.cdef("extern const char *const bl_figures;")
    strict = ["-Werror"] if os.environ.get("BELUGA_WERROR") else []
    ffi.set_source(
        f"beluga.{name}",
        f'#include "beluga.c"\nstatic const char *const bl_figures = {figures()};\n',
        include_dirs=[str(source)],
        define_macros=[("BL_FORMAT_HASH", f"0x{format_hash():016x}ull"), *macros],
        depends=[str(path) for path in sorted(source.rglob("*.[ch]"))],
        # Without fused operations, so that costs are the same on every machine, and as in Python.
        extra_compile_args=[
            *("-std=gnu11", "-O2", "-ffp-contract=off", "-fvisibility=hidden"),
            *(*WARNINGS, *strict),
        ],
        libraries=["pthread", "m"],
    )
    return ffi


core = builder("_core", (*CORE_HEADERS, *DSA_HEADERS), [])
sim = builder("_sim", SIM_HEADERS, [("BL_SIM", "1")])
