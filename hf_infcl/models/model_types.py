"""Which models are dual encoders, all facts that differ between their types, and at which token they read a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import logging

from ..refusals import check_vocabulary

logger = logging.get_logger(__name__)

# The modules of a tower: the tower itself, and its projection if the model has one.
TOWERS = {"image": ("vision_model", "visual_projection"), "text": ("text_model", "text_projection")}

# Image towers that attend to all tokens alike, whose module ``embeddings`` returns the tokens of images with their
# positions: of images of one size, or, with interpolated positions, of any.
ONE_SIZE, ANY_SIZE = "patches of one size", "patches of any size"
# Causal text towers take the embedding of a text at its first ``eos_token_id``; where that is 2, which was wrong in the
# configs of old checkpoints, the first of them at the largest token; the last ones always do that. AIMv2's is causal
# only in batches with padding.
AT_END_OR_LARGEST, AT_END, AT_END_IF_PADDED, AT_LARGEST = "end or largest", "end", "end, if padded", "largest"


@dataclass(frozen=True)
class ModelType:
    """A type of dual encoder in transformers."""

    objective: str = "softmax"  # that its models were designed for
    # The name of the temperature's parameter: "logit_scale", the logarithm of the multiplier, or "temperature", a
    # divisor; and its shape in transformers.
    temperature: str = "logit_scale"
    temperature_shape: tuple[int, ...] = ()
    images: str | None = None  # of its image tower: `ONE_SIZE` or `ANY_SIZE`
    texts: str | None = None  # of its text tower: where that takes the embedding of a text, see above
    pads_texts: bool = False  # whether it reads padding like text, so that all texts are padded to one length
    unused: str | None = None  # a part of the names of parameters on which no embedding depends
    smooths_labels: bool = False  # whether the loss of its forward has smoothed labels
    joined: bool = False  # whether its towers come from two checkpoints, of which its temperature says nothing


# The model types of transformers whose logits are a scaled product of one image vector and one text vector.
MODEL_TYPES = {
    "aimv2": ModelType(images=ONE_SIZE, texts=AT_END_IF_PADDED),
    # The output of its pooler is not used.
    "align": ModelType(temperature="temperature", unused="text_model.pooler.", smooths_labels=True),
    "altclip": ModelType(images=ONE_SIZE),
    "blip": ModelType(images=ONE_SIZE, unused=".crossattention."),  # from text to images
    "chinese_clip": ModelType(images=ONE_SIZE),
    "clip": ModelType(images=ONE_SIZE, texts=AT_END_OR_LARGEST),
    "clipseg": ModelType(images=ANY_SIZE, texts=AT_END_OR_LARGEST),
    "groupvit": ModelType(images=ONE_SIZE, texts=AT_END_OR_LARGEST),
    "metaclip_2": ModelType(images=ONE_SIZE, texts=AT_END),
    "owlv2": ModelType(images=ONE_SIZE, texts=AT_LARGEST),
    "owlvit": ModelType(images=ONE_SIZE, texts=AT_LARGEST),
    "siglip": ModelType("sigmoid", temperature_shape=(1,), images=ONE_SIZE, pads_texts=True),
    "siglip2": ModelType("sigmoid", temperature_shape=(1,), pads_texts=True),
    "tipsv2": ModelType(temperature="temperature", images=ANY_SIZE, unused=".mask_token"),
    # With any vision tower, such as a ViT or a DINOv2, whose pretraining needs a mask token.
    "vision-text-dual-encoder": ModelType(unused=".mask_token", joined=True),
}
# By the model_type of a tower. The last ones are of a "vision-text-dual-encoder".
IMAGE_TOWERS = {f"{name}_vision_model": kind.images for name, kind in MODEL_TYPES.items() if kind.images}
IMAGE_TOWERS |= {"dinov2": ANY_SIZE, "vit": ONE_SIZE}
TEXT_TOWERS = {f"{name}_text_model": kind.texts for name, kind in MODEL_TYPES.items() if kind.texts}
# Text towers whose positions begin behind the index of the padding, as RoBERTa's.
_LIKE_ROBERTA = """
    roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl camembert altclip_text_model data2vec-text esm ibert
    longformer mpnet xmod
