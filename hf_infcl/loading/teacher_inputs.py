"""The data collator of a training, and what its batches have for teachers: both run in the loader's workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import ContrastiveCollator
from ..data.collator import DataCollator
from ..data.keyed import KeyedItem
from ..encoders.dual_encoder import TEXT_INPUTS
from ..refusals import check_tokens
from ..windows.extensions import of_kind
from ..windows.setup import Setup
from ..windows.teachers import teacher_prefix
from ..windows.terms import TeacherDistance
from .stored_embeddings import StoredEmbeddings, of_caption


class TrainingCollator:
    """The data collator of a training: its batches also have what the teachers need.

    It checks the tokens against the model's vocabulary while they are in host memory. Of items with keys, the batch
    gets ``pair_keys`` [images] int64.

    Args:
        setup: names the teachers and the vocabulary.
    """

    def __init__(self, collate: DataCollator, setup: Setup) -> None:
        teachers = [teacher for term in of_kind(setup.extensions, TeacherDistance) for teacher in term.teachers]
        self._inputs = [teacher.inputs for teacher in teachers if teacher.inputs is not None]
        self._collate, self._vocabulary = collate, setup.encoder.vocabulary

    def __call__(self, items: list[Any]) -> Any:
        keyed = isinstance(items[0], KeyedItem)
        plain = [one.item for one in items] if keyed else items
        batch = self._collate(plain)
        if not isinstance(batch, Mapping):
            return batch  # which is refused later
        if isinstance(tokens := batch.get("input_ids"), Tensor):
            check_tokens(tokens, self._vocabulary)
        added: dict[str, Tensor] = {}
        for inputs in self._inputs:
            added |= inputs(plain, batch)
        if keyed:
            added["pair_keys"] = torch.tensor([one.key for one in items])
        return {**batch, **added} if added else batch


class ModelInputs:
    """The inputs of a teacher that is a model: what the student reads, or what the teacher's processor makes.

    Args:
        collator: of the teacher; None if it reads what the student reads.
        images, texts: whether the collator prepares them, because the student reads different ones.
    """

    def __init__(
        self, collator: ContrastiveCollator | None, *, images: bool = False, texts: bool = False, number: int
    ) -> None:
        self._collator, self._images, self._texts = collator, images, texts
        self._prefix = teacher_prefix(number)

    def __call__(self, items: Sequence[Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Any] = {}
        if self._images:
            assert self._collator is not None
            found |= self._collator([{k: item[k] for k in ("image", "cropped") if k in item} for item in items])
        if self._texts:
            assert self._collator is not None
            captions = [caption for item in items for caption in item["caption"]]
            negatives = [caption for item in items for caption in item.get("negative_captions", ())]
            found |= self._collator.tokenize(captions + negatives)
        else:  # the student's are dealt out to the micro-batches anew
            found |= {name: batch[name] for name in TEXT_INPUTS if name in batch}
        return {f"{self._prefix}{name}": value for name, value in found.items()}


class StoredInputs:
    """The inputs of a teacher whose embeddings were stored: looked up by the place of each item in its data set.

    Args:
        sets: the numbers of the data sets whose embeddings it has.
        partial: whether items without an embedding are left out, and all batches say which.
    """

    def __init__(
        self, embeddings: StoredEmbeddings, sets: Collection[int], sides: Sequence[str], *, partial: bool, number: int
    ) -> None:
        self._embeddings, self._sets, self._sides = embeddings, sets, sides
        self._partial, self._prefix = partial, teacher_prefix(number)

    def __call__(self, items: Sequence[Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        has_set = np.array([item["place"][0] in self._sets for item in items])
        keys = [item["place"][1] for item in items]
        counts = np.array([len(item["caption"]) for item in items])
        known, found = has_set.copy(), {}
        if "image" in self._sides:
            of_views = [item["place"][2] for item in items]
            found["images"], of_images = self._embeddings.find("images", of_views if self._embeddings.views else keys)
            known &= of_images
        if "text" in self._sides:
            captions = [of_caption(key, c) for key, item in zip(keys, items, strict=True) for c in item["caption"]]
            found["texts"], of_texts = self._embeddings.find("texts", captions)
            known &= np.logical_and.reduceat(of_texts, np.cumsum(counts) - counts)
        if not self._partial and not known.all():
            raise ValueError(
                f"{self._embeddings.folder} has no embedding of {keys[int((~known).argmax())]} or of its caption, "
                "although it was made from this training set. Was it changed since? Embed it again, or pass "
                "teacher_missing='contrastive'."
            )
        added = {name: torch.from_numpy(values) for name, values in found.items()}
        if self._partial:
            texts = np.repeat(known, counts)
            negatives = len(batch["input_ids"]) - len(texts)
            added["known_images"] = torch.from_numpy(known)
            added["known_texts"] = torch.from_numpy(np.concatenate([texts, np.zeros(negatives, bool)]))
        return {f"{self._prefix}{name}": value for name, value in added.items()}
