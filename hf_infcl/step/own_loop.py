"""One loss over several micro-batches, with its exact gradient, for a training loop without a Trainer."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..refusals import check_tokens
from .grad_cache import CachedWindow, Features, MicroBatchT
from .wrappers import is_compiled, make_wrapper

# What data collators give for the loss. Models of transformers ignore inputs that they do not know.
_OF_LOSS = ("pair_ids", "caption_image", "labels")


def cached_backward(
    model: nn.Module,
    micro_batches: Sequence[MicroBatchT],
    encode: Callable[[MicroBatchT], Features],
    loss: Callable[..., Tensor],
    parameters: Sequence[Tensor] = (),
    *,
    retain_graphs: int = 1,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Tensor:
    """Adds the gradient of one loss over a window of micro-batches to the parameters' ``grad``.

    Memory holds the activations of ``retain_graphs`` micro-batches, and the other micro-batches are encoded twice
    (GradCache, arXiv 2101.06983; see `hf_infcl.step.grad_cache`). Dropout draws the same masks in both passes.
    Under DDP, the gradients are exchanged once, in the last backward. With `hf_infcl.contrastive_loss` as the loss, the
    gradient equals that of one process that holds the windows of all processes.

        def encode(batch):
            outputs = ddp(**batch)
            return outputs.image_embeds, outputs.text_embeds

        def loss(images, texts, logit_scale):
            return contrastive_loss(images, texts, logit_scale.exp())

        value = cached_backward(ddp, micro_batches, encode, loss, [ddp.module.logit_scale])
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: the module that ``encode`` calls, either unwrapped or in DistributedDataParallel; it may be compiled.
        micro_batches: the window, at least one micro-batch; the same number on every process.
        encode: maps a micro-batch to its features, each [rows, ...], by calling ``model``. For mixed precision, it has
            to enter autocast itself. What the micro-batch has for the loss, such as ``pair_ids``, may be one of them.
        loss: ``loss(*features, *parameters)`` maps the features of the whole window, each [all rows, ...], and the
            parameters to a scalar.
        parameters: the parameters of ``model`` that the loss depends on, such as logit_scale and logit_bias.
        retain_graphs: the number of micro-batches whose autograd graph is kept, which saves their second forward.
        backward: runs the backward of a scalar, for example ``accelerator.backward``, or with a gradient scaler
            ``lambda scalar: scaler.scale(scalar).backward()``.

    Returns:
        The loss, detached.

    Raises:
        ValueError: there is no micro-batch; one has ``input_ids`` without an embedding in the model, or ``pair_ids``,
            ``caption_image`` or ``labels`` that the loss does not get as a feature; the model is in a wrapper other
            than DDP; the loss depends on a tensor that requires a gradient and is not among
            ``parameters``; ``backward`` belongs to an `Accelerator` that divides
            by its gradient_accumulation_steps; under DDP, a parameter gets no gradient.
        RuntimeError: ``backward`` runs with ``create_graph=True``: the window's gradient has no derivative.
    """
    if not micro_batches:
        raise ValueError("cached_backward needs at least one micro-batch, got none.")
    wrapper = make_wrapper(model, without_fsdp="cached_backward")
    _check_tokens(wrapper.unwrapped, micro_batches)
    divisor = getattr(getattr(backward, "__self__", None), "gradient_accumulation_steps", 1)  # of an Accelerator
    if divisor != 1:
        raise ValueError(
            f"accelerator.backward divides by the Accelerator's gradient_accumulation_steps, which is {divisor}, but "
            "all micro-batches of a window share one loss. Create the Accelerator without gradient_accumulation_steps."
        )

    def checked_encode(batch: MicroBatchT) -> Features:
        features = encode(batch)
        given = batch if isinstance(batch, Mapping) else {}
        if lost := [name for name in _OF_LOSS if name in given and not any(f is given[name] for f in features)]:
            raise ValueError(
                f"The micro-batches have {' and '.join(lost)}, which the loss does not get, and which the model "
                "ignores. Take them out, batch.pop(...), and let the loss use them, or return them from `encode` as "
                "features for it."
            )
        return features

    def checked_loss(features: Features, copies: tuple[Tensor, ...]) -> Tensor:
        value = loss(*features, *copies)
        known = set(map(id, (*features, *copies)))
        for leaf in _leaves(value):
            if id(leaf) not in known:
                raise ValueError(
                    f"The loss depends on a tensor of shape {list(leaf.shape)} that requires a gradient and is neither "
                    "a feature nor one of the parameters, so it would get none. Pass it in `parameters` for the loss."
                )
        return value

    count = len(micro_batches)
    window = CachedWindow(
        checked_encode,
        micro_batches,
        device=next(model.parameters()).device,
        retain=min(retain_graphs, wrapper.most_graphs(count)),
        keep_grad_mode=is_compiled(model),
        buffers=model.buffers(),
    )
    wrapper.begin_window()
    with wrapper.gradient_sync(last=count == 1):
        window.encode()
        window.differentiate(checked_loss, lambda: parameters)
    for index in range(count):
        with wrapper.gradient_sync(last=index == count - 1):
            surrogate = window.surrogate(index)
            if surrogate is not None:
                backward(surrogate)
    wrapper.check_gradients()
    return window.loss


def _check_tokens(model: nn.Module, micro_batches: Sequence[object]) -> None:
    """Checks all tokens at once; only the configs of transformers' models state the number of token embeddings."""
    vocabulary = getattr(getattr(getattr(model, "config", None), "text_config", None), "vocab_size", None)
    batches = [batch for batch in micro_batches if isinstance(batch, Mapping)]
    tokens = [batch["input_ids"].flatten() for batch in batches if "input_ids" in batch]
    if vocabulary is not None and tokens:
        check_tokens(torch.cat(tokens), vocabulary, "A micro-batch has")


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """The leaves of a scalar's autograd graph."""
    pending, seen = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:  # of an AccumulateGrad
            yield leaf
        pending += [function for function, _ in node.next_functions]
