"""One exact loss in training loops without an `InfCLTrainer`: one's own, and those of sentence-transformers."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..loss import contrastive_loss
from ..refusals import check_tokens
from .grad_cache import CachedWindow, Features, GraphBudget, MicroBatchT
from .wrappers import DDP, Wrapper, make_wrapper

# ---- A loop of one's own ----

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
    window = _encoded(wrapper, checked_encode, micro_batches, min(retain_graphs, wrapper.most_graphs(count)))
    window.differentiate(checked_loss, lambda: parameters)
    for index in range(count):
        with wrapper.gradient_sync(last=index == count - 1):
            if (surrogate := window.surrogate(index)) is not None:
                backward(surrogate)
    wrapper.check_gradients()
    return window.loss


def _encoded(
    wrapper: Wrapper, encode: Callable[[MicroBatchT], Features], micro_batches: Sequence[MicroBatchT], retain: int
) -> CachedWindow[MicroBatchT]:
    """A window after its first pass."""
    window = CachedWindow(
        encode,
        micro_batches,
        device=next(wrapper.model.parameters()).device,
        retain=retain,
        keep_grad_mode=wrapper.is_compiled,
        buffers=wrapper.model.buffers(),
    )
    wrapper.begin_window()
    with wrapper.gradient_sync(last=len(micro_batches) == 1):
        window.encode()
    return window


def _check_tokens(model: nn.Module, micro_batches: Sequence[object]) -> None:
    """Checks all tokens at once; only the configs of transformers' models state the number of token embeddings."""
    vocabulary = getattr(getattr(getattr(model, "config", None), "text_config", None), "vocab_size", None)
    tokens = [b["input_ids"].flatten() for b in micro_batches if isinstance(b, Mapping) and "input_ids" in b]
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


# ---- The trainer of sentence-transformers ----

# Only inputs of these names are known to be [rows, tokens], so that rows may be sorted and their padding cut off.
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
_NO_TENSORS = ("modality", "task", "prompt_length")
_POSITIONS_FROM_MASK = ("biogpt", "opt")  # these count positions themselves, so cut padding does not move their tokens
_BOTH = ("query_to_doc", "doc_to_query")
_COSINE, _DOT = ("cos_sim", "pytorch_cos_sim"), ("dot_score",)

# A part of the batch: the places of its rows among those of all columns, one after the other, [rows] int64; its inputs.
Part = tuple[Tensor, dict[str, Any]]


