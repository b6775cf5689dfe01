#!/usr/bin/env bash
# Checks docs/model/refit.pml with Spin: the rules as they are, then with each rule taken out.
# Exit code 0: the first find nothing, and each of the others is caught by the property named beside it.
#   check.sh          under two minutes on two cores
#   check.sh --full   more faults and refits in one run; hours, and up to 8 GB for each run
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
full=no
case "${1:-}" in
  "") ;;
  --full) full=yes ;;
  *) echo "usage: check.sh [--full]" >&2; exit 2 ;;
esac
for tool in spin gcc; do
  command -v "$tool" >/dev/null || { echo "check.sh: $tool is missing; on Debian: apt-get install spin gcc" >&2; exit 2; }
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM
optimise=-O0   # compiling is most of a short run
limit_s=300
[ "$full" = yes ] && { optimise=-O1; limit_s=7200; }

# name | what must be found (none, deadlock, or the property) | configuration
good="
one staged engine            | none | -DALONE=0
one in place engine          | none | -DALONE=1
staged beside in place       | none | -DFAULTS=65535-F_LATE
two ranks, staged            | none | -DNR=3 -DTWO=0 -DALONE=0
two ranks, in place          | none | -DNR=3 -DTWO=1 -DALONE=1
retry of a version, staged   | none | -DALONE=0 -DSAME=2
retry of a version, in place | none | -DALONE=1 -DSAME=2
direct mode                  | none | -DALONE=1 -DDIRECT=1
late, then crash             | none | -DALONE=0 -DNREF=1 -DNF=2 -DFAULTS=F_LATE+F_CRASH
crash, and crash again       | none | -DALONE=1 -DSAME=2 -DNREF=3 -DNF=2 -DFLAST=2 -DFAULTS=F_CRASH
dirty, then begin fails      | none | -DALONE=1 -DNREF=3 -DNF=2 -DFLAST=2 -DFAULTS=F_LOAD+F_BEGIN
held, then a rank restarts   | none | -DNR=3 -DTWO=1 -DALONE=1 -DSAME=2 -DNF=2 -DFLAST=2 -DFAULTS=F_CRASH+F_HELDUP
"
mutants="
R_REFUSE    | mixed_served   | -DALONE=0
R_WORD      | wrong_outcome  | -DALONE=0
R_COPY      | needless_dirty | -DALONE=0
R_ASK       | deadlock       | -DALONE=0 -DNREF=1 -DNF=2 -DFAULTS=F_LATE+F_CRASH
R_ABORT     | deadlock       | -DNR=3 -DTWO=1 -DALONE=1 -DNREF=1 -DFAULTS=F_RANK
R_HELD_ALL  | wrong_outcome  | -DNR=3 -DTWO=1 -DALONE=1 -DFAULTS=F_CRASH
R_HELD_ASK  | mixed_served   | -DNR=3 -DTWO=1 -DALONE=1 -DSAME=2 -DNF=2 -DFLAST=2 -DFAULTS=F_CRASH+F_HELDUP
R_HELD_SAME | wrong_outcome  | -DALONE=1 -DFLAST=2 -DFAULTS=F_CRASH
R_BEFORE    | mixed_served   | -DALONE=1 -DNREF=3 -DNF=2 -DFLAST=2 -DFAULTS=F_LOAD+F_BEGIN
R_DEATH     | deadlock       | -DNR=3 -DTWO=0 -DALONE=0 -DFAULTS=F_RANK
R_STALL     | needless_dirty | -DFAULTS=F_STOP
R_QUIET     | late_read      | -DALONE=1 -DDIRECT=1
R_PULL_END  | late_read      | -DALONE=1 -DDIRECT=1
R_CREDIT    | overrun        | -DALONE=1
R_CR_REFIT  | overrun        | -DALONE=1
R_DRAINED   | late_write     | -DALONE=1
R_ROLL      | mixed_served   | -DALONE=0
R_DECIDE    | mixed_served   | -DALONE=0
R_LOADED    | mixed_served   | -DALONE=0
R_PAUSED    | not_healed     | -DALONE=1 -DSAME=2
R_UNDO      | needless_dirty | -DALONE=1
R_TOUCHED   | mixed_served   | -DALONE=1
R_ONE       | mixed_served   | -DALONE=1 -DSAME=2 -DNREF=3 -DNF=2 -DFLAST=2 -DFAULTS=F_CRASH
R_RETURN    | needless_dirty | -DNR=3 -DTWO=1 -DALONE=1 -DFAULTS=F_RANKUP
R_RESTART   | mixed_served   | -DNR=3 -DTWO=1 -DALONE=1 -DSAME=2 -DFAULTS=F_RANKUP
"
deep="
everything, staged beside in place | none | -DNF=1
two faults, staged                 | none | -DALONE=0 -DNREF=3 -DNF=2 -DFLAST=2
two faults, in place               | none | -DALONE=1 -DNREF=3 -DNF=2 -DFLAST=2
two faults, direct                 | none | -DALONE=1 -DDIRECT=1 -DNREF=3 -DNF=2 -DFLAST=2
three refits, two ranks, staged    | none | -DNR=3 -DTWO=0 -DALONE=0 -DNREF=3 -DFLAST=2
three refits, two ranks, in place  | none | -DNR=3 -DTWO=1 -DALONE=1 -DNREF=3 -DFLAST=2
retry, two ranks, in place         | none | -DNR=3 -DTWO=1 -DALONE=1 -DSAME=2
crash and restart, two ranks       | none | -DNR=3 -DTWO=1 -DALONE=1 -DSAME=2 -DNF=2 -DFLAST=2 -DFAULTS=F_CRASH+F_RANKUP
"

