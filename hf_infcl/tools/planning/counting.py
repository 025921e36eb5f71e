"""Counts memory and operations of one micro-batch on the meta device, without weights or a GPU.

The model runs forward and backward on tensors without content, while torch modes record every operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModel, PretrainedConfig

from ...encoders.dual_encoder import TEXT_INPUTS, DualEncoder
from ...encoders.patch_dropout import PatchDropout
from ...optimizers.groups import BY_MUON, roles

ROWS = 64  # pairs of the counted micro-batch; memory and operations scale in proportion for other sizes
MOST_TOKENS = 77  # the length of captions, even for text towers that accept longer texts


class Operation(NamedTuple):
    """One kernel.

    Attributes:
        flops: its floating point operations.
        nbytes: the bytes that it reads and writes.
        waits: whether the host reads a value from the device before it launches the kernel, and so waits for all
            previous kernels.
    """

    flops: float
    nbytes: float
    waits: bool = False


@dataclass(frozen=True)
class Counts:
    """Memory and operations of a model and of a micro-batch of `ROWS` pairs. Sizes are in bytes.

    Attributes:
        parameters: the number of parameters.
        trained: the number of trained parameters.
        dim: the dimension of the embeddings.
        pixels: the number of values of one image.
        objective: the objective that the model was designed for.
        weight_copies: the bf16 copies of the weights that autocast creates in every forward.
        graph: the tensors that a forward keeps for its backward, including the copies of the weights.
        peak: the maximum memory during forward and backward, without weights and gradients.
        forward: the operations of the first pass.
        again: the operations of the second pass's forward, which skips the frozen tower.
        backward: the operations of the backward.
        matrices: rows and columns of each matrix that Muon would update.
        texts: what ``graph``, ``forward`` and ``backward`` contain for the texts; the graph without copies of weights.
    """

    parameters: int
    trained: int
    dim: int
    pixels: int
    objective: str
    weight_copies: int
    graph: int
    peak: int
    forward: tuple[Operation, ...]
    again: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    matrices: tuple[tuple[int, int], ...] = ()
    texts: tuple[int, tuple[Operation, ...], tuple[Operation, ...]] = (0, (), ())


def count(
    config: PretrainedConfig,
    *,
    freeze: str | None = None,
    freeze_layers: int | None = None,
    patch_dropout: float | None = None,
    text_tokens: int | None = None,
    checkpointing: bool = False,
    autocast: bool = True,
) -> Counts:
    """Counts a micro-batch of the model that a config describes.

    Args:
        config: the config of a dual encoder, see `DualEncoder`.
        freeze: the frozen tower, ``"image"`` or ``"text"``.
        freeze_layers: the frozen layers at the beginning of each tower, as in `InfCLTrainingArguments`.
        patch_dropout: the share of the patches that is left out.
        text_tokens: the length of captions; by default, the longest that the model reads.
        checkpointing: whether to use gradient checkpointing.
        autocast: whether to compute in bf16, like ``bf16=True``; otherwise in fp32.

    Raises:
        ValueError: the model is not a dual encoder, has fewer layers or no patches to drop, or its forward needs the
            content of tensors.
    """
    encoder = build(config, torch.device("meta"), freeze, freeze_layers, checkpointing, patch_dropout)
    model = encoder.model
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)  # as in every micro-batch except the first
    inputs = example_inputs(config, text_tokens=text_tokens)
    seen, casts = _Operations(), _Autocast(torch.bfloat16 if autocast else torch.float32)
    frozen: set[int] = set()
    for tower in encoder.frozen_towers().values():
        _record_range(tower, lambda: len(seen.operations), frozen)
    try:
        with seen, casts:
            embeds = encoder.embed(model, inputs)
            products = [(e * torch.ones_like(e)).sum() for e in embeds if e.requires_grad]
            graph, forward = seen.live, len(seen.operations)
            copies = casts.forget()
            torch.stack(products).sum().backward()
        texts = _count_texts(encoder, inputs, _Autocast(torch.bfloat16 if autocast else torch.float32))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"A {type(model).__name__} cannot be counted without its weights: {type(error).__name__}: {error}"
        ) from error
    operations = seen.operations
    return Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        dim=embeds[0].shape[1],
        pixels=inputs["pixel_values"][0].numel(),
        objective=encoder.objective,
        weight_copies=copies,
        graph=graph,
        peak=seen.peak,
        forward=tuple(operations[:forward]),
        again=tuple(operation for i, operation in enumerate(operations[:forward]) if i not in frozen),
        backward=tuple(operations[forward:]),
        matrices=tuple(_matrices(model)),
        texts=texts,
    )


def _count_texts(
    encoder: DualEncoder, inputs: Mapping[str, Tensor], casts: _Autocast
) -> tuple[int, tuple[Operation, ...], tuple[Operation, ...]]:
    """`Counts.texts`; nothing for a frozen tower, which keeps no graph."""
    if "text" in encoder.frozen_towers():
        return 0, (), ()
    seen = _Operations()
    with seen, casts:
        found = encoder.model.get_text_features(**{name: inputs[name] for name in TEXT_INPUTS if name in inputs})
        features = found if isinstance(found, Tensor) else found.pooler_output
        graph, forward = seen.live, len(seen.operations)
        graph -= casts.forget()
        features.sum().backward()
    return graph, tuple(seen.operations[:forward]), tuple(seen.operations[forward:])


def _matrices(model: nn.Module) -> Iterator[tuple[int, int]]:
    of_name = dict(model.named_parameters())
    for name, role in roles(model).items():
        if role.name in BY_MUON:
            rows, columns = of_name[name].shape
            yield from [(rows // role.parts, columns)] * role.parts


def build(
    config: PretrainedConfig,
    device: torch.device,
    freeze: str | None,
    freeze_layers: int | None,
    checkpointing: bool,
    patch_dropout: float | None = None,
) -> DualEncoder:
    """The model of a config as it trains, in fp32 and with random weights; the arguments are as in `count`."""
    with device:
        model = AutoModel.from_config(config, dtype=torch.float32)
    encoder = DualEncoder(model)
    encoder.freeze(freeze)
    if freeze_layers is not None:
        encoder.freeze_layers(freeze_layers)
    if patch_dropout:
        PatchDropout(encoder, patch_dropout)
    model.train()
    encoder.eval_frozen_parts()
    if checkpointing:
        # The second name is that of transformers before 5.20.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": True, "preserve_rng_state": False})
        for module in model.modules():
            if (checkpoint := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                module._gradient_checkpointing_func = partial(_checkpoint_of_leaf, checkpoint)
        if freeze_layers is not None:
            encoder.stop_gradients_at_frozen_layers()
    return encoder


def _checkpoint_of_leaf(checkpoint: Callable[..., Any], forward: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
    """Reentrant checkpointing above frozen layers: without an input that requires a gradient there would be none."""
    return checkpoint(forward, hidden if hidden.requires_grad else hidden.detach().requires_grad_(), *args)


def example_inputs(
    config: Any, rows: int = ROWS, device: str | torch.device = "meta", text_tokens: int | None = None
) -> dict[str, Tensor]:
    """The inputs of a micro-batch: black images, and captions of full length that consist of the token 0."""
    vision = config.vision_config
    if not hasattr(vision, "image_size"):
        raise ValueError(
            f"Models of type {config.model_type} have no image size, so no micro-batch can be planned. Train for a few "
            "steps instead: the log shows the peak memory and the images per second."
        )
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    longest = getattr(config.text_config, "max_position_embeddings", MOST_TOKENS)
    # A model of more positions than usual may have a tokenizer that states fewer, and reads all only if it is told.
    if text_tokens is not None and text_tokens >= longest + (longest > MOST_TOKENS):
        raise ValueError(f"max_text_tokens must be less than the {longest} tokens of the model, got {text_tokens}.")
    tokens = min(longest, text_tokens or MOST_TOKENS)
    return {
        "pixel_values": torch.zeros(rows, channels, height, width, device=device),
        "input_ids": torch.zeros(rows, tokens, dtype=torch.long, device=device),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long, device=device),
    }


def _record_range(module: nn.Module, position: Callable[[], int], found: set[int]) -> None:
    """Adds the indices of the operations of a module's forward to a set."""
    begin: list[int] = []
    module.register_forward_pre_hook(lambda *_: begin.append(position()))
    module.register_forward_hook(lambda *_: found.update(range(begin.pop(), position())))


