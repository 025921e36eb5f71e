"""Imported last by the server of processes: what its forks need not do themselves."""

import contextlib

from .processes import leave_out_of_collections

with contextlib.suppress(ImportError):
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__  # noqa: B018 - DeepSpeed starts compilers to find them

leave_out_of_collections()  # accelerate collects garbage in every training
