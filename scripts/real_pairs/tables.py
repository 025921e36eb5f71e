#!/usr/bin/env python3
"""Tables and pictures of the experiments' rows.

    python scripts/real_pairs/tables.py --corpus outputs/real_pairs

Reads results/results.csv and the other rows beside this file, writes results/TABLES.md and the pictures. For every
configuration the learning rate is the one that is best on the validation set at the first seed; the figures are of the
test sets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks and real_pairs

from benchmarks import common
from benchmarks.common import Row, grouped, markdown, read_numbers

RESULTS = Path(__file__).parent / "results"
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
    samples: float = 0  # the pairs seen, in all

    @classmethod
    def of(cls, row: Row) -> Setting:
        return cls(**{name: row[name] for name in cls._fields if row.get(name, "") != ""})


def score(row: Row) -> float:
    """The mean of all recalls of the validation set, by which learning rates are chosen."""
    return statistics.mean(value for name, value in row.items() if name.startswith("validation_"))


def value(row: Row, figure: str) -> float:
    if figure == VALIDATION:
        return score(row)
    return statistics.mean(row[column] for column in {**FIGURES, **DIRECTIONS, **SWAPS}[figure])


class Configuration:
    """The runs of one setting, of its rows of all learning rates, seeds and points of the trainings."""

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
    def setting(self) -> Setting:
        return Setting.of(self.ended[0])

    @property
    def optimizer_name(self) -> str:
        return OPTIMIZERS[self.setting.optimizer]

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


Found = list[Configuration]


def configurations(rows: Iterable[Row], *experiments: str, **wanted: Any) -> Found:
    """The configurations of the experiments with these values, `Trainer` first, then the small batches."""
    groups = grouped((row for row in rows if row["experiment"] in experiments), Setting.of)
    chosen = [found for setting, found in groups.items() if wanted.items() <= setting._asdict().items()]
    complete = [Configuration(found) for found in chosen if any(row["finished"] for row in found)]
    return sorted(complete, key=lambda c: (c.setting.method != "Trainer", c.setting))


def of_batches(rows: Iterable[Row], **wanted: Any) -> Found:
    """The trainings with CLIP's loss that differ in the batch."""
    return configurations(rows, *BATCHES, objective="softmax", **wanted)


def at_fixed_steps(rows: Iterable[Row], steps: int, **wanted: Any) -> Found:
    return [c for c in of_batches(rows, **wanted) if c.steps == steps]


def stages_of(setting: Setting) -> dict[int, float]:
    """The global batches of a training, with their shares of the samples: several where it grew, which is history."""
    *earlier, last = json.loads(setting.options or "{}").get("global_batch_schedule", [setting.batch])
    shares = {int(size): float(share) for size, share in (words.split(":") for words in earlier)}
    return {**shares, int(last): 1 - sum(shares.values())}


def seconds_alone(rows: Iterable[Row], setting: Setting) -> float | None:
    """The time of a training's steps, compiled and on a GPU of its own; None if a batch was not timed."""
    timed = {
        row["batch"]: row["seconds"] / row["steps"]
        for row in rows
        if row["experiment"] == COST_OF_OPTIMIZERS and (row.get("optimizer") or "adamw") == setting.optimizer
    }
    stages = stages_of(setting)
    if any(size not in timed for size in stages):
        return None
    return sum(share * setting.samples / size * timed[size] for size, share in stages.items())


def label(setting: Setting, micro_batch: int = 256) -> str:
    batch = int(setting.batch)
    if len(stages := stages_of(setting)) > 1:
        return f"`{setting.method}`, " + " → ".join(f"{size:,}" for size in stages)
    if setting.method != "Trainer":
        return f"`{setting.method}`, one loss over {batch:,}"
    losses = batch // micro_batch
    return "`Trainer`, " + ("a step for each loss over 256" if losses == 1 else f"{losses} losses over 256 in a step")


