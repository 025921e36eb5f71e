"""`infcl card`: writes the model card of a folder again, from the facts that `infcl train` left there."""

from __future__ import annotations

import argparse

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..publishing.callback import write_publication
from ..publishing.facts import TrainingFacts
from .launched import mistakes_in_one_line


def card(parser: argparse.ArgumentParser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Writes the card, and the curves if the folder has the log of the training."""
    folder = namespace.folder
    with mistakes_in_one_line(parser.prog, of_libraries=False):
        facts = TrainingFacts.load(folder)
    log = folder / TRAINER_STATE_NAME
    write_publication(facts, folder, TrainerState.load_from_json(str(log)) if log.is_file() else TrainerState())
    print(f"The card was written to {folder / 'README.md'}.")
