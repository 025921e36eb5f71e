"""Counts memory and operations of a dual encoder on the meta device, without weights or a GPU.

Each tower runs on tensors without content, while torch modes record every operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from transformers import AutoModel, PretrainedConfig

from ...encoders.dual_encoder import DualEncoder
from ...encoders.in_bf16 import is_in_bf16
from ...optimizers.groups import BY_MUON, roles
from .counts import NOTHING, Counts, Tower, Work

ROWS = 64  # pairs of the counted micro-batch
MOST_TOKENS = 77  # the length of captions, even for text towers that accept longer texts
Args = Sequence[object]
Kwargs = Mapping[str, object]


def new_encoder(
    config: PretrainedConfig, rows: int, device: torch.device, max_text_tokens: int | None = None
) -> tuple[DualEncoder, dict[str, Tensor]]:
    """A model in fp32 with random weights, and a micro-batch: black images, and captions of full length of token 0."""
    vision = config.vision_config
    if not hasattr(vision, "image_size"):
        raise ValueError(
            f"Models of type {config.model_type} have no image size, so no micro-batch can be planned. Train for a few "
            "steps instead: the log shows the peak memory and the images per second."
        )
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    longest = getattr(config.text_config, "max_position_embeddings", MOST_TOKENS)
    tokens = min(longest, max_text_tokens or MOST_TOKENS)
    with device:
        return DualEncoder(AutoModel.from_config(config, dtype=torch.float32).train()), {
            "pixel_values": torch.zeros(rows, getattr(vision, "num_channels", 3), height, width),
            "input_ids": torch.zeros(rows, tokens, dtype=torch.long),
            "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
        }


def count_encoder(encoder: DualEncoder, inputs: Mapping[str, Tensor], *, autocast: bool = True) -> Counts:
    """Counts a model on the meta device with a micro-batch of `ROWS` pairs; arguments and errors as of `count`."""
    model, frozen = encoder.model, encoder.frozen_towers()
    casts = _Autocast(torch.bfloat16 if autocast else torch.float32, in_bf16=is_in_bf16(model))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)  # as in every micro-batch except the first
    try:
        image, dim = _count_tower(lambda: encoder.encode_images(inputs), casts, frozen="image" in frozen)
        text, _ = _count_tower(lambda: encoder.encode_texts(inputs, checked=True), casts, frozen="text" in frozen)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"A {type(model).__name__} cannot be counted without its weights: {type(error).__name__}: {error}"
        ) from error
    return Counts(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        dim=dim,
        pixels=inputs["pixel_values"][0].numel(),
        objective=encoder.objective,
        image=image,
        text=text,
        matrices=tuple(_matrices(model)),
    )


def _count_tower(encode: Callable[[], Tensor], casts: _Autocast, *, frozen: bool) -> tuple[Tower, int]:
    """Counts a tower; also returns the dimension of its embeddings."""
    seen = _Operations()
    with seen, casts:
        embeds = encode()
        forward, live, copies = seen.work, seen.live, casts.forget()
        if trains := embeds.requires_grad:
            embeds.sum().backward()
    tower = Tower(
        weight_copies=copies if trains else 0,
        graph=(live - copies) / ROWS if trains else 0.0,
        peak=(seen.peak - copies) / ROWS,
        forward=forward,
        again=NOTHING if frozen else forward,
        backward=seen.work + forward * -1,
    )
    return tower, embeds.shape[1]


def _matrices(model: nn.Module) -> Iterator[tuple[int, int]]:
    of_name = dict(model.named_parameters())
    for name, role in roles(model).items():
        if role.name in BY_MUON:
            rows, columns = of_name[name].shape
            yield from [(rows // role.parts, columns)] * role.parts


class _Autocast(TorchFunctionMode):
    """Autocast, or what ``bf16_activations`` casts, and a GPU's fused attention: none exists on the meta device."""

    LOW = frozenset(
        (F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.baddbmm, torch.addmm, Tensor.matmul)
    )
    FULL = frozenset((F.layer_norm, F.softmax, torch.softmax, Tensor.softmax, torch.norm, Tensor.norm))

    def __init__(self, dtype: torch.dtype, *, in_bf16: bool) -> None:
        super().__init__()
        self._dtype, self._in_bf16 = dtype, in_bf16
        self._copies: dict[int, Tensor] = {}  # by the id of the weight; made once in a forward

    def forget(self) -> int:
        """Drops the copies of weights at the end of a forward; its graph may keep them. Returns their bytes."""
        size = sum(copy.nbytes for copy in self._copies.values())
        self._copies.clear()
        return size

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            query, key, value = (self._cast(tensor, self._dtype) for tensor in args[:3])
            options = kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False)
            attend = torch.ops.aten._scaled_dot_product_efficient_attention
            return attend(query, key, value, None, True, *options, scale=kwargs.get("scale"))[0]
        if self._in_bf16 or function in self.LOW or function in self.FULL:
            low = torch.bfloat16 if self._in_bf16 else self._dtype if function in self.LOW else torch.float32
            args, kwargs = tree_map(lambda value: self._cast(value, low), (args, kwargs))
        return function(*args, **kwargs)

    def _cast(self, value: object, dtype: torch.dtype) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(dtype)
        if id(value) not in self._copies:
            self._copies[id(value)] = value.to(dtype)
        return self._copies[id(value)]


class _Operations(TorchDispatchMode):
    """Counts all operations, and tracks the bytes of the tensors that they create while these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.work = NOTHING
        self.live = self.peak = 0

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            return True  # the models ask whether all tokens are to be attended to
        out = function(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        if not function.is_view:
            flops = flop_registry.get(function._overloadpacket)
            self.work += Work(float(flops(*args, **kwargs, out_val=out)) / ROWS if flops else 0.0, 1)
        return out

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes
