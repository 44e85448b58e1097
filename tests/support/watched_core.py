# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A watched C core, for tests of the code around calls into it."""

from collections.abc import Callable
from typing import Any

from beluga._ffi import lib


class WatchedCore:
    """The C core, with a record of its calls and hooks ``before`` and ``after`` by name. A function
    in ``fails`` is not called and returns the given value.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.fails: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(lib, name)
        if not callable(real) or name.endswith("_handler"):
            return real

        def call(*arguments: Any) -> Any:
            self.before.get(name, lambda: None)()
            result = self.fails[name] if name in self.fails else real(*arguments)
            self.after.get(name, lambda: None)()
            self.calls.append((name, arguments))
            return result

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def last(self, name: str) -> tuple[Any, ...]:
        """Return the arguments of its last call."""
        return [arguments for called, arguments in self.calls if called == name][-1]
