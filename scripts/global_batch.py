#!/usr/bin/env python3
"""Measures why the global batch matters: the same CLIP, trained by transformers.Trainer and by InfCLTrainer.

    python scripts/global_batch.py --output_dir outputs/global_batch

Data: pictures of four of scikit-learn's handwritten digits in a square, captioned "the digits four seven one nine".
Each of the 10,000 numbers occurs once, so retrieval has one right answer. Neither the numbers of the validation and
test sets nor the handwritten digits in their pictures occur in training.

All methods see the same pairs equally often, in micro-batches of 16, starting from the same weights, with AdamW, a
warm-up over a tenth of the steps and cosine decay to 0. Of three learning rates the best one on the validation set is
kept (recall@1 of the first seed). Results are those on the test set, with three seeds.

There are 45 runs of one to three minutes, as many at a time as there are cores, without a GPU. They append to
global_batch.csv after every second epoch; then global_batch.png is drawn and a table printed.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import common
from benchmarks.common import Row
from make_digits import CLASS_NAMES
from make_small_clip import small_clip
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_infcl import InfCLTrainer, InfCLTrainingArguments, contrastive_loss
from hf_infcl.card.pictures import COLOURS
from hf_infcl.evaluation import retrieval_metrics

MICRO_BATCH = 16
EPOCHS, SEEDS = 20, (0, 1, 2)
SIZES = {"train": 8192, "validation": 800, "test": 1000}
GLOBAL = "InfCLTrainer: 512 pairs per loss, 1 loss per step"
METHODS = {  # the micro-batches of a step, and the learning rates that are tried
    "Trainer: 16 pairs per loss, 32 losses per step": (32, (1e-3, 2e-3, 4e-3)),
    "Trainer: 16 pairs per loss, 1 loss per step": (1, (1.25e-4, 2.5e-4, 5e-4)),
    GLOBAL: (32, (2e-3, 4e-3, 8e-3)),
    "InfCLTrainer: 64 pairs per loss, 1 loss per step": (4, (5e-4, 1e-3, 2e-3)),
    "InfCLTrainer: 128 pairs per loss, 1 loss per step": (8, (2e-3, 4e-3, 8e-3)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/global_batch"))
    parser.add_argument("--methods", nargs="+", default=[""], metavar="WORDS", help="of their names; default: all")
    args = parser.parse_args()
    path = args.output_dir / "global_batch.csv"
    methods = [method for method in METHODS if any(words in method for words in args.methods)]
    # One single-threaded process per core, since the model is too small to benefit from more threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:

        def run_all(runs: list[tuple[str, float, int]]) -> None:
            for measured in pool.map(train, *zip(*runs, strict=True)):
                for row in measured:
                    common.append(path, tuple(row), row)

        run_all([(method, rate, SEEDS[0]) for method in methods for rate in METHODS[method][1]])
        best = best_rates(rows_of(path))
        run_all([(method, best[method], seed) for method in methods for seed in SEEDS[1:]])
    rows = rows_of(path)
    best = best_rates(rows)
    chosen = [row for row in rows if row["learning_rate"] == best[row["method"]]]
    plot(chosen, path.with_suffix(".png"))
    print(table(chosen, best))


def rows_of(path: Path) -> list[Row]:
    """The rows with numbers as numbers, the newest of each run and epoch."""
    keys = ("method", "learning_rate", "seed", "epoch")
    return list({tuple(row[key] for key in keys): row for row in common.read_numbers(path)}.values())


def train(method: str, learning_rate: float, seed: int) -> list[Row]:
    """Trains once; returns the measurements after every second epoch."""
    model, processor = small_clip(data()["train"][1], image_size=16, patch_size=8, seed=seed)
    splits = {name: items(*split, processor) for name, split in data().items()}
    measure = Measure(splits, {"method": method, "learning_rate": learning_rate, "seed": seed})
    ours = method.startswith("InfCLTrainer")
    off: Row = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as scratch:
        args = (InfCLTrainingArguments if ours else TrainingArguments)(
            output_dir=scratch,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=METHODS[method][0],
            num_train_epochs=EPOCHS,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            adam_beta2=0.98,
            seed=seed,
            use_cpu=True,
            **off,
        )
        kind, collate = (InfCLTrainer, default_data_collator) if ours else (Trainer, collate_with_loss)
        trainer = kind(model, args, collate, train_dataset=splits["train"], callbacks=[measure])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return measure.rows


def collate_with_loss(items: list[dict[str, torch.Tensor]]) -> Row:
    """A micro-batch, over which CLIPModel itself then computes the loss."""
    return {**default_data_collator(items), "return_loss": True}


class Measure(TrainerCallback):
    """Measures the global contrastive loss and the recalls on the held-out sets after every second epoch."""

    def __init__(self, splits: dict[str, list[dict[str, torch.Tensor]]], run: Row) -> None:
        self.batches = {name: default_data_collator(splits[name]) for name in ("validation", "test")}
        self.run, self.rows = run, []
        self.origin = common.environment(torch.device("cpu"), "transformers")
        del self.origin["device"]

    @torch.no_grad()
    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        epoch = round(state.epoch)
        if epoch % 2:
            return
        row = {**self.run, "epoch": epoch, "pairs_seen": epoch * SIZES["train"], "optimizer_steps": state.global_step}
        for name, batch in self.batches.items():
            out = model.eval()(**batch)
            loss = contrastive_loss(out.image_embeds, out.text_embeds, model.logit_scale.exp())
            recalls = retrieval_metrics(out.image_embeds, out.text_embeds, torch.arange(SIZES[name]))
            row[f"{name}_loss"] = round(loss.item(), 4)
            for k in (1, 5, 10):
                both = recalls[f"image_retrieval_recall@{k}"], recalls[f"text_retrieval_recall@{k}"]
                row[f"{name}_recall@{k}"] = round(sum(both) / 2, 4)
        self.rows.append(row | self.origin)


@cache
def data() -> dict[str, tuple[torch.Tensor, list[str]]]:
    """For each split, pixel_values [N, 3, 16, 16] in [-1, 1] and N captions."""
    digits = load_digits()
    everything = np.arange(len(digits.target))
    train, held_out = train_test_split(everything, test_size=400, stratify=digits.target, random_state=0)
    validation, test = train_test_split(held_out, test_size=200, stratify=digits.target[held_out], random_state=0)
    rng = np.random.default_rng(0)
    numbers = iter(rng.permutation(10_000))
    splits = {}
    for name, pool in (("train", train), ("validation", validation), ("test", test)):
        by_digit = [pool[digits.target[pool] == digit] for digit in range(10)]
        images, captions = [], []
        for _ in range(SIZES[name]):
            number = [int(character) for character in f"{next(numbers):04d}"]
            top_left, top_right, low_left, low_right = (digits.images[rng.choice(by_digit[d])] for d in number)
            images.append(np.block([[top_left, top_right], [low_left, low_right]]))
            captions.append("the digits " + " ".join(CLASS_NAMES[d] for d in number))
        ink = torch.tensor(np.stack(images), dtype=torch.float32)  # 0 to 16
        splits[name] = (ink / 8 - 1)[:, None].expand(-1, 3, -1, -1), captions
    return splits


def items(images: torch.Tensor, captions: list[str], processor: Any) -> list[dict[str, torch.Tensor]]:
    tokens = processor.tokenizer(captions, return_tensors="pt")  # four words each, so all have the same length
    return [{"pixel_values": image, "input_ids": ids} for image, ids in zip(images, tokens["input_ids"], strict=True)]


def best_rates(rows: list[Row]) -> dict[str, float]:
    """The best rate of each method on the validation set, by the first seed."""
    last = [row for row in rows if row["epoch"] == EPOCHS and row["seed"] == SEEDS[0]]
    groups = common.grouped(last, lambda row: row["method"]).items()
    best = {method: max(runs, key=lambda row: row["validation_recall@1"]) for method, runs in groups}
    return {method: row["learning_rate"] for method, row in best.items()}


def table(rows: list[Row], best: dict[str, float]) -> str:
    """A table in Markdown: mean and standard deviation over the seeds at the end of training."""
    lines = []
    for method, rate in best.items():
        last = [row for row in rows if row["method"] == method and row["epoch"] == EPOCHS]
        cells = [method, f"{rate:g}", f"{last[0]['optimizer_steps']:,.0f}"]
        for column in ("test_loss", "test_recall@1", "test_recall@5"):
            values = [row[column] for row in last]
            cells.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}")
        lines.append(cells)
    return common.markdown(["method", "learning rate", "steps", "test loss", "recall@1", "recall@5"], lines)


def plot(rows: list[Row], path: Path) -> None:
    """Plots loss and recall@1 on the test set over the pairs seen: mean, minimum and maximum of the seeds."""
    figure = Figure(figsize=(10, 4.6), layout="constrained", dpi=150)
    panels = {"test_loss": "global contrastive loss (nats)", "test_recall@1": "retrieval recall@1"}
    for axis, (column, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for method, colour, marker in zip(METHODS, (COLOURS[i] for i in (1, 4, 0, 2, 5)), "s^oDP", strict=True):
            points = common.grouped((r for r in rows if r["method"] == method), lambda row: row["pairs_seen"])
            if points:
                seen = np.array(list(points)) / 1000
                values = np.array([[row[column] for row in of_point] for of_point in points.values()])
                axis.plot(seen, values.mean(1), color=colour, marker=marker, markersize=4, label=method)
                axis.fill_between(seen, values.min(1), values.max(1), color=colour, alpha=0.2, linewidth=0)
        axis.set(xlabel="pairs seen (thousands)", title=f"{label}, {SIZES['test']:,} held-out pairs")
        axis.set(xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(path)


if __name__ == "__main__":
    main()
