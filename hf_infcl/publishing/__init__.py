"""The record, the card and the curves that are published beside a trained model."""

from .callback import CURVES_FILE, CardCallback, write_publication
from .card import model_card
from .curves import plot_curves
from .pictures import PICTURES_FILE, PicturesCallback
from .record import RECORD_FILE, Evaluation, Source, TrainingRecord, source_name, training_record

__all__ = [
    "CURVES_FILE",
    "PICTURES_FILE",
    "RECORD_FILE",
    "CardCallback",
    "Evaluation",
    "PicturesCallback",
    "Source",
    "TrainingRecord",
    "model_card",
    "plot_curves",
    "source_name",
    "training_record",
    "write_publication",
]
