/* The refit of weightbus, for Spin. docs/model/check.sh runs it; README.md beside this file says what is in it.

   Configuration (-D):
     NR=2|3        ranks. Rank 0 is engine 0 (staged), rank 1 is engine 1 (in place); rank 2 is a second rank of TWO
     TWO=0|1       the engine that has two ranks, when NR=3
     ALONE=0|1     only this engine exists (2: both)
     DIRECT=1      direct mode: ranks pull from the sender's memory (with ALONE=1)
     NREF          refits in a row, each offered to every living engine
     NF, FLAST     at most NF faults, in refits 1..FLAST
     FAULTS        which faults (a sum of F_...), all by default
     SAME=k        refit k sends the version of refit k-1 again (a retry)
     WITHOUT=R_... one rule taken out

   A step of a process is one turn of its bus thread. Buckets: NB = 2 through one slot, so that bucket 1 needs bucket 0's
   credit. Time: a timer may fire only where something gives it a reason: `late` (send's deadline passes, and from then on
   every deadline, in any order) or a stopped peer. So a wait that no message and no such timer ends is a deadlock. */

#ifndef NR
#define NR 2
#endif
#ifndef TWO
#define TWO 1
#endif
#ifndef ALONE
#define ALONE 2
#endif
#ifndef DIRECT
#define DIRECT 0
#endif
#ifndef NREF
#define NREF 2
#endif
#ifndef NF
#define NF 1
#endif
#ifndef FLAST
#define FLAST 1
#endif
#ifndef SAME
#define SAME 0
#endif
#ifndef WITHOUT
#define WITHOUT 0
#endif
#define NB 2

/* The rules. */
#define R_REFUSE    1   /* a driver that has left the refit refuses COMMIT */
#define R_WORD      2   /* only the driver's report makes an outcome; else UNKNOWN */
#define R_COPY      3   /* a staged copy belongs to the driver, not to the rank's own timer */
#define R_ASK       4   /* a rank with a copy asks its driver, and drops it when the driver has left */
#define R_ABORT     5   /* any outcome but READY(v) is followed by ABORT to all ranks */
#define R_HELD_ALL  6   /* HELD only when every rank has verified */
#define R_HELD_ASK  7   /* whoever finishes HELD asks all ranks first */
#define R_HELD_SAME 8   /* ... and for the same refit */
#define R_BEFORE    9   /* undo goes back to the state before the offer: it never resumes what was DIRTY */
#define R_DEATH    10   /* the death of a rank is told to its driver, also during roll-forward */
#define R_STALL    11   /* only the coordinator's stall timer excludes a peer */
#define R_QUIET    12   /* pull: memory goes back to the caller only when the receiver says that it is quiet */
#define R_PULL_END 13   /* pull: a read that was posted is waited for, whatever happens */
#define R_CREDIT   14   /* bucket k waits for the credit of the bucket that last used its slot */
#define R_CR_REFIT 15   /* credits of another refit are dropped */
#define R_DRAINED  16   /* a slot is used again only after DRAINED, else the lane gets new memory */
#define R_ROLL     17   /* staged: after COMMIT the driver rolls forward, whatever becomes of the coordinator */
#define R_DECIDE   18   /* staged: the engine is begun only on COMMIT */
#define R_LOADED   19   /* finish waits until every rank has loaded */
#define R_PAUSED   20   /* PAUSED(v) resumes at an offer of v: only READY(v) answers ALREADY */
#define R_UNDO     21   /* anything before a byte was loaded is undone */
#define R_TOUCHED  22   /* ... and only that: all ranks have left, and none has loaded */
#define R_ONE      23   /* a driver that still answers one offer does not start another */
#define R_RETURN   24   /* a rank that has come back is not dead any more */
#define R_RESTART  25   /* an engine whose rank restarted is not READY any more */
#define HAVE(rule) (WITHOUT != rule)

/* The faults. Those of an engine strike where they happen; the others at any time (proctype Fault). */
#define F_CRASH     1   /* the coordinator dies; a new one sends the next refit */
#define F_RESTART   2   /* an engine's processes restart, with initial weights */
#define F_DIE       4   /* an engine dies for good */
#define F_STOP      8   /* an engine is stopped for good (SIGSTOP) */
#define F_LATE     16   /* the deadline passes */
#define F_WIRE     32   /* an operation on the wire ends in error */
#define F_DIGEST   64   /* a bucket is not what was packed */
#define F_CHECK   128   /* a rank refuses in check */
#define F_BEGIN   256   /* a step of the engine raises */
#define F_LOAD    512
#define F_FINISH 1024
#define F_RESUME 2048
#define F_SOURCE 4096   /* the source raises, or the send is cancelled */
#define F_RANK   8192   /* the process of rank 2 dies for good (NR=3) */
#define F_RANKUP 16384  /* it restarts, with initial weights (NR=3) */
#define F_HELDUP 32768  /* it restarts while the engine is HELD (NR=3) */
#ifndef FAULTS
#define FAULTS 65535
#endif
#define CAN(f) ((FAULTS & f) && nf < NF && curref > 0 && curref <= FLAST)

