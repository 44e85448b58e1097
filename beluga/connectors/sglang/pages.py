# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's host pages by key. A page is one block: the concatenation of its buffers (K, V, of each
layer).

The namespace consists of SGLang's model, ranks, and the shape of its host pool. KV that is the same
on all tensor-parallel ranks (MLA) has no rank in it: one rank writes, all read. A page's name
begins with the generation, so that pages can be cleared, and the version of the weights.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from beluga.connectors.connection import Attachment, Connection, Side
from beluga.connectors.identity import Fields, namespace_of
from beluga.connectors.records import CacheGeneration, fetch
from beluga.connectors.settings import EngineSettings
from beluga.errors import ConnectorError, LayoutError
from beluga.index import BlockState, IndexClient
from beluga.kvcache import KVCache, Namespace, hash_keys
from beluga.transfer import TransferClass, TransferStats

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)
T = TypeVar("T")
Names: TypeAlias = "NDArray[np.uint8]"

HOLES_MAX = 64  # the most misses of a batch after which the lookup continues

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_first_kv_split")
FLAT, DIRECT = "flat", "direct"  # a page in SGLang's flat copy, or in place in the host pool

# Fields of SGLang's host pool that determine a page's bytes. Each pool has some of them.
POOL_FIELDS = (
    *("dtype", "page_size", "layer_num", "start_layer", "end_layer", "size_per_token"),
    *("head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"),
    *("head_group_num", "target_layer_num", "storage_format_tag", "dsa_kv_cache_store_fp8"),
)
# Fields of its configuration that do the same; MLA ignores the tensor-parallel rank.
_RANK_FIELDS = ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")


def pool_namespace(
    settings: EngineSettings, version: str, config: Any, host_pool: Any, model: Fields
) -> Namespace:
    """Return the namespace of the pages, without the weights. ``model`` is SGLang's configuration.

    Raises ConnectorError for an unsupported host pool.
    """
    layout = getattr(host_pool, "layout", None)
    if layout not in LAYOUTS:
        raise ConnectorError(
            f"host pages of layout {layout!r} are not supported; use one of {LAYOUTS}"
        )
    if getattr(host_pool, "kv_buffer", None) is None and not is_logical(host_pool):
        raise ConnectorError(
            "beluga needs a host pool with KV in it, or one that only counts pages"
        )
    fields: Fields = {
        "model": config.model_name or "",
        "mla": int(config.is_mla_model),
        "layout": layout,
        "pool": type(host_pool).__name__,
    }
    fields |= {name: str(getattr(host_pool, name, "")) for name in POOL_FIELDS}
    fields |= rank_fields(config, replicated=config.is_mla_model)
    fields |= model
    return namespace_of(settings, "sglang", version, fields)


def is_logical(host_pool: Any) -> bool:
    """Return whether a host pool only counts the pages of others, and has no bytes."""
    return (
        getattr(host_pool, "kv_buffer", None) is None
        and getattr(host_pool, "size_per_token", None) == 0
    )


def rank_fields(config: Any, *, replicated: bool) -> Fields:
    """Return the fields of a rank that determine a page's bytes; ``replicated`` pages are the same
    on all tensor-parallel ranks.
    """
    fields: Fields = {name: str(getattr(config, name, "")) for name in _RANK_FIELDS}
    if not replicated or getattr(config, "dcp_size", 1) > 1:
        fields |= {"tp_size": config.tp_size}
    if not replicated:
        fields |= {"tp_rank": config.tp_rank}
    return fields


def page_tokens(config: Any, host_pool: Any) -> int:
    """Return the tokens that a page saves: those of one page on the first rank, and 0 on the
    others, whose pages cover the same tokens.
    """
    ranks = config.tp_rank, *(getattr(config, name, 0) for name in _RANK_FIELDS if "rank" in name)
    return 0 if any(ranks) else int(getattr(host_pool, "page_size", 0))


def page_buffers(host_pool: Any, host_indices: Any, count: int) -> list[list[Any]]:
    """Return the buffers of each of ``count`` host pages, in place. ``host_indices`` has the number
    of each token in the host pool. Raises LayoutError unless these are ``count`` whole pages of it.
    """
    if not count:
        return []
    refuse_wrong(host_pool, host_indices, count)
    try:
        addresses, sizes = host_pool.get_page_buffer_meta(host_indices)
    except (
        ValueError,
        TypeError,
        NotImplementedError,
        AssertionError,
    ) as error:  # the pool has no buffers of this layout
        raise LayoutError(f"SGLang returned no addresses of its pages: {error}") from error
    per_page, remainder = divmod(len(addresses), count)
    if remainder or not per_page or len(sizes) != len(addresses):
        raise LayoutError(f"{len(addresses)} buffers of {len(sizes)} sizes for {count} pages")
    buffers = [
        (ctypes.c_char * size).from_address(address)
        for address, size in zip(addresses, sizes, strict=True)
    ]
    return [buffers[i : i + per_page] for i in range(0, len(buffers), per_page)]


