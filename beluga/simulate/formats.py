# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The readers of trace files, by format. Objects of JSON may be one per line or in one list:

* ``mooncake``: objects of timestamp, input_length, output_length, hash_ids; Bailian's traces, too
* ``weka``: a JSON session with t (s), in, out, hash_ids that are valid only in this file; or a
  directory of such sessions, each of which starts at 0
* ``azure``: CSV of TIMESTAMP (with or without a time zone), ContextTokens, GeneratedTokens
* ``burstgpt``: CSV of Timestamp (s), Request tokens, Response tokens; without failed requests
* ``vllm``: objects of vLLM's benchmark: token ids (as LLMServingSim writes them) or a prompt's text
* ``sharegpt``: objects of conversations; the first turn is the prompt, the second the answer
* ``openai``: objects of messages, or requests of OpenAI's batches (chats or completions); the last
  answer is the output

``azure`` and ``burstgpt`` have only lengths: nothing is shared. In formats of numbers each item
counts, so the file is rejected if one cannot be read. In formats of text (vllm, sharegpt, openai)
such an item is skipped and counted, unless there are many.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from beluga.arguments import StrPath, path_of
from beluga.errors import TraceError
from beluga.replay import DEFAULT_BLOCK_TOKENS, TraceRequest, default_requests, read_trace
from beluga.simulate.items import Item, csv_rows, head_keys, json_items, whole_json
from beluga.simulate.trace import TIME_UNITS, Reading, Trace, TraceEntry, make_trace

_TOKEN_CHARACTERS = 4  # characters of English text that count as a token, without a tokenizer
_TOKENS_MAX = 100_000_000  # per request; a larger number means a damaged file
_TIME_MAX = 1e15  # in the file's unit: milliseconds since 1970 have 13 digits
_EPOCH_MS_MIN = 1e11  # as seconds, this is the year 5138
_EPOCH_S_MIN = 1e9  # as milliseconds, a trace that starts after 11 days
_BLOCK_TOKENS = 16  # vLLM's block size, for formats without blocks
_BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024, 8, 4, 2, 1, 2048, 4096)  # the likely first
_FITTING_SHARE = 0.9  # fraction of the requests that must fit the size of blocks
_FAST_GAP_S = 60.0  # times with fractions are seconds if requests come more often
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d+))?"
    r"\s*(?:(Z|UTC|GMT)|([+-])(\d\d):?(\d\d)?)?",
    re.IGNORECASE,
)

_TIME_NAMES = re.compile("time(?!out)|arriv|created")

_T = TypeVar("_T")


class _MooncakeRequest(msgspec.Struct):
    timestamp: float | str
    input_length: int
    output_length: int
    hash_ids: list[int]


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
    timestamp: float | str | None = None


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]


class _Part(msgspec.Struct):
    text: str | None = None  # None for an image or a sound


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[Any] | None = None

    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else [_Part(self.content)]
        called = json.dumps(self.tool_calls) if self.tool_calls else ""
        return "".join(part.text or "" for part in parts) + called


class _Chat(msgspec.Struct):
    messages: list[_Message] = []
    prompt: str | list[int] | None = None  # of completions, in place of messages
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    timestamp: float | str | None = None


class _Batched(msgspec.Struct):
    body: _Chat
    timestamp: float | str | None = None