#define ENG(r) ((r) < 2 -> (r) : TWO)
#define STAGED(e) ((e) == 0)
#define VER(x) ((SAME && (x) >= SAME) -> (x) - 1 : (x))
#define BIT(x) (1 << (x))
#define W(r, b) w[2 * (r) + (b)]
#if NR == 3
#define EVERY(e, P) (((e) != 0 || P(0)) && ((e) != 1 || P(1)) && ((e) != TWO || P(2)))
#define SOME(e, P) (((e) == 0 && P(0)) || ((e) == 1 && P(1)) || ((e) == TWO && P(2)))
#else
#define EVERY(e, P) (((e) != 0 || P(0)) && ((e) != 1 || P(1)))
#define SOME(e, P) (((e) == 0 && P(0)) || ((e) == 1 && P(1)))
#endif

mtype = { OFFER, BEGIN, COMMIT, ABORT, DRAINED, PULL };                 /* from the coordinator */
mtype = { OK, ALREADY, BEGUN, REPORT };                                 /* from a driver */
mtype = { CHECKED, REFUSED, FAILED, COMPLETE, QUIET };                  /* from a rank */
mtype = { NONE, READY, PAUSED, HELD, DIRTY, OPEN, UNKNOWN, NEW, OLD };  /* states and outcomes; OPEN: begun, not ended */
mtype = { OFFERING, CHECKING, BEGINNING, STREAMING, ENDING };           /* phases of the coordinator */

/* Links, each in order. A rank's words to its driver and the driver's orders are shared facts (below): within a refit they
   never turn back, so that delay adds nothing but a later turn. */
chan toD[2] = [8] of { mtype, byte };
chan fromD[2] = [6] of { mtype, byte, mtype };
chan toR[NR] = [6] of { mtype, byte };
chan fromR[NR] = [6] of { mtype, byte };

/* Engines. */
byte w[2 * NR];                      /* weights: the version of each half of a rank */
byte ever[2];                        /* the version that the engine says it serves */
mtype st[2] = READY;                 /* Driver.held */
bit paused[2];
byte heldref[2];                     /* Held.refit */
byte dcur[2];                        /* Driver.run: the refit that the driver is in */
bit dead[2]; bit stopped[2]; bit rankless[2];
byte einc[2]; byte rankinc;          /* incarnations of the engine's processes, and of rank 2 alone */
byte lostrank[2];                    /* the refit during which the driver lost a rank */
byte spoilt[2];                      /* the last refit whose roll-forward has a reason to fail */
byte hurt[2];                        /* the refits in which this engine, or what all share, had a fault */

/* Ranks. */
byte rcur[NR];                       /* RankSet.run */
byte verif[NR];                      /* RankSet.verified_refit */
byte loaded[NR]; byte failed[NR];    /* the refit it has loaded from its copy; the one it left with an error */
bit touched[NR]; bit reading[NR];
byte said[NR];                       /* the driver's orders: LOAD, DROP */
#define LOAD 1
#define DROP 2

/* Lanes: one slot, at most one operation of this refit and one of an earlier one. */
byte slotref[NR];                    /* whose slot it is */
bit clean[NR] = 1; bit drained[NR];
byte op[NR]; byte late_op[NR];       /* the refits of operations that have not ended */
bit landed[NR];
byte credit[NR];                     /* the refit of the last credit that was sent */
byte owed[NR];                       /* DRAINED of this refit is owed once its operation ends */
bit laneerr[NR]; bit stuck;

/* The coordinator, and time. */
byte curref; byte nf;
bit late[NREF + 1]; bit crashed[NREF + 1];
byte lent;                           /* pull: the refit that the caller's memory is lent to */
mtype outcome[2];                    /* of the current refit */
byte outref[2];
bit resets_d[2]; bit resets_r[NR];

/* The properties: each is a bit that must stay 0. */
bit mixed_served, late_write, overrun, late_read, wrong_outcome, needless_dirty, not_healed;

#define GONE(e) (dead[e] || einc[e] != known[e])
#define STALE(r) (W(r, 0) != ever[e] || W(r, 1) != ever[e])
inline served(e) {
  if :: !dead[e] && !rankless[e] && !paused[e] && SOME(e, STALE) -> mixed_served = 1; assert(!mixed_served) :: else fi
}
inline strike(q) { nf++; hurt[q] = hurt[q] | BIT(curref) }
inline strike_all() { nf++; hurt[0] = hurt[0] | BIT(curref); hurt[1] = hurt[1] | BIT(curref) }

/* ---- the wire: operations end when they like */

#define ENDS(r) (op[r] && !(stuck && stopped[ENG(r)]))
inline land(r, e) {
  if
  :: CAN(F_WIRE) -> strike(e); laneerr[r] = 1
  :: true ->
     if :: slotref[r] > op[r] -> late_write = 1; assert(!late_write) :: else fi;
     if :: rcur[r] == op[r] && landed[r] -> overrun = 1; assert(!overrun)
        :: rcur[r] == op[r] && !landed[r] -> landed[r] = 1
        :: else fi
  fi;
  if :: owed[r] && owed[r] == op[r] && !stopped[ENG(r)] && !dead[ENG(r)] -> toR[r]!DRAINED, op[r] :: else fi;
  owed[r] = 0; op[r] = 0
}
proctype Wire() {
end: do
  :: atomic { ENDS(0) -> land(0, 0) }
  :: atomic { ENDS(1) -> land(1, 1) }
#if NR == 3
  :: atomic { ENDS(2) -> land(2, TWO) }
#endif
  :: atomic { late_op[0] -> if :: slotref[0] > late_op[0] -> late_write = 1; assert(!late_write) :: else fi; late_op[0] = 0 }
  :: atomic { late_op[1] -> if :: slotref[1] > late_op[1] -> late_write = 1; assert(!late_write) :: else fi; late_op[1] = 0 }
#if NR == 3
  :: atomic { late_op[2] -> if :: slotref[2] > late_op[2] -> late_write = 1; assert(!late_write) :: else fi; late_op[2] = 0 }
#endif
  od
}

