/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Who may try to become server: Lamport's one-bit mutual exclusion over candidate lines, one writer
 * each. A store waits in its host's buffer until a fence or until it drains.
 *
 * Properties:
 *   one_candidate   (assert) no two hosts are inside at a time
 *   somebody_wins   (ltl) while hosts want to, one is inside again and again; the scheduler is fair
 *
 * Seeded bugs: NO_FENCE (the own line need not be out before the others' are read), NO_HIGHER (hosts
 * of higher numbers are not waited for), NO_YIELD (a host does not step back for a lower one, which
 * leaves both waiting: somebody_wins fails).
 */
#define HOSTS 3

bool wants[HOSTS];              /* in memory */
bool buffered[HOSTS];           /* the store of wants = true that is on its way */
byte inside;

#define fence(i) \
    atomic { if :: buffered[i] -> wants[i] = true; buffered[i] = false :: else fi }

proctype Buffers()
{
end:
    do
    :: atomic { buffered[0] -> wants[0] = true; buffered[0] = false }
    :: atomic { buffered[1] -> wants[1] = true; buffered[1] = false }
    :: atomic { buffered[2] -> wants[2] = true; buffered[2] = false }
    od
}

proctype Host(byte self)
{
    byte other;
again:
    buffered[self] = true;
#ifndef NO_FENCE
    fence(self);
#endif
    other = 0;
    do
    :: other < self ->
        if
        :: wants[other] ->
#ifndef NO_YIELD
            fence(self);
            wants[self] = false;
            !wants[other];
            goto again
#else
            !wants[other]
#endif
        :: else
        fi;
        other++
    :: else -> break
    od;
#ifndef NO_HIGHER
    other = self + 1;
    do
    :: other < HOSTS -> !wants[other]; other++
    :: else -> break
    od;
#endif
    atomic { inside++; assert(inside == 1) };                   /* one_candidate */
    inside--;
    fence(self);
    wants[self] = false;
    goto again
}

init { atomic { run Buffers(); run Host(0); run Host(1); run Host(2) } }

ltl somebody_wins { [] <> (inside > 0) }