def tunings(rows: list[Row], base: str) -> Found:
    """The ways of fine-tuning one of the bases of `TUNINGS`, the state before it first.

    A base that several experiments have is that of the first one; where a run was repeated, the last one counts.
    """
    experiments = TUNINGS[base]
    first = next((e for e in experiments if any(row["experiment"] == e for row in rows)), None)
    of_these = [row for row in rows if row["experiment"] in experiments and not row.get("path")]
    kept = [row for row in of_these if row["way"] != "base" or row["experiment"] == first]
    last = {(Setting.of(row), row["learning_rate"], row["seed"]): row for row in kept}
    return sorted(configurations(last.values(), *experiments), key=lambda c: c.setting.way != "base")


class Front(NamedTuple):
    """What is kept and gained between the start and the end of a fine-tuning, by the path, "line" or "depth", and α."""

    way: str
    points: dict[tuple[str, float], tuple[float, float]]
    seeds: int


def fronts(rows: list[Row], base: str) -> list[Front]:
    """Each fine-tuning of a base that was averaged with it, at its best rate: means over the seeds in per cent."""
    averaged = [row for row in rows if row.get("path") and row["experiment"] in TUNINGS[base]]
    experiments = {row["experiment"] for row in averaged}
    of_these = [row for row in rows if row["experiment"] in experiments and not row.get("path")]
    starts = [row for row in of_these if row["way"] == "base"]
    found = []
    for c in configurations(of_these, *experiments):
        mine = [row for row in averaged if row["learning_rate"] == c.rate and Setting.of(row) == c.setting]
        if not mine:
            continue
        seeds = {row["seed"] for row in c.ended}
        groups = grouped(sorted(mine, key=lambda row: row["alpha"]), lambda row: (row["path"], row["alpha"]))
        points = {("line", 0.0): _kept_and_gained([r for r in starts if r["seed"] in seeds])}
        points |= {place: _kept_and_gained(same) for place, same in groups.items()}
        points["line", 1.0] = _kept_and_gained(c.ended)
        found.append(Front(name_of_way(c.setting), points, len(seeds)))
    return found


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


# ---- The tables of results.csv ----


def global_batch(rows: list[Row]) -> str:
    body = [
        [f"{samples:,}", label(c.setting), f"{c.steps:,}", *c.cells()]
        for samples in FIXED_SAMPLES
        for c in of_batches(rows, samples=samples, optimizer="adamw")
    ]
    return markdown(["samples", "", "steps", *COLUMNS, *FIGURES], body)


def rates(rows: list[Row]) -> str:
    """The validation scores of the linear and the square-root rule, from the tuned rate of the batch of 256 on."""
    found = {c.batch: c for c in of_batches(rows, samples=FIXED_SAMPLES[0], optimizer="adamw", method="InfCLTrainer")}
    if 256 not in found:
        return ""
    body = []
    for batch, c in found.items():
        tried = {rate: f"{100 * score(row):.1f}" for rate, row in sorted(c.by_rate.items())}
        rules = []
        for rate in (found[256].rate * (batch / 256) ** power for power in (0.5, 1)):
            near = next((text for other, text in tried.items() if abs(other / rate - 1) < 0.05), "not tried")
            rules.append(f"{rate:.2g}: {near}")
        every = ", ".join(f"{rate:g}: {text}" for rate, text in tried.items())
        body.append([f"{batch:,}", f"{c.rate:g}: {tried[c.rate]}", *rules, every])
    return markdown(["batch", "tuned", "square-root rule", "linear rule", "all that were tried"], body)


def fixed_steps(rows: list[Row]) -> str:
    body = [
        [f"{steps:,}", label(c.setting), c.optimizer_name, f"{c.steps * c.batch:,}", *c.cells()]
        for steps in FIXED_STEPS
        for optimizer in OPTIMIZERS
        for c in at_fixed_steps(rows, steps, optimizer=optimizer)
    ]
    return markdown(["steps", "", "optimizer", "samples", *COLUMNS, *FIGURES], body) if len(body) > 1 else ""


def steps_and_batch(rows: list[Row], figure: str) -> str:
    """The figure of one loss over the batch: a line for each number of steps, a column for each batch."""
    found = {(c.optimizer_name, c.steps, c.batch): c for c in of_batches(rows, method="InfCLTrainer")}
    batches = sorted({batch for _, _, batch in found})
    body = []
    for name, steps in sorted({(name, steps) for name, steps, _ in found}):
        of_steps = (found.get((name, steps, batch)) for batch in batches)
        body.append([name, f"{steps:,}", *(c.cell(figure) if c else "" for c in of_steps)])
    return markdown(["optimizer", "steps", *(f"{batch:,} pairs" for batch in batches)], body)