/* ---- inbound.py: RankSet */

/* InboundLane.prepare */
inline prepare(rf) {
  if :: clean[r] || drained[r] || !HAVE(R_DRAINED) -> skip
     :: else -> op[r] = 0; late_op[r] = 0          /* retired: what still writes there writes into old memory */
  fi;
  slotref[r] = rf; clean[r] = 0; drained[r] = 0; landed[r] = 0
}
/* RankSet._leave with an error; `told`: the coordinator knows */
inline leave_failed(told) {
  failed[r] = cur;
  if :: touched[r] -> verif[r] = 0 :: else fi;
  if :: !told -> fromR[r]!FAILED, cur :: else fi;
  if :: DIRECT -> fromR[r]!QUIET, cur :: else fi;
  landed[r] = 0; said[r] = 0; rcur[r] = 0; cur = 0; k = 0
}
inline note_drained(rf) { if :: slotref[r] == rf -> drained[r] = 1 :: else fi }

proctype Rank(byte r) {
  byte e, cur, k, rf; mtype m;
  e = ENG(r);
start: {
  skip;
end_idle:
  do
  :: atomic { toR[r]?m, rf -> if :: m == OFFER -> break :: m == DRAINED -> note_drained(rf) :: else fi; m = 0; rf = 0 }
  od;
offered:
  atomic {
    m = 0;
    if
    :: CAN(F_CHECK) -> strike_all(); fromR[r]!REFUSED, rf; rf = 0; goto end_idle
    :: true -> prepare(rf); rcur[r] = rf; cur = rf; rf = 0; k = 0; touched[r] = 0; said[r] = 0;
       fromR[r]!CHECKED, cur
    fi
  };
stream:
  do
  :: atomic { landed[r] ->                          /* take one bucket */
       if
       :: CAN(F_DIGEST) -> strike(e); leave_failed(0); goto end_idle
       :: CAN(F_LOAD) && !STAGED(e) -> strike(e); touched[r] = 1; leave_failed(0); goto end_idle
       :: true ->
          if :: STAGED(e) -> skip :: else -> touched[r] = 1; W(r, k) = VER(cur); served(e) fi;
          landed[r] = 0; k++; credit[r] = cur
       fi;
       if
       :: k == NB ->
          k = 0; verif[r] = cur; fromR[r]!COMPLETE, cur;
          if :: STAGED(e) -> goto holding :: else -> clean[r] = 1; rcur[r] = 0; cur = 0; goto end_idle fi
       :: else
       fi }
  :: atomic { toR[r]?m, rf ->
       if
       :: m == OFFER -> leave_failed(0); goto offered
       :: m == PULL && rf == cur -> m = 0; rf = 0; touched[r] = 1; reading[r] = 1; goto pulling
       :: m == ABORT && rf == cur -> leave_failed(1); m = 0; rf = 0; goto end_idle
       :: else -> m = 0; rf = 0
       fi }
  :: atomic { (said[r] & DROP) || late[cur] || crashed[cur] -> leave_failed(0); goto end_idle }
  :: atomic { !HAVE(R_STALL) && (stopped[0] || stopped[1]) && !landed[r] -> leave_failed(0); goto end_idle }
  od;

pulling:  /* RankSet._pull: the read ends before anything else happens */
  do
  :: atomic { k < NB ->
       if :: lent != cur && !late[cur] && !crashed[cur] -> late_read = 1; assert(!late_read) :: else fi;
       W(r, k) = VER(cur); served(e); k++ }
  :: atomic { k == NB ->
       k = 0; reading[r] = 0;
       if
       :: CAN(F_DIGEST) -> strike(e); leave_failed(0)
       :: true -> verif[r] = cur; fromR[r]!COMPLETE, cur; fromR[r]!QUIET, cur; clean[r] = 1; rcur[r] = 0; cur = 0
       fi;
       goto end_idle }
  :: atomic { !HAVE(R_PULL_END) && (said[r] & DROP) ->    /* leaves while the read goes on */
       failed[r] = cur; fromR[r]!QUIET, cur; rcur[r] = 0 }
  od;

holding:  /* verified, in the stage: the copy is the driver's */
  do
  :: atomic { (said[r] & LOAD) -> k = 0; goto load }
  :: atomic { toR[r]?m, rf ->
       if
       :: m == OFFER -> leave_failed(0); goto offered
       :: m == ABORT && rf == cur -> leave_failed(1); m = 0; rf = 0; goto end_idle
       :: else -> m = 0; rf = 0
       fi }
  :: atomic { (said[r] & DROP) -> leave_failed(0); goto end_idle }
  :: atomic { HAVE(R_ASK) && dcur[e] != cur -> leave_failed(0); goto end_idle }
  :: atomic { !HAVE(R_COPY) && (late[cur] || crashed[cur]) -> leave_failed(0); goto end_idle }
  od;
load:     /* ordered to: from the copy; a load that raises is tried once more */
  do
  :: atomic { k < NB ->
       if
       :: CAN(F_LOAD) -> strike(e); spoilt[e] = cur; leave_failed(0); goto end_idle
       :: true -> touched[r] = 1; W(r, k) = VER(cur); served(e); k++
       fi }
  :: atomic { k == NB -> loaded[r] = cur; clean[r] = 1; rcur[r] = 0; said[r] = 0; cur = 0; k = 0;
       goto end_idle }
  :: atomic { toR[r]?m, rf ->
       if
       :: m == OFFER -> leave_failed(0); goto offered
       :: m == ABORT && rf == cur -> leave_failed(1); m = 0; rf = 0; goto end_idle
       :: else -> m = 0; rf = 0
       fi }
  od
  } unless { resets_r[r] };
  atomic {
    resets_r[r] = 0; cur = 0; k = 0; rf = 0; m = 0;
    if :: dead[e] || stopped[e] || (rankless[e] && r == 2) -> goto end_gone :: else -> goto start fi
  };
end_gone: false
}

