"""The exact contrastive loss of a batch that is spread over processes, as a differentiable function.

`ContrastiveLoss` is this function as an `nn.Module`, with the call of OpenCLIP's losses.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import kernels
from ..processes.collectives import Arriving, Processes
from ..refusals import refuse_second_derivative
from . import cuda_graphs, objectives
from .batch import Batch, RowCounts, Wanted
from .inputs import DIRECTIONS, Inputs
from .strategies import Strategy, select_strategy

# The largest matrix product, in multiplications n·m·D, for which the host may need longer to launch the kernels of a
# loss than the GPU needs to run them. Launching took 2.3 to 3.7 ms, and losses of this size take 4 ms on one H100. With
# several processes the host also launches the collectives, and losses of this size take 8 ms. A block of a ring of two
# (eight) with 275e9 multiplications took 4.8 (5.7) ms with a slow host, and replayed 4.1 (3.7), on one H200.
RECORDED_WORK, RECORDED_WORK_OF_SEVERAL, RECORDED_WORK_OF_BLOCK = 320e9, 560e9, 280e9

_NO_SECOND_DERIVATIVE = (
    "contrastive_loss has no second derivative, so its backward cannot run with create_graph=True. For a gradient "
    "penalty or a Hessian use hf_infcl.loss.reference.contrastive_loss, which stores all logits."
)


def contrastive_loss(
    image_embeds: Tensor,
    text_embeds: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None = None,
    *,
    objective: str = "softmax",
    strategy: str = "ring",
    backend: str = "auto",
    pair_ids: Tensor | None = None,
    image_ids: Tensor | None = None,
    text_ids: Tensor | None = None,
    negative_texts: Tensor | None = None,
    directions: str = "both",
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Computes the contrastive loss of the global batch, that is of the images and texts of all processes.

    The result equals `hf_infcl.loss.reference.contrastive_loss` of the concatenated arguments of all processes.
    The logits z_ij = logit_scale · x_i·y_j + logit_bias are computed in tiles and never stored as a matrix.

    By default, image i and text i of a process are a pair, and every other text of the global batch is a negative of
    the image. With ``image_ids`` and ``text_ids``, an image and a text belong together if their ids are equal, even
    across processes. An image can then have several captions, several images can share a class (UniCL, arXiv
    2204.03610), and an image or text can have no partner. The loss of a row or column with several positives is the
    mean over its positives, so with K positives it cannot fall below log K. Rows and columns without a positive only
    serve as negatives and have no loss of their own.

    The gradient is the gradient of the sum of the returned losses over all processes. DDP and FSDP average gradients
    over the processes, so every parameter receives the gradient of one process that holds the whole batch. The
    embeddings must come from the forward of the wrapped model, not from its ``module``.

    On GPUs, the kernels of small batches are replayed as CUDA graphs from the third call with the same shapes on,
    because launching them takes longer than running them. Collectives run between the graphs. With n images on this
    process and m texts on all processes, a batch is small if n·m·D <= 3.2e11 on one process (25,000 pairs of 512
    dimensions) or <= 5.6e11 on several (23,385 pairs on each of two, 16,536 on each of four), and if texts are sent
    around, <= 2.8e11 for each block (23,385 pairs on each process). The two latest recordings keep their memory: in
    bf16 about 12·n·D bytes, on several processes another 6·m·D, and up to 256 MiB of coefficients. That is 352 MiB for
    16,384 pairs of 512 dimensions on one process, 448 or 544 MiB for the same number on each of two or four, and 684
    MiB for 23,168 on each of eight that send texts around. If that memory is not available, nothing is recorded.

    Args:
        image_embeds: [n, D] fp32, bf16 or fp16, with the torch backend also fp64; n >= 1 may differ between processes.
            CLIP and SigLIP normalise the rows to length 1; the loss does not require it.
        text_embeds: [m, D], with the dtype and device of image_embeds. Without ids m = n. With ids m >= 1, and m may
            differ between processes.
        logit_scale: one element, the multiplier of the cosines (already exponentiated), equal on all processes.
        logit_bias: one element, equal on all processes; None means 0. The softmax loss does not depend on it, so its
            gradient there is zero, not None.
        objective: ``"softmax"`` (InfoNCE; CLIP, arXiv 2103.00020) or ``"sigmoid"`` (SigLIP, arXiv 2303.15343, eq. 1).
        strategy: how the processes share the work; it does not change the loss or the gradients. ``"ring"`` (Inf-CL)
            sends texts around and needs O(b·D) memory per process plus a constant. It gathers the texts of all
            processes like ``"disco"``, or those of each machine, if they and their gradients take at most 256 MiB, or
            1/32 of a GPU's memory where that is predicted to be faster. A machine has the processes that the
            environment's HF_INFCL_RING_GROUP says, or else torchrun's LOCAL_WORLD_SIZE. ``"disco"`` (DisCo-CLIP),
            ``"local"`` (OpenCLIP's local loss with gradients through the gather) and ``"gather"`` (CLIP) need O(B·D)
            memory; see `hf_infcl.loss.strategies`.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``; auto selects triton on the GPUs that it supports, else torch.
        pair_ids: [n] int64. Pairs with equal ids show the same image or caption and are not each other's negatives:
            their cell is left out of both denominators (softmax) or out of the sum (sigmoid).
        image_ids: [n] int64, text_ids: [m] int64: an image and a text with equal ids belong together. Pass both or
            neither, and not together with pair_ids. For several captions per image, text_ids is image_ids[image of each
            caption]; for labelled images, both are the labels.
        negative_texts: [h, D], texts that belong to no image, such as deliberately wrong captions. They are additional
            negatives of all images and have no loss of their own (NegCLIP, arXiv 2210.01936). h may be 0 and may differ
            between processes.
        directions: ``"both"``, the mean of the cross entropies of images and of texts, or ``"image_to_text"``, those of
            the images alone: how well an anchor finds its document, as embedders of text are trained. Only of the
            softmax loss of pairs.
        process_group: the processes that share the batch; None means the default group, or only this process if
            torch.distributed is not initialised.

    Returns:
        The loss, an fp32 scalar (fp64 for fp64 inputs), the same on every process. It is not finite if no image and
        no text of the global batch belong together.

    Raises:
        ValueError: on every process alike, if an argument is unusable, if logit_scale or logit_bias is not finite, or
            if shapes, dtypes, scalars or options differ between processes. If the scalars are on a GPU, several
            processes compare them in the loss's own precision after its kernels are queued. A single process does not
            read a scalar from a GPU, because that would stall the stream; if the scalar is not finite, the loss is NaN.
        RuntimeError: another process announced an error (`hf_infcl.processes.collectives.announce_failure`). In the
            backward: it runs with ``create_graph=True``, because the loss has no second derivative.
    """
    inputs = Inputs(
        *(image_embeds, text_embeds, logit_scale, logit_bias, objective, strategy, backend),
        *(pair_ids, image_ids, text_ids, negative_texts, directions),
    )
    return _loss(inputs, Processes(process_group))


