"""The corpus in memory: images and tokens as tensors, and the training pairs drawn and augmented on the device."""

import concurrent.futures
import io
import json
import multiprocessing
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.utils.data import Dataset

from .icons import ICONS
from .swaps import KINDS, negative_captions, swaps_of

VOCABULARY, LENGTH = 8192, 24  # tokens
SPECIAL = {"<start>": 0, "<end>": 1, "<padding>": 2}  # the text tower reads its result at the first <end>
TEMPLATES = ("{}", "{}: a drawing")
RETRIEVAL = {  # the evaluation sets with captions, and their folders
    "validation": "held_out_concepts/validation",
    "concepts": "held_out_concepts/test",
    "vendor": "held_out_vendor/test",
}


def prepare(corpus: Path, *, with_icons: bool = False, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The corpus as tensors, without its icons or with them, by default with tokens that are learned from its captions.

    Returns:
        images: uint8 [N, 3, S, S], ``sources``: N names, and ``vocabulary``: the number of tokens.
        tokens: int32 [N, C, LENGTH], the captions of each image, and ``counts`` [N] of them.
        negatives: int32 [M, LENGTH], the hard negative captions of all images in order, and ``negative_counts`` [N].
        titles: int32 [K, LENGTH], the titles of collections that files have, and ``titled`` [K], of which images.
        names: int64 [N], equal for equal names.
        sets: for each evaluation set its images, and tokens [N, LENGTH], or labels [N] with the tokens of the prompts.
            Those with tokens also have ``swaps``, captions with one word replaced: tokens [S, LENGTH], the ``image``
            [S] that each one is wrong for, and its ``kind`` [S], a place in `KINDS`.
    """
    pictures: list[bytes] = []
    rows = []
    for shard in sorted(corpus.glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            for entry in tar:
                content = tar.extractfile(entry)
                assert content is not None
                if entry.name.endswith(".json"):
                    rows.append(json.load(content))
                else:
                    pictures.append(content.read())
    if with_icons:
        found = pq.read_table(corpus / ICONS["train"]).to_pylist()
        rows += found
        pictures += [row["image"]["bytes"] for row in found]
    if tokenizer is None:
        tokenizer = train_tokenizer([caption for row in rows for caption in row["caption"]])

    def tokens(texts: Sequence[str]) -> Tensor:
        return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(list(texts))], dtype=torch.int32)

    def retrieval(contents: Sequence[bytes], captions: Sequence[str], **more: Tensor) -> dict[str, Any]:
        return {"images": _pixels(contents), "tokens": tokens(captions), "swaps": _swaps(captions, tokens), **more}

    most = max(len(row["caption"]) for row in rows)
    captions = [row["caption"] + row["caption"][:1] * (most - len(row["caption"])) for row in rows]
    names = {name: number for number, name in enumerate(sorted({row["name"] for row in rows}))}
    sets, evaluation = {}, corpus / "evaluation"
    for name, place in RETRIEVAL.items():
        lines = (evaluation / place / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        contents = [(evaluation / place / row["file_name"]).read_bytes() for row in found]
        clip_art = torch.tensor([row["source"] in ("openclipart", "tuxpaint") for row in found])
        sets[name] = retrieval(contents, [row["caption"] for row in found], clip_art=clip_art)
    for name in ("zero_shot_concepts", "zero_shot_vendor"):
        classes = sorted(path.name for path in (evaluation / name / "test").iterdir())
        files = [sorted((evaluation / name / "test" / c).iterdir()) for c in classes]
        sets[name] = {
            "images": _pixels([path.read_bytes() for of_class in files for path in of_class]),
            "labels": torch.tensor([label for label, of_class in enumerate(files) for _ in of_class]),
            "prompts": tokens([template.format(c) for c in classes for template in TEMPLATES]),
        }
    for name, part in {"icons": "test", "icon_set": "another set"}.items() if with_icons else ():
        found = pq.read_table(corpus / ICONS[part]).to_pylist()
        sets[name] = retrieval([row["image"]["bytes"] for row in found], [row["name"] for row in found])
    negatives = [negative_captions(row["caption"]) for row in rows]
    titles = {number: row["title"] for number, row in enumerate(rows) if "title" in row}
    return {
        "images": _pixels(pictures),
        "tokens": tokens([caption for group in captions for caption in group]).unflatten(0, (-1, most)),
        "counts": torch.tensor([len(row["caption"]) for row in rows]),
        "negatives": tokens([caption for group in negatives for caption in group]),
        "negative_counts": torch.tensor([len(group) for group in negatives]),
        "titles": tokens([*titles.values()]),
        "titled": torch.tensor([*titles], dtype=torch.int64),
        "names": torch.tensor([names[row["name"]] for row in rows]),
        "sources": [row["source"] for row in rows],
        "vocabulary": tokenizer.get_vocab_size(),
        "sets": sets,
    }


def _swaps(captions: Sequence[str], tokens: Any) -> dict[str, Tensor]:
    """One swapped caption of each kind, drawn at random, for each caption that has one."""
    found = []
    for image, caption in enumerate(captions):
        swaps = swaps_of(caption)
        for number, kind in enumerate(KINDS):
            if of_kind := [swap.caption for swap in swaps if swap.kind == kind]:
                found.append((random.Random(caption).choice(of_kind), image, number))
    return {
        "tokens": tokens([text for text, _, _ in found]),
        "image": torch.tensor([image for _, image, _ in found], dtype=torch.int64),
        "kind": torch.tensor([kind for _, _, kind in found], dtype=torch.int64),
    }


def train_tokenizer(captions: Sequence[str]) -> Tokenizer:
    """A byte-level BPE learned from the captions, which gives LENGTH tokens for every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    learned = {"vocab_size": VOCABULARY, "special_tokens": list(SPECIAL), "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **learned)
    tokenizer.train_from_iterator(captions, trainer)
    start, end, padding = SPECIAL
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, SPECIAL[start]), (end, SPECIAL[end])]
    )
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH, pad_id=SPECIAL[padding], pad_token=padding)
    return tokenizer


