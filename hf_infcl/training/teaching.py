"""Makes the term of a training's teacher, and refuses one that could not teach exactly."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType, send_to_device

from ..conversion.models import load, stated_licence
from ..data.collator import ContrastiveCollator, normalised
from ..encoders.dual_encoder import DualEncoder
from ..loading.embedding import described, embed
from ..loading.sources import source_of_training
from ..loading.stored_teachers import StoredTeacher, embedding_folders, leaves
from ..options.contrastive import ContrastiveOptions
from ..windows.extensions import LossTerm, of_kind
from ..windows.setup import Context
from ..windows.terms import TeacherDistance

CACHE = "_teacher"  # in output_dir; a push leaves out what begins with an underscore

logger = logging.getLogger(__name__)


def make_teachers(context: Context, *, remakes_model: bool) -> tuple[TeacherDistance, ...]:
    """The term of the teacher that the arguments name; none without a teacher. Collective.

    Args:
        remakes_model: whether ``model_init`` makes a new model for each training.

    Raises:
        ValueError: the training cannot be exact with the teacher; it cannot be loaded; stored embeddings are of other
            data, or pairs have none.
    """
    args = context.args
    if not args.teacher and not args.teacher_embeddings:
        options = ("teacher_weight", "teacher_side", "teacher_missing")
        unused = [name for name in options if getattr(args, name) != getattr(ContrastiveOptions, name)]
        if unused:
            values = " and ".join(f"{name}={getattr(args, name)!r}" for name in unused)
            raise ValueError(
                f"{values} would have no effect without a teacher. Name one (teacher, teacher_embeddings), or leave "
                f"{' and '.join(unused)} out."
            )
        if args.contrastive_weight == 0 and not args.keep_features and not of_kind(context.extensions, LossTerm):
            raise ValueError(
                "contrastive_weight=0 leaves nothing to learn without a teacher. Name one, or leave it out."
            )
        return ()
    if context.data is None:
        return ()
    folders: Any = embedded_by(args.teacher, context) if args.teacher else ()
    if args.teacher_embeddings:
        folders = embedding_folders(args.teacher_embeddings)
    teacher = StoredTeacher(folders, [context.data], args)
    term = TeacherDistance(
        teacher,
        args.teacher_weight,
        args.taught_sides,
        partial=teacher.partial,
        width=context.encoder.width(),
        seed=args.seed,
        device=args.device,
    )
    if term.parameters() and context.accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"A teacher of another width ({teacher.width}, the student has {context.encoder.width()}) needs a linear "
            "map beside the model, whose optimizer FSDP shards. Use DDP, or a teacher of the same width."
        )
    if term.parameters() and remakes_model:
        raise ValueError(
            "model_init makes a new model for each training, but the linear map to a teacher of another width would "
            "go on from the last one. Pass the model itself, or a teacher of the same width."
        )
    return (term,)


def embedded_by(name: str, context: Context) -> list[Path]:
    """The folders with the embeddings that a teacher has of each training set, which it computes unless they are there.

    Args:
        name: of the teacher, a Hub id or a folder.
    """
    parts = [*leaves(context.data)]
    model, processor, _ = load(name)
    encoder = DualEncoder(model.eval().to(context.args.device))
    collator = ContrastiveCollator.for_model(processor, getattr(encoder.base, "config", None), uint8=True)

    def prepared(inputs: dict[str, Any]) -> dict[str, Any]:
        return normalised(send_to_device(inputs, context.args.device), collator, lambda images: images)

    of_teacher = replace(context, encoder=encoder, collator=collator, prepare_inputs=prepared)
    folders = []
    for part in parts:
        source = source_of_training(part)
        record = described(source, of_teacher)
        folders.append(Path(str(context.args.output_dir), CACHE, record["fingerprint"]))
        counts = embed(source, folders[-1], of_teacher, record=record, licence=stated_licence(name))
        if any(counts.values()):
            logger.info(f"The teacher has embedded {part.name} into {folders[-1]}: {counts}.")
    return folders
