/* Model of the protocol of synkhronos/_native/sync.h: a controller and its workers, messages, barriers, answers.
 *
 * For each message, every rank passes some barriers; every worker then answers. FAULT=1: one rank fails anywhere, and
 * sets the abort flag. FAULT=2: one rank is killed anywhere. Spinning before parking is modelled as one read, at the
 * end of the spin. A time-out ends a sleep only after a death. Spin therefore reports an invalid end state if a rank
 * sleeps although the awaited counters have arrived or the flag is set, and no other rank will wake it.
 *
 * `run.py` must find an error in each broken variant. BROKEN=1: a parking rank does not read the counters again after
 * it has set its `parked` flag. 2: it does not read the abort flag again. 3: a posting rank reads which ranks are
 * parked before it writes its counter. 4: the kernel puts a rank to sleep that was just woken. 5: the abort flag is
 * cleared before all workers have answered. 6: no rank detects a killed rank. */
#ifndef BROKEN
#define BROKEN 0
#endif
#define CONTROLLER 0

mtype = { SENT, ANSWERED, ARRIVED }

byte sent, answered[N], arrived[N];
bool parked[N], asleep[N]; /* `parked`: as other ranks see it; `asleep`: in the kernel */
byte wakes[N];
bool aborted, faulty;
byte failed;               /* the message at which a rank failed */
bool dead[N], somebody_died;

#define is_behind(counter, rank, value) \
    (counter == SENT && sent < value || counter == ANSWERED && rank != CONTROLLER && answered[rank] < value \
     || counter == ARRIVED && arrived[rank] < value)
#define has_lost_a_peer (BROKEN != 6 && (me == CONTROLLER && somebody_died || dead[CONTROLLER]))

/* The rank may be killed here. */
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

/* Reads the counters one by one, as sync_reached does. */
inline look(counter, value)
{
    do
    :: atomic { peer < N && !is_behind(counter, peer, value) -> peer++ }
    :: atomic { peer < N && is_behind(counter, peer, value) -> reached = false; peer = 0; break }
    :: atomic { peer == N -> reached = true; peer = 0; break }
    od
}

inline wake_others(counter)
{
    do
    :: atomic { peer < N && (peer == me || counter == ANSWERED && peer != CONTROLLER || !parked[peer]) -> peer++ }
    :: atomic { peer < N && peer != me && !(counter == ANSWERED && peer != CONTROLLER) && parked[peer] ->
                wakes[peer]++ };
        may_die();
        atomic { asleep[peer] = false; peer++ }
    :: atomic { peer == N -> peer = 0; break }
    od
}

inline write(counter, value)
{
    may_die();
    atomic {
        if
        :: counter == SENT -> sent = value
        :: counter == ANSWERED -> answered[me] = value
        :: counter == ARRIVED -> arrived[me] = value
        fi
    };
    may_die()
}

inline post(counter, value)
{
#if BROKEN == 3
    wake_others(counter);
    write(counter, value)
#else
    write(counter, value);
    look(counter, value);
    if
    :: reached -> wake_others(counter)
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
    :: atomic { wakes[me] == seen || BROKEN == 4 -> asleep[me] = true };
        if
        :: !asleep[me]
        :: atomic { somebody_died -> asleep[me] = false }
        fi
    :: atomic { wakes[me] != seen && BROKEN != 4 -> skip }
    fi
}

inline park(counter, value)
{
    seen = wakes[me];
    parked[me] = true;
    may_die();
    reached = false;
#if BROKEN != 1
    look(counter, value);
#endif
    if
    :: reached
    :: atomic { !reached && counter == ARRIVED && aborted && BROKEN != 2 -> skip }
    :: atomic { !reached && !(counter == ARRIVED && aborted && BROKEN != 2) -> skip }; fall_asleep()
    fi;
    atomic { parked[me] = false; seen = 0 }
}

/* Ends with `reached`, or without it if the abort flag is set or an awaited peer is dead. */
inline wait(counter, value)
{
    do
    :: look(counter, value);
        if
        :: reached -> break
        :: atomic { !reached && counter == ARRIVED && aborted -> assert(failed == number || somebody_died); break }
        :: atomic { !reached && !(counter == ARRIVED && aborted) && has_lost_a_peer -> break }
        :: atomic { !reached && !(counter == ARRIVED && aborted) && !has_lost_a_peer -> skip }; park(counter, value)
        fi
    od
}

/* The work of a rank for one message. */
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
    :: me != CONTROLLER -> goto serve
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
    /* A worker is dead: release the others, and end the controller when they have answered. */
    abort();
    do
    :: atomic { peer < N && (peer == CONTROLLER || answered[peer] == number || dead[peer]) -> peer++ }
    :: atomic { peer < N && !(peer == CONTROLLER || answered[peer] == number || dead[peer]) -> peer = 0 };
        park(ANSWERED, number)
    :: peer == N -> break
    od;
    dead[CONTROLLER] = true;
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
        :: dead[CONTROLLER] -> break
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
