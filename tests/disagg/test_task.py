# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Prefill tasks on the wire, and names of queues."""

from __future__ import annotations

import time

import pytest

from beluga.errors import QueueError

pytest.importorskip("msgspec", reason="msgspec is not installed")

from beluga.disagg import (
    TASK_SIZE_MAX,
    PrefillTask,
    decode_task,
    encode_task,
    queue_name,
)
from beluga.disagg.pool_queue import _packed, _unpacked


def test_an_encoded_task_decodes_to_the_same_task() -> None:
    task = PrefillTask(
        request_id="r",
        model="m",
        tokens=[1, 2, 128_000],
        sampling={"temperature": 0.5, "seed": 7, "stop": "\n"},
        block_keys=[b"\0" * 16],
        deadline=12.5,
    )
    assert decode_task(encode_task(task)) == task


def test_a_request_is_stored_unchanged() -> None:
    body = '{"messages": [{"role":"user","content":"caf\u00e9"}]}'.encode()
    task = PrefillTask(request_id="r", model="m", body=body, path="/v1/chat/completions")
    assert decode_task(encode_task(task)) == task


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x80", b"not a task", b"\xc1", b"\x93\x01\x02\x03"),
        encode_task(PrefillTask(request_id="r", model="m", text="t")).replace(
            b"\xa1t", b"\xa1\xff"
        ),
        *(b"\x81\xa1a" * 200_000, b"\xdd\xff\xff\xff\xff"),
    ],
    ids=[
        *("nothing", "an empty map", "text", "no MessagePack", "a list", "no UTF-8", "depth"),
        "a long list",
    ],
)
def test_invalid_bytes_are_rejected_as_a_task(data: bytes) -> None:
    with pytest.raises(QueueError, match="not a prefill task"):
        decode_task(data)


def test_a_task_is_for_its_engines_paths_only() -> None:
    with pytest.raises(QueueError, match="path"):
        encode_task(PrefillTask(request_id="r", model="m", text="a", path="@elsewhere/"))


def test_a_task_has_one_name_and_one_prompt() -> None:
    for task in (
        PrefillTask(request_id="r", model="m"),
        PrefillTask(request_id="r", model="m", tokens=[1], text="a"),
        PrefillTask(request_id="", model="m", tokens=[1]),
    ):
        with pytest.raises(QueueError, match="give"):
            encode_task(task)


def test_the_size_of_a_task_is_bounded() -> None:
    with pytest.raises(QueueError, match="prefill that prompt locally"):
        encode_task(PrefillTask(request_id="r", model="m", text="a" * TASK_SIZE_MAX))


def test_a_task_expires() -> None:
    def task(deadline: float) -> PrefillTask:
        return PrefillTask(request_id="r", model="m", text="a", deadline=deadline)

    assert not task(0).expired
    assert not task(time.time() + 60).expired
    assert task(time.time() - 60).expired


def test_model_names_are_valid_queue_names() -> None:
    assert queue_name("Qwen/Qwen3-0.6B") == "Qwen_Qwen3-0_6B"
    assert queue_name("a\\b c>*") == "a_b_c__"


@pytest.mark.parametrize(
    ("size", "block"),
    [(0, 4096), (4092, 4096), (4093, 8192), (8188, 8192), (8189, 16384), (TASK_SIZE_MAX, 1 << 20)],
)
def test_a_task_in_the_pool_is_rounded_up_to_a_power_of_two(size: int, block: int) -> None:
    """The pool has few classes of blocks, and the largest task has 1 MiB."""
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    packed = _packed(data)
    assert packed.size == block
    assert _unpacked(packed) == data
