"""Collates items into the tensors of a batch, with a processor of transformers."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from ..files.text import describe_cause
from ..models.model_types import fit_tokenizer, pads_texts, reads_padding, text_positions
from .images import to_rgb
from .transforms import ImageTransform, set_image_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin

# Tokenizing a megabyte takes seconds, although only max_length tokens are used. A token has about 4 characters of text.
_CHARACTERS_PER_TOKEN = 64

DataCollator = Callable[[list[Any]], Any]  # makes a batch of the items of a micro-batch, as Trainer's does


class ContrastiveCollator:
    """Turns items of `ImageTextDataset` or `ZeroShotDataset` into the tensors of a batch.

    Images are resized and cropped in uint8 and then normalised, with the sizes, filter, mean and standard deviation of
    the processor. The result equals that of transformers' torchvision backend (see `ImageTransform`). An image
    processor that does anything else prepares the images itself, and a warning says so.

    Captions are truncated, and padded to the longest caption of the batch. SigLIP needs a fixed length instead: it was
    trained without an attention mask and pools the last position, so it reads its padding like text. By default, this
    applies to processors named Siglip* and to tokenizers that return no attention mask.

    Args:
        processor: has an `image_processor` and a `tokenizer`, like `CLIPProcessor` or `SiglipProcessor`.
        max_length: tokens per caption, including special ones; by default the tokenizer's `model_max_length`.
        fixed_length: pad every caption to `max_length`. The default depends on the processor, as described above.
        uint8: return ``pixel_values`` in uint8, which takes a quarter of the memory. Call `normalise` on the device
            before passing them to the model; `InfCLTrainer` does.

    Raises:
        ValueError: the processor lacks a part, its tokenizer has no token for padding, or no maximum length is known.

    Attributes:
        positions: the tokens that the model could read of a caption, if `for_model` knows it, or else `max_length`.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        max_length: int | None = None,
        fixed_length: bool | None = None,
        uint8: bool = False,
    ) -> None:
        if missing := [part for part in ("image_processor", "tokenizer") if getattr(processor, part, None) is None]:
            raise ValueError(f"The processor, a {type(processor).__name__}, has no {' and no '.join(missing)}.")
        if getattr(processor.tokenizer, "pad_token", "unknown") is None:
            raise ValueError(
                f"The tokenizer, a {type(processor.tokenizer).__name__}, has no pad_token. Set it to the token of the "
                "text_config's pad_token_id, or else to the end token, and save the processor again: "
                "processor.tokenizer.pad_token = processor.tokenizer.eos_token."
            )
        self.processor = processor
        if max_length is None:
            max_length = processor.tokenizer.model_max_length
            if max_length > 10**6:  # transformers sets that of a tokenizer without a limit to 1e30
                raise ValueError(
                    f"The tokenizer, a {type(processor.tokenizer).__name__}, states no model_max_length. "
                    "Pass max_length, at most the text model's max_position_embeddings."
                )
        self.max_length = self.positions = self._stated = max_length
        if fixed_length is None:
            has_mask = "attention_mask" in processor.tokenizer.model_input_names
            fixed_length = reads_padding(type(processor).__name__) or not has_mask
        self._padding = "max_length" if fixed_length else "longest"
        self.uint8 = uint8
        self._transform = ImageTransform.of(processor.image_processor)
        if self._transform is None:
            logging.getLogger(__name__).warning(
                f"{type(processor.image_processor).__name__} prepares the images itself, in fp32, which takes longer. "
                "The fast path of hf_infcl is for processors that resize (bilinear or bicubic), crop and normalise."
            )

    @classmethod
    def for_model(
        cls, processor: ProcessorMixin, config: PretrainedConfig | None, uint8: bool = False
    ) -> ContrastiveCollator:
        """The collator for a model with this configuration.

        Captions are truncated to a length that both the tokenizer and the text tower accept, because some tokenizers
        state no limit. SigLIP's captions are padded to one length with any processor. Otherwise, an embedding would
        depend on the other captions of its micro-batch.
        """
        length = positions = text_positions(config)
        if positions is not None:
            stated = getattr(getattr(processor, "tokenizer", None), "model_max_length", None)
            length = int(min(positions, stated or positions))
        fit_tokenizer(getattr(processor, "tokenizer", None), config, is_of_model=False)
        collator = cls(processor, max_length=length, fixed_length=pads_texts(config) or None, uint8=uint8)
        collator.positions = positions or collator.max_length
        return collator

    def set_image_size(self, side: int) -> None:
        """Returns images of this height and width from now on, as does the saved processor; see `set_image_size`."""
        set_image_size(self.processor.image_processor, side)
        self._transform = ImageTransform.of(self.processor.image_processor)

    def lengthen(self, tokens: int) -> None:
        """Reads this many tokens of a text from now on, as does what loads the saved processor.

        This is for a model with more positions than its tokenizer states as ``model_max_length``. Other numbers of
        tokens than those between the two have no effect; see `cut_to`.
        """
        if self.max_length < tokens <= self.positions:
            self.max_length = self.processor.tokenizer.model_max_length = tokens

    def cut_to(self, tokens: int) -> ContrastiveCollator:
        """A collator that cuts texts to this many tokens, special ones included, and otherwise is the same.

        Raises:
            ValueError: texts are not cut by it, no word would be left, or an embedding depends on its padding.
        """
        if tokens == self.max_length > self._stated:  # lengthened to it
            return self
        if self._padding != "longest":
            raise ValueError(
                f"max_text_tokens={tokens} is refused, because the model reads the padding of its captions like text, "
                f"and was trained with {self.max_length} tokens. Leave it out."
            )
        least = self.processor.tokenizer.num_special_tokens_to_add() + 1
        if not least <= tokens < self.max_length:
            raise ValueError(
                f"max_text_tokens must be from {least}, a token beside the special ones, to {self.max_length - 1}, one "
                f"less than captions have at most anyway, got {tokens}.{self.more_positions}"
            )
        shorter = copy.copy(self)
        shorter.max_length = tokens
        return shorter

    @property
    def more_positions(self) -> str:
        """A sentence with a space before it, if the tokenizer states a lower limit than the model has."""
        if self.max_length >= self.positions:
            return ""
        return (
            f" The tokenizer states the limit of {self.max_length} tokens, and the model has {self.positions} "
            f"positions: to read longer texts, also in evaluations, pass max_text_tokens={self.positions}."
        )

    @property
    def text_options(self) -> dict[str, Any]:
        """``max_length`` and ``padding``, which is ``"max_length"`` or ``"longest"``, of the tokenizer's call."""
        return {"max_length": self.max_length, "padding": self._padding}

    @property
    def text_padding(self) -> dict[str, int] | None:
        """The value that each tensor of texts is padded with; None if an embedding may depend on its padding."""
        tokenizer = self.processor.tokenizer
        if self._padding != "longest" or tokenizer.padding_side != "right":
            return None
        return {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": tokenizer.pad_token_type_id}

    def text_fingerprint(self) -> str:
        """A fingerprint of everything that decides into which tokens a text is cut."""
        tokenizer = self.processor.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
        # The last call of a tokenizer decides these two; of the next call, `text_options` do.
        rules = {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}
        return hashlib.sha256(json.dumps([self.text_options, rules], sort_keys=True).encode()).hexdigest()

    @property
    def options(self) -> dict[str, Any]:
        """The options that decide about the batches, for the record of a training."""
        kind = getattr(self.processor.image_processor, "valid_kwargs", None)
        # Its own dict leaves out those without a value.
        images = dict.fromkeys(getattr(kind, "__annotations__", ())) | self.processor.image_processor.to_dict()
        unrelated = (
            *("_", "image_processor_type", "processor_class", "data_format", "input_data_format"),
            *("return_tensors", "device", "disable_grouping"),
        )
        return {
            **self.text_options,
            "vocabulary": len(self.processor.tokenizer),
            **{name: value for name, value in images.items() if not name.startswith(unrelated)},
        }

    @property
    def image_backend(self) -> str:
        """The name of the code that resizes images, for reports, because backends differ by single grey levels."""
        if self._transform is not None:
            return "hf_infcl, equal to transformers' torchvision backend"
        image_processor = self.processor.image_processor
        return f"{type(image_processor).__name__}, {getattr(image_processor, 'backend', 'its own')} backend"

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collates b items with n captions in total, including negative captions.

        Returns:
            pixel_values [b, 3, H, W], of the size of the processor, fp32 or, with `uint8`, uint8; or the
            output of an image processor that prepares the images itself. For image-text items also the tokenizer's
            output, `input_ids` [n, L] int64 and so on. Then, all int64:
            pair_ids [b] and skipped [b]: if the items have them.
            caption_image [n]: the row of the batch that each caption belongs to; -1 for negative captions, which come
            last. Absent if every item has one caption and no item has a negative caption.
            labels [b]: for zero-shot items, which have no captions.
            From items with `image_features`: image_features [b, H] fp32 instead of pixel_values.
            From items with `at_start`: start_images [b, D] and start_texts [n, D] fp32.

        Raises:
            ValueError: an item has no image, its captions are not in a list, or the items are of several kinds.
        """
        _check_kinds(items)
        if "image_features" in items[0]:
            batch = {"image_features": torch.stack([item["image_features"] for item in items])}
        elif any("image" not in item for item in items):
            keys = list(items[0]) if isinstance(items[0], Mapping) else f"of a {type(items[0]).__name__}"
            raise ValueError(
                f'Each item needs an "image", and a "caption" list or a "label", but the first has the keys {keys}. '
                "Wrap a datasets.Dataset: ImageTextDataset(dataset). For tensors, pass torch's default_collate."
            )
        else:
            batch = self._images(items)
        if "caption" in items[0]:
            if any(not isinstance(item["caption"], list) for item in items):
                raise ValueError(
                    f"Each item needs a list of captions, but the first has {items[0]['caption']!r}. ImageTextDataset("
                    "dataset) and ImageTextStream return such lists; let a Dataset or stream of your own do so."
                )
            captions = [caption for item in items for caption in item["caption"]]
            negatives = [caption for item in items for caption in item.get("negative_captions", ())]
            batch |= self.tokenize(captions + negatives)
            counts = torch.tensor([len(item["caption"]) for item in items])
            if negatives or (counts != 1).any():
                caption_image = torch.arange(len(items)).repeat_interleave(counts)
                batch["caption_image"] = torch.cat((caption_image, torch.full((len(negatives),), -1)))
        if "at_start" in items[0]:
            batch["start_images"] = torch.stack([item["at_start"][0] for item in items])
            batch["start_texts"] = torch.cat([item["at_start"][1:] for item in items])
        for key, name in (("pair_id", "pair_ids"), ("skipped", "skipped"), ("label", "labels")):
            if key in items[0]:
                batch[name] = torch.tensor([item[key] for item in items])
        return batch

    def _images(self, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        arrays: list[Any] = [_as_array(item["image"]) for item in items]
        if self._transform is None or any(array is None for array in arrays):
            # No arrays, because a processor may mistake the channel axis of a small one.
            both = zip(items, arrays, strict=True)
            images = [item["image"] if array is None else Image.fromarray(array) for item, array in both]
            try:
                return dict(self.processor.image_processor(images=images, return_tensors="pt"))
            except (RuntimeError, ValueError) as error:  # images of several sizes, or a size that it cannot resize to
                raise ValueError(
                    f"The {type(self.processor.image_processor).__name__} cannot prepare the images of a batch: "
                    f"{describe_cause(error)}. In preprocessor_config.json, give it a size of height and width, or of "
                    "shortest_edge together with do_center_crop and crop_size."
                ) from error
        # In a DataLoader's worker, default_collate stacks into shared memory, which saves a copy.
        are_cropped = [item.get("cropped", False) for item in items]
        pixels: Tensor = default_collate([*map(self._transform, arrays, are_cropped)])
        return {"pixel_values": pixels if self.uint8 else self._transform.normalise(pixels)}

    def normalise(self, pixel_values: Tensor) -> Tensor:
        """Normalises uint8 ``pixel_values`` to fp32 on their device; returns any others unchanged."""
        if pixel_values.dtype != torch.uint8 or self._transform is None:
            return pixel_values
        return self._transform.normalise(pixel_values)

    def is_cut(self, text: str) -> bool:
        """Whether a text has more tokens than `max_length`, so that `tokenize` cuts it."""
        return len(self.token_ids(text)) > self.max_length

    def token_ids(self, text: str) -> list[int]:
        """The tokens of a text before it is cut, with the special ones; a very long text is shortened."""
        # One text at a time: a tokenizer that has used threads warns in each DataLoader worker that is forked later.
        tokens = self.processor.tokenizer(text[: _CHARACTERS_PER_TOKEN * self.max_length], verbose=False)
        return list(tokens["input_ids"])

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """The tokenizer's tensors [n, L] for n texts: captions, or the prompts of a zero-shot classifier."""
        longest = _CHARACTERS_PER_TOKEN * self.max_length
        tokens = self.processor.tokenizer(
            [text[:longest] for text in texts], padding=self._padding, truncation=True, max_length=self.max_length
        )
        # For return_tensors="pt", transformers goes through all tokens in Python, which takes as long as to find them.
        return {name: torch.from_numpy(np.array(rows)) for name, rows in tokens.items()}


def _check_kinds(items: Sequence[Mapping[str, object]]) -> None:
    """Raises a ValueError if only some of the items have a key that all items of a batch have, or none."""
    for key in ("caption", "pair_id", "skipped", "label", "image_features", "at_start"):
        count = sum(key in item for item in items)
        if 0 < count < len(items):
            raise ValueError(
                f"{key!r} is in {count} of {len(items)} items of a batch, and not in the others. Create all datasets "
                "that you combine with the same options, such as pair_id_column and on_bad_sample."
            )


def _as_array(image: object) -> np.ndarray | None:
    """RGB as uint8 [H, W, 3], from a PIL image or such an array; None for anything else."""
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3:
        return image
    return None


def normalised(inputs: dict[str, Tensor], collator: object, prepare: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A batch on the device whose uint8 images are normalised there by the collator.

    ``prepare`` is Trainer's preparation of a tensor.
    """
    pixel_values = inputs.get("pixel_values")
    if pixel_values is None or pixel_values.dtype != torch.uint8:
        return inputs
    if not hasattr(collator, "normalise"):
        raise ValueError(
            f"The data collator, a {type(collator).__name__}, returns pixel_values in uint8, which no model accepts. "
            "Return floats, or give it a method normalise(pixel_values) like that of ContrastiveCollator."
        )
    return {**inputs, "pixel_values": prepare(collator.normalise(pixel_values))}
