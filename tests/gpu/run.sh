#!/bin/sh
# For a person with a GPU: the vLLM engine's tests on it, then updates, sleep and the seconds of a role change with a model of yours. NOT YET RUN by
# anybody: written against vLLM 0.32.0's source. Needs an environment with `pip install 'gyre[vllm,train]' pytest`, active.
#
#   tests/gpu/run.sh [MODEL_DIR]      a Hugging Face model directory, for instance of 1 to 8 B parameters
set -eu
cd "$(dirname "$0")/../.."
python -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
GYRE_REQUIRE=vllm python -m pytest -W ignore -k vllm tests/rollout
[ -z "${1:-}" ] || python tests/gpu/role_change.py "$1"