class _Chain:
    """Numbers for blocks of tokens, each with all blocks before it. They are exact, unlike
    hashes.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[object, ...]], int] = {}

    def blocks(self, tokens: Sequence[object], size: int) -> list[int]:
        parent, numbers = -1, []
        for at in range(0, len(tokens) - size + 1, size):
            key = (parent, tuple(tokens[at : at + size]))
            parent = self._numbers.setdefault(key, len(self._numbers))
            numbers.append(parent)
        return numbers


def _mooncake(reading: Reading) -> list[TraceEntry]:
    def prompt(item: object) -> TraceEntry:
        request = _convert(item, _MooncakeRequest, _WHAT["mooncake"])
        if not all(0 <= block < 1 << 63 for block in request.hash_ids):
            raise TraceError(
                "hash_ids has a number below 0, or above 63 bits; number blocks from 0 on"
            )
        arrival = _moment(request.timestamp)
        return TraceEntry(arrival, request.input_length, request.output_length, request.hash_ids)

    prompts = list(_prompts(reading, json_items(reading.path), prompt))
    if not reading.block_given:
        _find_block_size(reading, prompts)
    return _with_unit(reading, prompts, _guess_unit)


def _find_block_size(reading: Reading, prompts: Sequence[TraceEntry]) -> None:
    """Find the size of blocks with which most prompts have as many blocks as they name; the last
    one may be partial, or left out by all. Raises TraceError if there is none.
    """
    named = [(prompt.input_tokens, len(prompt.blocks)) for prompt in prompts if prompt.blocks]
    for partial in (1, 0):  # is a partial block named?
        fits = {
            size: sum((tokens + partial * (size - 1)) // size == n for tokens, n in named)
            for size in _BLOCK_SIZES
        }
        size = max(fits, key=lambda prompt: fits[prompt])
        if fits[size] >= _FITTING_SHARE * len(named):
            reading.block_tokens = size
            others = len(named) - fits[size]
            reading.block_note = "from input_length and hash_ids; --block-tokens" + (
                f"; {others} of {len(named)} requests have another number of hash_ids"
                if others
                else ""
            )
            return
    raise TraceError(
        f"{reading.path}: input_length and hash_ids agree on no size of blocks ({size} tokens fit "
        f"{fits[size]} of {len(named)} requests); name it with --block-tokens"
    )


def _guess_unit(moments: Sequence[float]) -> str:
    """Mooncake's times are whole milliseconds; Bailian's are seconds with fractions. Others write
    seconds since 1970.
    """
    if min(moments) >= _EPOCH_S_MIN:
        return "s"
    fractions = sum(not moment.is_integer() for moment in moments)
    gap = (max(moments) - min(moments)) / max(1, len(moments) - 1)
    return "s" if 2 * fractions > len(moments) and gap < _FAST_GAP_S else "ms"


def _weka(reading: Reading) -> list[TraceEntry]:
    path = reading.path
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path} has no *.json in it; name a directory of weka sessions")
    sizes: set[int] = set()
    prompts: list[TraceEntry] = []
    offset = 0
    for file in files:
        try:
            session = _convert(whole_json(file), _WekaSession, _WHAT["weka"])
        except TraceError as error:
            text = str(error)
            raise TraceError(text if text.startswith(str(file)) else f"{file}: {text}") from None
        sizes.add(session.block_size)

        def prompt(item: _WekaRequest, offset: int = offset) -> TraceEntry:
            shifted = [block + offset for block in item.hash_ids]
            return TraceEntry(item.t, item.input_tokens, item.output_tokens, shifted)

        items = ((f"{file}: request {n}", request) for n, request in enumerate(session.requests, 1))
        prompts += _prompts(reading, items, prompt)
        offset += 1 + max((max(r.hash_ids, default=0) for r in session.requests), default=0)
    if len(sizes) != 1 or min(sizes) <= 0:
        raise TraceError(
            f"{path}: sessions have blocks of {sorted(sizes)} tokens; simulate them separately"
        )
    size = sizes.pop()
    if reading.block_given and reading.block_tokens != size:
        raise TraceError(f"{path} has blocks of {size} tokens; leave --block-tokens out")
    reading.block_tokens, reading.block_note = size, "by the file"
    return _with_unit(reading, prompts)


def _azure(reading: Reading) -> list[TraceEntry]:
    time, tokens_in, tokens_out = _AZURE_COLUMNS

    def prompt(row: Any) -> TraceEntry:
        moment = _date(row[time])
        if moment is None:
            raise TraceError(
                f"{time} {row[time]!r} is not a date with time; write 2024-05-10 00:00:00.5"
            )
        return TraceEntry(moment, _count(row, tokens_in), _count(row, tokens_out), ())

    return list(_prompts(reading, csv_rows(reading.path, _AZURE_COLUMNS), prompt))


def _burstgpt(reading: Reading) -> list[TraceEntry]:
    time, tokens_in, tokens_out = _BURST_COLUMNS

    def prompt(row: Any) -> TraceEntry | None:
        answered = _count(row, tokens_out)
        moment = _moment(row[time])
        if not answered:
            reading.leave_out("requests that failed: no response tokens")
            return None
        return TraceEntry(moment, _count(row, tokens_in), answered, ())

    prompts = list(_prompts(reading, csv_rows(reading.path, _BURST_COLUMNS), prompt))
    return _with_unit(reading, prompts)


def _vllm(reading: Reading) -> list[TraceEntry]:
    chain = _Chain()

    def prompt(item: object) -> TraceEntry:
        request = _convert(item, _VllmRequest, _WHAT["vllm"])
        text = request.input_tok_ids if request.prompt is None else request.prompt
        if not text:
            raise TraceError("neither input_tok_ids nor a prompt has a token; remove the item")
        answer_length = request.output_toks or request.output_tokens or 1
        if request.arrival_time_ns is not None:
            arrival: float | None = _Seconds(request.arrival_time_ns / 1e9)
        else:
            arrival = _moment_of(item, request.timestamp)
        return _prompt(chain, text, answer_length, arrival, reading.block_tokens)

    prompts = list(_prompts(reading, json_items(reading.path), prompt))
    return _with_unit(reading, prompts)


def _sharegpt(reading: Reading) -> list[TraceEntry]:
    chain = _Chain()

    def prompt(item: object) -> TraceEntry | None:
        turns = _convert(item, _Conversation, _WHAT["sharegpt"]).conversations
        if len(turns) < 2 or not turns[0].value:
            reading.leave_out("conversations without a question or an answer")
            return None
        answer = max(1, len(turns[1].value) // _TOKEN_CHARACTERS)
        return _prompt(chain, turns[0].value, answer, None, reading.block_tokens)

    return list(_prompts(reading, json_items(reading.path), prompt))


def _openai(reading: Reading) -> list[TraceEntry]:
    chain = _Chain()

    def prompt(item: object) -> TraceEntry:
        if isinstance(item, dict) and "body" in item:
            batched = _convert(item, _Batched, _WHAT["openai"])
            chat, timestamp = batched.body, batched.timestamp
        else:
            chat, timestamp = _convert(item, _Chat, _WHAT["openai"]), None
        turns, output = chat.messages, chat.max_completion_tokens or chat.max_tokens or 1
        arrival = _moment_of(item, chat.timestamp if timestamp is None else timestamp)
        if chat.prompt and not turns:
            return _prompt(chain, chat.prompt, output, arrival, reading.block_tokens)
        if len(turns) > 1 and turns[-1].role == "assistant":
            output = max(1, len(turns[-1].text()) // _TOKEN_CHARACTERS)
            turns = turns[:-1]
        text = "".join(f"{message.role}\n{message.text()}\n" for message in turns)
        if not text:
            raise TraceError("neither messages nor prompt has a text; remove the item")
        return _prompt(chain, text, output, arrival, reading.block_tokens)

    prompts = list(_prompts(reading, json_items(reading.path), prompt))
    return _with_unit(reading, prompts)


class _Seconds(float):
    """A time whose unit the format fixes."""


class _Date(_Seconds):
    """A moment of the calendar."""


def _moment_of(item: object, timestamp: float | str | None) -> float | None:
    """Return an item's time. Raises TraceError if it has one by a name that is not read."""
    if timestamp is None and isinstance(item, dict):
        for name in item:
            if item[name] is not None and _TIME_NAMES.search(name):
                raise TraceError(f"{name} is not read; name the time timestamp, or remove it")
    return _moment(timestamp)


