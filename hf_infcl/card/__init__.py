"""The facts, the card and the curves that are published beside a trained model.

`model_cards/README.md` describes the public names.
"""

from .cards import CardCallback
from .facts import Evaluation, Source, source_name, training_facts

__all__ = ["CardCallback", "Evaluation", "Source", "source_name", "training_facts"]
