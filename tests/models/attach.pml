/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The lobby: two processes of one host ask for the only lane over the host's one line, in turns
 * under a lock of their own kernel. Either may die at any step; its lock is then free, and its
 * request still stands.
 *
 * Properties, asserted:
 *   lane_one_holder  no lane has two sessions that can write to it
 *   line_one_writer  no two processes write the host's line at a time
 *   lane_returns     (at the end) a lane whose session is gone is free again
 *
 * Seeded bugs: NO_NONCE (a client does not check whether a reply answers its own request), NO_LOCK
 * (the processes take no turns), NO_PROOF (the server gives a lane to another process after a while
 * of silence).
 */
#define CLIENTS 2

typedef Request { byte sequence; byte nonce };
typedef Reply { byte sequence; byte nonce; bool given };

Request request;
Reply reply;
byte lock;                      /* the process that holds the host's lock, or 0 */
byte writing;                   /* processes in the middle of the line */
byte lane;                      /* nonce of the lane's session, as the server knows; 0: free */
byte holding;                   /* sessions that can write to the lane */
bool gone[CLIENTS + 1];

proctype Client(byte self)
{
    byte sequence;
    bool mine;
#ifndef NO_LOCK
    atomic { lock == 0 -> lock = self };
#endif
    sequence = request.sequence + 1;
    atomic { writing++; assert(writing == 1) };                 /* line_one_writer */
    if
    :: atomic { request.nonce = self; request.sequence = sequence; writing-- }
    :: atomic { writing--; goto dead }
    fi;
    if
#ifdef NO_NONCE
    :: reply.given && reply.sequence >= sequence - 1 -> mine = true
#else
    :: reply.sequence == sequence && reply.nonce == self -> mine = reply.given
#endif
    :: goto dead                /* also: the wait is over */
    fi;
    if
    :: mine -> atomic { holding++; assert(holding == 1) }       /* lane_one_holder */
    :: else
    fi;
#ifndef NO_LOCK
    lock = 0;
#endif
    if
    :: mine -> atomic { holding--; gone[self] = true }          /* it dies, or closes */
    :: else -> gone[self] = true
    fi;
    goto over;
dead:
    atomic { gone[self] = true; if :: lock == self -> lock = 0 :: else fi };
over:
    skip
}

proctype Server()
{
    byte seen;
end:
    do
    :: atomic { request.sequence != seen ->
            seen = request.sequence;
            reply.given = (lane == 0 || lane == request.nonce);
            if :: reply.given -> lane = request.nonce :: else fi;
            reply.nonce = request.nonce;
            reply.sequence = seen }
#ifdef NO_PROOF
    :: lane != 0 -> lane = 0
#else
    :: atomic { lane != 0 && gone[lane] -> lane = 0 }
#endif
    :: timeout ->
        assert(lane == 0 || !gone[lane]);                       /* lane_returns */
        break
    od
}

init { atomic { run Server(); run Client(1); run Client(2) } }