class _Autocast(TorchFunctionMode):
    """Autocast and the fused attention of a GPU, neither of which exists on the meta device."""

    LOW = frozenset(
        (F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.baddbmm, torch.addmm, Tensor.matmul)
    )
    FULL = frozenset((F.layer_norm, F.softmax, torch.softmax, Tensor.softmax, torch.norm, Tensor.norm))

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._copies: dict[int, Tensor] = {}  # by the id of the weight; made once in a forward

    def forget(self) -> int:
        """Drops the copies of weights at the end of a forward; its graph may keep them. Returns their bytes."""
        size = sum(copy.nbytes for copy in self._copies.values())
        self._copies.clear()
        return size

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            query, key, value = (self._cast(tensor, self._dtype) for tensor in args[:3])
            options = kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False)
            attend = torch.ops.aten._scaled_dot_product_efficient_attention
            return attend(query, key, value, None, True, *options, scale=kwargs.get("scale"))[0]
        if function in self.LOW or function in self.FULL:
            dtype = self._dtype if function in self.LOW else torch.float32
            args = [self._cast(value, dtype) for value in args]
            kwargs = {name: self._cast(value, dtype) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(dtype)
        if id(value) not in self._copies:
            self._copies[id(value)] = value.to(dtype)
        return self._copies[id(value)]


class _Operations(TorchDispatchMode):
    """Records all operations, and tracks the bytes of the tensors that they create while these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.live = self.peak = 0
        self._waits = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            self._waits = True
            return True  # the models ask whether all tokens are to be attended to
        out = function(*args, **kwargs)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in read}
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        if not function.is_view:
            flops = flop_registry.get(function._overloadpacket)
            self.operations.append(
                Operation(
                    float(flops(*args, **kwargs, out_val=out)) if flops else 0.0,
                    float(sum(t.nbytes for t in (*read, *written))),
                    self._waits,
                )
            )
            self._waits = False
        return out

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes
