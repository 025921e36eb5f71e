"""Teachers that run beside the student, with which stored ones are compared."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_infcl import ContrastiveCollator
from hf_infcl.models.dual_encoder import NO_TEXTS, DualEncoder
from hf_infcl.step.terms import SIDES, TeacherDistance


class Running:
    """A teacher that is a model, of what the student reads."""

    options: ClassVar[dict[str, Any]] = {}
    words, partial = "a model that runs with the student", False

    def __init__(self, model: nn.Module, sides: Sequence[str]) -> None:
        self.encoder, self.sides = DualEncoder(model.eval().requires_grad_(False)), sides
        self.width = self.encoder.width()

    def embed(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            both = self.both(inputs)
        return tuple(one for side, one in zip(SIDES, both, strict=True) if side in self.sides)

    def both(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.encoder.embed(self.encoder.model.to(inputs["input_ids"].device), inputs)


class Reading(Running):
    """A teacher with a processor of its own, which knows some items by what the student reads of them."""

    def __init__(self, model: nn.Module, processor: Any, items: Sequence[Any], student: Any) -> None:
        super().__init__(model, SIDES)
        reads, sees = ContrastiveCollator(student), ContrastiveCollator(processor)
        captions = sorted({caption for item in items for caption in item["caption"]})
        images = [{"image": item["image"]} for item in items]
        self.pixels = reads(images)["pixel_values"].flatten(1)
        self.captions = {self.read(reads.tokenize([caption]))[0]: n for n, caption in enumerate(captions)}
        with torch.no_grad():
            self.images = self.encoder.encode_images(sees(images))
            self.texts = self.encoder.encode_texts(sees.tokenize(captions))

    @staticmethod
    def read(inputs: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
        both = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
        return [tuple(tokens[mask].tolist()) for tokens, mask in both]

    def both(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        distances = torch.cdist(
            inputs["pixel_values"].flatten(1), self.pixels, compute_mode="donot_use_mm_for_euclid_dist"
        )
        assert distances.min(1).values.max() < 1e-3, "an image that it does not know"
        texts = [] if NO_TEXTS in inputs else [self.captions[tokens] for tokens in self.read(inputs)]
        return self.images[distances.argmin(1)], self.texts[texts]


class RunningDistance(TeacherDistance):
    """The term of a teacher that reads the texts as they are encoded."""

    in_order = False

    def reference(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> tuple[Tensor, ...]:
        embeds: tuple[Tensor, ...] = self.teacher.embed(inputs, frozen_outputs)
        return embeds


def taught_by(teacher: Running, student: nn.Module, weight: float, **options: Any) -> dict[str, Any]:
    """The options of a trainer whose student such a teacher teaches."""
    width = DualEncoder(student).width()
    return {"extensions": [RunningDistance(teacher, weight, width=width, **options)]}
