"""Writes the ledger of a training set, of a model as it is or of a training that has left pairs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...data import ImageTextDataset, ImageTextStream
from ...processes.collectives import Processes
from ...shards.members import member_file
from ...shards.names import sample_key
from ...shards.values import counted
from ...windows.selection import LEAST_BELOW, WithoutNoisyPairs
from . import WINDOW
from .ledger import CERTAIN, LEDGER_FILE, RATHER_WRONG, SHEET_FILE, Ledger, make_ledger
from .scoring import score_pairs
from .sheet import SHOWN, draw_suspicious
from .words import lines_of_words

if TYPE_CHECKING:
    from ...training.trainer import InfCLTrainer

logger = logging.getLogger(__name__)


def write_ledger(
    trainer: InfCLTrainer,
    dataset: ImageTextDataset | ImageTextStream,
    window: int = WINDOW,
    averages: tuple[Tensor, Tensor] | None = None,
    left_out: np.ndarray | None = None,
) -> Ledger:
    """Scores a training set by the model of an `InfCLTrainer`; see `score_pairs`; collective.

    The set should not augment its images.

    The main process writes `LEDGER_FILE` and `SHEET_FILE` into ``output_dir``, and alone knows the file names of a
    table. With ``averages``, ``left_out`` [n] bool says of the same pairs whether they are left out.
    """
    trainer.dual_encoder.model.eval()
    ledger, pictures = score_pairs(trainer, dataset, window, averages)
    if averages is not None and left_out is not None:
        ledger.left_out = left_out[np.isin(averages[0].numpy(), ledger.key)]  # both are in the order of the keys
    if trainer.is_world_process_zero():
        if isinstance(dataset, ImageTextDataset):
            ledger.sample = file_names(dataset, ledger.key) or []
        folder = Path(str(trainer.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        ledger.write(folder / LEDGER_FILE)
        draw_suspicious(ledger, pictures).save(folder / SHEET_FILE)
    return ledger


def write_ledger_of_training(trainer: InfCLTrainer, dataset: ImageTextDataset | ImageTextStream) -> Ledger | None:
    """Writes a ledger with the averages of a training that had ``leave_out``; None if it had not; collective.

    A stream is not read once more, and neither is a table by a model that FSDP2 shards: the ledger then
    has keys, scores and probabilities only, and of a stream the names that `sample_names` finds.

    If it cannot be written, this warns and returns None, because the results of the training are still to be saved.
    ``dataset`` is the set that was trained; of a stream it knows the `key_fingerprint` from before the training.
    Its images are read without augmentation.
    """
    selections = [one for one in trainer.window_step.extensions if isinstance(one, WithoutNoisyPairs)]
    if not selections:
        return None
    on_bad_sample, dataset = dataset.on_bad_sample, dataset.plain()
    dataset.on_bad_sample = on_bad_sample
    keys, scores = averages = selections[0].averages.slow()
    left_out = selections[0].left_out().numpy()
    try:
        if not (isinstance(dataset, ImageTextStream) or trainer.is_fsdp_enabled):
            return write_ledger(trainer, dataset, averages=averages, left_out=left_out)
        find_names: Any = sample_names if isinstance(dataset, ImageTextStream) else file_names
        names = find_names(dataset, keys.numpy())
        ledger = make_ledger(dataset.key_fingerprint(), keys.numpy(), scores.numpy(), sample=names)
        ledger.left_out = left_out
        if trainer.is_world_process_zero():
            ledger.write(Path(str(trainer.args.output_dir), LEDGER_FILE))
    except Exception as error:
        logger.warning("The ledger was not written. %s: %s", type(error).__name__, error)
        return None
    return ledger


def sample_names(stream: ImageTextStream, keys: np.ndarray) -> list[str] | None:
    """The names of the samples with some keys, each after that of its shard; None if none is known; collective.

    A training knows its samples by their hashes, so the processes read the headers of all local shards once. Remote
    ones would have to be read as a whole: their samples have the name "", as those of a shard that cannot be read.
    Each process holds the names that it has found, and the main process those of all keys. ``keys`` [n] int64 are in
    ascending order; see `hf_infcl.shards.names.sample_key`.
    """
    processes = Processes()
    names_by_place: dict[int, str] = {}
    for shard in stream.shards[processes.rank :: processes.world_size]:
        if "://" in shard.url:
            continue
        names: list[str] = []
        try:
            names.extend(shard.reader.names(shard.url))
        except (OSError, ValueError) as error:  # damaged shards, too
            logger.warning("The ledger does not have the names of some samples. %s", error)
        shard_keys = np.array([sample_key(shard.name, name) for name in names], np.int64)
        places = np.searchsorted(keys, shard_keys)
        known = places < len(keys)
        known[known] = keys[places[known]] == shard_keys[known]
        names_by_place |= {int(places[row]): f"{shard.name} {names[row]}" for row in np.flatnonzero(known)}
    every = {place: name for part in processes.gather_objects(names_by_place) for place, name in part.items()}
    return [every.get(place, "") for place in range(len(keys))] if every else None


def file_names(dataset: ImageTextDataset, keys: np.ndarray) -> list[str] | None:
    """The image files of some rows of a table, from the folder on that holds all files; None if it does not name all.

    ``keys`` [n] int64 are the rows.
    """
    paths = dataset.computed("path")
    if paths.null_count:
        return None
    files = [member_file(path) for path in paths.to_pylist()]
    names, folders = [files[row] for row in keys], {os.path.dirname(file) for file in files}
    if all(map(os.path.isabs, folders)):
        shared = os.path.commonpath(folders)
        names = [os.path.relpath(name, shared) for name in names]
    return names


def ledger_lines(ledger: Ledger, folder: str | Path, *, waits_for: str = "", learned: bool = False) -> Iterator[str]:
    """What a ledger that was written into a folder says, for a person.

    Args:
        waits_for: why the rule of ``leave_out`` has not begun; empty if it has, or if there was none.
        learned: whether the model was trained on these pairs, wrong ones included.
    """
    wrong, expected = len(ledger.wrong(CERTAIN)), float(ledger.p_wrong.sum())
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
        yield f"Do not exclude pairs by the scores in {file}, because the rule of --leave_out has not begun."
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
    if any(ledger.caption):
        yield from lines_of_words(ledger.caption, ledger.p_wrong >= CERTAIN)
        yield f"The {min(SHOWN, len(ledger))} pairs with the lowest scores are drawn in {Path(folder, SHEET_FILE)}."
    else:
        yield "This ledger has no captions, and no pairs were drawn. `infcl score` of the same data writes both."
    if few and (learned or waits_for):
        yield (
            "Wrong pairs that a model knows by heart may still have the lowest scores. Look at these: if they are "
            f"wrong, `infcl train --exclude {file}:5%` trains without the lowest 5%."
        )