def directions(rows: list[Row]) -> str:
    """Images found by captions and captions by images, of the trainings that differ in the batch."""
    in_order = sorted(of_batches(rows), key=lambda c: (c.optimizer_name, c.setting.samples))
    body = [
        [label(c.setting), c.optimizer_name, f"{c.steps:,}", f"{c.steps * c.batch:,}", *c.cells(*DIRECTIONS)]
        for c in in_order
    ]
    return markdown(["", "optimizer", "steps", "samples", *COLUMNS, *DIRECTIONS], body)


def optimizers(rows: list[Row]) -> str:
    """One loss over the batch, with each optimizer: a line for each batch and number of samples."""
    if not configurations(rows, *BATCHES, optimizer="muon"):
        return ""
    body = []
    for samples in FIXED_SAMPLES:
        found = {(c.batch, c.optimizer_name): c for c in of_batches(rows, samples=samples, method="InfCLTrainer")}
        for batch in sorted({batch for batch, _ in found}):
            line = [f"{samples:,}", f"{batch:,}", f"{samples // batch:,}"]
            for name in OPTIMIZERS.values():
                c = found.get((batch, name))
                line += c.cells(STYLE, CONCEPTS) if c else [""] * 4
            body.append(line)
    figures = [f"{name}: {column}" for name in OPTIMIZERS.values() for column in (*COLUMNS, STYLE, CONCEPTS)]
    return markdown(["samples", "pairs", "steps", *figures], body)


def rates_of_muon(rows: list[Row]) -> str:
    body = []
    for samples in FIXED_SAMPLES:
        for c in of_batches(rows, samples=samples, optimizer="muon"):
            body += of_each_rate([f"{samples:,}", label(c.setting)], c, STYLE, CONCEPTS)
    return markdown(["samples", "", *COLUMNS, VALIDATION, STYLE, CONCEPTS], body)


def growing_batches(rows: list[Row]) -> str:
    """Batches that grow beside constant ones on the same samples."""
    if not configurations(rows, GROWING_BATCH):
        return ""
    body = []
    for optimizer, name in OPTIMIZERS.items():
        constant = of_batches(rows, samples=FIXED_SAMPLES[0], optimizer=optimizer, method="InfCLTrainer")
        for c in constant + configurations(rows, GROWING_BATCH, optimizer=optimizer):
            seconds = seconds_alone(rows, c.setting)
            time = "" if seconds is None else f"{seconds:.0f} s"
            body.append([label(c.setting), name, f"{c.steps:,}", time, *c.cells(STYLE, CONCEPTS)])
    return markdown(["pairs in a step", "optimizer", "steps", "time of the steps", *COLUMNS, STYLE, CONCEPTS], body)


def fewer_tokens(rows: list[Row]) -> str:
    """Trainings that leave out patches or begin with smaller images, beside the one that does neither."""
    tried = configurations(rows, FEWER_TOKENS)
    if not tried:
        return ""
    same = {"method": "InfCLTrainer", "batch": tried[0].batch, "optimizer": tried[0].setting.optimizer}
    cost = {row.get("options", ""): row for row in rows if row["experiment"] == COST_OF_TOKENS}
    body = []
    for c in of_batches(rows, samples=FIXED_SAMPLES[0], **same) + tried:
        # The last steps see all tokens; most steps take what those without them take.
        options = json.loads(c.setting.options or "{}")
        last = options.pop("full_tokens_last", None)
        timed = None if c.setting.way else cost.get(json.dumps(options) if options else "")
        per_step = "" if timed is None else f"{1000 * timed['seconds'] / timed['steps']:.1f} ms"
        memory = "" if timed is None else f"{timed['peak_gib']:.1f} GiB"
        of_options = (f"`{n}` {' '.join(v) if isinstance(v, list) else v}" for n, v in options.items())
        name = c.setting.way or ", ".join(of_options)
        name += f", all in the last {last:.0%} of the steps" if last else ""
        body.append([name or "all tokens", f"{c.steps:,}", per_step, memory, *c.cells(STYLE, CONCEPTS)])
    return markdown(["", "steps", "a step", "its memory", *COLUMNS, STYLE, CONCEPTS], body)


