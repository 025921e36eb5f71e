"""Imported before Triton: chooses its interpreter where there is no GPU, and else the first GPU of this process."""

import os

import torch

# Counting GPUs does not initialise CUDA. Initialisation would fix the set of visible GPUs.
if not (count := torch.cuda.device_count()):
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
elif worker := os.environ.get("PYTEST_XDIST_WORKER", ""):
    # Each worker has a different first GPU, since the memory of a single one does not suffice for all tests at once.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    first = int(worker.removeprefix("gw")) % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
