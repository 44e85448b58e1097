# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An I/O handle that is closed while threads use it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from beluga.transfer import Direction, IoHandle, Link


def test_an_acquire_during_a_close_gets_a_whole_member_or_none(tmp_path: Path) -> None:
    link = Link("closing", directory=tmp_path)
    for _ in range(40):
        handle = IoHandle(link)
        assert handle.handle
        over = threading.Event()

        def use(handle: IoHandle = handle, over: threading.Event = over) -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    handle.watch()
                    handle.stat(Direction.READ)

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        handle.close()
        over.set()
        for thread in threads:
            thread.join()
        assert handle.stat(Direction.READ).queued == 0
    link.close()
