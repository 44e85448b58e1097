# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls as another user."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

NOBODY = 65534


def as_nobody(work: Callable[[], object], groups: Sequence[int] = ()) -> str:
    """Run ``work`` in a forked child, as an unprivileged user in these groups if this is root.
    Returns "done" or the name of its error. That user may not be able to read this interpreter's
    files, so no new program is started.
    """
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups(groups)
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()
            os.write(write, b"done")
        except Exception as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        return answer.read()
