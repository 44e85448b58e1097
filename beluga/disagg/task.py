# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a prefill worker is asked to do: a typed message, MessagePack on the wire, never pickled.

It carries what Dynamo's RemotePrefillRequest does, but for the addresses of a decode engine's
blocks: KV goes through the pool, where the decode engine finds it by the prompt's own hashes.
"""

from __future__ import annotations

import time

import msgspec

from beluga.errors import QueueError

# A prompt of 128 k tokens, packed in at most 5 bytes each, with room for its sampling parameters;
# with what a queue puts before it no more than 1 MiB.
TASK_SIZE_MAX = (1 << 20) - 64

MAX_AGE_S = 600.0  # Dynamo's JetStream streams: 10 minutes (lib/runtime/src/transports/nats.rs)


class PrefillTask(msgspec.Struct, frozen=True, kw_only=True, tag="prefill-1"):
    """One prompt to be prefilled into the pool.

    ``request_id`` names the request: two tasks of one id are the same work, so whoever sees an id
    again may do it again or leave it. The prompt is exactly one of ``tokens`` (token ids),
    ``text``, and ``body``: an OpenAI request as its client sent it to ``path``, for what the engine
    alone can make a prompt of (a chat's template, tools, a cache salt).
    """

    request_id: str
    model: str
    tokens: list[int] | None = None
    text: str | None = None
    body: bytes | None = None
    path: str = "/v1/completions"
    sampling: dict[str, float | int | str | bool] = {}
    block_keys: list[bytes] = []  # keys of the blocks that the pool is missing, if it is known
    deadline: float = 0.0  # seconds since 1970; nobody waits any more after it; 0: MAX_AGE_S

    @property
    def expired(self) -> bool:
        """Whether nobody waits for it any more. Clocks of hosts are taken to agree to a second."""
        return self.deadline != 0 and time.time() > self.deadline + 1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PrefillTask)


def _check(task: PrefillTask) -> None:
    prompts = sum(prompt is not None for prompt in (task.tokens, task.text, task.body))
    if not task.request_id:
        raise QueueError("a task has no request_id; give each request a name of its own")
    if not task.path.startswith("/v1/"):
        raise QueueError(f"a task's path is {task.path[:40]!r}; OpenAI's begin with /v1/")
    if prompts != 1:
        raise QueueError(f"a task has {prompts} prompts; give one of tokens, text and body")


def encode_task(task: PrefillTask) -> bytes:
    """Raises QueueError for a task without one name and one prompt, or above TASK_SIZE_MAX."""
    _check(task)
    data = _encoder.encode(task)
    if len(data) > TASK_SIZE_MAX:
        raise QueueError(
            f"a task of {len(data)} bytes; {TASK_SIZE_MAX} is the most: prefill that prompt locally"
        )
    return data


def decode_task(data: bytes | memoryview) -> PrefillTask:
    """Raises QueueError for bytes that are no task: what comes out of a queue is foreign input."""
    try:
        task = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise QueueError(
            f"not a prefill task: {error}; does another program use the queue?"
        ) from error
    _check(task)
    return task