def _moment(value: float | str | None) -> float | None:
    """Return a time as it is, in the unit of its file, or as a date. Raises TraceError."""
    if not isinstance(value, str):
        return value
    date = _date(value)
    if date is not None:
        return date
    try:
        return float(value)
    except ValueError:
        raise TraceError(
            f"timestamp {value!r} is neither a number nor a date; write 2024-05-10 00:00:00.5"
        ) from None


def _date(text: str) -> _Date | None:
    """Parse ``2023-11-16 18:17:03.9799600``, with or without a time zone, as seconds of UTC.

    Python 3.10 reads three or six digits, and no Z.
    """
    match = _DATE.fullmatch(text.strip())
    if match is None:
        return None
    day, time, fraction, _, sign, hours, minutes = match.groups()
    try:
        moment = datetime.datetime.fromisoformat(f"{day}T{time}+00:00").timestamp()
    except ValueError:  # the thirteenth month
        return None
    ahead = (int(hours) * 3600 + int(minutes or 0) * 60) if sign else 0
    return _Date(moment + float(f"0.{fraction or 0}") - (ahead if sign == "+" else -ahead))


def _with_unit(
    reading: Reading,
    prompts: list[TraceEntry],
    guess: Callable[[Sequence[float]], str] | None = None,
) -> list[TraceEntry]:
    """Return the prompts with arrivals in seconds. Times that are numbers are in the unit that was
    requested, else the one that ``guess`` returns, else seconds.

    Raises TraceError if a file has numbers and dates, or times for some prompts only.
    """
    times = [prompt.arrival_s for prompt in prompts if prompt.arrival_s is not None]
    dates = sum(isinstance(time, _Date) for time in times)
    if not (len(times) in (0, len(prompts)) and dates in (0, len(prompts))):
        raise TraceError(
            f"{reading.path}: of {len(prompts)} requests {len(times) - dates} have a number as "
            f"their time, {dates} a date, the others none; give all of them the same"
        )
    numbers = [time for time in times if not isinstance(time, _Seconds)]
    if not numbers:
        return prompts
    since_1970_ms = min(numbers) > _EPOCH_MS_MIN
    reading.time_guessed = reading.requested_unit is None and (guess is not None or since_1970_ms)
    guessed = "ms" if since_1970_ms else guess(numbers) if guess else "s"
    reading.time_unit = reading.requested_unit or guessed
    unit = TIME_UNITS[reading.time_unit]
    return [
        TraceEntry(
            time if isinstance(time, _Seconds) else time / unit,
            prompt.input_tokens,
            prompt.output_tokens,
            prompt.blocks,
        )
        for time, prompt in zip(times, prompts, strict=True)
    ]


