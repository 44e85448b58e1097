# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Functions that a server calls for its clients, by name and with annotated types.

::

    handlers = Handlers()

    @handlers.add
    def scale(values: NDArray[np.float32], by: float = 2.0) -> NDArray[np.float32]:
        return values * np.float32(by)

The poll loop hands each call to a thread and continues (``csrc/rpc/jobs.h``), so a slow handler
delays its caller and the calls that wait for a free thread, but not the block index.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import time
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from beluga._ffi import core, ffi, lib
from beluga.arguments import short
from beluga.errors import (
    BadTypeError,
    BadValueError,
    BelugaError,
    HandlerError,
    NoMethodError,
    QuotaError,
    RpcError,
)
from beluga.metrics import REGISTRY
from beluga.rpc.messages import (
    DTYPE_KINDS,
    MESSAGE_MAX,
    Assembly,
    failure,
    pack,
    request_of,
)
from beluga.threads import Thread

if TYPE_CHECKING:
    import numpy as np
else:
    from beluga._numpy import np

log = logging.getLogger(__name__)

LIST = "beluga.handlers"
"""A handler that every server has. It returns the descriptions of the others."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
Running: TypeAlias = "Callable[[], AbstractContextManager[core.bl_server]]"

_CALLS = REGISTRY.counter("beluga_handler_calls_total", "Calls of each handler (`handler`).")
_ERRORS = REGISTRY.counter(
    "beluga_handler_errors_total", "Calls of each handler that returned an error."
)
_SECONDS = REGISTRY.histogram(
    "beluga_handler_seconds", "Duration of each handler's calls, in seconds, without waiting."
)
_UNKNOWN = "(unknown)"  # the label of calls of handlers that do not exist; no name has parentheses
_TEXT_MAX = 1000  # characters of an error that a message carries

_SCALARS = (type(None), bool, int, float, str)
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
        raise BadValueError(
            f"module {module} has no attribute {name}; give MODULE:NAME of a Handlers object"
        )
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


class Workers:
    """Threads that run a server's handlers until the server stops.

    ``running`` yields the ``bl_server *``, and raises RpcError once the server has stopped.
    """

    def __init__(self, handlers: Handlers, running: Running, room: int, threads: int) -> None:
        self._handlers, self._running = handlers, running
        self._assembly = Assembly(self._counted, room)
        for name in handlers:  # a rate needs a first value
            _CALLS.add(0, handler=name)
            _ERRORS.add(0, handler=name)
        for number in range(threads):
            Thread(target=self._work, name=f"beluga-handler-{number}", daemon=True).start()

    def _work(self) -> None:
        taken = ffi.new("bl_function_call *")
        try:
            while True:
                with self._running() as server:
                    status = lib.bl_function_take(server, taken)
                    if status <= 0:
                        return
                    if status == 2:
                        self._assembly.forget(int(taken.lane), int(taken.nonce))
                        continue
                    call = bytearray(ffi.buffer(taken.request, taken.request_size))
                reply, status = self._answer(int(taken.lane), int(taken.nonce), call)
                with self._running() as server:
                    data = ffi.from_buffer("uint8_t[]", reply)
                    lib.bl_function_answer(server, taken.number, data, len(reply), status)
        except RpcError:  # the server has stopped
            return

    def _answer(self, lane: int, nonce: int, call: bytearray) -> tuple[bytes | bytearray, int]:
        """Return the reply and the status of a call."""
        try:
            return self._assembly.answer(lane, nonce, call), 0
        except Exception as error:
            log.warning("a handler call was refused: %s", error)
            known = isinstance(error, QuotaError)
            return b"", -(lib.BL_ERROR_QUOTA if known else lib.BL_ERROR_BAD_REQUEST)

    def _counted(self, message: bytearray) -> bytearray:
        """Call the handler of a request, count the call, and return the message with its result."""
        started_s, name = time.perf_counter(), _UNKNOWN
        try:
            called, arguments, named = request_of(message)
            if called in self._handlers:
                name = called
            reply = self._run(called, self._handlers.bind(called, arguments, named))
        except BelugaError as error:
            _ERRORS.add(handler=name)
            reply = failure(error)
        _CALLS.add(handler=name)
        _SECONDS.observe(time.perf_counter() - started_s, handler=name)
        return reply

    def _run(self, name: str, bound: Callable[[], object]) -> bytearray:
        """Call a handler, and return the message with its result. Raises HandlerError."""
        try:
            result = bound()
        # Includes sys.exit(), because other callers share the thread
        except BaseException as error:
            log.exception("the handler %s raised", name)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:_TEXT_MAX]
            raise HandlerError(f"the handler {name} raised {text}; see the server's log") from None
        try:
            kind = self._handlers.returns(name)
            made = pack({"result": converted(result, kind, f"the result of {name}")})
            if len(made) > MESSAGE_MAX:
                raise BadTypeError(
                    f"the result of {name} has more than {MESSAGE_MAX} bytes; return less"
                )
        except BadTypeError as error:
            log.error("%s", error)
            raise HandlerError(str(error)) from None
        return made


def refuse_type(kind: object, where: str) -> None:
    """Raise BadTypeError for an annotation whose values cannot be sent."""
    kind = _unaliased(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, Any, np.ndarray, bytes, *_SCALARS) or kind is None:
        return
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        for name, of_field in fields_of(kind).items():
            if of_field is not kind:
                refuse_type(of_field, f"{where}.{name}")
        return
    if origin in (typing.Union, types.UnionType, list, tuple) or (
        origin is dict and arguments[:1] == (str,)
    ):
        for argument in arguments:
            if argument is not Ellipsis:
                refuse_type(argument, where)
        return
    if origin is np.ndarray or kind in (list, tuple, dict):
        return
    raise BadTypeError(
        f"{where} is of the type {name_of(kind)}, which cannot be sent; use None, bool, int, "
        "float, str, bytes, numpy.ndarray, a dataclass, or list, tuple, dict[str, ...] or union of "
        "these"
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
    if not isinstance(value, np.ndarray) or value.dtype.kind not in DTYPE_KINDS:
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
