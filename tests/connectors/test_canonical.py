# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Configurations in a canonical form: equal ones have the same form, and different ones do not."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from beluga.connectors.identity import canonical, config_fields, digest_of
from beluga.errors import ConnectorError


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Inner:
    depth: int = 1
    seed: int = 0


@dataclasses.dataclass
class Config:
    name: str = "a"
    inner: Inner = dataclasses.field(default_factory=Inner)
    port: int = 1


class Other(Inner):
    pass


TABLE = {"Config": {"port": "an address"}, "Inner": {"seed": "draws tokens"}}

DIFFERENT: list[Any] = [
    *(None, True, 1, 1.0, "1", b"1", "", 0, False, 0.0, -0.0, float("nan"), float("inf")),
    *(
        (),
        [1],
        [[1]],
        ["1"],
        {1},
        {"1"},
        frozenset({1, 2}),
        {1: 2},
        {"1": 2},
        {"1": "2"},
        {},
        set(),
    ),
    *(Kind.ONE, Kind.TWO, Number.ONE, Path("1"), Inner(), Inner(depth=2), Other(), Config()),
    *(Config(inner=Inner(2)), ["map"], ["enum", "Kind", 1], ["float", "1.0"], ["path", "1"]),
]


def test_values_that_differ_have_different_forms() -> None:
    for one, other in itertools.combinations(DIFFERENT, 2):
        if one == () and other == []:
            continue
        assert digest_of(one, TABLE) != digest_of(other, TABLE), (one, other)


def test_equal_values_have_one_form() -> None:
    assert digest_of({"a": 1, "b": 2}, TABLE) == digest_of({"b": 2, "a": 1}, TABLE)
    assert digest_of({3, 1, 2}, TABLE) == digest_of({2, 3, 1}, TABLE)
    assert digest_of((1, 2), TABLE) == digest_of([1, 2], TABLE)
    assert digest_of(Counter(a=1), TABLE) == digest_of({"a": 1}, TABLE)


def test_fields_of_the_table_do_not_count_at_any_depth() -> None:
    assert digest_of(Config(port=2), TABLE) == digest_of(Config(), TABLE)
    assert digest_of(Config(inner=Inner(seed=2)), TABLE) == digest_of(Config(), TABLE)
    assert digest_of(Other(seed=2), TABLE) == digest_of(Other(), TABLE)  # as its base class
    assert set(config_fields(Config(), TABLE)) == {"name", "inner"}


@pytest.mark.parametrize("name", ["PretrainedConfig", "PreTrainedConfig"])
def test_fields_of_a_model_s_configuration_do_not_count_by_either_name_of_its_class(
    name: str,
) -> None:
    """transformers 4 and 5 spell the base class differently; the table has one of the names."""

    def to_dict(self: Any) -> dict[str, Any]:
        return vars(self)

    base: Any = type(name, (), {"to_dict": to_dict})
    made, other, further = (type("LlamaConfig", (base,), {})() for _ in range(3))
    for one in (made, other, further):
        vars(one).update({"_name_or_path": "/here", "nested": {"_name_or_path": "/here"}})
    vars(other).update({"_name_or_path": "/there", "nested": {"_name_or_path": "/there"}})
    further.rope_theta = 1e6
    table = {"PretrainedConfig": {"_name_or_path": "a place"}}
    assert digest_of(made, table) == digest_of(other, table) != digest_of(further, table)


def test_forms_are_the_same_in_every_process() -> None:
    code = (
        "from beluga.connectors.identity import digest_of;"
        "print(digest_of({'b': {'x', 'y', 'z', 'w'}, 'a': [1.5, None]}, {}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        for _ in range(3)
    }
    assert len(found) == 1


class Plain:
    """Its repr is an address."""


@pytest.mark.parametrize(
    "value", [Plain(), Plain, print, lambda: 0, 1j, object(), memoryview(b""), range(3)]
)
def test_a_value_without_a_stable_form_is_refused_wherever_it_is(value: Any) -> None:
    for tree in (value, [value], {"x": value}, {"y": {value: 1}}, Config(inner=value)):
        try:
            hash(value)
        except TypeError:
            continue
        with pytest.raises(ConnectorError, match=r"part.*cannot compare.*setting identity"):
            canonical(tree, TABLE, path="part")
        assert canonical(tree, TABLE, path="part", identity="a") == canonical(
            tree, TABLE, path="part", identity="a"
        )


def test_a_value_that_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(ConnectorError, match="refers to itself"):
        canonical(ring, TABLE, path="ring")


def test_the_digest_of_a_file_depends_on_its_bytes_and_not_on_its_name(tmp_path: Path) -> None:
    """Scales of a quantization may be replaced under their name, or have another name."""
    one, other = tmp_path / "scales.json", tmp_path / "other.json"
    one.write_text("1")
    other.write_text("1")
    first = digest_of({"scales": str(one)}, {})
    assert digest_of({"scales": str(other)}, {}) == first
    assert digest_of({"scales": one}, {}) != digest_of({"scales": tmp_path / "none"}, {})
    one.write_text("2")
    assert digest_of({"scales": str(one)}, {}) != first
    assert digest_of({"scales": ["deep", {"in": str(one)}]}, {}) != digest_of(
        {"scales": ["deep", {"in": str(other)}]}, {}
    )
    texts = [str(tmp_path), str(tmp_path / "none"), "scales.json", "a/b", "a/\0"]
    for text in texts:  # a folder, or no file
        assert canonical(text, {}) == text


def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise PermissionError(13, "denied")

    (tmp_path / "scales.json").write_text("1")
    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(ConnectorError, match=r"scales is the file .* cannot be read.*identity"):
        canonical(str(tmp_path / "scales.json"), {}, path="scales")
    assert canonical(str(tmp_path / "scales.json"), {}, identity="a") == ["declared", "a"]
