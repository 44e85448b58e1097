# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The task for a prefill worker: a typed message, MessagePack on the wire, never pickled.

It carries the fields of Dynamo's RemotePrefillRequest, except the addresses of a decode engine's
blocks: KV goes through the pool, where the decode engine finds it by the prompt's own hashes.
"""

from __future__ import annotations

import time

import msgspec

from beluga.errors import TaskError

# This fits a prompt of 128 k tokens, packed in at most 5 bytes each, with its sampling parameters.
# Together with a queue's own header a message has at most 1 MiB.
TASK_SIZE_MAX = (1 << 20) - 64

PATHS = ("/v1/completions", "/v1/chat/completions")
"""The paths of an engine that a task may contain. A client with access to the queue reaches
engines, whose other paths load adapters, put the engine to sleep, or call any method.
"""

MAX_AGE_S = 600.0  # Dynamo's JetStream streams: 10 minutes (lib/runtime/src/transports/nats.rs)


class PrefillTask(msgspec.Struct, frozen=True, kw_only=True, tag="prefill-1"):
    """A prompt to be prefilled into the pool.

    ``request_id`` identifies the request. Two tasks of one id are the same work, so a worker may
    repeat or skip the second. The prompt is exactly one of ``tokens`` (token ids), ``text``, and
    ``body``, which is an OpenAI request as its client sent it to ``path``. ``body`` is for prompts
    that only the engine can build (from a chat's template, tools, a cache salt).
    """

    request_id: str
    model: str
    tokens: list[int] | None = None
    text: str | None = None
    body: bytes | None = None
    path: str = "/v1/completions"
    sampling: dict[str, float | int | str | bool] = {}
    block_keys: list[bytes] = []  # the keys of blocks that the pool lacks, if known
    deadline: float = 0.0  # seconds since 1970, after which no client waits; 0 means MAX_AGE_S

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed. Hosts' clocks are assumed to agree to a second."""
        return self.deadline != 0 and time.time() > self.deadline + 1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PrefillTask)


def _check(task: PrefillTask) -> None:
    prompts = sum(prompt is not None for prompt in (task.tokens, task.text, task.body))
    if not task.request_id:
        raise TaskError("a task has no request_id; give each request a name of its own")
    if task.path not in PATHS:
        raise TaskError(f"a task's path is {task.path[:40]!r}; give one of {', '.join(PATHS)}")
    if prompts != 1:
        raise TaskError(f"a task has {prompts} prompts; give one of tokens, text and body")


def encode_task(task: PrefillTask) -> bytes:
    """Encode a task. Raises TaskError unless it has a request_id, one prompt, and at most
    TASK_SIZE_MAX bytes.
    """
    _check(task)
    data = _encoder.encode(task)
    if len(data) > TASK_SIZE_MAX:
        raise TaskError(
            f"a task has {len(data)} bytes, more than {TASK_SIZE_MAX}; prefill that prompt locally"
        )
    return data


def decode_task(data: bytes | memoryview) -> PrefillTask:
    """Decode a task. Raises TaskError for other bytes, because a queue's content is foreign
    input.
    """
    try:
        task = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(
            f"not a prefill task: {error}; does another program use the queue?"
        ) from error
    _check(task)
    return task