def refuse_wrong(host_pool: Any, host_indices: Any, count: int) -> None:
    """Raise LayoutError for indices that are not ``count`` whole pages, because SGLang computes
    addresses for any numbers, and only from the first of each page.
    """
    tokens = getattr(host_pool, "logical_page_size", None) or host_pool.page_size
    size = getattr(host_pool, "logical_size", None) or getattr(host_pool, "size", None)
    try:
        indices = np.asarray(host_indices)
    except (TypeError, ValueError, RuntimeError) as error:  # a GPU tensor, or one without memory
        raise LayoutError(
            f"SGLang's host indices cannot be read ({error}); pass whole numbers in CPU memory"
        ) from error
    if indices.dtype.kind not in "iu" or indices.shape != (count * tokens,):
        raise LayoutError(
            f"SGLang's host indices are {indices.dtype} of shape {indices.shape}; pass "
            f"{count * tokens} whole numbers for {count} pages"
        )
    pages = indices.astype(np.int64).reshape(count, tokens)
    first = pages[:, 0]
    if (pages != first[:, None] + np.arange(tokens)).any() or (first % tokens).any():
        raise LayoutError(
            f"SGLang's host indices are not whole pages; pass all {tokens} of each page, in order"
        )
    if first.min() < 0 or (size is not None and first.max() + tokens > size):
        raise LayoutError(
            f"SGLang's host indices are from {first.min()} to {first.max() + tokens - 1}; pass "
            f"those of its host pool, which has {size} tokens"
        )


