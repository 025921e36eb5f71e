"""Imported last by the server of processes: what its forks need not do themselves."""

import contextlib

import torch

from .processes import leave_out_of_collections

if not torch.backends.cuda.is_built():  # with GPUs it would initialise CUDA, which no fork can do again
    with contextlib.suppress(ImportError):
        import deepspeed.ops

        OPERATORS = deepspeed.ops.__compatible_ops__  # DeepSpeed starts compilers to find them

leave_out_of_collections()  # accelerate collects garbage in every training
