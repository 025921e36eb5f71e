"""Terms of the loss beside the contrastive one: what the embeddings of each pair are drawn to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..passes.grad_cache import Features
from ..processes.collectives import Processes
from .extensions import LossTerm
from .start import Start

SIDES = ("image", "text")
# inputs(items, batch): what a data collator adds to a batch for a teacher, by names that begin with `OF_TEACHERS`.
Inputs = Callable[[Sequence[Any], Mapping[str, Any]], dict[str, Tensor]]
OF_TEACHERS = "teacher_"  # what the names of a batch's tensors for teachers begin with


class Teacher(Protocol):
    """Knows the embeddings that a student is drawn to."""

    @property
    def width(self) -> int | None:
        """The dimensions of its embeddings; None for those of the student's."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What a resumed training has to share with it; teachers of equal ``weights`` share a linear map."""

    @property
    def inputs(self) -> Inputs | None:
        """What a data collator adds to a batch for it; None for nothing."""

    @property
    def words(self) -> str:
        """The teacher in words, for the model card."""

    def embed(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> Features:
        """For each side that is taught, [rows, width] of length 1, without a graph; see `LossTerm.reference`."""
        ...

    def known(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Which images and which texts it knows, [images] and [texts] bool: an image with its captions, or neither."""
        ...


class TeacherDistance(LossTerm):
    """β times the mean over the global batch of ‖v − v_T‖² + ‖t − t_T‖², the squared distances to a teacher's.

    Several captions of an image add up, and so do negative captions: the batch is its images.

    Of several teachers it is the mean of their distances. Pairs that no teacher knows are left out of the mean. A
    teacher of another width is compared with a linear map of the student's embeddings (without bias, then normalised),
    which is trained with the model and not saved with it. CLIP-KD (arXiv 2307.12732) found this the best single term.

    Args:
        teachers: at least one; equally many on all processes.
        sides: of `SIDES`, those that are taught.
        partial: whether a teacher may not know all pairs; equal on all processes.
        width: that of the student's embeddings, where that of a teacher may differ.
        seed: of the maps' first weights.
    """

    name = "teacher"
    in_order = True

    def __init__(
        self,
        teachers: Sequence[Teacher],
        weight: float,
        sides: Sequence[str] = SIDES,
        *,
        partial: bool = False,
        width: int | None = None,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.teachers = list(teachers)
        self._weight, self._sides, self._partial = weight, list(sides), partial
        generator = torch.Generator().manual_seed(seed)
        self._maps: dict[tuple[int, str], nn.Parameter] = {}
        known = [
            (teacher.options.get("weights", number), teacher.width) for number, teacher in enumerate(self.teachers)
        ]
        self._first = [known.index(one) for one in known]  # the teachers whose maps are used
        for number, teacher in enumerate(self.teachers):
            if teacher.width is None or width is None or teacher.width == width or self._first[number] < number:
                continue
            for side in self._sides:  # as nn.Linear begins
                drawn = torch.empty(teacher.width, width).uniform_(-(width**-0.5), width**-0.5, generator=generator)
                self._maps[number, side] = nn.Parameter(drawn.to(device))

    @property
    def options(self) -> dict[str, Any]:
        return {f"teacher {n}: {key}": v for n, one in enumerate(self.teachers, 1) for key, v in one.options.items()}

    @property
    def card(self) -> Mapping[str, str]:
        taught = "image and text" if len(self._sides) == 2 else self._sides[0]
        through = ", through a linear map that was trained and is not saved" if self._maps else ""
        what = f"squared distance of the {taught} embeddings to the teacher's, weight {self._weight:g}{through}"
        return {
            "teacher" if len(self.teachers) == 1 else "teachers": "; ".join(t.words for t in self.teachers),
            "taught by": what,
        }

    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self._maps.values())

    def reference(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> Features:
        features: list[Tensor] = []
        for teacher in self.teachers:
            features += teacher.embed(inputs, frozen_outputs)
            if self._partial:
                features += teacher.known(inputs)
        return tuple(features)

    def value(self, features: Features, references: Features) -> Tensor:
        places = [SIDES.index(side) for side in self._sides]
        size = len(references) // len(self.teachers)
        each = [references[first : first + size] for first in range(0, len(references), size)]
        students = [[self._mapped(features[p], n, SIDES[p]) for p in places] for n in range(len(each))]
        if not self._partial:
            distances = []
            for student, of_teacher in zip(students, each, strict=True):
                of_towers = [
                    (feature.float() - wanted.float()).square().sum()
                    for feature, wanted in zip(student, of_teacher, strict=True)
                ]
                # With equal numbers of images on all processes, the mean over processes is that of the global batch.
                distances.append(torch.stack(of_towers).sum() / len(features[0]))
            return self._weight * (distances[0] if len(distances) == 1 else torch.stack(distances).mean())
        # How many teachers know each image, and each text.
        counts = [torch.stack([of_teacher[tower - 2] for of_teacher in each]).sum(0) for tower in (0, 1)]
        parts = []
        for student, of_teacher in zip(students, each, strict=True):
            for feature, wanted, tower in zip(student, of_teacher, places, strict=False):
                distances_of_rows = (feature.float() - wanted.float()).square().sum(-1) / counts[tower].clamp(min=1)
                parts.append(torch.where(of_teacher[tower - 2], distances_of_rows, 0.0).sum())
        processes = Processes()
        taught = processes.sum((counts[0] > 0).sum().float()).clamp(min=1)
        return self._weight * torch.stack(parts).sum() * processes.world_size / taught

    def _mapped(self, student: Tensor, number: int, side: str) -> Tensor:
        if (weight := self._maps.get((self._first[number], side))) is None:
            return student
        return F.normalize(F.linear(student.float(), weight), dim=-1)

    def state_dict(self) -> dict[str, Any]:
        return {f"{number} {side}": weight.detach().cpu() for (number, side), weight in self._maps.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for (number, side), weight in self._maps.items():
            weight.copy_(state[f"{number} {side}"])


class KeptFeatures(TeacherDistance):
    """Holds the embeddings near those of the model before the training (``keep_features``), which is the teacher."""

    name = "keep_features"
    in_order = False  # the start reads the texts as they are encoded
    card: Mapping[str, str] = {}  # its option has a row

    def __init__(self, start: Start, weight: float) -> None:
        super().__init__([start], weight)
