"""The rows of the experiments: which runs belong together, and the figures that tables and pictures show."""

from __future__ import annotations

import collections
import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
# The figures of the tables: a name, and the columns whose mean it is.
FIGURES: dict[str, Sequence[str]] = {
    "other style, R@1": ("vendor_image_recall@1", "vendor_text_recall@1"),
    "new concepts, R@5": ("concepts_image_recall@5", "concepts_text_recall@5"),
    "zero-shot, other style": ("zero_shot_vendor_acc1",),
    "zero-shot, new concepts": ("zero_shot_concepts_acc1",),
}
STYLE, CONCEPTS = list(FIGURES)[:2]
# The recalls of each direction: of images by their captions, and of captions by their images.
DIRECTIONS = {
    f"{found} found, {name}": (f"{data}_{way}_recall@{k}",)
    for name, data, k in (("other style, R@1", "vendor", 1), ("new concepts, R@5", "concepts", 5))
    for found, way in (("images", "image"), ("captions", "text"))
}
VALIDATION = "validation"  # the figure that learning rates are chosen by
# How often an image is nearer to its caption than to the swapped one: names that were trained on, then new ones.
SWAPS = {
    f"{kind} swapped, {name}": (f"{data}_{kind}_swaps",)
    for name, data in (("other style", "vendor"), ("new concepts", "concepts"))
    for kind in ("attribute", "number", "relation")
}
COLUMNS = ("learning rate", "seeds")
# The experiments that differ in the batch, with AdamW and, in the last one, also with Muon.
BATCHES = ("1_global_batch", "2_fixed_steps", "8_more_samples", "9_optimizers")
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
COST_OF_OPTIMIZERS = "12_cost_of_optimizers"
FEWER_TOKENS, COST_OF_TOKENS, GROWING_BATCH = "15_fewer_tokens", "16_cost_of_tokens", "17_growing_batch"
TUNINGS = {  # the experiments about fine-tuning, by the base: what trained it, and on what if not on all emoji
    "AdamW": ("4_fine_tuning", "11_adamw_base_fine_tuning"),
    "Muon": ("10_muon_fine_tuning",),
    "AdamW, no Twemoji": ("13_replay_of_others",),
}
FIXED_STEPS = (576, 1152, 2304)
FIXED_SAMPLES = (589_824, 2_359_296)


class Setting(NamedTuple):
    """A configuration of an experiment; the defaults stand for columns that a row does not have."""

    method: str
    batch: float
    objective: str
    pair_ids: bool
    way: str = ""
    captions: float = 1
    equal_ids: str = "exclude"
    negatives: bool = False
    optimizer: str = "adamw"
    options: str = ""
    replay: str = ""
    path: str = ""
    alpha: float = 1

    @classmethod
    def of(cls, row: Row) -> Setting:
        return cls(**{name: row[name] for name in cls._fields if row.get(name, "") != ""})


def read(table: Path) -> list[Row]:
    """The rows with numbers as numbers; text and empty cells stay as they are."""
    with table.open(newline="", encoding="utf-8") as file:
        return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text


def score(row: Row) -> float:
    return statistics.mean(value for name, value in row.items() if name.startswith("validation_"))


def value(row: Row, figure: str) -> float:
    if figure == VALIDATION:
        return score(row)
    return statistics.mean(row[column] for column in {**FIGURES, **DIRECTIONS, **SWAPS}[figure])


class Configuration:
    """The runs of one setting.

    Args:
        rows: its rows, of all learning rates, seeds and points of the trainings.
    """

    def __init__(self, rows: list[Row]) -> None:
        ended = [row for row in rows if row["finished"]]
        first = min(row["seed"] for row in ended)
        self.by_rate = {row["learning_rate"]: row for row in ended if row["seed"] == first}
        self.rate = max(self.by_rate, key=lambda rate: score(self.by_rate[rate]))
        self.ended = [row for row in ended if row["learning_rate"] == self.rate]
        self.points = [row for row in rows if row["learning_rate"] == self.rate]
        self._rows = rows
        self.batch = int(ended[0]["batch"])

    @property
    def rate_cell(self) -> str:
        """The learning rate; a star if no smaller or no greater one was tried."""
        at_edge = len(self.by_rate) > 1 and self.rate in (min(self.by_rate), max(self.by_rate))
        return f"{self.rate:g}" + "*" * at_edge

    def at_each_rate(self) -> list[Configuration]:
        """The runs of each learning rate that was tried, from the least on."""
        return [Configuration([r for r in self._rows if r["learning_rate"] == rate]) for rate in sorted(self.by_rate)]

    @property
    def steps(self) -> int:
        return int(self.ended[0]["steps"])

    def values(self, figure: str) -> list[float]:
        return [value(row, figure) for row in self.ended]

    def cell(self, figure: str) -> str:
        """Mean and standard deviation over the seeds, in per cent; one seed has no deviation."""
        values = [100 * v for v in self.values(figure)]
        deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.1f}{deviation}"

    def cells(self, *figures: str) -> list[str]:
        """The learning rate, the number of seeds, and the figures: by default all of `FIGURES`."""
        return [self.rate_cell, str(len(self.ended)), *(self.cell(figure) for figure in figures or FIGURES)]


