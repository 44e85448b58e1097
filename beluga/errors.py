# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The exceptions of Beluga, and the conversion of C return codes to them.

The tree has the meaning of each class; its docstring is the remedy (docs/reference/errors.md).

BelugaError
├── BadValueError                 a host number or a time is out of range; a ValueError, too
├── BadTypeError                  a value has a wrong type; a TypeError, too
├── GreenThreadsError             gevent or eventlet made greenlets of the threads
├── SettingsError                 beluga.toml cannot be read, or has an invalid setting
├── CoreMissingError              the C core is not built, or cannot be loaded
├── InstructionError              BELUGA_ISA or BELUGA_FLUSH names a feature that this CPU lacks
├── PoolError                     the devices, or their contents
│   ├── DeviceSpecError           PATH@OFFSET+SIZE cannot be read, or is not in 2 MiB steps
│   ├── DeviceMissingError        no such device, or not a device
│   ├── DevicePermissionError
│   ├── DeviceBusyError           given to another driver (kmem)
│   ├── DeviceForeignError        no Beluga superblock on it
│   ├── DeviceMismatchError       of another pool, listed twice, of another size, or incomplete
│   ├── DeviceTruncatedError      shorter than recorded in its superblock
│   ├── SuperblockDamagedError
│   ├── FormatError               formatted by another version of Beluga
│   ├── PoolExistsError           creating over a pool without force
│   ├── DeviceFaultError          a device failed during a call: poisoned, unplugged, truncated
│   ├── NoRoomError               the filesystem, memory or a cgroup has no room
│   ├── NoDefaultPoolError        nothing is mounted
│   ├── CacheLineError            this CPU's cache lines are larger than a pool's lines
│   └── VerifyError               the memory lacks a required property, or cannot be tested
├── RpcError                      calls to the server
│   ├── NoServerError             no process serves the pool
│   ├── CallTimeoutError          no reply in time
│   │   └── LobbyBusyError        another process of this host is attaching and does not finish
│   ├── ServerAliveError          a second server is rejected
│   ├── DeposedError              this server has been taken over
│   ├── HostClashError            another machine uses this host number
│   ├── SecondHostError           the pool has hardware coherence and belongs to another host
│   ├── RuntimeDirError           this host's server has another runtime directory
│   │   └── BootIdError           a sandbox hides the id of this host's boot
│   ├── NoLaneError               every lane is taken or in quarantine
│   ├── SessionLostError          the server ended this session
│   ├── SessionAliveError         a session that was declared gone is alive
│   ├── ForkedSessionError        the session belongs to the parent process
│   ├── EpochDamagedError         the line that names the pool's server cannot be read
│   ├── NoMethodError             the server has no such method
│   ├── BadRequestError
│   ├── BadReplyError
│   ├── QuotaError                the session exceeds its quota
│   ├── NoTraceError              there is no trace of a server
│   └── HandlerError              the server's handler raised
├── CacheError                    blocks
│   ├── NoSpaceError              nothing could be evicted for the block
│   ├── TableFullError
│   ├── TooLargeError             even an empty pool would have no room for such a block
│   ├── NoGrantError              the session does not hold that grant (any more)
│   ├── PinLimitError
│   ├── OffloadingError           the evictable blocks wait for a lower tier; try again
│   ├── RemovalsFullError         too many removals, or lower tiers, are pending
│   ├── DrainingError             an operator drains the pool; nothing new is stored
│   ├── QuarantineError           dead writers of this host hold too much space
│   └── LayoutError               buffers do not fit the block
├── TransferError                 a copy engine failed
│   ├── EngineUnavailableError    this machine lacks what the engine needs
│   ├── ChecksumError             the bytes read differ from the bytes written
│   ├── TransferTimeoutError      a transfer has not ended in time; it continues
│   ├── TransferCancelledError    a transfer was cancelled before its end
│   └── UnsettledError            a copy may still write; its space stays allocated
├── TierError                     a tier below the pool cannot be opened or used
├── ConnectorError                an engine's settings, or its KV layout, cannot be served
├── RouterError                   sending requests to workers
│   ├── NoWorkersError            none is registered for the model, or none is healthy
│   ├── AllWorkersBusyError       each is full; wait, or return 503
│   │   └── WorkersOverloadedError  all eligible workers are over the busy thresholds
│   ├── ListenError              the gateway cannot listen on an address
│   ├── ObjectiveError            no worker could answer in time; return 429
│   ├── EventError                a KV event that cannot be applied
│   ├── QueueError                the prefill queue is unreachable, or rejected a task
│   │   ├── QueueFullError        it has the maximum number of tasks
│   │   └── TaskError             this task is not valid, or too large for the queue
│   └── WorkerError               an engine failed a request: down, stalled, disconnected
├── AdminError                    the admin endpoint cannot bind its address, or rejected a request
├── SimulateError                 a simulation has invalid options
└── ReplayError                   replaying a trace: a process of it failed
    └── TraceError                the trace cannot be read
