# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The sockets of servers in a pool's runtime directory, and requests to them.

A server and each standby have a socket with its own name, ``admin-*.sock``. The one that becomes
active renames its socket to ``admin.sock``, over that of a killed server. A renamed socket
continues to work. The directory is locked while names change, so a server that ends does not remove
its successor's.

The kernel accepts paths of at most 107 bytes. A longer one is opened relative to a descriptor of
its directory.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from beluga.admin.routes import AdminResponse
from beluga.arguments import StrPath, path_of
from beluga.errors import AdminError, NoServerError

_T = TypeVar("_T")
_TIMEOUT_S = 10.0
SERVING = "admin.sock"
_OTHERS = "admin-*.sock"
_PATH_MAX = 107  # bytes of sun_path before its final zero
_CONNECT_S = 5.0
_AGAIN_S = 0.01


class LocalSocket:
    """A listening socket in ``directory``. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"admin-{secrets.token_hex(4)}.sock"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _locked(directory):
                _remove_stale(directory)
                with _short(directory, self._name) as path:
                    self.socket.bind(path)
                group = stat.S_IMODE(directory.stat().st_mode) & stat.S_IWGRP
                self._path.chmod(0o660 if group else 0o600)
                self._inode = self._path.stat().st_ino
            self.socket.listen(128)
        except BaseException:
            self.socket.close()
            raise

    @property
    def _path(self) -> Path:
        return self._directory / self._name

    def claim(self) -> None:
        """Take the name of the active server."""
        with _locked(self._directory):
            if self._own():
                self._path.rename(self._directory / SERVING)
                self._name = SERVING

    def remove(self) -> None:
        """Remove the name, unless another server has taken it."""
        with suppress(OSError), _locked(self._directory):
            if self._own():
                self._path.unlink()

    def _own(self) -> bool:
        try:
            return self._path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False


def connect(directory: Path, name: str, timeout_s: float = _CONNECT_S) -> socket.socket:
    """Connect to a socket of the directory. Raises OSError."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end_s = time.monotonic() + timeout_s
    try:
        peer.settimeout(timeout_s)
        with _short(directory, name) as path:
            while True:
                try:
                    peer.connect(path)
                    break
                except BlockingIOError:  # the backlog is full, and the kernel does not wait
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(_AGAIN_S)
    except BaseException:
        peer.close()
        raise
    return peer


def other_names(directory: Path) -> list[str]:
    """Return the names of the sockets of standby servers, and of some that have ended."""
    return sorted(path.name for path in directory.glob(_OTHERS))


def _remove_stale(directory: Path) -> None:
    """Remove the sockets of killed standby servers."""
    for name in other_names(directory):
        try:
            connect(directory, name).close()
        except ConnectionRefusedError:
            (directory / name).unlink(missing_ok=True)
        except OSError:
            continue


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def _short(directory: Path, name: str) -> Iterator[str]:
    path = str(directory / name)
    if len(os.fsencode(path)) <= _PATH_MAX:
        yield path
        return
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


class _Connection(http.client.HTTPConnection):
    def __init__(self, directory: Path, name: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._target = directory, name, timeout_s

    def connect(self) -> None:
        self.sock: socket.socket = connect(*self._target)


def request(  # noqa: PLR0913  all but the first two named
    directory: StrPath,
    path: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    name: str = SERVING,
    timeout_s: float = _TIMEOUT_S,
) -> AdminResponse:
    """Make one request to the server whose pool has this runtime directory.

    Raises NoServerError if no server of the pool runs on this host, and AdminError with the text of
    an error response.
    """
    directory = path_of("directory", directory)
    connection = _Connection(directory, name, timeout_s)
    try:
        connection.request(method, path, body)
        received = connection.getresponse()
        response = AdminResponse(received.read(), received.getheader("Content-Type", ""))
        status = received.status
    except (FileNotFoundError, ConnectionError, http.client.HTTPException) as error:
        raise NoServerError(
            "no server of this pool runs on this host; start 'beluga serve', or run "
            "this on the host of the pool's server"
        ) from error
    except (TimeoutError, BlockingIOError):
        raise AdminError(f"the server did not respond to {path} in {timeout_s:g} s") from None
    except PermissionError:
        raise AdminError(
            f"{directory / name}: this user has no access to the server; join the directory's group"
        ) from None
    finally:
        connection.close()
    if status >= http.client.BAD_REQUEST:
        raise AdminError(response.body.decode(errors="replace").strip())
    return response


def request_json(directory: StrPath, path: str, kind: type[_T], value: object = None) -> _T:
    """Return the JSON value of an answer, which is of this type. With ``value`` the request is a
    POST with it as the body.

    Raises as :func:`request`, and AdminError for an answer of another type.
    """
    method, body = ("GET", None) if value is None else ("POST", json.dumps(value).encode())
    answer = json.loads(request(directory, path, method=method, body=body).body)
    if not isinstance(answer, kind):
        raise AdminError(
            f"the server's response to {path} is not a {kind.__name__}; use the "
            "same version on both sides"
        )
    return answer


def request_any(directory: StrPath, path: str) -> AdminResponse:
    """Send a request to the pool's server on this host, or else to a standby here.

    Raises as :func:`request`.
    """
    try:
        return request(directory, path)
    except NoServerError:
        for name in standing_by(directory):
            return request(directory, path, name=name)
        raise


def standing_by(directory: StrPath) -> list[str]:
    """Return the names of the sockets of responding standby servers on this host."""
    directory = path_of("directory", directory)
    names = []
    for name in other_names(directory):
        try:
            connect(directory, name).close()
        except OSError:
            continue
        names.append(name)
    return names