def _prompts(
    reading: Reading, items: Iterator[Item], parse: Callable[[Any], TraceEntry | None]
) -> Iterator[TraceEntry]:
    """Yield the prompts of items. Raises TraceError with the place of one that cannot be read,
    unless the format skips it.
    """
    for source, item in items:
        reading.item_count += 1
        try:
            if isinstance(item, TraceError):
                raise item
            prompt = parse(item)
            if prompt is not None:
                _check(prompt)
        except TraceError as error:
            if not FORMATS_OF_TEXT & {reading.form}:
                raise TraceError(f"{source}: {error}") from None
            reading.skip(source, str(error))
            continue
        if prompt is not None:
            yield prompt
    reading.check()


def _check(prompt: TraceEntry) -> None:
    """Reject a request that no engine can run. Raises TraceError."""
    if not (0 < prompt.input_tokens <= _TOKENS_MAX and 0 <= prompt.output_tokens <= _TOKENS_MAX):
        raise TraceError(
            f"a request has {prompt.input_tokens} tokens in and {prompt.output_tokens} out; remove "
            f"it, or give it 1 to {_TOKENS_MAX} in"
        )
    if prompt.arrival_s is not None and not 0 <= prompt.arrival_s < _TIME_MAX:
        raise TraceError(
            f"time {prompt.arrival_s:g} is not from 0 to {_TIME_MAX:g}; give seconds or ms"
        )


