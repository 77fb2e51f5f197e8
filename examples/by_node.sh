#!/bin/sh
# One node's part of a cluster, without gyre-coord: run it on every node, with the same file. Roles are fixed, nothing is started again.
#
#     examples/by_node.sh NODE CLUSTER RUN_DIR [FLAG…]
#
# CLUSTER has a line for each process, the first gyre-train being the core:
#     login gyre-buffer  tcp://10.0.0.1:5000
#     gpu1  gyre-train   tcp://10.0.0.2:5001
#     gpu2  gyre-rollout tcp://10.0.0.3:5002
#     cpu1  gyre-sandbox
# Further flags go to every process, for example: --config run.toml --set net.keys=keys (docs/security.md). From a login node:
#     for node in $(cut -d' ' -f1 cluster.txt | sort -u); do ssh "$node" examples/by_node.sh "$node" cluster.txt runs/mine --config run.toml & done; wait
# Each process ends when its part is done, an engine when it is told to: kill its node's script.
set -eu

node=$1 cluster=$2 run=$3
shift 3
addresses() { awk -v command="$1" '$2 == command { print $3 }' "$cluster"; }
buffer=$(addresses gyre-buffer) core=$(addresses gyre-train | head -n 1)
engines=$(addresses gyre-rollout | sed 's/^/--rollout /')
pids=
start() { "$@" & pids="$pids $!"; }

while read -r where command at; do
    [ "$where" = "$node" ] || continue
    case $command in
        gyre-buffer) start gyre-buffer --run "$run" --bind "$at" "$@" ;;
        gyre-train)
            [ "$at" = "$core" ] && role=core || role=satellite
            start gyre-train --run "$run" --cell "$node" --role $role --bind "$at" --buffer "$buffer" --train "$core" "$@" ;;
        gyre-rollout) start gyre-rollout --run "$run" --cell "$node" --bind "$at" --train "$core" "$@" ;;
        # shellcheck disable=SC2086
        gyre-sandbox) start gyre-sandbox --run "$run" --name "$node" --buffer "$buffer" $engines "$@" ;;
        *) echo "error: $cluster: $node: unknown command $command; use gyre-buffer, -train, -rollout or -sandbox" >&2; exit 2 ;;
    esac
done < "$cluster"

trap 'kill $pids 2>/dev/null || true' INT TERM EXIT
code=0
for pid in $pids; do wait "$pid" || code=$?; done
exit $code
