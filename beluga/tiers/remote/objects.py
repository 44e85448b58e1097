# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Objects in S3, GCS, Azure, a local folder or this process's memory, through obstore."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from beluga.errors import TierError

from .options import STORES, store_options
from .settings import RemoteSettings
from .store import Contents, RefusedError

_HERE = ("file", "memory")
# obstore has no exception class for most statuses, such as 413.
_STATUS = re.compile(r"status code: (4\d\d)")
_NOT_NOW = (408, 425, 429)  # statuses that concern the store, not the request


class ObstoreStore:
    """A store of obstore. The URL's query has options of its client, for example ``endpoint``,
    ``region`` and ``access_key_id`` for S3. Other options come from the environment
    (``options.py``).
    """

    batch = 1
    threads = 8

    def __init__(self, url: SplitResult, settings: RemoteSettings) -> None:
        try:
            import obstore
        except ImportError as error:
            raise TierError(
                f"{url.scheme}:// needs obstore: pip install beluga-kv[tiers]"
            ) from error
        self._obstore: Any = obstore
        self._limit = settings.object_bytes
        answers = obstore.exceptions
        self._refusals: tuple[type[Exception], ...] = (
            FileNotFoundError,  # a missing bucket: a missing object is not an error here
            ClientPanicError,  # a retry would panic again
            PermissionError,
            answers.UnauthenticatedError,
            answers.PermissionDeniedError,
            answers.NotSupportedError,
            answers.InvalidPathError,
            answers.PreconditionError,
            answers.AlreadyExistsError,
        )
        if url.scheme in _HERE:
            # Errors of a local store do not come from a network: a retry does not help, and a full
            # folder still has its objects.
            self._refusals = (Exception,)
        try:
            self._store = _open(url, settings)
        except (answers.BaseError, OSError, ValueError, ClientPanicError) as error:
            raise TierError(
                f"{url.scheme}://{url.hostname or ''}{url.path} cannot be opened: {_line(error)}"
            ) from error

    def get(self, name: str) -> Contents | None:
        """Return an object, or None."""
        try:
            with no_panic():
                found = self._obstore.get(self._store, name)
                size = found.meta["size"]
                if size <= self._limit:
                    return memoryview(found.bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._judged(error) from error
        raise RefusedError(f"an object of {size} bytes is too large")

    def put(self, name: str, data: memoryview) -> None:
        """Store an object with one request."""
        try:
            with no_panic():
                self._obstore.put(self._store, name, data, use_multipart=False)
        except Exception as error:
            raise self._judged(error) from error

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which of the objects exist, with one request each."""
        return [self._exists(name) for name in names]

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects. Returns how many there were."""
        return sum(self._delete(name) for name in names)

    def close(self) -> None:
        """Do nothing: obstore closes its connections when it is freed."""

    def _delete(self, name: str) -> bool:
        if not self._exists(name):  # S3 reports success for missing objects, too
            return False
        try:
            with no_panic():
                self._obstore.delete(self._store, name)
        except FileNotFoundError:
            return False  # another client was faster
        except Exception as error:
            raise self._judged(error) from error
        return True

    def _judged(self, error: Exception) -> Exception:
        """Convert an error of a request: RefusedError if the store replied that it rejects this
        request.
        """
        status = _STATUS.search(_line(error))
        is_refusal = status is not None and int(status[1]) not in _NOT_NOW
        if is_refusal or isinstance(error, self._refusals):
            return RefusedError(_line(error))
        return ConnectionError(_line(error))

    def _exists(self, name: str) -> bool:
        try:
            with no_panic():
                self._obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._judged(error) from error
        return True


def object_store(url: str) -> Any:
    """Create the obstore store of a URL, with the tier's endpoint and credentials.

    Raises ImportError without obstore, ValueError for an endpoint that is not a URL,
    ClientPanicError, and obstore's errors.
    """
    import obstore

    from_url = obstore.store.from_url
    parts = urlsplit(url)
    if parts.scheme not in STORES:
        with no_panic():
            return from_url(url)
    options, client = store_options(parts)
    plain = parts._replace(query="", fragment="").geturl()
    with no_panic():
        return from_url(plain, config=options, client_options=client)


def _open(url: SplitResult, settings: RemoteSettings) -> Any:
    from obstore.store import LocalStore, MemoryStore, from_url

    if url.scheme in _HERE:
        if options := dict(parse_qsl(url.query, keep_blank_values=True)):
            raise ValueError(f"it takes no options, such as {', '.join(options)}")
        if url.scheme == "memory":
            return MemoryStore()
        if url.netloc not in ("", "localhost") or not url.path.startswith("/"):
            raise ValueError("give a folder as file:///path")
        return LocalStore(Path(unquote(url.path)), mkdir=True)
    if not url.netloc:
        raise ValueError(f"it has no bucket; give {url.scheme}://BUCKET/PREFIX")
    timeout = f"{int(settings.attempt_s * 1000)}ms"
    options, client = store_options(url)
    with no_panic():
        return from_url(
            url._replace(query="", fragment="").geturl(),
            config=options,
            client_options={"timeout": timeout, "connect_timeout": timeout, **client},
            retry_config={"max_retries": 0},  # the tier does the retries
        )


class ClientPanicError(Exception):
    """A client written in Rust has panicked."""


@contextmanager
def no_panic() -> Iterator[None]:
    """Raise ClientPanicError for a panic of a client. The original is not a subclass of Exception
    and would end a thread that handles all others.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ClientPanicError(f"obstore panicked: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
