# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The exceptions of Beluga, and the one place where a C return code becomes one.

BelugaError
├── BadValueError                 a host number or a time is out of range; a ValueError, too
├── SettingsError                 beluga.toml cannot be read, or has a setting that makes no sense
├── InstructionError              BELUGA_ISA or BELUGA_FLUSH asks for what this CPU lacks
├── PoolError                     the devices, or what is on them
│   ├── DeviceSpecError           PATH@OFFSET+SIZE cannot be read, or is not in 2 MiB steps
│   ├── DeviceMissingError        no such device, or it is not one
│   ├── DevicePermissionError
│   ├── DeviceBusyError           given to another driver (kmem)
│   ├── DeviceForeignError        no Beluga superblock on it
│   ├── DeviceMismatchError       of another pool, named twice, of another size, one too few
│   ├── DeviceTruncatedError      shorter than its superblock says
│   ├── SuperblockDamagedError
│   ├── FormatError               formatted by another version of Beluga
│   ├── PoolExistsError           creating over a pool without force
│   ├── DeviceFaultError          a device failed under a call: poisoned, unplugged, cut short
│   ├── NoRoomError               the filesystem, memory or a cgroup has no room
│   ├── NoDefaultPoolError        nothing is mounted
│   ├── CacheLineError            this CPU's cache lines are larger than a pool's lines
│   └── VerifyError               the memory breaks a promise, or cannot be tested
├── RpcError                      asking the server
│   ├── NoServerError             no process serves the pool
│   ├── CallTimeoutError          no answer in time
│   │   └── LobbyBusyError        another process of this host attaches and does not finish
│   ├── ServerAliveError          a second server is refused
│   ├── DeposedError              this server has been taken over
│   ├── HostClashError            another machine uses this host number
│   ├── SecondHostError           the pool has hardware coherence, and is another host's
│   ├── RuntimeDirError           this host's server has another runtime directory
│   ├── NoLaneError               every lane is taken or in quarantine
│   ├── SessionLostError          the server gave this session up
│   ├── SessionAliveError         a session that was declared gone lives
│   ├── ForkedSessionError        the session belongs to the parent process
│   ├── EpochDamagedError         the line that names the pool's server cannot be read
│   ├── NoMethodError             the server has no such method
│   ├── BadRequestError
│   ├── BadReplyError
│   ├── QuotaError                the session has its share, or calls too often
│   ├── NoTraceError              no server left the trace that is asked for
│   ├── LeaseError                the lock outside the pool cannot be asked
│   └── HandlerError              the server's handler raised
├── CacheError                    blocks
│   ├── NoSpaceError              nothing could be evicted for the block
│   ├── TableFullError
│   ├── ClassLimitError           too many different block sizes
│   ├── NoGrantError              the session does not hold that grant (any more)
│   ├── PinLimitError
│   ├── OffloadingError           what could be evicted waits for a lower tier; try again
│   ├── DrainingError             an operator drains the pool; nothing new is stored
│   ├── QuarantineError           dead writers of this host hold too much space
│   └── LayoutError               buffers do not fit the block
├── TransferError                 a copy engine failed
│   ├── EngineUnavailableError    this machine lacks what the engine needs
│   ├── ChecksumError             bytes that were read are not those that were written
│   ├── TransferTimeoutError      a transfer has not ended in time; it goes on
│   ├── TransferCancelledError    a transfer was dropped before it had ended
│   └── UnsettledError            a copy may still write; its space stays taken
├── TierError                     a tier below the pool cannot be opened or used
├── ConnectorError                an engine's settings, or its KV layout, cannot be served
├── RouterError                   sending requests to workers
│   ├── NoWorkersError            none is registered for the model, or none is healthy
│   ├── AllWorkersBusyError       each is full; wait, or answer 503
│   │   └── WorkersOverloadedError  each that may take the request is over the busy thresholds
│   ├── ObjectiveError            no worker could answer in time; answer 429
│   ├── EventError                a KV event that cannot be applied
│   ├── QueueError                the prefill queue cannot be reached, or refused a task
│   │   └── QueueFullError        it has as many tasks as it may have
│   └── WorkerError               an engine failed a request: down, stalled, broken off
├── AdminError                    the admin endpoint's address cannot be had, or it refused
├── SimulateError                 a simulation's options make no sense
└── ReplayError                   replaying a trace: a process of it failed
    └── TraceError                the trace cannot be read