"""

from __future__ import annotations

import errno
import os


class BelugaError(Exception):
    """The base class; its text is one line with the problem and its remedy."""

    of_request = False
    """Whether the failure concerns this request only: the peer still serves other requests. It must
    not count against shared resources, such as a queue, a store or a session.
    """


class BadValueError(BelugaError, ValueError):
    """Give a number in the range of the message."""

    of_request = True


class BadTypeError(BelugaError, TypeError):
    """Give a value of the type in the message."""


class GreenThreadsError(BelugaError):
    """Run 'beluga serve' as a process of its own, or patch with thread=False."""


class SettingsError(BelugaError):
    """Correct the line of beluga.toml in the message; 'beluga config' shows all settings."""


class CoreMissingError(BelugaError, ImportError):
    """Build the C core: run 'pip install .' in the checkout, or scripts/dev/setup-env."""


class InstructionError(BelugaError):
    """Remove the variable, or set it to a value in the message; unset always works."""


class PoolError(BelugaError):
    """Follow the message; 'beluga pool check' and 'beluga doctor' show more."""


class DeviceSpecError(PoolError):
    """Write PATH or PATH@OFFSET+SIZE, in steps of 2 MiB; 'beluga doctor' lists devices."""


class DeviceMissingError(PoolError):
    """Check the path; after a reboot files in /dev/shm are gone: mount with --create."""


class DevicePermissionError(PoolError):
    """Give this user read and write access to the path: setfacl, chmod, or its group."""


class DeviceBusyError(PoolError):
    """Stop the processes that use the device, or detach its driver with daxctl."""


class DeviceForeignError(PoolError):
    """Check the path; overwrite a device without needed data: beluga pool create --force."""


class DeviceMismatchError(PoolError):
    """List all devices of one pool, each once; 'beluga pool info' shows the pool of a device."""


class DeviceTruncatedError(PoolError):
    """Give the device its old size again, or make a new pool: beluga pool create --force."""


class SuperblockDamagedError(PoolError):
    """Make a new pool (beluga pool create --force), and find the program that wrote there."""


class FormatError(PoolError):
    """Run one version of Beluga on all hosts, or make a new pool: beluga pool create --force."""


class PoolExistsError(PoolError):
    """Open the existing pool, or overwrite it with a new one: beluga pool create --force."""


class DeviceFaultError(PoolError):
    """Check the kernel's log and 'cxl list', and replace the device."""


class NoRoomError(PoolError):
    """Use a smaller --size or another directory; in a container, raise --shm-size."""


class NoDefaultPoolError(PoolError):
    """Name the pool with --pool PATH, or mount one: beluga mount --create."""


class CacheLineError(PoolError):
    """Create the pool for this host alone, with --coherence hardware."""


class VerifyError(PoolError):
    """Do not share this memory between hosts until 'beluga verify' passes."""


class RpcError(BelugaError):
    """Make a new client, cache or server object: the old one has ended."""


class NoServerError(RpcError):
    """Start 'beluga serve --detach' on the pool; 'beluga ping' shows whether it answers."""


class CallTimeoutError(RpcError):
    """Run 'beluga trace': it shows whether the server serves, was killed, or hangs."""


class LobbyBusyError(CallTimeoutError):
    """Find the process that is attaching and does not finish, and resume or kill it."""


class ServerAliveError(RpcError):
    """Use the running server, stop it first, or start this one with --standby."""


class DeposedError(RpcError):
    """No action is needed: clients follow the new server; start this one with --standby."""


class HostClashError(RpcError):
    """Give each machine its own number with --host N."""


class SecondHostError(RpcError):
    """Use the pool on its own host, or recreate it with --coherence software."""


