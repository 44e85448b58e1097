# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Encodes arguments and results of handlers to bytes, and decodes them by the annotated types.


A message is a header in JSON and the raw bytes of its buffers::

    header size (4 bytes) | header | zeros | buffer 0 | zeros | buffer 1 ...

Each part begins at a multiple of 64. The header holds the values; ``sizes`` has the bytes of each
buffer. Example: ``scale(np.ones(2), by=3.0)`` is the header ``{"handler": "scale", "arguments":
[{"array": 0, "dtype": "<f8", "shape": [2]}], "named": {"by": 3.0}, "sizes": [16]}`` with one
buffer. Nothing in a message can name code (D14): its values are None, booleans, numbers, text,
bytes, arrays of numbers, lists, and dictionaries; dataclasses are dictionaries of their fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from beluga.arguments import short
from beluga.errors import BadRequestError, BadTypeError

_ALIGN = 64
_SIZE = struct.Struct("<I")
_DTYPE_KINDS = "?biufc"
_SCALARS = (type(None), bool, int, float, str)
_DEPTH_MAX = 64  # nesting of lists


def pack(fields: Mapping[str, object]) -> bytearray:
    """Encode a message with these fields. Raises BadTypeError for a value of another type."""
    buffers: list[bytes] = []
    header: dict[str, object] = {name: _encode(one, buffers, 0) for name, one in fields.items()}
    header["sizes"] = [len(one) for one in buffers]
    text = json.dumps(header, separators=(",", ":")).encode("utf-8", "surrogatepass")
    message = bytearray(_SIZE.pack(len(text)) + text)
    for one in buffers:
        message.extend(bytes(-len(message) % _ALIGN))
        message.extend(one)
    return message


def unpack(message: bytearray) -> dict[str, object]:
    """Decode a message, which is untrusted input. Arrays and bytes in the result share its memory.
    Raises BadRequestError if it is malformed.
    """
    try:
        (size,) = _SIZE.unpack_from(message)
        header = json.loads(bytes(message[_SIZE.size : _SIZE.size + size]))
        buffers, at = [], _SIZE.size + size
        for length in header.pop("sizes"):
            at += -at % _ALIGN
            if not 0 <= length <= len(message) - at:
                raise ValueError("a buffer ends after the message")
            buffers.append(memoryview(message)[at : at + length])
            at += length
        return {name: _decode(one, buffers) for name, one in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError,
            struct.error) as error:  # fmt: skip
        raise BadRequestError(
            f"a message cannot be read: {error or type(error).__name__}"
        ) from None


