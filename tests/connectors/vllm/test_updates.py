# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Updates of the weights of a running engine: no block of the old ones is hit, and none is saved as
one of the new ones, or the other way around.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from fake_vllm import BLOCK_TOKENS, adapter, request
from scene import TOKENS, Engine
from support.blocks import eventually

from beluga import IndexServer
from beluga.connectors.files import MEMORY_ONLY, FileDigests, filesystem_of
from beluga.connectors.vllm import adapters as adapters_module
from beluga.connectors.vllm import updates
from beluga.connectors.vllm.adapters import NONE, Adapter, Adapters
from beluga.errors import ConnectorError

LONG_S = 60.0
ALL = 5 * BLOCK_TOKENS


class Served(Engine):
    """An engine with vLLM's core and executor around its connectors."""

    def __init__(self, pool_name: str, **extra: Any) -> None:
        super().__init__(pool_name, **extra)
        self.core: Any = fake_vllm.EngineCore(fake_vllm.UniProcExecutor([]))
        self.core.vllm_config = self.core.model_executor.vllm_config = self.config
        self.count = 0

    def call(self, method: Any, *args: Any, **kwargs: Any) -> None:
        self.core.collective_rpc(method, None, args, kwargs)

    def hits(self) -> int:
        """Return the tokens that a new request finds."""
        self.count += 1
        tokens, _ = self.scheduler.get_num_new_matched_tokens(request(f"{self.count}", TOKENS), 0)
        return int(tokens)

    def saves(self, fill: int = 1) -> None:
        """Run a request and save its blocks."""
        self.count += 1
        self.run(request(f"{self.count}", TOKENS), 0, fill)

    def loads(self, first: int) -> Any:
        """Load a request's blocks, and return their memory."""
        self.start(made := request("loads", TOKENS), first)
        self.step(made)
        return self.memory[:, first : first + 5]

    def begun(self) -> Any:
        """Start a request, which computes two blocks."""
        made = request("running", TOKENS)
        self.start(made, 0)
        made.num_computed_tokens = 2 * BLOCK_TOKENS
        return made

    def fill_own_cache(self) -> None:
        self.manager.block_pool.cached_block_hashes_by_block["a block"] = 1

    def end(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, pool_name: str) -> Any:
    fake_vllm.installed(monkeypatch)
    importlib.import_module("beluga.connectors.vllm.connector")
    made: list[Served] = []

    def engine(**extra: Any) -> Served:
        made.append(Served(pool_name, **extra))
        return made[-1]

    yield engine
    for served in made:
        served.end()


Make = Callable[..., Served]

UPDATES: dict[str, tuple[Any, ...]] = {
    "update": ("update_weights", {}),
    "start": ("start_weight_update",),
    "finish": ("finish_weight_update",),
    "reload": ("reload_weights",),
    "configuration": ("update_config", {"load_config": {}}),
    "sleep": ("sleep", 2),
    "discard": ("discard", ("weights",)),
    "the model": ("apply_model", print),
    "a function": (print,),
    "a trainer's method": ("of_a_trainer",),
}


@pytest.mark.parametrize("name", UPDATES)
def test_after_an_update_old_blocks_are_misses_and_new_ones_private(
    server: IndexServer, make: Make, name: str
) -> None:
    engine, other = make(), make()
    engine.saves()
    assert engine.hits() == other.hits() == ALL
    before = engine.scheduler.get_kv_connector_stats().data["space"]
    engine.call(*UPDATES[name])
    assert engine.scheduler.get_kv_connector_stats().data["space"] != before  # for routers
    assert engine.hits() == 0
    engine.saves(fill=2)
    assert engine.hits() == ALL
    assert (other.loads(8) == 1).all()  # the blocks of the first weights are unchanged


def test_methods_that_do_not_change_weights_keep_the_namespace(
    server: IndexServer, make: Make
) -> None:
    engine = make()
    engine.saves()
    for method in updates.HARMLESS:
        engine.call(method)
    engine.call("sleep", 1)
    engine.call("sleep", level=1)
    engine.call("discard", ("kv_cache",))
    engine.core.set_weight_version("a label without an update")
    assert engine.hits() == ALL


