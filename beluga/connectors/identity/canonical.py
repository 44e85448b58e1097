# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A configuration in a canonical form: equal values have equal forms, in every process and host.

Every field is included, except those of the engine's table. A value without a stable form (a
function, or an object whose ``repr`` is an address) is rejected rather than skipped: otherwise two
engines that differ in it would share blocks. The path of a file counts as the file's bytes: scales
of a quantization, for example, may be another file of the same name.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from beluga.errors import ConnectorError

Table: TypeAlias = Mapping[str, Mapping[str, str]]
"""The fields that cannot change the bytes of a block: class name -> field -> the reason."""

DEPTH_MAX = 40  # a deeper configuration is assumed to be cyclic

_READ = 1 << 20  # bytes of a file at a time
_TORCH_NAMES = ("dtype", "device", "Size", "layout", "memory_format")
# Classes of model configurations in transformers; to_dict() leaves out their caches.
_TRANSFORMERS = ("PretrainedConfig", "PreTrainedConfig")


def canonical(value: Any, table: Table, *, path: str = "", identity: str = "") -> Any:
    """Convert ``value`` to a form that :mod:`json` writes the same way everywhere.

    ``path`` is the value's name in errors. ``identity`` is the operator's setting of that name; it
    replaces values without a stable form. Without it such a value raises :class:`ConnectorError`.
    """
    return _Form(table, identity).of(value, path, 0)


def digest_of(value: Any, table: Table, *, path: str = "", identity: str = "") -> str:
    """Return 32 hexadecimal digits of the canonical form of ``value``."""
    form = canonical(value, table, path=path, identity=identity)
    text = json.dumps(form, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"beluga-config").hexdigest()


def config_fields(config: Any, table: Table, *, identity: str = "") -> dict[str, str]:
    """Return a digest for each field of ``config`` that is not in the table, by the field's name.

    One digest for each part shows an operator in which part two engines differ.
    """
    form = _Form(table, identity)
    return {
        name: digest_of(value, table, path=name, identity=identity)
        for name, value in form.fields(config)
    }


class _Form:
    def __init__(self, table: Table, identity: str) -> None:
        self._table, self._identity = table, identity

    def of(self, value: Any, path: str, depth: int) -> Any:  # noqa: PLR0911  one per kind
        if depth > DEPTH_MAX:
            return self._refused(path, "refers to itself")
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__name__, self.of(value.value, path, depth + 1)]
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str):
            return self._text(str.__str__(value), path)
        if isinstance(value, float):
            return ["float", float.__repr__(value)]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, PurePath):
            return ["path", self._text(str(value), path)]
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, (set, frozenset)):
            items = [self.of(one, path, depth + 1) for one in value]
            return ["set", *sorted(items, key=lambda item: json.dumps(item, sort_keys=True))]
        if isinstance(value, (list, tuple)):
            items = [self.of(one, f"{path}[{i}]", depth + 1) for i, one in enumerate(value)]
            return ["list", *items]
        if _is_of_torch(value):
            return ["torch", str(value)]
        return self._object(value, path, depth)

    def fields(self, value: Any) -> Iterable[tuple[str, Any]]:
        """Yield the fields of an object that count. Raises TypeError for an object without
        fields.
        """
        out = self._left_out(type(value))
        return ((name, one) for name, one in _fields_of(value) if name not in out)

    def _text(self, value: str, path: str) -> Any:
        """Return a text; for the path of a file that is the digest of its bytes."""
        if os.sep not in value or "\0" in value or not Path(value).is_file():
            return value
        try:
            with Path(value).open("rb") as stream:
                digest = hashlib.sha256()
                while piece := stream.read(_READ):
                    digest.update(piece)
                return ["file", digest.hexdigest()]
        except OSError as error:
            return self._refused(path, f"is the file {value}, which cannot be read ({error})")

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        pairs = [
            [self.of(key, path, depth + 1), self.of(one, f"{path}.{key}", depth + 1)]
            for key, one in value.items()
        ]
        return ["map", *sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))]

    def _object(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if any(one.__name__ in _TRANSFORMERS for one in kind.__mro__):
            plain = _without(value.to_dict(), self._left_out(kind))
            return ["config", kind.__name__, self.of(plain, path, depth + 1)]
        try:
            fields = list(self.fields(value))
        except TypeError:
            return self._refused(path, f"is a {kind.__module__}.{kind.__qualname__}")
        named = {name: self.of(one, f"{path}.{name}", depth + 1) for name, one in fields}
        return ["object", kind.__name__, sorted(named.items())]

    def _left_out(self, kind: type) -> set[str]:
        names = {one.__name__ for one in kind.__mro__}
        if names & set(_TRANSFORMERS):  # the table has one of its names
            names |= set(_TRANSFORMERS)
        return {field for name in names for field in self._table.get(name, {})}

    def _refused(self, path: str, why: str) -> Any:
        if self._identity:
            return ["declared", self._identity]
        raise ConnectorError(
            f"the engine's setting {path} {why}, which beluga cannot compare between engines; "
            "leave it out, or set beluga's setting identity"
        )


def _fields_of(value: Any) -> Iterable[tuple[str, Any]]:
    """Yield name and value of each field of an object with declared fields."""
    if isinstance(value, type):
        raise TypeError(value)
    if isinstance(value, types.SimpleNamespace):
        names = list(vars(value))
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(type(value), "__struct_fields__"):  # of msgspec
        names = list(type(value).__struct_fields__)
    elif isinstance(getattr(type(value), "model_fields", None), Mapping):  # of pydantic
        names = list(type(value).model_fields)
    else:
        raise TypeError(type(value))
    return ((name, getattr(value, name, None)) for name in names)


def values_under(tree: Any, name: str) -> Iterator[Any]:
    """Yield all values under a key of nested dictionaries and lists, except None."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == name and value is not None:
                yield value
            yield from values_under(value, name)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from values_under(value, name)


def _without(plain: Any, out: set[str]) -> Any:
    """Return a tree of dictionaries without these keys, at any depth."""
    if isinstance(plain, Mapping):
        return {key: _without(one, out) for key, one in plain.items() if key not in out}
    if isinstance(plain, (list, tuple)):
        return [_without(one, out) for one in plain]
    return plain


def _is_of_torch(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ in _TORCH_NAMES
