# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Identity, in tables: what makes two engines different, what does not, and what is refused.

What is not known makes a difference. Nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import itertools
import json
import logging
import mmap
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from beluga.connectors import files, identity
from beluga.connectors.files import FileDigests, FileState
from beluga.connectors.identity import (
    Model,
    ModelIdentity,
    Objects,
    Several,
    config_fields,
    digest_of,
    environment,
    files_named,
    source_of,
    sources_of,
    with_weights,
)
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
    """Cache the digests of files that were just written, too, on any file system."""
    monkeypatch.setattr(files, "SETTLED_NS", -(1 << 60))
    monkeypatch.setattr(files, "_is_cacheable", lambda _: True)


def folder(path: Path, **contents: bytes) -> Path:
    for name, content in (contents or {"model.safetensors": b"w"}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def failing(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def of(path: Path | str, digests: FileDigests | None = None, **fields: Any) -> str:
    return source_of(Model(str(path), **fields), digests).digest(lambda _: None)


# ---- Configurations


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class ModelConfig:
    model: str = "/here"
    depth: int = 1


@dataclasses.dataclass
class VllmConfig:
    model_config: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    instance_id: str = "a"
    name: str = "a"
    observability_config: Any = None


class Derived(ModelConfig):
    pass


DIFFERENT: list[Any] = [
    *(None, True, 1, 1.0, "1", b"1", "", 0, False, 0.0, -0.0, float("nan"), float("inf")),
    *(
        bytearray(b"1"),
        (),
        [1],
        [[1]],
        ["1"],
        {1},
        {"1"},
        frozenset({1, 2}),
        {1: 2},
        {"1": 2},
        {"1": "2"},
        {},
    ),
    *(set(), Kind.ONE, Kind.TWO, Number.ONE, Path("1"), ModelConfig(), ModelConfig(depth=2)),
    *(Derived(), VllmConfig(), VllmConfig(ModelConfig(depth=2)), ["map"], ["enum", "Kind", 1]),
    *(["float", "1.0"], ["path", "1"], VllmConfig(name="b"), SimpleNamespace(name="a")),
]


def test_values_that_differ_have_different_forms() -> None:
    for value, other in itertools.combinations(DIFFERENT, 2):
        assert digest_of(value) != digest_of(other), (value, other)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 3, 1}),
        ((1, 2), [1, 2]),
        (Counter(a=1), {"a": 1}),
        (VllmConfig(instance_id="b", observability_config=print), VllmConfig()),
        (VllmConfig(ModelConfig(model="/there")), VllmConfig()),
        (Derived(model="/there"), Derived()),  # as its base class
    ],
    ids=str,
)
def test_equal_values_have_one_form(value: Any, other: Any) -> None:
    assert digest_of(value) == digest_of(other)


@pytest.mark.parametrize("name", ["PretrainedConfig", "PreTrainedConfig"])
def test_the_folder_of_a_model_s_configuration_does_not_count_by_either_name_of_its_class(
    name: str,
) -> None:
    """transformers 4 and 5 spell the base class differently. All other fields count."""

    def made(**fields: Any) -> Any:
        base: Any = type(name, (), {"to_dict": lambda self: dict(vars(self))})
        config = type("LlamaConfig", (base,), {})()
        vars(config).update(fields)
        return config

    first = made(_name_or_path="/here", text={"_name_or_path": "/here"})
    assert digest_of(first) == digest_of(made(_name_or_path="/there", text={"_name_or_path": "/"}))
    others = [made(rope_theta=1e6), made(port=1), made(text={"host": "a"})]
    assert len({digest_of(config) for config in (first, *others)}) == 4


def test_forms_are_the_same_in_every_process() -> None:
    value = {"b": {"x", "y", "z", "w"}, "a": [1.5, None]}
    code = f"from beluga.connectors.identity import digest_of; print(digest_of({value!r}))"
    forms = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert forms == {digest_of(value) + "\n"}


class Plain:
    """Its repr is an address."""

    model_fields = ("x",)  # not pydantic's


RING: list[Any] = []
RING.append(RING)


