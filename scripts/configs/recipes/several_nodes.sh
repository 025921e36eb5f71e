#!/bin/bash
# Several nodes of 8 GPUs under Slurm, here two:
#     sbatch scripts/configs/recipes/several_nodes.sh --gradient_accumulation_steps 4
# For batches or models that one node trains too slowly. One torchrun on each node starts its 8 processes. They find each
# other at the rendezvous: a port of the first node, which every node has to reach. All 8 × nodes processes share one
# contrastive batch. The recipe has 8 accumulation steps for one node: two nodes have the same batch with 4.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=SIGTERM@300
#SBATCH --requeue
# 300 seconds before its end Slurm sends SIGTERM: the run saves a checkpoint and ends. When it is queued again, it goes
# on from that checkpoint, since the recipe says resume_from_checkpoint: auto. output_dir must be on a file system that
# all nodes share.
set -euo pipefail
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # one a line
first_node=${nodes%%$'\n'*}
export OMP_NUM_THREADS=8
# NCCL takes the fastest network that it finds. If it hangs at the start, name the interface: NCCL_SOCKET_IFNAME=eth0
exec srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:${RENDEZVOUS_PORT:-29500}" \
  -m hf_infcl train scripts/configs/recipes/from_scratch.yaml "$@"
