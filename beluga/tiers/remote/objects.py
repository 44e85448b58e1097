# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Objects in S3, GCS, Azure, a local folder or this process's memory, through obstore.

All usual spellings of a store's endpoint are accepted. obstore accepts an http endpoint only with
``allow_http``, and that only as an option of its HTTP client. It does not support emulators of GCS
or connection strings of Azure, and panics on an endpoint that is not a URL. So the spellings are
translated into the one it supports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from beluga.config import store_variable
from beluga.errors import TierError
from beluga.listening import shown_url
from beluga.tiers.remote.store import Contents, RefusedError, RemoteSettings

_LOCAL = ("file", "memory")
# obstore has no exception class for most statuses, such as 413.
_STATUS = re.compile(r"status code: (4\d\d)")
_NOT_NOW = (408, 425, 429)  # statuses that concern the store, not the request

# The options of obstore's ClientConfig. It panics if the store's options include one of them.
_OF_CLIENT = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
    *("http1_only", "http2_only", "http2_keep_alive_interval", "http2_keep_alive_timeout"),
    *("http2_keep_alive_while_idle", "http2_max_frame_size", "pool_idle_timeout"),
    *("pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes"),
    *("randomize_addresses", "timeout", "user_agent"),
}


class ObstoreStore:
    """A store of obstore. The URL's query has options of its client, for example ``endpoint``,
    ``region`` and ``access_key_id`` for S3. Other options come from the environment.
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
        if url.scheme in _LOCAL:
            # Errors of a local store do not come from a network: a retry does not help, and a full
            # folder still has its objects.
            self._refusals = (Exception,)
        try:
            self._store = _open(url, settings)
        except (answers.BaseError, OSError, ValueError, ClientPanicError) as error:
            raise TierError(
                f"{url.scheme}://{url.hostname or ''}{url.path} cannot be opened: {_line(error)}; "
                "correct its URL, or the variables of its settings"
            ) from error

    def get(self, name: str) -> Contents | None:
        """Return an object, or None."""
        try:
            with no_panic():
                result = self._obstore.get(self._store, name)
                size = result.meta["size"]
                if size <= self._limit:
                    return memoryview(result.bytes())
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

    def create(self, name: str, data: memoryview) -> None:
        """Store an object unless there is one of that name."""
        answers = self._obstore.exceptions
        try:
            with no_panic():
                self._obstore.put(self._store, name, data, use_multipart=False, mode="create")
        except (answers.AlreadyExistsError, answers.PreconditionError):
            pass
        except Exception as error:
            if "501" not in _line(error):  # a server without conditional requests
                raise self._judged(error) from error
            self.put(name, data)

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
    if parts.scheme not in _REMOTE:
        with no_panic():
            return from_url(url)
    options, client = store_options(parts)
    plain = parts._replace(query="", fragment="").geturl()
    with no_panic():
        return from_url(plain, config=options, client_options=client)


def _open(url: SplitResult, settings: RemoteSettings) -> Any:
    from obstore.store import LocalStore, MemoryStore, from_url

    if url.scheme in _LOCAL:
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
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


class _Dialect(NamedTuple):
    """The spelling of a store's options: their prefixes, the names of its endpoint, obstore's name
    for it, and the environment variables, in order of precedence.
    """

    prefixes: tuple[str, ...]
    endpoints: tuple[str, ...]
    endpoint: str
    variables: tuple[str, ...]


_DIALECTS = {
    "s3": _Dialect(
        ("aws_",),
        ("endpoint", "endpoint_url", "endpoint_url_s3"),
        "endpoint",
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ),
    "gs": _Dialect(
        ("google_", "gcs_"),
        ("endpoint", "endpoint_url", "base_url", "storage_emulator_host"),
        "google_base_url",
        ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
    ),
    "az": _Dialect(
        ("azure_storage_", "azure_"),
        ("endpoint", "endpoint_url", "blob_endpoint", "storage_endpoint"),
        "endpoint",
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    ),
}
_REMOTE = tuple(_DIALECTS)
_CONNECTION = {  # fields of Azure's connection strings
    "accountname": "account_name",
    "accountkey": "account_key",
    "blobendpoint": "endpoint",
    "sharedaccesssignature": "sas_token",
}
_GCS_ACCOUNT = ("google_base_url", "skip_signature", "service_account", "service_account_path")
_AZURITE = "http://127.0.0.1:10000"


def store_location(url: SplitResult) -> tuple[str, str]:
    """Return the endpoint and the account of a store, from its options or the environment; "" where
    neither gives any. Raises ValueError for an endpoint that is not a URL.
    """
    if url.scheme not in _REMOTE:
        return "", ""
    options, _, endpoint = _resolve(url)
    names = "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"
    from_environment = next(filter(None, map(store_variable, names)), "")
    account = options.get("account_name", from_environment) if url.scheme == "az" else ""
    return endpoint.rstrip("/").lower(), account


def store_options(url: SplitResult) -> tuple[dict[str, str], dict[str, str | bool]]:
    """Return the options of the store, and those of its HTTP client. Raises ValueError for an
    endpoint that is not a URL.
    """
    store, client, endpoint = _resolve(url)
    if endpoint.startswith("http://"):
        client.setdefault("allow_http", True)
        if url.scheme == "gs":
            store = _emulator_of_gcs(store)
    return store, client


def _resolve(url: SplitResult) -> tuple[dict[str, str], dict[str, str | bool], str]:
    """Return the options of the store, those of its HTTP client, and its endpoint or ""."""
    dialect = _DIALECTS[url.scheme]
    store: dict[str, str] = {}
    client: dict[str, str | bool] = {}
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        plain = _without_prefix(name.lower(), dialect.prefixes)
        if plain in _OF_CLIENT:
            client[plain] = value
        else:
            store[dialect.endpoint if plain in dialect.endpoints else plain] = value
    if url.scheme == "az":
        store = _connected() | store
    if not store.get(dialect.endpoint):
        given = next(filter(None, map(store_variable, dialect.variables)), "")
        store |= {dialect.endpoint: given} if given else {}
    endpoint = store.get(dialect.endpoint, "")
    if endpoint:
        store[dialect.endpoint] = endpoint = _checked(endpoint, bare=url.scheme == "gs")
    if url.scheme == "az" and _emulates(store):
        endpoint = _checked(store_variable("AZURITE_BLOB_STORAGE_URL") or _AZURITE)
    return store, client, endpoint


def _emulator_of_gcs(store: Mapping[str, str]) -> dict[str, str]:
    """Add an account that needs no token: an emulator has no accounts, and obstore's option to skip
    signatures covers reads only.
    """
    account = {
        "gcs_base_url": store["google_base_url"],
        "disable_oauth": True,
        **dict.fromkeys(("client_email", "private_key", "private_key_id"), ""),
    }
    others = {name: value for name, value in store.items() if name not in _GCS_ACCOUNT}
    return others | {"service_account_key": json.dumps(account)}


def _without_prefix(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix) and name != prefix:
            return name.removeprefix(prefix)
    return name


def _connected() -> dict[str, str]:
    """Return the options in Azure's connection string in the environment."""
    text = store_variable("AZURE_STORAGE_CONNECTION_STRING")
    pairs = (part.partition("=")[::2] for part in text.split(";") if part)
    given = {name.lower(): value for name, value in pairs}
    options = {ours: given[theirs] for theirs, ours in _CONNECTION.items() if given.get(theirs)}
    if given.get("usedevelopmentstorage", "").lower() == "true":
        options["use_emulator"] = "true"
    return options


def _emulates(store: Mapping[str, str]) -> bool:
    given = store.get("use_emulator") or store_variable("AZURE_STORAGE_USE_EMULATOR")
    return given.lower() in ("true", "1", "yes", "on")


def _checked(endpoint: str, *, bare: bool = False) -> str:
    """Return the endpoint as a URL. With ``bare``, HOST:PORT means http, as for GCS's emulators."""
    if bare and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not endpoint.isascii() or any(sign <= " " for sign in endpoint):
        shown = shown_url(endpoint)
        raise ValueError(f"its endpoint is {shown!r}; write http://HOST:PORT or https://HOST")
    return endpoint