class ExactContrastiveLoss(nn.Module):
    """InfoNCE over the rows of all processes, for `SentenceTransformerTrainer` and its own training loops.

    It takes the place of `CachedMultipleNegativesRankingLoss` with ``gather_across_devices=True``: each anchor has to
    find its positive among the positives and negatives of all rows of all processes. The gradient is that of one
    process that encodes the whole batch at once (GradCache, arXiv 2101.06983, with the loss of `contrastive_loss`,
    which never stores the scores); processes may have different numbers of rows.

    The batch is the trainer's. Inside, the rows of a text column are sorted by length, padded no further than the
    longest of their mini-batch, and encoded in mini-batches, of which some keep their graph for the backward. None of
    this changes the loss or the gradients, apart from the masks that dropout draws.

    Args:
        model: a `SentenceTransformer`; its trainer puts the wrapped model in its place.
        scale: the multiplier of the similarities, 1 / temperature.
        similarity_fct: `util.cos_sim`, the default, or `util.dot_score`.
        mini_batch_size: the rows of a mini-batch; by default as many as ``mini_batch_num_tokens`` allow.
        mini_batch_num_tokens: the tokens of a mini-batch, padding included; for other inputs than text, 64 are counted
            for each row.
        retain_graphs: the mini-batches whose graph is kept, which saves their second forward: a number, or "auto" for
            as many as fit into the memory of the GPU.
        directions: ``("query_to_doc",)``, or with ``"doc_to_query"`` as well and ``partition_mode="per_direction"`` the
            mean of both cross entropies.
        partition_mode: as in sentence-transformers; it makes no difference for one direction.
        labels_are_ids: rows with equal labels show the same thing, so that their positives are not each other's
            negatives. Labels come from a column of the name "label".
        strategy, backend: see `hf_infcl.contrastive_loss`.

    Raises:
        ValueError: for an argument that it does not know, in the constructor; in the call for columns of different
            lengths, a text without a token, a model without "sentence_embedding", FSDP, DeepSpeed, a static graph of
            DDP or an AdaptiveLayerLoss around it.
        RuntimeError: a second backward through the same loss.
    """

    uses_gradient_cache = True  # so that `MatryoshkaLoss` shortens the embeddings that `calculate_loss` receives

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[..., Tensor] | None = None,
        mini_batch_size: int | None = None,
        mini_batch_num_tokens: int = 16_384,
        retain_graphs: int | str = 1,
        *,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        labels_are_ids: bool = False,
        strategy: str = "ring",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        name = _COSINE[0] if similarity_fct is None else getattr(similarity_fct, "__name__", repr(similarity_fct))
        if name not in (*_COSINE, *_DOT):
            raise ValueError(f"similarity_fct must be util.cos_sim or util.dot_score, got {name}.")
        if set(directions) not in ({_BOTH[0]}, set(_BOTH)):
            raise ValueError(f"directions must be {_BOTH[:1]} or {_BOTH}, got {tuple(directions)}.")
        if len(directions) == 2 and partition_mode != "per_direction":
            raise ValueError(
                f"Both directions need partition_mode='per_direction', a softmax for each, got {partition_mode!r}."
            )
        for argument, value in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", mini_batch_num_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{argument} must be at least 1, got {value}.")
        if retain_graphs != "auto" and not (isinstance(retain_graphs, int) and retain_graphs >= 1):
            raise ValueError(f"retain_graphs must be a number of at least 1 or 'auto', got {retain_graphs!r}.")
        if not scale > 0:
            raise ValueError(f"scale must be more than 0, got {scale}.")
        self.model, self.scale, self.normalizes = model, scale, name in _COSINE
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens
        self.retain_graphs, self.directions, self.partition_mode = retain_graphs, tuple(directions), partition_mode
        self.labels_are_ids, self.strategy, self.backend = labels_are_ids, strategy, backend
        self._budget: GraphBudget | None = None

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that sentence-transformers writes into the model card."""
        names = ("scale", "mini_batch_size", "mini_batch_num_tokens", "directions", "partition_mode", "labels_are_ids")
        return {"similarity_fct": (_COSINE if self.normalizes else _DOT)[0], **{n: getattr(self, n) for n in names}}

    citation = """
