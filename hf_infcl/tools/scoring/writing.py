"""Writes the ledger of a training set, of a model as it is or of a training that has left pairs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...data import ImageTextDataset, ImageTextStream
from ...data.pairs import usable_captions
from ...shards.members import member_file
from ...shards.values import counted
from ...windows.selection import LEAST_BELOW, WithoutNoisyPairs
from . import WINDOW
from .ledger import CERTAIN, LEDGER_FILE, RATHER_WRONG, SHEET_FILE, Ledger, make_ledger
from .scoring import score_pairs
from .sheet import SHOWN, draw_suspicious, small_jpeg

if TYPE_CHECKING:
    from ...training.trainer import InfCLTrainer

logger = logging.getLogger(__name__)


def write_ledger(trainer: InfCLTrainer, dataset: ImageTextDataset | ImageTextStream, window: int = WINDOW) -> Ledger:
    """Scores a training set by the model of an `InfCLTrainer`; see `score_pairs`; collective.

    The set should not augment its images.

    The main process writes `LEDGER_FILE` and `SHEET_FILE` into ``output_dir``, and alone knows the file names of a
    table.
    """
    trainer.dual_encoder.model.eval()
    ledger, pictures = score_pairs(trainer, dataset, window)
    if trainer.is_world_process_zero():
        if isinstance(dataset, ImageTextDataset):
            ledger.sample = file_names(dataset, ledger.key)
        _write(ledger, pictures, trainer)
    return ledger


def write_ledger_of_training(trainer: InfCLTrainer, dataset: ImageTextDataset) -> Ledger | None:
    """Writes a ledger with the averages of a training that had ``leave_out``, in the main process; None without it.

    If it cannot be written, this warns and returns None, because the results of the training are still to be saved.
    ``dataset`` is the table that was trained. Of its images, those of the pairs with the lowest averages are read.
    """
    selections = [one for one in trainer.window_step.extensions if isinstance(one, WithoutNoisyPairs)]
    if not selections or not trainer.is_world_process_zero():
        return None
    rows, scores = (part.numpy() for part in selections[0].averages.slow())
    try:
        column = dataset.caption_column
        captions = dataset.table.select_columns([column])[rows.tolist()][column] if len(rows) else []
        captions = [usable_captions(value)[0] for value in captions]
        left_out, names = selections[0].left_out().numpy(), file_names(dataset, rows)
        ledger = make_ledger(dataset.key_fingerprint(), rows, scores, captions, names, left_out)
        lowest = ledger.key[ledger.most_suspicious(SHOWN)].tolist()
        _write(ledger, {row: small_jpeg(dataset.image(row)) for row in lowest}, trainer)
    except Exception as error:
        logger.warning("The ledger was not written. %s: %s", type(error).__name__, error)
        return None
    return ledger


def _write(ledger: Ledger, pictures: Mapping[int, bytes], trainer: InfCLTrainer) -> None:
    folder = Path(str(trainer.args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    ledger.write(folder / LEDGER_FILE)
    draw_suspicious(ledger, pictures).save(folder / SHEET_FILE)


def file_names(dataset: ImageTextDataset, keys: np.ndarray) -> list[str]:
    """The image files of some rows of a table, from the folder on that holds all files; none if it does not name all.

    ``keys`` [n] int64 are the rows.
    """
    paths = dataset.computed("path")
    if paths.null_count:
        return []
    files = [member_file(path) for path in paths.to_pylist()]
    names, folders = [files[row] for row in keys], {os.path.dirname(file) for file in files}
    if all(map(os.path.isabs, folders)):
        shared = os.path.commonpath(folders)
        names = [os.path.relpath(name, shared) for name in names]
    return names


def ledger_lines(ledger: Ledger, folder: str | Path, *, waits_for: str = "", learned: bool = False) -> Iterator[str]:
    """What a ledger that was written into a folder says, for a person.

    Args:
        waits_for: why the rule of ``leave_out`` has not begun, or has stopped; empty if there was none.
        learned: whether the model was trained on these pairs, wrong ones included.
    """
    wrong, expected = len(ledger.certainly_wrong()), float(ledger.p_wrong.sum())
    few = expected < max(0.5, LEAST_BELOW * len(ledger))
    file = Path(folder, LEDGER_FILE)
    if learned:
        yield (
            "This model was trained on these pairs, as its record says. It may know wrong ones by heart, and finds too "
            "few of them. Score with another model, or train with --leave_out noisy."
        )
    if ledger.says_nothing():
        yield (
            f"The scores in {file} do not mean anything yet: to this model most of the {len(ledger):,} pairs look "
            "wrong. Do not exclude pairs by them."
        )
        return
    if not wrong and expected < 0.5:
        by_heart = ", but this model was trained on all of them, and may know wrong ones by heart" if waits_for else ""
        yield f"None of {len(ledger):,} pairs seems wrong{by_heart}. The score of each is in {file}."
    elif waits_for and not few:
        yield f"Do not exclude pairs by the scores in {file}, because --leave_out did not: {waits_for}."
        return
    else:
        exclude = (
            f" `infcl train --exclude {file}:{RATHER_WRONG:g}` trains without all that are likelier wrong than right."
        )
        about = "At least" if learned or waits_for else "About"
        do = "does" if round(expected) == 1 else "do"
        yield (
            f"{about} {expected:,.0f} of {counted(len(ledger), 'pair')} {do} not seem to belong together, {wrong:,} of "
            f"them with a probability of at least {CERTAIN:g}.{exclude if wrong else ''}"
        )
    yield f"The {min(SHOWN, len(ledger))} pairs with the lowest scores are drawn in {Path(folder, SHEET_FILE)}."
    if few and (learned or waits_for):
        yield (
            "Wrong pairs that a model knows by heart may still have the lowest scores. Look at these: if they are "
            f"wrong, `infcl train --exclude {file}:5%` trains without the lowest 5%."
        )
