#!/bin/sh
# The trajectory budget study: three runs that differ in J_max alone, one after the other, and what they have to show side by side. With gyre's commands
# on PATH. SEED=N, STEPS=N, OUT=DIR for the runs, UNSAFE=1 without bubblewrap. A run that is there already is kept.
set -eu
cd "$(dirname "$0")/../.."
here=examples/budget quick=examples/quickstart seed=${SEED:-0} out=${OUT:-runs/budget}
made=$here/made model=$PWD/$quick/made/model-$seed
say() { printf '\n%s\n' "$*" >&2; }

if [ ! -f "$model/model.safetensors" ]; then
    say "Warm start: the quick start's model (about two minutes)"
    python "$quick/make_model.py" --out "$model" --seed "$seed" >&2
fi
python "$here/make_budget_tasks.py" --out "$made/tasks-$seed" --seed "$seed"
mkdir -p "$made/agent" "$out"
cp "$here/agent/harness.py" "$made/agent/harness.py"
cp "$quick/agent/harness.py" "$made/agent/single.py"
flags=
[ "${UNSAFE:-}" != 1 ] || flags="--set sandbox.backend=process --set sandbox.unsafe=true"
[ -z "${STEPS:-}" ] || flags="$flags --set train.steps=$STEPS"
for budget in 1 5 all; do
    run=$out/j-$budget
    [ ! -f "$run/ledger.db" ] || continue
    say "J_max $budget"
    # shellcheck disable=SC2086
    gyre-coord --cells "$quick/fixed.txt" --config "$here/run.toml" --run "$run" --set run.seed="$seed" $flags --set model.path="$model" \
        --set tasks.train="$PWD/$made/tasks-$seed" --set sandbox.harness_dir="$PWD/$made/agent" \
        --set trajectory.max_per_execution="$([ "$budget" = all ] && echo 1000000 || echo "$budget")" >/dev/null
done
gyre-report "$out/j-1" "$out/j-5" "$out/j-all" --figure learning
