"""Counts memory and operations of a model on the meta device, without weights or a GPU; or measures them on one.

To count them, each tower runs on tensors without content, while torch modes record every operation.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
from ...encoders.in_bf16 import compute_in_bf16
from ...encoders.patch_dropout import PatchDropout
from ...optimizers.groups import BY_MUON, roles

ROWS = 64  # pairs of the counted micro-batch
MOST_TOKENS = 77  # the length of captions, even for text towers that accept longer texts


@dataclass(frozen=True)
class Work:
    """Floating point operations for each pair, and operators that the host launches for all pairs at once."""

    flops: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.launches + other.launches)

    def __mul__(self, times: float) -> Work:
        return Work(times * self.flops, times * self.launches)


@dataclass(frozen=True)
class Tower:
    """Memory in bytes, and operations, of a tower with its projection.

    Attributes:
        weight_copies: the bf16 copies of the weights that autocast creates in every forward.
        graph: for each pair, the tensors that a forward keeps for its backward, without those copies.
        peak: for each pair, the maximum during forward and backward, without weights, their copies and gradients.
        forward, again, backward: of the first pass, and of the second, in which a frozen tower does not run again.
    """

    weight_copies: int
    graph: float
    peak: float
    forward: Work
    again: Work
    backward: Work


@dataclass(frozen=True)
class Counts:
    """What is counted of a model.

    Attributes:
        parameters: the number of parameters.
        trained: the number of trained parameters.
        dim: the dimension of the embeddings.
        pixels: the number of values of one image.
        objective: the one that the model was designed for.
        image, text: its towers.
        matrices: rows and columns of each matrix that Muon would update.
    """

    parameters: int
    trained: int
    dim: int
    pixels: int
    objective: str
    image: Tower
    text: Tower
    matrices: tuple[tuple[int, int], ...] = ()

    @property
    def weight_copies(self) -> int:
        return self.image.weight_copies + self.text.weight_copies

    @property
    def graph(self) -> float:
        """`Tower.graph` of both towers together."""
        return self.image.graph + self.text.graph

    @property
    def peak(self) -> float:
        """`Tower.peak` of both towers together: the images run forward before the texts, and backward after them."""
        return max(self.image.peak, self.image.graph + self.text.peak)


@dataclass(frozen=True)
class Setting:
    """What options of a training decide about a micro-batch.

    Attributes:
        freeze, freeze_layers, patch_dropout: as in `InfCLTrainingArguments`.
        text_tokens: the length of captions; by default, the longest that the model reads.
        checkpointing: whether to use gradient checkpointing.
        autocast: whether to compute in bf16, like ``bf16=True``; otherwise in fp32.
        bf16_activations: as in `InfCLTrainingArguments`, in place of autocast.
    """

    freeze: str | None = None
    freeze_layers: int | None = None
    patch_dropout: float | None = None
    text_tokens: int | None = None
    checkpointing: bool = False
    autocast: bool = True
    bf16_activations: bool = False


def count(config: PretrainedConfig, setting: Setting | None = None) -> Counts:
    """Counts a micro-batch of the model that a config describes, by default that of a training without options.

    Raises:
        ValueError: the model is not a dual encoder, has fewer layers or no patches to drop, or its forward needs the
            content of tensors.
    """
    setting, meta = setting or Setting(), torch.device("meta")
    encoder, inputs = _build(config, meta, setting), _example_inputs(config, ROWS, meta, setting)
    model, casts = encoder.model, _Autocast(setting)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)  # as in every micro-batch except the first
    frozen = encoder.frozen_towers()
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
        forward, live = seen.work, seen.live
        copies = casts.forget()
        if trains := embeds.requires_grad:
            embeds.sum().backward()
    tower = Tower(
        weight_copies=copies if trains else 0,
        graph=(live - copies) / ROWS if trains else 0.0,
        peak=(seen.peak - copies) / ROWS,
        forward=forward,
        again=Work() if frozen else forward,
        backward=seen.work + forward * -1,
    )
    return tower, embeds.shape[1]


def _matrices(model: nn.Module) -> Iterator[tuple[int, int]]:
    of_name = dict(model.named_parameters())
    for name, role in roles(model).items():
        if role.name in BY_MUON:
            rows, columns = of_name[name].shape
            yield from [(rows // role.parts, columns)] * role.parts


def measure(
    config: PretrainedConfig, rows: int, device: torch.device, setting: Setting | None = None
) -> tuple[float, int]:
    """Runs two micro-batches forward and backward under autocast with random weights, and measures the second.

    The model is not compiled.

    Returns:
        The seconds, and the peak GPU memory in bytes including the weights and their gradients (0 on a CPU).

    Raises:
        ValueError: the GPU has too little memory.
    """
    on_gpu = device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = 0.0
    try:
        setting = setting or Setting()
        encoder, batch = _build(config, device, setting), _example_inputs(config, rows, device, setting)
        for _ in range(2):
            synchronize()
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16):
                embeds = encoder.embed(encoder.model, batch)
            torch.stack([e.float().sum() for e in embeds if e.requires_grad]).sum().backward()
            del embeds
            synchronize()
            seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"A micro-batch of {rows} does not fit into this machine's {torch.cuda.get_device_name(device)}. Omit "
            "--measure, or plan with the --gpu_memory of this GPU."
        ) from error
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else 0


def _build(config: PretrainedConfig, device: torch.device, setting: Setting) -> DualEncoder:
    """The model of a config as it trains, in fp32 and with random weights."""
    with device:
        model = AutoModel.from_config(config, dtype=torch.float32)
    encoder = DualEncoder(model)
    encoder.freeze(setting.freeze)
    if setting.freeze_layers is not None:
        encoder.freeze_layers(setting.freeze_layers)
    if setting.patch_dropout:
        PatchDropout(encoder, setting.patch_dropout)
    compute_in_bf16(model, wanted=setting.bf16_activations)
    model.train()
    encoder.eval_frozen_parts()
    if setting.checkpointing:
        # The second name is that of transformers before 5.20.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": True, "preserve_rng_state": False})
        for module in model.modules():
            if (checkpoint := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                module._gradient_checkpointing_func = partial(_checkpoint_leaf, checkpoint)
        if setting.freeze_layers is not None:
            encoder.stop_gradients_at_frozen_layers()
    return encoder


def _checkpoint_leaf(
    checkpoint: Callable[..., Tensor], forward: Callable[..., Tensor], hidden: Tensor, *args: object
) -> Tensor:
    """Reentrant checkpointing above frozen layers: without an input that requires a gradient there would be none."""
    return checkpoint(forward, hidden if hidden.requires_grad else hidden.detach().requires_grad_(), *args)


def _example_inputs(config: PretrainedConfig, rows: int, device: torch.device, setting: Setting) -> dict[str, Tensor]:
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
    if (asked := setting.text_tokens) is not None and asked >= longest + (longest > MOST_TOKENS):
        raise ValueError(f"max_text_tokens must be less than the {longest} tokens of the model, got {asked}.")
    tokens = min(longest, asked or MOST_TOKENS)
    return {
        "pixel_values": torch.zeros(rows, channels, height, width, device=device),
        "input_ids": torch.zeros(rows, tokens, dtype=torch.long, device=device),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.long, device=device),
    }


class _Autocast(TorchFunctionMode):
    """Autocast, or what ``bf16_activations`` casts, and a GPU's fused attention: none exists on the meta device."""

    LOW = frozenset(
        (F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.baddbmm, torch.addmm, Tensor.matmul)
    )
    FULL = frozenset((F.layer_norm, F.softmax, torch.softmax, Tensor.softmax, torch.norm, Tensor.norm))

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._dtype = torch.bfloat16 if setting.autocast else torch.float32
        self._in_bf16 = setting.bf16_activations
        self._copies: dict[int, Tensor] = {}  # by the id of the weight; made once in a forward

    def forget(self) -> int:
        """Drops the copies of weights at the end of a forward; its graph may keep them. Returns their bytes."""
        size = sum(copy.nbytes for copy in self._copies.values())
        self._copies.clear()
        return size

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            query, key, value = (self._cast(tensor, self._dtype) for tensor in args[:3])
            options = kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False)
            attend = torch.ops.aten._scaled_dot_product_efficient_attention
            return attend(query, key, value, None, True, *options, scale=kwargs.get("scale"))[0]
        if self._in_bf16:
            args, kwargs = tree_map(lambda value: self._cast(value, torch.bfloat16), (args, kwargs))
        elif function in self.LOW or function in self.FULL:
            dtype = self._dtype if function in self.LOW else torch.float32
            args = [self._cast(value, dtype) for value in args]
            kwargs = {name: self._cast(value, dtype) for name, value in kwargs.items()}
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
        self.work = Work()
        self.live = self.peak = 0

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
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