found_in() {  # what the verifier says, from its output and exit code
  if [ "$2" -ne 0 ]; then echo "stopped ($2)"
  elif grep -q '^pan:[0-9]*: invalid end state' "$1"; then echo deadlock
  elif grep -q 'assertion violated' "$1"; then grep -m1 -o '!([a-z_]*)' "$1" | tr -d '!()'
  elif grep -q 'max search depth too small\|Search not completed\|out of memory' "$1"; then echo "not completed"
  elif grep -q 'errors: 0' "$1"; then echo none
  else echo "no verdict"
  fi
}

check() {  # number, name, expected, flags
  local dir=$work/$1 begun=$SECONDS code=0 found states verdict
  mkdir "$dir" && cd "$dir" && cp "$here/refit.pml" . || return
  if spin -a $4 refit.pml >out 2>&1 && gcc $optimise -DSAFETY -DNOFAIR -DHC4 -DMEMLIM=8000 -w -o pan pan.c >>out 2>&1; then
    timeout "$limit_s" ./pan -m100000 >out 2>&1 || code=$?
    found=$(found_in out "$code")
  else
    found="does not compile"
  fi
  states=$(grep -m1 -o '[0-9.e+]* states, stored' out | cut -d' ' -f1)
  verdict=ok
  [ "$found" = "$3" ] || verdict=WRONG
  printf '%-36s %-15s %-15s %10s %4ss  %s\n' "$2" "$3" "$found" "${states:--}" $((SECONDS - begun)) "$verdict" | tee "$work/$1.row"
  [ "$verdict" = ok ] || grep -m5 'pan:\|rror' out >&2
  rm -f pan pan.*
}

cores=$(nproc 2>/dev/null || echo 2)
n=0
printf '%-36s %-15s %-15s %10s %5s\n' "run" "expected" "found" "states" "time"
run_all() {  # list, prefix of the name, flag made of the name
  local name expected flags
  while IFS='|' read -r name expected flags; do
    [ -n "${name// /}" ] || continue
    name=$(echo $name) expected=$(echo $expected)
    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n; done
    n=$((n + 1))
    if [ "$2" = mutant ]; then check "$n" "without $name" "$expected" "-DWITHOUT=$name $flags" &
    else check "$n" "$name" "$expected" "$flags" & fi
  done <<<"$1"
}
run_all "$good" good
run_all "$mutants" mutant
[ "$full" = yes ] && run_all "$deep" good
wait

right=$(cat "$work"/*.row 2>/dev/null | grep -c 'ok$')
echo "$right of $n runs as expected, in $SECONDS s"
[ "$right" -eq "$n" ]
