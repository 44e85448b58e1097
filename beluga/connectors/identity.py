# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The identity that two engines must share to share blocks: one rule for all engines.

It is the engine, its version, its whole configuration and environment in a canonical form, and a
digest of every byte of the weights and of the files that the configuration names. Only what
:data:`IGNORED` lists is left out. What is not known makes two engines different: a field of a later
release, another limit of the context, another kernel. This costs hits, and never gives a wrong one.

What has no canonical form is refused, and so are weights that cannot be identified: a name without
a commit, a folder without files, files that changed after the engine began to load, a loader that
reads from elsewhere. The operator may vouch for both by the setting ``identity``.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import hashlib
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

from beluga.config import hub_cache_dir, other_hub, variables_like
from beluga.connectors.files import FileDigests, Hashed, moved_since, signature
from beluga.errors import ConnectorError
from beluga.kvcache import Namespace
from beluga.threads import Thread
from beluga.tiers import no_panic, object_store

if TYPE_CHECKING:
    import logging

    from beluga.connectors.settings import EngineSettings

Fields: TypeAlias = "dict[str, str | int | bytes]"

# What differs between engines with equal bytes: fields by their class, and environment variables,
# as patterns of fnmatch. A name is here only if equal engines usually differ in it, or if it has no
# canonical form. Rounding does not count: an engine rounds one block differently from step to step,
# and its own prefix cache shares such blocks.
IGNORED = {
    "*": "port *_port host *_addr *_ip *_endpoint kv_events_config node_rank nnodes download_dir"
    " revision served_model_name",
    # two are objects of this process: compiled operations, and what hf_config gave
    "VllmConfig": "instance_id kv_transfer_config ec_transfer_config compilation_config"
    " quant_config logging_config observability_config",
    # The bytes of the model count, not its name or folder.
    "ModelConfig": "model tokenizer tokenizer_revision",
    # measured memory
    "CacheConfig": "num_gpu_blocks num_gpu_blocks_override gpu_memory_utilization"
    " kv_cache_memory_bytes kv_cache_size_tokens kv_cache_max_concurrency",
    # The namespace has the rank's part of a block; replicas compute the same.
    "ParallelConfig": "*rank world_size tensor_parallel_size *data_parallel_* _api_process_count"
    " distributed_executor_backend placement_group ray_runtime_env assigned_physical_gpu_ids",
    # which requests start, and which tokens a step computes together
    "SchedulerConfig": "max_num_* encoder_cache_size scheduler_reserve_full_isl",
    "ServerArgs": "model_path tokenizer_path"
    " random_seed lora_paths weight_version"  # the weights' digest, or a page's name, has them
    " tp_size pp_size base_gpu_id disaggregation_* hicache_* load_balance_method"
    " log_* *api_key forward_pass_metrics_*"
    " mem_fraction_static max_total_tokens max_running_requests max_prefill_tokens"
    " chunked_prefill_size pp_max_micro_batch_size watermark_* *cuda_graph* disable_radix_cache",
    "LMCacheMetadata": "*worker_id role engine_id kv_connector_extra_config"
    " kv_layer_groups_manager",
    "environment": "*_PORT *_IP *_HOST *_LOG_* *_LOGGING_* *_KEY *_RUN_ID *_ROOT LOCAL_RANK"
    " CUDA_VISIBLE_DEVICES VLLM_DP_* VLLM_RAY_* VLLM_DIST_IDENT VLLM_WORKER_MULTIPROC_METHOD"
    " VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_KVCACHE_SPACE",
}
# Keys of the dictionaries in a configuration that do not count: the folder of a model.
KEYS_IGNORED = {"_name_or_path"}
# Variables of libraries below the engines that choose another type of data for the same products.
_OF_LIBRARIES = ("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "[KQV]_SCALE_CONSTANT")

WEIGHTS = "weights"  # the field of a namespace
# Files of a model that do not count: tokenizers, documentation, and what tools leave there.
# Files that an engine loads as weights count under any other name.
FILES_IGNORED = (
    *(".*", "__pycache__", "*.lock", "*.md", "LICENSE*", "NOTICE*", "generation_config.json"),
    *("tokenizer.json", "tokenizer.model*", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json"),
    "chat_template*",
)
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.npz")
# Load formats that read the weights from the model's folder or URL, or from the hub.
READ_FROM_MODEL = {
    *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor"),
    *("gguf", "bitsandbytes", "sharded_state", "layered"),
    *("runai_streamer", "runai_streamer_sharded"),
}
DEPTH_MAX = 40  # a deeper configuration is assumed to be cyclic
COMMIT = re.compile(r"[0-9a-f]{40}")
SET_IDENTITY = "set beluga's setting identity to a text that only this model has"

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://")
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_REPORT_S = 30.0
_SCALARS = (bool, int, float, str, bytes, bytearray)  # bool is an int
_TORCH_NAMES = ("dtype", "device", "layout", "memory_format")
_TRANSFORMERS = {"PretrainedConfig", "PreTrainedConfig"}  # one class in transformers 4 and 5

# ---- Configurations


def config_fields(config: Any, *, identity: str = "") -> dict[str, str]:
    """Return a digest for each field of ``config`` that counts, by the field's name, so that an
    operator sees in which part two engines differ.
    """
    return {
        name: digest_of(value, path=name, identity=identity)
        for name, value in _fields(config).items()
    }


def digest_of(value: Any, *, path: str = "", identity: str = "") -> str:
    """Return a digest of a value's canonical form. ``path`` is its name in errors.

    ``identity`` is the operator's setting of that name; it replaces values without a canonical
    form. Without it such a value raises ConnectorError.
    """
    form = _Form(identity).of(value, path)
    return hashlib.blake2b(form.encode(), digest_size=16, person=b"beluga-config").hexdigest()


def files_named(value: Any) -> list[Path]:
    """Return the files and folders that a configuration names, in a fixed order. A text that may be
    a path counts as text, too.
    """
    form = _Form("declared")
    form.of(value)
    return [Path(text) for text in sorted(form.texts) if _is_file(text)]


def counted(fields: Mapping[str, Any], *classes: str) -> dict[str, Any]:
    """Return the fields that count of a configuration of these classes (its own and its bases)."""
    patterns = [name for each in ("*", *classes) for name in IGNORED.get(each, "").split()]
    return {name: fields[name] for name in sorted(fields) if not _matches(name, patterns)}


def environment(prefix: str, known: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment variables of an engine that are set and count: those whose name starts
    with a match of ``prefix``, and the ``known`` ones.
    """
    names = [rf"({prefix})\w+", *map(re.escape, known), *_OF_LIBRARIES]
    return counted(variables_like(re.compile("|".join(names))), "environment")


class _Form:
    """Converts values to text that is the same in every process, and collects their strings."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self.texts: set[str] = set()

    def of(  # noqa: PLR0911, PLR0912  one per kind
        self, value: Any, path: str = "", depth: int = 0
    ) -> str:
        if depth > DEPTH_MAX:
            return self._refused(path, "refers to itself")
        kind, name = type(value), type(value).__name__
        if value is None:
            return "None"
        if isinstance(value, enum.Enum):
            return f"enum {name} {self.of(value.value, path, depth + 1)}"
        if isinstance(value, PurePath):
            return f"path {self.of(str(value), path)}"
        if isinstance(value, str):
            self.texts.add(str.__str__(value))
        for scalar in _SCALARS:  # the representation of a subclass may be an address
            if isinstance(value, scalar):
                return scalar.__repr__(value)
        if isinstance(value, Mapping):
            return f"map {self._items(value, path, depth)}"
        if isinstance(value, (set, frozenset)):
            return f"set [{', '.join(sorted(self.of(item, path, depth + 1) for item in value))}]"
        if isinstance(value, (list, tuple)):
            items = (self.of(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
            return f"list [{', '.join(items)}]"
        if kind.__module__ == "torch" and name in _TORCH_NAMES:
            return f"torch {value}"
        if _TRANSFORMERS & {base.__name__ for base in kind.__mro__}:  # leaves out its caches
            return f"config {name} {self.of(value.to_dict(), path, depth + 1)}"
        try:
            fields = _fields(value)
        except TypeError:
            return self._refused(path, f"is a {kind.__module__}.{kind.__qualname__}")
        return f"object {name} {self._items(fields, path, depth)}"

    def _items(self, items: Mapping[Any, Any], path: str, depth: int) -> str:
        pairs = [
            f"{self.of(key, path, depth + 1)}: {self.of(item, f'{path}.{key}', depth + 1)}"
            for key, item in items.items()
            if not (isinstance(key, str) and key in KEYS_IGNORED)
        ]
        return f"[{', '.join(sorted(pairs))}]"

    def _refused(self, path: str, why: str) -> str:
        if self._identity:
            return f"declared {self._identity!r}"
        raise ConnectorError(
            f"the engine's setting {path} {why}, which beluga cannot compare between engines; "
            "leave it out, or set beluga's setting identity"
        )


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields that count of an object with declared fields. Raises TypeError for another
    one.
    """
    kind = type(value)
    names: Any
    if isinstance(value, types.SimpleNamespace):
        names = vars(value)
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif hasattr(kind, "__struct_fields__"):  # of msgspec
        names = kind.__struct_fields__
    elif isinstance(names := getattr(kind, "model_fields", None), Mapping):  # of pydantic
        names = list(names)
    else:
        raise TypeError(kind)
    fields = {name: getattr(value, name, None) for name in names}
    return counted(fields, *(base.__name__ for base in kind.__mro__))


def _is_file(text: str) -> bool:
    try:  # a folder without a separator is a word: cuda, auto, default
        return Path(text).is_file() or (os.sep in text and Path(text).is_dir())
    except (OSError, ValueError):  # too long for a name, or with a null byte
        return False


# ---- Weights


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """An engine's model: its name or path, as in the engine's configuration.

    ``load_format`` is the engine's, and ``seed`` that of dummy weights. ``url`` is the location of
    the weights in an object store, if ``name`` is a folder without them. ``commit`` is the hub's
    commit if the engine has resolved it. ``cache`` is the hub's cache of the engine; None is the
    default. ``since_ns`` is a time before the engine began to load, or 0.
    """

    name: str
    load_format: str = "auto"
    seed: Any = None
    revision: str | None = None
    commit: str | None = None
    url: str = ""
    cache: str | None = None
    since_ns: int = 0


class Source:
    """An identity that needs no files: an operator's declaration, a commit, or the seed of dummy
    weights. Subclasses read ``size`` bytes.
    """

    size = 0

    def __init__(self, text: str = "") -> None:
        self.text = text

    def digest(self, hashed: Hashed) -> str:
        """Return the identity. ``hashed`` is called with numbers of bytes. Raises OSError or
        ConnectorError.
        """
        return self.text

    def unchanged(self) -> bool:
        """Return whether this is still what is identified. Raises OSError or ConnectorError."""
        return True


class Files(Source):
    """The files of a folder, or a single file. ``weights``: a folder must have some."""

    def __init__(
        self, path: Path, since_ns: int, digests: FileDigests, *, weights: bool = True
    ) -> None:
        """Raises ConnectorError for a folder without weights, or with files that have changed since
        ``since_ns``.
        """
        self._path, self._digests = path, digests
        try:
            self._files = signature(path, counts, flush=True)
            names = [name for name, _ in self._files]
            changed = self._changed(names, since_ns) if since_ns else None
        except OSError as error:
            raise _unidentified(f"{path} cannot be read ({error})") from error
        if weights and not path.is_file() and not any(map(_is_weights, names)):
            raise _unidentified(f"the model's folder {path} has no weights")
        if changed:
            raise _changed(changed, path)
        self.size = sum(state.size for _, state in self._files)

    def digest(self, hashed: Hashed) -> str:
        """Return the digest of all files and their names."""
        digests = self._digests.of(self._path, self._files, hashed=hashed)
        return "files " + digest_of(digests)

    def unchanged(self) -> bool:
        """Return whether the files are still those that are identified."""
        try:
            return signature(self._path, counts, flush=True) == self._files
        except OSError:
            return False

    def _changed(self, names: Sequence[str], since_ns: int) -> Path | None:
        """Return a file, or a link or folder on the way to one, that has changed."""
        for name, state in self._files:
            if state.ctime_ns > since_ns:
                return self._path / name
        folders = {self._path} | {(self._path / name).parent for name in names if "/" in name}
        links = {self._path / name for name in names if (self._path / name).is_symlink()}
        moved = (moved_since(path, since_ns) for path in sorted(folders | links))
        return next((path for path in moved if path is not None), None)


class Objects(Source):
    """The objects below a URL, identified by the versions or ETags of their store."""

    def __init__(self, url: str, since_ns: int = 0) -> None:
        """Raises ConnectorError if no client of object stores is installed."""
        self._url, self._since_ns, self._listed = url, since_ns, list[Any]()
        self._shown = re.sub(r"(://)[^/@]*@", r"\1", url.partition("?")[0])  # without secrets
        try:
            import obstore  # noqa: F401
        except ImportError:
            raise ConnectorError(
                f"the weights at {self._shown} cannot be identified without obstore; install it "
                f"(pip install beluga-kv[tiers]), or {SET_IDENTITY}"
            ) from None

    def digest(self, hashed: Hashed) -> str:
        """Return the digest of the names, sizes, and versions or ETags of all objects."""
        self._listed = self._list()
        if not any(_is_weights(name) for name, *_ in self._listed):
            raise _unidentified(f"there are no weights at {self._shown}")
        return "objects " + digest_of(self._listed)

    def unchanged(self) -> bool:
        """Return whether the store still lists what is identified."""
        return self._list() == self._listed

    def _list(self) -> list[Any]:
        import obstore

        try:
            store: Any = object_store(self._url)
            with no_panic():
                metas = [meta for batch in obstore.list(store) for meta in batch]
        except Exception as error:
            line = (str(error).strip() or repr(error)).splitlines()[0]
            raise _unidentified(
                f"the weights at {self._shown} cannot be listed ({line})"
            ) from error
        listed = []
        for meta in metas:
            name, mark = str(meta["path"]), meta.get("version") or meta.get("e_tag")
            if not counts(name.rpartition("/")[2]):
                continue
            if not mark:
                raise _unidentified(
                    f"the store of {self._shown} reports neither a version nor an ETag for {name}"
                )
            modified = meta.get("last_modified")
            if self._since_ns and modified and modified.timestamp() * 1e9 > self._since_ns:
                raise _changed(name, self._shown)
            listed.append([name, int(meta["size"]), str(mark)])
        return sorted(listed)


class Several(Source):
    """Several sources that count together, such as a model and its draft model."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = list(sources)
        self.size = sum(source.size for source in self._sources)

    def digest(self, hashed: Hashed) -> str:
        """Return the identities of all sources."""
        digests = [source.digest(hashed) for source in self._sources]
        return digests[0] if len(digests) == 1 else "all " + digest_of(digests)

    def unchanged(self) -> bool:
        """Return whether all sources are still what is identified."""
        return all(source.unchanged() for source in self._sources)


def _unidentified(text: str) -> ConnectorError:
    return ConnectorError(f"{text}; {SET_IDENTITY}")


def _changed(changed: object, loaded: object) -> ConnectorError:
    return ConnectorError(
        f"{changed} has changed since the engine started to load {loaded}; restart the engine, or "
        f"{SET_IDENTITY}"
    )


def counts(name: str) -> bool:
    """Return whether a file or folder with this relative name can change the bytes of a block.
    Engines load every weight file of a folder but hidden ones.
    """
    *folders, last = name.split("/")
    if any(_matches(folder, FILES_IGNORED) for folder in folders):
        return False
    hidden = last.startswith(".")
    return (_is_weights(last) and not hidden) or not _matches(last, FILES_IGNORED)


def source_of(model: Model, digests: FileDigests | None = None) -> Source:
    """Return the source that identifies a model. Raises ConnectorError, with a hint to the setting
    ``identity``, if there is none.
    """
    digests, path = digests or FileDigests(), Path(model.name)
    if model.load_format == "dummy":
        return Source(f"dummy {model.seed}")
    if model.load_format not in READ_FROM_MODEL:
        raise _unidentified(
            f"it is unknown where the load format {model.load_format} finds the weights of "
            f"{model.name}"
        )
    url = model.url or (model.name if _URL.match(model.name) else "")
    if url:
        sources: list[Source] = [Objects(url, model.since_ns)]
        if url != model.name and path.exists():  # the engine stores configurations and code there
            sources.append(Files(path, 0, digests, weights=False))
        return Several(sources)
    if path.exists():
        return Several(Files(each, model.since_ns, digests) for each in (path, *_loaded_with(path)))
    if name := other_hub():  # which has other files under the names of Hugging Face's
        raise ConnectorError(
            f"{name} is set, and beluga cannot find out which commit of {model.name} this engine "
            f"has loaded from there; start it with the path of a folder, or {SET_IDENTITY}"
        )
    cache = Path(model.cache) if model.cache else hub_cache_dir()
    repository = cache / f"models--{model.name.replace('/', '--')}"
    commit = _commit_of(model, repository)
    snapshot = repository / "snapshots" / commit
    if snapshot.is_dir():  # perhaps just downloaded; the hub's client never modifies a blob
        return Files(snapshot, 0, digests)
    return Source(f"hub {model.name}@{commit}")


def _loaded_with(path: Path) -> list[Path]:
    """Return the files that engines load together with a GGUF file: its other shards, and the
    projectors of media in its folder.
    """
    if path.suffix != ".gguf" or path.is_dir():
        return []
    shard = _SHARD.fullmatch(path.name)

    def is_loaded(name: str) -> bool:
        other = _SHARD.fullmatch(name)
        shards = shard is not None and other is not None and shard.groups() == other.groups()
        return name != path.name and (shards or "mmproj" in name)

    return [other for other in sorted(path.parent.glob("*.gguf")) if is_loaded(other.name)]


def _commit_of(model: Model, repository: Path) -> str:
    """Return the commit that the engine has loaded. Raises ConnectorError if it is not proven."""
    for given in (model.commit, model.revision):
        if given and COMMIT.fullmatch(given):
            return given
    revision = model.revision or "main"
    reference = repository / "refs" / revision
    try:
        commit = reference.read_text().strip()
        # The hub's client rewrites the reference when it moves. A reference that has not moved
        # since before the engine started to load is the loaded commit; so is the only snapshot.
        moved = not model.since_ns or reference.stat().st_ctime_ns > model.since_ns
        snapshots = [path.name for path in (repository / "snapshots").iterdir()]
        proven = COMMIT.fullmatch(commit) and commit in snapshots
        if proven and not (moved and len(snapshots) > 1):
            return commit
    except (OSError, ValueError):
        pass
    raise ConnectorError(
        f"beluga cannot find out which commit of {model.name}@{revision} this engine has loaded; "
        "start it with --revision COMMIT (40 digits) or with the path of a folder, or "
        f"{SET_IDENTITY}"
    )


def sources_of(
    models: Iterable[Model],
    identity: str,
    since_ns: int,
    *,
    config: Any = None,
    variables: Mapping[str, str] = types.MappingProxyType({}),
) -> Source:
    """Return the source that identifies an engine's models, or the operator's ``identity`` of them,
    with the files and folders that its configuration names, and the files that its environment
    variables name. Raises ConnectorError.
    """
    digests, names = FileDigests(), set[Path]()
    sources: list[Source] = []
    if identity:
        sources, since_ns = [Source(f"declared {identity}")], 0
    else:
        for model in models:
            names.add(Path(model.name))
            sources.append(source_of(model, digests))
    named = [*files_named(config), *(path for path in files_named(variables) if path.is_file())]
    others = [path for path in named if path not in names]
    sources += [Files(path, since_ns, digests, weights=False) for path in others]
    return sources[0] if len(sources) == 1 else Several(sources)


class ModelIdentity:
    """Identifies weights on a thread, while the engine starts. Thread-safe.

    ``known`` is the digest, or "" if it is not known yet or there is none; ``refusal`` is the
    reason of a failure.
    """

    def __init__(
        self,
        source: Source,
        *,
        logger: logging.Logger,
        then: Callable[[str], None] = lambda _: None,
        hashed: Hashed = lambda _: None,
        loaded: threading.Event | None = None,
    ) -> None:
        """``then`` is called once, with the digest. ``loaded`` is set when the engine has loaded
        its weights; None means it has. What changes before is refused.
        """
        self.source = source
        self._logger, self._then, self._count, self._loaded = logger, then, hashed, loaded
        self._lock = threading.Lock()
        self._done_bytes, self._report_s = 0, time.monotonic()
        self._closing = False
        self._ended = threading.Event()
        self.known = self.refusal = ""
        if type(source) is Source:
            self._end(source.text)
        else:
            Thread(target=self._work, name="beluga-identity", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the digest is known, or the identification has failed."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the identification has ended. Returns the digest, or ""."""
        self._ended.wait(timeout_s)
        return self.known

    def close(self) -> None:
        """Stop reading."""
        self._closing = True
        if self._loaded is not None:
            self._loaded.set()

    def _end(self, digest: str) -> None:
        self.known = digest
        if digest and not self._closing:
            self._then(digest)
        self._ended.set()

    def _work(self) -> None:
        started_s = time.monotonic()
        try:
            digest = self.source.digest(self._hashed)
            if self._loaded is not None:
                self._loaded.wait()
            if not self._closing and not self.source.unchanged():
                raise ConnectorError(
                    "the weights have changed while the engine loaded them; restart the engine"
                )
        except Exception as error:
            # Whatever fails must end the identification, or nothing would ever hit or be saved.
            self.refusal = str(error) or repr(error)
            if not self._closing:
                self._logger.error(
                    "beluga: the model is not identified, so the pool is not used: %s%s",
                    self.refusal,
                    "" if isinstance(error, ConnectorError) else f"; {SET_IDENTITY}",
                )
            self._end("")
            return
        if self._done_bytes:
            self._logger.info(
                "beluga: the model is identified: %.1f GB hashed in %.1f s",
                self._done_bytes / 1e9,
                time.monotonic() - started_s,
            )
        self._end(digest)

    def _hashed(self, count: int) -> None:
        if self._closing:
            raise ConnectorError("closed")
        self._count(count)
        with self._lock:
            self._done_bytes += count
            if time.monotonic() < self._report_s:
                return
            self._report_s = time.monotonic() + _REPORT_S
        self._logger.info(
            "beluga: hashing the model: %.1f of %.1f GB; until then lookups miss and nothing is "
            "saved",
            self._done_bytes / 1e9,
            self.source.size / 1e9,
        )


def namespace_of(settings: EngineSettings, engine: str, version: str, fields: Fields) -> Namespace:
    """Return the namespace of ``fields`` in an engine that calls a storage plugin."""
    always: Fields = {"engine": engine, "engine_version": version, "variant": settings.variant}
    return Namespace(always | fields, salt=settings.salt).of_tenant(settings.tenant)


def with_weights(namespace: Namespace, digest: str) -> Namespace:
    """Return a rank's namespace with the identity of its weights."""
    return Namespace({**namespace.fields, WEIGHTS: digest}, salt=namespace.salt)


def _is_weights(name: str) -> bool:
    return _matches(name.rpartition("/")[2], WEIGHT_FILES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# Modules of engine processes that load a model. Such a process starts with its engine.
_LOADERS = ("vllm.v1.worker.worker_base", "sglang.srt.managers.scheduler")


def engine_start_ns() -> int:
    """Return a time before this process's engine started to load its model, in nanoseconds of
    :func:`time.time_ns`, or 0 if this is not an engine's process.
    """
    return int(process_start_s() * 1e9) if not sys.modules.keys().isdisjoint(_LOADERS) else 0


def process_start_s() -> float:
    """Return this process's start in seconds of :func:`time.time`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # field 22 of proc(5), which counts from 1 and includes pid and name
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
