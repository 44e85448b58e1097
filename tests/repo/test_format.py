# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool format has one source, is frozen, is the same in C and Python, and is listed in
FORMAT.md.
"""

import re
import sys
from pathlib import Path

import pytest
from cffi import FFI
from support.commands import captured

from beluga import _build
from beluga._ffi import ffi, lib

ROOT = Path(__file__).resolve().parents[2]
HEADER = _build.cdef(("format/pool_format.h",))
STRUCTS = re.findall(r"typedef struct (\w+)", HEADER)
ENUMS = re.findall(r"^enum (\w+)", HEADER, re.MULTILINE)

# The structs that have their own line in the pool.
LINES = (
    *("bl_epoch_line", "bl_heartbeat_line", "bl_lobby_request", "bl_lobby_reply", "bl_entry"),
    *("bl_session_line", "bl_request", "bl_reply", "bl_extent_line"),
)


# BL_FORMAT_VERSION and the hash of all declarations: both change with the format, and CHANGELOG.md
# has an entry under "Pool format".
FROZEN = (6, 0x28DCB5FA63880F62)


@pytest.mark.parametrize("name", STRUCTS)
def test_no_struct_has_padding(name: str) -> None:
    end = 0
    for field, place in ffi.typeof(name).fields:
        assert place.offset == end, f"{name} has a hole before {field}"
        end += ffi.sizeof(place.type)
    assert end == ffi.sizeof(name)


@pytest.mark.parametrize("name", LINES)
def test_every_line_struct_has_64_bytes(name: str) -> None:
    assert ffi.sizeof(name) == lib.BL_LINE_SIZE


def test_the_superblock_is_whole_lines() -> None:
    assert ffi.sizeof("bl_superblock") % lib.BL_LINE_SIZE == 0


def test_a_change_of_the_format_has_a_version_of_its_own() -> None:
    assert (lib.BL_FORMAT_VERSION, _build.format_hash()) == FROZEN


@pytest.mark.parametrize("name", STRUCTS)
def test_the_compiled_core_agrees_with_python_on_every_struct(name: str) -> None:
    value = ffi.new(f"{name} *")  # the first touch makes cffi compare its layout with C's
    assert ffi.sizeof(value[0]) > 0


@pytest.mark.parametrize("name", ENUMS)
def test_the_compiled_core_agrees_with_python_on_every_enum(name: str) -> None:
    fresh = FFI()
    fresh.cdef(HEADER)
    for constant, value in fresh.typeof(f"enum {name}").relements.items():
        assert getattr(lib, constant) == value


def test_a_superblock_has_the_hash_of_this_format() -> None:
    made = ffi.new("bl_superblock *")
    lib.bl_superblock_make(ffi.new("bl_pool_config *"), ffi.new("bl_geometry *"), 0, 0, made)
    assert made.format_hash == _build.format_hash()


def test_the_format_hash_covers_fields_and_not_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _build.format_hash()
    monkeypatch.setattr(_build, "cdef", lambda headers: HEADER.replace("/* ", "/* well, "))
    assert _build.format_hash() == original
    monkeypatch.setattr(
        _build, "cdef", lambda headers: HEADER.replace("uint32_t sparse", "uint32_t s")
    )
    assert _build.format_hash() != original


def test_format_md_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "scripts/dev/gen_format_doc.py"), "--check"]
    result = captured(command)
    assert result.returncode == 0, result.stderr


def test_format_md_names_every_struct() -> None:
    page = (ROOT / "csrc/FORMAT.md").read_text()
    assert re.findall(r"^## (bl_\w+):", page, re.MULTILINE) == STRUCTS
