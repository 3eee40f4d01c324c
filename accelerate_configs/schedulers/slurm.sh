#!/bin/bash
# Trains on nodes of a SLURM cluster:  sbatch slurm.sh train.py --epochs 3
# RANKS has the number of ranks (GPUs) of each node, in the order of SLURM's nodes.
#SBATCH --job-name=lshdp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=12:00:00
#SBATCH --requeue
# Two minutes before the time is over, a Trainer saves a checkpoint on all nodes and ends (docs/trainer.md). A script
# that calls train(resume_from_checkpoint=...) where there is one goes on from it when the job runs again.
#SBATCH --signal=USR1@120
set -euo pipefail

export RANKS=${RANKS:-1,1}
MAIN_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MAIN_IP
# Where the nodes' names belong to another network than the one for training, name its interface:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# One launcher a node (exec: signals are for it). When one fails, srun ends the others.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c \
    'exec accelerate-lshdp launch --nodes "$RANKS" --node-rank "$SLURM_PROCID" --main-ip "$MAIN_IP" --auto "$@"' \
    launch "$@"
