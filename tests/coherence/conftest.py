# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fixtures that force one CPU path after another: a test with such a fixture runs on each path."""

from collections.abc import Iterator

import pytest
from paths import COPY_PATHS, CRC_PATHS, FLUSH_PATHS

from beluga._ffi import lib


def limited(name: str, mask: int, needs: int) -> Iterator[str]:
    if lib.bl_cpu_features() & needs != needs:
        pytest.skip(f"this CPU has no {name}")
    before = lib.bl_cpu_features()
    lib.bl_cpu_limit(mask)
    yield name
    lib.bl_cpu_limit(before)


@pytest.fixture(params=COPY_PATHS)
def copy_path(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from limited(request.param, *COPY_PATHS[request.param])


@pytest.fixture(params=FLUSH_PATHS)
def flush_path(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from limited(request.param, *FLUSH_PATHS[request.param])


@pytest.fixture(params=CRC_PATHS)
def crc_path(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from limited(request.param, *CRC_PATHS[request.param])
