#!/bin/bash
# PPO on two nodes of a SLURM cluster, from its login node. Copy this file and change what differs on yours:
# `sinfo --Format=partition,gres,cpus,memory,time` shows the names. Words behind it count: `./ppo.sh --dry-run`.
set -eu

cd "$(dirname "$0")/../.." # the folder with experiments/; everything in it is seen by all nodes
options=(
    --launcher slurm
    --partition gpu --account lab --time-limit 1-00:00:00
    --nodes 2 --gpus-per-node 8 --gpu-type h100
    --cpus-per-worker 12 --mem 800G # of 112 CPUs and 1 TiB of a node
    --hardware h100                 # what the plan is made for
    --network-interface ib0
    --setup-line "module load cuda/12.4"
    --checkpoint-every-minutes 30 --recover auto
)
exec "${REALHF:-.venv/bin/realhf}" run experiments/ppo.py "${options[@]}" "$@"
