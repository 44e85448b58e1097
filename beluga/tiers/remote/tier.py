# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier: a lower tier over any store of bytes.

An object is a header of 64 bytes, and a block's payload.

====== ===== =======================================================================
offset bytes content
====== ===== =======================================================================
     0     8 magic: ``BELUGAKV``
     8     4 version of this header: 1
    12     4 CRC-32C of the payload, seeded with the CRC-32C of the key
    16    32 the block's record: key, fingerprint, length, chunk_size
    48    12 zero
    60     4 CRC-32C of the 60 bytes before
    64     n payload: ``length`` bytes, to the end of the object
====== ===== =======================================================================

All numbers are little-endian. Another version uses other object names.

The object ``beluga-store`` identifies the store: 32 random hexadecimal digits, of which the first 8
are its number in the pools' records of removals. The first server that opens the store creates it.
A pool whose first server could not reach the store has chosen another number; then the object
``beluga-store-N`` confirms it.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from beluga.coherence import crc32c
from beluga.errors import TierError, is_of_request
from beluga.limit import LogLimit, and_more
from beluga.metrics import REGISTRY
from beluga.tiers.hanging import StoreThreads
from beluga.tiers.remote.health import Breaker
from beluga.tiers.remote.store import Contents, ObjectStore, RemoteSettings
from beluga.tiers.tier import (
    BLOCK,
    BREAKER_STATE,
    LOADED_BLOCKS,
    LOADED_BYTES,
    MISSED_BLOCKS,
    SAVED_BLOCKS,
    SAVED_BYTES,
    StoredBlock,
    check_blocks,
    check_keys,
)

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)

_ERRORS = REGISTRY.counter("beluga_tier_errors_total", "Operations that failed, by kind.")
_RETRIES = REGISTRY.counter("beluga_tier_retries_total", "Operations that were tried again.")
_OPENINGS = REGISTRY.counter("beluga_tier_breaker_openings_total", "How often a breaker opened.")
_ABANDONED = REGISTRY.gauge(
    "beluga_tier_abandoned_threads", "Threads that hang in a client library."
)
_SECONDS = REGISTRY.histogram("beluga_tier_operation_seconds", "Time of one store operation.")

_TRIAL = "beluga-trial"
_PROBE = "beluga-probe"
_MARKER = "beluga-store"
_WRONG_LIMIT = 65536  # limit of remembered names of wrong objects

VERSION = 1
HEADER: np.dtype[np.void] = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("payload_crc", "<u4"),
        ("record", BLOCK),
        ("zero", "V12"),
        ("crc", "<u4"),
    ]
)
_MAGIC = b"BELUGAKV"
_MARKED = re.compile(rb"[0-9a-f]{32}")
_CHECKED = HEADER.itemsize - 4


class _RejectedError(Exception):
    """The breaker is open."""


