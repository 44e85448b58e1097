# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The readers of trace files, by format:

* ``mooncake``: JSONL of timestamp (ms), input_length, output_length, hash_ids
* ``weka``: a JSON session with t (s), in, out, hash_ids that are valid only in this file; or a
  directory of such sessions, each of which starts at 0
* ``azure``: CSV of TIMESTAMP, ContextTokens, GeneratedTokens: only lengths, nothing is shared
* ``vllm``: JSONL of vLLM's benchmark: token ids (as LLMServingSim writes them) or a prompt's text
* ``sharegpt``: a JSON list of conversations; the first turn is the prompt, the second the answer
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from beluga.errors import TraceError
from beluga.replay import Request, read_trace
from beluga.simulate.trace import Prompt, Trace, make_trace

_TOKEN_CHARACTERS = 4  # characters of English text that count as a token, without a tokenizer
_LINE_SIZE_MAX = 64 << 20  # a prompt of ten million tokens; other files may have no line ends
_WHOLE_SIZE_MAX = 4 << 30  # of a format that is one JSON value
_BLOCK_TOKENS = 16  # vLLM's block size, for formats without blocks
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _WekaRequest(msgspec.Struct):
    t: float
    input_tokens: int = msgspec.field(name="in")
    output_tokens: int = msgspec.field(name="out")
    hash_ids: list[int] = []


class _WekaSession(msgspec.Struct):
    block_size: int
    requests: list[_WekaRequest]


class _VllmRequest(msgspec.Struct):
    input_tok_ids: list[int] | None = None
    prompt: str | list[int] | None = None
    output_toks: int | None = None
    output_tokens: int | None = None
    arrival_time_ns: float | None = None
    timestamp: float | None = None  # in seconds


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]


