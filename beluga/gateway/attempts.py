# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The attempts to serve one request, and the rule by which it may be sent once more.

Another worker is tried only while the client has not received a byte, and only if the request is
still executed once: the connection to the engine failed, or the engine responded that it is busy,
or the request only reads. An engine that aborts may continue to work on a request. So a prompt is
sent to another engine only if the first one's process has ended, and only once: a prompt that
crashes engines must not crash all of them.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from aiohttp import web

from beluga.gateway.engine import NOBODY, Engine, GatewayClient
from beluga.gateway.protocol import Refusal

COMPUTING = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/inference/v1/generate",
    )
)
"""Paths of requests that change nothing but caches. /v1/responses may call tools."""
_MAY_GO_ON = "the engine aborted, and may have executed the request, so it is not repeated"
_READS = ("GET", "HEAD", "OPTIONS")
_PROBES = 3  # checks of an engine that has aborted
_PROBE_S = 0.1


class UnansweredError(Exception):
    """An engine gave no response that may be forwarded."""

    def __init__(
        self,
        status: int,
        why: str,
        answer: web.Response | None = None,
        *,
        pause_s: float = 0.0,
        begun: bool = False,
    ) -> None:
        """``answer`` is a busy engine's response, for a client that no other engine serves, and
        ``pause_s`` the pause that it requested. ``begun``: the engine may have started to work on
        the request.
        """
        super().__init__(why)
        self.status = status
        self.answer = answer
        self.pause_s = pause_s
        self.begun = begun


class Attempts:
    """The sender of a request, and its attempts so far. Times are of ``time.perf_counter()``."""

    def __init__(
        self,
        client: GatewayClient = NOBODY,
        *,
        method: str = "POST",
        path: str = "",
        retries: int = 0,
        queue_s: float = 0.0,
    ) -> None:
        """``retries`` is the largest number of other workers. A worker that was busy is tried again
        for ``queue_s`` seconds.
        """
        self.client = client
        self.tried: set[int] = set()  # workers
        self.paused_until: dict[int, float] = {}  # by worker, which requested the pause
        self.last_s = time.perf_counter()  # when the request had been read, or the last one failed
        self.until_s = self.last_s + queue_s
        self._retries = retries
        self._reads = method in _READS
        self._computes = path in COMPUTING
        self._failures = 0  # attempts without any response
        self._aborted = False  # whether an engine aborted that may have started to work on it
        self._final: web.Response | Refusal | None = None

    async def may_retry(self, engine: Engine, error: UnansweredError) -> bool:
        """Record a failed attempt. Returns whether the request may be sent to another worker, or
        again to one that was busy.
        """
        worker = engine.worker.worker_id
        again = worker in self.tried
        self.tried.add(worker)
        self._failures += error.answer is None
        self._final = error.answer
        if error.begun and not self._reads:
            aborted, self._aborted = self._aborted, True
            if aborted or not self._computes or not await _has_ended(engine.url):
                self._final = Refusal(error.status, f"{_MAY_GO_ON}: {error}")
                return False
        self.last_s = time.perf_counter()
        if error.pause_s:
            self.paused_until[worker] = self.last_s + error.pause_s
        late = again and self.last_s > self.until_s
        if not late and max(len(self.tried), self._failures) <= self._retries:
            return True
        if self._final is None:
            text = f"no worker responds; the last one tried: {error}"
            self._final = Refusal(error.status, text, retry_after_s=1)
        return False

    def response(self, refusal: Refusal | None = None) -> web.Response:
        """Return the response of the last engine, which was busy, to a request that is not sent
        again. Without one, raises ``refusal``, or that of the last attempt.
        """
        if isinstance(self._final, web.Response):
            return self._final
        refusal = refusal or self._final
        assert refusal is not None  # noqa: S101  may_retry() has returned False
        raise refusal from None


async def _has_ended(url: str) -> bool:
    """Return whether an engine's process has ended: its port refuses connections. A terminating
    process may listen a moment longer than its connections last.
    """
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    for look in range(_PROBES):
        await asyncio.sleep(_PROBE_S * look)
        try:
            connected = asyncio.open_connection(address.hostname, port)
            _, writer = await asyncio.wait_for(connected, _PROBE_S)
        except ConnectionRefusedError:
            return True
        except (OSError, asyncio.TimeoutError):
            continue
        writer.close()
    return False
