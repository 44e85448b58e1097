# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Functions that a server calls for its clients, by name and with annotated types.

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
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from beluga.arguments import short
from beluga.errors import BadTypeError, BadValueError, NoMethodError
from beluga.rpc.encoding import converted, name_of, refuse_type

LIST = "beluga.handlers"
"""A handler that every server has. It returns the descriptions of the others."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_F = TypeVar("_F", bound=Callable[..., object])


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerInfo:
    """A server's description of a handler: its name, its parameters with their types, the optional
    parameters, the type of its result, and the first line of its docstring.
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
        if inspect.iscoroutinefunction(function):
            raise BadTypeError(
                f"a handler must be a plain function, but {name} is a coroutine function; remove "
                "its async, or let it call asyncio.run()"
            )
        if not callable(function):
            raise BadTypeError(
                f"a handler must be a plain function, not {short(function)}; give one"
            )
        self.function, self.name = function, name
        try:
            self.signature = inspect.signature(function)
            hints = typing.get_type_hints(function)
        except (ValueError, TypeError):
            raise BadTypeError(f"{name} has no Python signature; give a function") from None
        except NameError as error:
            raise BadTypeError(
                f"an annotation of {name} cannot be resolved ({error}); import the types that it "
                "names at run time"
            ) from None
        for parameter in self.signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise BadTypeError(
                    f"{name} has the parameter *{parameter.name}; name each parameter of a handler"
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
        """Bind decoded arguments to the function. Raises BadTypeError if they do not fit its
        signature.
        """
        try:
            bound = self.signature.bind(*arguments, **named)
        except TypeError as error:
            raise BadTypeError(f"{self.name}: {error}; its signature is {self.info()}") from None
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
    ``dict[str, ...]`` or union of these. Functions run on threads of the server's process; with
    more than one thread they must be thread-safe.

    ``functions`` are added under their own names. Raises as :meth:`add` does.
    """

    def __init__(self, *functions: Callable[..., object]) -> None:
        self._handlers: dict[str, _Handler] = {}
        self.add(self._describe, name=LIST)
        for one in functions:
            self.add(one)

    def add(self, function: _F, *, name: str | None = None) -> _F:
        """Add a function under a name, by default its own. Returns the function unchanged, so this
        is also a decorator (``@handlers.add``). For another name call it:
        ``handlers.add(function, name="other")``.

        Raises :class:`~beluga.errors.BadTypeError` for a parameter or result without a type or with
        a type that cannot be sent, and :class:`~beluga.errors.BadValueError` for a name that is
        taken or invalid.
        """
        chosen = getattr(function, "__name__", "") if name is None else name
        if not isinstance(chosen, str) or not _NAME.fullmatch(chosen):
            raise BadValueError(
                f"{short(chosen)} is not a valid name of a handler; give letters and digits"
            )
        if chosen in self._handlers:
            raise BadValueError(f"a handler {chosen!r} exists already; give another name")
        self._handlers[chosen] = _Handler(function, chosen)
        return function

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the functions, sorted."""
        return iter(sorted(set(self._handlers) - {LIST}))

    def __contains__(self, name: object) -> bool:
        """Return whether there is a function of this name."""
        return name in self._handlers

    def __len__(self) -> int:
        """Return the number of functions."""
        return len(self._handlers) - 1

    def infos(self) -> list[HandlerInfo]:
        """Return the descriptions of the functions, sorted by name."""
        return [self._handlers[name].info() for name in self]

    def bind(
        self, name: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> Callable[[], object]:
        """Return a function bound to decoded arguments.

        Raises :class:`~beluga.errors.NoMethodError` if no function has this name, and
        :class:`~beluga.errors.BadTypeError` if the arguments do not fit its signature.
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

    The module is searched in Python's path, then as ``module.py`` in the current folder. Raises
    :class:`~beluga.errors.BadValueError` if the module or the name does not exist, and
    :class:`~beluga.errors.BadTypeError` if it is something else.
    """
    module, colon, name = place.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), name]):
        raise BadValueError(
            f"{short(place)} does not name handlers; give MODULE:NAME, such as jobs:handlers"
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
        return _imported(name, lambda: importlib.import_module(name))
    except ModuleNotFoundError:
        pass
    path = Path(*name.split(".")).with_suffix(".py").absolute()
    # Load this one file and leave the search path alone: nothing else may be imported from the
    # current folder (D20).
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise BadValueError(
            f"there is neither a module {name} nor a file {path}; add its folder to PYTHONPATH"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    loader = spec.loader
    _imported(name, lambda: loader.exec_module(module))
    return module


def _imported(name: str, load: Callable[[], Any]) -> Any:
    """Import a module. Raises BadValueError in one line for whatever its code raises, and
    ModuleNotFoundError if there is no such module.
    """
    try:
        return load()
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise
        raise BadValueError(
            f"the module {name} imports {error.name}, which is not installed; install it, or add "
            "its folder to PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{at.filename}:{at.lineno}"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
        raise BadValueError(
            f"the module {name} cannot be imported ({text:.200}, at {place}); correct it"
        ) from error