def configurations(rows: Iterable[Row], *experiments: str, **wanted: Any) -> dict[Setting, Configuration]:
    """The configurations of the experiments with these values, `Trainer` first, then the small batches."""
    groups: dict[Setting, list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row["experiment"] in experiments and all(row.get(name) == value for name, value in wanted.items()):
            groups[Setting.of(row)].append(row)
    complete = {key: found for key, found in groups.items() if any(row["finished"] for row in found)}
    return {key: Configuration(complete[key]) for key in sorted(complete, key=lambda key: (key[0] != "Trainer", key))}


def of_batches(rows: Iterable[Row], optimizer: str, **wanted: Any) -> dict[Setting, Configuration]:
    """The trainings with CLIP's loss that differ in the batch."""
    found = configurations(rows, *BATCHES, objective="softmax", **wanted)
    return {setting: c for setting, c in found.items() if setting.optimizer == optimizer}


def at_fixed_steps(
    rows: Iterable[Row], steps: int = FIXED_STEPS[0], optimizer: str = "adamw"
) -> dict[Setting, Configuration]:
    return of_batches((row for row in rows if row["samples"] == steps * row["batch"]), optimizer)


def at_fixed_samples(rows: Iterable[Row], samples: float, optimizer: str = "adamw") -> dict[Setting, Configuration]:
    return of_batches(rows, optimizer, samples=samples)


def stages_of(setting: Setting) -> dict[int, float]:
    """The global batches of a training, with their shares of the samples: several where an option let the batch grow.

    The package does not have that option any more.
    """
    *earlier, last = json.loads(setting.options or "{}").get("global_batch_schedule", [setting.batch])
    shares = {int(size): float(share) for size, share in (words.split(":") for words in earlier)}
    return {**shares, int(last): 1 - sum(shares.values())}


def seconds_alone(rows: Iterable[Row], setting: Setting, samples: float) -> float | None:
    """The time of a training's steps, compiled and on a GPU of its own; None if a batch was not timed."""
    timed = {
        row["batch"]: row["seconds"] / row["steps"]
        for row in rows
        if row["experiment"] == COST_OF_OPTIMIZERS and (row.get("optimizer") or "adamw") == setting.optimizer
    }
    stages = stages_of(setting)
    if any(size not in timed for size in stages):
        return None
    return sum(share * samples / size * timed[size] for size, share in stages.items())


def label(setting: Setting, micro_batch: int = 256) -> str:
    batch = int(setting.batch)
    if len(stages := stages_of(setting)) > 1:
        return f"`{setting.method}`, " + " → ".join(f"{size:,}" for size in stages)
    if setting.method != "Trainer":
        return f"`{setting.method}`, one loss over {batch:,}"
    losses = batch // micro_batch
    return (
        "`Trainer`, a step for each loss over 256" if losses == 1 else f"`Trainer`, {losses} losses over 256 in a step"
    )


def tunings(rows: list[Row], base: str) -> dict[Setting, Configuration]:
    """The ways of fine-tuning one of the bases of `TUNINGS`, the state before it first.

    Where several experiments have the same base, its figures are those of the first one that has run; where a run was
    repeated, the last one counts.
    """
    experiments = TUNINGS[base]
    first = next((e for e in experiments if any(row["experiment"] == e for row in rows)), None)
    kept = [row for row in rows if row.get("way") != "base" or row["experiment"] == first]
    last = {
        (Setting.of(row), row["learning_rate"], row["seed"]): row for row in kept if row["experiment"] in experiments
    }
    found = configurations([row for row in last.values() if not row.get("path")], *experiments)
    return {setting: found[setting] for setting in sorted(found, key=lambda setting: setting.way != "base")}


class Front(NamedTuple):
    """What is kept and gained on the line between the start and the end of a fine-tuning, by α; and by depth."""

    line: dict[float, tuple[float, float]]
    by_depth: dict[float, tuple[float, float]]
    seeds: int


def fronts(rows: list[Row], base: str) -> dict[Setting, Front]:
    """For each fine-tuning of a base that was averaged with it, at its best rate: means over the seeds in per cent."""
    averaged = [row for row in rows if row.get("path") and row["experiment"] in TUNINGS[base]]
    experiments = {row["experiment"] for row in averaged}
    of_these = [row for row in rows if row["experiment"] in experiments and not row.get("path")]
    starts = [row for row in of_these if row["way"] == "base"]
    found: dict[Setting, Front] = {}
    for setting, configuration in configurations(of_these, *experiments).items():
        ends = configuration.ended
        mine = [row for row in averaged if row["learning_rate"] == configuration.rate and _unaveraged(row) == setting]
        if not mine:
            continue
        seeds = {row["seed"] for row in ends}
        front = Front({0.0: _kept_and_gained([r for r in starts if r["seed"] in seeds])}, {}, len(seeds))
        for row in sorted(mine, key=lambda row: row["alpha"]):
            same = [r for r in mine if (r["path"], r["alpha"]) == (row["path"], row["alpha"])]
            points = front.line if row["path"] == "line" else front.by_depth
            points[row["alpha"]] = _kept_and_gained(same)
        front.line[1.0] = _kept_and_gained(ends)
        found[setting] = front
    return found


def _unaveraged(row: Row) -> Setting:
    return Setting.of(row)._replace(path="", alpha=1)


def _kept_and_gained(rows: list[Row]) -> tuple[float, float]:
    kept, gained = (100 * statistics.mean(value(row, figure) for row in rows) for figure in (STYLE, CONCEPTS))
    return kept, gained


def name_of_way(setting: Setting) -> str:
    """The way, the options and the old pairs in which it differs from the usual ones, and the optimizer."""
    options = json.loads(setting.options or "{}")
    told = [f"{name} {value:g}" if not isinstance(value, str) else f"{name} {value}" for name, value in options.items()]
    optimizer = [] if setting.way == "base" else [OPTIMIZERS[setting.optimizer]]
    others = ["of Twemoji"] if setting.replay == "twemoji" else []
    return ", ".join([setting.way, *(text for text in told if text != "weight_decay 0"), *others, *optimizer])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; empty without rows."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) if len(lines) > 2 else ""
