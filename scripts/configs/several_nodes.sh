#!/bin/bash
# Several nodes of 8 GPUs under Slurm, here two:
#     sbatch scripts/configs/several_nodes.sh --dataset 'shards/{00000..01023}.tar'
# For batches or models that one node trains too slowly. On each node, torchrun starts 8 processes. They find each other
# at the rendezvous, a port of the first node that every node must be able to reach. All 8 × nodes processes share one
# contrastive batch, which is that of the recipe on any number of nodes.
#SBATCH --nodes=2
#SBATCH --no-kill
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=SIGTERM@300
#SBATCH --requeue
# Slurm sends SIGTERM 300 seconds before the end of the job. The run then saves a checkpoint and ends. When it is queued
# again, it continues from that checkpoint, because the recipe sets resume_from_checkpoint: auto. All nodes must share the
# file system of output_dir.
# After the loss of a process or a node, torchrun starts all processes again from the last checkpoint, up to three times,
# on the nodes that are left: MIN_NODES at least, whose processes must divide the global batch. If the first node is lost,
# which keeps the rendezvous, the job ends and is queued again.
set -euo pipefail
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # one a line
first_node=${nodes%%$'\n'*}
export OMP_NUM_THREADS=8
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torch 2.13: otherwise processes that start again form no group of gloo
# NCCL uses the fastest network that it finds. If it hangs at the start, set the interface: NCCL_SOCKET_IFNAME=eth0
exec srun --no-kill --kill-on-bad-exit=0 torchrun \
  --nnodes "${MIN_NODES:-1}:$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:${RENDEZVOUS_PORT:-29500}" \
  -m hf_infcl train --recipe from_scratch --resume_from_checkpoint auto "$@"