class _Chain:
    """Numbers for blocks of tokens, each with all blocks before it. They are exact, unlike
    hashes.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[object, ...]], int] = {}

    def blocks(self, tokens: Sequence[object], size: int) -> list[int]:
        parent, found = -1, []
        for at in range(0, len(tokens) - size + 1, size):
            key = (parent, tuple(tokens[at : at + size]))
            parent = self._numbers.setdefault(key, len(self._numbers))
            found.append(parent)
        return found


def _mooncake(path: Path) -> tuple[int, list[Prompt]]:
    requests = read_trace(path)
    fits = [
        size
        for size in (512, 16, 32, 64, 128, 256, 1024)
        if all(-(-r.input_length // size) == len(r.hash_ids) for r in islice(requests, 1000))
    ]
    return (fits or [512])[0], [
        Prompt(r.timestamp / 1e3, r.input_length, r.output_length, r.hash_ids) for r in requests
    ]


def _weka(path: Path) -> tuple[int, list[Prompt]]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path} has no *.json in it; name a directory of weka sessions")
    sizes, prompts, offset = set(), [], 0
    for file in files:
        session = _decoded(file, _WekaSession, "a session has block_size and requests")
        sizes.add(session.block_size)
        for request in session.requests:
            shifted = [block + offset for block in request.hash_ids]
            prompts.append(Prompt(request.t, request.input_tokens, request.output_tokens, shifted))
        offset += 1 + max((max(r.hash_ids, default=0) for r in session.requests), default=0)
    if len(sizes) != 1 or min(sizes) <= 0:
        raise TraceError(f"{path}: sessions have blocks of {sorted(sizes)} tokens; simulate apart")
    return sizes.pop(), prompts


def _azure(path: Path) -> tuple[int, list[Prompt]]:
    prompts = []
    with path.open(newline="") as lines:
        rows = csv.DictReader(lines)
        if not set(_AZURE_COLUMNS) <= set(rows.fieldnames or ()):
            raise TraceError(f"{path}:1: no columns {', '.join(_AZURE_COLUMNS)}")
        for number, row in enumerate(rows, 2):
            try:
                at, tokens_in, tokens_out = (row[name] for name in _AZURE_COLUMNS)
                prompts.append(Prompt(_seconds(at), int(tokens_in), int(tokens_out), ()))
            except (ValueError, TypeError):
                raise TraceError(
                    f"{path}:{number}: a line has a date with time and two numbers of tokens"
                ) from None
    return _BLOCK_TOKENS, prompts


def _seconds(text: str) -> float:
    """Parse ``2023-11-16 18:17:03.9799600``. Python 3.10 reads at most six of the seven digits."""
    whole, _, fraction = text.partition(".")
    moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.timezone.utc)
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _vllm(path: Path) -> tuple[int, list[Prompt]]:
    chain, prompts = _Chain(), []
    decoder = msgspec.json.Decoder(_VllmRequest)
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LINE_SIZE_MAX), b""), 1):
            if len(line) == _LINE_SIZE_MAX:
                raise TraceError(f"{path}:{number}: a line of {_LINE_SIZE_MAX} bytes or more")
            if line.isspace():
                continue
            try:
                request = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise TraceError(f"{path}:{number}: {error}") from None
            text = request.input_tok_ids if request.prompt is None else request.prompt
            if not text:
                raise TraceError(f"{path}:{number}: neither input_tok_ids nor a prompt")
            asked = request.output_toks or request.output_tokens or 1
            prompts.append(_prompt(chain, text, asked, _arrival(request)))
    return _BLOCK_TOKENS, prompts


def _arrival(request: _VllmRequest) -> float | None:
    if request.arrival_time_ns is not None:
        return request.arrival_time_ns / 1e9
    return request.timestamp


def _sharegpt(path: Path) -> tuple[int, list[Prompt]]:
    what = "a list of objects with conversations"
    chain = _Chain()
    turns = [found.conversations for found in _decoded(path, list[_Conversation], what)]
    return _BLOCK_TOKENS, [
        _prompt(chain, asked.value, max(1, len(answer.value) // _TOKEN_CHARACTERS), None)
        for asked, answer, *_ in (found for found in turns if len(found) > 1)
        if asked.value
    ]


def _prompt(chain: _Chain, text: str | list[int], out: int, arrival_s: float | None) -> Prompt:
    """Make a prompt from token ids, or from text, of which _TOKEN_CHARACTERS characters count as
    one token.
    """
    if isinstance(text, str):
        tokens: Sequence[object] = [
            text[at : at + _TOKEN_CHARACTERS] for at in range(0, len(text), _TOKEN_CHARACTERS)
        ]
    else:
        tokens = text
    return Prompt(arrival_s, len(tokens), out, chain.blocks(tokens, _BLOCK_TOKENS))


def _decoded(path: Path, kind: Any, what: str) -> Any:
    if path.stat().st_size > _WHOLE_SIZE_MAX:
        raise TraceError(f"{path} has more than the {_WHOLE_SIZE_MAX} bytes that are read at once")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}: {error}; {what}") from None


_READERS: dict[str, Callable[[Path], tuple[int, list[Prompt]]]] = {
    "mooncake": _mooncake,
    "weka": _weka,
    "azure": _azure,
    "vllm": _vllm,
    "sharegpt": _sharegpt,
}
FORMATS = tuple(_READERS)


def load_trace(path: Path, form: str | None = None, *, rate: float = 1.0) -> Trace:
    """Load the trace at ``path``. The format is guessed from the content unless ``form`` names it.
    ``rate`` is in requests per second, for formats without times. Raises TraceError, with the line
    if possible.
    """
    if form is not None and form not in _READERS:
        raise TraceError(f"there is no format {form!r}; choose one of {', '.join(FORMATS)}")
    if not 0 < rate < math.inf:
        raise TraceError(f"--rate has to be more than 0 requests a second, and finite, not {rate}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(f"{path} is a pipe or a device, which may have no end; name a file")
    try:
        size, prompts = _READERS[form or _guess(path)](path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; name a trace") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not text; name a trace") from None
    return make_trace(path.name, size, prompts, rate)


def trace_requests(path: Path, form: str | None = None, *, rate: float = 1.0) -> list[Request]:
    """Load the trace at ``path`` for a replay, whose requests name every block of their prompts.

    A format without blocks, or without a number for a prompt's last and partial block, gets
    numbers that no other request has. The arguments are those of :func:`load_trace`.
    """
    if path.is_file() and form is None:
        form = _guess(path)
    if form == "mooncake" or (form is None and not path.is_dir()):  # a pipe is read only once
        return read_trace(path)
    trace = load_trace(path, form, rate=rate)
    fresh, found = itertools.count(trace.id_count), []
    for at, blocks in enumerate(trace.blocks()):
        size = -(-trace.input_tokens[at] // trace.block_tokens)
        found.append(
            Request(
                timestamp=trace.arrival_s[at] * 1e3,
                input_length=trace.input_tokens[at],
                output_length=trace.output_tokens[at],
                hash_ids=[*blocks, *itertools.islice(fresh, size - len(blocks))],
            )
        )
    return found


def _guess(path: Path) -> str:
    """Return the format that a file seems to have."""
    if path.is_dir():
        return "weka"
    with path.open("rb") as file:
        head = file.read(4096).lstrip()
    if b"ContextTokens" in head or path.suffix == ".csv":
        return "azure"
    if head.startswith(b"["):
        return "sharegpt"
    if path.suffix == ".json" or b'"hash_id_scope"' in head:
        return "weka"
    return "vllm" if b'"input_tok_ids"' in head or b'"prompt"' in head else "mooncake"
