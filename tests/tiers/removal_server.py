# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Serves a pool over stores that cannot delete, until it is killed: ``POOL FOLDER ...``.
``-FOLDER`` names a former store, which is dropped.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from beluga import IndexServer, Pool
from beluga.tiers import TierService
from beluga.tiers.remote import RefusedError, RemoteTier


class Folder:
    """Objects as files, which cannot be deleted."""

    batch, threads = 64, 4

    def __init__(self, path: Path) -> None:
        self._path = path

    def _file(self, name: str) -> Path:
        return self._path / name.replace("/", "_")

    def get(self, name: str) -> bytes | None:
        file = self._file(name)
        return file.read_bytes() if file.exists() else None

    def put(self, name: str, data: memoryview) -> None:
        part = self._file(f"{name}.{threading.get_ident()}")
        part.write_bytes(data)
        part.replace(self._file(name))

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self._file(name).exists() for name in names]

    def delete(self, names: Sequence[str]) -> int:
        raise RefusedError("nobody deletes here")

    def close(self) -> None:
        pass


def main() -> None:
    path, *words = sys.argv[1:]
    folders = [Path(word) for word in words if not word.startswith("-")]
    with Pool.open([path]) as pool:
        server = IndexServer(pool)
        for word in words:
            if word.startswith("-"):
                server.give_up_tier(word[1:])
        tiers = [RemoteTier(Folder(folder), name=str(folder)) for folder in folders]
        service = TierService(server, pool, tiers)
        server.start()
        service.start()
        os.write(1, b"serving %d\n" % server.lower_stat().removal_parked)
        threading.Event().wait()


if __name__ == "__main__":
    main()
