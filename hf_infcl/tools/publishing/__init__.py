"""The facts, the card and the curves that are published beside a trained model."""

from .average_card import average_card
from .callback import CURVES_FILE, CardCallback, write_publication
from .cards import model_card
from .changes import lines_of_changes
from .curves import plot_curves
from .facts import FACTS_FILE, Evaluation, Source, TrainingFacts, source_name, training_facts
from .front import FRONT_FILE, plot_front, write_averages
from .markdown import escaped
from .outcome import doubtful_rate, outcome
from .pictures import PICTURES_FILE, PicturesCallback
from .telling import ProgressPrinter, make_rows, quieten, table_lines

__all__ = [
    "CURVES_FILE",
    "FACTS_FILE",
    "FRONT_FILE",
    "PICTURES_FILE",
    "CardCallback",
    "Evaluation",
    "PicturesCallback",
    "ProgressPrinter",
    "Source",
    "TrainingFacts",
    "average_card",
    "doubtful_rate",
    "escaped",
    "lines_of_changes",
    "make_rows",
    "model_card",
    "outcome",
    "plot_curves",
    "plot_front",
    "quieten",
    "source_name",
    "table_lines",
    "training_facts",
    "write_averages",
    "write_publication",
]