/* ---- refit.py: Driver */

#define VERIFIED(r) (verif[r] == cur || (!HAVE(R_HELD_SAME) && verif[r]))
#define HAS(r) (verif[r] == cur)
#define VERIFIED_HELD(r) (verif[r] == heldref[e])
#define LOADED(r) (loaded[r] == cur)
#define LOAD_FAILED(r) (failed[r] == cur)
#define OUT(r) (rcur[r] != cur)
#define TOUCHED(r) (touched[r] && (failed[r] == cur || verif[r] == cur || rcur[r] == cur))
#define READING(r) (reading[r])
#define LOST_RANK (lostrank[e] == cur || (!HAVE(R_RETURN) && lostrank[e]))

/* RankOrder to every rank of the engine; one that is in no such refit ignores it */
inline order(what) {
  n = 0;
  do
  :: n < NR && ENG(n) == e && rcur[n] == cur -> said[n] = said[n] | what; n++
  :: n < NR && !(ENG(n) == e && rcur[n] == cur) -> n++
  :: n == NR -> n = 0; break
  od
}
inline report(rf) {
  if
  :: st[e] == READY && ever[e] == VER(rf) -> fromD[e]!REPORT, rf, NEW
  :: st[e] == READY && ever[e] != VER(rf) -> fromD[e]!REPORT, rf, OLD
  :: st[e] == OPEN -> fromD[e]!REPORT, rf, DIRTY
  :: else -> fromD[e]!REPORT, rf, st[e]
  fi
}
/* Driver._leave */
inline leave() {
  if :: st[e] != HELD && !(st[e] == READY && ever[e] == VER(cur)) -> order(DROP) :: else fi;
  if :: !(st[e] == READY && ever[e] == VER(cur)) && !(hurt[e] & BIT(cur)) -> needless_dirty = 1; assert(!needless_dirty)
     :: else fi;
  report(cur); cur = 0; dcur[e] = 0
}
inline resume() {
  if :: CAN(F_RESUME) -> strike(e) :: true -> st[e] = READY; paused[e] = 0; served(e) fi
}
inline finish(rf) {
  if
  :: CAN(F_FINISH) -> strike(e); st[e] = DIRTY
  :: true ->
     if :: outref[e] == rf && outcome[e] == OLD -> wrong_outcome = 1; assert(!wrong_outcome) :: else fi;
     ever[e] = VER(rf); st[e] = PAUSED; resume()
  fi
}
/* Driver._begin: prev is what undo goes back to */
inline begin() {
  prev = st[e];
  if
  :: CAN(F_BEGIN) -> strike(e); ok = 0;
     if :: prev == READY || !HAVE(R_BEFORE) -> st[e] = READY; paused[e] = 0; served(e) :: else fi
  :: true -> paused[e] = 1; st[e] = OPEN; ok = 1
  fi
}