"""

from __future__ import annotations

import errno
import os


class BelugaError(Exception):
    """The base of all; its text is one line that says what is wrong and how to mend it."""


class BadValueError(BelugaError, ValueError): ...


class SettingsError(BelugaError): ...


class InstructionError(BelugaError): ...


class PoolError(BelugaError): ...


class DeviceSpecError(PoolError): ...


class DeviceMissingError(PoolError): ...


class DevicePermissionError(PoolError): ...


class DeviceBusyError(PoolError): ...


class DeviceForeignError(PoolError): ...


class DeviceMismatchError(PoolError): ...


class DeviceTruncatedError(PoolError): ...


class SuperblockDamagedError(PoolError): ...


class FormatError(PoolError): ...


class PoolExistsError(PoolError): ...


class DeviceFaultError(PoolError): ...


class NoRoomError(PoolError): ...


class NoDefaultPoolError(PoolError): ...


class CacheLineError(PoolError): ...


class VerifyError(PoolError): ...


class RpcError(BelugaError): ...


class NoServerError(RpcError): ...


class CallTimeoutError(RpcError): ...


class LobbyBusyError(CallTimeoutError): ...


class ServerAliveError(RpcError): ...


class DeposedError(RpcError): ...


class HostClashError(RpcError): ...


class SecondHostError(RpcError): ...


class RuntimeDirError(RpcError): ...


class NoLaneError(RpcError): ...


class SessionLostError(RpcError): ...


class SessionAliveError(RpcError): ...


class ForkedSessionError(RpcError): ...


class EpochDamagedError(RpcError): ...


class NoMethodError(RpcError): ...


class BadRequestError(RpcError): ...


class BadReplyError(RpcError): ...


class QuotaError(RpcError): ...


class NoTraceError(RpcError): ...


class LeaseError(RpcError): ...


class HandlerError(RpcError): ...


class CacheError(BelugaError): ...


class NoSpaceError(CacheError): ...


class TableFullError(CacheError): ...


class ClassLimitError(CacheError): ...


class NoGrantError(CacheError): ...


class PinLimitError(CacheError): ...


class OffloadingError(CacheError): ...


class DrainingError(CacheError): ...


class QuarantineError(CacheError): ...


class LayoutError(CacheError): ...


class TransferError(BelugaError): ...


class EngineUnavailableError(TransferError): ...


class ChecksumError(TransferError): ...


class TransferTimeoutError(TransferError): ...


class TransferCancelledError(TransferError): ...


class UnsettledError(TransferError): ...


class TierError(BelugaError): ...


class ConnectorError(BelugaError): ...


class RouterError(BelugaError): ...


class NoWorkersError(RouterError): ...


class AllWorkersBusyError(RouterError): ...


class WorkersOverloadedError(AllWorkersBusyError): ...


class ObjectiveError(RouterError): ...


class EventError(RouterError): ...


class QueueError(RouterError): ...


class QueueFullError(QueueError): ...


class WorkerError(RouterError): ...


class AdminError(BelugaError): ...


class SimulateError(BelugaError): ...


class ReplayError(BelugaError): ...


class TraceError(ReplayError): ...


# The bl_error numbers of csrc/api/error.h, in its order; a test compares the two.
FIRST_CODE = 1001
INT_MAX = (1 << 31) - 1
CODES: tuple[tuple[type[BelugaError], str], ...] = (
    (ForkedSessionError, "this session belongs to the parent process; attach a new one after fork"),
    (NoServerError, "no server answers on this pool; start one with 'beluga serve'"),
    (CallTimeoutError, "the server did not answer in time; is it alive? see 'beluga ping'"),
    (DeposedError, "another server has taken this pool over; this one has stopped"),
    (ServerAliveError, "the pool's server is alive, or not proven gone; stop it first"),
    (HostClashError, "another machine uses this host number; give each its own with --host N"),
    (NoLaneError, "all lanes are taken or in quarantine; create the pool with more --lanes"),
    (SessionLostError, "the server gave this session up; attach again"),
    (NoMethodError, "the server has no handler for this method; is it 'beluga serve'?"),
    (BadRequestError, "the server refused a field of the request"),
    (BadReplyError, "the server's reply makes no sense; is the pool damaged?"),
    (HandlerError, "the server's handler raised; see its log"),
    (NoSpaceError, "no space: every block that could make room is pinned or being written"),
    (TableFullError, "the block table is full; create the pool with more --max-blocks"),
    (ClassLimitError, "too many different block sizes live in this pool (64)"),
    (NoGrantError, "the session does not hold that grant (any more)"),
    (PinLimitError, "the session has too many blocks pinned; release some"),
    (QuarantineError, "dead writers of this host hold too much space; prove them gone"),
    (
        EpochDamagedError,
        "the line that names the pool's server is damaged; stop all servers, then "
        "'beluga pool check --repair'",
    ),
    (
        SecondHostError,
        "another host has this pool, which is coherent: one host's own memory, one --host number; "
        "to share it, create it with --coherence software",
    ),
    (
        LobbyBusyError,
        "another process of this host is attaching and does not get done; is one stopped?",
    ),
    (QuotaError, "the session's quota is used up; give something back, or call less often"),
    (
        DeviceFaultError,
        "a device of the pool cannot be read or written: is it poisoned, unplugged or truncated?",
    ),
    (
        QueueFullError,
        "the queue is full: the pool holds as many tasks as it may; are workers running?",
    ),
    (
        SessionAliveError,
        "a client that was declared gone is alive: its heartbeat moves; stop it first",
    ),
    (
        RuntimeDirError,
        "the pool's server is of this host, but not in this process's runtime directory: it is "
        "another user's or container's, or this one was emptied; set BELUGA_RUNTIME_DIR to one "
        "directory for all of them, mounted in containers, or --declare-gone if it is dead",
    ),
    (
        OffloadingError,
        "no space yet: the blocks that could be evicted wait for a lower tier; try again",
    ),
    (
        CacheLineError,
        "this CPU may write back more than 64 bytes at once, and so overwrite what other hosts "
        "wrote; here only pools of one host work: create them with --coherence hardware",
    ),
    (
        DrainingError,
        "the pool is being drained for maintenance, so nothing new is stored; 'beluga drain "
        "--undo' ends it",
    ),
)


def status_name(status: int) -> str:
    """Return the name of a status: ok, the error's without \"Error\", or that of an errno."""
    place = -status - FIRST_CODE
    if status >= 0:
        return "ok"
    if 0 <= place < len(CODES):
        return CODES[place][0].__name__.removesuffix("Error")
    return errno.errorcode.get(-status, str(status))


def raise_for_status(code: int, doing: str = "") -> int:
    """Return ``code`` if it is a result, and raise its exception if it is negative.

    The exception is that of :data:`CODES`, or :class:`OSError` for an errno.
    """
    if code >= 0:
        return code
    prefix = f"{doing}: " if doing else ""
    place = -code - FIRST_CODE
    if 0 <= place < len(CODES):
        kind, text = CODES[place]
        raise kind(prefix + text)
    number = min(-code, INT_MAX)  # a broken server's status may have no positive int
    raise OSError(number, prefix + os.strerror(number))
