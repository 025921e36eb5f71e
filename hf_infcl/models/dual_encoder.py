"""A common view of all dual encoders, one of any two modules, outputs that are kept, and patches that are left out."""

import contextlib
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPOutput
from transformers.utils import ModelOutput

from ..refusals import check_tokens
from .layers import depths, frozen_begin
from .model_types import AT_END_IF_PADDED, IMAGE_TOWERS, ONE_SIZE, TOWERS, Pooling, SameEmbeddings, type_of_model

IMAGE_FEATURES = "image_features"  # in a batch, instead of images: the output of a frozen image tower for each
IMAGE_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
NO_MASK = "no_mask"  # in a batch whose embeddings do not depend on the attention mask
NO_TEXTS = "no_texts"  # in a batch whose texts are encoded with those of another one
TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")

# ---- Outputs of models and of their towers ----


def return_dict_for(module: nn.Module) -> dict[str, bool]:
    """``return_dict=True`` for a module of transformers, or of one's own that names it; nothing for others."""
    of_transformers = type(module).__module__.startswith("transformers.")
    takes = of_transformers or "return_dict" in inspect.signature(module.forward).parameters
    return {"return_dict": True} if takes else {}


def part_of(output: object, name: str) -> Any:
    """A part of a module's output, which may be a dict; None if it is not there."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _vectors(output: object) -> Any:
    return output if isinstance(output, Tensor) else part_of(output, "pooler_output")


def pooled(output: object, module: nn.Module, what: str, *, of_transformers: bool = False) -> Tensor:
    """One vector for each input, [n, H]: the output of a tower, or its ``pooler_output``.

    Args:
        what: its name for the error.
        of_transformers: whether only outputs of transformers are taken, because a forward will get the vectors in one.

    Raises:
        ValueError: it is neither.
    """
    features = _vectors(output)
    is_right = isinstance(features, Tensor) and features.ndim == 2
    if not is_right or (of_transformers and not isinstance(output, ModelOutput)):
        every = "a tensor [inputs, features], or pooler_output of an object or a dict"
        forms = "pooler_output of an output of transformers" if of_transformers else every
        raise ValueError(
            f"The {what}, a {type(module).__name__}, must return one vector for each input, as {forms}, got "
            f"{_described(output)}."
        )
    return features


def embeds_of(output: object, model: nn.Module) -> tuple[Tensor, Tensor]:
    """``image_embeds`` and ``text_embeds`` of a model's output; raises ValueError if it has not both."""
    images, texts = part_of(output, "image_embeds"), part_of(output, "text_embeds")
    if images is None or texts is None:
        raise ValueError(
            f"The forward of a {type(model).__name__} must return image_embeds and text_embeds, as attributes of an "
            f"object or in a dict, got {_described(output)}."
        )
    return images, texts


def _described(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)}"
    return f"a {type(output).__name__}{f' with {list(output)}' if isinstance(output, Mapping) else ''}"


@contextlib.contextmanager
def remembered(tower: nn.Module, outputs: dict[Any, object], name: Hashable) -> Iterator[None]:
    """Within the context a frozen tower stores its output in ``outputs``, or returns the stored one.

    Whatever hooks of checkpointing or of peft do to its embeddings, its output gets no graph.
    """
    forward = tower.forward
    is_stored, stored = name in outputs, outputs.get(name)

    def once(*args: object, **kwargs: object) -> Any:
        if is_stored:  # a copy, because a model may write the projection into it
            return BaseModelOutputWithPooling(**stored) if isinstance(stored, BaseModelOutputWithPooling) else stored
        with torch.no_grad():
            full = forward(*args, **kwargs)
        outputs[name] = full
        # The models read the pooled vector or the first position; a window of whole sequences would be large.
        if (sequences := part_of(full, "last_hidden_state")) is not None:
            outputs[name] = BaseModelOutputWithPooling(sequences[:, :1].clone(), part_of(full, "pooler_output"))
        return full

    with patch.object(tower, "forward", once):
        yield


@contextlib.contextmanager
def _evaluation_mode(module: nn.Module | None) -> Iterator[None]:
    """Within the context the module, if there is one, is in evaluation mode with all its parts."""
    with contextlib.ExitStack() as stack:
        for part in () if module is None else module.modules():
            stack.callback(setattr, part, "training", part.training)
            part.training = False
        yield


