"""Draws the curves of a run over its steps, and evaluation images with the captions that the model finds for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw
from transformers import EvalPrediction, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..data import ImageTextDataset, ZeroShotDataset
from ..evaluation.metrics import CEILING, FRACTION, HIGH, LOSS, LOW, METRICS, metric_named
from ..files.whole import written_whole
from ..quality.ledger import letters_of, lines_of, resized

if TYPE_CHECKING:
    from ..trainer.trainer import InfCLTrainer

# Okabe and Ito's colours, which the colour-blind can tell apart: blue, vermilion, green, purple, orange, sky blue.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

TRAINING, LEFT_OUT = "training loss (nats)", "share of the pairs"  # axes beside those of evaluations


def plot_curves(log_history: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Draws the training loss and, in panels of their own, losses and scores of evaluations and the share left out.

    A contrastive loss grows with the number of pairs over which it is computed. The losses of global batches and of
    evaluation sets therefore cannot be compared and share no axis. Of two evaluations at one step, only the first is
    drawn, because with ``load_best_model_at_end`` the second uses the weights of an earlier step. The 95% intervals of
    scores are shaded. Each axis shows the range of its values.

    Args:
        log_history: ``trainer.state.log_history``: dicts with "step" and any of "loss" and "eval_..." keys.
        path: the picture, PNG or another format of matplotlib.

    Raises:
        ValueError: the history holds no training loss.
    """
    # pyplot is avoided because it keeps global state and chooses a display, which a library should not do.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # By axis, label and step: a value, the bounds of its interval, and what a recall can reach.
    panels: dict[str, dict[str, dict[int, tuple[float, ...]]]]
    panels = {axis: {} for axis in (TRAINING, LEFT_OUT, LOSS, FRACTION)}
    for entry in log_history:
        for key, value in entry.items():
            axis, label = _axis_and_label(key, entry)
            if label and value is not None:
                low, high = (entry.get(key + end, math.nan) for end in (LOW, HIGH))
                point = value, low, high, entry.get(key + CEILING, 1.0)
                panels.setdefault(axis, {}).setdefault(label, {}).setdefault(entry["step"], point)
    if not panels[TRAINING]:
        raise ValueError("The log history holds no training loss. Lower logging_steps to at most the number of steps.")

    panels = {axis: curves for axis, curves in panels.items() if curves}
    names = sum(map(len, panels.values()))  # each takes a line of its own above its panel
    figure = Figure(figsize=(7, 0.5 + 2.3 * len(panels) + 0.2 * names), layout="constrained", dpi=150)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        ceilings = []
        for (label, points), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
            values, lows, highs, (*_, ceiling) = zip(*points.values(), strict=True)
            label += f" (at most {ceiling:.2f})" if ceiling < 1 else ""
            axis.plot([*points], values, color=colour, marker=".", clip_on=False, label=label)
            axis.fill_between([*points], lows, highs, color=colour, alpha=0.15, lw=0)
            ceilings.append((ceiling, colour))
        bottom, top = axis.get_ylim()  # of the values, a ceiling far above which has no line
        for ceiling, colour in ceilings:
            if ceiling < min(top, 1):
                axis.axhline(ceiling, color=colour, linestyle="--", linewidth=1)
        if title == FRACTION:
            axis.set_ylim(max(bottom, -0.02), min(top, 1.02))
        axis.set_ylabel(title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    axes[-1].set_xlabel("optimizer step")
    with written_whole(Path(path)) as file:
        figure.savefig(file)


def _axis_and_label(key: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """Where a logged value is drawn, and as what: "pairs: image retrieval recall@1"; no label if it is not drawn."""
    if key == "loss":
        pairs = entry.get("global_batch_size")
        return TRAINING, f"one batch of {pairs:,} pairs" if pairs else "one batch"
    if key == "left_out":
        return LEFT_OUT, "pairs left out of the training"
    name = metric_named(key) if key.startswith("eval_") else None
    if name is None or (axis := METRICS[name].axis) is None:
        return "", ""
    place = key.removeprefix("eval_").removesuffix(name).replace("_", " ").strip()
    # matplotlib takes what is between two dollars for a formula.
    return axis, (f"{place}: " if place else "").replace("$", r"\$") + METRICS[name].words


PICTURES_FILE = "pictures.png"
CAPTIONS = 3  # different captions shown for each image
SEARCHED = 50  # captions with the highest cosines; the different ones are taken from them
SIDE, WIDTH, LINE = 96, 900, 25  # pixels: the longer side of an image, the largest width, the height of a line
_LETTERS = 14  # pixels
_RIGHT, _WRONG = "#00693e", "#a6341b"
# A check mark and a cross, which the font has not.
_MARKS = {_RIGHT: [[(3, 10), (7, 14), (14, 4)]], _WRONG: [[(4, 4), (13, 14)], [(4, 14), (13, 4)]]}

Answers = list[tuple[str, float, bool]]  # captions of an image, their cosines, and whether they belong to it

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

    def best_captions(self, measured: EvalPrediction) -> list[Answers]:
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

    def on_evaluate(self, args: Any, state: TrainerState, control: object, **kwargs: Any) -> None:
        measured, self._measured = self._measured, None
        if measured is None or "eval_pairs_loss" not in kwargs["metrics"] or not state.is_world_process_zero:
            return
        images = [self._dataset[row]["image"] for row in self._rows]
        right = [self._dataset.without_image(row)["caption"] for row in self._rows]
        picture = draw(images, self.best_captions(measured), right)
        path = Path(str(args.output_dir), PICTURES_FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as file:
                picture.save(file)
        except OSError as error:
            logger.error(f"The picture of step {state.global_step} could not be written to {path}: {error}")
            return
        try:
            self._pass_on(path, picture, args, state)
        except Exception as error:  # a tracker's, of any kind: raised here, it would end this process alone
            logger.error(f"The picture of step {state.global_step} did not reach all trackers: {error!r}")

    def _pass_on(self, path: Path, picture: Image.Image, args: TrainingArguments, state: TrainerState) -> None:
        trackers = args.report_to or ()
        if "wandb" in trackers:
            import wandb

            wandb.log({"pictures": wandb.Image(str(path))})
        if "trackio" in trackers:
            import trackio

            trackio.log({"pictures": trackio.Image(str(path))})
        if "mlflow" in trackers:
            import mlflow

            mlflow.log_artifact(str(path))
        for callback in self._trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                writer.add_image("pictures", np.asarray(picture), state.global_step, dataformats="HWC")


def draw(images: list[np.ndarray], captions: list[Answers], right: list[list[str]]) -> Image.Image:
    """A row for each image, uint8 [H, W, 3]: its first right caption, and the answers, marked right or wrong."""
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
            for stroke in _MARKS[colour] if line else ():
                pen.line([(left + x, below + y) for x, y in stroke], colour, 2, joint="curve")
            pen.text((beside, below), text, colour, font)
            furthest = max(furthest, beside + pen.textlength(text, font))
    return picture.crop((0, 0, min(WIDTH, round(furthest) + 8), picture.height))


def _cut(text: str) -> str:
    return "".join(lines_of(text, 80, 1))
