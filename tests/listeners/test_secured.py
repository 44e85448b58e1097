# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tokens and certificates that settings name."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from beluga.errors import SettingsError
from beluga.listening import Token, read_tls, read_token

SECRET = "no-one-may-read-this"  # noqa: S105  it is none


def made(folder: Path, *secret: str) -> str:
    """Return the setting of a new certificate."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2"),
            *("-keyout", folder / "key", "-out", folder / "cert", "-subj", "/CN=localhost"),
            *(secret or ("-nodes",)),
        ],
        capture_output=True,
        check=True,
    )
    return f"{folder / 'cert'},{folder / 'key'}"


def test_a_token_is_not_in_its_repr() -> None:
    assert SECRET not in f"{Token(SECRET)!r} {Token(SECRET)} {[Token(SECRET)]}"


def test_a_guessable_token_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x" * 15 + "\n")
    with pytest.raises(SettingsError, match="has 15 characters; make one of at least 16"):
        read_token(file)
    file.write_text("x" * 16 + "\n")
    assert read_token(file).shown_by("Bearer " + "x" * 16)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-8"])
def test_a_token_is_read_after_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    """Editors of Windows put one in front, which no client sends."""
    file = tmp_path / "token"
    file.write_bytes(f"{SECRET}\r\nmore\r\n".encode(encoding))
    assert read_token(file).shown_by(f"Bearer {SECRET}")


def test_insecure_tls_versions_are_disabled(tmp_path: Path) -> None:
    assert read_tls(made(tmp_path)).minimum_version == ssl.TLSVersion.TLSv1_2


def test_an_encrypted_key_is_rejected_without_a_prompt(tmp_path: Path) -> None:
    setting = made(tmp_path, "-passout", f"pass:{SECRET}")
    with pytest.raises(SettingsError, match="the key is encrypted"):
        read_tls(setting)