def test_an_engine_that_sleeps_ends_its_sessions_and_hits_again_when_awake(
    server: IndexServer, make: Make
) -> None:
    engine = make()
    engine.saves()
    connection = engine.worker._worker.connection
    for _ in range(2):
        engine.worker.unregister_kv_caches()
    assert engine.worker._worker is None and not connection.attached
    engine.worker.bind_connector_metadata(None)  # steps without a worker do nothing
    assert engine.worker.get_finished(set()) == (None, None)
    engine.memory[:] = 99  # what the memory has after the sleep
    for _ in range(2):
        engine.worker.restore_kv_caches()
    assert engine.worker._worker.connection.attached
    assert engine.hits() == ALL
    assert (engine.loads(8) == 1).all()
    assert type(engine.worker).supports_sleep_mode(None)


def test_blocks_based_on_old_kv_in_the_engines_cache_are_neither_hit_nor_saved(
    server: IndexServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine, other = make(), make()
    engine.fill_own_cache()
    engine.call("reload_weights")
    assert "the pool is not used until that cache is reset" in caplog.text
    other.manager.reset_prefix_cache()  # a reset of another engine
    engine.saves()
    assert engine.hits() == 0
    running = engine.begun()
    engine.manager.reset_prefix_cache()  # also while requests run (``reset_running_requests``)
    engine.step(running, fill=1)
    engine.finish(running)
    assert engine.hits() == 0
    engine.saves()
    assert engine.hits() == ALL


def test_requests_that_run_during_an_update_are_neither_saved_nor_loaded(
    server: IndexServer, make: Make
) -> None:
    engine = make()
    made = engine.begun()
    engine.call("reload_weights")
    engine.step(made, fill=1)
    engine.finish(made)
    assert engine.hits() == 0
    engine.saves()
    made = request("waiting", TOKENS)
    assert engine.scheduler.get_num_new_matched_tokens(made, 0)[0] == ALL
    engine.call("reload_weights")
    assert engine.scheduler.get_num_new_matched_tokens(made, 0)[0] == 0
    assert server.index_stat().pinned_count == 0


def test_blocks_computed_during_an_update_or_a_failed_one_are_not_shared(
    server: IndexServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the workers may return before they have finished."""
    engine, during = make(), []
    engine.saves()

    class Running:
        def append(self, _: Any) -> None:
            during.append(engine.hits())
            engine.saves(fill=2)

    monkeypatch.setattr(engine.core.model_executor, "called", Running())
    engine.call("reload_weights")
    assert during == [0]
    assert engine.hits() == 0
    engine.saves()
    assert engine.hits() == ALL
    monkeypatch.setattr(engine.core.model_executor, "called", fake_vllm.Failing())
    with pytest.raises(RuntimeError):
        engine.call("reload_weights")
    assert engine.hits() == 0


@pytest.mark.parametrize("words", [("", ""), ("training 7", "training 8")])
def test_two_trainings_with_one_version_share_no_blocks(
    server: IndexServer, make: Make, words: tuple[str, str]
) -> None:
    """Without an operator's word a version names nothing."""
    first, other = (make(identity=word) for word in words)
    for engine in (first, other):
        engine.call("update_weights", {})
        engine.core.set_weight_version("1")
    first.saves(fill=2)
    assert (first.hits(), other.hits()) == (ALL, 0)


def test_engines_updated_to_one_version_share_blocks_of_one_training(
    server: IndexServer, make: Make
) -> None:
    first, other = make(identity="training 7"), make(identity="training 7")
    for engine in (first, other):
        engine.call("update_weights", {})
    first.core.set_weight_version("step 1")
    first.saves(fill=2)
    assert (first.hits(), other.hits()) == (ALL, 0)
    other.core.set_weight_version("step 1")
    assert other.hits() == ALL
    other.call("update_weights", {})
    assert other.hits() == 0
    other.core.set_weight_version("step 2")
    assert other.hits() == 0
    assert first.hits() == ALL


def test_an_adapter_reloaded_in_place_has_another_identity(
    server: IndexServer, make: Make, tmp_path: Path
) -> None:
    engine = make()

    def digests(name: str, lora: Any) -> list[bytes]:
        made = request(name, TOKENS, lora=lora)
        begin = engine.scheduler._lookups.begin
        assert eventually(lambda: begin(made) is not None, LONG_S)
        digests: list[bytes] = engine.scheduler._lookups.digests(made, 0, 5)
        return digests

    lora = adapter(tmp_path / "a", "x")
    engine.call("add_lora", lora)
    before = digests("before", lora)
    assert before == digests("again", lora)
    adapter(tmp_path / "a", "x", b"2")
    changed = digests("changed", lora)
    assert not set(changed) & set(before)
    assert engine.scheduler._lookups.begin(request("changed", TOKENS, lora=lora)) is False
    again = adapter(tmp_path / "a", "x", b"2", load_inplace=True)
    engine.call("add_lora", again)
    engine.manager.reset_prefix_cache()
    after = digests("after", again)
    assert not set(after) & (set(before) | set(changed))
    engine.call("remove_lora", 1)
    assert engine.hits() == 0


LOGGER = logging.getLogger("test")


@pytest.fixture
def engine(tmp_path: Path) -> Adapters:
    return Adapters(LOGGER, FileDigests(tmp_path / "cache"))


def used(engine: Adapters, lora: Any) -> Adapter:
    """Use an adapter for a request, once its bytes are hashed."""
    assert eventually(lambda: engine.of(lora) is not None, LONG_S)
    user = engine.of(lora)
    assert user is not None
    return user


def loads(engine: Adapters, lora: Any) -> None:
    """Make the workers load an adapter."""
    engine.loads(lora)
    engine.loaded(lora)


def test_an_adapter_is_identified_by_its_bytes(engine: Adapters, tmp_path: Path) -> None:
    large = bytes(8 << 20)
    middle = bytearray(large)
    middle[4 << 20] = 1
    made = {"a": large, "b": large, "c": bytes(middle), "d": b"2"}
    users = [
        used(engine, adapter(tmp_path / name, name, content, lora_int_id=number))
        for number, (name, content) in enumerate(made.items())
    ]
    assert users[0].key == users[1].key
    assert len({user.key for user in users}) == 3
    assert len(users[0].key) == 32
    assert used(engine, None) is NONE and NONE.unchanged
    assert users[0].unchanged
    adapter(tmp_path / "a", "a", b"3")
    assert not users[0].unchanged


def test_files_that_change_during_or_after_the_load_have_no_identity(
    engine: Adapters, tmp_path: Path
) -> None:
    first, second = adapter(tmp_path / "a", "a"), adapter(tmp_path / "b", "b", lora_int_id=2)
    loads(engine, first)  # before any request
    adapter(tmp_path / "a", "a", b"2")
    with pytest.raises(ConnectorError, match=r"have changed since vLLM loaded it.*load_inplace"):
        engine.of(first)
    engine.loads(second)
    adapter(tmp_path / "b", "b", b"2", lora_int_id=2)
    engine.loaded(second)
    adapter(tmp_path / "b", "b", b"1", lora_int_id=2)
    with pytest.raises(ConnectorError, match="have changed since"):
        engine.of(second)


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


def test_a_reloaded_adapter_is_identified_by_its_bytes(engine: Adapters, tmp_path: Path) -> None:
    """Unloaded and loaded again, with another number of vLLM's."""
    user = used(engine, adapter(tmp_path / "a", "x", lora_int_id=1))
    engine.removed(1)
    assert used(engine, adapter(tmp_path / "b", "x", lora_int_id=2)).key == user.key
    engine.removed(2)
    again = adapter(tmp_path / "c", "x", b"2", lora_int_id=3)
    loads(engine, again)
    assert eventually(lambda: refused(engine, again), LONG_S)
    engine.flushed()
    assert used(engine, again).key != user.key


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


def test_the_number_of_tracked_adapters_is_bounded(
    engine: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "ADAPTERS_MAX", 2)
    for number in (1, 2):
        used(engine, adapter(tmp_path / f"{number}", f"{number}", lora_int_id=number))
    third = adapter(tmp_path / "3", "3", lora_int_id=3)
    with pytest.raises(ConnectorError):
        engine.of(third)
    engine.removed(1)
    assert used(engine, third).key


def test_a_reason_is_logged_once(engine: Adapters, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        engine.warn(ConnectorError("the adapter a is gone"))
    assert caplog.text.count("the adapter a is gone; until then its blocks are not shared") == 1


def test_an_adapter_in_memory_is_not_shared(shm: Path) -> None:
    """A program may change its files through a mapping, and nothing shows it."""
    if filesystem_of(shm) not in MEMORY_ONLY:
        pytest.skip("this test needs a tmpfs")
    with pytest.raises(ConnectorError, match="not a folder with weights on a disk"):
        Adapters(logging.getLogger("test")).of(adapter(shm / "a", "a"))
