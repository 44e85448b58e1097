# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LoRA adapters: their identity depends on the bytes that workers have loaded, not on names or the
present files.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.blocks import eventually
from vllm_parts import adapter

from beluga.connectors.identity import FileDigests
from beluga.connectors.vllm import adapters as adapters_module
from beluga.connectors.vllm.adapters import NONE, Adapter, Adapters
from beluga.errors import ConnectorError

LOGGER = logging.getLogger("test")
LONG_S = 60.0


@pytest.fixture
def engine(tmp_path: Path) -> Adapters:
    return Adapters(LOGGER, FileDigests(tmp_path / "cache"))


def used(engine: Adapters, lora: Any) -> Adapter:
    """Use an adapter for a request, once its bytes are hashed."""
    assert eventually(lambda: engine.of(lora) is not None, LONG_S)
    found = engine.of(lora)
    assert found is not None
    return found


def loads(engine: Adapters, lora: Any) -> None:
    """Make the workers load an adapter."""
    engine.loads(lora)
    engine.loaded(lora)


def test_an_adapter_is_identified_by_its_bytes(engine: Adapters, tmp_path: Path) -> None:
    one = used(engine, adapter(tmp_path / "a", "a", lora_int_id=1))
    same = used(engine, adapter(tmp_path / "b", "b", lora_int_id=2))
    other = used(engine, adapter(tmp_path / "c", "c", b"2", lora_int_id=3))
    assert one.key == same.key != other.key
    assert len(one.key) == 32
    assert used(engine, None) is NONE and NONE.unchanged


def test_every_byte_of_an_adapter_changes_its_identity(engine: Adapters, tmp_path: Path) -> None:
    large = bytes(8 << 20)
    middle = bytearray(large)
    middle[4 << 20] = 1
    one = used(engine, adapter(tmp_path / "a", "a", large, lora_int_id=1))
    other = used(engine, adapter(tmp_path / "b", "b", bytes(middle), lora_int_id=2))
    assert one.key != other.key


def test_files_that_change_after_the_load_have_another_identity(
    engine: Adapters, tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "a", "a")
    loads(engine, lora)  # before any request
    adapter(tmp_path / "a", "a", b"2")
    with pytest.raises(ConnectorError, match=r"have changed since vLLM loaded it.*load_inplace"):
        engine.of(lora)


def test_files_that_change_during_the_load_have_no_identity(
    engine: Adapters, tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "a", "a")
    engine.loads(lora)
    adapter(tmp_path / "a", "a", b"2")
    engine.loaded(lora)
    adapter(tmp_path / "a", "a", b"1")
    with pytest.raises(ConnectorError, match="have changed since"):
        engine.of(lora)


def test_restored_files_may_differ_from_the_loaded_adapter(
    engine: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without change times they seem unchanged."""
    weights = tmp_path / "a" / "adapter_model.safetensors"
    monkeypatch.setattr(
        adapters_module, "_state_of", lambda path, **_: (path, weights.read_bytes())
    )
    lora = adapter(tmp_path / "a", "a")
    before = weights.read_bytes()
    engine.loads(lora)
    adapter(tmp_path / "a", "a", b"2")
    engine.loaded(lora)
    weights.write_bytes(before)
    with pytest.raises(ConnectorError, match="have changed since"):
        engine.of(lora)


def test_a_restored_link_does_not_restore_the_identity(engine: Adapters, tmp_path: Path) -> None:
    """The workers may have loaded the adapter again, from where the link led meanwhile."""
    first, second = tmp_path / "v1", tmp_path / "v2"
    for folder, content in ((first, b"1"), (second, b"2")):
        adapter(folder, "a", content)
    link = tmp_path / "a"
    link.symlink_to(first)
    lora = adapter(first, "a")
    lora.lora_path = str(link)
    assert used(engine, lora).key
    for target in (second, first):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(ConnectorError, match="have changed since"):
            engine.of(lora)
    lora.load_inplace = True
    loads(engine, lora)
    assert used(engine, lora).key


def test_a_request_detects_files_that_change_during_it(engine: Adapters, tmp_path: Path) -> None:
    found = used(engine, adapter(tmp_path / "a", "a"))
    assert found.unchanged
    adapter(tmp_path / "a", "a", b"2")
    assert not found.unchanged


def test_a_reload_in_place_is_shared_once_vllm_drops_the_old_blocks(
    engine: Adapters, tmp_path: Path
) -> None:
    before = used(engine, adapter(tmp_path / "a", "a"))
    lora = adapter(tmp_path / "a", "a", b"2", load_inplace=True)
    loads(engine, lora)
    assert eventually(lambda: refused(engine, lora), LONG_S)
    with pytest.raises(ConnectorError, match="other bytes before; reset vLLM's prefix cache"):
        engine.of(lora)
    engine.flushed()
    assert used(engine, lora).key != before.key


def refused(engine: Adapters, lora: Any) -> bool:
    try:
        engine.of(lora)
    except ConnectorError:
        return True
    return False


def test_a_reloaded_adapter_with_other_bytes_has_another_identity(
    engine: Adapters, tmp_path: Path
) -> None:
    """Unloaded and loaded again, with another number of vLLM's."""
    used(engine, adapter(tmp_path / "a", "x", lora_int_id=1))
    engine.removed(1)
    again = adapter(tmp_path / "b", "x", b"2", lora_int_id=2)
    loads(engine, again)
    assert eventually(lambda: refused(engine, again), LONG_S)
    engine.flushed()
    assert used(engine, again).key


def test_a_reloaded_adapter_with_the_same_bytes_has_the_same_identity(
    engine: Adapters, tmp_path: Path
) -> None:
    one = used(engine, adapter(tmp_path / "a", "x", lora_int_id=1))
    engine.removed(1)
    assert used(engine, adapter(tmp_path / "b", "x", lora_int_id=2)).key == one.key


def test_an_adapter_without_a_folder_of_weights_is_not_shared(
    engine: Adapters, tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "a", "a")
    lora.lora_path = "org/adapter"
    with pytest.raises(ConnectorError, match=r"adapter a is not a folder .*org/adapter"):
        engine.of(lora)
    (tmp_path / "empty").mkdir()
    lora.lora_path, lora.lora_int_id = str(tmp_path / "empty"), 2
    with pytest.raises(ConnectorError, match="no weights"):
        engine.of(lora)


def test_the_number_of_tracked_announcements_is_bounded(
    engine: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "ADAPTERS_MAX", 2)
    for number in (1, 2):
        used(engine, adapter(tmp_path / f"{number}", f"{number}", lora_int_id=number))
    with pytest.raises(ConnectorError):
        engine.of(adapter(tmp_path / "3", "3", lora_int_id=3))
    engine.removed(1)
    assert used(engine, adapter(tmp_path / "3", "3", lora_int_id=3)).key


def test_a_reason_is_logged_once(engine: Adapters, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        engine.warn(ConnectorError("the adapter a is gone"))
    assert caplog.text.count("the adapter a is gone; until then its blocks are not shared") == 1
