"""Small models from configs, and batches for them: nothing here is downloaded or trained."""

import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import transformers as tf
from torch.utils.data import Dataset, IterableDataset

from hf_infcl import TwoTowers

VOCABULARY, LENGTH, IMAGE = 64, 6, 16
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": 1,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": IMAGE,
    "patch_size": 8,
}


def made_once(build: Callable[..., Any]) -> Callable[..., Any]:
    """Gives copies of the first model with the same arguments, and leaves torch's random state as building one does."""

    @functools.cache
    def built(*args: Any, **kwargs: Any) -> tuple[Any, int, torch.Tensor]:
        return build(*args, **kwargs), torch.initial_seed(), torch.get_rng_state()

    @functools.wraps(build)
    def copied(*args: Any, **kwargs: Any) -> Any:
        model, seed, state = built(*args, **kwargs)
        torch.manual_seed(seed)  # that of GPUs as well
        torch.set_rng_state(state)
        return copy.deepcopy(model)

    return copied


@made_once
def clip(dropout: float = 0.0, seed: int = 0, end: int = VOCABULARY - 1) -> tf.CLIPModel:
    """A CLIP whose texts end with this token, as those of `Pairs`; `processors.tokenizer` ends them with `END`."""
    return clip_with({"eos_token_id": end, "attention_dropout": dropout}, {"attention_dropout": dropout}, seed)


def clip_with(text: dict[str, Any], vision: dict[str, Any], seed: int = 0, width: int = 12) -> tf.CLIPModel:
    """A CLIP whose towers have these values in their configs beside those of all small models."""
    torch.manual_seed(seed)
    towers = {"text_config": TEXT | text, "vision_config": VISION | vision}
    return tf.CLIPModel(tf.CLIPConfig(**towers, projection_dim=width))


@made_once
def siglip(dropout: float = 0.0, seed: int = 0) -> tf.SiglipModel:
    torch.manual_seed(seed)
    config = tf.SiglipConfig(
        text_config={**TEXT, "attention_dropout": dropout, "projection_size": 16},
        vision_config={**VISION, "attention_dropout": dropout},
    )
    return tf.SiglipModel(config)


class Pairs(Dataset):
    """Random images and token sequences; ``repeats`` rows share each pair id.

    The sequences have `LENGTH` tokens; with ``longest``, from 3 to as many, and are padded.
    """

    def __init__(self, rows: int, repeats: int = 0, seed: int = 0, longest: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.images = torch.randn(rows, 3, IMAGE, IMAGE, generator=g)
        self.tokens = torch.randint(2, VOCABULARY - 1, (rows, longest or LENGTH), generator=g)
        self.tokens[:, 0], self.tokens[:, -1] = 0, VOCABULARY - 1
        self.mask = torch.ones_like(self.tokens)
        if longest:
            last = torch.randint(2, longest, (rows, 1), generator=g)
            places = torch.arange(longest)
            self.tokens[places == last], self.tokens[places > last] = VOCABULARY - 1, TEXT["pad_token_id"]
            self.mask[places > last] = 0
        self.ids = torch.arange(rows) // repeats if repeats else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item = {"pixel_values": self.images[row], "input_ids": self.tokens[row]}
        item["attention_mask"] = self.mask[row]
        return item if self.ids is None else {**item, "pair_ids": self.ids[row]}

    def batch(self, rows: Any = slice(None)) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[rows], "input_ids": self.tokens[rows], "attention_mask": self.mask[rows]}


class Stream(IterableDataset):
    """The rows of `Pairs` in order, as a stream without a length."""

    def __init__(self, rows: int) -> None:
        self.data = Pairs(rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.data[i] for i in range(len(self.data)))


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.data)


BERT = {**TEXT, "type_vocab_size": 2}


def _siglip2() -> tf.Siglip2Model:
    vision = {k: v for k, v in VISION.items() if k != "image_size"}
    return tf.Siglip2Model(
        tf.Siglip2Config(text_config={**TEXT, "projection_size": 16}, vision_config={**vision, "num_patches": 4})
    )


def _vision_text(vision: Any = tf.CLIPVisionConfig) -> tf.VisionTextDualEncoderModel:
    config = tf.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision(**VISION), tf.BertConfig(**BERT), projection_dim=12
    )
    return tf.VisionTextDualEncoderModel(config)