@pytest.mark.parametrize(
    "value", [Plain(), Plain, print, lambda: 0, 1j, object(), memoryview(b""), range(3), RING]
)
def test_a_value_without_a_canonical_form_is_refused_wherever_it_is(value: Any) -> None:
    trees = [value, [value], {"x": value}, VllmConfig(value), SimpleNamespace(new=value)]
    for tree in trees:
        with pytest.raises(ConnectorError, match=r"part.*cannot compare.*setting identity"):
            digest_of(tree, path="part")
        assert digest_of(tree, identity="a") == digest_of(tree, identity="a")
        assert digest_of(tree, identity="a") != digest_of(tree, identity="b")


def test_fields_of_a_new_release_count_in_every_class() -> None:
    for name in (*identity.IGNORED, "OfANewRelease"):
        kind = type(name, (SimpleNamespace,), {})
        assert digest_of(kind()) != digest_of(kind(of_a_new_release=1)), name
        assert config_fields(kind(of_a_new_release=1)).keys() == {"of_a_new_release"}


def test_environment_variables_count_unless_they_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = {"VLLM_MARLIN_INPUT_DTYPE", "VLLM_OF_A_NEW_RELEASE", "NVIDIA_TF32_OVERRIDE", "KNOWN"}
    # vLLM sets the last two in each worker and engine.
    ignored = "VLLM_LOGGING_LEVEL VLLM_PORT VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_API_KEY OF_NOBODY"
    ignored += " SGLANG_RUN_ID VLLM_DIST_IDENT VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"
    for name in (*counted, *ignored.split(), "SGL_X"):
        monkeypatch.setenv(name, "1")
    ours, other = (environment(*given) for given in (("VLLM_", ["KNOWN"]), ("SGLANG_|SGL_",)))
    assert counted <= ours.keys()
    assert not ours.keys() & {*ignored.split(), "SGL_X"}
    assert "SGL_X" in other and "SGLANG_RUN_ID" not in other


# ---- Files that a configuration names


def named(value: Any) -> str:
    """Return the identity of an engine with one setting."""
    source = sources_of([], "", 0, config=value)
    return digest_of(value) + source.digest(lambda _: None)