def losses_of_optimizers(rows: list[Row]) -> str:
    """Losses over parts of the batch, and SigLIP's loss, beside CLIP's loss over the batch, with each optimizer."""
    experiments = (*BATCHES, "3_objectives")
    with_muon = [c.setting for c in configurations(rows, "9_optimizers", optimizer="muon")]
    others = [setting for setting in with_muon if setting.method == "Trainer" or setting.objective == "sigmoid"]
    body = []
    for samples, batch in sorted({(setting.samples, setting.batch) for setting in others}):
        found = configurations(rows, *experiments, samples=samples, batch=batch, pair_ids=False)
        wanted = {(c.setting.method, c.setting.objective) for c in found if c.setting.optimizer == "muon"}
        for c in found:
            if (c.setting.method, c.setting.objective) in wanted:
                of_run = [f"{label(c.setting)}, {c.setting.objective}", f"{c.steps:,}", f"{samples:,.0f}"]
                body.append([*of_run, c.optimizer_name, *c.cells(STYLE, CONCEPTS)])
    return markdown(["", "steps", "samples", "optimizer", *COLUMNS, STYLE, CONCEPTS], body)


def objectives(rows: list[Row]) -> str:
    """The settings of 3_objectives beside plain softmax with as many pairs in a step and as many samples."""
    experiments = ("1_global_batch", "2_fixed_steps", "3_objectives")
    body = []
    for batch, samples in sorted({(r["batch"], r["samples"]) for r in rows if r["experiment"] == "3_objectives"}):
        for c in configurations(rows, *experiments, method="InfCLTrainer", batch=batch, samples=samples):
            ids = "yes" if c.setting.pair_ids else "no"
            body.append([f"{c.batch:,}", f"{c.steps:,}", c.setting.objective, ids, *c.cells()])
    return markdown(["batch", "steps", "loss", "`pair_ids`", *COLUMNS, *FIGURES], body)


def positives(setting: Setting) -> str:
    captions = "one caption" if setting.captions == 1 else f"{int(setting.captions)} captions"
    return f"{captions}, names as positives" if setting.pair_ids and setting.equal_ids == "positive" else captions


def of_each_rate(name: Sequence[str], configuration: Configuration, *figures: str) -> list[list[str]]:
    """A line for each learning rate, with the figure that one was chosen by; that one is bold."""
    lines = []
    for c in configuration.at_each_rate():
        rate, *cells = c.cells(VALIDATION, *figures)
        lines.append([*name, f"**{rate}**" if c.rate == configuration.rate else rate, *cells])
    return lines


def several_captions(rows: list[Row]) -> str:
    body = []
    for c in configurations(rows, "6_several_captions"):
        body += of_each_rate([positives(c.setting)], c, *FIGURES)
    return markdown(["per image", *COLUMNS, VALIDATION, *FIGURES], body)


def hard_negatives(rows: list[Row]) -> str:
    """How often an image is nearer to its caption than to the swapped one, beside the recalls."""
    found = configurations(rows, "6_several_captions", "7_hard_negatives", pair_ids=False)
    tried = {c.setting for c in found if c.setting.negatives}
    figures = (*SWAPS, STYLE, CONCEPTS)
    body = []
    for c in found:
        if c.setting._replace(negatives=True) in tried:
            body += of_each_rate([positives(c.setting), "yes" if c.setting.negatives else "no"], c, *figures)
    head = ["per image", "swapped captions in training", *COLUMNS, VALIDATION, *figures]
    return markdown(head, body)


def fine_tuning(rows: list[Row]) -> str:
    """Validation and new concepts are those of clip art, which the fine-tuning is about; the rest is of emoji."""
    figures = (CONCEPTS, STYLE, "zero-shot, other style")
    body = []
    for base in TUNINGS:
        for c in tunings(rows, base):
            name = "before the fine-tuning" if c.setting.way == "base" else name_of_way(c.setting)
            body += of_each_rate([base, name], c, *figures)
    heads = ["clip art: validation", "clip art: new concepts, R@5", "emoji: other style, R@1", "emoji: zero-shot"]
    return markdown(["base", "", *COLUMNS, *heads], body)


