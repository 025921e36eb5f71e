"""Makes the term of a training's teachers, and refuses teachers that could not teach exactly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from accelerate.utils import DistributedType
from torch import nn

from ..conversion.models import load, stated_licence
from ..data import ContrastiveCollator
from ..encoders.dual_encoder import DualEncoder
from ..loading.loaders import training_collator
from ..loading.stored_teachers import stored_teachers
from ..loading.teacher_inputs import ModelInputs
from ..options.teacher_options import TeacherOptions
from ..windows.extensions import LossTerm, of_kind
from ..windows.setup import Setup
from ..windows.teachers import OnlineTeacher
from ..windows.terms import Teacher, TeacherDistance


def make_teachers(setup: Setup, teacher: object, *, remakes_model: bool) -> tuple[TeacherDistance, ...]:
    """The term of the teachers that the arguments name, or that were passed; none without teachers.

    Args:
        teacher: a module, a pair of a module and its processor, or a list of these; None for none.
        remakes_model: whether ``model_init`` makes a new model for each training.

    Raises:
        ValueError: a teacher cannot be loaded, or see the data; the training cannot be exact with it; stored
            embeddings are of other data, or pairs have none.
    """
    args = setup.args
    modules = [] if teacher is None else list(teacher) if isinstance(teacher, list) else [teacher]
    modules += [(*load(name)[:2], name) for name in args.teacher or ()] if setup.data is not None else []
    folders = args.teacher_embeddings or [] if setup.data is not None else []
    if not modules and not folders:
        options = ("teacher_weight", "teacher_side")
        unused = [name for name in options if getattr(args, name) != getattr(TeacherOptions, name)]
        if unused and not (args.teacher or args.teacher_embeddings):
            values = " and ".join(f"{name}={getattr(args, name)!r}" for name in unused)
            raise ValueError(
                f"{values} would have no effect without a teacher. Name one (teacher, teacher_embeddings), or leave "
                f"{' and '.join(unused)} out."
            )
        if args.contrastive_weight == 0 and not args.keep_features and not of_kind(setup.extensions, LossTerm):
            raise ValueError(
                "contrastive_weight=0 leaves nothing to learn without a teacher. Name one, or leave it out."
            )
        return ()
    sides = args.taught_sides
    stored, partial = stored_teachers(folders, [setup.data], args)
    teachers: list[Teacher] = [*stored]
    teachers += [_online(module, setup, number, sides) for number, module in enumerate(modules, len(stored))]
    term = TeacherDistance(
        teachers,
        args.teacher_weight,
        sides,
        partial=partial,
        width=setup.encoder.width(),
        seed=args.seed,
        device=args.device,
    )
    if term.parameters() and setup.accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"A teacher of another width ({' and '.join(str(t.width) for t in term.teachers)}, the student has "
            f"{setup.encoder.width()}) needs a linear map beside the model, whose optimizer FSDP shards. Use DDP, or a "
            "teacher of the same width."
        )
    if term.parameters() and remakes_model:
        raise ValueError(
            "model_init makes a new model for each training, but the linear map to a teacher of another width would "
            "go on from the last one. Pass the model itself, or a teacher of the same width."
        )
    return (term,)


def _online(teacher: object, setup: Setup, number: int, sides: Sequence[str]) -> OnlineTeacher:
    module, processor, name = (*teacher, None, None)[:3] if isinstance(teacher, tuple) else (teacher, None, None)
    args, licence = setup.args, None if name is None else stated_licence(name)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "A teacher must be a dual encoder, or a pair of one and its processor, got a "
            f"{type(module).__name__}. Load it first: AutoModel.from_pretrained(name)."
        )
    if module is setup.encoder.model:
        raise ValueError("The teacher is the model that is trained. Pass a copy; keep_features is made for its start.")
    if args.cache_features is not None:
        raise ValueError(
            "cache_features reads features instead of images or captions, which a teacher needs. Store the teacher's "
            "embeddings first (`infcl embed --format npy`), or leave cache_features out."
        )
    encoder = DualEncoder(module.to(args.device))
    make_teacher = partial(OnlineTeacher, encoder, setup, number=number, sides=sides, licence=licence)
    tokens = setup.encoder.vocabulary if processor is None else len(processor.tokenizer)
    if encoder.vocabulary is not None and tokens is not None and tokens > encoder.vocabulary:
        raise ValueError(
            f"A teacher, a {type(module).__name__}, has embeddings of {encoder.vocabulary} tokens, and "
            f"{'the student' if processor is None else 'its tokenizer'} has {tokens}. Pass the pair of the teacher and "
            "the processor that it was trained with."
        )
    if processor is None:
        return make_teacher(ModelInputs(None, number=number), None)
    student = training_collator(setup.collator, args)
    if not isinstance(student, ContrastiveCollator):
        raise ValueError(
            f"A teacher with its own processor reads images and captions, but the data collator is a "
            f"{type(student).__name__}. Pass a processing_class or a ContrastiveCollator, or a teacher without a "
            "processor, which reads what the student reads."
        )
    collator = ContrastiveCollator.for_model(processor, getattr(encoder.base, "config", None), uint8=True)
    images = [one.processor.image_processor.to_json_string() for one in (student, collator)]
    texts = [one.text_fingerprint() for one in (student, collator)]
    # A teacher of one side reads only that side.
    differences = {
        "images": "image" in sides and images[0] != images[1],
        "texts": "text" in sides and texts[0] != texts[1],
    }
    return make_teacher(ModelInputs(collator, **differences, number=number), collator.normalise)
