# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Who may send requests to a listener, and addresses without secrets. ``http_server.py`` has the
defenses of connections and input; docs/operate/listeners.md has the table of all listeners.

A page of another site reaches listeners on the loopback address in two ways. It may send a request
whose answer it cannot read, such as a POST that changes something. Or its own host name resolves to
this machine (DNS rebinding); then the browser treats both as one site. The first request has the
other site's Origin, the second one a Host that is not a name of this machine.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from beluga.errors import RouterError, SettingsError
from beluga.text import decode_text

_OTHER_SITES = {"cross-site", "same-site"}  # of Sec-Fetch-Site; another port is another origin
ANY_NAME = "*"
_SINGLE_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_ODD = re.compile(r"//|/\.{1,2}(?:/|$)|[\\\x00-\x1f\x7f%]|;")
_LENGTH_MIN = 16
_SIZE_MAX = 4096
# The start of an address. A password may contain a comma, too.
_START = re.compile(r"(?:(?<=[,=\s])|^)(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_USER = re.compile(r"[^\s=,]*@")  # of an address without a scheme
_OPTIONS = re.compile(r"[?#]")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(header: str) -> str:
    """Return the host of a ``Host`` header, without its port and brackets."""
    host, colon, port = header.rpartition(":")
    name = host if colon and port.isdecimal() else header
    return name.removeprefix("[").removesuffix("]").lower()


class KnownHosts:
    """The allowed values of a ``Host`` header: addresses, ``localhost``, this machine's own names,
    the listener's configured name, and the names that an operator allows.

    An address is always allowed: it cannot resolve to anything else.
    """

    def __init__(
        self, listening: str, allowed: Iterable[str] = (), *, single_labels: bool = False
    ) -> None:
        """``*`` among the allowed names allows all. With ``single_labels`` names without a dot are
        allowed, too, such as a container's. No site on the internet has one, but a name with a
        final dot may be a top-level domain.
        """
        machine = socket.gethostname().lower()
        allowed = {name.lower().removesuffix(".") for name in allowed}
        self._any = ANY_NAME in allowed
        self._single_labels = single_labels
        self._names = {"localhost", machine, machine.partition(".")[0], listening.lower(), *allowed}
        self._last: object = None  # the last allowed header: most requests have the same

    def __contains__(self, header: str) -> bool:
        if header == self._last:
            return True
        allowed = self._allows(host_of(header))
        if allowed:
            self._last = header
        return allowed

    def _allows(self, host: str) -> bool:
        name = host.removesuffix(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            single = self._single_labels and _SINGLE_LABEL.fullmatch(host) is not None
            return self._any or single or name in self._names or name.endswith(".localhost")
        return True


def from_other_site(headers: Mapping[str, str], allowed: Iterable[str] = ()) -> bool:
    """Return whether a browser sent this request for a page of another origin. ``allowed`` are
    origins such as ``https://chat.example``.

    Programs send no Origin, and browsers send one with each POST.
    """
    origin = headers.get("Origin")
    if origin is None:
        return headers.get("Sec-Fetch-Site") in _OTHER_SITES
    if origin in allowed:
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("Host", "").lower()
    except ValueError:
        return True


@lru_cache(maxsize=64)  # requests have few paths, and each is looked up twice
def plain_path(raw: str) -> str | None:
    """Return a raw path decoded and without a trailing slash, or None if servers interpret it
    differently: it has an empty or a dotted segment, a backslash, a control character, parameters
    of a segment, or is encoded twice. Example: ``/v1/%2e%2e/sleep`` is ``/sleep`` for some servers.

    A rule about paths is safe only if every server behind it parses the path in the same way.
    """
    path = unquote(raw)
    if not path.startswith("/") or "/" in unquote(raw.replace("/", "")) or _ODD.search(path):
        return None
    return path if path == "/" else path.removesuffix("/")


class Token:
    """A secret that requests must carry: ``Authorization: Bearer TOKEN``, or the password of a
    browser's Basic authentication. Its text appears in no error, log or representation.
    """

    def __init__(self, secret: str) -> None:
        self.secret = secret.encode()

    def __repr__(self) -> str:
        return "Token(...)"

    def shown_by(self, authorization: str) -> bool:
        """Return whether an ``Authorization`` header carries it, in constant time."""
        kind, _, value = authorization.partition(" ")
        shown = value.strip().encode(errors="replace")
        if kind.lower() == "basic":
            try:
                shown = base64.b64decode(shown, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != "bearer":
            return False
        return self.equals(shown)

    def equals(self, shown: bytes) -> bool:
        """Return whether this is the token, in constant time."""
        return hmac.compare_digest(shown, self.secret)


def read_token(path: Path) -> Token:
    """Read a token from the first line of a file. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            text = decode_text(file.read(_SIZE_MAX)).partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(
            f"the token file {path} cannot be read: {cause}; name a text file"
        ) from None
    if len(text) < _LENGTH_MIN:
        raise SettingsError(
            f"the token in {path} has {len(text)} characters; make one of at least {_LENGTH_MIN}, "
            "such as by 'openssl rand -hex 32'"
        )
    return Token(text)


def read_tls(text: str) -> ssl.SSLContext:
    """Return the context of a listener from ``CERTIFICATE,KEY``: two PEM files, of which the first
    has the whole chain. Raises SettingsError.
    """
    certificate, comma, key = text.partition(",")
    if not (certificate and comma and key):
        raise SettingsError(f"{text!r} is not CERTIFICATE,KEY: name two PEM files")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def encrypted() -> str:  # otherwise OpenSSL prompts at the terminal
        raise ValueError("the key is encrypted")

    try:
        context.load_cert_chain(certificate, key, encrypted)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        cause = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"TLS with the certificate {certificate} and the key {key} does not work ({cause}); "
            "give PEM files that belong together, with a key without a passphrase"
        ) from None
    return context


def shown_url(text: str) -> str:
    """Return a text with its addresses without users, passwords and options. Examples:
    ``nats://me:secret@host:4222`` is shown as ``nats://host:4222``, and ``m=tls://token@a,tls://b``
    as ``m=tls://a,tls://b``.
    """
    head, *addresses = _START.split(text)
    if not addresses:
        return _USER.sub("", head)
    return head + "".join(map(_shown, addresses))


def _shown(address: str) -> str:
    """Return an address without its secrets. A password may have any character, so all before the
    last @ is left out; if that follows a ? or #, the rest may be of a password or an option.
    """
    scheme, mark, remainder = address.partition("://")
    options = _OPTIONS.search(remainder)
    user = remainder.rfind("@")
    if options is None:
        return scheme + mark + remainder[user + 1 :]
    end = "," if remainder.endswith(",") else ""  # another address follows
    if user > options.start():
        return f"{scheme}{mark}...{end}"
    return scheme + mark + remainder[user + 1 : options.start()] + end


_ENDPOINT = re.compile(r"tcp://.+:([0-9]+|\*|!)|ipc://.+")  # the endpoints that ZMQ accepts
_PORT_MAX = 65535


def check_endpoint(endpoint: str) -> None:
    """Raise RouterError for a text that is not an endpoint of ZMQ."""
    if not _ENDPOINT.fullmatch(endpoint):
        raise RouterError(f"{endpoint!r} is not an endpoint; use tcp://HOST:PORT or ipc:///PATH")
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp:") and port.isdecimal() and int(port[:6]) > _PORT_MAX:
        raise RouterError(f"{endpoint} has a port above {_PORT_MAX}; give a smaller one")