def _pixels(contents: Sequence[bytes]) -> Tensor:
    """The images in these files, uint8 [N, 3, S, S]; many are read by all cores."""
    if len(contents) < 20_000:
        return torch.from_numpy(_decoded(contents))
    parts = [contents[start : start + 2000] for start in range(0, len(contents), 2000)]
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        return torch.from_numpy(np.concatenate(list(pool.map(_decoded, parts))))


def _decoded(contents: Sequence[bytes]) -> np.ndarray:
    images = [np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for content in contents]
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))


def to_device(data: Any, device: torch.device) -> Any:
    """The tensors of `prepare` on the device."""
    if isinstance(data, dict):
        return {name: to_device(value, device) for name, value in data.items()}
    return data.to(device) if isinstance(data, Tensor) else data


class InMemory(Dataset):
    """The numbers of training pairs whose images and tokens are on the device; `collate` makes batches of them there.

    Each time a pair is drawn, some of its captions are drawn and its image is scaled by 0.85 to 1.15 and moved by up to
    a tenth of its side.
    """

    def __init__(
        self,
        data: dict,
        seed: int,
        *,
        pair_ids: bool = False,  # batches say which pairs have one name
        captions_per_image: int = 1,  # different ones; an image with fewer gives them all
        negatives: bool = False,  # one of the hard negative captions is drawn for each image that has any
        sources: Sequence[str] | None = None,  # only the pairs of these
    ) -> None:
        """Takes the result of `prepare`, on a device, and the seed of what is drawn."""
        self._data, self._pair_ids, self._negatives = data, pair_ids, negatives
        self.captions_per_image = captions_per_image
        self._rows = [row for row, source in enumerate(data["sources"]) if sources is None or source in sources]
        self._device = data["images"].device
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> int:
        """The number of the pair in the corpus."""
        return self._rows[row]

    def collate(self, numbers: list[int]) -> dict[str, Tensor]:
        """A batch of b images with n texts, also of other sources: pixel_values [b, 3, S, S], input_ids [n, LENGTH].

        If asked for, pair_ids [b]. With several captions or with negatives also caption_image [n], as
        `ContrastiveCollator` gives it.
        """
        index = torch.tensor(numbers, device=self._device)
        chance = torch.rand(4, len(index), device=self._device, generator=self._generator)
        scale = 0.85 + 0.3 * chance[1]
        zero = torch.zeros_like(scale)
        move = 0.4 * chance[2:] - 0.2  # in half sides
        theta = torch.stack([scale, zero, move[0], zero, scale, move[1]], dim=1).view(-1, 2, 3)
        images = normalised(self._data["images"][index])
        if images.ndim == 4:
            grid = F.affine_grid(theta, list(images.shape), align_corners=False)
            images = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        batch = {"pixel_values": images}
        if self._pair_ids:
            batch["pair_ids"] = self._data["names"][index]
        if self.captions_per_image == 1 and not self._negatives:
            which = (chance[0] * self._data["counts"][index]).long()
            if "stored" in self._data:  # a teacher's embeddings of the images as they are, and of each caption
                images, texts = self._data["stored"]
                batch |= {"teacher_images": images[index], "teacher_texts": texts[index, which]}
            return {**batch, "input_ids": self._data["tokens"][index, which].long()}
        return {**batch, **self._texts(index)}

    def _texts(self, index: Tensor) -> dict[str, Tensor]:
        """input_ids and caption_image of the images with these numbers, the negatives last."""
        tokens = self._data["tokens"][index]
        chance = torch.rand(tokens.shape[:2], device=self._device, generator=self._generator)
        places = torch.arange(tokens.shape[1], device=self._device)
        chance[places >= self._data["counts"][index, None]] = 2  # there is no such caption: it is drawn last
        drawn = chance.topk(self.captions_per_image, dim=1, largest=False)
        image, place = (drawn.values < 2).nonzero(as_tuple=True)
        texts, caption_image = [tokens[image, drawn.indices[image, place]]], [image]
        if self._negatives:
            counts = self._data["negative_counts"]
            first = counts.cumsum(0) - counts
            chosen = torch.rand(len(index), device=self._device, generator=self._generator) * counts[index]
            having = counts[index] > 0
            texts.append(self._data["negatives"][(first[index] + chosen.long())[having]])
            caption_image.append(torch.full((len(texts[1]),), -1, device=self._device))
        return {"input_ids": torch.cat(texts).long(), "caption_image": torch.cat(caption_image)}


def normalised(images: Tensor) -> Tensor:
    """Images, uint8 [N, 3, S, S], with values from −1 to 1; features of images, [N, H], as they are."""
    return images.float() / 127.5 - 1 if images.ndim == 4 else images
