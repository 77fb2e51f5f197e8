#!/bin/sh
# The same system without the coordinator: each process started by hand, with flags only. Trains three steps.
#
#     examples/by_hand.sh MODEL_DIR TASKS_DIR [RUN_DIR] [FLAG…]
#
# Local addresses derive from the run directory; on other hosts name them with --buffer, --train, --rollout and --bind.
# Further flags go to every process, for example: --set sandbox.backend=process --set sandbox.unsafe=true
set -eu

[ $# -ge 2 ] || { sed -n '4s/^#  *//p' "$0" >&2; exit 2; }
model=$1 tasks=$2 run=${3:-runs/by-hand}
[ $# -gt 3 ] && shift 3 || shift $#
harness_dir=$(cd "$(dirname "$0")/quickstart/agent" && pwd)

start() { # name of the command, its own flags
    command=$1
    shift
    "$command" --run "$run" --set model.path="$model" --set sandbox.harness_dir="$harness_dir" \
        --set system.groups_per_step=2 --set system.rollouts_per_group=4 --set rollout.max_tokens=64 --set rollout.context=1024 "$@" &
}

start gyre-buffer --steps 3 --set tasks.train="$tasks" "$@"; buffer=$!
start gyre-train --steps 3 "$@"; train=$!
start gyre-rollout "$@"; rollout=$!
start gyre-sandbox --slots 4 "$@"; sandbox=$!
trap 'kill $buffer $train $rollout $sandbox 2>/dev/null || true' EXIT INT TERM

wait $train   # each ends with 0 when its part of the run is done
wait $sandbox
wait $buffer
kill -TERM $rollout # an engine serves until it is told to stop
wait $rollout || [ $? = 143 ]
trap - EXIT INT TERM
gyre-report "$run"