def local_contrastive_loss(image_embeds: Tensor, text_embeds: Tensor, *scalars: Any, **options: Any) -> Tensor:
    """Computes `contrastive_loss` of this process's batch alone, without communication even if a group exists.

    Args:
        *scalars: logit_scale and, if there is one, logit_bias.
        **options: keyword arguments of `contrastive_loss`, except for ``process_group``.
    """
    return _loss(Inputs(image_embeds, text_embeds, *scalars, **options), Processes(alone=True))


def _loss(inputs: Inputs, processes: Processes) -> Tensor:
    counts = inputs.check(processes)
    x, y, text_ids = inputs.image_embeds, inputs.text_embeds, inputs.text_ids
    dtype = kernels.torch_backend.accumulate_dtype(x)
    # Scalars live on the features' device, so that no backend has to wait for their values.
    scale = _scalar(inputs.logit_scale, dtype, x.device)
    bias = _scalar(0.0 if inputs.logit_bias is None else inputs.logit_bias, dtype, x.device)
    ids_x = inputs.pair_ids if inputs.image_ids is None else inputs.image_ids
    rows, columns = sum(counts.images), sum(counts.texts) + sum(counts.negative_texts)
    if text_ids is not None:
        rows, columns = max(rows, columns), min(rows, columns)
    strategy = select_strategy(inputs.strategy, processes, inputs.backend, y, rows, columns)
    # Within a Function grad mode is always off, and its needs_input_grad ignores the mode of the caller.
    task = _Task(strategy, inputs.objective, counts, inputs.wanted(), inputs.directions == DIRECTIONS[1])
    with torch.autocast(x.device.type, enabled=False):
        scalars = None
        if processes.world_size > 1 and not inputs.scalars_are_read():
            scalars = Arriving(processes.gather(torch.stack((scale.detach(), bias.detach()))))
        loss = _Loss.apply(task, x, y, inputs.negative_texts, scale, bias, ids_x, text_ids)
    if scalars is not None:  # compared when the work is queued, so that the device goes on meanwhile
        inputs.compare(processes, scalars.tolist())
    return loss


