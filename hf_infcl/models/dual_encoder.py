"""A common view of the supported model classes: embeddings, temperature, objective, towers, and patches left out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..refusals import check_tokens
from .layers import depths, frozen_begin
from .model_types import AT_END_IF_PADDED, IMAGE_TOWERS, ONE_SIZE, TOWERS, Pooling, SameEmbeddings, type_of_model
from .towers import PlaceholderText, embeds_of, part_of, pooled, remembered, return_dict_for

IMAGE_FEATURES = "image_features"  # in a batch, instead of images: the output of a frozen image tower for each
IMAGE_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
NO_MASK = "no_mask"  # in a batch whose embeddings do not depend on the attention mask
NO_TEXTS = "no_texts"  # in a batch whose texts are encoded with those of another one
TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


class DualEncoder:
    """A view of a model as two towers, a logit_scale and possibly a logit_bias.

    Args:
        model: a dual encoder of transformers or one's own (see `type_of_model`), without DDP around it; PEFT adapters
            inside are fine.

    Raises:
        ValueError: the model is not a dual encoder that this package supports, its class has only one tower, or the
            model was split over devices or processes while it was loaded.
    """

    def __init__(self, model: nn.Module, dims: int | None = None) -> None:
        kind = type_of_model(model)
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
        self._kind = kind
        # Whether it may compute a loss of its own. The attribute is the forward before a wrapper of accelerate.
        forward = vars(self.base).get("_original_forward", self.base.forward)
        of_others = not (getattr(forward, "__module__", None) or "").startswith(("transformers.", "hf_infcl."))
        self.has_own_forward = of_others or bool(self.base._forward_hooks)
        self.objective = kind.objective  # that it was designed for
        self.temperature_name, self.stock_temperature_shape = kind.temperature, kind.temperature_shape
        self._return_dict = return_dict_for(self.base)
        self._divides = kind.temperature == "temperature"
        text_tower, projection = self.towers().get("text"), getattr(model, TOWERS["text"][1], None)
        self._placeholder = None if text_tower is None else PlaceholderText(text_tower, projection)
        self.pooling = Pooling.of_tower(text_tower)
        self._same_embeddings = SameEmbeddings(self.pooling)
        # That of a tower of transformers that reads no padding.
        self.reads_to_end = None if kind.texts in (None, AT_END_IF_PADDED) else self.pooling
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
        if config is None or IMAGE_TOWERS.get(config.model_type) != ONE_SIZE or not isinstance(config.image_size, int):
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
        # By this config, random weights begin with this temperature; SigLIP's config has none.
        first = vars(self.base.config).get(f"{self.temperature_name}_init_value", 0.0)
        possible = (first, math.log(10)) if self.objective == "sigmoid" else (first,)  # see `initialise_sigmoid`
        return not self._kind.joined and any(abs(value - one) < 1e-6 for one in possible)

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
                With ``no_texts`` its text is only a placeholder: 0 text embeddings are returned. With ``no_mask`` the
                text tower gets no attention mask.
            frozen_outputs: where the outputs of frozen towers for this micro-batch are kept. It is empty in the
                first pass; in the second pass the frozen towers do not run. With None all towers run.

        Raises:
            ValueError: the images have another size than those of the model.
        """
        self.check_images(batch)
        inputs = _select(batch, IMAGE_INPUTS + TEXT_INPUTS)
        if batch.get(NO_MASK):
            inputs.pop("attention_mask", None)
        if (features := batch.get(IMAGE_FEATURES)) is not None:
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
            outputs = forward(**inputs, **self._return_dict)
        images, texts = embeds_of(outputs, self.base)
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
        for module in () if tower is None else self.parts()[tower]:
            module.requires_grad_(False)
        for name, parameter in self.model.named_parameters():
            if self._kind.unused is not None and self._kind.unused in name:
                parameter.requires_grad_(False)

    def parts(self, *, named: bool = False) -> dict[str, list[nn.Module]]:
        """The modules of the image side and of the text side: each tower, and its projection if there is one.

        Raises:
            ValueError: the towers should be ``named`` as those of transformers, and are not.
        """
        for side, (tower, _) in TOWERS.items() if named else ():
            if side not in self.towers():
                raise ValueError(
                    f"{type(self.base).__name__} has no {tower}, so its {side} tower cannot have a rate or frozen "
                    "layers of its own. Name its towers as `TwoTowers` does, or leave these options out."
                )
        modules = {side: [getattr(self.model, name, None) for name in names] for side, names in TOWERS.items()}
        return {side: [module for module in both if module is not None] for side, both in modules.items()}

    def freeze_layers(self, count: int) -> None:
        """Freezes the first layers of both towers, and the embeddings before them; with 0 these alone.

        Raises:
            ValueError: a tower that trains has fewer layers, or one's own does not name its towers.
        """
        for side, (tower, *projection) in self.parts(named=True).items():
            depth_of, layers = depths(dict(tower.named_parameters()))
            if count > layers and not all(map(_is_frozen, (tower, *projection))):
                raise ValueError(
                    f"freeze_layers={count}, but the {side} tower has {layers} layers. Freeze at most as many, or the "
                    f"whole tower with freeze={side!r}."
                )
            for name, parameter in tower.named_parameters():
                if depth_of[name] <= count:
                    parameter.requires_grad_(False)

    def stop_gradients_at_frozen_layers(self) -> None:
        """Undoes what transformers adds with gradient checkpointing: embeddings whose output requires a gradient.

        Frozen layers would then keep a graph. Only checkpointing with ``use_reentrant=True`` needs such an output.
        """
        if hasattr(self.base, "disable_input_require_grads"):  # of transformers
            self.base.disable_input_require_grads()

    def towers(self) -> dict[str, nn.Module]:
        """The towers by their sides. One's own model may give them other names; then none of them can be frozen."""
        return {side: getattr(self.model, names[0]) for side, names in TOWERS.items() if hasattr(self.model, names[0])}

    def frozen_towers(self) -> dict[str, nn.Module]:
        """The frozen towers by their sides, whether or not their projections train."""
        return {side: tower for side, tower in self.towers().items() if _is_frozen(tower)}

    def frozen_parts(self) -> list[nn.Module]:
        """The frozen towers and projections, and what is frozen up to a layer of a tower that trains."""
        frozen = [module for modules in self.parts().values() for module in modules if _is_frozen(module)]
        trained = [tower for tower in self.towers().values() if tower not in frozen]
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


