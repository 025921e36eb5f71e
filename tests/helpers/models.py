"""Small models from configs, and batches for them: nothing here is downloaded or trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers as tf
from torch.utils.data import Dataset, IterableDataset

VOCABULARY, LENGTH, IMAGE = 64, 6, 16
_TEXT = {
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
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": IMAGE,
    "patch_size": 8,
}


def clip(dropout: float = 0.0, seed: int = 0) -> tf.CLIPModel:
    torch.manual_seed(seed)
    config = tf.CLIPConfig(
        text_config={**_TEXT, "attention_dropout": dropout},
        vision_config={**_VISION, "attention_dropout": dropout},
        projection_dim=12,
    )
    return tf.CLIPModel(config)


def siglip(dropout: float = 0.0, seed: int = 0) -> tf.SiglipModel:
    torch.manual_seed(seed)
    config = tf.SiglipConfig(
        text_config={**_TEXT, "attention_dropout": dropout, "projection_size": 16},
        vision_config={**_VISION, "attention_dropout": dropout},
    )
    return tf.SiglipModel(config)


class Pairs(Dataset):
    """Random images and token sequences; ``repeats`` rows share each pair id."""

    def __init__(self, rows: int, repeats: int = 0, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.images = torch.randn(rows, 3, IMAGE, IMAGE, generator=g)
        self.tokens = torch.randint(2, VOCABULARY - 1, (rows, LENGTH), generator=g)
        self.tokens[:, 0], self.tokens[:, -1] = 0, VOCABULARY - 1
        self.ids = torch.arange(rows) // repeats if repeats else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        item = {"pixel_values": self.images[row], "input_ids": self.tokens[row]}
        item["attention_mask"] = torch.ones_like(self.tokens[row])
        return item if self.ids is None else {**item, "pair_ids": self.ids[row]}

    def batch(self, rows: Any = slice(None)) -> dict[str, torch.Tensor]:
        tokens = self.tokens[rows]
        return {"pixel_values": self.images[rows], "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class Stream(IterableDataset):
    """The rows of `Pairs` one after another, without a length."""

    def __init__(self, rows: int) -> None:
        self.data = Pairs(rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.data[i] for i in range(len(self.data)))


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.data)