def test_a_text_that_may_be_a_path_counts_as_text_and_by_the_bytes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of a quantization may be replaced under their name. A text may happen to be a name."""
    monkeypatch.chdir(folder(tmp_path, **{"one.json": b"1", "other.json": b"1", "d/s.bin": b"1"}))
    (tmp_path / "auto").mkdir()
    texts = ["one.json", str(tmp_path / "one.json"), "./one.json", str(tmp_path / "d"), "d/"]
    for text in texts:
        assert [str(path) for path in files_named({"scales": ["deep", text]})]
    before = {text: named({"scales": text}) for text in (*texts, "other.json")}
    assert len(set(before.values())) == len(before)  # equal bytes behind different texts
    folder(tmp_path, **{"one.json": b"2", "d/s.bin": b"2"})
    for text in texts:
        assert named({"scales": text}) != before[text]
    assert named({"scales": "other.json"}) == before["other.json"]
    (tmp_path / "one.json").unlink()
    assert named({"scales": "one.json"}) != before["one.json"]


@pytest.mark.parametrize(
    "text", ["auto", "a/b", "a/\0", "x" * 5000, '{"a": "' + "/b" * 3000 + '"}', "", "."]
)
def test_a_text_that_is_no_file_is_only_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "auto").mkdir()
    assert files_named({"a": text}) == []


def test_an_operator_s_identity_vouches_for_weights_and_not_for_other_files(
    tmp_path: Path,
) -> None:
    path = folder(tmp_path, **{"scales.json": b"1"}) / "scales.json"

    def declared(word: str) -> str:
        return sources_of([], word, 1, config=path).digest(lambda _: None)

    identity = declared("release 7")
    assert declared("release 8") != identity
    path.write_bytes(b"2")
    assert declared("release 7") != identity


# ---- Weights: bytes


def test_a_local_model_is_identified_by_its_bytes_not_its_path(
    tmp_path: Path, digests: FileDigests
) -> None:
    made = [{"model.safetensors": b"w"}, {"model.safetensors": b"x"}, {"other.safetensors": b"w"}]
    digest = of(folder(tmp_path / "b"), digests)
    identities = [of(folder(tmp_path / f"{i}", **each), digests) for i, each in enumerate(made)]
    assert identities[0] == digest
    assert len(set(identities)) == 3


def test_every_byte_and_the_size_of_a_file_change_the_identity(
    tmp_path: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the samples of a large file, and around a multiple of what is read at once."""
    size = 64 << 20
    path = folder(tmp_path / "a") / "model.safetensors"
    path.write_bytes(bytes(size))
    identities = {of(path.parent, digests)}
    edges = [0, size - 1, size // 2, files.CHUNK_BYTES, files.CHUNK_BYTES - 1]
    offsets = [*edges, *random.Random(1).sample(range(size), 3)]
    for offset in offsets:
        for byte in b"x", b"\0":
            with path.open("r+b") as stream:
                stream.seek(offset)
                stream.write(byte)
            identities.add(of(path.parent, digests) if byte == b"x" else "")
    assert len(identities) == 2 + len(offsets)
    monkeypatch.setattr(files, "CHUNK_BYTES", 64)
    monkeypatch.setattr(files, "READ_BYTES", 24)
    sizes = (0, 1, 23, 24, 25, 63, 64, 65, 127, 128, 129)
    made = [folder(tmp_path / str(size), **{"model.bin": bytes(size)}) for size in sizes]
    assert len({of(path, digests) for path in made}) == len(sizes)


COUNTED = (
    *("b.bin", "config.json", "quantize_config.json", "x.py", "code/modeling.py", "new.release"),
    *("preprocessor_config.json", "LICENSE.safetensors", "merges.txt.bin", "NOTICE-1.gguf"),
)
UNCOUNTED = (
    *("README.md", "tokenizer.json", ".git/HEAD", "generation_config.json", "LICENSE"),
    *(".hidden.safetensors", ".cache/model.safetensors", "__pycache__/x.pyc"),
)


def test_all_files_but_those_of_the_list_are_part_of_the_identity(
    tmp_path: Path, digests: FileDigests
) -> None:
    usual = of(folder(tmp_path / "usual"), digests)
    for number, name in enumerate((*COUNTED, *UNCOUNTED)):
        path, identities = folder(tmp_path / f"{number}"), {usual}
        for content in (b"1", b"2"):
            identities.add(of(folder(path, **{name: content}), digests))
        assert len(identities) == (3 if name in COUNTED else 1), name


def test_files_loaded_with_a_gguf_file_are_part_of_the_identity(
    tmp_path: Path, digests: FileDigests
) -> None:
    """Engines load all shards, and the projector of media that lies next to them."""
    name = "m-Q4-00001-of-00002.gguf"
    first = folder(tmp_path / "model", **{name: b"1"}) / name
    copy = folder(tmp_path / "copy", **{name: b"1"}) / name
    identities = {of(first, digests)}
    assert {of(copy, digests)} == identities
    for other in ("m-Q4-00002-of-00002.gguf", "mmproj-m-f16.gguf", "mmproj.gguf"):
        for content in (b"1", b"2"):
            folder(first.parent, **{other: content})
            identities.add(of(first, digests))
    assert len(identities) == 1 + 2 * 3
    for other in ("m-Q8-00002-of-00002.gguf", "m-Q4-00002-of-00003.gguf", "other.gguf", "x.bin"):
        folder(first.parent, **{other: b"1"})
        assert of(first, digests) in identities, other


# ---- Weights: changes


def rewrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def rewrite_with_old_times(path: Path, content: bytes) -> None:
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_with_old_times(path: Path, content: bytes) -> None:
    times = path.stat()
    (path.parent / "new").write_bytes(content)
    os.utime(path.parent / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (path.parent / "new").replace(path)


def write_through_a_mapping(path: Path, content: bytes) -> None:
    """Change a page that may be dirty already."""
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        memory[: len(content)] = content


CHANGES = [rewrite, rewrite_with_old_times, replace_with_old_times, write_through_a_mapping]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_file_is_detected_although_its_digest_is_cached(
    tmp_path: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    monkeypatch.setattr(files, "SETTLED_NS", -(1 << 60))
    path = folder(tmp_path / "model", **{"model.bin": b"abc"}) / "model.bin"
    write_through_a_mapping(path, b"abd")  # leaves a dirty page
    before = of(path.parent, digests)
    change(path, b"abe")
    changed = of(path.parent, digests)
    assert changed != before
    change(path, b"abd")
    assert of(path.parent, digests) == before


def test_files_in_memory_are_hashed_again_every_time(
    shm: Path, tmp_path: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tmpfs does not change the times of a file that is written through a mapping."""
    monkeypatch.setattr(files, "SETTLED_NS", -(1 << 60))
    if files.filesystem_of(shm) not in files.MEMORY_ONLY:
        pytest.skip("this test needs a tmpfs")
    path = folder(shm / "model", **{"model.bin": b"abc"}) / "model.bin"
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        memory[0:1] = b"x"
        before, state = of(path.parent, digests), FileState.of(path.stat())
        memory[0:1] = b"y"
        assert FileState.of(path.stat()) == state
        assert of(path.parent, digests) != before


def test_files_that_change_during_the_load_are_rejected(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    began_ns = (path / "model.safetensors").stat().st_ctime_ns
    assert of(path, since_ns=began_ns)
    with pytest.raises(ConnectorError, match=r"has changed since .*restart the engine"):
        of(path, since_ns=began_ns - 1)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="too many links"):
        files.moved_since(tmp_path / "a" / "model", 1 << 62)


def relink(link: Path, target: Path | str, began_ns: int) -> Path:
    """Let a link lead elsewhere at once, after ``began_ns`` of the file system's clock. Returns the
    link.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    while not link.is_symlink() or link.lstat().st_ctime_ns <= began_ns:
        new = link.with_name("new")
        new.symlink_to(target)
        new.replace(link)
    return link


def rename(path: Path, other: Path, began_ns: int) -> Path:
    """Put another folder in the place of one, after ``began_ns`` of the file system's clock."""
    path.rename(path.with_name("old"))
    other.rename(path)
    while path.stat().st_ctime_ns <= began_ns:
        path.rename(other)
        other.rename(path)
    return path


Swap = Callable[[Path, int], Path]
SWAPS: dict[str, Swap] = {
    "the model's link": lambda root, ns: relink(root / "m", root / "v2", ns),
    "a relative link": lambda root, ns: relink(root / "m", "v2", ns),
    "a link of a link": lambda root, ns: relink(root / "n", "v2", ns).with_name("m"),
    "a link on the way": lambda root, ns: relink(root / "way", root, ns) / "v2",
    "behind two dots": lambda root, ns: relink(root / "way", root / "v1", ns) / ".." / "v2",
    "a link to a file": lambda root, ns: (
        relink(root / "v1" / "model.safetensors", root / "v2" / "model.safetensors", ns).parent
    ),
    "a link to a folder in it": lambda root, ns: (
        relink(root / "v1" / "code", root / "v2", ns).parent
    ),
    "a renamed folder": lambda root, ns: rename(root / "v1", root / "v2", ns),
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


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, digests: FileDigests
) -> None:
    path = folder(tmp_path / "model", **{"model.bin": bytes(1000)}) / "model.bin"

    def append(_: int) -> None:
        with path.open("ab") as stream:
            stream.write(b"more")

    before, during = (source_of(Model(str(path.parent)), digests) for _ in range(2))
    with pytest.raises(OSError, match="was changed while it was read"):
        during.digest(append)
    with pytest.raises(OSError, match="was changed while it was read"):
        before.digest(lambda _: None)


def test_bytes_of_another_file_are_not_cached_for_one(
    tmp_path: Path, digests: FileDigests, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link led elsewhere while the file was read, and leads back when it is compared."""
    for name in ("v1", "v2"):
        (tmp_path / name).write_bytes(name.encode())
    link, opens = tmp_path / "model.bin", os.open
    link.symlink_to("v1")
    source = source_of(Model(str(link)), digests)
    monkeypatch.setattr(
        os,
        "open",
        lambda path, *arguments: opens(tmp_path / "v2" if path == link else path, *arguments),
    )
    with pytest.raises(OSError, match="was changed while it was read"):
        source.digest(lambda _: None)


# ---- Weights: the hub


def hub(tmp_path: Path, *commits: str, main: str = COMMIT) -> Path:
    """Make the hub's cache with snapshots of one model, whose files are links to blobs."""
    repository = tmp_path / "hub" / "models--org--name"
    folder(repository, **{"refs/main": main.encode(), "blobs/none": b""})
    for commit in commits:
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, kind in (("model.safetensors", "0"), ("config.json", "1")):
            blob = repository / "blobs" / (commit[:8] * 7 + kind)
            blob.write_bytes(commit.encode())
            (snapshot / name).symlink_to(blob)
    return repository.parent


@pytest.mark.parametrize("name", ["VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"])
def test_a_model_name_of_another_hub_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its files are not those that the cache of Hugging Face has under the same name."""
    cache = str(hub(tmp_path, COMMIT))
    assert of("org/name", cache=cache)
    monkeypatch.setenv(name, "True")
    for revision in (None, COMMIT):
        with pytest.raises(ConnectorError, match=f"{name} is set.*setting identity"):
            of("org/name", cache=cache, revision=revision)
    assert of(folder(tmp_path / "model"))
    monkeypatch.setenv(name, "0")
    assert of("org/name", cache=cache)


def test_two_snapshots_of_a_branch_are_two_models(tmp_path: Path) -> None:
    cache = str(hub(tmp_path, COMMIT, OTHER))
    digest = of("org/name", cache=cache, commit=COMMIT)
    assert digest.startswith("files ") and digest != of("org/name", cache=cache, commit=OTHER)
    assert of("org/name", cache=cache, revision=COMMIT, since_ns=1) == digest  # just downloaded
    path = tmp_path / "hub/models--org--name/snapshots" / COMMIT
    assert of(path) == digest  # the same bytes, by their path


def test_a_branch_without_a_commit_or_that_may_have_moved_is_rejected(tmp_path: Path) -> None:
    cache = hub(tmp_path, COMMIT, OTHER)
    moved_ns = (cache / "models--org--name/refs/main").stat().st_ctime_ns
    assert of("org/name", cache=str(cache), since_ns=moved_ns + 1)
    refusal = r"which commit of org/\w+@\w+ .*--revision COMMIT.*setting identity"
    with pytest.raises(ConnectorError, match=refusal):
        of("org/name", cache=str(cache), since_ns=moved_ns - 1)
    single = hub(tmp_path / "single", COMMIT)
    assert of("org/name", cache=str(single), since_ns=moved_ns - 1)  # there was no other one
    cache = hub(tmp_path / "unknown", COMMIT, main=OTHER)  # of a snapshot that is not there
    for name, revision in itertools.product(("name", "unknown"), (None, "main", "v2", "abc")):
        with pytest.raises(ConnectorError, match=refusal):
            of(f"org/{name}", cache=str(cache), revision=revision)
    unknown = of("org/unknown", cache=str(cache), commit="c" * 40)
    assert unknown == f"hub org/unknown@{'c' * 40}"


# ---- Weights: stores


class Store:
    """obstore over a list of objects."""

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
    empty = folder(tmp_path / "engine's folder", **{"config.json": b"{}"})  # without weights

    def at(*objects: dict[str, Any], url: str = "s3://bucket/a") -> str:
        monkeypatch.setitem(sys.modules, "obstore", Store(*objects))
        return of(empty, url=url)

    identities = {
        at(stored()),
        at(stored(e_tag="2")),
        at(stored(version="v")),
        at(stored(size=4)),
        at(stored("a/other.safetensors")),
        at(stored("a/draft/model.safetensors")),
        at(stored(), stored("a/config.json")),
    }
    assert len(identities) == 7
    assert at(stored(), stored("a/README.md")) in identities
    (empty / "config.json").write_bytes(b"{1}")
    assert at(stored()) not in identities


STORES: list[tuple[tuple[dict[str, Any], ...], str, str]] = [
    ((stored(e_tag=None),), "s3://bucket/a", "neither a version nor an ETag"),
    ((stored("a/config.json"),), "s3://bucket/a", "no weights at"),
    ((), "s3://missing", r"cannot be listed \(no bucket\); set beluga's setting"),
    (
        (stored(last_modified=datetime.datetime.fromtimestamp(11, datetime.timezone.utc)),),
        "s3://bucket/a",
        "has changed since the engine started",
    ),
]


def test_objects_that_cannot_be_identified_are_refused_without_their_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for objects, url, reason in STORES:
        monkeypatch.setitem(sys.modules, "obstore", Store(*objects))
        with pytest.raises(ConnectorError, match=reason):
            of(url, since_ns=10_000_000_000)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConnectorError, match=r"s3://bucket/a .*setting identity") as caught:
        Objects("s3://key:secret@bucket/a?token=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["objects", "files"])
def test_weights_that_change_until_the_engine_has_loaded_them_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    store, path = Store(stored()), folder(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "obstore", store)
    for changes in (False, True):
        source = source_of(Model("s3://bucket/a" if kind == "objects" else str(path)))
        loaded = threading.Event()
        identity = ModelIdentity(source, logger=LOGGER, loaded=loaded)
        assert identity.wait(0.05) == ""
        if changes:
            store.objects = (stored(e_tag="2"),)
            folder(path, **{"x.bin": b"1"})
        loaded.set()
        assert (identity.wait(LONG_S) == "") is changes
    assert "have changed while the engine loaded them" in caplog.text


# ---- Refusals


def test_folders_without_weights_and_loaders_that_read_from_elsewhere_are_refused(
    tmp_path: Path,
) -> None:
    for number, name in enumerate(("config.json", "README.md", ".model.bin")):
        with pytest.raises(ConnectorError, match=r"has no weights.*setting identity"):
            of(folder(tmp_path / f"{number}", **{name: b"{}"}))
    for form in ("tensorizer", "remote", "of_a_release"):
        with pytest.raises(ConnectorError, match=rf"load format {form} finds.*setting identity"):
            of(folder(tmp_path / "model"), load_format=form)
    dummies = [of("org/name", load_format="dummy", seed=seed) for seed in (1, 2)]
    assert dummies[0] != dummies[1]


def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path, **{"scales.json": b"1"}) / "scales.json"
    monkeypatch.setattr(os, "open", failing(PermissionError(13, "denied")))
    with pytest.raises(ConnectorError, match=r"scales.json cannot be read .*setting identity"):
        sources_of([], "", 0, config=path)


# ---- The cache of digests


def counted_of(path: Path, memory: FileDigests) -> tuple[str, int]:
    """Return a model's identity, and how many bytes were hashed for it."""
    counts: list[int] = []
    return source_of(Model(str(path)), memory).digest(counts.append), sum(counts)


def test_files_are_hashed_once(tmp_path: Path, digests: FileDigests, settled: None) -> None:
    path = folder(tmp_path / "model", **{"model.bin": bytes(1000)})
    with ThreadPoolExecutor(4) as threads:
        made = [FileDigests(tmp_path / "cache") for _ in range(4)]
        results = list(threads.map(lambda digests: counted_of(path, digests), made))
    assert sum(count for _, count in results) == 1000
    assert counted_of(path, digests) == (results[0][0], 0)  # another process
    assert len({FileState(*range(5)).key, *(FileState(*range(i, i + 5)).key for i in (1, 2))}) == 3


def test_the_digest_of_a_file_just_written_is_not_stored(
    tmp_path: Path, digests: FileDigests
) -> None:
    of(folder(tmp_path / "model"), digests)
    assert not (tmp_path / "cache" / "files.json").exists()
    # Two images mounted in turn have files of equal numbers, sizes and (whole) times.
    states = [FileState(1, 2, 3, 4, ctime_ns) for ctime_ns in (5_000_000_001, 5_000_000_000)]
    assert [files._is_settled(state, 10**18) for state in states] == [True, False]
    assert not files._is_settled(states[0], 6_000_000_000)


def spoil(content: Callable[[dict[str, str]], bytes], mode: int = 0o600) -> Callable[[Path], None]:
    def spoiled(cache: Path) -> None:
        entries = json.loads((cache / "files.json").read_text())
        (cache / "files.json").write_bytes(content(entries))
        (cache / "files.json").chmod(mode)

    return spoiled


def wrong(entries: dict[str, str]) -> bytes:
    return json.dumps(dict.fromkeys(entries, "0" * 64)).encode()


def a_link(cache: Path) -> None:
    (cache / "elsewhere").write_bytes(wrong(json.loads((cache / "files.json").read_text())))
    (cache / "files.json").unlink()
    (cache / "files.json").symlink_to(cache / "elsewhere")


def a_pipe(cache: Path) -> None:
    (cache / "files.json").unlink()
    os.mkfifo(cache / "files.json")


def removed(cache: Path) -> None:
    for path in cache.iterdir():
        path.unlink()
    cache.rmdir()
    cache.write_bytes(b"")  # no folder can be made here


SPOILS: dict[str, Callable[[Path], None]] = {
    "damaged": spoil(lambda _: b"{\xff"),
    "cut": spoil(lambda entries: json.dumps(entries).encode()[:-9]),
    "too deep": spoil(lambda _: b"[" * 100_000),
    "of another kind": spoil(lambda _: b"[1]"),
    "with other values": spoil(
        lambda entries: json.dumps({key: ["x"] for key in entries}).encode()
    ),
    "writable by others": spoil(wrong, 0o666),
    "a link": a_link,
    "a pipe": a_pipe,
    "gone": removed,
}


@pytest.mark.parametrize("name", SPOILS)
def test_an_untrusted_digest_cache_only_costs_hashing(
    tmp_path: Path, digests: FileDigests, settled: None, name: str
) -> None:
    path = folder(tmp_path / "model")
    before = of(path, digests)
    SPOILS[name](tmp_path / "cache")
    source = source_of(Model(str(path)), digests)
    assert ModelIdentity(source, logger=LOGGER).wait(LONG_S) == before


def test_the_digest_cache_is_bounded_and_private_and_not_required(
    tmp_path: Path, digests: FileDigests, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", failing(OSError(28, "No space left on device")))
        assert of(folder(tmp_path / "model"), digests)
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["files.lock"]
    monkeypatch.setattr(files, "ENTRIES_MAX", 3)
    for number in range(5):
        of(folder(tmp_path / f"{number}"), digests)
    entries = json.loads((tmp_path / "cache" / "files.json").read_text())
    last = FileState.of((tmp_path / "4/model.safetensors").stat())
    assert len(entries) == 3 and last.key in entries
    assert (tmp_path / "cache" / "files.json").stat().st_mode & 0o777 == 0o600


# ---- The thread


def test_a_late_identity_is_reported_and_an_engine_that_ends_stops_it(
    tmp_path: Path, digests: FileDigests, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = str(folder(tmp_path / "model", **{"model.bin": bytes(10)}))
    for ends in (False, True):
        reading, go, calls = threading.Event(), threading.Event(), list[str]()

        def hashed(_: int, reading: Any = reading, go: Any = go) -> None:
            reading.set()
            go.wait()

        source = Several([source_of(Model(path), digests) for _ in range(2)])
        identity = ModelIdentity(source, logger=LOGGER, then=calls.append, hashed=hashed)
        assert reading.wait(LONG_S)
        assert identity.known == "" and not calls
        if ends:
            identity.close()
        go.set()
        assert identity.wait(LONG_S) == ("" if ends else calls[0])
        assert len(calls) == (0 if ends else 1)
    assert "hashing the model: 0.0 of 0.0 GB; until then lookups miss" in caplog.text
    assert "the model is identified" in caplog.text


@pytest.mark.parametrize("error", [OSError("gone"), RecursionError("deep"), KeyError("a name")])
def test_a_failed_identification_ends_and_logs_its_remedy_once(
    tmp_path: Path,
    digests: FileDigests,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    source = source_of(Model(str(folder(tmp_path / "model"))), digests)
    monkeypatch.setattr(digests, "of", failing(error))
    identity = ModelIdentity(source, logger=LOGGER)
    assert identity.wait(LONG_S) == ""
    (line,) = (record.getMessage() for record in caplog.records)
    assert "the pool is not used" in line and "setting identity" in line
    assert identity.ended and identity.refusal


def test_weights_are_a_field_of_the_namespace() -> None:
    base = Namespace({"model": "m"}, salt="s")
    assert with_weights(base, "a") != with_weights(base, "b")
    assert with_weights(base, "a").fields["weights"] == "a"
    assert with_weights(Namespace({"model": "m"}), "a") != with_weights(base, "a")
