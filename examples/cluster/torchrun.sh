#!/bin/bash
# The same line on every host, with the run's folder on storage that they share:
#
#   examples/cluster/torchrun.sh node0:29400 2 runs/mine --config configs/domainbed/pacs.yaml
#
# The first word is the rendezvous, on one of the hosts; the second their number, or a range such as 1:2: then a job that
# loses hosts goes on with those that are left. RANKS is the number of ranks on each host (default: one per GPU).
set -euo pipefail
rendezvous=$1 hosts=$2 run=$3
shift 3
exec torchrun --nnodes="$hosts" --nproc-per-node="${RANKS:-gpu}" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$rendezvous" \
    launch/train.py --output "$run" --resume auto --parallel.expert_parallel_size auto "$@"
