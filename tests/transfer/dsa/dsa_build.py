# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Compiles the C core with changed lines: with a planted bug, or with a record of its
operations.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cffi import FFI
from dsa_schedule import Library

from beluga import _build
from beluga._ffi import ffi
from beluga.pool import Pool

GCC = shutil.which("gcc") or ""


def built(folder: Path, changes: Iterable[tuple[str, str, str]], more: str = "") -> Library:
    """Build the core with ``changes``: a file, a line that occurs once, and its replacement.

    ``more`` has declarations besides those of the product.
    """
    source = folder / "csrc"
    shutil.copytree(_build.CSRC, source)
    for file, line, becomes in changes:
        text = (source / file).read_text()
        assert text.count(line) == 1, f"{file} does not have {line!r} exactly once"
        (source / file).write_text(text.replace(line, becomes))
    target = folder / "changed.so"
    define = f"-DBL_FORMAT_HASH=0x{_build.format_hash():016x}ull"
    flags = ["-std=gnu11", "-O0", "-w", "-shared", "-fPIC", "-pthread", define, f"-I{source}"]
    subprocess.run([GCC, *flags, str(source / "beluga.c"), "-o", str(target)], check=True)
    own = FFI()
    own.cdef(_build.cdef((*_build.CORE_HEADERS, *_build.DSA_HEADERS)) + more)
    return Library(own, own.dlopen(str(target)))


@contextmanager
def opened_pool(library: Library, pool: Pool) -> Iterator[Any]:
    """The ``bl_pool *`` of ``_core``, with the type of this library."""
    handle = library.ffi.new("bl_pool **")
    mapping = pool._mapping
    devices = library.of("void *const *", ffi.cast("void **", mapping.addresses))
    superblocks = library.of("bl_superblock *", mapping.superblocks)
    assert library.lib.bl_pool_open(superblocks, devices, handle) == 0
    yield handle[0]
    library.lib.bl_pool_close(handle[0])