proctype Driver(byte e) {
  byte cur, rf, n; mtype m, prev; bit ok, aborted, owes;
start: {
  skip;
end_idle:
  do
  :: atomic { toD[e]?m, rf ->
       if
       :: m == OFFER -> break
       :: m == COMMIT && !HAVE(R_REFUSE) -> finish(rf); report(rf)
       :: m == COMMIT || m == ABORT -> report(rf)
       :: else
       fi;
       m = 0; rf = 0 }
  od;
answer:   /* Driver._answer */
  atomic {
    m = 0;
    if
    :: st[e] == READY && ever[e] == VER(rf) -> served(e); fromD[e]!ALREADY, rf, NONE; rf = 0; goto end_idle
    :: st[e] == PAUSED && ever[e] == VER(rf) && !HAVE(R_PAUSED) -> fromD[e]!ALREADY, rf, NONE; rf = 0; goto end_idle
    :: st[e] == PAUSED && ever[e] == VER(rf) && HAVE(R_PAUSED) -> resume(); report(rf); rf = 0; goto end_idle
    :: st[e] == HELD && VER(heldref[e]) == VER(rf) ->
       goto finish_held
    :: else
    fi;
start_run:
    cur = rf; rf = 0; dcur[e] = cur; aborted = 0; fromD[e]!OK, cur, NONE
  };
  goto offered;
finish_held:  /* asks the ranks, then finishes; takes a while, and an offer that comes meanwhile waits */
  do
  :: atomic {
       if
       :: !HAVE(R_HELD_ASK) || EVERY(e, VERIFIED_HELD) -> finish(heldref[e]); report(rf); rf = 0; goto end_idle
       :: else -> st[e] = DIRTY; goto start_run
       fi }
  :: atomic { !HAVE(R_ONE) && toD[e]?[OFFER, n] && !owes -> owes = 1; toD[e]?m, rf; m = 0; st[e] = DIRTY; goto start_run }
  od;

offered:
  do
  :: atomic { toD[e]?m, rf ->
       if
       :: m == OFFER -> leave(); goto answer
       :: m == ABORT && rf == cur -> m = 0; rf = 0; leave(); goto end_idle
       :: m == BEGIN && rf == cur -> m = 0; rf = 0; begin();
          if :: ok -> fromD[e]!BEGUN, cur, NONE; goto begun :: else -> leave(); goto end_idle fi
       :: m == COMMIT && rf == cur -> m = 0; rf = 0; begin();
          if :: ok -> order(LOAD); goto roll_forward :: else -> leave(); goto end_idle fi
       :: else -> m = 0; rf = 0
       fi }
  :: atomic { late[cur] || crashed[cur] -> leave(); goto end_idle }
  :: atomic { !HAVE(R_DECIDE) && STAGED(e) && EVERY(e, VERIFIED) ->   /* begins and loads before the decision */
       begin();
       if :: ok -> order(LOAD); goto undecided :: else -> leave(); goto end_idle fi }
  od;
undecided:
  do
  :: atomic { toD[e]?m, rf -> m = 0; rf = 0; goto roll_forward }
  :: atomic { late[cur] || crashed[cur] -> st[e] = READY; paused[e] = 0; served(e); leave(); goto end_idle }
  od;

begun:    /* in place */
  do
  :: atomic { toD[e]?m, rf ->
       if
       :: m == OFFER -> goto settle                 /* rf: offered when this one has been left */
       :: m == ABORT && rf == cur -> m = 0; rf = 0; aborted = 1; goto settle
       :: m == COMMIT && rf == cur && !LOST_RANK -> m = 0; rf = 0; finish(cur); leave(); goto end_idle
       :: else -> m = 0; rf = 0
       fi }
  :: atomic { late[cur] || crashed[cur] || LOST_RANK -> goto settle }
  :: atomic { owes -> owes = 0; paused[e] = 0; served(e) }
  od;
settle:   /* Driver._settle */
  atomic {
    if
    :: !aborted && !LOST_RANK && (EVERY(e, VERIFIED) || (!HAVE(R_HELD_ALL) && SOME(e, VERIFIED))) ->
       if :: !EVERY(e, HAS) -> wrong_outcome = 1; assert(!wrong_outcome) :: else fi;
       st[e] = HELD; heldref[e] = cur; goto settled
    :: else -> if :: HAVE(R_TOUCHED) -> order(DROP) :: else fi
    fi
  };
  if        /* all ranks have left, or one will not say so in time */
  :: atomic { EVERY(e, OUT) || LOST_RANK || late[cur] || SOME(e, READING) || !HAVE(R_TOUCHED) ->
       if
       :: HAVE(R_TOUCHED) && (!EVERY(e, OUT) || SOME(e, TOUCHED) || LOST_RANK) -> st[e] = DIRTY
       :: HAVE(R_TOUCHED) && EVERY(e, OUT) && !SOME(e, TOUCHED) && !LOST_RANK && !HAVE(R_UNDO) ->
          needless_dirty = 1; assert(!needless_dirty)
       :: else -> st[e] = prev; if :: prev == READY -> paused[e] = 0; served(e) :: else fi
       fi }
  fi;
settled:
  atomic {
    aborted = 0; leave(); if :: m == OFFER -> goto answer :: else -> goto end_idle fi
  };

roll_forward:  /* staged: the decision has been taken; no coordinator is needed from here */
  do
  :: atomic { (EVERY(e, LOADED) && !LOST_RANK) || !HAVE(R_LOADED) -> finish(cur); break }
  :: atomic { (SOME(e, LOAD_FAILED) || (HAVE(R_DEATH) && LOST_RANK)) ->
       if :: spoilt[e] < cur -> needless_dirty = 1; assert(!needless_dirty) :: else fi;
       st[e] = DIRTY; break }
  :: atomic { late[cur] -> st[e] = DIRTY; break }    /* finish_timeout */
  :: atomic { !HAVE(R_ROLL) && crashed[cur] -> st[e] = READY; paused[e] = 0; served(e); break }
  od;
  atomic { leave(); goto end_idle }
  } unless { resets_d[e] };
  atomic {
    resets_d[e] = 0; cur = 0; rf = 0; n = 0; m = 0; prev = 0; ok = 0; aborted = 0; owes = 0;
    if :: dead[e] || stopped[e] -> goto end_gone :: else -> goto start fi
  };
end_gone: false
}

