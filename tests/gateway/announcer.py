# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Publishes an engine's KV events for a test."""

from __future__ import annotations

import time
from pathlib import Path

import pytest


class Announcer:
    """An engine's side of KV events: it publishes, and replays on request."""

    def __init__(self, folder: Path) -> None:
        zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
        self._context = zmq.Context()
        self.events, self.replay = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self._live = self._context.socket(zmq.XPUB)
        self._live.bind(self.events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay)
        self._sent: list[list[bytes]] = []
        self.replays = 0
        self.block_size = 16

    def subscribed(self) -> bool:
        return bool(self._live.poll(0))

    def stored(self, tokens: list[int], first_name: int, *, live: bool = True) -> None:
        count = len(tokens) // self.block_size
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(first_name, first_name + count)),
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": self.block_size,
            "lora_id": None,
            "medium": "GPU",
        }
        self.publish([event], live=live)

    def publish(self, events: object, *, live: bool = True) -> None:
        """Send any events, including invalid ones."""
        import msgspec

        number = len(self._sent).to_bytes(8, "big")
        frames = [b"", number, msgspec.msgpack.encode([time.time(), events, None])]
        self._sent.append(frames)
        if live:
            self._live.send_multipart(frames)

    def answer(self) -> None:
        """Serve requests for replays."""
        while self._router.poll(0):
            who, _, first = self._router.recv_multipart()
            self.replays += 1
            for _, number, payload in self._sent[int.from_bytes(first, "big") :]:
                self._router.send_multipart([who, b"", number, payload])
            self._router.send_multipart([who, b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._context.destroy(linger=0)