class Pages:
    """Pages in the pool. Every failure is a miss. Several threads may use it.

    Reads have the class "prefetch": SGLang fetches pages to its host memory while their request
    waits in its queue. ``version`` returns the current version of SGLang's weights, or None if it
    is unknown; then every page is a miss.
    """

    def __init__(self, settings: EngineSettings, version: Callable[[], str | None]) -> None:
        self.namespaces: dict[str, Namespace] = {}
        self._others: dict[str, Fields] = {}
        self._version = version
        self._page_tokens = 0
        self._onboard_s = settings.onboard_ms / 1000
        self._connection = Connection(settings, name="sglang", engine="sglang", logger=logger)
        self._side = Side(read_class=TransferClass.PREFETCH)
        self._generation: CacheGeneration | None = None
        self._connection.settle()

    @property
    def attached(self) -> bool:
        """Whether the pool is available now."""
        return self._connection.attached

    @property
    def failure_count(self) -> int:
        """The number of failed calls, which counted as misses."""
        return self._connection.failure_count

    def transfer_stats(self) -> dict[TransferClass, TransferStats]:
        """Return the admissions of the host's link, by class, with their waiting times."""
        return self._connection.transfer_stats()

    def register(self, namespace: Namespace, *, page_tokens: int = 0) -> None:
        """Use this namespace from now on. Pages in FLAT form are not found in DIRECT form, and vice
        versa. ``page_tokens`` is how many tokens each page saves, for the server's exporter.
        """
        self._page_tokens = page_tokens
        fields = {**namespace.fields, "namespace": namespace.digest}
        self.namespaces = {form: Namespace({**fields, "form": form}) for form in (FLAT, DIRECT)}
        self._generation = CacheGeneration(namespace)  # last: lookups need it

    def add(self, form: str, fields: Fields) -> None:
        """Add a form of pages of another pool. ``fields`` determine their bytes, in addition to the
        namespace of the KV.
        """
        self._others[form] = fields

    def leading(self, form: str, keys: Sequence[str]) -> int:
        """Return how many leading pages the pool has. Pages that only a tier below the pool has are
        onboarded first.
        """
        hits = self._with_names(
            form, "looking up", keys, lambda c, names: c.onboard(names, wait_s=self._onboard_s)
        )
        return hits or 0

    def present(self, forms: Sequence[str], keys: Sequence[str]) -> NDArray[np.bool_]:
        """Return for each form which pages the pool or a tier below it has, in one call."""

        def look(attachment: Attachment, names: Names) -> NDArray[np.bool_]:
            all_keys = [self._cache(attachment, form).keys(names) for form in forms]
            tiers = IndexClient(attachment.client).tiers(np.concatenate(all_keys))
            return tiers.reshape(len(forms), len(keys)).astype(bool)

        tiers_of_keys = None
        if forms and keys:
            tiers_of_keys = self._named("looking up", keys, look)
        return (
            np.zeros((len(forms), len(keys)), dtype=bool)
            if tiers_of_keys is None
            else tiers_of_keys
        )

    def fetch(
        self,
        form: str,
        keys: Sequence[str],
        targets: Callable[[], Sequence[Any]],
        *,
        onboard: bool = False,
    ) -> list[bool]:
        """Fetch the pages that the pool has. Returns for each whether it was fetched; the other
        targets are undefined. After HOLES_MAX misses the remaining pages count as misses. With
        ``onboard`` pages that only a tier below the pool has come first.
        """

        def load(cache: KVCache, names: Names) -> list[bool]:
            buffers, done = targets(), [False] * len(keys)
            if onboard:
                cache.onboard(names, wait_s=self._onboard_s)
            at = holes = 0
            while at < len(keys) and holes <= HOLES_MAX:
                hits = fetch(cache, names[at:], buffers[at:]).hits
                done[at : at + hits] = [True] * hits
                at += hits + 1
                holes += 1
            if form in (FLAT, DIRECT):  # the tokens of other pools are those of the KV
                cache.client.report.saved(sum(done) * self._page_tokens)
            return done

        return self._with_names(form, "loading", keys, load) or [False] * len(keys)

    def store(
        self, form: str, keys: Sequence[str], sources: Callable[[], Sequence[Any]]
    ) -> list[bool]:
        """Put pages. Returns for each whether the pool has it now."""
        result = None
        if keys:
            result = self._with_names(
                form, "storing", keys, lambda cache, names: cache.put(names, sources())
            )
        if result is None:
            return [False] * len(keys)
        return [bool(state != BlockState.REFUSED) for state in result.states]

    def clear(self) -> None:
        """Remove all stored pages for every engine of this namespace. Raises ConnectorError if the
        pool is not available now. Then this engine finds no page until they are removed.
        """
        if self._generation is None:
            return
        self._generation.clear()
        self._connection.attempt("clearing", self._generation.now)
        if self._generation.pending:
            raise ConnectorError(
                "SGLang's stored pages are not cleared, because the pool is not available; clear "
                "them again when it is"
            )

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def _with_names(
        self, form: str, doing: str, keys: Sequence[str], call: Callable[[KVCache, Names], T]
    ) -> T | None:
        """Call ``call`` with the form's cache and the pages' names. Returns None if there is no
        version, no generation or no pool.
        """
        return self._named(doing, keys, lambda a, names: call(self._cache(a, form), names))

    def _named(
        self, doing: str, keys: Sequence[str], call: Callable[[Attachment, Names], T]
    ) -> T | None:
        version, generation = self._version(), self._generation
        if version is None or generation is None:
            return None

        def on(attachment: Attachment) -> T:
            before = Namespace({"era": generation.now(attachment), "weights": version}).digest
            return call(attachment, hash_keys(before + key.encode() for key in keys))

        return self._connection.attempt(doing, on)

    def _cache(self, attachment: Attachment, form: str) -> KVCache:
        """Return the cache of a form's pages."""
        if form not in self.namespaces:
            kv = self.namespaces[FLAT]
            other = Namespace({**kv.fields, **self._others[form], "namespace": kv.digest})
            self.namespaces[form] = other
        return attachment.cache(self.namespaces[form], self._side)


KV = "kv"
_STATES = "mamba"  # each tensor-parallel rank has its part, even where the KV is the same on all
_ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError, IndexError)


