"""A common view of the supported model classes: embeddings, temperature, objective and towers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..refusals import check_tokens
from .depth import Place, depths, frozen_begin
from .in_bf16 import errors_in_bf16, is_in_bf16
from .pooling import Pooling, SameEmbeddings
from .tower_outputs import PlaceholderText, embeds_of, part_of, pooled, remembered, return_dict_for


@dataclass(frozen=True)
class ModelType:
    """A type of dual encoder."""

    objective: str = "softmax"  # that its models were designed for
    # The name of the temperature's parameter: "logit_scale", the logarithm of the multiplier, or "temperature", a
    # divisor; and its shape in transformers.
    temperature: str = "logit_scale"
    temperature_shape: tuple[int, ...] = ()
    # The model_type of its vision tower, if that has an embedding for each patch of an image of one size.
    tower_of_one_size: str | None = None
    unused: str | None = None  # a part of the names of parameters on which no embedding depends
    joined: bool = False  # whether its towers come from two checkpoints, of which its temperature says nothing

    def looks_random(self, temperature: float, config: Mapping[str, Any]) -> bool:
        """Whether weights seem random: by this config, random ones begin with this temperature."""
        first = config.get(f"{self.temperature}_init_value", 0.0)  # SigLIP's config has none
        possible = (first, math.log(10)) if self.objective == "sigmoid" else (first,)  # see `initialise_sigmoid`
        return not self.joined and any(abs(temperature - one) < 1e-6 for one in possible)


# The model types of transformers whose logits are a scaled product of one image vector and one text vector.
MODEL_TYPES = {
    "aimv2": ModelType(tower_of_one_size="aimv2_vision_model"),
    "align": ModelType(temperature="temperature", unused="text_model.pooler."),  # its output is not used
    "altclip": ModelType(tower_of_one_size="altclip_vision_model"),
    "blip": ModelType(tower_of_one_size="blip_vision_model", unused=".crossattention."),  # from text to images
    "chinese_clip": ModelType(tower_of_one_size="chinese_clip_vision_model"),
    "clip": ModelType(tower_of_one_size="clip_vision_model"),
    "clipseg": ModelType(),
    "groupvit": ModelType(tower_of_one_size="groupvit_vision_model"),
    "metaclip_2": ModelType(tower_of_one_size="metaclip_2_vision_model"),
    "owlv2": ModelType(tower_of_one_size="owlv2_vision_model"),
    "owlvit": ModelType(tower_of_one_size="owlvit_vision_model"),
    "siglip": ModelType("sigmoid", temperature_shape=(1,), tower_of_one_size="siglip_vision_model"),
    "siglip2": ModelType("sigmoid", temperature_shape=(1,)),
    "tipsv2": ModelType(temperature="temperature", unused=".mask_token"),
    # With any vision tower, such as a ViT or a DINOv2, whose pretraining needs a mask token.
    "vision-text-dual-encoder": ModelType(tower_of_one_size="vit", unused=".mask_token", joined=True),
}
# Other models of transformers that encode two kinds of input, and why they do not fit.
REFUSED = {
    "blip-2": "an image has 32 vectors, of which the loss takes the one nearest to the text, and it has no scale",
    "bridgetower": "its towers see each other, and it has three embeddings and three losses",
    "clap": "it has a scale for each direction, and encodes sounds",
    "clvp": "it encodes speech tokens",
    "flava": "its features are those of all patches, and its contrastive head is in FlavaForPreTraining",
    "pe_audio": "its embeddings are not normalised, and its logit_scale is no logarithm",
    "pe_audio_video": "it has several pairs and scales",
    "pe_video": "its embeddings are not normalised, and its logit_scale is no logarithm",
    "videoprism": "it has no scale",
    "xclip": "its text embeddings depend on the video",
}
OF_ONE_IMAGE_SIZE = {kind.tower_of_one_size for kind in MODEL_TYPES.values() if kind.tower_of_one_size is not None}

# The modules that `freeze` freezes: the tower itself, and its projection if the model has one.
TOWERS = {"image": ("vision_model", "visual_projection"), "text": ("text_model", "text_projection")}

IMAGE_FEATURES = "image_features"  # in a batch, instead of images: the output of a frozen image tower for each
IMAGE_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
NO_TEXTS = "no_texts"  # in a batch whose texts are encoded with those of another one
TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def known_type(model: nn.Module) -> ModelType | None:
    """The type of a dual encoder of transformers or of one's own, or None.

    One's own is a module with ``get_image_features`` and ``get_text_features``, a scalar parameter ``logit_scale`` and,
    if its objective is sigmoid, ``logit_bias``, whose forward returns ``image_embeds`` and ``text_embeds`` of length 1,
    as attributes of an object or in a dict.
    """
    name = getattr(getattr(model, "config", None), "model_type", "")
    base = getattr(model, "get_base_model", lambda: model)()
    needed = ("get_image_features", "get_text_features", "logit_scale")
    if type(base).__module__.startswith("transformers.") or name in MODEL_TYPES:
        return MODEL_TYPES.get(name) if hasattr(model, needed[0]) else None
    if not all(hasattr(model, attribute) for attribute in needed):
        return None
    return ModelType("softmax" if getattr(model, "logit_bias", None) is None else "sigmoid")


def check_type_of_config(config: PretrainedConfig, checkpoint: str) -> None:
    """Raises a ValueError for the config of a model of transformers that is no dual encoder."""
    if type(config).__module__.startswith("transformers.") and config.model_type not in MODEL_TYPES:
        raise _refusal(f"The model of {checkpoint!r}", config.model_type)


def _refusal(what: str, model_type: str | None) -> ValueError:
    reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
    return ValueError(
        f"{what} (model_type {model_type!r}) is not a dual encoder that contrastive training can split into image and "
        f"text embeddings{reason}. Use the full model (such as CLIPModel) of one of the types "
        f"{', '.join(MODEL_TYPES)}, or your own towers in a TwoTowers."
    )


class DualEncoder:
    """A view of a model as two towers, a logit_scale and possibly a logit_bias.

    Args:
        model: a dual encoder of transformers or one's own (see `known_type`), without DDP around it; PEFT adapters
            inside are fine.

    Raises:
        ValueError: the model is not a dual encoder that this package supports, its class has only one tower, or the
            model was split over devices or processes while it was loaded.
    """

    def __init__(self, model: nn.Module, dims: int | None = None) -> None:
        kind = known_type(model)
        if kind is None:
            raise _refusal(type(model).__name__, getattr(getattr(model, "config", None), "model_type", None))
        # Only these three attributes reveal a split, one for each of the options below.
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        sharded = getattr(model, "is_distributed_loading_by_transformers", False)
        if len(devices) > 1 or (getattr(model, "_tp_size", None) or 1) > 1 or sharded:
            raise ValueError(
                f"This {type(model).__name__} was split while it was loaded (device_map, tp_plan or "
                "distributed_config), but every process needs the whole model: the processes share the batch instead. "
                "Load it without these options. To shard its parameters, train with --fsdp."
            )
        self.model: Any = model
        self.dims = dims  # how many of their first dimensions `encode_images` and `encode_texts` return; None for all
        # The model without PEFT adapters around it, whose attributes can be set.
        self.base: Any = getattr(model, "get_base_model", lambda: model)()
        self._kind, self._unused = kind, kind.unused
        self.objective = kind.objective  # that it was designed for
        self.temperature_name, self.stock_temperature_shape = kind.temperature, kind.temperature_shape
        self._return_dict = return_dict_for(self.base)
        self._divides = kind.temperature == "temperature"
        text_tower = self._towers().get("text")
        projection = getattr(model, TOWERS["text"][1], None)
        self._placeholder = None if text_tower is None else PlaceholderText(text_tower, projection)
        self.pooling = Pooling.of_tower(text_tower)
        self._same_embeddings = SameEmbeddings(self.pooling)
        self._ceiling = getattr(model, "max_log_logit_scale", None)  # AIMv2 clamps within its forward

    @property
    def vocabulary(self) -> int | None:
        """The number of token embeddings, if the config names it."""
        return getattr(self._config("text_config"), "vocab_size", None)

    def _config(self, part: str) -> Any:
        """The config of a tower, or None."""
        return getattr(getattr(self.model, "config", None), part, None)

    def check_images(self, batch: Mapping[str, Tensor]) -> None:
        """Raises a ValueError if the image tower has no embeddings for the patches of images of this size."""
        config, pixel_values = self._config("vision_config"), batch.get("pixel_values")
        if config is None or config.model_type not in OF_ONE_IMAGE_SIZE or not isinstance(config.image_size, int):
            return
        if pixel_values is None or pixel_values.ndim != 4:
            return
        size, patch = config.image_size, config.patch_size
        height, width = pixel_values.shape[-2:]
        # What is left over at the edges is no patch.
        if (height // patch, width // patch) != (size // patch, size // patch):
            raise ValueError(
                f"The images of a batch have {height} × {width} pixels, and the model takes {size} × {size}. Load "
                "processor and model from one checkpoint, or train with the image_size that you want."
            )

    def check_texts(self, batch: Mapping[str, Any]) -> None:
        """Raises a ValueError if different texts, also of earlier calls, get one embedding; see `SameEmbeddings`."""
        self._same_embeddings.check(batch["input_ids"], batch.get("attention_mask"))

    @property
    def temperature_parameters(self) -> tuple[nn.Parameter, ...]:
        """The temperature's parameter and, where there is one, the bias's."""
        scale = getattr(self.model, self.temperature_name)
        bias = getattr(self.model, "logit_bias", None)
        return (scale,) if bias is None else (scale, bias)

    def scale_and_bias(self, parameters: Iterable[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """logit_scale, the multiplier, and logit_bias or None, from `temperature_parameters` or copies of them."""
        # Under FSDP a process holds a part of each parameter, but the whole temperature is needed.
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in parameters or self.temperature_parameters)
        scale, *bias = whole
        if self._divides:
            scale = 1 / scale
        elif self._ceiling is not None:
            scale = scale.clamp(0.0, self._ceiling).exp()
        else:
            scale = scale.exp()
        return scale, bias[0] if bias else None

    def looks_random(self) -> bool:
        """Whether the weights seem random by their temperature; collective under FSDP."""
        scale = self.temperature_parameters[0]
        value = (scale.full_tensor() if isinstance(scale, DTensor) else scale).item()
        return self._kind.looks_random(value, vars(self.base.config))

    @torch.no_grad()
    def clamp_temperature(self, maximum: float) -> None:
        """Clamps the temperature's parameter so that the multiplier lies within [1, maximum].

        This is CLIP's rule (arXiv 2103.00020, section 2.5).
        """
        self.temperature_parameters[0].clamp_(*((1 / maximum, 1) if self._divides else (0, math.log(maximum))))

    @torch.no_grad()
    def initialise_sigmoid(self) -> bool:
        """Sets logit_scale to 10 and logit_bias to -10, SigLIP's initial values (arXiv 2303.15343, section 3.3).

        This only happens if both parameters are 0, as in a SigLIP created from a config. Returns whether it happened.
        """
        if self.objective != "sigmoid" or any(bool(p != 0) for p in self.temperature_parameters):
            return False
        scale, bias = self.temperature_parameters
        scale.fill_(math.log(10))
        bias.fill_(-10)
        return True

    def make_temperature_a_vector(self) -> None:
        """Replaces the temperature's parameter by a vector of one element, if it is a scalar."""
        scale = self.temperature_parameters[0]
        if scale.ndim == 0:
            setattr(self.base, self.temperature_name, nn.Parameter(scale.detach().reshape(1), scale.requires_grad))

    def embed(
        self,
        forward: Callable[..., object],
        batch: Mapping[str, Tensor],
        frozen_outputs: dict[str, object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """L2-normalised image and text embeddings, [images, D] and [texts, D], through the whole model's forward.

        Args:
            forward: the model as it is wrapped for training. Calls that bypass the wrapper have neither autocast nor
                DDP's synchronisation of gradients.
            batch: the inputs of one micro-batch; other entries are ignored. Instead of images it may have
                ``image_features`` [images, H], the pooled output of the frozen image tower, which then does not run.
                With ``no_texts`` its text is only a placeholder: 0 text embeddings are returned.
            frozen_outputs: where the outputs of frozen towers for this micro-batch are kept. It is empty in the
                first pass; in the second pass the frozen towers do not run. With None all towers run.

        Raises:
            ValueError: the images have another size than those of the model.
        """
        self.check_images(batch)
        inputs, in_bf16 = _select(batch, IMAGE_INPUTS + TEXT_INPUTS), is_in_bf16(self.model)
        if (features := batch.get(IMAGE_FEATURES)) is not None:
            features = features.bfloat16() if in_bf16 else features
            frozen_outputs = {} if frozen_outputs is None else frozen_outputs
            frozen_outputs["image"] = BaseModelOutputWithPooling(features[:, None], features)
            inputs["pixel_values"] = features  # a forward has to get images, and gives them to the tower only
        no_texts = bool(batch.get(NO_TEXTS))
        placeholder = self._placeholder if no_texts else None
        if placeholder is not None and not placeholder.known():
            names = (*IMAGE_INPUTS, IMAGE_FEATURES, *TEXT_INPUTS)
            row = {name: value[:1] for name, value in _select(batch, names).items()}
            placeholder.learn(self.model, partial(self.embed, forward, row))
        with contextlib.ExitStack() as stack:
            if frozen_outputs is not None:
                for name, tower in self.frozen_towers().items():
                    stack.enter_context(remembered(tower, frozen_outputs, name))
            if placeholder is not None and placeholder.known():
                stack.enter_context(placeholder.instead_of_tower())
            stack.enter_context(errors_in_bf16(self.model))
            outputs = forward(**inputs, **self._return_dict)
        images, texts = embeds_of(outputs, self.base)
        if in_bf16:  # the model has divided by a norm that was rounded
            images, texts = (F.normalize(embeds.float(), dim=-1) for embeds in (images, texts))
        return images, texts[:0] if no_texts else texts

    def image_features(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The pooled output [images, H] of the image tower, before the projection; raises as `embed` does.

        The tower has to return it as those of transformers do, because the forward gets it in such an output.
        """
        self.check_images(batch)
        tower = getattr(self.model, name := TOWERS["image"][0])
        output = tower(**_select(batch, IMAGE_INPUTS), **return_dict_for(tower))
        return pooled(output, tower, name, of_transformers=True)

    def freeze(self, tower: str | None) -> None:
        """Freezes one tower, ``"image"`` or ``"text"``, with its projection (LiT, arXiv 2111.07991), or none.

        Parameters on which no embedding depends are frozen in any case: DDP would wait for their gradients.
        """
        if tower is not None and not hasattr(self.model, TOWERS[tower][0]):
            raise ValueError(
                f"freeze={tower!r} freezes {TOWERS[tower][0]}, which {type(self.model).__name__} does not have. Give "
                "its towers these names, or freeze parameters by requires_grad_(False)."
            )
        for name in () if tower is None else TOWERS[tower]:
            if (module := getattr(self.model, name, None)) is not None:
                module.requires_grad_(False)
        for name, parameter in self.model.named_parameters():
            if self._unused is not None and self._unused in name:
                parameter.requires_grad_(False)

    def places(self) -> dict[nn.Parameter, Place]:
        """Where each parameter of the towers and projections is; the temperature is in none.

        Raises:
            ValueError: a module of one's own does not name its towers.
        """
        places: dict[nn.Parameter, Place] = {}
        for name, (tower_name, projection) in TOWERS.items():
            if (tower := getattr(self.model, tower_name, None)) is None:
                raise ValueError(
                    f"{type(self.base).__name__} has no {tower_name}, so its {name} tower cannot have a rate or frozen "
                    "layers of its own. Name its towers as `TwoTowers` does, or leave these options out."
                )
            depth_of, layers = depths(dict(tower.named_parameters()))
            places |= {p: Place(name, depth_of[n], layers) for n, p in tower.named_parameters()}
            if (module := getattr(self.model, projection, None)) is not None:
                places |= {p: Place(name, layers + 1, layers) for p in module.parameters()}
        return places

    def freeze_layers(self, count: int) -> None:
        """Freezes the first layers of both towers, and the embeddings before them; with 0 these alone.

        Raises:
            ValueError: a tower that trains has fewer layers.
        """
        places = self.places()
        for tower, layers in {place.tower: place.layers for p, place in places.items() if p.requires_grad}.items():
            if count > layers:
                raise ValueError(
                    f"freeze_layers={count}, but the {tower} tower has {layers} layers. Freeze at most as many, or the "
                    f"whole tower with freeze={tower!r}."
                )
        for parameter, place in places.items():
            if place.depth <= count:
                parameter.requires_grad_(False)

    def stop_gradients_at_frozen_layers(self) -> None:
        """Undoes what transformers adds with gradient checkpointing: embeddings whose output requires a gradient.

        Frozen layers would then keep a graph. Only checkpointing with ``use_reentrant=True`` needs such an output.
        """
        if hasattr(self.base, "disable_input_require_grads"):  # of transformers
            self.base.disable_input_require_grads()

    def frozen_towers(self) -> dict[str, nn.Module]:
        """The frozen towers by name, whether or not their projections train."""
        return {name: tower for name, tower in self._towers().items() if _is_frozen(tower)}

    def _towers(self) -> dict[str, nn.Module]:
        """The towers by name. One's own model may give them other names; then none of them can be frozen."""
        return {name: getattr(self.model, names[0]) for name, names in TOWERS.items() if hasattr(self.model, names[0])}

    def frozen_parts(self) -> list[nn.Module]:
        """The frozen towers and projections, and what is frozen up to a layer of a tower that trains."""
        parts = [getattr(self.model, name, None) for names in TOWERS.values() for name in names]
        frozen = [m for m in parts if m is not None and _is_frozen(m)]
        trained = [tower for tower in self._towers().values() if tower not in frozen]
        return frozen + [part for tower in trained for part in frozen_begin(tower)]

    def eval_frozen_parts(self) -> None:
        """Sets what is frozen to evaluation mode: without dropout its output is the same in both passes."""
        for part in self.frozen_parts():
            part.eval()

    def encode_images(self, batch: Mapping[str, Tensor]) -> Tensor:
        """L2-normalised image embeddings [images, D], for evaluation; raises as `embed` does."""
        self.check_images(batch)
        return self._normalised(self.model.get_image_features(**_select(batch, IMAGE_INPUTS)))

    def encode_texts(self, batch: Mapping[str, Tensor], *, checked: bool = False) -> Tensor:
        """L2-normalised text embeddings [texts, D], for evaluation.

        Raises as `check_tokens` and `check_texts` do, unless the texts were ``checked``.
        """
        if not checked:
            check_tokens(batch["input_ids"], self.vocabulary)
            self.check_texts(batch)
        return self._normalised(self.model.get_text_features(**_select(batch, TEXT_INPUTS)))

    @torch.no_grad()
    def width(self) -> int:
        """D, the dimensions of its embeddings; for towers of one's own it is found by encoding a text of one token."""
        if isinstance(projection := getattr(self.model, TOWERS["text"][1], None), nn.Linear):
            return projection.out_features
        device, mode = self.temperature_parameters[0].device, self.model.training
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        output = self.model.eval().get_text_features(input_ids=token, attention_mask=token + 1)
        self.model.train(mode)
        return int((output if isinstance(output, Tensor) else part_of(output, "pooler_output")).shape[-1])

    def _normalised(self, features: object) -> Tensor:
        whole = features if isinstance(features, Tensor) else part_of(features, "pooler_output")
        return F.normalize(whole[:, : self.dims], dim=-1)

    def batch_norms(self) -> list[str]:
        """Names of the trained batch norms, whose outputs, and thus the gradient, depend on the micro-batch."""
        constant = {module for part in self.frozen_parts() for module in part.modules()}
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in constant
        ]


def images_of(batch: Mapping[str, Tensor]) -> Any:
    """The images of a batch, one row for each, or what stands for them: cached features. None if it has neither."""
    return batch.get("pixel_values", batch.get(IMAGE_FEATURES))


def _is_frozen(module: nn.Module) -> bool:
    return not any(p.requires_grad for p in module.parameters())


def _select(batch: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: batch[name] for name in names if name in batch}
