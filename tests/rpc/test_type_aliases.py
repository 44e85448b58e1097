# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Handlers may be annotated with aliases of PEP 695. ``numpy.typing.NDArray`` is one since 2.5."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from beluga.errors import BadTypeError
from beluga.rpc.encoding import converted, name_of, refuse_type

typing_extensions = pytest.importorskip("typing_extensions", reason="needs TypeAliasType")

First, Second = TypeVar("First"), TypeVar("Second")
ARRAYS = typing_extensions.TypeAliasType(
    "ARRAYS", np.ndarray[Any, np.dtype[First]], type_params=(First,)
)
MAPS = typing_extensions.TypeAliasType(
    "MAPS", dict[Second, list[First]], type_params=(First, Second)
)
NUMBERS = typing_extensions.TypeAliasType("NUMBERS", list[float])
NESTED = typing_extensions.TypeAliasType("NESTED", NUMBERS)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ARRAYS[np.float32], "numpy.ndarray[float32]"),
        (NDArray[np.float32], "numpy.ndarray[float32]"),
        (MAPS[int, str], "dict[str, list[int]]"),
        (NESTED, "list[float]"),
        (list[NESTED], "list[list[float]]"),
    ],
)
def test_an_alias_stands_for_its_type(kind: Any, name: str) -> None:
    refuse_type(kind, "value")
    assert name_of(kind) == name


def test_values_are_converted_to_the_type_of_an_alias() -> None:
    assert converted([1, 2], NESTED, "value") == [1.0, 2.0]
    assert converted([1], ARRAYS[np.float32], "value").dtype == np.float32
    with pytest.raises(BadTypeError, match="give numpy"):
        converted(np.zeros(1), ARRAYS[np.float32], "value")
    with pytest.raises(BadTypeError, match="cannot be sent"):
        refuse_type(MAPS[int, int], "value")