class SidePool:
    """One of SGLang's pools in addition to the KV, registered as ``name``: a window, states, an
    indexer or a draft. Its pages are copied in place if SGLang
    returns their addresses, and otherwise by SGLang's own copies. Raises ConnectorError for a pool
    without pages in CPU memory.
    """

    def __init__(self, name: str, host_pool: Any) -> None:
        self.name, self._pool = name, host_pool
        self._tokens = int(getattr(host_pool, "page_size", 0) or 1)
        self._sizes = self._direct_sizes()
        self.direct = bool(self._sizes)
        if not self.direct:
            try:
                page = host_pool.get_dummy_flat_data_page()
                self._sizes = [page.numel() * page.element_size()]
            except (AttributeError, *_ERRORS) as error:
                raise ConnectorError(
                    f"SGLang's pool {name} has no pages that beluga can copy ({error}); start "
                    "SGLang without beluga, or without HiCache for this model"
                ) from error
        if not sum(self._sizes):
            raise ConnectorError(
                f"SGLang's pool {name} has pages without bytes; start SGLang without beluga for "
                "this model"
            )

    def fields(self, config: Any) -> Fields:
        """Return the fields that determine a page's bytes, in addition to the model."""
        fields: Fields = {
            "pool_name": self.name,
            "pool": type(self._pool).__name__,
            "layout": str(getattr(self._pool, "layout", "")),
            "sizes": str(self._sizes),
            "dtypes": str(
                [str(getattr(self._pool, f"{part}_dtype", "")) for part in ("temporal", "conv")]
            ),
            "form": "direct" if self.direct else "flat",
        }
        fields |= {name: str(getattr(self._pool, name, "")) for name in POOL_FIELDS}
        return fields | rank_fields(config, replicated=self._replicated(config))

    def targets(self, keys: Sequence[str], host_indices: Any) -> list[Any]:
        """Return memory for the pages with these keys: in place, or copies for :meth:`take`."""
        if self.direct:
            return list(page_buffers(self._pool, host_indices, len(keys)))
        refuse_wrong(self._pool, host_indices, len(keys))
        return [self._pool.get_dummy_flat_data_page() for _ in keys]

    def take(self, host_indices: Any, targets: Sequence[Any], done: Sequence[bool]) -> None:
        """Copy the pages that were fetched to their places, if they are not in place."""
        if self.direct:
            return
        for page, (target, fetched) in enumerate(zip(targets, done, strict=True)):
            if fetched:
                self._pool.set_from_flat_data_page(self._first(host_indices, page), target)

    def sources(self, keys: Sequence[str], host_indices: Any) -> list[Any]:
        """Return the pages with these keys. Raises LayoutError."""
        if self.direct:
            return list(page_buffers(self._pool, host_indices, len(keys)))
        refuse_wrong(self._pool, host_indices, len(keys))
        try:
            return [
                self._pool.get_data_page(self._first(host_indices, page), flat=True).contiguous()
                for page in range(len(keys))
            ]
        except _ERRORS as error:
            raise LayoutError(f"SGLang does not copy its pool {self.name}: {error}") from error

    def _first(self, host_indices: Any, page: int) -> int:
        return int(host_indices[page * self._tokens])

    def _direct_sizes(self) -> list[int]:
        """Return the sizes of a page's buffers, or nothing if SGLang does not return these."""
        try:
            indices = _tensor(np.arange(self._tokens))
            _, sizes = self._pool.get_page_buffer_meta(indices)
            return [int(size) for size in sizes]
        except (AttributeError, *_ERRORS):
            return []

    def _replicated(self, config: Any) -> bool:
        """Return whether all tensor-parallel ranks have the same pages. SGLang's first rank then
        stores them for all.
        """
        sharded = self.name == _STATES or "MHA" in type(self._pool).__name__
        return bool(config.is_mla_model) and not sharded


def restorable(
    kv_pages: int, needs: Sequence[tuple[str, int, Sequence[bool]]]
) -> tuple[list[int], dict[str, int]]:
    """Return the lengths, in pages, at which a prefix can be restored, and the longest one of each
    pool.

    A prefix can be restored at a length where every pool has what it needs there: an indexer the
    whole prefix, a window its last pages, a state only the last page. So lengths have gaps, and the
    backend returns all of them; SGLang takes the longest that each rank has.

    ``kv_pages`` are the leading pages with KV. ``needs`` has for each pool its name, how many of
    the last pages it needs (0: all), and which pages there are.
    """
    lengths, longest = list(range(1, kv_pages + 1)), {KV: kv_pages} if kv_pages else {}
    for name, last, there in needs:
        run, own = 0, set[int]()
        for length in range(1, kv_pages + 1):
            run = run + 1 if there[length - 1] else 0
            if run >= (min(last, length) if last else length):
                own.add(length)
        if own:
            longest[name] = max(own)
        lengths = [length for length in lengths if length in own]
    return lengths, longest


def _tensor(indices: Any) -> Any:
    """Return indices as SGLang passes them: a tensor, where torch is installed."""
    try:
        import torch
    except ImportError:
        return indices
    return torch.from_numpy(indices)
