# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Settings of the CPU's copies reach C, and give the same bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulation import fewer

from beluga import coherence
from beluga.errors import ChecksumError
from beluga.pool import Pool
from beluga.transfer import CopySettings, CpuEngine, Plan, plan_blocks

DEFAULT = CopySettings.default()
SIZES = st.sampled_from([0, 1, 63, 64, 100, 1280, 4096, 65536, 1 << 20, 0xFFFFFFFF])
ANY = st.builds(CopySettings, **{field.name: SIZES for field in dataclasses.fields(CopySettings)})


@settings(max_examples=fewer(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    given=ANY,
    threads=st.sampled_from([1, 3]),
    sizes=st.lists(st.sampled_from([1, 63, 64, 300, 1280, 20480, 300_000]), min_size=1, max_size=9),
    chunk=st.sampled_from([0, 64, 4096, 16384]),
)
def test_all_settings_give_the_same_bytes_and_checksums(
    pool: Pool, given: CopySettings, threads: int, sizes: list[int], chunk: int
) -> None:
    engine, offset = (
        CpuEngine(pool, threads, settings=given),
        pool.geometry.data_offset + (2 << 20) - 4096,
    )
    source = np.random.default_rng(7).integers(0, 256, sum(sizes) + 5 * len(sizes), np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum([0, *sizes[:-1]]) + 5 * np.arange(len(sizes))
    written, read = (
        plan_blocks(
            np.array([memory.ctypes.data + starts], np.uint64),
            np.array(sizes),
            np.array([offset]),
            chunk_size=chunk,
        )
        for memory in (source, target)
    )
    content = b"".join(
        source[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True)
    )
    engine.gather_write(written).wait()
    if written.checksums is not None and read.checksums is not None:
        wanted = [
            coherence.crc32c(content[at : at + chunk]) for at in range(0, len(content), chunk)
        ]
        assert written.checksums.tolist() == wanted
        read.checksums[:] = written.checksums
    engine.scatter_read(read).wait()
    found = b"".join(
        target[at : at + size].tobytes() for at, size in zip(starts, sizes, strict=True)
    )
    assert found == content
    assert target.sum(dtype=np.int64) == np.frombuffer(found, np.uint8).sum(dtype=np.int64)
    if read.checksums is not None:
        read.checksums[-1] ^= 1
        with pytest.raises(ChecksumError):
            engine.scatter_read(read).wait()


def test_rows_of_a_block_are_read_with_any_settings(pool: Pool) -> None:
    content = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8)
    offset = np.array([pool.geometry.data_offset])
    plan = plan_blocks(
        np.array([[content.ctypes.data]], np.uint64), np.array([200_000]), offset, chunk_size=4096
    )
    CpuEngine(pool, 1).gather_write(plan).wait()
    target = np.zeros(50 * 500, np.uint8)
    pieces = np.zeros(50, plan.pieces.dtype)
    pieces["address"] = target.ctypes.data + 500 * np.arange(50)
    pieces["offset"] = offset + 4096 * np.arange(50) + 700 % 4096
    pieces["length"], pieces["chunk"] = 500, np.arange(50)
    pieces = pieces[:48]
    chunks = plan.chunks[:48].copy()
    chunks["first"] = np.arange(48)
    assert plan.checksums is not None
    wanted = b"".join(content[at : at + 500].tobytes() for at in 4096 * np.arange(48) + 700)
    for odd in (0, 64, 8192, 0xFFFFFFFF):
        given = CopySettings(*[odd] * len(dataclasses.fields(CopySettings)))
        for sums in (None, plan.checksums[:48].copy()):
            target[:] = 0
            CpuEngine(pool, 3, settings=given).scatter_read(
                Plan(pieces, chunks, sums, sparse=True)
            ).wait()
            assert target[: 48 * 500].tobytes() == wanted


def test_settings_reach_c() -> None:
    given = CopySettings(*range(1, 1 + len(dataclasses.fields(CopySettings))))
    struct = given.struct(9)
    for field in dataclasses.fields(CopySettings):
        assert getattr(struct, field.name) == getattr(given, field.name)
    assert struct.threads == 9


def test_settings_of_the_file_reach_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "beluga.toml"
    monkeypatch.setenv("BELUGA_CONFIG", str(path))
    for text, window, past in (
        ("[copy]\nwindow = 12345", 12345, DEFAULT.past),
        ("[copy]\nwindow = -1\npast = 99_999_999_999\nunknown = 3", DEFAULT.window, 0xFFFFFFFF),
        ("copy = 3", DEFAULT.window, DEFAULT.past),
        ("copy = [", DEFAULT.window, DEFAULT.past),
    ):
        path.write_text(text)
        found = CopySettings.default()
        assert found == dataclasses.replace(DEFAULT, window=window, past=past)
        assert found.struct(3).window == window
