/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Models a slot of one lane: a request line arrives in two pieces, and two sessions have the lane
 * one after the other. The first session may die at any step; its pieces that are on their way may
 * still arrive, even while the second session writes. The server looks at any time.
 *
 * Properties, asserted:
 *   request_whole   a request that is believed is the one that its session wrote, no mix
 *   request_own     and was written by the session that has the lane
 *   request_once    and each is done once
 *   reply_own       a reply that a client takes answers its own request
 *
 * Seeded bugs: NO_ENDS (the server compares one sequence, not both), NO_NONCE (the check is not
 * keyed with the session), NO_SEQUENCE (a flag instead of a number).
 */
#define SESSIONS 2
#define REQUESTS 2

typedef Piece { byte sequence; byte session; byte value };
typedef Line { Piece head; Piece tail };

Line request, reply;
byte holder = 1;                /* session that has the lane, as the server knows */
bool gone[SESSIONS + 1];        /* proven: nothing of it is on its way */
byte done[(SESSIONS + 1) * (REQUESTS + 1)];

#define value_of(session, sequence) ((session) * 10 + (sequence))

#ifdef NO_NONCE
#define keyed(line, who) true
#else
#define keyed(line, who) (line.head.session == (who) && line.tail.session == (who))
#endif
#ifdef NO_ENDS
#define ends(line, number) (line.head.sequence == (number))
#elif defined(NO_SEQUENCE)
#define ends(line, number) (line.head.sequence != 0 && line.tail.sequence != 0)
#else
#define ends(line, number) (line.head.sequence == (number) && line.tail.sequence == (number))
#endif
#define whole(line, number, who) (ends(line, number) && keyed(line, who))

#define put(piece, number, who) \
    atomic { piece.sequence = number; piece.session = who; piece.value = value_of(who, number) }

proctype Client(byte self)
{
    byte next = 1;
    holder == self;
    do
    :: next <= REQUESTS ->
        if /* the pieces of a line arrive in any order */
        :: put(request.head, next, self); put(request.tail, next, self)
        :: put(request.tail, next, self); put(request.head, next, self)
        :: goto dead
        :: put(request.head, next, self); goto dead
        fi;
        if
        :: whole(reply, next, self) ->
            assert(reply.head.value == value_of(self, next));   /* reply_own */
            next++
        :: goto dead
        fi
    :: else -> break
    od;
dead:
    gone[self] = true
}

proctype Server()
{
    byte expected = 1, seen;
    Line copy;
end:
    do
    :: atomic { whole(request, expected, holder) ->
            copy.head.value = request.head.value; copy.tail.value = request.tail.value;
            copy.head.session = request.head.session } ->
        assert(copy.head.value == copy.tail.value);             /* request_whole */
        assert(copy.head.session == holder);                    /* request_own */
        seen = holder * (REQUESTS + 1) + copy.head.value % 10;
        assert(done[seen] == 0);                                /* request_once */
        done[seen] = 1;
        put(reply.head, expected, holder);
        put(reply.tail, expected, holder);
        expected++
    :: atomic { gone[holder] && holder < SESSIONS -> holder++; expected = 1 }
    od
}

init { atomic { run Server(); run Client(1); run Client(2) } }
