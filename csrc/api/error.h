/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The errors that errno lacks. Functions that Python may call return 0 or a count, or a negative
 * errno or bl_error; they never print, exit or touch Python. The Python half is beluga/errors.py.
 */
#ifndef BL_API_ERROR_H
#define BL_API_ERROR_H

/* Errors that errno has no number for; they are returned negative. errors.py gives each its
 * exception. */
enum bl_error {
    BL_ERROR_FORKED = 1001,     /* the session belongs to the parent process */
    BL_ERROR_NO_SERVER,         /* this pool has no server */
    BL_ERROR_TIMEOUT,           /* the server did not answer in time */
    BL_ERROR_DEPOSED,           /* another server has taken the pool over */
    BL_ERROR_SERVER_ALIVE,      /* the pool's server lives, or is not proven gone */
    BL_ERROR_HOST_CLASH,        /* another machine uses this host number */
    BL_ERROR_NO_LANE,           /* every lane is taken or in quarantine */
    BL_ERROR_SESSION_LOST,      /* the server ended this session */
    BL_ERROR_NO_METHOD,         /* the server has no handler for the method */
    BL_ERROR_BAD_REQUEST,       /* a field of the request is out of range */
    BL_ERROR_BAD_REPLY,         /* a field of the reply is out of range */
    BL_ERROR_HANDLER,           /* a Python handler raised */
    BL_ERROR_NO_SPACE,          /* there is no room: nothing more can be evicted */
    BL_ERROR_TABLE_FULL,        /* max_blocks blocks, none can be evicted */
    BL_ERROR_TOO_LARGE,         /* the block is larger than the whole pool */
    BL_ERROR_NO_GRANT,          /* the session does not (or no longer) hold that grant */
    BL_ERROR_PIN_LIMIT,         /* the session has too many blocks pinned */
    BL_ERROR_QUARANTINE,        /* this host's suspect writers hold too much space */
    BL_ERROR_EPOCH_DAMAGED,     /* a line that identifies the server is damaged */
    BL_ERROR_SECOND_HOST,       /* a device with hardware coherence belongs to another host */
    BL_ERROR_LOBBY_BUSY,        /* another process of this host is attaching and does not finish */
    BL_ERROR_QUOTA,             /* the session exceeds its quota */
    BL_ERROR_DEVICE_FAULT,      /* a device failed: poisoned, unplugged, truncated */
    BL_ERROR_QUEUE_FULL,        /* too many tasks, or too much space for them */
    BL_ERROR_SESSION_ALIVE,     /* a session that was declared gone is alive */
    BL_ERROR_RUNTIME_DIR,       /* the server of this host uses another runtime directory */
    BL_ERROR_OFFLOADING,        /* what could be evicted must be offered to a lower tier first */
    BL_ERROR_CACHE_LINE,        /* this CPU's cache lines are larger than the pool's lines */
    BL_ERROR_DRAINING,          /* the pool is being drained: it accepts no new blocks */
    BL_ERROR_REMOVALS_FULL,     /* too many removals wait for lower tiers */
    BL_ERROR_NO_ROOM,           /* a full file system has no memory for a page of a sparse pool */
    BL_ERROR_CLOSED             /* the session is closed */
};

#endif