def averages(rows: list[Row]) -> str:
    """What is kept (emoji: other style, R@1) and gained (clip art: new concepts, R@5) between start and end."""
    found = [(base, front) for base in TUNINGS for front in fronts(rows, base)]
    if not found:
        return ""
    columns = sorted(found[0][1].points, key=lambda place: place[0] != "line")
    body = []
    for base, front in found:
        told = (f"{kept:.1f} / {gained:.1f}" for kept, gained in map(front.points.__getitem__, columns))
        body.append([base, front.way, str(front.seeds), *told])
    heads = [f"α = {alpha:g}" if path == "line" else f"by depth, {alpha:g}" for path, alpha in columns]
    return markdown(["base", "kept / gained", "seeds", *heads], body)


def cost(rows: list[Row], experiment: str = "5_cost") -> str:
    """The times of steps on a GPU that does nothing else."""
    body = []
    for row in rows:
        if row["experiment"] == experiment:
            setting, rate = Setting.of(row), row["samples"] / row["seconds"]
            milliseconds = f"{1000 * row['seconds'] / row['steps']:,.1f} ms"
            name = [label(setting), OPTIMIZERS[setting.optimizer], f"{int(row['micro_batch']):,}"]
            body.append([*name, milliseconds, f"{rate:,.0f}", f"{row['peak_gib']:.1f} GiB"])
    head = ["", "optimizer", "micro-batch", "a step", "pairs per second", "peak memory"]
    return markdown(head, body)


# ---- The tables of the other rows ----

# The columns of the other rows, and what the tables call them.
SIDE_BY_SIDE = {
    "vendor_recall@1": STYLE,
    "concepts_recall@5": CONCEPTS,
    "icon_set_recall@1": "other icon set, R@1",
    "icons_recall@5": "new icons, R@5",
    "validation": VALIDATION,
    "averaged_vendor_recall@1": f"averaged with the start: {STYLE}",
    "averaged_concepts_recall@5": f"averaged with the start: {CONCEPTS}",
    "right_left_out": "right pairs left out",
    "wrong_among_kept": "wrong among the others",
    "auc": "AUC",
    "seconds": "seconds",
}


def wrong_and_taught_rows(path: Path) -> dict[tuple[str, ...], list[Row]]:
    """The rows of wrong_and_taught.csv by setting, the newest of each seed. Empty without the file."""

    def setting(row: Row) -> tuple[str, ...]:
        wrong, cleaned = row["wrong"], float(row["cleaned"] or 0)
        share = "titles of collections" if wrong == "titles" else f"{float(wrong):.0%}"
        kept = "right pairs" if row["oracle"] == "True" else f"cleaned at {cleaned:g}" if cleaned else "all"
        taught = f"{row['teacher']}, {row['taught_by']}, β {row['weight']}, {row['side']}" if row["teacher"] else ""
        options = " ".join(f"`{name}` {value}" for name, value in json.loads(row["options"]).items())
        length = (row["trained_on"], row["size"], OPTIMIZERS[row["optimizer"]], f"{int(row['samples']):,}")
        return (*length, share, kept, taught, options)

    groups = grouped(common.read(path, bool), setting)
    return {key: list({row["seed"]: row for row in rows}.values()) for key, rows in groups.items()}


def wrong_and_taught(found: Mapping[tuple[str, ...], list[Row]]) -> str:
    """The means over the seeds of each setting of wrong_and_taught.csv."""
    head = ["trained on", "student", "optimizer", "samples", "wrong captions", "pairs", "teacher", "options"]
    figures = ["vendor_recall@1", "concepts_recall@5", "validation"]
    return _side_by_side(head, sorted(found.items(), key=lambda item: item[0]), figures)


