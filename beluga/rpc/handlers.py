# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The functions of a program that a server calls for its clients, by name and by annotated types.

::

    handlers = Handlers()

    @handlers.add
    def scale(values: NDArray[np.float32], by: float = 2.0) -> NDArray[np.float32]:
        return values * np.float32(by)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from beluga.arguments import short
from beluga.errors import BadTypeError, BadValueError, NoMethodError
from beluga.rpc.encoding import converted, name_of, refuse_type

LIST = "beluga.handlers"
"""The handler that every server has: it describes the others."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_F = TypeVar("_F", bound=Callable[..., object])


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerInfo:
    """How a server describes a handler: its name, the names of its parameters with their types,
    the parameters that may be left out, the type of its result, and the first line of its
    docstring.
    """

    name: str
    parameters: dict[str, str]
    optional: list[str]
    returns: str
    help: str

    def __str__(self) -> str:
        shown = ", ".join(
            f"{name}: {kind}{' = ...' if name in self.optional else ''}"
            for name, kind in self.parameters.items()
        )
        return f"{self.name}({shown}) -> {self.returns}"


class _Handler:
    """A function with the types of its parameters and of its result."""

    def __init__(self, function: Callable[..., object], name: str) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise BadTypeError(f"a handler is a plain function, not {short(function)}; give one")
        self.function, self.name = function, name
        try:
            self.signature = inspect.signature(function)
            hints = typing.get_type_hints(function)
        except (ValueError, TypeError):
            raise BadTypeError(f"{name} has no signature in Python; give a function") from None
        except NameError as error:
            raise BadTypeError(
                f"an annotation of {name} cannot be read ({error}); import the types that it names "
                "at run time"
            ) from None
        for parameter in self.signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise BadTypeError(
                    f"{name} has the parameter *{parameter.name}; a handler names all of its "
                    "parameters"
                )
        for one in (*self.signature.parameters, "return"):
            if one not in hints:
                raise BadTypeError(f"{name} has no type for '{one}'; annotate it")
            refuse_type(hints[one], f"{name}: {one}")
        self.returns = hints.pop("return")
        self.hints = hints

    def bind(
        self, arguments: Sequence[object], named: Mapping[str, object]
    ) -> Callable[[], object]:
        """Return the function with arguments that came in a message. Raises BadTypeError for
        arguments that it does not take.
        """
        try:
            bound = self.signature.bind(*arguments, **named)
        except TypeError as error:
            raise BadTypeError(f"{self.name}: {error}; it is {self.info()}") from None
        for name, value in bound.arguments.items():
            bound.arguments[name] = converted(value, self.hints[name], f"{self.name}: {name}")
        return functools.partial(self.function, *bound.args, **bound.kwargs)

    def info(self) -> HandlerInfo:
        parameters = self.signature.parameters
        return HandlerInfo(
            name=self.name,
            parameters={name: name_of(self.hints[name]) for name in parameters},
            optional=[n for n, one in parameters.items() if one.default is not one.empty],
            returns=name_of(self.returns),
            help=(inspect.getdoc(self.function) or "").partition("\n")[0],
        )


class Handlers:
    """Functions that a server calls for its clients: see :meth:`Server.register`.

    Each parameter and the result are annotated with None, bool, int, float, str, bytes,
    numpy.ndarray (or ``NDArray[...]``, which checks the dtype), a dataclass, or a list, tuple,
    ``dict[str, ...]`` or union of these. A function is called on a thread of the server's process;
    with more than one thread it must be safe to be called by several at a time.

    ``functions`` are added under their own names. Raises as :meth:`add` does.
    """

    def __init__(self, *functions: Callable[..., object]) -> None:
        self._handlers: dict[str, _Handler] = {}
        self.add(self._describe, name=LIST)
        for one in functions:
            self.add(one)

    def add(self, function: _F, *, name: str | None = None) -> _F:
        """Add a function under a name, by default its own, and return it as it is: this is a
        decorator, too.

        Raises :class:`~beluga.errors.BadTypeError` for a parameter or a result without a type or of
        a type that no message carries, and :class:`~beluga.errors.BadValueError` for a name that is
        taken, or that is no name.
        """
        chosen = getattr(function, "__name__", "") if name is None else name
        if not isinstance(chosen, str) or not _NAME.fullmatch(chosen):
            raise BadValueError(f"{short(chosen)} is no name of a handler; give letters and digits")
        if chosen in self._handlers:
            raise BadValueError(f"there is a handler {chosen!r} already; give another name")
        self._handlers[chosen] = _Handler(function, chosen)
        return function

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the functions, sorted."""
        return iter(sorted(set(self._handlers) - {LIST}))

    def __len__(self) -> int:
        """Return how many functions there are."""
        return len(self._handlers) - 1

    def infos(self) -> list[HandlerInfo]:
        """Describe the functions, by name."""
        return [self._handlers[name].info() for name in self]

    def bind(
        self, name: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> Callable[[], object]:
        """Return the call of a function with arguments that came in a message.

        Raises :class:`~beluga.errors.NoMethodError` if there is none of this name, and
        :class:`~beluga.errors.BadTypeError` for arguments that it does not take.
        """
        handler = self._handlers.get(name)
        if handler is None:
            there = ", ".join(self) or "none"
            raise NoMethodError(f"the server has no handler {short(name)}; it has {there}")
        return handler.bind(arguments, named)

    def returns(self, name: str) -> object:
        """Return the annotated type of a function's result."""
        return self._handlers[name].returns

    def _describe(self) -> list[HandlerInfo]:
        return self.infos()


def load_handlers(place: str) -> Handlers:
    """Import ``module:name``, as ``cxl-rpc serve`` does: a :class:`Handlers`, a list of functions,
    or a dictionary of functions by name.

    The module is one that Python finds, else ``module.py`` of the current folder. Raises
    :class:`~beluga.errors.BadValueError` if there is no such module or name in it, and
    :class:`~beluga.errors.BadTypeError` if it is something else.
    """
    module, colon, name = place.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), name]):
        raise BadValueError(
            f"{short(place)} names no handlers; give MODULE:NAME, such as jobs:handlers"
        )
    found = getattr(_module(module), name, None)
    if found is None:
        raise BadValueError(f"the module {module} has no {name}; name its Handlers")
    if isinstance(found, Handlers):
        return found
    handlers = Handlers()
    if isinstance(found, Mapping):
        for key, one in found.items():
            handlers.add(one, name=key)
    elif isinstance(found, list | tuple):
        for one in found:
            handlers.add(one)
    else:
        raise BadTypeError(f"{place} is {short(found)}; give a Handlers or a list of functions")
    return handlers


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise BadValueError(
                f"the module {name} imports {error.name}, which is not installed; install it, or "
                "name its folder in PYTHONPATH"
            ) from None
    path = Path(*name.split(".")).with_suffix(".py").absolute()
    # This very file is read, and the search path stays as it is: nothing else is ever imported from
    # the current folder (D20).
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise BadValueError(
            f"there is no module {name}, nor {path}; name its folder in PYTHONPATH"
        ) from None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise BadValueError(
            f"the module {name} imports {error.name}, which is not installed; install it, or name "
            "its folder in PYTHONPATH"
        ) from None
    return module
