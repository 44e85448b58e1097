# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Errors that a caller gets: exactly this type, and a helpful message of one line.

    @refusals(
        (lambda path: Pool.create([path], device_size=3 << 20), DeviceSpecError, "2 MiB"),
        (lambda path: Pool.open([path, path]), DeviceMismatchError, "same memory"),
    )
    def test_wrong_devices_are_refused(tmp_path: Path, refusal: Refusal) -> None:
        refusal(tmp_path / "a")
        assert not (tmp_path / "a").exists()

A row is the call, the type, and what the message contains. The call takes what the test gives it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_LENGTH_MIN = 15  # of a message that helps


@contextlib.contextmanager
def refused(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Check that the block raises ``kind``, with a one-line message that contains these words."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in text
    assert len(text) > _LENGTH_MIN
    for word in words:
        assert word in text


class Refusal:
    """One row of a table: ``refusal(*scene)`` makes the call and checks its error."""

    def __init__(self, call: Callable[..., object], kind: type[BaseException], *words: str) -> None:
        self._call, self._kind, self._words = call, kind, words

    def __call__(self, *scene: Any) -> None:
        with refused(self._kind, *self._words):
            self._call(*scene)

    def __str__(self) -> str:
        return " ".join((self._kind.__name__, *self._words[:1]))


def refusals(*rows: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Run the test once for each row, with the row as its argument ``refusal``."""
    return pytest.mark.parametrize("refusal", [Refusal(*row) for row in rows], ids=str)