@misc{cheng2024breaking,
    title={Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss},
    author={Zesen Cheng and Hang Zhang and Kehan Li and others},
    year={2024},
    eprint={2410.17243},
    archivePrefix={arXiv}
}
"""

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the embeddings, [rows, D] of each mini-batch of each column: anchors, positives, negatives.

        With ``with_backward`` it also runs its backward, and returns the detached loss.
        """
        columns = (torch.cat(column) for column in reps)
        anchors, positives, *negatives = (t if t.dtype == torch.float64 else t.float() for t in columns)
        with torch.autocast(anchors.device.type, enabled=False):
            if self.normalizes:
                anchors, positives, *negatives = (F.normalize(t, dim=-1) for t in (anchors, positives, *negatives))
            value = contrastive_loss(
                anchors,
                positives,
                self.scale,
                pair_ids=labels.to(anchors.device, torch.int64) if self.labels_are_ids and labels is not None else None,
                negative_texts=torch.cat(negatives) if negatives else None,
                directions="both" if len(self.directions) == 2 else "image_to_text",
                strategy=self.strategy,
                backend=self.backend,
            )
            if with_backward:
                value.backward()
        return value.detach() if with_backward else value

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of the columns, whose backward adds the gradients of the model's parameters."""
        columns = list(sentence_features)
        wrapper = make_wrapper(self.model, without_fsdp="ExactContrastiveLoss")
        rows = self._check(wrapper, columns, labels)
        parts = [part for number, one in enumerate(columns) for part in self._parts(wrapper, number, one, rows)]
        order = torch.cat([places for places, _ in parts])
        device = next(iter(wrapper.model.parameters())).device
        autocast = partial(torch.autocast, device.type, torch.get_autocast_dtype(device.type))
        encode = partial(self._encode, partial(autocast, enabled=torch.is_autocast_enabled(device.type)))
        if not torch.is_grad_enabled():
            features = torch.cat([encode(part)[0] for part in parts])
            return self.calculate_loss(_columns(features, order, rows), labels)
        budget = self._budget = self._budget or GraphBudget(self.retain_graphs, device, alike=False)
        # An autocast around all forwards keeps the weights that they have rounded, although it rounds nothing itself.
        with autocast(enabled=False):
            window = _encoded(wrapper, encode, parts, budget.graphs(wrapper.most_graphs(len(parts))))
        loss = window.differentiate(lambda features, _: self._loss(features[0], order, rows, labels))
        leaf = loss.detach().requires_grad_()
        pending = [window]  # until the backward

        def backward(gradient: Tensor) -> None:
            if not pending:
                raise RuntimeError(
                    "The backward of an ExactContrastiveLoss runs once: compute the loss again for another."
                )
            window = pending.pop()
            with torch.enable_grad():
                for index in range(len(parts)):
                    with wrapper.gradient_sync(last=index == len(parts) - 1):
                        if (surrogate := window.surrogate(index)) is not None:
                            (surrogate * gradient).backward()
                # Where the last mini-batch trains nothing, no backward has exchanged the gradients.
                if wrapper.synchronises and surrogate is None:
                    self._exchange(encode, parts)
            budget.end_window()

        leaf.register_hook(backward)
        return leaf

    def _loss(self, features: Tensor, order: Tensor, rows: int, labels: Tensor | None) -> Tensor:
        """A scalar with the value and the gradient of `calculate_loss`, which a `MatryoshkaLoss` may have replaced."""
        columns = [[t.detach().requires_grad_() for t in column] for column in _columns(features, order, rows)]
        value = self.calculate_loss(columns, labels, with_backward=True)
        gradient = torch.cat([t.grad if t.grad is not None else torch.zeros_like(t) for (t,) in columns])
        return value.detach() + ((features - features.detach()) * gradient[order.to(features.device)]).sum()

    def _exchange(self, encode: Callable[[Part], tuple[Tensor]], parts: list[Part]) -> None:
        """Encodes the last mini-batch that trains again, for a backward that adds nothing but the exchange."""
        for part in reversed(parts[:-1]):
            (features,) = encode(part)
            if features.requires_grad:
                (features * 0).sum().backward()
                return

    def _encode(self, autocast: Callable[[], Any], part: Part) -> tuple[Tensor]:
        if torch.is_grad_enabled():
            torch.clear_autocast_cache()  # weights that were rounded without a graph would get no gradient
        with autocast(), ExitStack() as after:
            # Without cuDNN, whose attention plans a second for each new shape: texts have other lengths in every batch.
            after.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
            torch.backends.cuda.enable_cudnn_sdp(False)
            outputs = self.model(dict(part[1]))  # modules write into the dictionary that they get
        if "sentence_embedding" not in outputs:
            raise ValueError(
                f"The model returns no 'sentence_embedding', but {', '.join(outputs)}: add a Pooling module to it."
            )
        embeds = outputs["sentence_embedding"]
        return (embeds.float() if embeds.dtype == torch.float16 else embeds,)

    def _check(self, wrapper: Wrapper, columns: list[dict[str, Any]], labels: Tensor | None) -> int:
        """The number of rows of each column."""
        from sentence_transformers.base.losses.gradcache import _get_batch_size

        if isinstance(wrapper, DDP) and wrapper.model.static_graph:
            raise ValueError(
                "ExactContrastiveLoss encodes several mini-batches in a step, so the graph of DDP is not static: leave "
                "ddp_static_graph off."
            )
        first = next(wrapper.unwrapped.children(), None)
        if type(getattr(first, "forward", None)).__name__ == "TransformerDecorator":
            raise ValueError(
                "AdaptiveLayerLoss and Matryoshka2dLoss read all layers of one forward, but ExactContrastiveLoss runs "
                "several: put MatryoshkaLoss around it, or another loss into theirs."
            )
        if len(columns) < 2:
            raise ValueError(f"The data need two columns at least, anchors and positives, got {len(columns)}.")
        counts = [int(_get_batch_size(features)) for features in columns]
        if len(set(counts)) > 1:
            raise ValueError(f"All columns need the same number of rows, got {counts}.")
        if self.labels_are_ids and (labels is None or labels.shape != (counts[0],) or labels.is_floating_point()):
            got = "none" if labels is None else f"{list(labels.shape)} {labels.dtype}"
            raise ValueError(f"labels_are_ids needs one integer for each of {counts[0]} rows, got {got}.")
        return counts[0]

    def _parts(self, wrapper: Wrapper, column: int, features: dict[str, Any], rows: int) -> Iterator[Part]:
        """The mini-batches of a column, in an order of their own."""
        size, tokens = self.mini_batch_size, self.mini_batch_num_tokens
        tensors = [name for name, value in features.items() if isinstance(value, Tensor)]
        mask = features.get("attention_mask")
        is_text = {*tensors} <= {*_OF_TOKENS, *_NO_TENSORS} and isinstance(mask, Tensor) and mask.ndim == 2
        if not is_text or "cu_seq_lens_q" in features:
            from sentence_transformers.base.losses.gradcache import _create_minibatch

            for chosen in torch.arange(rows).split(size or max(1, tokens // 64)):
                yield column * rows + chosen, _create_minibatch(features, int(chosen[0]), int(chosen[-1]) + 1)
            return
        assert mask is not None
        width, of_rows = mask.shape[1], mask.cpu()
        if len(empty := (of_rows.sum(1) == 0).nonzero()):
            raise ValueError(f"Row {int(empty[0])} of column {column} is a text without a token: leave it out.")
        places = torch.arange(width)
        ends = torch.where(of_rows.bool(), places + 1, 0).amax(1)
        model = getattr(wrapper.unwrapped[0], "auto_model", None)  # of transformers; None behind a Router, of several
        counts_mask = model is not None and model.config.model_type in _POSITIONS_FROM_MASK
        takes_positions = model is not None and "position_ids" in inspect.signature(model.forward).parameters
        # Padding before a text may go if the positions of its tokens stay what they were.
        may_trim = "prompt_length" not in features and (counts_mask or takes_positions)
        starts = torch.where(of_rows.bool(), places, width).amin(1) if may_trim else torch.zeros_like(ends)
        extent = ends - starts
        by_length = extent.argsort(descending=True, stable=True)
        first = 0
        while first < rows:
            longest = int(extent[by_length[first]])
            chosen = by_length[first : first + (size or max(1, tokens // longest))]
            first += len(chosen)
            start, stop = int(starts[chosen].min()), int(ends[chosen].max())
            inputs = {
                name: value[chosen.to(value.device), start:stop] if name in _OF_TOKENS else value
                for name, value in features.items()
            }
            if start and not counts_mask:
                inputs["position_ids"] = torch.arange(start, stop, device=mask.device).expand(len(chosen), -1)
            yield column * rows + chosen, inputs


def _columns(features: Tensor, order: Tensor, rows: int) -> list[list[Tensor]]:
    """The embeddings of each column, [rows, D], from those of all mini-batches one after another."""
    return [[column] for column in features[order.argsort().to(features.device)].split(rows)]
