"""Compiles all Triton kernels, in the forms that the launchers use, for GPUs that need not be present.

``python compile_kernels.py "cuda 80" "hip gfx942"`` prints a line for each kernel and GPU: the GPU, the kernel's name,
its shared memory in bytes, and the number of its PTX instructions that load 16 bits.
"""

import multiprocessing
import re
import sys
import types
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

launch = JITFunction.run


def compile_for(target: str) -> None:
    """In a process of its own: what is compiled for depends on the state of torch, Triton and this package."""
    kind, architecture = target.split()
    of_amd = kind == "hip"

    class Driver:
        """The part of a Triton driver that compilation needs."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(kind, architecture if of_amd else int(architecture), 64 if of_amd else 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        narrow_loads = re.findall(r"ld\.global(?:\.\w+)*\.[bu]16", kernel.asm.get("ptx", ""))
        name = f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}"
        print(target, name, kernel.metadata.shared, len(narrow_loads), flush=True)
        return kernel

    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    torch.version.hip = "6.4" if of_amd else None
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
        multi_processor_count=100, L2_cache_size=50 << 20
    )
    torch.cuda.get_device_capability = lambda device=None: divmod(int(architecture), 10)

    from hf_infcl.kernels import triton_backend as backend
    from hf_infcl.kernels.torch_backend import Block, BlockGradients, CoefficientVectors
    from hf_infcl.models import triton_quick_gelu

    backend.HOPPER_PAYS = 0  # also for the small blocks here
    x = torch.zeros(6000, 512, dtype=torch.bfloat16)
    scale, vector = torch.tensor(1.0), torch.zeros(6000)
    ids = torch.arange(6000, dtype=torch.int32) // 2
    of_ids, of_pairs = Block(x, x, scale, ids, ids, equal_are_positive=True), Block(x, x, scale, diagonal=0)
    outputs = BlockGradients()
    backend.positive_logits(x, x, scale)
    backend.softmax_losses(*[vector] * 5)
    triton_quick_gelu.forward(x)
    triton_quick_gelu.backward(x, x)
    if architecture == "90":  # together the targets compile each kernel with ids, with ids as positives, and without
        backend.softmax_statistics(of_ids, vector, vector)
        backend.softmax_gradients(of_pairs, CoefficientVectors(vector, vector, None, None, vector, None), outputs)
        backend.sigmoid_block(of_ids, scale, outputs)
    else:
        backend.softmax_statistics(of_pairs, vector, vector)
        backend.softmax_gradients(of_ids, CoefficientVectors(*[vector] * 6), outputs)
        backend.sigmoid_block(of_pairs, scale, outputs)


if __name__ == "__main__":
    for words in sys.argv[1:]:
        fork = multiprocessing.get_context("fork").Process(target=compile_for, args=[words])
        fork.start()
        fork.join()  # one after the other, so that lines stay whole
        if fork.exitcode:
            sys.exit(f"The kernels do not compile for {words}.")
