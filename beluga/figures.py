# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The figures that C counts. ``csrc/api/figures.h`` declares each of them once: a field of a
struct, with its metric and its meaning. Classes of counters and the exporter's metrics are made of
it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from beluga._ffi import ffi, lib

_T = TypeVar("_T", bound="Counters")
_METRIC = re.compile(r'(\w+)(?:{(\w+)="(\w+)"})?')


class Figure(NamedTuple):
    """A field of a struct that is a metric, or the series of a metric with one label."""

    field: str
    metric: str
    labels: tuple[tuple[str, str], ...]
    help: str  # - for a further series of a metric

    @property
    def kind(self) -> str:
        """Prometheus's kind of the metric."""
        return "counter" if self.metric.endswith("_total") else "gauge"


def _read() -> dict[str, tuple[Figure, ...]]:
    """Return the figures of each struct, from the table that ``_build.py`` compiled into the
    core.
    """
    text = ffi.string(cast("Any", lib).bl_figures).decode()
    table: dict[str, tuple[Figure, ...]] = {}
    for row in text.split("\n"):
        struct, field, metric, meaning = row.split("\t")
        match = _METRIC.fullmatch(metric)
        assert match, metric  # noqa: S101  the build matches the same
        labels = ((match[2], match[3]),) if match[2] else ()
        figure = Figure(field, f"beluga_{match[1]}", labels, meaning)
        table[struct] = (*table.get(struct, ()), figure)
    return table


FIGURES = _read()


class Counters:
    """A frozen dataclass of the numbers of a C struct; :func:`counters` adds its fields."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...

    @classmethod
    def of(cls: type[_T], struct: object, **more: object) -> _T:
        """Convert a struct. ``more`` are fields that it does not have."""
        names = (field.name for field in dataclasses.fields(cast("Any", cls)))
        return cls(**{name: getattr(struct, name) for name in names if name not in more} | more)

    def as_dict(self) -> dict[str, int]:
        """Return the fields by name."""
        return dataclasses.asdict(cast("Any", self))


def counters(struct: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that adds the numbers of a C struct to a subclass of Counters."""

    def make(cls: type[_T]) -> type[_T]:
        numbers = {
            name: int for name, field in ffi.typeof(struct).fields
            if field.type.kind == "primitive"
        }  # fmt: skip
        cls.__annotations__ = inspect.get_annotations(cls) | numbers
        return cast("type[_T]", dataclasses.dataclass(frozen=True)(cls))

    return make