# ---- The view ----


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
        self.kind = type_of_model(self.base)
        # Whether it may compute a loss of its own; that of an ALIGN differs, as it smooths its labels. The attribute is
        # the forward before a wrapper of accelerate.
        forward = vars(self.base).get("_original_forward", self.base.forward)
        of_others = not (getattr(forward, "__module__", None) or "").startswith(("transformers.", "hf_infcl."))
        self.has_own_forward = (of_others or bool(self.base._forward_hooks)) and not self.kind.smooths_labels
        self._divides = self.kind.temperature == "temperature"
        self._return_dict = return_dict_for(self.base)
        self._placeholders: dict[Any, object] = {}  # by dtype and device of the text tower, see `_without_texts`
        self.pooling = Pooling.of_tower(self.towers().get("text"))
        self._same_embeddings = SameEmbeddings(self.pooling)
        # That of a tower of transformers that reads no padding.
        self.reads_to_end = None if self.kind.texts in (None, AT_END_IF_PADDED) else self.pooling

    @property
    def vocabulary(self) -> int | None:
        """The number of token embeddings, if the config names it."""
        return getattr(self._config("text_config"), "vocab_size", None)

    def _config(self, part: str) -> Any:
        return getattr(getattr(self.model, "config", None), part, None)

    def check_images(self, batch: Mapping[str, Tensor]) -> None:
        """Raises a ValueError if the image tower has no embeddings for the patches of images of this size."""
        config, pixel_values = self._config("vision_config"), batch.get("pixel_values")
        one_size = IMAGE_TOWERS.get(getattr(config, "model_type", "")) == ONE_SIZE
        if not one_size or not isinstance(config.image_size, int) or pixel_values is None or pixel_values.ndim != 4:
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
        """Raises a ValueError if a token has no embedding, or different texts, also of earlier calls, get the same.

        See `check_tokens` and `SameEmbeddings`.
        """
        check_tokens(batch["input_ids"], self.vocabulary)
        self._same_embeddings.check(batch["input_ids"], batch.get("attention_mask"))

    @property
    def temperature_parameters(self) -> tuple[nn.Parameter, ...]:
        """The temperature's parameter and, where there is one, the bias's."""
        scale = getattr(self.model, self.kind.temperature)
        bias = getattr(self.model, "logit_bias", None)
        return (scale,) if bias is None else (scale, bias)

    def scale_and_bias(self, parameters: Iterable[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """logit_scale, the multiplier, and logit_bias or None, from `temperature_parameters` or copies of them."""
        # Under FSDP a process holds a part of each parameter, but the whole temperature is needed.
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in parameters or self.temperature_parameters)
        scale, *bias = whole
        if (ceiling := getattr(self.model, "max_log_logit_scale", None)) is not None:  # AIMv2 clamps in its forward
            scale = scale.clamp(0.0, ceiling)
        return 1 / scale if self._divides else scale.exp(), bias[0] if bias else None

    def looks_random(self) -> bool:
        """Whether the weights seem random by their temperature; collective under FSDP."""
        scale = self.temperature_parameters[0]
        value = (scale.full_tensor() if isinstance(scale, DTensor) else scale).item()
        # By this config, random weights begin with this temperature; SigLIP's config has none.
        first = vars(self.base.config).get(f"{self.kind.temperature}_init_value", 0.0)
        possible = (first, math.log(10)) if self.kind.objective == "sigmoid" else (first,)  # see `initialise_sigmoid`
        return not self.kind.joined and any(abs(value - one) < 1e-6 for one in possible)

    @torch.no_grad()
    def clamp_temperature(self, maximum: float) -> None:
        """Clamps the multiplier of the temperature to [1, maximum], as CLIP does (arXiv 2103.00020, section 2.5)."""
        self.temperature_parameters[0].clamp_(*((1 / maximum, 1) if self._divides else (0, math.log(maximum))))

    @torch.no_grad()
    def initialise_sigmoid(self) -> bool:
        """Sets logit_scale to 10 and logit_bias to -10, SigLIP's initial values (arXiv 2303.15343, section 3.3).

        This only happens if both parameters are 0, as in a SigLIP created from a config. Returns whether it happened.
        """
        if self.kind.objective != "sigmoid" or any(bool(p != 0) for p in self.temperature_parameters):
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
        with contextlib.ExitStack() as stack:
            if no_texts and "text" in self.towers():
                names = (*IMAGE_INPUTS, IMAGE_FEATURES, *TEXT_INPUTS)
                row = {name: value[:1] for name, value in _select(batch, names).items()}
                stack.enter_context(self._without_texts(partial(self.embed, forward, row)))
            if frozen_outputs is not None:
                for name, tower in self.frozen_towers().items():
                    if not (no_texts and name == "text"):  # whose placeholder is remembered elsewhere
                        stack.enter_context(remembered(tower, frozen_outputs, name))
            outputs = forward(**inputs, **self._return_dict)
        images, texts = embeds_of(outputs, self.base)
        return images, texts[:0] if no_texts else texts

    @contextlib.contextmanager
    def _without_texts(self, forward: Callable[[], tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Within the context the text tower computes nothing, and returns its output for a placeholder.

        A model's forward needs at least one text, also for a micro-batch that has none. The embedding of this text is
        dropped, so its values do not matter, and the tower has to run only once for each dtype and device. It does so
        in ``forward``, which returns the embeddings of any images and one text, and in evaluation mode, so that it
        draws no random numbers. An output whose embedding is not finite is not kept: in the backward it is multiplied
        by gradients of 0.
        """
        tower, projection = self.towers()["text"], getattr(self.model, TOWERS["text"][1], None)
        parameter = next(tower.parameters())
        kind = parameter.dtype, parameter.device
        if kind not in self._placeholders:
            # A compiled forward could not store the output.
            eager = torch.compiler.set_stance("force_eager")
            with eager, torch.no_grad(), _evaluation_mode(self.model), remembered(tower, self._placeholders, kind):
                _, text = forward()
            if not text.isfinite().all():
                del self._placeholders[kind]
        # In training mode, a batch norm in the projection would count the placeholder, or fail on a single row.
        with remembered(tower, dict(self._placeholders), kind), _evaluation_mode(projection):
            yield

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
        for module in () if tower is None else self.parts([tower], f"freeze={tower!r}")[tower]:
            module.requires_grad_(False)
        for name, parameter in self.model.named_parameters():
            if self.kind.unused is not None and self.kind.unused in name:
                parameter.requires_grad_(False)

    def parts(self, needed: Iterable[str] = (), option: str = "") -> dict[str, list[nn.Module]]:
        """The modules of the image side and of the text side: each tower, and its projection if there is one.

        Raises:
            ValueError: the tower of a side that is ``needed``, for an ``option`` that the message names, has another
                name than those of transformers.
        """
        for side in needed:
            if side not in self.towers():
                raise ValueError(
                    f"{option} needs {TOWERS[side][0]}, the {side} tower, which {type(self.base).__name__} does not "
                    "have. Name its towers as `TwoTowers` does, or leave the option out; requires_grad_(False) freezes "
                    "parameters."
                )
        modules = {side: [getattr(self.model, name, None) for name in names] for side, names in TOWERS.items()}
        return {side: [module for module in both if module is not None] for side, both in modules.items()}

    def freeze_layers(self, count: int) -> None:
        """Freezes the first layers of both towers, and the embeddings before them; with 0 these alone.

        Raises:
            ValueError: a tower that trains has fewer layers, or one's own does not name its towers.
        """
        for side, (tower, *projection) in self.parts(TOWERS, f"freeze_layers={count}").items():
            depth_of, layers = depths(tower)
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
        begun = [tower for tower in trained if not next(tower.parameters()).requires_grad]
        return frozen + [part for tower in begun for part in frozen_begin(tower)]

    def eval_frozen_parts(self) -> None:
        """Sets what is frozen to evaluation mode: without dropout its output is the same in both passes."""
        for part in self.frozen_parts():
            part.eval()

    def encode_images(self, batch: Mapping[str, Tensor]) -> Tensor:
        """L2-normalised image embeddings [images, D], for evaluation; raises as `embed` does."""
        self.check_images(batch)
        return self._normalised(self.model.get_image_features(**_select(batch, IMAGE_INPUTS)))

    def encode_texts(self, batch: Mapping[str, Tensor], *, checked: bool = False) -> Tensor:
        """L2-normalised text embeddings [texts, D], for evaluation; raises as `check_texts`, unless ``checked``."""
        if not checked:
            self.check_texts(batch)
        return self._normalised(self.model.get_text_features(**_select(batch, TEXT_INPUTS)))

    @torch.no_grad()
    def width(self) -> int:
        """D, the dimensions of its embeddings; for towers of one's own it is found by encoding a text of one token."""
        if isinstance(projection := getattr(self.model, TOWERS["text"][1], None), nn.Linear):
            return projection.out_features
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.temperature_parameters[0].device)
        with _evaluation_mode(self.model):
            output = self.model.get_text_features(input_ids=token, attention_mask=token + 1)
        return int(_vectors(output).shape[-1])

    def _normalised(self, features: object) -> Tensor:
        return F.normalize(_vectors(features)[:, : self.dims], dim=-1)

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
    kind = getattr(getattr(encoder.towers().get("image"), "config", None), "model_type", None)
    if kind not in IMAGE_TOWERS:
        reason = "marks its patches with a mask" if kind == "siglip2_vision_model" else "is not known to take a part"
        raise ValueError(
            f"patch_dropout leaves patches of images out, and the image tower of {type(encoder.base).__name__} (type "
            f"{kind!r}) {reason}. Leave patch_dropout out, or train a tower of the types {', '.join(IMAGE_TOWERS)}."
        )


def drop_patches(encoder: DualEncoder, share: float) -> RemovableHandle:
    """Drops a random share of the patches of each image in the forwards of training (FLIP, arXiv 2212.00794).

    They are dropped after the position embedding, before the first layer. Class and register tokens stay. In evaluation
    mode nothing is dropped. The draw uses torch's generator of the device, so the second pass over a micro-batch, which
    has the random state of the first, drops the same patches.

    Args:
        encoder: one for which `check_patches` raises no error.
        share: the share of the patches to drop, in [0, 1). Of n patches, round(n · (1 - share)) stay, at least one.

    Returns:
        The hook of the image tower that does it, whose ``remove`` restores the tower.
    """
    tower: Any = encoder.towers()["image"]
    others = int(hasattr(tower.embeddings, "class_embedding") or hasattr(tower.embeddings, "cls_token"))
    others += getattr(tower.config, "num_register_tokens", 0)

    def drop(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor | None:
        # The mode of the tower counts: frozen embeddings are in evaluation mode even below layers that train.
        if not tower.training:
            return None
        patches = tokens[:, others:]
        images, count, width = patches.shape
        kept = max(1, round(count * (1 - share)))
        chosen = torch.rand(images, count, device=tokens.device).topk(kept, dim=1).indices
        return torch.cat([tokens[:, :others], patches.gather(1, chosen[..., None].expand(-1, -1, width))], dim=1)

    return tower.embeddings.register_forward_hook(drop)


# ---- A dual encoder of any two modules ----


class _Tower(nn.Module):
    """A module whose output is that of a tower of transformers: one vector for each input."""

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__()
        self.module, self._what = module, what

    def forward(self, pixel_values: Tensor | None = None, return_dict: bool = True, **texts: Tensor) -> ModelOutput:
        output = self.module(**texts) if pixel_values is None else self.module(pixel_values)
        features = pooled(output, self.module, self._what)
        return BaseModelOutputWithPooling(features[:, None], features)


class TwoTowers(nn.Module):
    """A dual encoder of any two modules, which `InfCLTrainer` trains like those of transformers.

    Saved models hold its state dict, as model.safetensors; build the same modules to load it.

    Args:
        image_tower: called with images [images, 3, H, W] alone. It returns features [images, H1], or an object, such as
            an output of transformers, or a dict with them as ``pooler_output``.
        text_tower: called with ``input_ids`` and ``attention_mask`` [texts, L], and whatever else the tokenizer
            returns. It returns features [texts, H2], or such an output.
        image_projection, text_projection: from these features to the embeddings, which need the same dimension; by
            default the features are the embeddings.
        scale: the initial multiplier of the cosines. ``logit_scale`` is its logarithm.
        bias: the initial ``logit_bias``, with which the objective is sigmoid; None for softmax.

    Raises:
        ValueError: when it is called, a tower returns something else.
    """

    def __init__(
        self,
        image_tower: nn.Module,
        text_tower: nn.Module,
        image_projection: nn.Module | None = None,
        text_projection: nn.Module | None = None,
        *,
        scale: float = 1 / 0.07,
        bias: float | None = None,
    ) -> None:
        super().__init__()
        self.vision_model, self.text_model = _Tower(image_tower, "image tower"), _Tower(text_tower, "text tower")
        self.visual_projection = nn.Identity() if image_projection is None else image_projection
        self.text_projection = nn.Identity() if text_projection is None else text_projection
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))

    def get_image_features(self, **inputs: Tensor) -> Tensor:
        """Embeddings [images, D], not normalised."""
        return self.visual_projection(self.vision_model(**inputs).pooler_output)

    def get_text_features(self, **inputs: Tensor) -> Tensor:
        """Embeddings [texts, D], not normalised."""
        return self.text_projection(self.text_model(**inputs).pooler_output)

    def forward(self, pixel_values: Tensor, **texts: Any) -> CLIPOutput:
        """``image_embeds`` [images, D] and ``text_embeds`` [texts, D], of length 1; its other fields are None."""
        images, captions = self.get_image_features(pixel_values=pixel_values), self.get_text_features(**texts)
        return CLIPOutput(image_embeds=F.normalize(images, dim=-1), text_embeds=F.normalize(captions, dim=-1))
