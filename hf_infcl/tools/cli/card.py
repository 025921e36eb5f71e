"""`infcl card`: writes the model card of a folder again, from the facts that `infcl train` left there."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..publishing.callback import write_publication
from ..publishing.facts import TrainingFacts
from .launched import mistakes_in_one_line


def card(parser: argparse.ArgumentParser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Writes the card, and the curves if the folder has the log of the training."""
    folder = Path(namespace.folder)
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        facts, log = TrainingFacts.load(folder), folder / TRAINER_STATE_NAME
        try:
            state = TrainerState.load_from_json(str(log)) if log.is_file() else TrainerState()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{log} is damaged: {error}. Without that file the card has no curves.") from error
    write_publication(facts, folder, state)
    print(f"The card was written to {folder / 'README.md'}.")
