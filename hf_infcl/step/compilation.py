"""Compiles the layers of a model's towers for the steps of a training; all layers of a tower share one compilation.

Before the first step one layer of each tower runs forward and backward as it is, which says how long the training will
take, and then compiled. A compiler that fails does so there, and not in the middle of a step. Trials, evaluations and
whatever else calls the model compute with the layers as they are, so that only the shapes of the training are compiled.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph
from transformers.utils import logging

from ..models.dual_encoder import NO_TEXTS
from ..models.layers import can_fuse, layers_of
from ..options.arguments import InfCLTrainingArguments
from ..options.record import RunRecord
from ..processes.collectives import Processes
from .grad_cache import undone
from .terms import Context, autocast
from .window import Window
from .wrappers import Wrapper, hooked

LAYERS, MODEL, NOTHING = "layers", "model", "nothing"  # what is compiled
ENOUGH = 300.0  # seconds that the layers of a training take, some twenty times what their compilation takes
BACKEND = "inductor"
# The share of what a layer keeps that it may keep where graphs compete for memory. The rest, cheap to compute, is
# computed again: on an H200, graphs of a ViT-B/16 take 45 GiB for 1,024 pairs instead of 68, and a step 1.3% longer. A
# graph that fits in their place saves a forward, a third of its micro-batch's time.
_KEPT = 0.8
_ONES = 16  # rows of ones; tensor cores compute no fewer
_NUMBERS = itertools.count()  # of the functions that are compiled

logger = logging.get_logger(__name__)


def may_compile(args: InfCLTrainingArguments) -> bool:
    """Whether the layers of a long training are compiled: nobody has said otherwise, and Triton runs on the device."""
    return args.torch_compile is None and can_fuse(args.device, args.backend)


class LayerCompilation:
    """Decides once whether a training compiles the layers of its model, and does it.

    Args:
        record: of the checkpoint that the training resumes from, which does what it did before.
        steps: of the whole training.
        wrapper: of its model, which may be compiled already, or a part of it.

    Attributes:
        decided: what is compiled, `LAYERS`, `MODEL` or `NOTHING`; None before the first step.
    """

    def __init__(self, context: Context, record: RunRecord | None, wrapper: Wrapper, steps: int) -> None:
        self._context, self._before, self._steps = context, record and record.compiled, steps
        self.decided = MODEL if wrapper.is_compiled else None
        self._functions: dict[nn.Module, Callable[..., Any]] = {}  # by the layers that call them

    @contextmanager
    def active(self, window: Window) -> Iterator[None]:
        """The context of a step. The first one decides, compiles and says so; collective."""
        if self.decided is None:
            self.decided = self._decide(window)
        if self._before not in (None, self.decided):
            self._tell(
                f"The training of the checkpoint compiled {self._before}, and this one compiles {self.decided}: it "
                "goes on, but not to the bit as without the interruption."
            )
        self._before = None
        with self._called(window):
            yield

    @contextmanager
    def _called(self, window: Window) -> Iterator[None]:
        """The context in which the layers call their compiled functions."""
        with ExitStack() as stack:
            for layer, function in self._functions.items():
                if not hooked(layer.modules()):  # what is compiled for another layer would leave them out
                    stack.enter_context(patch.object(layer, "_compiled_call_impl", function))
            if self._functions and len(window) > 1:  # graphs compete for memory
                stack.enter_context(torch._functorch.config.patch(activation_memory_budget=_KEPT))
            yield

    def _decide(self, window: Window) -> str:
        context = self._context
        # Under FSDP2 compiled layers took longer: 471 ms a step in place of 431, ViT-B/16 on two H200s.
        possible = may_compile(context.args) and not context.accelerator.is_fsdp2
        if self._before in (MODEL, NOTHING) or not all(map(all, Processes().agree([possible]))):
            return NOTHING
        towers: dict[str, tuple[list[nn.Module], Callable[[], None]]] = {}
        seconds, failure = 0.0, ""
        with undone(context.encoder.model, context.args.device):
            with suppress(Exception):  # which the step raises as well
                towers = self._trials(window)
                seconds = sum(_seconds(trial) * len(layers) for layers, trial in towers.values())
            seconds = min(number for (number,) in Processes().agree([seconds * len(window) * self._steps]))
            if seconds < ENOUGH and not (self._before == LAYERS and seconds > 0):
                return NOTHING
            began = time.perf_counter()
            try:
                for name, (layers, trial) in towers.items():
                    self._functions |= _compiled(name, layers)
                    with self._called(window):
                        trial()
            except Exception as error:
                failure = " ".join([f"{type(error).__name__}:", *str(error).split("\n")[:2]])
        if any(failed for (failed,) in Processes().agree([bool(failure)])):
            self._functions = {}
            self._tell(f"The layers could not be compiled, and are computed as they are ({failure or 'elsewhere'}).")
            return NOTHING
        numbers = " and ".join(f"{len(layers)} of the {name} tower" for name, (layers, _) in towers.items())
        seconds = time.perf_counter() - began
        self._tell(f"The layers ({numbers}) were compiled in {seconds:.0f} s; --torch_compile false leaves that out.")
        return LAYERS

    def _tell(self, message: str) -> None:
        if self._context.args.process_index == 0:
            logger.warning(message)

    def _trials(self, window: Window) -> dict[str, tuple[list[nn.Module], Callable[[], None]]]:
        """The layers of each tower and a trial: a forward and a backward of the last layer with its inputs in the step.

        A tower whose outputs are cached does not run, and is left out, as is one whose last layer has hooks.
        """
        encoder = self._context.encoder
        layers = {name: found for name, tower in encoder.towers().items() if (found := layers_of(tower))}
        encoder.model.train()
        encoder.eval_frozen_parts()
        inputs: dict[str, tuple[Any, dict[str, Any]]] = {}

        def keep(name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            inputs[name] = args, kwargs

        batch = next(batch for batch in window.batches if not batch.get(NO_TEXTS))
        with ExitStack() as hooks, torch.no_grad():
            for name, of_tower in layers.items():
                if not hooked(of_tower[-1].modules()):
                    hooks.enter_context(of_tower[-1].register_forward_pre_hook(partial(keep, name), with_kwargs=True))
            # Not by calling the model, whose hooks would take this for a forward of the training.
            encoder.embed(encoder.model.forward, self._context.prepare_inputs(dict(batch)))
        return {name: (layers[name], partial(self._trial, name, layers[name][-1], *inputs[name])) for name in inputs}

    def _trial(self, name: str, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        trained = [p for p in layer.parameters() if p.requires_grad]
        others = set(self._context.encoder.towers()[name].parameters()) - set(layer.parameters())
        first = args[0].detach().requires_grad_(any(p.requires_grad for p in others))
        with torch.set_grad_enabled(first.requires_grad or bool(trained)), autocast(self._context.accelerator):
            output = layer(first, *args[1:], **kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        if output.requires_grad:
            torch.autograd.grad(output, [first] * first.requires_grad + trained, output.detach(), allow_unused=True)


class BiasSums(CustomGraphPass):
    """Sums the rows of a gradient, for that of a bias, by a product with ones: a pass of the compiler over its graphs.

    The product reads them once, at the rate of the memory. The compiler's own sums take 1.7 times as long, and before
    an activation they compute its derivative again: of a ViT-B/16's step of 290 ms on an H200 they take 14.7.
    """

    def uuid(self) -> bytes:  # for what the compiler keeps on the disk
        return get_hash_for_files((__file__,))

    def __call__(self, graph: Graph) -> None:
        aten: Any = torch.ops.aten
        for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            gradient, dims, *keeps = total.args
            value = gradient.meta["val"]
            # Not of fp32, whose products may be rounded to TF32.
            if dims != [0] or keeps != [True] or value.ndim != 2 or value.dtype not in (torch.bfloat16, torch.float16):
                continue
            dtype = total.kwargs.get("dtype", value.dtype)
            # Autograd rounds the gradient of a bias like the bias, but a forward may need the digits of a wider sum.
            if dtype != value.dtype and total.meta.get("partitioner_tag") != "is_backward":
                continue
            with graph.inserting_before(total):
                rows = graph.call_function(aten.sym_size.int, (gradient, 0))
                like = {"dtype": value.dtype, "device": value.device}
                ones = graph.call_function(aten.full.default, ([_ONES, rows], 1), like)
                sums = graph.call_function(aten.mm.default, (ones, gradient))
                first = graph.call_function(aten.slice.Tensor, (sums, 0, 0, 1))
                first = graph.call_function(torch.ops.prims.convert_element_type.default, (first, dtype))
            total.replace_all_uses_with(first)
            graph.erase_node(total)


def _call(layer: nn.Module, *args: object, **kwargs: object) -> Any:
    return layer._call_impl(*args, **kwargs)


def _compiled(name: str, layers: Iterable[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """The layers of a tower, each with the function to call for it.

    The function has a code object of its own: all layers of transformers share one, and the compiler limits how many
    kinds of inputs it compiles for each code object.
    """
    code = _call.__code__.replace(co_name=f"_call_{name}_{next(_NUMBERS)}")
    options: Any = {"recompile_limit": 32} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    if BACKEND == "inductor":  # also where another thread runs the backward, which compiles its graph
        sums = torch._inductor.config.post_grad_custom_pre_pass or BiasSums()
        options["options"] = {"post_grad_custom_pre_pass": sums}
    function: Any = torch.compile(FunctionType(code, globals(), code.co_name), backend=BACKEND, **options)
    return {layer: partial(function, layer) for layer in layers}


def _seconds(trial: Callable[[], None]) -> float:
    """What a trial takes after a first one, which chooses kernels."""
    for _ in range(2):
        began = time.perf_counter()
        trial()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return time.perf_counter() - began
