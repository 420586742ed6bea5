#!/usr/bin/env bash
# Trains on several hosts. Run the same line on each of them, at about the same time:
#
#     HEAD=host1 HOSTS=2 bash examples/clusters/torchrun.sh --steps 200
#
# HEAD is the name or address of one of the hosts. Its port PORT must be free and open to the others.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun \
    --nnodes="$HOSTS" \
    --nproc-per-node="${RANKS_PER_HOST:-gpu}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$HEAD:${PORT:-29400}" \
    --rdzv-id="${JOB:-balanced_parallel}" \
    scripts/train.py "$@"
