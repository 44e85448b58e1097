# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How many files this process may open, for libraries that do not survive a lack of files."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from beluga.errors import BelugaError

_USUALLY_OPEN = 16  # where /proc is not available
_ZMQ_CONTEXT = 5  # a ZMQ context and its two threads
_ZMQ_SOCKET = 3  # a socket, a connection of it, and its share of a monitor


def file_limit() -> int:
    """Return this process's limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def files_left() -> int:
    """Return how many more files this process may open."""
    listed = Path("/proc/self/fd")
    try:
        opened = len(list(listed.iterdir())) if listed.is_dir() else _USUALLY_OPEN
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return 0
    return max(0, file_limit() - opened)


def require_zmq_files(what: str, *, sockets: int, error: type[BelugaError] = BelugaError) -> None:
    """Raise ``error`` if this process may not open enough files for a ZMQ context with this many
    sockets. Call this before the context is made: libzmq aborts the process when it lacks a file.
    """
    needs, left = _ZMQ_CONTEXT + _ZMQ_SOCKET * sockets, files_left()
    if left < needs:
        raise error(
            f"{what} needs {needs} open files, but only {left} of this process's {file_limit()} "
            "are left; raise the limit (ulimit -n)"
        )
