# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity of a model's weights: every byte counts, and nothing is guessed."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beluga.connectors.identity import FileDigests, Model, ModelIdentity, files, source_of
from beluga.connectors.identity.models import FILES_LEFT_OUT, Objects, with_weights
from beluga.errors import ConnectorError
from beluga.kvcache import Namespace

LOGGER = logging.getLogger("test")
LONG_S = 60.0
COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "cache")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the digests of files that were just written, too."""
    monkeypatch.setattr(files, "SETTLED_NS", -1_000_000_000)


def folder(path: Path, **contents: bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in (contents or {"model.safetensors": b"w"}).items():
        (path / name).write_bytes(content)
    return path


def of(path: Path | str, digests: FileDigests | None = None, **fields: Any) -> str:
    return source_of(Model(str(path), **fields), digests).digest(lambda _: None)


def test_a_local_model_is_identified_by_its_bytes_not_its_path(
    tmp_path: Path, digests: FileDigests
) -> None:
    one = of(folder(tmp_path / "a"), digests)
    assert of(folder(tmp_path / "b"), digests) == one
    assert of(folder(tmp_path / "c", **{"model.safetensors": b"x"}), digests) != one
    assert of(folder(tmp_path / "d", **{"other.safetensors": b"w"}), digests) != one


def test_every_byte_of_a_large_file_changes_the_identity(
    tmp_path: Path, digests: FileDigests
) -> None:
    """Files of 64 MiB that differ in one byte anywhere, also between samples of the ends."""
    size = 64 << 20
    path = folder(tmp_path / "a") / "model.safetensors"
    path.write_bytes(bytes(size))
    found = {of(path.parent, digests)}
    places = [
        0,
        size - 1,
        size // 2,
        files.PIECE,
        files.PIECE - 1,
        *random.Random(1).sample(range(size), 3),
    ]
    for place in places:
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x")
        found.add(of(path.parent, digests))
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\0")
    assert len(found) == 1 + len(places)
    assert of(path.parent, digests) in found


def test_file_sizes_around_a_multiple_of_the_read_size_differ(
    tmp_path: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", 64)
    monkeypatch.setattr(files, "READ", 24)
    sizes = (0, 1, 23, 24, 25, 63, 64, 65, 127, 128, 129)
    found = set()
    for size in sizes:
        found.add(of(folder(tmp_path / str(size), **{"model.bin": bytes(size)}), digests))
    assert len(found) == len(sizes)


def test_all_files_except_those_of_the_table_are_part_of_the_identity(
    tmp_path: Path, digests: FileDigests
) -> None:
    path = folder(tmp_path / "model")
    found = {of(path, digests)}
    counted = ("b.bin", "config.json", "quantize_config.json", "hf_quant_config.json", "x.py")
    for name in (*counted, "code/modeling.py", "preprocessor_config.json", "new.of_a_release"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"1")
        found.add(of(path, digests))
        (path / name).write_bytes(b"2")
        found.add(of(path, digests))
    assert len(found) == 1 + 2 * 8
    for name in ("README.md", "tokenizer.json", ".git/HEAD", "generation_config.json", "LICENSE"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"1")
        assert of(path, digests) in found, name
    assert all(FILES_LEFT_OUT.values())


def test_a_single_file_is_a_model(tmp_path: Path, digests: FileDigests) -> None:
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"x")
    other.write_bytes(b"x")
    assert of(one, digests) == of(other, digests)
    other.write_bytes(b"y")
    assert of(one, digests) != of(other, digests)


def test_files_loaded_with_a_gguf_file_are_part_of_the_identity(
    tmp_path: Path, digests: FileDigests
) -> None:
    """Engines load all shards, and the projector of media that lies beside them."""
    first = (
        folder(tmp_path / "model", **{"m-Q4-00001-of-00002.gguf": b"1"})
        / "m-Q4-00001-of-00002.gguf"
    )
    found = {of(first, digests)}
    for name in ("m-Q4-00002-of-00002.gguf", "mmproj-m-f16.gguf", "mmproj.gguf"):
        for content in (b"1", b"2"):
            (first.parent / name).write_bytes(content)
            found.add(of(first, digests))
    assert len(found) == 1 + 2 * 3
    for name in ("m-Q8-00002-of-00002.gguf", "m-Q4-00002-of-00003.gguf", "other.gguf", "x.bin"):
        (first.parent / name).write_bytes(b"1")
        assert of(first, digests) in found, name
    plain = folder(tmp_path / "plain", **{"m.gguf": b"1"}) / "m.gguf"
    alone = of(plain, digests)
    (plain.parent / "mmproj.gguf").write_bytes(b"1")
    assert of(plain, digests) != alone


@pytest.mark.parametrize("name", ["LICENSE.safetensors", "merges.txt.bin", "NOTICE-1.gguf"])
def test_weights_are_part_of_the_identity_under_any_file_name(
    tmp_path: Path, digests: FileDigests, name: str
) -> None:
    """Engines load all files with the suffix of weights."""
    path = folder(tmp_path / "model")
    before = of(path, digests)
    (path / name).write_bytes(b"1")
    assert of(path, digests) != before
    for hidden in (f".{name}", f".cache/{name}"):
        (path / hidden).parent.mkdir(exist_ok=True)
        (path / hidden).write_bytes(b"1")
    (path / name).unlink()
    assert of(path, digests) == before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    for contents in ({"config.json": b"{}"}, {"README.md": b""}):
        with pytest.raises(ConnectorError, match=r"has no weights.*setting identity"):
            of(folder(tmp_path / "empty", **contents))


def test_files_that_change_during_the_load_are_rejected(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    began_ns = (path / "model.safetensors").stat().st_ctime_ns
    assert of(path, since_ns=began_ns)
    with pytest.raises(ConnectorError, match=r"has changed since .*restart the engine"):
        of(path, since_ns=began_ns - 1)


def relink(link: Path, target: Path | str, began_ns: int) -> None:
    """Let a link lead elsewhere at once, after ``began_ns`` of the file system's clock."""
    link.parent.mkdir(parents=True, exist_ok=True)
    while not link.is_symlink() or link.lstat().st_ctime_ns <= began_ns:
        new = link.with_name("new")
        new.symlink_to(target)
        new.replace(link)