def _encode(value: object, buffers: list[bytes], depth: int) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _SCALARS:
        return value
    if depth > _DEPTH_MAX:
        raise BadTypeError(f"a value nests lists more than {_DEPTH_MAX} deep; give a flatter one")
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _DTYPE_KINDS:
            raise BadTypeError(
                f"an array of {value.dtype} cannot be sent; give numbers or booleans"
            )
        buffers.append(value.tobytes())
        shape = list(value.shape)
        return {"array": len(buffers) - 1, "dtype": value.dtype.str, "shape": shape}
    if isinstance(value, bytes | bytearray | memoryview):
        buffers.append(value.tobytes() if isinstance(value, memoryview) else bytes(value))
        return {"bytes": len(buffers) - 1}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise BadTypeError(f"the keys of {short(value)} are not all text; give a dict of str")
        return {"map": {key: _encode(one, buffers, depth + 1) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return [_encode(one, buffers, depth + 1) for one in value]
    if isinstance(value, bool | int | float | str):  # a subclass, such as IntEnum
        return _encode(_plain(value), buffers, depth)
    raise BadTypeError(
        f"{short(value)} has a type that cannot be sent; give None, a bool, int, float, str, "
        "bytes, numpy array, list, tuple, dict or dataclass"
    )


def _plain(value: float | str) -> int | float | str:
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, int) else float(value)


def _decode(value: Any, buffers: Sequence[memoryview]) -> object:
    if isinstance(value, list):
        return [_decode(one, buffers) for one in value]
    if not isinstance(value, dict):
        return value
    if "map" in value:
        return {str(key): _decode(one, buffers) for key, one in value["map"].items()}
    if "bytes" in value:
        return bytes(buffers[_index(value["bytes"])])
    buffer, dtype = buffers[_index(value["array"])], np.dtype(str(value["dtype"]))
    shape = [_index(one) for one in value["shape"]]
    if dtype.kind not in _DTYPE_KINDS or math.prod(shape) * dtype.itemsize != len(buffer):
        raise ValueError(
            f"{len(buffer)} bytes do not fit an array of {dtype} with the shape {shape}"
        )
    return np.frombuffer(buffer, dtype).reshape(shape)


def _index(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not an index")
    return value


def refuse_type(kind: object, where: str) -> None:
    """Raise BadTypeError for an annotation whose values cannot be sent."""
    kind = _unaliased(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, Any, np.ndarray, bytes, *_SCALARS) or kind is None:
        return
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        for name, one in fields_of(kind).items():
            if one is not kind:
                refuse_type(one, f"{where}.{name}")
        return
    if origin in (typing.Union, types.UnionType, list, tuple) or (
        origin is dict and arguments[:1] == (str,)
    ):
        for one in arguments:
            if one is not Ellipsis:
                refuse_type(one, where)
        return
    if origin is np.ndarray or kind in (list, tuple, dict):
        return
    raise BadTypeError(
        f"{where} is of the type {name_of(kind)}, which cannot be sent; use None, bool, int, "
        "float, "
        "str, bytes, numpy.ndarray, a dataclass, or list, tuple, dict[str, ...] or union of these"
    )


def fields_of(kind: type) -> dict[str, object]:
    """Return the types of a dataclass's fields by name."""
    hints = typing.get_type_hints(kind)
    return {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}


def name_of(kind: object) -> str:  # noqa: PLR0911  a return per form
    """Return a type as it is written in source code."""
    kind = _unaliased(kind)
    if kind in (None, type(None)):
        return "None"
    dtype = _dtype_of(kind)
    if dtype is not None:
        return f"numpy.ndarray[{dtype}]"
    if isinstance(kind, type) and not typing.get_args(kind):
        return "numpy.ndarray" if kind is np.ndarray else kind.__name__
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(name_of, typing.get_args(kind)))
    if typing.get_origin(kind) is np.ndarray:
        return "numpy.ndarray"
    if arguments := typing.get_args(kind):
        inner = ", ".join("..." if one is Ellipsis else name_of(one) for one in arguments)
        return f"{name_of(typing.get_origin(kind))}[{inner}]"
    return str(kind).removeprefix("typing.")


def _unaliased(kind: Any) -> Any:
    """Return the type for which an alias of PEP 695 stands, such as ``NDArray`` since numpy 2.5."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    while hasattr(origin or kind, "__value__"):
        alias = origin or kind
        given = dict(zip(alias.__type_params__, arguments, strict=False))
        kind = alias.__value__
        if given:
            kind = kind[tuple(given[one] for one in kind.__parameters__)]
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    return kind


def _dtype_of(kind: object) -> np.dtype[Any] | None:
    """Return the dtype of an annotation such as ``NDArray[np.float32]``."""
    if typing.get_origin(kind) is not np.ndarray or len(typing.get_args(kind)) < 2:
        return None
    scalar = typing.get_args(typing.get_args(kind)[1])[:1]
    try:
        return np.dtype(scalar[0]) if scalar and not scalar[0].__subclasses__() else None
    except (TypeError, AttributeError):
        return None


def converted(value: object, kind: Any, where: str) -> Any:
    """Convert a decoded value to the annotated type.

    An int becomes a float, a list a tuple or array, and a dictionary a dataclass, where the
    annotation requires one. Raises BadTypeError for any other difference; ``where`` names the
    value.
    """
    made = _converted(value, kind, where)
    if made is _WRONG:
        raise BadTypeError(f"{where} is {short(value)}; give {name_of(kind)}")
    return made


_WRONG = object()


def _converted(value: object, kind: Any, where: str) -> Any:  # noqa: PLR0911  a return per type
    kind = _unaliased(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, np.generic):
        value = value.item()
    if kind in (object, Any):
        return value
    if kind in (None, type(None)):
        return None if value is None else _WRONG
    if origin in (typing.Union, types.UnionType):
        return _of_union(value, arguments, where)
    if np.ndarray in (kind, origin):
        return _array(value, _dtype_of(kind))
    if kind is float:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if real else _WRONG  # type: ignore[arg-type]
    if kind is bytes:
        return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else _WRONG
    if kind in (bool, int, str, dict):
        other = isinstance(value, bool) and kind is not bool
        return value if isinstance(value, kind) and not other else _WRONG
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(value, kind, where)
    if origin is dict and isinstance(value, dict):
        return {
            key: converted(one, arguments[1], f"{where}[{short(key)}]")
            for key, one in value.items()
        }
    if (origin or kind) in (list, tuple) and isinstance(value, list | tuple):
        return _items(list(value), origin or kind, arguments, where)
    return _WRONG


def _of_union(value: object, kinds: Sequence[Any], where: str) -> Any:
    """Prefer a member whose type the value already has to one that it can be converted to."""
    for kind in (*(one for one in kinds if one is type(value)), *kinds):
        try:
            if (made := _converted(value, kind, where)) is not _WRONG:
                return made
        except BadTypeError:
            continue
    return _WRONG


def _array(value: object, dtype: np.dtype[Any] | None) -> Any:
    if isinstance(value, list):  # a list from a command line
        try:
            value = np.array(value, dtype)
        except (TypeError, ValueError, OverflowError):
            return _WRONG
    if not isinstance(value, np.ndarray) or value.dtype.kind not in _DTYPE_KINDS:
        return _WRONG
    return value if dtype is None or value.dtype == dtype else _WRONG


def _dataclass(value: object, kind: type, where: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        return _WRONG
    hints = fields_of(kind)
    if unknown := set(value) - set(hints):
        raise BadTypeError(
            f"{where} has no field {min(unknown)!r}; {kind.__name__} has {', '.join(hints)}"
        )
    given = {name: converted(one, hints[name], f"{where}.{name}") for name, one in value.items()}
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise BadTypeError(
            f"{where} is not a valid {kind.__name__}; give its fields: {error}"
        ) from None


def _items(values: list[object], kind: type, arguments: tuple[Any, ...], where: str) -> Any:
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(values) != len(arguments):
            return _WRONG
        kinds = arguments
    else:
        kinds = (arguments[0] if arguments else object,) * len(values)
    made = (converted(one, of, f"{where}[{at}]")
            for at, (one, of) in enumerate(zip(values, kinds, strict=True)))  # fmt: skip
    return kind(made)