/* ---- control/coordinator.py, with the sender of its process */

#define ACTIVE(e) (answered[e] && !err[e] && outcome[e] == NONE)
#define WAITS(e) (outcome[e] == NONE)
#define POSTABLE(r) (ACTIVE(ENG(r)) && posted[r] < NB && op[r] != ref \
  && (posted[r] == 0 || credit[r] == ref || (!HAVE(R_CR_REFIT) && credit[r]) || !HAVE(R_CREDIT)) && IN_STEP(r))
#define NOT_BEHIND(r, q) (!ACTIVE(ENG(q)) || posted[q] >= posted[r])
#if NR == 3
#define IN_STEP(r) (NOT_BEHIND(r, 0) && NOT_BEHIND(r, 1) && NOT_BEHIND(r, 2))   /* one slot of the sender feeds all */
#else
#define IN_STEP(r) (NOT_BEHIND(r, 0) && NOT_BEHIND(r, 1))
#endif
#define IS_CHECKED(r) (checked[r])
#define IS_COMPLETE(r) (complete[r])
#define IS_QUIET(r) (quiet[r])
#define ALL_SETTLED(P) ((!ACTIVE(0) || P(0)) && (!ACTIVE(1) || P(1)))
#define ALL_CHECKED(e) EVERY(e, IS_CHECKED)
#define IS_BEGUN(e) (begun_[e] || STAGED(e))
#define IS_COMMITTED(e) (committed[e])
#define REACHABLE(e) (!GONE(e) && !stopped[e])
#define GONE_RANK(r) (r == 2 && (rankless[TWO] || rankinc != known_rank))

inline tell(e, m_) { if :: REACHABLE(e) -> toD[e]!m_, ref :: else fi }
inline tell_ranks(e, m_) {
  r = 0;
  do
  :: r < NR -> if :: ENG(r) == e && REACHABLE(e) && !GONE_RANK(r) -> toR[r]!m_, ref :: else fi; r++
  :: else -> r = 0; break
  od
}
/* Coordinator.fail: the engine is out; its driver's report settles the outcome */
inline fail(e, and_driver) {
  if
  :: !err[e] ->
     err[e] = 1; spoilt[e] = ref;
     if :: HAVE(R_ABORT) -> tell_ranks(e, ABORT) :: else fi;
     if :: and_driver -> tell(e, ABORT) :: else fi
  :: else
  fi
}
inline set_outcome(e, o) {
  if
  :: o == NEW && !GONE(e) && ever[e] != VER(ref) -> wrong_outcome = 1; assert(!wrong_outcome)
  :: o == OLD && !GONE(e) && st[e] == READY && ever[e] == VER(ref) -> wrong_outcome = 1; assert(!wrong_outcome)
  :: else
  fi;
  outcome[e] = o; outref[e] = ref
}
inline give_up(e) {
  fail(e, 1);
  if :: HAVE(R_WORD) -> set_outcome(e, UNKNOWN) :: else -> set_outcome(e, OLD) fi
}
inline post(r) {
  posted[r]++;
  if
  :: GONE(ENG(r)) || GONE_RANK(r) -> laneerr[r] = 1
  :: else -> if :: op[r] && op[r] != ref -> late_op[r] = op[r] :: else fi; op[r] = ref
  fi
}

