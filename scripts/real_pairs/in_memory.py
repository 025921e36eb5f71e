"""The corpus in memory: images and tokens as tensors, and the training pairs drawn and augmented on the device."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 8192, 24  # tokens
SPECIAL = {"<start>": 0, "<end>": 1, "<padding>": 2}  # the text tower reads its result at the first <end>
TEMPLATES = ("{}", "{}: a drawing")


def prepare(corpus: Path) -> dict[str, Any]:
    """The corpus as tensors.

    Returns:
        images: uint8 [N, 3, S, S].
        tokens: int32 [N, C, LENGTH], the captions of each image, and ``counts`` [N] of them.
        names: int64 [N], equal for equal names.
        sources: N names.
        vocabulary: the number of tokens.
        sets: for each evaluation set its images, and tokens [N, LENGTH], or labels [N] with the tokens of the prompts.
    """
    pictures, rows = [], []
    for shard in sorted(corpus.glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            for entry in tar:
                content = tar.extractfile(entry)
                assert content is not None
                if entry.name.endswith(".json"):
                    rows.append(json.load(content))
                else:
                    pictures.append(_pixels(content.read()))
    tokenizer = train_tokenizer([caption for row in rows for caption in row["caption"]])

    def tokens(texts: Sequence[str]) -> Tensor:
        return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(list(texts))], dtype=torch.int32)

    most = max(len(row["caption"]) for row in rows)
    captions = [row["caption"] + row["caption"][:1] * (most - len(row["caption"])) for row in rows]
    names = {name: number for number, name in enumerate(sorted({row["name"] for row in rows}))}
    sets = {}
    for name, place in {
        "validation": "held_out_concepts/validation",
        "concepts": "held_out_concepts/test",
        "vendor": "held_out_vendor/test",
    }.items():
        folder = corpus / "evaluation" / place
        found = [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
        sets[name] = {
            "images": torch.stack([_pixels((folder / row["file_name"]).read_bytes()) for row in found]),
            "tokens": tokens([row["caption"] for row in found]),
            "clip_art": torch.tensor([row["source"] in ("openclipart", "tuxpaint") for row in found]),
        }
    for name, place in {"zero_shot_concepts": "zero_shot_concepts", "zero_shot_vendor": "zero_shot_vendor"}.items():
        folder = corpus / "evaluation" / place / "test"
        classes = sorted(path.name for path in folder.iterdir())
        found = [(path, label) for label, c in enumerate(classes) for path in sorted((folder / c).iterdir())]
        sets[name] = {
            "images": torch.stack([_pixels(path.read_bytes()) for path, _ in found]),
            "labels": torch.tensor([label for _, label in found]),
            "prompts": tokens([template.format(c) for c in classes for template in TEMPLATES]),
        }
    return {
        "images": torch.stack(pictures),
        "tokens": tokens([caption for group in captions for caption in group]).unflatten(0, (-1, most)),
        "counts": torch.tensor([len(row["caption"]) for row in rows]),
        "names": torch.tensor([names[row["name"]] for row in rows]),
        "sources": [row["source"] for row in rows],
        "vocabulary": tokenizer.get_vocab_size(),
        "sets": sets,
    }


def train_tokenizer(captions: Sequence[str]) -> Tokenizer:
    """A byte-level BPE learned from the captions, which gives LENGTH tokens for every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    start, end, padding = SPECIAL
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, SPECIAL[start]), (end, SPECIAL[end])]
    )
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH, pad_id=SPECIAL[padding], pad_token=padding)
    return tokenizer


def _pixels(content: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)


def to_device(data: Any, device: torch.device) -> Any:
    """The tensors of `prepare` on the device."""
    if isinstance(data, dict):
        return {name: to_device(value, device) for name, value in data.items()}
    return data.to(device) if isinstance(data, Tensor) else data


class InMemory(Dataset):
    """The training pairs on the device; a batch is gathered and augmented there at once.

    Each time a pair is drawn, one of its captions is drawn and its image is scaled by 0.85 to 1.15 and moved by up to a
    tenth of its side.

    Args:
        data: of `prepare`, on a device.
        seed: of what is drawn.
        pair_ids: whether batches tell which pairs have one name.
        sources: only the pairs of these.
    """

    def __init__(self, data: dict, seed: int, pair_ids: bool = False, sources: Sequence[str] | None = None) -> None:
        self._data, self._pair_ids = data, pair_ids
        wanted = [row for row, source in enumerate(data["sources"]) if sources is None or source in sources]
        self._device = data["images"].device
        self._rows = torch.tensor(wanted, device=self._device)
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, rows: list[int]) -> dict[str, Tensor]:
        """A batch: pixel_values [b, 3, S, S], input_ids [b, LENGTH] and, if asked for, pair_ids [b]."""
        index = self._rows[torch.tensor(rows, device=self._device)]
        chance = torch.rand(4, len(rows), device=self._device, generator=self._generator)
        which = (chance[0] * self._data["counts"][index]).long()
        scale = 0.85 + 0.3 * chance[1]
        zero = torch.zeros_like(scale)
        move = 0.4 * chance[2:] - 0.2  # in half sides
        theta = torch.stack([scale, zero, move[0], zero, scale, move[1]], dim=1).view(-1, 2, 3)
        images = normalised(self._data["images"][index])
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        batch = {
            "pixel_values": F.grid_sample(images, grid, padding_mode="border", align_corners=False),
            "input_ids": self._data["tokens"][index, which].long(),
        }
        return {**batch, "pair_ids": self._data["names"][index]} if self._pair_ids else batch


def normalised(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The collator: `InMemory` gives whole batches."""
    return batch
