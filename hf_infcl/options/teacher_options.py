"""A teacher, and embeddings that can be cut."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from .declaring import FINITE, FROM_1, Range, option


@dataclass
class TeacherOptions:
    teacher: str | None = option(
        "Model whose embeddings the student learns: a Hub id or a folder, also of OpenCLIP. It embeds the training set "
        "once, as `infcl embed` does, into a folder in output_dir where a second start finds them.",
        decides=True,
        excludes={"teacher_embeddings": "these are of a teacher already"},
    )
    teacher_embeddings: str | None = option(
        "Folder with a teacher's embeddings, written by `infcl embed --dataset`. They are read beside the pairs, "
        "of the images as they are, and cost no more than the reading.",
        decides=False,
        one_machine=True,
    )
    teacher_weight: float = option(
        "Weight β of the squared distance to the embeddings of the teacher. All are normalised. The mean over the "
        "images of the batch, summed over both towers and all captions of an image, is minimised with the loss.",
        default=1.0,
        decides=True,
        within=FINITE,
    )
    teacher_side: str = option(
        "Which embeddings the teacher teaches: both, image or text.",
        default="both",
        decides=True,
        choices=("both", "image", "text"),
    )
    teacher_missing: str = option(
        "Pairs without a stored embedding: 'refuse' to train, or leave them to the 'contrastive' loss. They are "
        "counted before the first step.",
        default="refuse",
        decides=True,
        choices=("refuse", "contrastive"),
        excludes={"contrastive_weight=0": "it switches off the loss to which such pairs would be left"},
    )
    contrastive_weight: float = option(
        "Weight of the contrastive loss beside the teacher. With 0 it alone teaches, also images and texts that do not "
        "belong together.",
        default=1.0,
        decides=True,
        within=Range(Real, "a number from 0 to 1", lambda value: 0 <= value <= 1),
        card="weight of the contrastive loss",
    )
    matryoshka_dims: list[int] | None = option(
        "Dimensions at which the embeddings may be cut, for example 32 64 128. The loss is the mean of those of the "
        "first so many dimensions, normalised, and of all (Matryoshka, arXiv 2205.13147).",
        decides=True,
        card="dimensions at which the embeddings may be cut",
        excludes={"contrastive_weight=0": "it switches off the loss that is computed at each of these"},
    )
    dims: int | None = option(
        "Evaluate with only the first so many dimensions of the embeddings, normalised. Defaults to all.",
        decides=False,
        within=FROM_1,
        card="dimensions of the embeddings in evaluations",
    )

    @property
    def taught_sides(self) -> tuple[str, ...]:
        """Of "image" and "text", those that ``teacher_side`` names."""
        return ("image", "text") if self.teacher_side == "both" else (self.teacher_side,)