def means(path: Path, setting: Mapping[str, str]) -> str:
    """The means of a CSV over the seeds of each setting; empty without the file.

    ``setting`` has the columns that tell settings apart, by the heads of the table.
    """
    read_rows = common.read(path, bool)
    found = grouped(read_rows, lambda row: tuple(row[column] for column in (*setting.values(), "samples")))
    figures = [name for name in SIDE_BY_SIDE if all(name in row for row in read_rows)]
    groups = []
    for (*names, samples), rows in sorted(found.items(), key=lambda item: [(len(part), part) for part in item[0]]):
        groups.append(([*(OPTIMIZERS.get(part, part) for part in names), f"{int(samples):,}"], rows))
    return _side_by_side([*setting, "samples"], groups, figures)


def _side_by_side(
    head: Sequence[str], groups: Iterable[tuple[Sequence[str], list[Row]]], figures: Sequence[str]
) -> str:
    body = [[*names, str(len(rows)), *(_mean(rows, name) for name in figures)] for names, rows in groups]
    return markdown([*head, "seeds", *(SIDE_BY_SIDE[name] for name in figures)], body)


def _mean(rows: list[Row], name: str) -> str:
    """The mean of the rows that have a value: recalls and seconds with one digit after the point, shares with three."""
    values = [float(row[name]) for row in rows if row[name]]
    digits = 3 if name in ("right_left_out", "wrong_among_kept", "auc") else 1
    return f"{statistics.mean(values):.{digits}f}" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, help="of scripts/real_pairs.py, to show what is retrieved")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = read_numbers(args.results / "results.csv")
    noisy_and_taught = wrong_and_taught_rows(args.results / "wrong_and_taught.csv")
    tables = {
        "The global batch, at the same number of samples": global_batch(rows),
        "Learning rates": rates(rows),
        "The same number of steps": fixed_steps(rows),
        "Steps and batch, in another style": steps_and_batch(rows, STYLE),
        "Steps and batch, on new concepts": steps_and_batch(rows, CONCEPTS),
        "Each direction": directions(rows),
        "AdamW and Muon": optimizers(rows),
        "Muon's learning rates": rates_of_muon(rows),
        "AdamW and Muon, other losses": losses_of_optimizers(rows),
        "A batch that grows": growing_batches(rows),
        "Fewer tokens": fewer_tokens(rows),
        "Objectives and false negatives": objectives(rows),
        "Several captions": several_captions(rows),
        "Hard negatives": hard_negatives(rows),
        "Fine-tuning": fine_tuning(rows),
        "Averages with the start": averages(rows),
        "Wrong captions and teachers": wrong_and_taught(noisy_and_taught),
        "Icons": means(
            args.results / "icons.csv",
            {"trained on": "trained_on", "losses": "method", "optimizer": "optimizer", "pairs": "batch"}
            | {"learning rate": "rate", "pair ids": "pair_ids", "captions": "captions", "wrong captions": "wrong"}
            | {"right pairs only": "oracle", "teacher": "taught_by", "options": "options"},
        ),
        "Other rules against wrong captions": means(
            args.results / "rules_tried.csv", {"rule": "rule", "wrong captions": "wrong"}
        ),
        "Towers that others have trained": means(
            args.results / "pretrained_towers.csv",
            {
                **{"trained": "trained", "optimizer": "optimizer", "weights": "weights"},
                **{"rate of the heads": "rate", "of it for texts": "text", "for images": "image"},
                **{"trained on": "way", "options": "options"},
            },
        ),
        "Cost": cost(rows),
        "Cost of the optimizers, compiled": cost(rows, COST_OF_OPTIMIZERS),
    }
    from real_pairs import pictures  # which imports this module

    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items() if table)
    (args.results / "TABLES.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    style, concepts = "recall@1, known concepts in another style, %", "recall@5, new concepts, %"
    pictures.draw_global_batch(rows, args.results / "global_batch.png", STYLE, style)
    pictures.draw_global_batch(rows, args.results / "new_concepts.png", CONCEPTS, concepts)
    pictures.draw_optimizers(rows, args.results / "optimizers.png")
    pictures.draw_curves(rows, args.results / "curves.png")
    pictures.draw_fronts(rows, args.results / "keeping.png")
    pictures.draw_wrong_captions(noisy_and_taught, args.results / "wrong_captions.png")
    if args.corpus is not None:
        pictures.draw_examples(rows, args.corpus, args.results / "examples.png")


if __name__ == "__main__":
    main()
