# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A place at a link that is closed while threads ask about it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from beluga.transfer import Direction, IoHandle, Link


def test_whoever_asks_beside_a_close_finds_a_whole_place_or_none(tmp_path: Path) -> None:
    link = Link("closing", directory=tmp_path)
    for _ in range(40):
        place = IoHandle(link)
        assert place.handle
        over = threading.Event()

        def ask(place: IoHandle = place, over: threading.Event = over) -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    place.watch()
                    place.stat(Direction.READ)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        place.close()
        over.set()
        for thread in threads:
            thread.join()
        assert place.stat(Direction.READ).queued == 0
    link.close()