class RuntimeDirError(RpcError):
    """Set BELUGA_RUNTIME_DIR to one directory for all processes of the host."""


class BootIdError(RuntimeDirError):
    """Show /proc/sys/kernel/random/boot_id in this container or sandbox."""


class NoLaneError(RpcError):
    """Stop idle clients, or recreate the pool with more --lanes."""


class SessionLostError(RpcError):
    """Attach again; a process that was stopped for long, or declared gone, loses its session."""


class SessionAliveError(RpcError):
    """Stop the client before you declare it gone: it may still write."""


class ForkedSessionError(RpcError):
    """Open the pool, the client and the engine in the child, after the fork."""


class EpochDamagedError(RpcError):
    """Stop all servers of the pool, then run 'beluga pool check --repair'."""


class NoMethodError(RpcError):
    """Use a server of this version, started by 'beluga serve'."""


class BadRequestError(RpcError):
    """Run one version of Beluga in clients and servers; otherwise report a bug."""

    of_request = True


class BadReplyError(RpcError):
    """Run one version of Beluga in clients and servers; then run 'beluga pool check'."""


class QuotaError(RpcError):
    """Release pins and grants, call less often, or raise the limit with 'beluga quota'."""

    of_request = True


class NoTraceError(RpcError):
    """Run 'beluga trace' on the server's host, with the server's BELUGA_RUNTIME_DIR."""


class HandlerError(RpcError):
    """Read the server's log: it has the traceback of the call."""


class CacheError(BelugaError):
    """Follow the message; 'beluga explain KEY' shows the history of a block."""

    of_request = True


class NoSpaceError(CacheError):
    """Give the pool more memory, or release pins; 'beluga stat' shows which clients hold space."""


class TableFullError(CacheError):
    """Recreate the pool with more --max-blocks, or with the right --block-bytes."""


class TooLargeError(CacheError):
    """Use a larger pool, or smaller blocks: fewer tokens in a block, or a block for each layer."""


class NoGrantError(CacheError):
    """Reserve the space again: the server ended the session or its grant meanwhile."""


class PinLimitError(CacheError):
    """Release pinned blocks when their copies have ended, before you pin others."""


class OffloadingError(CacheError):
    """Try again; if the error persists, use a faster tier or --offload drop."""


class RemovalsFullError(CacheError):
    """Repair the lower tiers ('beluga stat'), or serve once with --forget-tier if one is gone."""


class DrainingError(CacheError):
    """Wait for the end of the maintenance, or end it: beluga drain --undo."""


class QuarantineError(CacheError):
    """When the dead clients cannot write any more, restart the server with --declare-gone."""


class LayoutError(CacheError):
    """Give buffers that fit the block: the message has the required shape, size or type."""


class TransferError(BelugaError):
    """Follow the message; 'beluga doctor' shows whether this host's engines work."""


class EngineUnavailableError(TransferError):
    """Use the engine auto, or install the package in the message."""


class ChecksumError(TransferError):
    """Run 'beluga pool check --payload --repair'; if the error recurs, run 'beluga verify'."""

    of_request = True


class TransferTimeoutError(TransferError):
    """Wait longer for the same transfer; its buffers stay in use until it ends."""


class TransferCancelledError(TransferError):
    """Start the copy again if it is still needed; no part of it was published."""

    of_request = True


class UnsettledError(TransferError):
    """Restart this process: only its end proves that the copy no longer writes."""


class TierError(BelugaError):
    """Follow the message; without the tier, its blocks are misses."""


class ConnectorError(BelugaError):
    """Change the engine's setting in the message; docs/use/vllm.md has the limits."""


class RouterError(BelugaError):
    """Correct the option or the input in the message, and start again."""


class NoWorkersError(RouterError):
    """Add a worker that serves the model, or check why none is healthy: GET /workers."""


class AllWorkersBusyError(RouterError):
    """Send less, wait, or add workers."""


class WorkersOverloadedError(AllWorkersBusyError):
    """Send less, add workers, or raise the busy thresholds."""


class ListenError(RouterError):
    """Give another --host, --port or --admin address, or stop what listens there."""


class ObjectiveError(RouterError):
    """Send less, add workers, or allow more time: raise ttft_objective_s of the policy min-ttft."""

    of_request = True