proctype Coordinator() {
  byte ref, rf, e, r; mtype m, o, phase;
  bit answered[2], err[2], begun_[2], committed[2], checked[NR], complete[NR], quiet[NR], refused;
  byte posted[NR]; byte known[2]; byte known_rank;
next_refit:
  atomic {
    if :: ref == NREF -> goto over :: else fi;
    ref++; curref = ref; phase = OFFERING; refused = 0; lent = 0; known_rank = rankinc;
    e = 0;
    do
    :: e < 2 ->
       known[e] = einc[e]; answered[e] = 0; err[e] = 0; begun_[e] = 0; committed[e] = 0;
       if
       :: (ALONE == 2 || ALONE == e) && !dead[e] && !rankless[e] && !stopped[e] -> outcome[e] = NONE; tell(e, OFFER)
       :: else -> outcome[e] = UNKNOWN
       fi;
       e++
    :: else -> e = 0; break
    od;
    do
    :: r < NR -> checked[r] = 0; complete[r] = 0; quiet[r] = 0; posted[r] = 0; laneerr[r] = 0; r++
    :: else -> r = 0; break
    od
  };
loop:
  do
  :: atomic { fromD[0]?m, rf, o -> e = 0; goto from_driver }
  :: atomic { fromD[1]?m, rf, o -> e = 1; goto from_driver }
  :: atomic { fromR[0]?m, rf -> r = 0; goto from_rank }
  :: atomic { fromR[1]?m, rf -> r = 1; goto from_rank }
  :: atomic { POSTABLE(0) && phase == STREAMING && !DIRECT -> post(0) }
  :: atomic { POSTABLE(1) && phase == STREAMING && !DIRECT -> post(1) }
  :: atomic { laneerr[0] && WAITS(0) && !err[0] && !committed[0] -> fail(0, 1) }
  :: atomic { laneerr[1] && WAITS(1) && !err[1] && !committed[1] -> fail(1, 1) }
#if NR == 3
  :: atomic { fromR[2]?m, rf -> r = 2; goto from_rank }
  :: atomic { POSTABLE(2) && phase == STREAMING && !DIRECT -> post(2) }
  :: atomic { laneerr[2] && WAITS(TWO) && !err[TWO] && !committed[TWO] -> fail(TWO, 1) }
  :: atomic { rankinc != known_rank && WAITS(TWO) && !err[TWO] && !committed[TWO] -> fail(TWO, 1) }
#endif
  /* a peer is gone, or silent for its timer: stall_timeout, the deadline, finish_timeout, the grace of a report */
  :: atomic { WAITS(0) && (GONE(0) || stopped[0]) -> give_up(0) }
  :: atomic { WAITS(1) && (GONE(1) || stopped[1]) -> give_up(1) }
  :: atomic { WAITS(0) && late[ref] && !err[0] && !committed[0] -> fail(0, 1) }
  :: atomic { WAITS(1) && late[ref] && !err[1] && !committed[1] -> fail(1, 1) }
  :: atomic { WAITS(0) && late[ref] && (err[0] || committed[0]) -> give_up(0) }
  :: atomic { WAITS(1) && late[ref] && (err[1] || committed[1]) -> give_up(1) }
  /* the steps */
  :: atomic { phase == OFFERING && (answered[0] || err[0] || !WAITS(0)) && (answered[1] || err[1] || !WAITS(1)) ->
       phase = CHECKING;
       if :: ACTIVE(0) -> tell_ranks(0, OFFER) :: else fi;
       if :: ACTIVE(1) -> tell_ranks(1, OFFER) :: else fi }
  :: atomic { phase == CHECKING && ALL_SETTLED(ALL_CHECKED) ->
       phase = BEGINNING;
       if
       :: refused -> phase = ENDING;
          if :: ACTIVE(0) -> fail(0, 1) :: else fi;
          if :: ACTIVE(1) -> fail(1, 1) :: else fi
       :: else -> if :: ACTIVE(1) -> tell(1, BEGIN) :: else fi
       fi }
  :: atomic { phase == BEGINNING && ALL_SETTLED(IS_BEGUN) ->
       phase = STREAMING;
       if :: DIRECT && ACTIVE(1) -> lent = ref; tell_ranks(1, PULL) :: else fi }
  :: atomic { phase == STREAMING && CAN(F_SOURCE) && !ALL_SETTLED(IS_COMMITTED) ->
       strike_all();
       if :: ACTIVE(0) && !committed[0] -> fail(0, 1) :: else fi;
       if :: ACTIVE(1) && !committed[1] -> fail(1, 1) :: else fi }
  :: atomic { phase == STREAMING && ACTIVE(0) && !committed[0] && EVERY(0, IS_COMPLETE) -> committed[0] = 1; tell(0, COMMIT) }
  :: atomic { phase == STREAMING && ACTIVE(1) && !committed[1] && EVERY(1, IS_COMPLETE) -> committed[1] = 1; tell(1, COMMIT) }
  :: atomic { phase == STREAMING && ALL_SETTLED(IS_COMMITTED) -> phase = ENDING }
  :: atomic { phase == ENDING && !WAITS(0) && !WAITS(1) &&
       (!lent || !HAVE(R_QUIET) || EVERY(1, IS_QUIET) || late[ref] || GONE(1) || stopped[1]) ->
       lent = 0;                                     /* send returns: the memory is the caller's again */
       do
       :: r < NR ->
          if
          :: !REACHABLE(ENG(r)) || GONE_RANK(r) || DIRECT || !(err[0] || err[1]) -> skip
          :: else -> if :: op[r] == ref -> owed[r] = ref :: else -> toR[r]!DRAINED, ref fi
          fi; r++
       :: else -> r = 0; break
       od;
       goto next_refit }
  :: atomic { CAN(F_CRASH) -> strike_all(); lent = 0;
       do :: e < ref -> e++; crashed[e] = 1 :: else -> e = 0; break od;   /* whoever is still in an older refit is cut off too */
       if                                            /* what is on its way arrives, or is lost */
       :: true
       :: true ->
          do :: len(toD[0]) > 0 -> toD[0]?m, rf :: len(toD[1]) > 0 -> toD[1]?m, rf :: len(toD[0]) == 0 && len(toD[1]) == 0 -> break od;
          do :: r < NR -> do :: len(toR[r]) > 0 -> toR[r]?m, rf :: else -> break od; r++ :: else -> r = 0; break od
       fi;
       do :: r < NR -> credit[r] = 0; do :: len(fromR[r]) > 0 -> fromR[r]?m, rf :: else -> break od; r++ :: else -> r = 0; break od;
       do :: len(fromD[0]) > 0 -> fromD[0]?m, rf, o :: len(fromD[1]) > 0 -> fromD[1]?m, rf, o
          :: len(fromD[0]) == 0 && len(fromD[1]) == 0 -> break od;
       m = 0; o = 0; rf = 0; goto next_refit }
  od;
from_driver:
  atomic {
    if
    :: rf != ref || outcome[e] != NONE -> skip
    :: else ->
       if
       :: m == OK -> answered[e] = 1
       :: m == ALREADY -> outcome[e] = ALREADY; outref[e] = ref
       :: m == BEGUN -> begun_[e] = 1
       :: m == REPORT -> answered[e] = 1; set_outcome(e, o); if :: o != NEW -> fail(e, 0) :: else fi
       fi
    fi;
    m = 0; o = 0; rf = 0; e = 0; goto loop
  };
from_rank:
  atomic {
    if
    :: rf != ref -> skip
    :: else ->
       if
       :: m == CHECKED -> checked[r] = 1
       :: m == REFUSED -> checked[r] = 1; refused = 1
       :: m == COMPLETE -> complete[r] = 1
       :: m == QUIET -> quiet[r] = 1
       :: m == FAILED -> e = ENG(r); if :: WAITS(e) && !committed[e] -> fail(e, 1) :: else fi; e = 0
       fi
    fi;
    m = 0; rf = 0; r = 0; goto loop
  };
over:
  atomic {
    e = 0;
    do
    :: e < 2 ->
       if
       :: (ALONE == 2 || ALONE == e) && !dead[e] && !stopped[e] && !rankless[e] && !(hurt[e] & BIT(NREF)) &&
          !(st[e] == READY && ever[e] == VER(NREF) && !paused[e] && (outcome[e] == NEW || outcome[e] == ALREADY)) ->
          not_healed = 1; assert(!not_healed)
       :: else
       fi; e++
    :: else -> break
    od
  };
end_over:
  do
  :: fromD[0]?m, rf, o
  :: fromD[1]?m, rf, o
  :: fromR[0]?m, rf
  :: fromR[1]?m, rf
#if NR == 3
  :: fromR[2]?m, rf
#endif
  od
}

