#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes the bundled trace, beluga/replay/conversations.jsonl, which commands use by default.

Its 1,200 requests are the turns of 120 synthetic conversations (beluga/replay/workload.py). It has
Mooncake's format, and its first line has its origin. With ``--check`` nothing is written; the exit
status is 1 if the file is not up to date.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
from check_option import is_check

from beluga.replay import BUNDLED, Conversations, TraceRequest, make_workload

BLOCK_TOKENS = 512  # as in Mooncake's traces
TURN_INTERVAL_MS = 40_000.0
ANSWER_TOKENS = (32, 512)
ORIGIN = "made up by Beluga's scripts/dev/gen_trace.py; nobody sent these requests"


def requests() -> list[TraceRequest]:
    """Return the trace. It is always the same."""
    answers = Random(1)  # noqa: S311  a workload, not a secret
    shape = Conversations(block_tokens=BLOCK_TOKENS, turn_interval_ms=TURN_INTERVAL_MS)
    return [
        msgspec.structs.replace(one, output_length=answers.randint(*ANSWER_TOKENS))
        for one in make_workload(shape)
    ]


def main() -> None:
    """Write the trace, or compare it."""
    check = is_check(__doc__)
    encode = msgspec.json.Encoder().encode
    first, *rest = map(msgspec.structs.asdict, requests())
    text = b"".join(encode(one) + b"\n" for one in [first | {"origin": ORIGIN}, *rest])
    if check:
        if not BUNDLED.exists() or BUNDLED.read_bytes() != text:
            raise SystemExit(f"{BUNDLED.name} is stale; run scripts/{Path(__file__).name}")
        return
    BUNDLED.write_bytes(text)


if __name__ == "__main__":
    main()
