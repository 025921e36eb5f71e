"""`infcl card`: writes the model card of a folder again, from the record that `infcl train` left there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..publishing import TrainingRecord, write_publication
from .launched import mistakes_in_one_line


def card(words: Sequence[str]) -> None:
    """Writes the card, and the curves if the folder has the log of the training."""
    parser = argparse.ArgumentParser(
        prog="infcl card",
        description="Write the model card of a trained model again, with the template of this version.",
    )
    parser.add_argument(
        "folder", type=Path, help="The --output_dir of `infcl train`, or a copy of the repository that it pushed."
    )
    folder = parser.parse_args(words).folder
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        record = TrainingRecord.load(folder)
    log = folder / TRAINER_STATE_NAME
    write_publication(record, folder, TrainerState.load_from_json(str(log)) if log.is_file() else TrainerState())
    print(f"The card was written to {folder / 'README.md'}.")
