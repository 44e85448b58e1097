# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Text files that people write: UTF-8, or what a byte order mark names.

Editors and spreadsheets of Windows put such a mark in front; it is never a part of the text.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from pathlib import Path
from typing import TextIO

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MARK_SIZE_MAX = 4  # bytes


def decode_text(data: bytes) -> str:
    """Decode the whole content of a text file, without its mark. Raises UnicodeDecodeError."""
    return data.decode(_encoding(data))


def read_text(path: Path) -> str:
    """Read a whole text file, without its mark. Raises OSError or UnicodeDecodeError."""
    return decode_text(path.read_bytes())


def read_regular_text(path: Path, size_max: int) -> str:
    """Read a whole text file of at most this many bytes, without its mark. It must be a regular
    file, so that the read never waits. Raises OSError or UnicodeDecodeError.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        data = file.read(size_max + 1)
    if len(data) > size_max:
        raise OSError(errno.EFBIG, f"it has more than {size_max} bytes", str(path))
    return decode_text(data)


def open_text(path: Path) -> TextIO:
    """Open a text file for reading behind its mark, with line ends as they are. Raises OSError."""
    with path.open("rb") as file:
        encoding = _encoding(file.read(_MARK_SIZE_MAX))
    return path.open(encoding=encoding, newline="")


def _encoding(head: bytes) -> str:
    return next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")