def rename(path: Path, other: Path, began_ns: int) -> None:
    """Put another folder in the place of one, after ``began_ns`` of the file system's clock."""
    path.rename(path.with_name("old"))
    other.rename(path)
    while path.stat().st_ctime_ns <= began_ns:
        path.rename(other)
        other.rename(path)


Swap = Callable[[Path, int], Path]
SWAPS: dict[str, Swap] = {
    "the model's link": lambda root, ns: relink(root / "m", root / "v2", ns) or root / "m",
    "a relative link": lambda root, ns: relink(root / "m", "v2", ns) or root / "m",
    "a link of a link": lambda root, ns: relink(root / "n", "v2", ns) or root / "m",
    "a link on the way": lambda root, ns: relink(root / "way", root, ns) or root / "way" / "v2",
    "behind two dots": lambda root, ns: (
        relink(root / "way", root / "v1", ns) or root / "way" / ".." / "v2"
    ),
    "a link to a file": lambda root, ns: (
        relink(root / "v1" / "model.safetensors", root / "v2" / "model.safetensors", ns)
        or root / "v1"
    ),
    "a link to a folder in it": lambda root, ns: (
        relink(root / "v1" / "code", root / "v2", ns) or root / "v1"
    ),
    "a renamed folder": lambda root, ns: rename(root / "v1", root / "v2", ns) or root / "v1",
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_path_that_changed_target_during_the_load_is_rejected(
    tmp_path: Path, digests: FileDigests, name: str
) -> None:
    """The files that are there now are as old as those that the engine has loaded."""
    first = folder(tmp_path / "v1", **{"model.safetensors": b"1"})
    last = folder(tmp_path / "v2", **{"model.safetensors": b"2"}) / "model.safetensors"
    (tmp_path / "m").symlink_to("n" if name == "a link of a link" else "v1")
    (tmp_path / "n").symlink_to("v1")
    (tmp_path / "began").touch()  # later than all of them
    began_ns = max((tmp_path / "began").stat().st_ctime_ns, last.stat().st_ctime_ns)
    assert of(tmp_path / "m", digests, since_ns=began_ns) == of(first, digests)
    path = SWAPS[name](tmp_path, began_ns)
    with pytest.raises(ConnectorError, match=r"has changed since .*restart the engine"):
        of(path, digests, since_ns=began_ns)
    assert of(path, digests)  # an engine that starts now


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="too many links"):
        files.moved_since(tmp_path / "a" / "model", 1 << 62)


