"""What an earlier run has left in the output folder, which is continued, deleted or refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from ...conversion.pretrained import base_of_adapters
from ...data.sets import STATED, read_sets
from ...encoders.adapters import ADAPTER_FILES
from ...options.commands import DataOptions, EvaluationOptions, GuardOptions, ModelOptions
from ...processes.collectives import Processes
from ...training.trainer import InfCLTrainer
from ..publishing.callback import CURVES_FILE
from ..publishing.facts import FACTS_FILE
from ..publishing.pictures import PICTURES_FILE

RESULTS = ("*_results.json", ".eval_results", "trainer_state.json", FACTS_FILE, CURVES_FILE, PICTURES_FILE)
LAST_RESULTS = ("eval_results.json", TRAINER_STATE_NAME)  # written only at the end of a run


def earlier_results(folder: Path, resume: str | None) -> list[Path]:
    """The checkpoints and results of an earlier run in the folder, unless this run continues it.

    With ``"auto"``, a run that ended before its first checkpoint and before its results starts again.
    """
    checkpoints = list(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    if resume and (checkpoints or resume != "auto"):
        return []
    if resume and not any((folder / name).exists() for name in LAST_RESULTS):
        return []
    return sorted([*checkpoints, *(path for pattern in RESULTS for path in folder.glob(pattern))])


def weights_of_other_kind(folder: Path, adapters: bool) -> list[Path]:
    """The whole model of an earlier run if this one saves adapters, or its adapters, which would be added to this one.

    A folder that holds both is loaded as both together.
    """
    patterns = (CONFIG_NAME, "model*.safetensors*") if adapters else ADAPTER_FILES
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


class EarlierDeleted(TrainerCallback):
    """Deletes the results of an earlier run once a training begins, which no wrong option can prevent any more.

    That is done on every machine that saves its own results.
    """

    def __init__(self, results: Sequence[Path]) -> None:
        self._results = results

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        for path in self._results if args.should_save else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def has_results(trainer: InfCLTrainer) -> bool:
    """Whether the results in output_dir belong to the current step; the same answer on all processes."""
    path = Path(str(trainer.args.output_dir), TRAINER_STATE_NAME)
    try:
        written = TrainerState.load_from_json(str(path)).global_step == trainer.state.global_step
    except (OSError, ValueError, TypeError):  # it is missing, or a run was killed while it wrote the file
        written = False
    return bool(Processes().agree([written])[0][0])


def check_output_folder(
    output_dir: str | None, model: ModelOptions, data: DataOptions, evaluation: EvaluationOptions, guards: GuardOptions
) -> None:
    """Raises a ValueError if the results would overwrite the model, or be written among the files of a dataset."""
    output = Path(str(output_dir)).resolve()
    named = {**vars(data), **vars(evaluation), **vars(guards)}
    datasets = [(role, spec.path) for role in STATED if role in named for spec in read_sets(role, named[role])]
    base = base_of_adapters(model.model) if Path(model.model).is_dir() else None
    for option, source in (("model", model.model), ("model", base), *datasets):
        folder = Path(source or "").resolve()
        if not source or not folder.is_dir():
            continue
        if folder == output or (option != "model" and folder in output.parents):
            raise ValueError(
                f"--output_dir {output_dir} is inside the folder of --{option} {source}, whose files the results would "
                "replace or mix with. Choose another --output_dir."
            )