def _scalar(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        value = value.to(device, dtype)
        return value if value.ndim == 0 else value.reshape(())  # a view would be one more node of the autograd graph
    value = value if torch.compiler.is_compiling() else float(value)  # it may be a number or 0-dim array of numpy
    return torch.full((), value, dtype=dtype, device=device)  # CUDA graphs allow it, unlike a copy from the host


class _Task(NamedTuple):
    """The settings of a loss, beside the tensors that it is computed from."""

    strategy: Strategy
    objective: str
    counts: RowCounts
    wanted: Wanted
    one_way: bool


class _Loss(torch.autograd.Function):
    """The forward computes the loss and, from the same statistics, its gradients; the backward only scales them.

    `torch.autograd.function.once_differentiable` would raise only if the incoming gradient requires a gradient itself,
    which that of a loss does not.
    """

    @staticmethod
    def forward(ctx: Any, task: _Task, x: Tensor, y: Tensor, *others: Tensor | None) -> Tensor:
        evaluate = functools.partial(_evaluate, task)
        strategy = task.strategy
        if launches_dominate(strategy, x, task.counts):
            name = (strategy.key, *task[1:])
            evaluate = functools.partial(cuda_graphs.run, name, strategy.processes, evaluate)
        loss, *gradients = evaluate(x, y, *others)
        assert loss is not None
        # A compiled backward cannot ask for the mode of autograd, so it contains an operator that takes the features,
        # and torch refuses to differentiate it.
        features = (x, y) if torch.compiler.is_compiling() else ()
        ctx.save_for_backward(*gradients, *features)
        ctx.processes, ctx.dtype = strategy.processes, x.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *products, factors = ctx.saved_tensors[:4]
        if torch.compiler.is_compiling():
            grad = torch.ops.hf_infcl.once(grad, *ctx.saved_tensors[4:])
        else:
            refuse_second_derivative(_NO_SECOND_DERIVATIVE)
        *want_products, want_scale, want_bias = ctx.needs_input_grad[1:6]
        product_factor, grad_scale, grad_bias = (ctx.processes.sum(grad) * factors).unbind()
        return (
            None,  # of the task
            *(
                _scaled(product, product_factor, ctx.dtype) if want else None
                for product, want in zip(products, want_products, strict=True)
            ),
            grad_scale if want_scale else None,
            grad_bias if want_bias else None,
            *(None, None),  # of the ids
        )


def _once(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A copy of ``grad``. As it takes the features, torch sees that a compiled backward would have a derivative."""
    refuse_second_derivative(_NO_SECOND_DERIVATIVE)
    return grad.clone()


torch.library.define("hf_infcl::once", "(Tensor grad, Tensor x, Tensor y) -> Tensor")
torch.library.impl("hf_infcl::once", "default", _once)
torch.library.register_fake("hf_infcl::once", lambda grad, x, y: torch.empty_like(grad))


def launches_dominate(strategy: Strategy, x: Tensor, counts: RowCounts) -> bool:
    """Whether the kernels take longer to launch than to run, and can be recorded."""
    processes, blocks = strategy.processes, strategy.blocks
    limit = RECORDED_WORK if processes.world_size == 1 else RECORDED_WORK_OF_SEVERAL
    if blocks > 1:
        limit = RECORDED_WORK_OF_BLOCK * blocks
    return (
        not torch.compiler.is_compiling()
        and x.is_cuda
        and max(counts.images) * (sum(counts.texts) + sum(counts.negative_texts)) * x.shape[1] <= limit
        # Collectives of GPUs are only queued, in the order of the stream.
        and (processes.world_size == 1 or processes.device == x.device)
        and kernels.select(strategy.backend, x.device, x.dtype) is not kernels.torch_backend
    )


def _evaluate(task: _Task, *tensors: Any) -> tuple[Tensor | None, ...]:
    """The loss; the products C·Y, [n, D], and Cᵀ·X, [m, D] and [h, D]; and three factors [3].

    If no gradient is wanted, only the loss is computed. Let G be the derivative of the loss with respect to the logits,
    which equals C up to a constant factor; then dX = s·G·Y and dY = s·Gᵀ·X. The first factor is s times that constant,
    by which the products have to be multiplied; the others are this process's part of the gradients of scale and bias.

    Args:
        tensors: those of a `Batch`.
    """
    strategy, objective, *shared = task
    batch = Batch(*tensors, *shared)
    negatives, no_negatives = batch.negatives, sum(batch.counts.negative_texts) == 0  # on any process
    if no_negatives:
        batch = replace(batch, negatives=None)
    terms = objectives.evaluate(strategy, batch, objective)
    loss = strategy.processes.sum(terms.loss) / terms.divisor
    if not any(batch.wanted):
        return loss, None, None, None, None
    of_scalars = (torch.zeros_like(loss) if t is None else t for t in (terms.grad_scale, terms.grad_bias))
    factors = torch.stack((batch.scale, *of_scalars)) / terms.divisor
    grad_negatives = negatives if no_negatives else terms.grad_negatives  # if given but empty, so is the gradient
    return loss, terms.grad_x, terms.grad_y, grad_negatives, factors


def _scaled(products: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor · products in the dtype, without a copy in between."""
    return torch.mul(products, factor, out=torch.empty_like(products, dtype=dtype))


class ContrastiveLoss(nn.Module):
    """The exact loss of the global batch, in place of OpenCLIP's ``ClipLoss`` and ``SigLipLoss``.

    In OpenCLIP's training script ``open_clip_train/main.py``, it replaces the line ``loss = create_loss(args)``:

        loss = ContrastiveLoss("sigmoid" if args.siglip else "softmax")

    The batch is shared by torch.distributed's default group, so neither rank nor world_size has to be passed. Every
    process returns the loss of the global batch, and DDP's average of the gradients is the gradient of that loss. The
    guide ``hf_infcl/loss/README.md`` says which of OpenCLIP's flags give this gradient with OpenCLIP's own losses.

    Args:
        objective: ``"softmax"``, like ClipLoss, or ``"sigmoid"``, like SigLipLoss.
        **options: keyword arguments for every call of `hf_infcl.contrastive_loss`, such as ``strategy``.

    Raises:
        ValueError: when called, in the same cases as `hf_infcl.contrastive_loss`.
    """

    def __init__(self, objective: str = "softmax", **options: Any) -> None:
        super().__init__()
        self.objective, self.options = objective, options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Returns the loss of the global batch, a scalar; with ``output_dict``, ``{"contrastive_loss": loss}``.

        OpenCLIP's training loop requests this dictionary. The features [b, D] are the normalised images and texts of
        this process; they and the scalars are those of `hf_infcl.contrastive_loss`.
        """
        loss = contrastive_loss(
            image_features, text_features, logit_scale, logit_bias, objective=self.objective, **self.options
        )
        return {"contrastive_loss": loss} if output_dict else loss
