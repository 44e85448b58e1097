# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tokens and certificates, for listeners that other machines can reach."""

from __future__ import annotations

import base64
import binascii
import hmac
import ssl
from pathlib import Path

from beluga.errors import SettingsError
from beluga.text import decode_text

_LENGTH_MIN = 16
_SIZE_MAX = 4096


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
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(f"the token file {path} cannot be read: {why}") from None
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
        why = getattr(error, "strerror", None) or error
        raise SettingsError(
            f"TLS with the certificate {certificate} and the key {key} does not work ({why}); give "
            "PEM files that belong together, with a key without a passphrase"
        ) from None
    return context