""".split()
# Other models of transformers that encode two kinds of input, and why they do not fit.
_REFUSED = {
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


def type_of_model(model: nn.Module) -> ModelType:
    """The type of a dual encoder of transformers or of one's own.

    One's own is a module with ``get_image_features`` and ``get_text_features``, a scalar parameter ``logit_scale`` and,
    if its objective is sigmoid, ``logit_bias``, whose forward returns ``image_embeds`` and ``text_embeds`` of length 1,
    as attributes of an object or in a dict.

    Raises:
        ValueError: the model is neither.
    """
    name = getattr(getattr(model, "config", None), "model_type", "")
    needed = ("get_image_features", "get_text_features", "logit_scale")
    if type(model).__module__.startswith("transformers.") or name in MODEL_TYPES:
        if name in MODEL_TYPES and hasattr(model, needed[0]):
            return MODEL_TYPES[name]
    elif all(hasattr(model, attribute) for attribute in needed):
        return ModelType("softmax" if getattr(model, "logit_bias", None) is None else "sigmoid")
    raise _refusal(type(model).__name__, name or None)


def check_type_of_config(config: PretrainedConfig, checkpoint: str) -> None:
    """Raises a ValueError for the config of a model of transformers that is no dual encoder."""
    if type(config).__module__.startswith("transformers.") and config.model_type not in MODEL_TYPES:
        raise _refusal(f"The model of {checkpoint!r}", config.model_type)


def _refusal(what: str, model_type: str | None) -> ValueError:
    reason = f": {_REFUSED[model_type]}" if model_type in _REFUSED else ""
    return ValueError(
        f"{what} (model_type {model_type!r}) is not a dual encoder that contrastive training can split into image and "
        f"text embeddings{reason}. Use the full model (such as CLIPModel) of one of the types "
        f"{', '.join(MODEL_TYPES)}, or your own towers in a TwoTowers."
    )


def fit_tokenizer(tokenizer: Any, config: PretrainedConfig | None, *, is_of_model: bool = True) -> None:
    """Lets a tokenizer pad texts where the text tower of this config does not read, and raises as `check_vocabulary`.

    Towers of transformers count positions from the left, and most take the embedding at the first or the end token, so
    that padding on the left would make it depend on the other texts of its batch. With ``is_of_model``, the tokenizer
    must have about as many tokens as the tower has embeddings.
    """
    check_vocabulary(tokenizer, config if is_of_model else None)
    if getattr(tokenizer, "padding_side", "right") == "right" or pads_texts(config):
        return
    if getattr(config, "model_type", None) in MODEL_TYPES:
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"  # the second is saved
        logger.warning(
            "The tokenizer says padding_side='left', by which an embedding of this model would depend on the other "
            "texts of its batch. Texts are padded on the right, as the saved tokenizer says."
        )
    else:
        logger.warning_once(
            "The tokenizer pads on the left, which is right for a text tower that takes the embedding at the last "
            "token and counts positions from the attention mask. For another one, set tokenizer.padding_side='right'."
        )


def pads_texts(config: PretrainedConfig | None) -> bool:
    """Whether all texts have to be padded to one length."""
    kind = MODEL_TYPES.get(getattr(config, "model_type", ""))
    return kind is not None and kind.pads_texts


def reads_padding(name: str) -> bool:
    """Whether a class of transformers, such as SiglipProcessor, is one of a type that reads padding like text."""
    return name.lower().startswith(tuple(kind for kind, facts in MODEL_TYPES.items() if facts.pads_texts))


def text_positions(config: PretrainedConfig | None) -> int | None:
    """The largest number of tokens of a text, special ones included; None if the config states none."""
    text: Any = getattr(config, "text_config", None)
    rows: int | None = getattr(text, "max_position_embeddings", None)
    if rows is None or getattr(text, "model_type", None) not in _LIKE_ROBERTA:
        return rows
    return rows - 1 - (text.pad_token_id or 0)


LOOKED_AT = 10_000  # texts


@dataclass(frozen=True)
class Pooling:
    """The token at which a causal text tower takes the embedding, so that nothing behind it is read."""

    stated: int  # the eos_token_id of the tower. Its first place in a text is taken, or that of the first token
    place: str = AT_END  # one of these names of `model_types`
    padding: int | None = None  # the pad_token_id of the tower's config, unless it is ``stated``

    @property
    def at_largest(self) -> bool:
        """Whether the first place of the largest token is taken instead."""
        return self.place == AT_LARGEST or (self.place == AT_END_OR_LARGEST and self.stated == 2)

    @classmethod
    def of_config(cls, config: object, stated: int | None = None) -> "Pooling | None":
        """The pooling that a text tower's config implies; None for towers that read all tokens, or are not known.

        Args:
            stated: the ``eos_token_id`` with which the tower was built, if it is there.
        """
        place = TEXT_TOWERS.get(getattr(config, "model_type", ""))
        stated = getattr(config, "eos_token_id", None) if stated is None else stated
        if place is None or not isinstance(stated, int):
            return None
        padding = getattr(config, "pad_token_id", None)
        return cls(stated, place, None if padding == stated else padding)

    @classmethod
    def of_tower(cls, tower: nn.Module | None) -> "Pooling | None":
        """The pooling of a text tower, or of the tower of transformers inside a custom one."""
        modules = () if tower is None else tower.modules()
        found = (cls.of_config(getattr(m, "config", None), getattr(m, "eos_token_id", None)) for m in modules)
        return next((pooling for pooling in found if pooling is not None), None)

    def taken(self, tokens: Tensor) -> Tensor:
        """The index of that token in each text of tokens [n, L], as [n]."""
        return (tokens if self.at_largest else tokens == self.stated).int().argmax(1)

    def needs_mask(self, tokens: Tensor, mask: Tensor) -> bool:
        """Whether the embeddings of texts, [n, L] in host memory, depend on their attention mask.

        A causal tower reads nothing behind the token at which it takes the embedding, so that padding on the right
        needs no mask. Faster kernels then compute the attention.
        """
        return bool((mask[:, 1:] > mask[:, :-1]).any() or not mask.gather(1, self.taken(tokens)[:, None]).all())

    def fault(self, taken: int, *texts: Sequence[int]) -> str:
        """Why two texts have one embedding, which is taken at the token ``taken``, and what to do."""
        end = texts[0][-1]  # with which the tokenizer ends texts
        first, second = (" ".join(map(str, text[:20])) + " ..." * (len(text) > 20) for text in texts)
        if self.place == AT_LARGEST:
            why = "A model of this type takes the embedding of a text at its largest token"
            cure = f"Take a tokenizer that has no token above {end}."
        else:
            old = "by which old configs mean the largest token of a text"
            at_end = "and the embedding of a text is taken there, or else at its first token"
            why = f"The eos_token_id of the model's text_config is {self.stated}, {old if self.at_largest else at_end}"
            cure = (
                f"Set eos_token_id to {end} in the text_config of the model's config.json and load the model again, or "
                f"load tokenizer and model from one checkpoint. If {end} is a part of a word, the tokenizer adds no "
                "end token: give it a post_processor that does, such as TemplateProcessing of tokenizers."
            )
        return (
            f"{why}: here {taken}. But the tokenizer ends texts with {end}, and what follows {taken} is not read, so "
            f"that different texts have one embedding, such as 'tokens {first}' and 'tokens {second}'. {cure}"
        )


class SameEmbeddings:
    """Finds two different texts that get one embedding, among the first `LOOKED_AT`; none without a pooling."""

    def __init__(self, pooling: Pooling | None) -> None:
        self._pooling, self._looked_at = pooling, 0
        self._texts: dict[tuple[int, ...], tuple[int, ...]] = {}  # the first text of those that are read to one token

    def check(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Raises a ValueError if two of the texts so far, [n, L], have one embedding, although their tokens differ.

        Tensors on a GPU are waited for.
        """
        if self._pooling is None or self._looked_at >= LOOKED_AT:
            return
        if self._pooling.place == AT_END_IF_PADDED and (attention_mask is None or bool(attention_mask.all())):
            return
        self._looked_at += len(input_ids)
        masks = [None] * len(input_ids) if attention_mask is None else attention_mask.tolist()
        places = self._pooling.taken(input_ids).tolist()
        for tokens, mask, taken in zip(input_ids.tolist(), masks, places, strict=True):
            last, ends = _last(tokens, mask, self._pooling.padding)
            if taken >= last or tokens[taken] in tokens[last + 1 - ends : last + 1]:
                continue  # it is read to its end
            text = tuple(tokens[: last + 1])
            if (other := self._texts.setdefault(text[: taken + 1], text)) != text:
                raise ValueError(self._pooling.fault(tokens[taken], other, text))


def _last(tokens: list[int], mask: list[int] | None, padding: int | None) -> tuple[int, int]:
    """The index of a text's last token, -1 if none is attended to, and how many tokens up to it may be its end."""
    if mask is None and tokens[-1] != padding:
        # Equal tokens at the end are another padding, or the end itself.
        return 1 + max((place for place, token in enumerate(tokens) if token != tokens[-1]), default=-1), 2
    seen = [token != padding for token in tokens] if mask is None else mask
    return max((place for place, is_seen in enumerate(seen) if is_seen), default=-1), 1