def hub(tmp_path: Path, *commits: str, main: str = COMMIT) -> Path:
    """Make the hub's cache with snapshots of one model, whose files are links to blobs."""
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for commit in commits:
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, kind in (("model.safetensors", "0"), ("config.json", "1")):
            blob = repository / "blobs" / (commit[:8] * 7 + kind)
            blob.write_bytes(commit.encode())
            (snapshot / name).symlink_to(blob)
    (repository / "refs" / "main").write_text(main)
    return repository.parent


@pytest.mark.parametrize("name", ["VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"])
def test_a_model_name_of_another_hub_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its files are not those that the cache of Hugging Face has under the same name."""
    cache = str(hub(tmp_path, COMMIT))
    assert of("org/name", cache=cache)
    monkeypatch.setenv(name, "True")
    for fields in ({}, {"revision": COMMIT}):
        with pytest.raises(ConnectorError, match=f"{name} is set.*setting identity"):
            of("org/name", cache=cache, **fields)
    assert of(folder(tmp_path / "model"))
    monkeypatch.setenv(name, "0")
    assert of("org/name", cache=cache)


def test_two_snapshots_of_a_branch_are_two_models(tmp_path: Path) -> None:
    cache = str(hub(tmp_path, COMMIT, OTHER))
    one = of("org/name", cache=cache, commit=COMMIT)
    assert one.startswith("files ") and one != of("org/name", cache=cache, commit=OTHER)
    assert of("org/name", cache=cache, revision=COMMIT) == one
    path = tmp_path / "hub/models--org--name/snapshots" / COMMIT
    assert of(path) == one  # the same bytes, by their path


def test_a_branch_that_may_have_moved_during_the_load_is_rejected(tmp_path: Path) -> None:
    cache = hub(tmp_path, COMMIT, OTHER)
    moved_ns = (cache / "models--org--name/refs/main").stat().st_ctime_ns
    before, after = moved_ns - 1, moved_ns + 1
    assert of("org/name", cache=str(cache), since_ns=after)
    with pytest.raises(ConnectorError, match=r"which commit .*--revision COMMIT.*setting identity"):
        of("org/name", cache=str(cache), since_ns=before)
    single = hub(tmp_path / "single", COMMIT)
    assert of("org/name", cache=str(single), since_ns=before)  # there was no other one


@pytest.mark.parametrize("name", ["org/name", "org/unknown"])
def test_a_name_without_a_commit_is_refused(tmp_path: Path, name: str) -> None:
    cache = hub(tmp_path, COMMIT, main=OTHER)  # of a snapshot that is not there
    for revision in (None, "main", "v2", "abc"):
        with pytest.raises(ConnectorError, match=r"which commit of org/\w+@\w+ .*setting identity"):
            of(name, cache=str(cache), revision=revision)
    assert of(name, cache=str(cache), commit="c" * 40) == f"hub {name}@{'c' * 40}"


class Store:
    """obstore over lists of objects."""

    def __init__(self, *objects: dict[str, Any]) -> None:
        self.store = self
        self.objects = objects

    def from_url(self, url: str, **_: object) -> str:
        if "missing" in url:
            raise FileNotFoundError("no bucket\nwith a page of text")
        return url

    def list(self, _: str) -> list[list[dict[str, Any]]]:
        return [list(self.objects)]


def stored(name: str = "a/model.safetensors", **fields: Any) -> dict[str, Any]:
    return {"path": name, "size": 3, "e_tag": "1", "version": None} | fields


def test_objects_are_identified_by_their_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "engine's folder"  # of configurations, without weights
    folder(empty, **{"config.json": b"{}"})

    def at(*objects: dict[str, Any], url: str = "s3://bucket/a") -> str:
        monkeypatch.setitem(sys.modules, "obstore", Store(*objects))
        return of(empty, url=url)

    found = {
        at(stored()),
        at(stored(e_tag="2")),
        at(stored(version="v")),
        at(stored(size=4)),
        at(stored("a/other.safetensors")),
        at(stored("a/draft/model.safetensors")),
        at(stored(), stored("a/config.json")),
    }
    assert len(found) == 7
    assert at(stored(), stored("a/README.md")) in found
    (empty / "config.json").write_bytes(b"{1}")
    assert at(stored()) not in found
    with pytest.raises(ConnectorError, match="neither a version nor an ETag"):
        at(stored(e_tag=None))
    with pytest.raises(ConnectorError, match="no weights at"):
        at(stored("a/config.json"))
    with pytest.raises(
        ConnectorError, match=r"cannot be listed \(no bucket\); set beluga's setting identity"
    ):
        at(url="s3://missing")


def test_without_a_client_of_stores_objects_are_refused_without_their_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConnectorError, match=r"s3://bucket/a .*setting identity") as caught:
        Objects("s3://key:secret@bucket/a?token=secret")
    assert "secret" not in str(caught.value)


def test_files_are_hashed_once(tmp_path: Path, digests: FileDigests, settled: None) -> None:
    path = folder(tmp_path / "model", **{"model.bin": b"abc"})
    counted: list[int] = []

    def identity(memory: FileDigests) -> str:
        return source_of(Model(str(path)), memory).digest(counted.append)

    one = identity(digests)
    assert sum(counted) == 3
    assert identity(FileDigests(tmp_path / "cache")) == one  # as another process would
    assert sum(counted) == 3
    (path / "model.bin").write_bytes(b"abd")
    assert identity(digests) != one
    assert sum(counted) == 6


CHANGES: dict[str, Callable[[Path], object]] = {
    "contents, with the old times": lambda path: (
        (times := path.stat()),
        path.write_bytes(b"abd"),
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns)),
    ),
    "replaced, with the old times": lambda path: (
        (times := path.stat()),
        (path.parent / "new").write_bytes(b"abd"),
        os.utime(path.parent / "new", ns=(times.st_atime_ns, times.st_mtime_ns)),
        (path.parent / "new").replace(path),
    ),
}


def test_each_field_of_a_file_state_is_in_its_cache_key() -> None:
    parts = [field.name for field in dataclasses.fields(files.FileState)]
    state = files.FileState(*range(len(parts)))
    others = {dataclasses.replace(state, **{part: 99}).key for part in parts}
    assert len(others - {state.key}) == len(parts)


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_file_is_detected(
    tmp_path: Path, digests: FileDigests, settled: None, name: str
) -> None:
    path = folder(tmp_path / "model", **{"model.bin": b"abc"}) / "model.bin"
    before = of(path.parent, digests)
    state = files.FileState.of(path.stat())
    CHANGES[name](path)
    assert files.FileState.of(path.stat()).mtime_ns == state.mtime_ns
    assert of(path.parent, digests) != before


def test_the_digest_of_a_file_just_written_is_not_stored(
    tmp_path: Path, digests: FileDigests
) -> None:
    of(folder(tmp_path / "model"), digests)
    assert not (tmp_path / "cache" / "files.json").exists()


def test_no_digest_is_stored_of_a_file_system_without_change_times() -> None:
    """Two images mounted in turn have files of equal numbers, sizes and (whole) times."""
    states = [files.FileState(1, 2, 3, 4, ctime_ns) for ctime_ns in (5_000_000_001, 5_000_000_000)]
    assert [files._settled(state) for state in states] == [True, False]


def damaged(cache: Path) -> None:
    (cache / "files.json").write_bytes(b"{\xff")


def of_another_kind(cache: Path) -> None:
    (cache / "files.json").write_text(json.dumps([1]))


def with_other_values(cache: Path) -> None:
    found = json.loads((cache / "files.json").read_text())
    (cache / "files.json").write_text(json.dumps({key: ["x"] for key in found}))


def writable_by_others(cache: Path) -> None:
    found = json.loads((cache / "files.json").read_text())
    (cache / "files.json").write_text(json.dumps(dict.fromkeys(found, "0" * 64)))
    (cache / "files.json").chmod(0o666)


def a_link(cache: Path) -> None:
    found = json.loads((cache / "files.json").read_text())
    (cache / "elsewhere").write_text(json.dumps(dict.fromkeys(found, "0" * 64)))
    (cache / "files.json").unlink()
    (cache / "files.json").symlink_to(cache / "elsewhere")


def gone(cache: Path) -> None:
    for one in cache.iterdir():
        one.unlink()
    cache.rmdir()
    cache.write_bytes(b"")  # no folder can be made here


@pytest.mark.parametrize(
    "spoil", [damaged, of_another_kind, with_other_values, writable_by_others, a_link, gone]
)
def test_an_untrusted_digest_cache_only_costs_hashing(
    tmp_path: Path, digests: FileDigests, settled: None, spoil: Callable[[Path], None]
) -> None:
    path = folder(tmp_path / "model")
    before = of(path, digests)
    spoil(tmp_path / "cache")
    assert of(path, digests) == before


def test_a_full_disk_only_costs_hashing(
    tmp_path: Path, digests: FileDigests, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.json, "dump", full)
    assert of(folder(tmp_path / "model"), digests)
    assert [one.name for one in (tmp_path / "cache").iterdir()] == ["files.lock"]


def test_the_digest_cache_is_bounded_and_private(
    tmp_path: Path, digests: FileDigests, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ENTRIES_MAX", 3)
    for number in range(5):
        of(folder(tmp_path / f"{number}"), digests)
    kept = json.loads((tmp_path / "cache" / "files.json").read_text())
    last = files.FileState.of((tmp_path / "4/model.safetensors").stat())
    assert len(kept) == 3 and last.key in kept
    assert (tmp_path / "cache" / "files.json").stat().st_mode & 0o777 == 0o600


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "model", **{"model.bin": bytes(1000)}) / "model.bin"
    source = source_of(Model(str(path.parent)), digests)
    path.write_bytes(bytes(999) + b"x")
    with pytest.raises(OSError, match="was changed while it was read"):
        source.digest(lambda _: None)
    source = source_of(Model(str(path.parent)), digests)

    def change(_: int) -> None:
        with path.open("ab") as stream:
            stream.write(b"more")

    with pytest.raises(OSError, match="was changed while it was read"):
        source.digest(change)


def test_bytes_of_another_file_are_not_cached_for_one(
    tmp_path: Path, digests: FileDigests, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link led elsewhere while the file was read, and leads back when it is compared."""
    for name in ("v1", "v2"):
        (tmp_path / name).write_bytes(name.encode())
    link, opens = tmp_path / "model.bin", os.open
    link.symlink_to("v1")

    def elsewhere(path: Any, *rest: Any) -> int:
        if path != link:
            return opens(path, *rest)
        return opens(tmp_path / "v2", *rest)

    monkeypatch.setattr(files.os, "open", elsewhere)
    with pytest.raises(OSError, match="was changed while it was read"):
        of(link, digests)


