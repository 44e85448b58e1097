# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Where a model's weights come from, and the digest that identifies them.

* Files on this host (a folder, a file, or the hub's snapshot of a known commit): all of their
  bytes. A path or a name does not suffice: two hosts may store one model in different places, and
  different models in the same place.
* A commit of the hub, if the engine has resolved one and has no files here.
* Objects in a store (``s3://``): the versions or ETags of the store.
* Otherwise, the operator's declaration (the setting ``identity``).

Beluga does not guess. A name without a commit, a folder without files, files that changed after the
engine began to load, or a loader that reads from elsewhere is rejected.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from beluga.config import hub_cache_dir, other_hub
from beluga.connectors.identity.files import FileDigests, FileState, moved_since, signature
from beluga.errors import ConnectorError
from beluga.kvcache import Namespace
from beluga.threads import Thread
from beluga.tiers import no_panic, object_store

if TYPE_CHECKING:
    import logging

WEIGHTS = "weights"  # the field of a namespace

# Files of a model that cannot change the bytes of a block, with the reasons. All others count:
# weights (whatever their names), configurations, files of quantization, and the code of the model.
FILES_LEFT_OUT = {
    "tokenizer.json": "a block's name covers token ids, whatever text they come from",
    "tokenizer.model*": "part of the tokenizer",
    "tokenizer_config.json": "part of the tokenizer",
    "special_tokens_map.json": "part of the tokenizer",
    "added_tokens.json": "part of the tokenizer",
    "vocab.json": "part of the tokenizer",
    "vocab.txt": "part of the tokenizer",
    "merges.txt": "part of the tokenizer",
    "*.tiktoken": "part of the tokenizer",
    "tekken.json": "part of the tokenizer",
    "chat_template*": "text around prompts, before the tokenizer",
    "generation_config.json": "how tokens are drawn, after the KV was computed",
    "*.md": "documentation",
    "LICENSE*": "documentation",
    "NOTICE*": "documentation",
    ".*": "files of tools (.git, .cache, .gitattributes)",
    "__pycache__": "made of the .py files, which count",
    "*.lock": "kept while files are downloaded",
}
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.npz")

COMMIT = re.compile(r"[0-9a-f]{40}")
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://")
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_PROJECTOR = "*mmproj*.gguf"
_REPORT_S = 30.0

SET_IDENTITY = "set beluga's setting identity to a text that only this model has"


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """An engine's model: its name or path, as in the engine's configuration.

    ``url`` is the location of the weights in an object store, if ``name`` is a folder without them.
    ``commit`` is the hub's commit if the engine has resolved it. ``cache`` is the hub's cache of
    the engine; None is the default. ``since_ns`` is a time before the engine began to load.
    """

    name: str
    revision: str | None = None
    commit: str | None = None
    url: str = ""
    cache: str | None = None
    since_ns: int = 0


class WeightsSource(Protocol):
    """A source of weights that identifies them."""

    @property
    def size(self) -> int:
        """The number of bytes to read."""

    def digest(self, hashed: Callable[[int], None]) -> str:
        """Return the identity. Raises OSError or ConnectorError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """An identity that needs no files: an operator's declaration, a commit, or the seed of dummy
    weights.
    """

    text: str
    size: int = 0

    def digest(self, hashed: Callable[[int], None]) -> str:
        """Return the text."""
        return self.text


class Files:
    """The files of a folder, or a single file."""

    def __init__(self, path: Path, since_ns: int, digests: FileDigests) -> None:
        """Raises ConnectorError for a folder without weights, or with files that have changed since
        ``since_ns``.
        """
        self._path, self._digests = path, digests
        try:
            self._files = signature(path, counts)
            names = [name for name, _ in self._files]
            moved = _moved(path, names, since_ns) if since_ns else None
        except OSError as error:
            raise ConnectorError(
                f"the model {path} cannot be read ({error}); {SET_IDENTITY}"
            ) from error
        if not any(_matches(name, WEIGHT_FILES) for name in names) and not path.is_file():
            raise ConnectorError(f"the model's folder {path} has no weights; {SET_IDENTITY}")
        changed = next(
            (path / name for name, state in self._files if self._late(name, state, since_ns)),
            moved,
        )
        if changed:
            raise ConnectorError(
                f"{changed} has changed since the engine started to load {path}; restart the "
                f"engine, or {SET_IDENTITY}"
            )
        self.size = sum(state.size for _, state in self._files)

    @property
    def unchanged(self) -> bool:
        """Whether the files are still those that are identified."""
        try:
            return signature(self._path, counts) == self._files
        except OSError:
            return False

    def digest(self, hashed: Callable[[int], None]) -> str:
        """Return the digest of all files and their names."""
        found = self._digests.of(self._path, self._files, hashed=hashed)
        return "files " + _digest_of(sorted(found.items()))

    def _late(self, name: str, state: FileState, since_ns: int) -> bool:
        if not since_ns or state.ctime_ns <= since_ns:
            return False
        # The engine may have just downloaded it. The hub's client never modifies a blob.
        return not _is_blob(self._path / name if name else self._path)


class Objects:
    """The objects below a URL, identified by the versions or ETags of their store."""

    size = 0

    def __init__(self, url: str) -> None:
        """Raises ConnectorError if no client of object stores is installed."""
        try:
            import obstore  # noqa: F401
        except ImportError:
            raise ConnectorError(
                f"the weights at {_shown(url)} cannot be identified without obstore; install it "
                f"(pip install beluga-kv[tiers]), or {SET_IDENTITY}"
            ) from None
        self._url = url

    def digest(self, hashed: Callable[[int], None]) -> str:
        """Return the digest of the names, sizes, and versions or ETags of all objects."""
        import obstore

        shown = _shown(self._url)
        try:
            store: Any = object_store(self._url)
            with no_panic():
                listed = [one for batch in obstore.list(store) for one in batch]
        except Exception as error:
            line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ConnectorError(
                f"the weights at {shown} cannot be listed ({line}); {SET_IDENTITY}"
            ) from error
        found: list[tuple[str, int, str]] = []
        for one in listed:
            name = str(one["path"]).rsplit("/", 1)[-1]
            if not counts(name):
                continue
            mark = one.get("version") or one.get("e_tag")
            if not mark:
                raise ConnectorError(
                    f"the store of {shown} reports neither a version nor an ETag for {name}; "
                    f"{SET_IDENTITY}"
                )
            found.append((str(one["path"]), int(one["size"]), str(mark)))
        if not any(_matches(name, WEIGHT_FILES) for name, _, _ in found):
            raise ConnectorError(f"there are no weights at {shown}; {SET_IDENTITY}")
        return "objects " + _digest_of(sorted(found))


class Several:
    """Several sources that count together, such as a model and its draft model."""

    def __init__(self, sources: Sequence[WeightsSource]) -> None:
        self._sources = sources
        self.size = sum(one.size for one in sources)

    @property
    def unchanged(self) -> bool:
        """Whether all sources are still what is identified, as far as that is known."""
        return all(getattr(one, "unchanged", True) for one in self._sources)

    def digest(self, hashed: Callable[[int], None]) -> str:
        """Return the identities of all sources."""
        found = [one.digest(hashed) for one in self._sources]
        return found[0] if len(found) == 1 else "all " + _digest_of(found)


def counts(name: str) -> bool:
    """Return whether a file or folder with this relative name can change the bytes of a block.
    Engines load every weight file of a folder but hidden ones.
    """
    *folders, last = name.split("/")
    if any(map(_is_left_out, folders)):
        return False
    hidden = last.startswith(".")
    return (_matches(last, WEIGHT_FILES) and not hidden) or not _is_left_out(last)


def _is_left_out(part: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for pattern in FILES_LEFT_OUT)


def _is_blob(path: Path) -> bool:
    """Return whether a path leads to a file of the hub's cache."""
    real = Path(os.path.realpath(path))
    return real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")


def _moved(path: Path, names: Sequence[str], since_ns: int) -> Path | None:
    """Return a link or folder on the way to a model's files that has changed, or None. The links
    of the hub's snapshots are named by their commit.
    """
    folders = {path} | {(path / name).parent for name in names if "/" in name}
    links = {path / name for name in names if name and (path / name).is_symlink()}
    for one in sorted(folders | {link for link in links if not _is_blob(link)}):
        moved = moved_since(one, since_ns)
        if moved is not None:
            return moved
    return None


def _beside(path: Path) -> list[Path]:
    """Return the files that engines load together with a GGUF file: its other shards, and the
    projectors of media in its folder.
    """
    if path.suffix != ".gguf" or path.is_dir():
        return []
    shard, found = _SHARD.fullmatch(path.name), []
    for one in sorted(path.parent.glob("*.gguf")):
        other = _SHARD.fullmatch(one.name)
        shards = shard is not None and other is not None and shard.groups() == other.groups()
        if one.name != path.name and (shards or fnmatch.fnmatchcase(one.name, _PROJECTOR)):
            found.append(one)
    return found


def source_of(model: Model, digests: FileDigests | None = None) -> WeightsSource:
    """Return the source that identifies a model. Raises ConnectorError, with a hint to the setting
    ``identity``, if there is none.
    """
    digests = digests or FileDigests()
    url = model.url or (model.name if _URL.match(model.name) else "")
    if url:
        parts: list[WeightsSource] = [Objects(url)]
        if url != model.name:  # the engine stores configurations and code in this folder
            parts.append(_Beside(Path(model.name), digests))
        return Several(parts)
    path = Path(model.name)
    if path.exists():
        files = [Files(one, model.since_ns, digests) for one in (path, *_beside(path))]
        return files[0] if len(files) == 1 else Several(files)
    _refuse_other_hubs(model)
    commit = _commit_of(model)
    snapshot = _repository(model) / "snapshots" / commit
    if snapshot.is_dir():
        return Files(snapshot, model.since_ns, digests)
    return Declared(f"hub {model.name}@{commit}")


class _Beside(Files):
    """The files of a folder without weights, which the engine created from a store."""

    def __init__(self, path: Path, digests: FileDigests) -> None:
        self._path, self._digests = path, digests
        self._files = signature(path, counts) if path.exists() else ()
        self.size = sum(state.size for _, state in self._files)


def _refuse_other_hubs(model: Model) -> None:
    """Raise for a name of another hub, which has other files under the names of Hugging Face's."""
    name = other_hub()
    if name:
        raise ConnectorError(
            f"{name} is set, and beluga cannot find out which commit of {model.name} this engine "
            f"has loaded from there; start it with the path of a folder, or {SET_IDENTITY}"
        )


def _repository(model: Model) -> Path:
    cache = Path(model.cache) if model.cache else hub_cache_dir()
    return cache / f"models--{model.name.replace('/', '--')}"


def _commit_of(model: Model) -> str:
    """Return the commit that the engine has loaded. Raises ConnectorError if it is not proven."""
    for given in (model.commit, model.revision):
        if given and COMMIT.fullmatch(given):
            return given
    revision = model.revision or "main"
    refused = ConnectorError(
        f"beluga cannot find out which commit of {model.name}@{revision} this engine has loaded; "
        "start it with --revision COMMIT (40 digits) or with the path of a folder, or "
        f"{SET_IDENTITY}"
    )
    repository = _repository(model)
    reference = repository / "refs" / revision
    try:
        commit = reference.read_text().strip()
        changed_ns = reference.stat().st_ctime_ns
        snapshots = [one.name for one in (repository / "snapshots").iterdir()]
    except (OSError, ValueError):
        raise refused from None
    if not COMMIT.fullmatch(commit) or commit not in snapshots:
        raise refused
    # The hub's client rewrites the reference when it moves. A reference that has not moved since
    # before the engine started to load is the loaded commit, and so is the only snapshot.
    moved = not model.since_ns or changed_ns > model.since_ns
    if moved and len(snapshots) > 1:
        raise refused
    return commit


@dataclasses.dataclass(frozen=True, slots=True)
class Identified:
    """The result of an identification: a digest, or the reason of a failure."""

    digest: str = ""
    refusal: str = ""


class ModelIdentity:
    """Identifies weights on a thread, while the engine starts. Thread-safe."""

    def __init__(
        self,
        source: WeightsSource,
        *,
        logger: logging.Logger,
        then: Callable[[str], None] | None = None,
        hashed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``then`` is called once, with the digest, on this thread or on the identifying one."""
        self._source, self._logger, self._then = source, logger, then
        self._count = hashed
        self._lock = threading.Lock()
        self._done_bytes, self._reported_s = 0, time.monotonic()
        self._closing = False
        self._ended = threading.Event()
        self.outcome: Identified | None = None
        if isinstance(source, Declared):
            self._end(Identified(source.text))
            return
        self._thread = Thread(target=self._work, name="beluga-identity", daemon=True)
        self._thread.start()

    @property
    def known(self) -> str:
        """The digest, or "" if it is not known yet or there is none."""
        return self.outcome.digest if self.outcome is not None else ""

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the identification has ended. Returns the digest, or ""."""
        self._ended.wait(timeout_s)
        return self.known

    @property
    def unchanged(self) -> bool:
        """Whether the source is still what is identified, as far as that is known."""
        return bool(getattr(self._source, "unchanged", True))

    def close(self) -> None:
        """Stop reading."""
        self._closing = True

    def _end(self, outcome: Identified) -> None:
        self.outcome = outcome
        if outcome.digest and self._then is not None and not self._closing:
            self._then(outcome.digest)
        self._ended.set()

    def _work(self) -> None:
        started_s = time.monotonic()
        try:
            digest = self._source.digest(self._hashed)
        except _ClosedError:
            self._end(Identified(refusal="closed"))
            return
        except (OSError, ConnectorError) as error:
            more = "" if isinstance(error, ConnectorError) else f"; {SET_IDENTITY}"
            self._logger.error(
                "beluga: the model is not identified, so the pool is not used: %s%s", error, more
            )
            self._end(Identified(refusal=str(error)))
            return
        if self._done_bytes:
            took_s = time.monotonic() - started_s
            self._logger.info(
                "beluga: the model is identified: %.1f GB hashed in %.1f s",
                self._done_bytes / 1e9,
                took_s,
            )
        self._end(Identified(digest))

    def _hashed(self, count: int) -> None:
        if self._closing:
            raise _ClosedError
        with self._lock:
            first, self._done_bytes = not self._done_bytes, self._done_bytes + count
            now_s = time.monotonic()
            if not first and now_s - self._reported_s < _REPORT_S:
                report = False
            else:
                report, self._reported_s = True, now_s
        self._count(count)
        if report:
            self._logger.info(
                "beluga: hashing the model: %.1f of %.1f GB; until then lookups miss and nothing "
                "is saved",
                self._done_bytes / 1e9,
                self._source.size / 1e9,
            )


class _ClosedError(Exception):
    pass


def with_weights(namespace: Namespace, digest: str) -> Namespace:
    """Return a rank's namespace with the identity of its weights."""
    fields: Mapping[str, Any] = {**namespace.fields, WEIGHTS: digest}
    return Namespace(fields, salt=namespace.salt)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    last = name.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(last, pattern) for pattern in patterns)


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _shown(url: str) -> str:
    """Return a URL without secrets."""
    return re.sub(r"(://)[^/@]*@", r"\1", url.partition("?")[0])
