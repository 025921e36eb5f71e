"""Counts memory and operations of a model on the meta device, without weights or a GPU, or measures a micro-batch.

For a count each tower runs on tensors without content, while torch modes record every operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import flop_registry
from transformers import AutoModel, PretrainedConfig

from ...conversion.models import load_config
from ...encoders.dual_encoder import DualEncoder
from ...encoders.image_size import config_for_images
from ...encoders.in_bf16 import is_in_bf16
from ...optimizers.groups import BY_MUON, roles
from .costs import EFFECTS, Bytes, Counts, Tower, Work

FEW, MANY = 64, 256  # pairs of the counted micro-batches
MOST_TOKENS = 77  # the length of captions, even for text towers that accept longer texts
Args = Sequence[object]
Kwargs = Mapping[str, object]


def count(config: PretrainedConfig, *, autocast: bool = True, **options: Any) -> Counts:
    """Counts the model that a config describes, as it trains with these options, see `micro_batch`.

    Without ``autocast``, which stands for ``bf16=True``, it computes in fp32.

    Raises:
        ValueError: the model is not a dual encoder, cannot train with the options, or its forward needs the content of
            tensors.
    """
    encoder, inputs = micro_batch(config, MANY, torch.device("meta"), **options)
    model, dtype = encoder.model, torch.bfloat16 if autocast else torch.float32
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)  # as in every micro-batch except the first
    try:
        dim, phases = _run(encoder, inputs, dtype)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"A {type(model).__name__} cannot be counted without its weights: {type(error).__name__}: {error}"
        ) from error
    images, texts, end, of_texts, of_images = phases
    parameters = dict(model.named_parameters())
    fused = [(role.parts, *parameters[name].shape) for name, role in roles(model).items() if role.name in BY_MUON]
    return Counts(
        parameters=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for p in parameters.values() if p.requires_grad),
        dim=dim,
        pixels=inputs["pixel_values"][0].numel(),
        objective=encoder.objective,
        image=_tower(images, of_texts.left, of_images),
        text=_tower(texts, end.left, of_texts),
        peaks=tuple(phase.peak for phase in phases),
        matrices=tuple((rows // parts, columns) for parts, rows, columns in fused for _ in range(parts)),
        teachers=tuple(map(_count_teacher, options.get("teacher") or ())),
    )


class _Phase(NamedTuple):
    """A part of a micro-batch."""

    work: Work
    peak: Bytes
    left: Bytes  # in use at its end


def _run(encoder: DualEncoder, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[int, list[_Phase]]:
    """Runs micro-batches of `FEW` and of `MANY` pairs, between which memory grows in proportion.

    Returns:
        The dimensions of the embeddings, and the phases: forwards of images and texts, the end of autocast, which
        drops copies of weights that no graph keeps, and backwards of texts and images.
    """
    runs = []
    for pairs in (FEW, MANY):
        batch, embeds, phases = {name: values[:pairs] for name, values in inputs.items()}, [], []
        with _Operations(pairs) as seen:
            with _Autocast(dtype, in_bf16=is_in_bf16(encoder.model)):
                for encode in (encoder.encode_images, partial(encoder.encode_texts, checked=True)):
                    embeds.append(encode(batch))
                    phases.append(seen.phase())
            phases.append(seen.phase())
            dim = embeds[0].shape[1]
            while embeds:
                if (last := embeds.pop()).requires_grad:
                    last.sum().backward()
                del last
                phases.append(seen.phase())
        runs.append(phases)
    return dim, [
        _Phase(work, *(Bytes.through((FEW, one), (MANY, other)) for one, other in zip(few, many, strict=True)))
        for (_, *few), (work, *many) in zip(*runs, strict=True)
    ]


def _tower(forward: _Phase, before: Bytes, backward: _Phase) -> Tower:
    """The tower with these phases. Its graph is what its backward frees of the bytes before it."""
    if backward.work == Work():
        return Tower(forward=forward.work)
    return Tower(before + backward.left * -1, forward.work, forward.work, backward.work)


@cache
def _count_teacher(name: str) -> Counts:
    try:
        return count(load_config(name))
    except ValueError as error:
        raise ValueError(f"The teacher {name} cannot be planned. {error}") from error


def measure(
    config: PretrainedConfig, rows: int, device: torch.device, *, autocast: bool = True, **options: object
) -> tuple[float, int]:
    """Runs a micro-batch forward and backward, after others that are not measured; arguments as for `count`.

    Returns:
        The seconds, and the peak GPU memory in bytes including the weights and their gradients (0 on a CPU).

    Raises:
        ValueError: there is no GPU, or it has too little memory.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU, or --use_cpu. Omit it to predict from the config alone.")
    encoder, batch = micro_batch(config, rows, device, **options)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            embeds = encoder.embed(encoder.model, batch)
        torch.stack([e.float().sum() for e in embeds if e.requires_grad]).sum().backward()

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    if on_gpu := device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        seconds = timer.timeit(1).mean
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {rows} does not fit into this machine's {torch.cuda.get_device_name(device)}. Omit "
            "--measure, or plan with the --gpu_memory of this GPU."
        ) from error
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else 0


def micro_batch(
    config: PretrainedConfig, rows: int, device: torch.device, **options: Any
) -> tuple[DualEncoder, dict[str, Tensor]]:
    """A model and a micro-batch of its last steps: black images, and captions of full length of token 0.

    The model has random weights in fp32. It is as it trains with these options, of which those change it that do so in
    `EFFECTS`, ``image_size`` and ``max_text_tokens``; others are ignored.
    """
    config = config_for_images(config, options.get("image_size"))
    vision = config.vision_config
    if not hasattr(vision, "image_size"):
        raise ValueError(
            f"Models of type {config.model_type} have no image size, so no micro-batch can be planned. Train for a few "
            "steps instead: the log shows the peak memory and the images per second."
        )
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    longest = getattr(config.text_config, "max_position_embeddings", MOST_TOKENS)
    tokens = min(longest, options.get("max_text_tokens") or MOST_TOKENS)
    with device:
        encoder = DualEncoder(AutoModel.from_config(config, dtype=torch.float32).train())
        inputs = {
            "pixel_values": torch.zeros(rows, getattr(vision, "num_channels", 3), height, width),
            "input_ids": torch.zeros(rows, tokens, dtype=torch.long),
            "attention_mask": torch.ones(rows, tokens, dtype=torch.long),
        }
    encoder.freeze(None)  # what no embedding depends on
    for name, effect in EFFECTS.items():
        value = None if name == "patch_dropout" and options.get("full_tokens_last") else options.get(name)
        if effect.model is not None and value is not None and value is not False:
            effect.model(encoder, value)
    encoder.eval_frozen_parts()
    return encoder, inputs


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

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._copies.clear()

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

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self._pairs, self._work = pairs, Work()
        self._live = self._peak = 0

    def phase(self) -> tuple[Work, int, int]:
        """Work and peak bytes since the last call, and the bytes in use."""
        found = self._work, self._peak, self._live
        self._work, self._peak = Work(), self._live
        return found

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
                self._live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self._peak = max(self._peak, self._live)
        if not function.is_view:
            flops = flop_registry.get(function._overloadpacket)
            self._work += Work(float(flops(*args, **kwargs, out_val=out)) / self._pairs if flops else 0.0, 1)
        return out

    def _free(self, nbytes: int) -> None:
        self._live -= nbytes