/* ---- faults that strike at any time */

inline wipe_rank(r) {
  w[2 * r] = 0; w[2 * r + 1] = 0; rcur[r] = 0; verif[r] = 0; loaded[r] = 0; failed[r] = 0; touched[r] = 0; said[r] = 0; reading[r] = 0; slotref[r] = 0; clean[r] = 1; drained[r] = 0; op[r] = 0; late_op[r] = 0; landed[r] = 0;
  credit[r] = 0; owed[r] = 0; resets_r[r] = 1;
  do :: len(toR[r]) > 0 -> toR[r]?m, n :: else -> break od;
  do :: len(fromR[r]) > 0 -> fromR[r]?m, n :: else -> break od
}
inline wipe_engine() {
  r = 0;
  do :: r < NR && ENG(r) == q -> wipe_rank(r); r++ :: r < NR && ENG(r) != q -> r++ :: r == NR -> r = 0; break od;
  do :: len(toD[q]) > 0 -> toD[q]?m, n :: else -> break od;
  do :: len(fromD[q]) > 0 -> fromD[q]?m, n, o :: else -> break od;
  ever[q] = 0; st[q] = READY; paused[q] = 0; heldref[q] = 0; dcur[q] = 0; lostrank[q] = 0; einc[q]++; resets_d[q] = 1;
  m = 0; o = 0; n = 0
}
inline pick() { if :: ALONE != 1 -> q = 0 :: ALONE != 0 -> q = 1 fi }

proctype Fault() {
  byte q, r, n; mtype m, o;
end:
  do
  :: atomic { CAN(F_LATE) -> strike_all(); late[curref] = 1 }
  :: atomic { CAN(F_RESTART) -> pick(); strike(q); wipe_engine(); q = 0 }
  :: atomic { CAN(F_DIE) -> pick(); strike(q); wipe_engine(); dead[q] = 1; q = 0 }
  :: atomic { CAN(F_STOP) -> pick(); if :: !dead[q] -> strike(q); stopped[q] = 1; resets_d[q] = 1;
       do :: r < NR && ENG(r) == q -> resets_r[r] = 1; r++ :: r < NR && ENG(r) != q -> r++ :: r == NR -> r = 0; break od;
       if :: stuck = 1 :: true fi :: else fi; q = 0 }
#if NR == 3
  :: atomic { (CAN(F_RANK) || CAN(F_RANKUP) || (CAN(F_HELDUP) && st[TWO] == HELD)) && !dead[TWO] && !stopped[TWO] ->
       strike(TWO); rankinc++; lostrank[TWO] = dcur[TWO]; spoilt[TWO] = dcur[TWO];
       if :: (FAULTS & F_RANK) -> rankless[TWO] = 1; hurt[TWO] = 255 :: (FAULTS & (F_RANKUP + F_HELDUP)) fi;
       r = 2; wipe_rank(r); r = 0; m = 0; n = 0;
       if :: HAVE(R_RESTART) && (st[TWO] == READY || st[TWO] == PAUSED) -> st[TWO] = DIRTY; paused[TWO] = 1 :: else fi }
#endif
  od
}

init {
  atomic {
    if :: ALONE != 1 -> run Driver(0); run Rank(0) :: else fi;
    if :: ALONE != 0 -> run Driver(1); run Rank(1) :: else fi;
#if NR == 3
    run Rank(2);
#endif
    run Wire(); run Coordinator(); run Fault()
  }
}