class RemoteTier:
    """A :class:`beluga.tiers.tier.LowerTier` over an :class:`ObjectStore`, which it owns and
    closes.

    Calls always end, even if the store hangs: load, contains and remove within ``load_s``, save
    within ``save_s``. If the store fails several times in a row, calls return misses at once, until
    a trial in the background succeeds.

    `load` returns read-only payloads.
    """

    def __init__(
        self, store: ObjectStore, *, name: str, settings: RemoteSettings | None = None
    ) -> None:
        self._name, self._store = name, store
        self._settings = settings = settings or RemoteSettings()
        self.threads = settings.threads or store.threads
        """The number of concurrent operations. Saves use at most half of them."""
        self._breaker = Breaker(settings)
        self._workers = StoreThreads(
            self.threads,
            spare=settings.abandoned,
            limit_s=settings.operation_s,
            hung=self._hung,
        )
        self._wrong: dict[str, None] = {}  # names of wrong objects, which the next save replaces
        self._putting: Counter[str] = Counter()  # running puts, including abandoned ones
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._limit = LogLimit()
        self._required: tuple[int, bool] | None = None
        self._confirming = False  # the required number is being compared, or is another store's
        BREAKER_STATE.set(lambda: self._breaker.state, tier=name)
        _ABANDONED.set(lambda: self._workers.abandoned, tier=name)

    @property
    def name(self) -> str:
        """The store's URL without passwords and options."""
        return self._name

    @property
    def block_count_max(self) -> int:
        """0: the store has no limit."""
        return 0

    def keys(self) -> None:
        """Return None: other pools write to the store, too."""

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Do nothing: blocks that a remote store drops are found missing when they are loaded."""

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks. Returns which of them are saved now, or were already."""
        records, payload = check_blocks(records, payload)
        saved = np.zeros(len(records), np.bool_)
        if not self._admits() or not len(records):
            return saved
        until = time.monotonic() + self._settings.save_s
        names = [name_of(key) for key in records["key"]]
        saved[:] = self._exist(names, until, urgent=False)
        saved &= [name not in self._wrong for name in names]
        window = self.threads // 2
        under_way: dict[Future[Any], int] = {}

        def collect() -> None:
            for future in [each for each in under_way if each.done()]:
                saved[under_way.pop(future)] = _succeeded(future)

        for row in np.flatnonzero(~saved):
            while len(under_way) >= window and time.monotonic() < until:
                self._workers.wait(under_way, until, for_all=False)
                collect()
            if time.monotonic() >= until or not self._breaker.closed:
                break
            if records["length"][row] > self._settings.block_bytes:
                self._warn("size", f"a block of {records['length'][row]} bytes is too large")
                continue
            data = pack(records[row], payload[row])
            put = partial(self._put, names[row], data)
            under_way[self._workers.submit(put, urgent=False)] = int(row)
        self._finish(under_way, until)
        collect()
        return saved

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        """Load blocks; a miss is None."""
        keys = check_keys(keys)
        blocks: list[StoredBlock | None] = [None] * len(keys)
        if self._admits() and len(keys):
            until = time.monotonic() + self._settings.load_s
            futures = [self._workers.submit(partial(self._get, key), urgent=True) for key in keys]
            self._finish(futures, until)
            blocks = [each.result() if _succeeded(each) else None for each in futures]
        hits = [each for each in blocks if each]
        LOADED_BLOCKS.add(len(hits), tier=self._name)
        LOADED_BYTES.add(sum(each.payload.size for each in hits), tier=self._name)
        MISSED_BLOCKS.add(len(blocks) - len(hits), tier=self._name)
        return blocks

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which blocks the store has; none if it does not reply."""
        keys = check_keys(keys)
        if not self._admits():
            return np.zeros(len(keys), np.bool_)
        until = time.monotonic() + self._settings.load_s
        return np.array(self._exist([name_of(key) for key in keys], until, urgent=True), np.bool_)

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove blocks. Returns how many there were, as far as the store has replied."""
        keys = check_keys(keys)
        if not self._admits():
            return 0
        until = time.monotonic() + self._settings.load_s
        names = [name_of(key) for key in keys]
        answers = self._run_all("remove", self._store.delete, names, until, urgent=True)
        return sum(removed or 0 for _, removed in answers)

    def remove_durably(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Remove blocks durably. Returns which keys have no block left, according to the store's
        reply after the deletion.
        """
        keys = check_keys(keys)
        names = [name_of(key) for key in keys]
        with self._lock:
            late = set(names) & self._putting.keys()  # puts still running may create these later
        removed = self._delete_all(names) & [name not in late for name in names]
        for row in np.flatnonzero(~removed).tolist():
            self._replace_later(names[row])
        return removed

    def _delete_all(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """Delete objects. Returns which names have no object left."""
        removed = np.zeros(len(names), np.bool_)
        if not self._admits() or not len(names):
            return removed
        until = time.monotonic() + self._settings.load_s
        deleted = self._run_all("remove", self._store.delete, names, until, urgent=False)
        removed[:] = [ok for count, answer in deleted for ok in [answer is not None] * count]
        rows = np.flatnonzero(removed)
        answers = self._run_all(
            "contains",
            self._store.exists,
            [names[row] for row in rows.tolist()],
            until,
            urgent=False,
        )
        removed[rows] = [
            not exists for count, answer in answers for exists in (answer or [True] * count)
        ]
        return removed

    def store_number(self, listed: Sequence[int]) -> int | None:
        """Return the number of the store, one of ``listed`` if it has one of these; None if it does
        not reply. The marker is created if it is missing.
        """
        future = self._workers.submit(partial(self._number, listed), urgent=True)
        self._finish([future], time.monotonic() + self._settings.operation_s)
        return future.result() if _succeeded(future) else None

    def require(self, number: int | None, is_new: bool = False) -> None:
        """Return only misses, save nothing and remove nothing until the store has confirmed this
        number. ``is_new``: no store has confirmed it before, so any store may. None: the number is
        confirmed.
        """
        self._confirming = False
        self._required = None if number is None else (number, is_new)

    def _number(self, listed: Sequence[int]) -> int:
        number = self._marker(uuid.uuid4().hex)
        for other in listed if number not in listed else ():
            alias = f"{_MARKER}-{other:08x}"
            if self._operate("contains", partial(self._store.exists, [alias]))[0]:
                return other
        return number

    def _marker(self, text: str) -> int:
        """Return the number in the store's marker, which is created with this text if there is
        none.
        """
        read = partial(self._operate, "load", partial(self._store.get, _MARKER))
        if read() is None:
            create = getattr(self._store, "create", self._store.put)
            self._operate("save", partial(create, _MARKER, memoryview(text.encode())))
        contents = bytes(read() or b"")
        if not _MARKED.fullmatch(contents):
            self._warn("marker", f"the object {_MARKER} is damaged; delete it, and restart servers")
            raise WrongObjectError(_MARKER)
        return int(contents[:8], 16) or 1

    def _confirms(self) -> bool:
        """Return whether no number is required; otherwise compare it in the background."""
        required = self._required
        if required is None:
            return True
        with self._lock:
            begins, self._confirming = not self._confirming, True
        if begins:
            self._workers.submit(partial(self._confirm, *required), urgent=True)
        return False

    def _confirm(self, number: int, is_new: bool) -> None:
        try:
            if is_new and self._marker(f"{number:08x}{uuid.uuid4().hex[8:]}") != number:
                put = partial(self._store.put, f"{_MARKER}-{number:08x}", memoryview(b"1"))
                self._operate("save", put)
            elif not is_new and self._number([number]) != number:
                _logger.warning(
                    "%s is another store than the one that this pool used: it is not used until "
                    "the server is started again",
                    self._name,
                )
                return
        except BaseException:
            self._confirming = False  # the next call tries again
            raise
        self._required = None

    def probe(self) -> None:
        """Log a warning if the store accepts an object but does not allow its deletion."""
        name, until = f"{_PROBE}-{uuid.uuid4()}", time.monotonic() + self._settings.load_s
        put = partial(self._operate, "save", partial(self._store.put, name, memoryview(b"probe")))
        if self._admits():
            future = self._workers.submit(put, urgent=False)
            self._finish([future], until)
            if _succeeded(future) and not self._delete_all([name]).all() and self._breaker.closed:
                _logger.warning(
                    "%s does not delete objects: removed blocks stay there, and the pool has to "
                    "remember their removals; grant this user the permission to delete objects",
                    self._name,
                )

    def _replace_later(self, name: str) -> None:
        """Make the next save replace the store's object of this name."""
        with self._lock:
            if len(self._wrong) >= _WRONG_LIMIT:
                del self._wrong[next(iter(self._wrong))]
            self._wrong[name] = None

    def close(self) -> None:
        """Finish running operations and close the store. Idempotent."""
        with self._lock:
            if self._closing.is_set() or os.getpid() != self._pid:
                return
            self._closing.set()
        ended = self._workers.close(time.monotonic() + self._settings.operation_s)
        BREAKER_STATE.remove(tier=self._name)
        _ABANDONED.remove(tier=self._name)
        if ended:  # closing a client that a thread still uses may crash
            self._store.close()

    def _admits(self) -> bool:
        """Return whether calls are allowed, and start a trial if one is due."""
        if os.getpid() != self._pid:
            raise TierError(f"{self._name} belongs to the parent process; open it again after fork")
        if self._closing.is_set():
            raise TierError(f"{self._name} is closed")
        if self._breaker.closed:
            return self._confirms()
        self._workers.reap()
        if self._breaker.begin_trial():
            trial = self._workers.submit(partial(self._store.exists, [_TRIAL]), urgent=True)
            trial.add_done_callback(self._end_trial)
        return False

    def _end_trial(self, trial: Future[Any]) -> None:
        # A rejection is a reply, too.
        alive = _succeeded(trial) or (not trial.cancelled() and is_of_request(trial.exception()))
        self._breaker.end_trial(alive)
        if alive:
            _logger.info("%s replies again", self._name)

    def _get(self, key: NDArray[np.uint64]) -> StoredBlock | None:
        name = name_of(key)
        contents = self._operate("load", lambda: self._store.get(name))
        if contents is None:
            return None
        try:
            return unpack(key, contents)
        except WrongObjectError as error:
            self._replace_later(name)
            self._warn("wrong", f"{name}: {error}")
            return None

    def _put(self, name: str, data: memoryview) -> None:
        with self._lock:
            self._putting[name] += 1
        try:
            self._operate("save", lambda: self._store.put(name, data))
        finally:
            with self._lock:
                self._putting[name] -= 1
                if not self._putting[name]:
                    del self._putting[name]
        with self._lock:
            self._wrong.pop(name, None)
        SAVED_BLOCKS.add(tier=self._name)
        SAVED_BYTES.add(len(data) - HEADER.itemsize, tier=self._name)

    def _exist(self, names: Sequence[str], until: float, *, urgent: bool) -> list[bool]:
        answers = self._run_all("contains", self._store.exists, names, until, urgent=urgent)
        return [each for count, exist in answers for each in (exist or [False] * count)]

    def _run_all(
        self,
        operation: str,
        request: Callable[[Sequence[str]], _T],
        names: Sequence[str],
        until: float,
        *,
        urgent: bool,
    ) -> list[tuple[int, _T | None]]:
        """Query names in batches. Returns each batch's size and its result, if there is one."""
        size = self._store.batch
        batches = [names[begin : begin + size] for begin in range(0, len(names), size)]
        futures = [
            self._workers.submit(
                partial(self._operate, operation, partial(request, each)), urgent=urgent
            )
            for each in batches
        ]
        self._finish(futures, until)
        return [
            (len(batch), future.result() if _succeeded(future) else None)
            for batch, future in zip(batches, futures, strict=True)
        ]

    def _finish(self, futures: Iterable[Future[Any]], until: float) -> None:
        """Wait for futures; cancel those that have not started by the deadline."""
        self._workers.wait(futures, until)
        for future in futures:
            future.cancel()

    def _operate(self, operation: str, call: Callable[[], _T]) -> _T:
        """Call the store on a worker thread, with retries, and report the outcome to the
        breaker.
        """
        if not self._breaker.closed:
            raise _RejectedError
        settings, begun = self._settings, time.monotonic()
        for attempt in itertools.count():
            try:
                result = call()
                break
            except Exception as error:
                if is_of_request(error):
                    self._breaker.succeeded()  # the store has replied
                    self._warn("refused", f"{operation}: {error}")
                    raise
                if not self._tries_again(attempt, begun):
                    # Otherwise it was abandoned
                    if time.monotonic() - begun < settings.operation_s:
                        text = f"{operation}: {type(error).__name__}: {error}"
                        self._failed("store", text, begun)
                    raise
                _RETRIES.add(tier=self._name)
        seconds = time.monotonic() - begun
        _SECONDS.observe(seconds, tier=self._name, operation=operation)
        if seconds < settings.operation_s:
            self._breaker.succeeded()
        return result

    def _tries_again(self, attempt: int, begun: float) -> bool:
        """Sleep before the next attempt. Returns False at once if the attempt could not end in
        time.
        """
        settings = self._settings
        delay_s = settings.backoff_s * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311
        end = time.monotonic() + delay_s + settings.attempt_s
        return (
            attempt < settings.retries
            and end <= begun + settings.operation_s
            and not self._closing.wait(delay_s)
        )

    def _hung(self, begun: float) -> None:
        self._failed("timeout", f"no answer within {self._settings.operation_s:g} s", begun)

    def _failed(self, kind: str, text: str, begun: float) -> None:
        if self._breaker.failed(begun):
            _OPENINGS.add(tier=self._name)
            text = f"calls miss at once until it replies again: {text}"
        self._warn(kind, text)

    def _warn(self, kind: str, text: str) -> None:
        """Count an error, and _logger it unless the same kind was logged recently."""
        _ERRORS.add(tier=self._name, kind=kind)
        suppressed = self._limit.passes(kind)
        if suppressed is not None:
            line = next(iter(text.splitlines()), kind)  # obstore appends long details
            _logger.warning("%s: %s%s", self._name, line, and_more(suppressed))


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


class WrongObjectError(Exception):
    """An object is not the one that was saved under its name."""


def name_of(key: NDArray[np.uint64]) -> str:
    """Return the object name of a key: a folder for the version, one of 256 subfolders, and 32
    digits.
    """
    digits = key.astype("<u8").tobytes().hex()
    return f"beluga-{VERSION}/{digits[:2]}/{digits}"


def pack(record: np.void, payload: NDArray[np.uint8]) -> memoryview:
    """Encode a block as an object. It is a copy: the payload may change afterwards."""
    length = int(record["length"])
    data = np.empty(HEADER.itemsize + length, np.uint8)
    data[HEADER.itemsize :] = payload[:length]
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["record"] = _MAGIC, VERSION, record
    header["payload_crc"] = crc32c(data[HEADER.itemsize :].data, crc32c(record["key"].tobytes()))
    header["crc"] = crc32c(header.view(np.uint8)[:_CHECKED].data)
    data[: HEADER.itemsize] = header.view(np.uint8)
    return data.data


def unpack(key: NDArray[np.uint64], contents: Contents) -> StoredBlock:
    """Decode the object that the store returned for the key.

    Raises WrongObjectError: the bytes are untrusted, because the store and every hop may change
    them.
    """
    data = np.frombuffer(contents, np.uint8)
    if data.size < HEADER.itemsize:
        raise WrongObjectError(f"it has {data.size} bytes, which is less than a header")
    header = data[: HEADER.itemsize].copy().view(HEADER)[0]
    record, payload = header["record"].copy(), data[HEADER.itemsize :]
    if header["magic"] != _MAGIC or header["version"] != VERSION:
        raise WrongObjectError("it is not a block, or one of another version")
    if header["crc"] != crc32c(data[:_CHECKED].data):
        raise WrongObjectError("its header is damaged")
    if not np.array_equal(record["key"], key):
        raise WrongObjectError("it is another block")
    if int(record["length"]) != payload.size:
        raise WrongObjectError(f"it has {payload.size} bytes instead of {record['length']}")
    if header["payload_crc"] != crc32c(payload.data, crc32c(record["key"].tobytes())):
        raise WrongObjectError("its payload is damaged")
    return StoredBlock(record, payload)
