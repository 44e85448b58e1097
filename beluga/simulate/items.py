# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The items of a trace file, each with its place: objects of JSON, one per line or in one list, and
rows of CSV.

An item that is not JSON is returned as a TraceError, and the reader decides whether to continue.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from beluga.errors import TraceError
from beluga.text import open_text, read_text

_LINE_LENGTH_MAX = 64 << 20  # a prompt of ten million tokens; other files may have no line ends
_WHOLE_SIZE_MAX = 4 << 30  # bytes of a file that is one JSON value
_HEAD_LENGTH = 1 << 16  # characters that a format is guessed from
_LINE_ENDS = "\r\n"
_DELIMITERS = ",;\t"  # spreadsheets of many countries write semicolons
_KEY = re.compile(r'(?<!\\)"(\w{1,40})"\s*:')

# A place is PATH:LINE or "PATH: item N", counted from 1. The other part may be a TraceError.
Item: TypeAlias = tuple[str, object]


def head_keys(path: Path) -> list[str]:
    """Return the keys of objects in the beginning of a JSON file, or the columns of a CSV file."""
    with open_text(path) as file:
        head = file.read(_HEAD_LENGTH).lstrip()
    if head[:1] in ("[", "{"):
        first = next(filter(None, map(_keys, _whole_objects(head))), None)
        return _KEY.findall(head) if first is None else first
    lines = head.splitlines()
    return _columns(lines[0]) if lines else []


def _whole_objects(head: str) -> Iterator[object]:
    """Yield the values of a list, or of lines, that end in the head of a file."""
    decoder, at = json.JSONDecoder(), 1 if head[0] == "[" else 0
    while True:
        while head[at : at + 1] in (*",\r\n\t ",):
            at += 1
        try:
            value, at = decoder.raw_decode(head, at)
        except (ValueError, RecursionError):
            return
        yield value


def _keys(value: object) -> list[str]:
    """Return the keys of an object; of a request in a batch, its body counts, too."""
    if not isinstance(value, dict):
        return []
    body = value.get("body")
    return ["body", *body] if isinstance(body, dict) else list(value)


def json_items(path: Path) -> Iterator[Item]:
    """Yield the objects of a file that has one on each line, or one list of them.

    Raises TraceError if it is neither.
    """
    if not _is_list(path):
        for source, line in _lines(path):
            if not line.isspace():
                yield source, _parsed(line)
        return
    value = whole_json(path)
    if not isinstance(value, list):
        raise TraceError(
            f"{path} is not a list; write one object on each line, or a list of objects"
        )
    for number, item in enumerate(value, 1):
        yield f"{path}: item {number}", item


def _is_list(path: Path) -> bool:
    """Return whether a file is one list, which may go over several lines."""
    with open_text(path) as file:
        texts = (
            line for line in iter(partial(file.readline, _LINE_LENGTH_MAX), "") if line.strip()
        )
        first = next(texts, "").strip()
        if not first.startswith("["):
            return False
        # A list that ends on its line, with more behind it, is the odd item of a file of lines.
        alone = first.endswith("]") and not isinstance(_parsed(first), TraceError)
        return not (alone and next(texts, ""))


def whole_json(path: Path) -> object:
    """Return the value of a file that is one. Raises TraceError."""
    if path.stat().st_size > _WHOLE_SIZE_MAX:
        raise TraceError(f"{path} has more than the {_WHOLE_SIZE_MAX} bytes that are read at once")
    value = _parsed(read_text(path))
    if isinstance(value, TraceError):
        raise TraceError(f"{path}: {value}")
    return value


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Item]:
    """Yield the rows of a file with at least these columns, in upper or lower case, as dictionaries
    of them.

    Raises TraceError if there are no such columns.
    """
    lines = iter(_lines(path))
    _, header = next(lines, ("", ""))
    names = [name.lower() for name in _columns(header)]
    if missing := [name for name in columns if name.lower() not in names]:
        raise TraceError(f"{path}:1: no columns {', '.join(missing)}")
    at = [(name, names.index(name.lower())) for name in columns]
    delimiter = _delimiter(header)
    for source, line in lines:
        if line.isspace():
            continue
        try:
            (cells,) = csv.reader([line], delimiter=delimiter, strict=True)
        except csv.Error as error:
            yield source, TraceError(f"{error}; a row is one line, whose quotes end on it")
            continue
        if len(cells) != len(names):
            yield source, TraceError(f"{len(cells)} values for {len(names)} columns; fix the row")
        else:
            yield source, {name: cells[column].strip() for name, column in at}


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with open_text(path) as file:
        for number, line in enumerate(iter(partial(file.readline, _LINE_LENGTH_MAX), ""), 1):
            if len(line) == _LINE_LENGTH_MAX:
                raise TraceError(f"{path}:{number}: a line of {_LINE_LENGTH_MAX} bytes or more")
            yield f"{path}:{number}", line


def _parsed(text: str) -> object:
    """Parse JSON. Python's own parser takes what msgspec refuses and other programs write: halves
    of UTF-16 pairs and NaN.
    """
    value: object
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        try:
            value = json.loads(text)
        except RecursionError:
            return _malformed("nested too deep")
        except json.JSONDecodeError as error:
            what = "truncated" if error.pos >= len(text.rstrip()) else error.msg
            return _malformed(f"{what} (character {error.pos + 1})")
        except ValueError as error:  # an integer with thousands of digits
            return _malformed(str(error))
    return value


def _malformed(what: str) -> TraceError:
    return TraceError(f"JSON is malformed: {what}; fix or remove it")


def _columns(header: str) -> list[str]:
    try:
        (cells,) = csv.reader([header.strip(_LINE_ENDS)], delimiter=_delimiter(header))
    except (csv.Error, ValueError):
        return []
    return [cell.strip() for cell in cells]


def _delimiter(header: str) -> str:
    return max(_DELIMITERS, key=header.count)