def check_patches(encoder: DualEncoder) -> None:
    """Raises a ValueError if the image tower has no patches to drop, or does not take a part of them."""
    tower = getattr(encoder.model, TOWERS["image"][0], None)
    kind = getattr(getattr(tower, "config", None), "model_type", None)
    if kind not in IMAGE_TOWERS:
        reason = "marks its patches with a mask" if kind == "siglip2_vision_model" else "is not known to take a part"
        raise ValueError(
            f"patch_dropout leaves patches of images out, and the image tower of {type(encoder.base).__name__} (type "
            f"{kind!r}) {reason}. Leave patch_dropout out, or train a tower of the types {', '.join(IMAGE_TOWERS)}."
        )


class PatchDropout:
    """Drops a random share of the patches of each image in the forwards of training (FLIP, arXiv 2212.00794).

    They are dropped after the position embedding, before the first layer. Class and register tokens stay. In evaluation
    mode nothing is dropped. The draw uses torch's generator of the device, so the second pass over a micro-batch, which
    has the random state of the first, drops the same patches. A hook of the image tower does it.

    Args:
        share: the share of the patches to drop, in [0, 1). Of n patches, round(n · (1 - share)) stay, at least one.

    Raises:
        ValueError: see `check_patches`.
    """

    def __init__(self, encoder: DualEncoder, share: float) -> None:
        self._share = share
        check_patches(encoder)
        self._tower: Any = getattr(encoder.model, TOWERS["image"][0])
        embeddings = self._tower.embeddings
        registers = getattr(embeddings, "register_tokens", None)
        self._prefix = int(hasattr(embeddings, "class_embedding") or hasattr(embeddings, "cls_token"))
        self._prefix += 0 if registers is None else registers.shape[1]
        self._hook = embeddings.register_forward_hook(self._drop)

    def remove(self) -> None:
        """Restores the tower."""
        self._hook.remove()

    def _drop(self, module: nn.Module, inputs: object, tokens: Tensor) -> Tensor | None:
        # The mode of the tower counts: frozen embeddings are in evaluation mode even below layers that train.
        if not self._tower.training:
            return None
        prefix, patches = tokens[:, : self._prefix], tokens[:, self._prefix :]
        images, count, width = patches.shape
        kept = max(1, round(count * (1 - self._share)))
        chosen = torch.rand(images, count, device=tokens.device).topk(kept, dim=1).indices
        return torch.cat([prefix, patches.gather(1, chosen[..., None].expand(-1, -1, width))], dim=1)
