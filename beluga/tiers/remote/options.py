# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Options of obstore's clients: accepts all usual spellings of a store's endpoint.

obstore accepts an http endpoint only with ``allow_http``, and that only as an option of its HTTP
client. It does not support emulators of GCS or connection strings of Azure, and panics on an
endpoint that is not a URL. This module translates the spellings into the one it supports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from beluga.config import store_variable
from beluga.listening import shown_url

# The options of obstore's ClientConfig. It panics if the store's options include one of them.
_OF_CLIENT = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
    *("http1_only", "http2_only", "http2_keep_alive_interval", "http2_keep_alive_timeout"),
    *("http2_keep_alive_while_idle", "http2_max_frame_size", "pool_idle_timeout"),
    *("pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes"),
    *("randomize_addresses", "timeout", "user_agent"),
}


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
STORES = tuple(_DIALECTS)
_CONNECTION = {  # fields of Azure's connection strings
    "accountname": "account_name",
    "accountkey": "account_key",
    "blobendpoint": "endpoint",
    "sharedaccesssignature": "sas_token",
}
_GCS_ACCOUNT = ("google_base_url", "skip_signature", "service_account", "service_account_path")
_AZURITE = "http://127.0.0.1:10000"


def store_options(url: SplitResult) -> tuple[dict[str, str], dict[str, str | bool]]:
    """Return the options of the store, and those of its HTTP client. Raises ValueError for an
    endpoint that is not a URL.
    """
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
    if endpoint := store.get(dialect.endpoint):
        store[dialect.endpoint] = endpoint = _checked(endpoint, bare=url.scheme == "gs")
    if url.scheme == "az" and _emulates(store):
        endpoint = _checked(store_variable("AZURITE_BLOB_STORAGE_URL") or _AZURITE)
    if endpoint and endpoint.startswith("http://"):
        client.setdefault("allow_http", True)
        if url.scheme == "gs":
            store = _emulator_of_gcs(store)
    return store, client


def _emulator_of_gcs(store: Mapping[str, str]) -> dict[str, str]:
    """Add an account that needs no token: an emulator has no accounts, and obstore's option to skip
    signatures covers reads only.
    """
    account = {
        "gcs_base_url": store["google_base_url"],
        "disable_oauth": True,
        **dict.fromkeys(("client_email", "private_key", "private_key_id"), ""),
    }
    kept = {name: value for name, value in store.items() if name not in _GCS_ACCOUNT}
    return kept | {"service_account_key": json.dumps(account)}


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
    found = {ours: given[theirs] for theirs, ours in _CONNECTION.items() if given.get(theirs)}
    if given.get("usedevelopmentstorage", "").lower() == "true":
        found["use_emulator"] = "true"
    return found


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
