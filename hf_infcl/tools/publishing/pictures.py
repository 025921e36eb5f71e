"""Draws evaluation images with their captions and those that the model finds for them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ...data import ImageTextDataset, ZeroShotDataset
from ..scoring.sheet import letters_of, lines_of, resized

if TYPE_CHECKING:
    from ...training.trainer import InfCLTrainer

PICTURES_FILE = "pictures.png"
CAPTIONS = 3  # different captions shown for each image
SEARCHED = 50  # captions with the highest cosines; the different ones are taken from them
SIDE, WIDTH, LINE = 96, 900, 25  # pixels: the longer side of an image, the largest width, the height of a line
_LETTERS = 14  # pixels
_RIGHT, _WRONG = "#00693e", "#a6341b"

logger = logging.get_logger(__name__)


class PicturesCallback(TrainerCallback):
    """Draws some images with their best captions at each evaluation, into `PICTURES_FILE` in ``output_dir``.

    The best captions are those of the whole evaluation set with the highest cosines; equal captions appear once.
    Weights & Biases, trackio, MLflow and TensorBoard also receive the picture if ``report_to`` names them. An error of
    a tracker is logged and does not end the training. The embeddings come from ``compute_metrics`` of the trainer,
    which this callback sets.

    Args:
        dataset: the pairs with all captions that the trainer evaluates as "pairs".
        count: the number of images, evenly spread over the dataset.

    Raises:
        ValueError: the trainer already has ``compute_metrics``.
    """

    def __init__(self, trainer: InfCLTrainer, dataset: ImageTextDataset | ZeroShotDataset, count: int) -> None:
        if trainer.compute_metrics is not None:
            raise ValueError("PicturesCallback replaces compute_metrics. Use only one of the two.")
        assert isinstance(dataset, ImageTextDataset)
        self._trainer, self._dataset = trainer, dataset
        count = min(count, len(dataset))
        self._rows = [number * len(dataset) // count for number in range(count)]
        self._measured: EvalPrediction | None = None  # from compute_metrics to on_evaluate
        trainer.compute_metrics = self._keep
        trainer.add_callback(self)

    def _keep(self, measured: EvalPrediction) -> dict[str, float]:
        self._measured = measured
        return {}

    def best_captions(self, measured: EvalPrediction) -> list[list[tuple[str, float, bool]]]:
        """The best captions of each image, their cosines, and whether they belong to the image."""
        labels: Any = measured.label_ids
        ends = np.cumsum(labels[0])  # the number of captions up to each row
        images, texts = (e / np.linalg.norm(e, axis=1, keepdims=True) for e in measured.predictions)
        answers = []
        for row in self._rows:
            cosines = texts @ images[row]
            best: dict[str, float] = {}
            for number in np.argsort(-cosines)[:SEARCHED]:
                owner = int(np.searchsorted(ends, number, side="right"))
                caption = self._dataset.without_image(owner)["caption"][number - ends[owner]]
                best.setdefault(caption, float(cosines[number]))
            truths = self._dataset.without_image(row)["caption"]
            answers.append([(text, cosine, text in truths) for text, cosine in list(best.items())[:CAPTIONS]])
        return answers

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        measured, self._measured = self._measured, None
        wanted = "eval_pairs_loss" in (metrics or {})
        if measured is None or not (wanted and state.is_world_process_zero):
            return
        images = [self._dataset[row]["image"] for row in self._rows]
        right = [self._dataset.without_image(row)["caption"] for row in self._rows]
        picture = draw(images, self.best_captions(measured), right)
        path = Path(str(args.output_dir), PICTURES_FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
        except OSError as error:
            logger.error(f"The picture of step {state.global_step} could not be written to {path}: {error}")
            return
        try:
            self._pass_on(path, picture, args, state)
        except Exception as error:  # a tracker's, of any kind: raised here, it would end this process alone
            logger.error(f"The picture of step {state.global_step} did not reach all trackers: {error!r}")

    def _pass_on(self, path: Path, picture: Image.Image, args: TrainingArguments, state: TrainerState) -> None:
        """Gives the picture to the trackers that can show it."""
        for tracker in {"wandb", "trackio", "mlflow"}.intersection(args.report_to or ()):
            package: Any = importlib.import_module(tracker)
            if tracker == "mlflow":
                package.log_artifact(str(path))
            else:
                package.log({"pictures": package.Image(str(path))})
        for callback in self._trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                writer.add_image("pictures", np.asarray(picture), state.global_step, dataformats="HWC")


def draw(
    images: list[np.ndarray], captions: list[list[tuple[str, float, bool]]], right: list[list[str]]
) -> Image.Image:
    """A row for each image: its own caption, and below it the answers, marked as right or wrong.

    Args:
        images: uint8 [H, W, 3] each.
        captions: the result of `PicturesCallback.best_captions`.
        right: the captions of each image, of which the first is shown.
    """
    font = letters_of(_LETTERS)
    height = SIDE + 20
    picture = Image.new("RGB", (WIDTH, height * len(images)), "white")
    pen = ImageDraw.Draw(picture)
    left, furthest = SIDE + 28, 0.0
    for number, (image, answers, truths) in enumerate(zip(images, captions, right, strict=True)):
        top = number * height + 8
        picture.paste(resized(image, SIDE), (8, top))
        more = f"  (and {len(truths) - 1} more)" if len(truths) > 1 else ""
        lines = [(f"right:  {_cut(truths[0] if truths else '')}{more}", "black")]
        lines += [(f"{cosine:.3f}  {_cut(text)}", _RIGHT if is_own else _WRONG) for text, cosine, is_own in answers]
        for line, (text, colour) in enumerate(lines):
            beside, below = left + (LINE if line else 0), top + line * LINE
            if line:
                _mark(pen, (left, below), colour)
            pen.text((beside, below), text, colour, font)
            furthest = max(furthest, beside + pen.textlength(text, font))
    return picture.crop((0, 0, min(WIDTH, round(furthest) + 8), picture.height))


def _cut(text: str) -> str:
    return "".join(lines_of(text, 80, 1))


def _mark(pen: ImageDraw.ImageDraw, place: tuple[int, int], colour: str) -> None:
    """A check mark, or a cross; the font has neither."""
    x, y = place[0] + 3, place[1] + 4
    if colour == _RIGHT:
        pen.line([(x, y + 6), (x + 4, y + 10), (x + 11, y)], colour, 2, joint="curve")
    else:
        pen.line([(x + 1, y), (x + 10, y + 10)], colour, 2)
        pen.line([(x + 1, y + 10), (x + 10, y)], colour, 2)
