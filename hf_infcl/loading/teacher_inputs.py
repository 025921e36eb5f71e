"""The data collator of a training, and what its batches have for teachers: both run in the loader's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data import ContrastiveCollator
from ..data.collator import DataCollator, texts_of
from ..data.keyed import KeyedItem
from ..encoders.dual_encoder import TEXT_INPUTS
from ..refusals import check_tokens
from ..windows.extensions import of_kind
from ..windows.setup import Setup
from ..windows.teachers import teacher_prefix
from ..windows.terms import TeacherDistance


class TrainingCollator:
    """The data collator of a training: its batches also have what the teachers need.

    It checks the tokens against the model's vocabulary while they are in host memory. Of items with keys, the batch
    gets ``pair_keys`` [images] int64.
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
        inputs: dict[str, Any] = {}
        if self._collator and self._images:
            inputs |= self._collator([{k: item[k] for k in ("image", "cropped") if k in item} for item in items])
        if self._collator and self._texts:
            captions, negatives = texts_of(items)
            inputs |= self._collator.tokenize(captions + negatives)
        else:  # the student's are dealt out to the micro-batches anew
            inputs |= {name: batch[name] for name in TEXT_INPUTS if name in batch}
        return {f"{self._prefix}{name}": value for name, value in inputs.items()}