def test_processes_that_start_together_hash_once(tmp_path: Path, settled: None) -> None:
    path = folder(tmp_path / "model", **{"model.bin": bytes(1000)})
    counted: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: source_of(Model(str(path)), FileDigests(tmp_path / "cache")).digest(
                counted.append
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counted) == 1000


def test_a_late_identity_is_reported(
    tmp_path: Path, digests: FileDigests, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    go, calls = threading.Event(), list[str]()
    source = source_of(Model(str(folder(tmp_path / "model", **{"model.bin": bytes(10)}))), digests)
    identity = ModelIdentity(
        source, logger=LOGGER, then=calls.append, hashed=lambda _: (go.wait(), None)[1]
    )
    assert identity.known == "" and not calls
    go.set()
    assert identity.wait(LONG_S) == calls[0]
    assert "hashing the model: 0.0 of 0.0 GB; until then lookups miss" in caplog.text
    assert "the model is identified" in caplog.text


def test_a_failed_identification_logs_its_remedy_once(
    tmp_path: Path, digests: FileDigests, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path / "model")
    source = source_of(Model(str(path)), digests)
    (path / "model.safetensors").unlink()
    identity = ModelIdentity(source, logger=LOGGER)
    assert identity.wait(LONG_S) == ""
    (line,) = (one.getMessage() for one in caplog.records)
    assert "the pool is not used" in line and "setting identity" in line
    assert identity.outcome is not None and identity.outcome.refusal


def test_an_engine_that_ends_stops_the_hashing(tmp_path: Path, digests: FileDigests) -> None:
    source = source_of(Model(str(folder(tmp_path / "model", **{"model.bin": bytes(10)}))), digests)
    reading, go, calls = threading.Event(), threading.Event(), list[str]()
    real = source.digest

    def digest(hashed: Callable[[int], None]) -> str:
        reading.set()
        go.wait()
        return real(hashed)

    source.digest = digest  # type: ignore[method-assign]
    identity = ModelIdentity(source, logger=LOGGER, then=calls.append)
    assert reading.wait(LONG_S)
    identity.close()
    go.set()
    assert identity.wait(LONG_S) == "" and not calls


def test_weights_are_a_field_of_the_namespace() -> None:
    base = Namespace({"model": "m"}, salt="s")
    assert with_weights(base, "a") != with_weights(base, "b")
    assert with_weights(base, "a").fields["weights"] == "a"
    assert with_weights(Namespace({"model": "m"}), "a") != with_weights(base, "a")
