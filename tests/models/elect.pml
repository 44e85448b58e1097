/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Models the election of an epoch's owner: Disk Paxos with a line for each host, which only that
 * host writes (rpc/elect.c). A written line waits in its host's buffer until a fence or until it
 * drains. A candidate may die before any step: it goes no further, and such runs are searched, too.
 *
 * Properties:
 *   one_owner      (assert) no two owners are ever decided, even if a candidate is slow or dead
 *   survivor_wins  (assert, SURVIVOR) a candidate whose rivals have all died wherever they were
 *                  decides with its next ballot: a dead candidate blocks no other
 *
 * Seeded bugs: NO_FENCE (the own line may be in the buffer while the others are read), NO_HIGHER (a
 * greater ballot does not disturb), NO_ADOPT (a candidate does not adopt an owner that another
 * accepted); with SURVIVOR: NO_GREATER (a ballot is not begun above those that were seen).
 */
#define HOSTS 3
#ifndef BALLOTS
#define BALLOTS 1               /* ballots that a host may begin */
#endif

typedef Line {
    byte ballot;
    byte accepted;
    byte owner                  /* host + 1; 0: none */
};

Line line[HOSTS];               /* in memory */
Line buffer[HOSTS];
bool buffered[HOSTS];
byte decided;                   /* owner, or 0 */
byte ended;

inline drain(i)
{
    line[i].ballot = buffer[i].ballot;
    line[i].accepted = buffer[i].accepted;
    line[i].owner = buffer[i].owner;
    buffered[i] = false
}

inline fence(i) { atomic { if :: buffered[i] -> drain(i) :: else fi } }

/* Streams to one line arrive in order. */
inline write(i)
{
    fence(i);
    atomic {
        buffer[i].ballot = ballot;
        buffer[i].accepted = accepted;
        buffer[i].owner = owner;
        buffered[i] = true
    }
#ifndef NO_FENCE
    fence(i)
#endif
}

/* Read line by line: other hosts write between two reads. */
inline read_all()
{
    d_step { greatest = 0; accepted_in = 0; accepted_owner = 0; other = 0 }
    do
    :: other < HOSTS ->
        d_step {
            if :: line[other].ballot > greatest -> greatest = line[other].ballot :: else fi;
            if
            :: line[other].accepted > accepted_in ->
                accepted_in = line[other].accepted;
                accepted_owner = line[other].owner
            :: else
            fi;
            other++
        }
    :: else -> break
    od
}

inline undisturbed()
{
#ifdef NO_HIGHER
    skip
#else
    if :: greatest > ballot -> goto again :: else fi
#endif
}

inline may_die()
{
#ifdef SURVIVOR
    if :: self != 0 -> goto done :: skip fi
#else
    skip
#endif
}

proctype Candidate(byte self)
{
    byte ballot, accepted, owner, other, begun, greatest, accepted_in, accepted_owner;
#ifdef SURVIVOR
    if :: self == 0 -> ended == HOSTS - 1 :: else fi;
#endif
again:
    if :: begun == BALLOTS -> goto done :: else -> begun++ fi;
    read_all();
#ifdef NO_GREATER
    ballot = begun * HOSTS + self;
#else
    ballot = (greatest / HOSTS + 1) * HOSTS + self;
#endif
    write(self);
    may_die();
    read_all();
    undisturbed();
#ifdef NO_ADOPT
    owner = self + 1;
#else
    owner = (accepted_in > 0 -> accepted_owner : self + 1);
#endif
    accepted = ballot;
    write(self);
    may_die();
    read_all();
    undisturbed();
    atomic { assert(decided == 0 || decided == owner); decided = owner };    /* one_owner */
#ifdef SURVIVOR
    if :: self == 0 -> goto won :: else fi;
#endif
done:
#ifdef SURVIVOR
    assert(self != 0);                                                      /* survivor_wins */
won:
#endif
    ended++
}

proctype Buffers()
{
end:
    do
    :: atomic { buffered[0] -> drain(0) }
    :: atomic { buffered[1] -> drain(1) }
    :: atomic { buffered[2] -> drain(2) }
    od
}

init { atomic { run Buffers(); run Candidate(0); run Candidate(1); run Candidate(2) } }