def _convert(item: object, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.convert(item, kind, strict=False)  # 20.0 and "20" are numbers, too
    except msgspec.MsgspecError as error:
        raise TraceError(f"{error}; {what}") from None
    except RecursionError:
        raise TraceError(f"nested too deep; {what}") from None


def _count(row: dict[str, str], name: str) -> int:
    """Return a column's number of tokens; spreadsheets write 374.0. Raises TraceError."""
    try:
        value = float(row[name])
        if not value.is_integer():
            raise ValueError
    except (ValueError, OverflowError):
        raise TraceError(f"{name} {row[name]!r} is not a number of tokens; write 374") from None
    return int(value)


def _prompt(
    chain: _Chain, text: str | list[int], out: int, arrival_s: float | None, size: int
) -> TraceEntry:
    """Make a prompt from token ids, or from text, of which _TOKEN_CHARACTERS characters count as
    one token.
    """
    if isinstance(text, str):
        tokens: Sequence[object] = [
            text[at : at + _TOKEN_CHARACTERS] for at in range(0, len(text), _TOKEN_CHARACTERS)
        ]
    else:
        tokens = text
    return TraceEntry(arrival_s, len(tokens), out, chain.blocks(tokens, size))


@dataclass(frozen=True, slots=True)
class _Format:
    read: Callable[[Reading], list[TraceEntry]]
    keys: frozenset[str]  # of which any identifies the format
    what: str  # an item, for errors
    of_text: bool = False
    columns: tuple[str, ...] = ()  # of CSV, which identify the format in upper or lower case, too


_FORMATS = {
    "weka": _Format(
        _weka, frozenset({"hash_id_scope", "block_size"}), "a session has block_size and requests"
    ),
    "sharegpt": _Format(
        _sharegpt, frozenset({"conversations"}), "an item is an object with conversations", True
    ),
    "openai": _Format(
        _openai,
        frozenset({"messages", "body"}),
        "an item is an object with messages, or a request of a batch",
        True,
    ),
    "vllm": _Format(
        _vllm, frozenset({"input_tok_ids", "prompt"}), "an item is an object with a prompt", True
    ),
    "azure": _Format(_azure, frozenset(_AZURE_COLUMNS), "", columns=_AZURE_COLUMNS[1:]),
    "burstgpt": _Format(_burstgpt, frozenset(_BURST_COLUMNS[1:]), "", columns=_BURST_COLUMNS[1:]),
    "mooncake": _Format(
        _mooncake,
        frozenset({"hash_ids", "input_length", "timestamp"}),
        "an item is an object with timestamp, input_length, output_length and hash_ids",
    ),
}
_WHAT = {name: form.what for name, form in _FORMATS.items()}
FORMATS = ("mooncake", "weka", "azure", "burstgpt", "vllm", "sharegpt", "openai")
FORMATS_OF_TEXT = frozenset(name for name, form in _FORMATS.items() if form.of_text)
"""The formats whose items that cannot be read are skipped, unless there are many."""


def load_trace(
    path: StrPath | None,
    form: str | None = None,
    *,
    rate: float = 1.0,
    time_unit: str | None = None,
    block_tokens: int | None = None,
) -> Trace:
    """Load the trace at ``path``, or make the default one if that is None. The format is guessed
    from the content unless ``form`` names it. ``rate`` is in requests per second, for formats
    without times. ``time_unit`` (s or ms) and ``block_tokens`` are guessed where the format does
    not fix them; ``Trace.reading`` has what was assumed and skipped.

    Raises TraceError, with the line and the field if possible.
    """
    path = None if path is None else path_of("path", path)
    reading, prompts = _read(path, form, rate, time_unit, block_tokens)
    try:
        return make_trace(reading.path.name, reading.block_tokens, prompts, rate, reading)
    except TraceError as error:
        raise TraceError(reading.advise(str(error))) from None


def trace_requests(
    path: StrPath | None,
    form: str | None = None,
    *,
    rate: float = 1.0,
    time_unit: str | None = None,
    block_tokens: int | None = None,
) -> tuple[list[TraceRequest], Reading | None]:
    """Load the trace at ``path``, or the default one, for a replay, whose requests name every block
    of their prompts. Return them, and how the file was read (None for a pipe, which has to be
    mooncake's lines).

    A format without blocks, or without a number for a prompt's last and partial block, gets
    numbers that no other request has. The arguments are those of :func:`load_trace`.
    """
    path = None if path is None else path_of("path", path)
    piped = path is not None and path.exists() and not (path.is_file() or path.is_dir())
    if path is not None and piped and form in (None, "mooncake"):
        return read_trace(path), None  # a pipe is read only once
    reading, prompts = _read(path, form, rate, time_unit, block_tokens)
    if reading.form == "mooncake":
        if not prompts:
            raise TraceError(reading.advise(f"{path} holds no requests"))
        return [
            TraceRequest(
                timestamp=round((prompt.arrival_s or 0.0) * 1e3, 6),
                input_length=prompt.input_tokens,
                output_length=prompt.output_tokens,
                hash_ids=list(prompt.blocks),
            )
            for prompt in prompts
        ], reading
    trace = make_trace(reading.path.name, reading.block_tokens, prompts, rate, reading)
    fresh, requests = itertools.count(trace.id_count), []
    for at, blocks in enumerate(trace.blocks()):
        size = -(-trace.input_tokens[at] // trace.block_tokens)
        requests.append(
            TraceRequest(
                timestamp=trace.arrival_s[at] * 1e3,
                input_length=trace.input_tokens[at],
                output_length=trace.output_tokens[at],
                hash_ids=[*blocks, *itertools.islice(fresh, size - len(blocks))],
            )
        )
    return requests, reading


def _read(
    path: Path | None,
    form: str | None,
    rate: float,
    time_unit: str | None,
    block_tokens: int | None,
) -> tuple[Reading, list[TraceEntry]]:
    if path is None:
        return _default()
    if form is not None and form not in _FORMATS:
        raise TraceError(f"{form!r} is not a format; use {', '.join(FORMATS)}")
    if not 0 < rate < math.inf:
        raise TraceError(
            f"--rate is {rate} requests per second, but must be finite and greater than 0"
        )
    if time_unit not in (None, *TIME_UNITS):
        raise TraceError(
            f"--time-unit is {' or '.join(TIME_UNITS)}, not {time_unit!r}; leave it out"
        )
    if block_tokens is not None and not 0 < block_tokens <= _TOKENS_MAX:
        raise TraceError(f"--block-tokens is from 1 to {_TOKENS_MAX}; {block_tokens} is not")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(f"{path} is a pipe or a device, which may have no end; name a file")
    try:
        reading = Reading(
            path,
            form or _guess(path),
            form_given=form is not None,
            requested_unit=time_unit,
            block_tokens=block_tokens or _BLOCK_TOKENS,
            block_given=block_tokens is not None,
            block_note="this format has none; --block-tokens",
        )
        try:
            prompts = _FORMATS[reading.form].read(reading)
        except TraceError as error:
            raise TraceError(reading.advise(str(error))) from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; name a trace") from None
    except UnicodeError:
        raise TraceError(f"{path} is not text; name a trace") from None
    if time_unit is not None and reading.time_unit is None:
        raise TraceError(f"{path} has no times that are numbers; leave --time-unit out")
    return reading, prompts


def _default() -> tuple[Reading, list[TraceEntry]]:
    requests = default_requests()
    reading = Reading(
        Path("synthetic conversations"),
        "mooncake",
        form_given=True,
        time_unit="ms",
        block_tokens=DEFAULT_BLOCK_TOKENS,
        block_given=True,
        item_count=len(requests),
    )
    return reading, [
        TraceEntry(
            request.timestamp / TIME_UNITS["ms"],
            request.input_length,
            request.output_length,
            request.hash_ids,
        )
        for request in requests
    ]


def _guess(path: Path) -> str:
    """Return the format that a file seems to have, by its keys or columns. Raises TraceError."""
    if path.is_dir():
        return "weka"
    keys = set(head_keys(path))
    plain = {key.lower() for key in keys}
    for name, form in _FORMATS.items():
        if form.keys & keys or {key.lower() for key in form.columns} & plain:
            return name
    raise TraceError(
        f"{path} holds no requests in a format that can be recognized; specify it with --format "
        f"({', '.join(FORMATS)})"
    )