def align() -> tf.AlignModel:
    vision = {"image_size": 32, "width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 16}
    vision |= {"kernel_sizes": [3], "in_channels": [32], "out_channels": [16], "strides": [1], "expand_ratios": [1]}
    vision |= {"num_block_repeats": [1], "depthwise_padding": []}
    return tf.AlignModel(tf.AlignConfig(text_config=BERT, vision_config=vision, projection_dim=8))


def groupvit() -> tf.GroupViTModel:
    vision = {**VISION, "depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 2]}
    config = tf.GroupViTConfig(text_config=TEXT, vision_config=vision)
    config.projection_dim, config.projection_intermediate_dim = 12, 16
    return tf.GroupViTModel(config)


def vision_text_dinov2() -> tf.VisionTextDualEncoderModel:
    return _vision_text(tf.Dinov2Config)


def tipsv2() -> tf.Tipsv2Model:
    # With its own initial values, all features are nearly equal, and gradients are 500.
    drawn = {"initializer_range": 0.2, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**TEXT, **drawn, "pad_token_id": 0}
    vision = {**drawn, "image_size": IMAGE, "patch_size": 8}
    return tf.Tipsv2Model(tf.Tipsv2Config(text_config=text, vision_config=vision, temperature_init_value=0.1))


BUILD = {
    "aimv2": lambda: tf.Aimv2Model(tf.Aimv2Config(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "align": align,
    "altclip": lambda: tf.AltCLIPModel(
        tf.AltCLIPConfig(text_config={**BERT, "project_dim": 16}, vision_config=VISION, projection_dim=12)
    ),
    "blip": lambda: tf.BlipModel(
        # By default the weights of its vision tower start at 1e-10, where all features are equal and gradients are 1e5.
        tf.BlipConfig(
            text_config={**TEXT, "initializer_range": 0.2},
            vision_config={**VISION, "initializer_range": 0.2},
            projection_dim=12,
        )
    ),
    "chinese_clip": lambda: tf.ChineseCLIPModel(
        tf.ChineseCLIPConfig(text_config=BERT, vision_config=VISION, projection_dim=12)
    ),
    "clip": clip,
    "clipseg": lambda: tf.CLIPSegModel(tf.CLIPSegConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "groupvit": groupvit,
    "metaclip_2": lambda: tf.MetaClip2Model(
        tf.MetaClip2Config(text_config=TEXT, vision_config=VISION, projection_dim=12)
    ),
    "owlv2": lambda: tf.Owlv2Model(tf.Owlv2Config(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "owlvit": lambda: tf.OwlViTModel(tf.OwlViTConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)),
    "siglip": siglip,
    "siglip2": _siglip2,
    "vision-text-dual-encoder": _vision_text,
    **({"tipsv2": tipsv2} if hasattr(tf, "Tipsv2Model") else {}),  # since 5.22
}


class Own(torch.nn.Module):
    """A dual encoder that has only what the trainer needs."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = torch.nn.Linear(3 * IMAGE * IMAGE, 12)
        self.words = torch.nn.EmbeddingBag(VOCABULARY, 12)
        self.logit_scale = torch.nn.Parameter(torch.tensor(1.0))
        self.logit_bias = torch.nn.Parameter(torch.tensor(-1.0))

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.pixels(pixel_values.flatten(1))

    def get_text_features(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.words(input_ids)

    def forward(self, pixel_values: torch.Tensor, return_dict: bool = True, **texts: torch.Tensor) -> Any:
        both = self.get_image_features(pixel_values), self.get_text_features(**texts)
        images, words = (torch.nn.functional.normalize(features, dim=-1) for features in both)
        return SimpleNamespace(image_embeds=images, text_embeds=words)


def two_towers(bias: float | None = None) -> TwoTowers:
    pixels = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * IMAGE * IMAGE, 20))
    projections = torch.nn.Linear(20, 12), torch.nn.Linear(16, 12)
    return TwoTowers(pixels, tf.BertModel(tf.BertConfig(**BERT)), *projections, scale=10, bias=bias)


# Not of transformers.
OWN = {"two towers": two_towers, "one's own": Own}


def batch_for(kind: str, rows: int = 5) -> dict[str, torch.Tensor]:
    batch = Pairs(rows).batch()
    if kind == "siglip2":  # NaFlex: patches instead of images, in three aspect ratios, padded to four
        shapes = torch.tensor([[2, 2], [1, 3], [2, 1]]).repeat(-(-rows // 3), 1)[:rows]
        batch["pixel_values"] = torch.randn(rows, 4, 3 * 8 * 8)
        batch["pixel_attention_mask"] = (torch.arange(4) < shapes.prod(1, keepdim=True)).long()
        batch["spatial_shapes"] = shapes
    if kind == "align":
        batch["pixel_values"] = torch.randn(rows, 3, 32, 32)
    return batch
