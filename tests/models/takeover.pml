/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Models a takeover from a server that only seemed dead. Stores wait in a buffer of their server
 * until it fences or the buffer drains. The old server opens an extent and grants from it. The new
 * server publishes TAKING, fences, reads the open extents once, publishes SERVING and grants free
 * ones. Each server writes before it reads.
 *
 * Properties, asserted:
 *   space_once       no extent is granted by both servers
 *   serving_last     a client never finds a server SERVING that has not read its predecessor's half
 *
 * Seeded bugs: NO_FENCE_OLD, NO_FENCE_NEW (a fence left out), READ_FIRST (the half is read before
 * TAKING is out), NO_LOOK (the old server does not ask for the epoch), SERVE_FIRST (SERVING before
 * the half is read).
 */
#define EXTENTS 2
#define OLD 1
#define NEW 2

mtype = { NONE, TAKING, SERVING };

mtype state_new = NONE;         /* in memory: the epoch line of the new server's half */
mtype buffer_new = NONE;        /* in its buffer; NONE: nothing */
bool open[EXTENTS];             /* in memory: marks in the old server's half */
bool buffer_open[EXTENTS];
byte granted[EXTENTS];          /* the server that granted it */
bool has_read;

#define grant(extent, who) \
    atomic { assert(granted[extent] == 0 || granted[extent] == who);    /* space_once */ \
             granted[extent] = who }

/* A buffer may drain at any time. */
proctype Buffers()
{
    byte i;
end:
    do
    :: atomic { buffer_new != NONE -> state_new = buffer_new; buffer_new = NONE }
    :: atomic { buffer_open[0] -> open[0] = true; buffer_open[0] = false }
    :: atomic { buffer_open[1] -> open[1] = true; buffer_open[1] = false }
    od
}

proctype OldServer()
{
    byte extent = 0;
    do
    :: extent < EXTENTS ->
        buffer_open[extent] = true;
#ifndef NO_FENCE_OLD
        atomic { if :: buffer_open[extent] -> open[extent] = true; buffer_open[extent] = false
                    :: else fi };
#endif
#ifndef NO_LOOK
        if
        :: state_new != NONE -> break       /* deposed: it grants nothing more */
        :: else
        fi;
#endif
        grant(extent, OLD);
        extent++
    :: break                                /* it dies, or stops forever */
    od
}

proctype NewServer()
{
    bool taken[EXTENTS];
    byte i;
#ifdef READ_FIRST
    d_step { taken[0] = open[0]; taken[1] = open[1]; has_read = true };
#endif
#ifdef SERVE_FIRST
    buffer_new = SERVING;
#else
    buffer_new = TAKING;
#endif
#ifndef NO_FENCE_NEW
    atomic { if :: buffer_new != NONE -> state_new = buffer_new; buffer_new = NONE :: else fi };
#endif
#ifndef READ_FIRST
    taken[0] = open[0];
    taken[1] = open[1];
    has_read = true;
#endif
    buffer_new = SERVING;
    atomic { if :: buffer_new != NONE -> state_new = buffer_new; buffer_new = NONE :: else fi };
    do
    :: i < EXTENTS ->
        if
        :: !taken[i] -> grant(i, NEW)
        :: else                             /* in quarantine */
        fi;
        i++
    :: else -> break
    od
}

proctype Reader()
{
    state_new == SERVING;
    assert(has_read)                                            /* serving_last */
}

init { atomic { run Buffers(); run OldServer(); run NewServer(); run Reader() } }
