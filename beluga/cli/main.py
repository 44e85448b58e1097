# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The entry points of ``beluga`` and ``cxl-rpc``: they set the exit status of each command.

The exit status is 0 only on success. It is 1, with one line on stderr, for an operation that
failed, 2 for a command line that is invalid or names a wrong value, file or device, 130 after
Ctrl-C, 143 after SIGTERM, and 129 after the terminal was closed. Results go to stdout, everything
else to stderr.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from beluga import config
from beluga.errors import (
    BadTypeError,
    BadValueError,
    BelugaError,
    DeviceForeignError,
    DeviceMismatchError,
    DeviceMissingError,
    DeviceSpecError,
    InstructionError,
    SettingsError,
    SimulateError,
    TraceError,
)

_PLAIN = {
    **dict.fromkeys("█▓▇▉▊▋", "#"),
    **dict.fromkeys("▌▍▎▏▒▆▅▄", "="),
    **dict.fromkeys("░▃▂▁·…", "."),
    **dict.fromkeys("─━═–—", "-"),  # noqa: RUF001
    **dict.fromkeys("│┃║", "|"),
}
_NO_ADDRESS = errno.EADDRNOTAVAIL
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRONG_VALUES = (
    *(BadTypeError, BadValueError, DeviceSpecError, InstructionError),
    *(SettingsError, SimulateError, TraceError),
)
_WRONG_DEVICES = (DeviceForeignError, DeviceMismatchError, DeviceMissingError, DeviceSpecError)
# Errors of a file that the command line names, with their remedies
_MENDS = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ENXIO: "name a file",
    errno.ELOOP: "check the path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EISDIR: "name a file",
    errno.EACCES: "allow it, or run as another user",
    errno.EROFS: "name a file elsewhere",
}
_TOOLS = ("click", "rich", "msgspec")


def main() -> NoReturn:
    """Run the ``beluga`` command."""
    _run("beluga", "app")


def cxl_rpc() -> NoReturn:
    """Run the ``cxl-rpc`` command."""
    _run("cxl-rpc", "cxl_rpc")


def _open_streams() -> None:
    """Replace closed standard streams by /dev/null, so that the next opened file does not get a
    stream's descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  open until the end
    codecs.register_error("beluga", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="beluga")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the output's encoding does not have: bars and lines by ASCII ones,
    others by JSON escapes, so that --json stays valid.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    import json

    lacking = error.object[error.start : error.end]
    return "".join(
        _PLAIN.get(character) or json.dumps(character)[1:-1] for character in lacking
    ), error.end


def _run(name: str, program: str) -> NoReturn:
    _open_streams()
    missing = next((tool for tool in _TOOLS if find_spec(tool) is None), None)
    if missing is not None:
        sys.exit(f"{name}: error: the commands need {missing}; pip install beluga-kv")
    try:
        run = getattr(import_module("beluga.cli.app"), program)
        config.start_no_blas_threads()
    except BelugaError as error:  # such as a checkout that is not the installed one
        sys.exit(f"{name}: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # the signal is ignored, for example under nohup
        if signal.getsignal(number) != signal.SIG_IGN:
            # sys.exit lets the command clean up first
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    from beluga.cli import logs  # imported by the app

    try:
        try:
            run(prog_name=name)
        finally:
            sys.stdout.flush()  # before the status is decided
    except (BelugaError, OSError) as error:
        # Each program's message has its own server command.
        text = _message(error).replace("'beluga serve'", f"'{name} serve'")
        logs.fail(name, text, _status(error))
    except MemoryError as error:
        cause = f" ({error})" if str(error) else ""
        logs.fail(name, f"this machine's memory does not suffice{cause}; give smaller sizes")
    except AttributeError as error:
        if "cffi library" not in str(error):
            raise
        from beluga._ffi import REBUILD

        logs.fail(name, f"the C core has no {error.name}; {REBUILD}")
    except UnicodeError:
        logs.fail(name, "an argument has bytes that are not UTF-8; give text")
    sys.exit(0)


def _status(error: BaseException) -> int:
    """Return 2 for an error of the command line, which names a wrong value or file; otherwise 1."""
    if isinstance(error, OSError) and error.filename is not None:
        return 2 if error.errno in _MENDS else 1
    cause = error.__cause__
    if isinstance(cause, OSError) and ((number := cause.errno or 0) < 0 or number == _NO_ADDRESS):
        return 2  # no such host (by getaddrinfo), or an address of another machine
    return 2 if isinstance(error, _WRONG_VALUES) or isinstance(cause, _WRONG_DEVICES) else 1


def _message(error: BaseException) -> str:
    """Return an error's text, without the number of an OSError. If the output cannot be written,
    discard what is left of it.
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename is None and error.errno in _FULL:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # else the interpreter flushes it again as it ends
        return f"the output cannot be written: {error.strerror}; free space, or write it elsewhere"
    if error.filename is None:
        return error.strerror
    mend = _MENDS.get(error.errno or 0)
    return f"{error.filename}: {error.strerror}" + (f"; {mend}" if mend else "")


if __name__ == "__main__":
    main()
