# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sends requests to the server of a pool through its socket in the runtime directory."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import TypeVar

from beluga.admin.local_socket import SERVING, connect, other_names
from beluga.admin.route import AdminResponse
from beluga.errors import AdminError, NoServerError

_T = TypeVar("_T")
_TIMEOUT_S = 10.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, directory: Path, name: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._place = directory, name, timeout_s

    def connect(self) -> None:
        self.sock: socket.socket = connect(*self._place)


def request(  # noqa: PLR0913  all but the first two named
    directory: Path,
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
    connection = _Connection(directory, name, timeout_s)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        found = AdminResponse(answer.read(), answer.getheader("Content-Type", ""))
        status = answer.status
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
        raise AdminError(found.body.decode(errors="replace").strip())
    return found


def request_json(directory: Path, path: str, kind: type[_T], value: object = None) -> _T:
    """Return the JSON value of an answer, which is of this type. With ``value`` the request is a
    POST with it as the body.

    Raises as :func:`request`, and AdminError for an answer of another type.
    """
    method, body = ("GET", None) if value is None else ("POST", json.dumps(value).encode())
    found = json.loads(request(directory, path, method=method, body=body).body)
    if not isinstance(found, kind):
        raise AdminError(
            f"the server's response to {path} is not a {kind.__name__}; use the "
            "same version on both sides"
        )
    return found


def request_any(directory: Path, path: str) -> AdminResponse:
    """Send a request to the pool's server on this host, or else to a standby here.

    Raises as :func:`request`.
    """
    try:
        return request(directory, path)
    except NoServerError:
        for name in standing_by(directory):
            return request(directory, path, name=name)
        raise


def standing_by(directory: Path) -> list[str]:
    """Return the names of the sockets of responding standby servers on this host."""
    found = []
    for name in other_names(directory):
        try:
            connect(directory, name).close()
        except OSError:
            continue
        found.append(name)
    return found