class EventError(RouterError):
    """Start engine and router with the same block size and compatible versions."""


class QueueError(RouterError):
    """Check that the queue is running, and the address of --prefill-queue."""


class QueueFullError(QueueError):
    """Start prefill workers, or let engines prefill for themselves."""

    of_request = True


class TaskError(QueueError):
    """Follow the message; without the task, the decode engine prefills this prompt."""

    of_request = True


class WorkerError(RouterError):
    """Read the engine's log; the gateway retries on another engine where possible."""


class AdminError(BelugaError):
    """Give --admin a free address, and run the command as a permitted user."""


class SimulateError(BelugaError):
    """Give the option a value that is valid by the message."""


class ReplayError(BelugaError):
    """Read the message of the process that failed; wrong bytes are a bug to report."""


class TraceError(ReplayError):
    """Correct or remove the line in the message, or give the trace's --format."""


# The bl_error numbers of csrc/api/error.h, in its order; a test compares the two.
FIRST_CODE = 1001
INT_MAX = (1 << 31) - 1
CODES: tuple[tuple[type[BelugaError], str], ...] = (
    (ForkedSessionError, "this session belongs to the parent process; attach a new one after fork"),
    (NoServerError, "no server answers on this pool; start one with 'beluga serve'"),
    (
        CallTimeoutError,
        "the server did not answer in time: it was killed, hangs or is starved; see 'beluga "
        "trace', and start 'beluga serve' if it has ended",
    ),
    (DeposedError, "another server has taken this pool over; this one has stopped"),
    (ServerAliveError, "the pool's server is alive, or not proven gone; stop it first"),
    (HostClashError, "another machine uses this host number; give each its own with --host N"),
    (NoLaneError, "all lanes are taken or in quarantine; create the pool with more --lanes"),
    (SessionLostError, "the server ended this session; attach again"),
    (NoMethodError, "the server has no handler for this method; is it 'beluga serve'?"),
    (BadRequestError, "the server refused a field of the request"),
    (BadReplyError, "the server's reply is invalid; is the pool damaged?"),
    (HandlerError, "the server's handler raised; see its log"),
    (NoSpaceError, "no space: every block that could make room is pinned or being written"),
    (TableFullError, "the block table is full; create the pool with more --max-blocks"),
    (TooLargeError, "a block is larger than the space of the pool; use a larger pool"),
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
        "another process of this host is attaching and does not finish; is one stopped?",
    ),
    (QuotaError, "the session's quota is used up; release pins or grants, or call less often"),
    (
        DeviceFaultError,
        "a device of the pool cannot be read or written: is it poisoned, unplugged or truncated?",
    ),
    (
        QueueFullError,
        "the queue is full: the pool has its maximum of tasks; are workers running?",
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
    (
        RemovalsFullError,
        "the pool has its maximum of lower tiers, or of removals that these have not executed; "
        "repair the tier that fails ('beluga stat'), or abandon one that is gone (beluga serve "
        "--forget-tier), then try again",
    ),
    (
        NoRoomError,
        "the file system of a sparse pool is full: no space is left for a page of the pool; free "
        "some there, or create the pool without --sparse",
    ),
    (RpcError, "this client is closed; make a new one"),
)


def is_of_request(error: BaseException | None) -> bool:
    """Return whether an error concerns one request only; see :attr:`BelugaError.of_request`."""
    return isinstance(error, BelugaError) and error.of_request


def status_name(status: int) -> str:
    """Return the name of a status: ok, the error's without \"Error\", or that of an errno."""
    index = -status - FIRST_CODE
    if status >= 0:
        return "ok"
    if 0 <= index < len(CODES):
        return CODES[index][0].__name__.removesuffix("Error")
    return errno.errorcode.get(-status, str(status))


def raise_for_status(code: int, doing: str = "") -> int:
    """Return ``code`` if it is a result, and raise its exception if it is negative.

    The exception is that of :data:`CODES`, or :class:`OSError` for an errno.
    """
    if code >= 0:
        return code
    prefix = f"{doing}: " if doing else ""
    index = -code - FIRST_CODE
    if 0 <= index < len(CODES):
        kind, text = CODES[index]
        raise kind(prefix + text)
    number = min(-code, INT_MAX)  # the negation of a broken server's status may overflow an int
    raise OSError(number, prefix + os.strerror(number))
