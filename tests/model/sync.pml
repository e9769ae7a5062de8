/* The protocol of synkhronos/_native/sync.h: a master and its workers, messages, barriers, answers.
 *
 * For each message every rank meets the others at some barriers, and answers it. FAULT=1: one rank fails, anywhere, and
 * raises the abort flag; FAULT=2: one is killed. To look for a while before parking is to look once, at the end of that
 * while. A time-out is a way out after a death, and after nothing else: a rank that sleeps though what it waits for has
 * come, or the flag is up, and that nobody will wake, is what spin reports as an invalid end state.
 *
 * BROKEN=1: who parks does not look again at the words after having said so. 2: nor at the abort flag. 3: who posts looks
 * who is parked before it writes its word. 4: the kernel puts to sleep who was called just before. 5: the abort flag is
 * lowered before all have answered. 6: who was killed is watched by nobody. `run.py` has to find each.
 */
#ifndef BROKEN
#define BROKEN 0
#endif
#define MASTER 0

mtype = { SENT, ANSWERED, ARRIVED }

byte sent, answered[N], arrived[N];
bool parked[N], asleep[N]; /* as it says; in the kernel */
byte calls[N];
bool aborted, faulty;
byte failed;               /* the message in which a rank has failed */
bool dead[N], somebody_died;

#define is_behind(board, rank, value) \
    (board == SENT && sent < value || board == ANSWERED && rank != MASTER && answered[rank] < value \
     || board == ARRIVED && arrived[rank] < value)
#define has_lost_a_peer (BROKEN != 6 && (me == MASTER && somebody_died || dead[MASTER]))

/* Be killed here, or not. */
#if FAULT == 2
inline may_die()
{
    if
    :: atomic { !faulty -> faulty = true; dead[me] = true; somebody_died = true; goto over }
    :: true
    fi
}
#else
#define may_die() skip
#endif

/* One word after the other, as words_reached does. */
inline look(board, value)
{
    do
    :: atomic { peer < N && !is_behind(board, peer, value) -> peer++ }
    :: atomic { peer < N && is_behind(board, peer, value) -> reached = false; peer = 0; break }
    :: atomic { peer == N -> reached = true; peer = 0; break }
    od
}

inline wake_others(board)
{
    do
    :: atomic { peer < N && (peer == me || board == ANSWERED && peer != MASTER || !parked[peer]) -> peer++ }
    :: atomic { peer < N && peer != me && !(board == ANSWERED && peer != MASTER) && parked[peer] -> calls[peer]++ };
        may_die();
        atomic { asleep[peer] = false; peer++ }
    :: atomic { peer == N -> peer = 0; break }
    od
}

inline write(board, value)
{
    may_die();
    atomic {
        if
        :: board == SENT -> sent = value
        :: board == ANSWERED -> answered[me] = value
        :: board == ARRIVED -> arrived[me] = value
        fi
    };
    may_die()
}

inline post(board, value)
{
#if BROKEN == 3
    wake_others(board);
    write(board, value)
#else
    write(board, value);
    look(board, value);
    if
    :: reached -> wake_others(board)
    :: else
    fi
#endif
}

inline abort()
{
    aborted = true;
    wake_others(ARRIVED)
}

inline fall_asleep()
{
    if
    :: atomic { calls[me] == seen || BROKEN == 4 -> asleep[me] = true };
        if
        :: !asleep[me]
        :: atomic { somebody_died -> asleep[me] = false }
        fi
    :: atomic { calls[me] != seen && BROKEN != 4 -> skip }
    fi
}

inline park(board, value)
{
    seen = calls[me];
    parked[me] = true;
    may_die();
    reached = false;
#if BROKEN != 1
    look(board, value);
#endif
    if
    :: reached
    :: atomic { !reached && board == ARRIVED && aborted && BROKEN != 2 -> skip }
    :: atomic { !reached && !(board == ARRIVED && aborted && BROKEN != 2) -> skip }; fall_asleep()
    fi;
    atomic { parked[me] = false; seen = 0 }
}

/* Leaves with `reached`, or without it: the flag is up, or a peer is dead that this rank watches. */
inline wait(board, value)
{
    do
    :: look(board, value);
        if
        :: reached -> break
        :: atomic { !reached && board == ARRIVED && aborted -> assert(failed == number || somebody_died); break }
        :: atomic { !reached && !(board == ARRIVED && aborted) && has_lost_a_peer -> break }
        :: atomic { !reached && !(board == ARRIVED && aborted) && !has_lost_a_peer -> skip }; park(board, value)
        fi
    od
}

/* What a rank does for a message. */
inline execute()
{
    step = 4 * number;
    do
    :: step < 4 * number + BARRIERS ->
#if FAULT == 1
        if
        :: atomic { !faulty -> faulty = true; failed = number }; abort(); break
        :: true
        fi;
#endif
        step++;
        post(ARRIVED, step);
        wait(ARRIVED, step);
        if
        :: reached
        :: else -> break
        fi
    :: else -> break
    od;
    step = 0
}

proctype Rank(byte me)
{
    byte number, step, peer, seen;
    bool reached;

    if
    :: me != MASTER -> goto serve
    :: else
    fi;
    do
    :: number < MESSAGES ->
        number++;
        post(SENT, number);
        execute();
#if BROKEN == 5
        aborted = false;
#endif
        wait(ANSWERED, number);
        if
        :: reached -> aborted = false
        :: else -> break
        fi
    :: else -> number++; post(SENT, number); goto over
    od;
    /* a worker is dead: the others are released, and when they have answered the master ends, too */
    abort();
    do
    :: atomic { peer < N && (peer == MASTER || answered[peer] == number || dead[peer]) -> peer++ }
    :: atomic { peer < N && !(peer == MASTER || answered[peer] == number || dead[peer]) -> peer = 0 }; park(ANSWERED, number)
    :: peer == N -> break
    od;
    dead[MASTER] = true;
    goto over;

serve:
    do
    :: wait(SENT, number + 1);
        if
        :: !reached || number == MESSAGES -> break
        :: else -> number++
        fi;
        execute();
        if
        :: dead[MASTER] -> break
        :: else -> post(ANSWERED, number)
        fi
    od;
over:
    skip
}

init
{
    atomic {
        byte rank;
        for (rank : 0 .. N - 1) {
            run Rank(rank)
        }
    }
}
