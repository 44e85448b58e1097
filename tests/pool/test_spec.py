# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How users name a device."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from beluga.errors import DeviceSpecError
from beluga.pool import DeviceSpec, parse_size, show_size

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0x200000", 2 * MIB),
        ("2M", 2 * MIB),
        ("2MiB", 2 * MIB),
        ("64 KiB", 65536),
        ("3G", 3 << 30),
        ("1TiB", 1 << 40),
        ("2m", 2 * MIB),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-4", "1.5G", "4Q", "0x", "4 4", "1MB"])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with refused(DeviceSpecError, repr(text)):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_formatted_sizes_are_approximate(size: int) -> None:
    number, unit = show_size(size).split()
    scale = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert abs(float(number) * scale - size) <= 0.06 * scale


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("/p", DeviceSpec(Path("/p"))),
        ("/p@0x200000+4MiB", DeviceSpec(Path("/p"), 2 * MIB, 4 * MIB)),
        ("/p@0+1G,link=cxl0,node=1", DeviceSpec(Path("/p"), 0, 1 << 30, "cxl0", 1)),
        ("/p,node=0", DeviceSpec(Path("/p"), node=0)),
        ("/odd@name/p", DeviceSpec(Path("/odd@name/p"))),
        ("/a,b", DeviceSpec(Path("/a,b"))),
    ],
)
def test_specifications_are_parsed_and_formatted(text: str, spec: DeviceSpec) -> None:
    assert DeviceSpec.parse(text) == spec
    assert DeviceSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("/p@4096+4MiB", "offset"),
        ("/p@2MiB+5000000", "size"),
        ("/p@2MiB+2MiB", "at least 4 MiB"),
        ("/p@2QiB+4MiB", "2QiB"),
        ("/p@2M", "PATH@OFFSET"),
        ("/p@foo", "PATH@OFFSET"),
        ("/p@", "PATH@OFFSET"),
        ("/p@2M+", "PATH@OFFSET"),
        ("/p@-2M+4M", "PATH@OFFSET"),
        ("/p@0+16M+2M", "PATH@OFFSET"),
        ("/p,node=left", "NUMA"),
        ("/p,colour=red", "colour"),
        ("", "path"),
    ],
)
def test_invalid_specifications_are_rejected(text: str, word: str) -> None:
    with refused(DeviceSpecError, word):
        DeviceSpec.parse(text)
