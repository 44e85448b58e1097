# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options shared by several commands, and the pool that they name."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beluga import config
from beluga.cli.frame import BadParameter, Option
from beluga.cli.logs import FORMATS, LEVELS
from beluga.errors import (
    BelugaError,
    DeviceForeignError,
    DeviceMismatchError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    PoolError,
)

if TYPE_CHECKING:  # the help of the programs must not import pools or numpy
    from beluga.pool import Pool


def size(text: str | int) -> int:
    """Parse ``4096``, ``64MiB`` or ``2G``. Returns bytes."""
    from beluga.pool import parse_size

    try:
        return parse_size(text)
    except DeviceSpecError as error:
        raise BadParameter(str(error)) from None


@contextmanager
def as_bad_value(
    *kinds: type[Exception], excepted: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert errors about the values of options to errors of the command line, with exit
    status 2. Those of ``excepted`` classes are failures of the operation.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, excepted):
            raise
        raise BadParameter(str(error)) from None


def refuse_alone(needed: str, present: object, **given: object) -> None:
    """Raise BadParameter for an option that is given without the one that it needs."""
    for name, value in given.items():
        if value and not present:
            raise BadParameter(f"--{name.replace('_', '-')} needs {needed}; give both")


_WRONG_DEVICES = (
    *(DeviceForeignError, DeviceMismatchError, DeviceMissingError, DevicePermissionError),
    DeviceSpecError,
)


@contextmanager
def naming_devices() -> Iterator[None]:
    """Convert errors about devices on the command line, and about the values of a new pool, to
    errors of the command line, with exit status 2.
    """
    try:
        yield
    except PoolError as error:
        if isinstance(error, _WRONG_DEVICES) or type(error) is PoolError:
            raise BadParameter(str(error)) from None
        raise


def among(*words: str) -> Callable[[str], list[str]]:
    """Return a shell completion for an option that accepts one of these words, or several separated
    by commas.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in words if word.startswith(last)]

    return complete


Json = Annotated[bool, Option("--json", help="Print JSON on standard output.")]
Wide = Annotated[
    bool,
    Option("--wide", help="Show every column, even if the terminal is too narrow."),
]
JsonLines = Annotated[
    bool,
    Option(
        "--json",
        help=(
            "Print one JSON object per line on standard output for each event, such as the start "
            "and the end."
        ),
    ),
]
PoolPaths = Annotated[
    list[str] | None,
    Option(
        "--pool", metavar="PATH", help="A device of the pool. Repeat the option for each device."
    ),
]
Host = Annotated[
    int | None,
    Option(
        min=0,
        max=63,
        help="This machine's number among the pool's hosts. Required for pools on devdax.",
    ),
]
Timeout = Annotated[float, Option("--timeout", min=0.001, help="Seconds to wait for the server.")]

LogLevel = Annotated[
    str | None,
    Option(
        "--log-level",
        words=LEVELS,
        help=(
            "The lowest level that is logged. Default: info for servers, warning for other "
            "commands."
        ),
    ),
]
LogFormat = Annotated[
    str | None,
    Option(
        "--log-format",
        words=FORMATS,
        help="The log's format: text, or json for one JSON object per line of stderr.",
    ),
]


def need(extra: str, *packages: str) -> None:
    """Fail early if a package of this extra is missing."""
    for name in packages:
        if find_spec(name) is None:
            raise BelugaError(f"this command needs {name}; pip install 'beluga-kv[{extra}]'")


def read_at_most(limit: int, path: Path, what: str) -> bytes:
    """Read a file, or stdin (-), which may be endless. Raises BelugaError after ``limit`` + 1
    bytes.
    """
    if path == Path("-"):
        data = sys.stdin.buffer.read(limit + 1)
    else:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise BelugaError(f"{path} has more than {limit} bytes, the limit for {what}")
    return data


def check_output(path: Path) -> None:
    """Fail early if the command could not write its result to ``path``."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # do not open a pipe or device: that may block, or affect its reader
    new = not path.exists()
    with path.open("ab"):
        pass
    if new:
        path.unlink()


def write_whole(path: Path, data: bytes | bytearray) -> None:
    """Write a file atomically: if that fails, as on a full disk, an existing file is unchanged. A
    pipe or a device gets the bytes directly.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        if target.exists():
            draft.chmod(stat.S_IMODE(target.stat().st_mode))
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        error.filename = str(path)  # the user's name, which a failed write lacks
        raise
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def open_pool(paths: list[str] | None) -> Pool:
    """Open the pool on these devices, or the default pool."""
    from beluga.pool import Pool

    with naming_devices() if paths or config.pool_paths() else nullcontext():
        return Pool.open(paths) if paths else Pool.mount()


def runtime_dir_of(paths: list[str] | None) -> Path:
    """Return the runtime directory of the pool on these devices, or of the default pool, for a
    command that needs only the pool's server. While a process has the pool open, this also works if
    the devices cannot be opened any more. Otherwise raises the errors of :func:`open_pool`.
    """
    from beluga.pool import runtime_dir_of_missing

    try:
        with open_pool(paths) as pool:
            return pool.runtime_dir
    except (PoolError, BadParameter):
        if (directory := runtime_dir_of_missing(paths)) is None:
            raise
        return directory
