#!/bin/sh
# The quick start from nothing to a trained model: tasks, a warm start, 64 steps of reinforcement learning on four cells that turn, the report.
# Run by `make demo`, with gyre's commands on PATH. SEED=N for another seed, RUN=DIR for another run directory, HOSTS=FILE for other cells
# (fixed.txt: fixed roles), RULE=NAME for another rule, STEPS=N for fewer steps, ENGINE=vllm for that engine, UNSAFE=1 without bubblewrap.
set -eu
cd "$(dirname "$0")/../.."
here=examples/quickstart seed=${SEED:-0} run=${RUN:-runs/demo}
made=$here/made hosts=${HOSTS:-$here/hosts.txt}

say() { printf '\n\033[1m%s\033[0m\n' "$*" >&2; }
[ -t 2 ] || say() { printf '\n%s\n' "$*" >&2; }

wrong() { # before anything is made or moved
    echo "demo: $1" >&2
    exit 2
}
case ${STEPS:-1} in *[!0-9]*) wrong "STEPS=$STEPS: no number" ;; esac
case $seed in *[!0-9]*) wrong "SEED=$seed: no number" ;; esac
[ "${STEPS:-1}" -gt 0 ] || wrong "STEPS=$STEPS: give at least 1"
case ${ENGINE:-torch} in torch | vllm) ;; *) wrong "ENGINE=$ENGINE: give torch or vllm" ;; esac
[ -f "$hosts" ] || wrong "HOSTS=$hosts: no such file"
if [ -e "$run" ] && [ ! -f "$run/ledger.db" ]; then
    wrong "$run is there and is not a run; give another RUN=DIR"
fi
if [ -e "$run" ]; then # an earlier run is kept
    kept=$run-$(date -u +%Y%m%dT%H%M%S)
    mv "$run" "$kept"
    say "The earlier run is now $kept"
fi

if [ ! -f "$made/tasks-$seed/done" ]; then
    say "1/4  Making tasks: 1000 to train on, 140 held out"
    rm -rf "$made/tasks-$seed"
    python "$here/make_tasks.py" --out "$made/tasks-$seed" --seed "$seed" >&2
    touch "$made/tasks-$seed/done"
fi
flags=
[ "${UNSAFE:-}" != 1 ] || flags="--backend process --unsafe"
say "2/4  Checking two tasks of each kind: the oracle must get 1, doing nothing 0"
some=
for kind in append count create fix follow func rename; do
    some="$some $(ls -d "$made/tasks-$seed/heldout/$kind"-* | head -2)"
done
# shellcheck disable=SC2086
gyre-task check $flags $some >&2

if [ ! -d "$made/model-$seed" ]; then
    say "3/4  Warm start: a tiny model imitates a careless demonstrator (about two minutes)"
    rm -rf "$made/model-$seed.part"
    python "$here/make_model.py" --out "$made/model-$seed.part" --seed "$seed" >&2
    mv "$made/model-$seed.part" "$made/model-$seed"
fi

say "4/4  Reinforcement learning from the verifiers alone"
[ -z "$flags" ] || flags="--set sandbox.backend=process --set sandbox.unsafe=true"
[ -z "${RULE:-}" ] || flags="$flags --rule $RULE"
[ -z "${ENGINE:-}" ] || flags="$flags --set rollout.engine=$ENGINE"
[ -z "${STEPS:-}" ] || flags="$flags --set train.steps=$STEPS"
# shellcheck disable=SC2086
gyre-coord --cells "$hosts" --config "$here/run.toml" --run "$run" --set run.seed="$seed" $flags \
    --set model.path="$PWD/$made/model-$seed" --set tasks.train="$PWD/$made/tasks-$seed/train" --set tasks.heldout="$PWD/$made/tasks-$seed/heldout"
gyre-report "$run" --figure roles --figure burst
