# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls in a forked child, also as another user; a child that holds what it inherits."""

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence

NOBODY = 65534


def in_child(work: Callable[[], object], fork: Callable[[], int] = os.fork) -> str:
    """Return the result of ``work`` in a forked child, or the name of its error, in a minute."""
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            os.write(write, str(work()).encode())
        except BaseException as error:  # a child must not return into pytest
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        if not select.select([stream], [], [], 60)[0]:
            os.kill(child, signal.SIGKILL)
        text = stream.read().decode()
    _, status = os.waitpid(child, 0)
    return text if status == 0 else f"died of {status}"


def as_nobody(work: Callable[[], object], groups: Sequence[int] = ()) -> str:
    """Run ``work`` in a forked child, as an unprivileged user in these groups if this is root.
    Returns "None" or the name of its error. That user may not be able to read this interpreter's
    files, so no new program is started.
    """

    def demoted() -> object:
        if os.geteuid() == 0:
            os.setgroups(groups)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return work()

    return in_child(demoted)


@contextlib.contextmanager
def surviving_child() -> Iterator[None]:
    """Have a forked child, which does nothing, until the end of the block."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)
