#!/usr/bin/env python3
"""Tables and pictures of the experiments' rows.

    python scripts/real_pairs/tables.py --corpus outputs/real_pairs

Reads results/results.csv beside this file, writes results/TABLES.md and the pictures. For every configuration the
learning rate is the one that is best on the validation set at the first seed; the figures are of the test sets.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for real_pairs

from real_pairs.job_tables import means, wrong_and_taught, wrong_and_taught_rows
from real_pairs.pictures import (
    draw_curves,
    draw_examples,
    draw_fronts,
    draw_global_batch,
    draw_optimizers,
    draw_wrong_captions,
)
from real_pairs.rows import (
    BATCHES,
    COLUMNS,
    CONCEPTS,
    COST_OF_OPTIMIZERS,
    COST_OF_TOKENS,
    DIRECTIONS,
    FEWER_TOKENS,
    FIGURES,
    FIXED_SAMPLES,
    FIXED_STEPS,
    GROWING_BATCH,
    OPTIMIZERS,
    STYLE,
    SWAPS,
    TUNINGS,
    VALIDATION,
    Configuration,
    Row,
    Setting,
    at_fixed_samples,
    at_fixed_steps,
    configurations,
    fronts,
    label,
    markdown,
    name_of_way,
    read,
    score,
    seconds_alone,
    tunings,
)

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, help="of scripts/real_pairs.py, to show what is retrieved")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = read(args.results / "results.csv")
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
        "Activations in bf16": means(
            args.results / "bf16_activations.csv", {"optimizer": "optimizer", "options": "options"}
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
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items() if table)
    (args.results / "TABLES.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    draw_global_batch(rows, args.results / "global_batch.png", STYLE, "recall@1, known concepts in another style, %")
    draw_global_batch(rows, args.results / "new_concepts.png", CONCEPTS, "recall@5, new concepts, %")
    draw_optimizers(rows, args.results / "optimizers.png")
    draw_curves(rows, args.results / "curves.png")
    draw_fronts(rows, args.results / "keeping.png")
    draw_wrong_captions(noisy_and_taught, args.results / "wrong_captions.png")
    if args.corpus is not None:
        draw_examples(rows, args.corpus, args.results / "examples.png")


def global_batch(rows: list[Row]) -> str:
    body = [
        [f"{samples:,}", label(setting), f"{c.steps:,}", *c.cells()]
        for samples in FIXED_SAMPLES
        for setting, c in at_fixed_samples(rows, samples).items()
    ]
    return markdown(["samples", "", "steps", *COLUMNS, *FIGURES], body)


def rates(rows: list[Row]) -> str:
    """The validation scores of the linear and the square-root rule, from the tuned rate of the batch of 256 on."""
    found = {c.batch: c for s, c in at_fixed_samples(rows, FIXED_SAMPLES[0]).items() if s.method == "InfCLTrainer"}
    if 256 not in found:
        return ""
    base = found[256].rate

    def of_rule(configuration: Configuration, rate: float) -> str:
        near = [tried for tried in configuration.by_rate if abs(tried / rate - 1) < 0.05]
        return f"{rate:.2g}: {100 * score(configuration.by_rate[near[0]]):.1f}" if near else f"{rate:.2g}: not tried"

    body = []
    for batch, configuration in found.items():
        tried = ", ".join(f"{rate:g}: {100 * score(row):.1f}" for rate, row in sorted(configuration.by_rate.items()))
        factor = batch / 256
        body.append(
            [
                f"{batch:,}",
                f"{configuration.rate:g}: {100 * score(configuration.by_rate[configuration.rate]):.1f}",
                of_rule(configuration, base * factor**0.5),
                of_rule(configuration, base * factor),
                tried,
            ]
        )
    return markdown(["batch", "tuned", "square-root rule", "linear rule", "all that were tried"], body)


def fixed_steps(rows: list[Row]) -> str:
    body = [
        [f"{steps:,}", label(setting), name, f"{c.steps * c.batch:,}", *c.cells()]
        for steps in FIXED_STEPS
        for optimizer, name in OPTIMIZERS.items()
        for setting, c in at_fixed_steps(rows, steps, optimizer).items()
    ]
    return markdown(["steps", "", "optimizer", "samples", *COLUMNS, *FIGURES], body) if len(body) > 1 else ""


def of_every_size(rows: list[Row], optimizer: str = "adamw") -> list[tuple[Setting, Configuration]]:
    """The trainings that differ in the batch, of the fewest samples first."""
    sizes = sorted({row["samples"] for row in rows if row["experiment"] in BATCHES})
    return [pair for samples in sizes for pair in at_fixed_samples(rows, samples, optimizer).items()]


def steps_and_batch(rows: list[Row], figure: str) -> str:
    """The figure of one loss over the batch: a line for each number of steps, a column for each batch."""
    found = {
        (name, c.steps, c.batch): c
        for optimizer, name in OPTIMIZERS.items()
        for setting, c in of_every_size(rows, optimizer)
        if setting.method == "InfCLTrainer"
    }
    batches = sorted({batch for _, _, batch in found})
    body = [
        [
            name,
            f"{steps:,}",
            *(found[of].cell(figure) if (of := (name, steps, batch)) in found else "" for batch in batches),
        ]
        for name, steps in sorted({(name, steps) for name, steps, _ in found})
    ]
    return markdown(["optimizer", "steps", *(f"{batch:,} pairs" for batch in batches)], body)


def directions(rows: list[Row]) -> str:
    """Images found by captions and captions by images, of the trainings that differ in the batch."""
    body = [
        [label(setting), name, f"{c.steps:,}", f"{c.steps * c.batch:,}", *c.cells(*DIRECTIONS)]
        for optimizer, name in OPTIMIZERS.items()
        for setting, c in of_every_size(rows, optimizer)
    ]
    return markdown(["", "optimizer", "steps", "samples", *COLUMNS, *DIRECTIONS], body)


def optimizers(rows: list[Row]) -> str:
    """One loss over the batch, with each optimizer: a line for each batch and number of samples."""
    if not configurations(rows, *BATCHES, optimizer="muon"):
        return ""
    body = []
    for samples in FIXED_SAMPLES:
        found = {
            (c.batch, optimizer): c
            for optimizer in OPTIMIZERS
            for setting, c in at_fixed_samples(rows, samples, optimizer).items()
            if setting.method == "InfCLTrainer"
        }
        for batch in sorted({batch for batch, _ in found}):
            line = [f"{samples:,}", f"{batch:,}", f"{samples // batch:,}"]
            for optimizer in OPTIMIZERS:
                c = found.get((batch, optimizer))
                line += c.cells(STYLE, CONCEPTS) if c else [""] * 4
            body.append(line)
    figures = [f"{name}: {column}" for name in OPTIMIZERS.values() for column in (*COLUMNS, STYLE, CONCEPTS)]
    return markdown(["samples", "pairs", "steps", *figures], body)


def rates_of_muon(rows: list[Row]) -> str:
    body = []
    for samples in FIXED_SAMPLES:
        for setting, c in at_fixed_samples(rows, samples, "muon").items():
            body += of_each_rate([f"{samples:,}", label(setting)], c, STYLE, CONCEPTS)
    return markdown(["samples", "", *COLUMNS, VALIDATION, STYLE, CONCEPTS], body)


def growing_batches(rows: list[Row]) -> str:
    """Batches that grow beside constant ones on the same samples."""
    body = []
    for optimizer, name in OPTIMIZERS.items():
        constant = at_fixed_samples(rows, FIXED_SAMPLES[0], optimizer)
        found = {setting: c for setting, c in constant.items() if setting.method == "InfCLTrainer"}
        found |= configurations(rows, GROWING_BATCH, optimizer=optimizer)
        for setting, c in found.items():
            seconds = seconds_alone(rows, setting, FIXED_SAMPLES[0])
            time = "" if seconds is None else f"{seconds:.0f} s"
            body.append([label(setting), name, f"{c.steps:,}", time, *c.cells(STYLE, CONCEPTS)])
    if not configurations(rows, GROWING_BATCH):
        return ""
    return markdown(["pairs in a step", "optimizer", "steps", "time of the steps", *COLUMNS, STYLE, CONCEPTS], body)


def fewer_tokens(rows: list[Row]) -> str:
    """Trainings that leave out patches or begin with smaller images, beside the one that does neither."""
    tried = configurations(rows, FEWER_TOKENS)
    if not tried:
        return ""
    batch, optimizer = next((setting.batch, setting.optimizer) for setting in tried)
    plain = at_fixed_samples(rows, FIXED_SAMPLES[0], optimizer).items()
    found = {setting: c for setting, c in plain if (setting.method, setting.batch) == ("InfCLTrainer", batch)} | tried
    cost = {row.get("options", ""): row for row in rows if row["experiment"] == COST_OF_TOKENS}
    body = []
    for setting, c in found.items():
        # The last steps see all tokens; most steps take what those without them take.
        options = json.loads(setting.options or "{}")
        last = options.pop("full_tokens_last", None)
        timed = cost.get(json.dumps(options) if options else "")
        per_step = "" if timed is None else f"{1000 * timed['seconds'] / timed['steps']:.1f} ms"
        memory = "" if timed is None else f"{timed['peak_gib']:.1f} GiB"
        name = ", ".join(f"`{n}` {' '.join(v) if isinstance(v, list) else v}" for n, v in options.items())
        name += f", all in the last {last:.0%} of the steps" if last else ""
        body.append([name or "all tokens", f"{c.steps:,}", per_step, memory, *c.cells(STYLE, CONCEPTS)])
    return markdown(["", "steps", "a step", "its memory", *COLUMNS, STYLE, CONCEPTS], body)


def losses_of_optimizers(rows: list[Row]) -> str:
    """Losses over parts of the batch, and SigLIP's loss, beside CLIP's loss over the batch, with each optimizer."""
    experiments = (*BATCHES, "3_objectives")
    with_muon = configurations(rows, "9_optimizers", optimizer="muon")
    others = {s for s in with_muon if s.method == "Trainer" or s.objective == "sigmoid"}
    sizes = {
        (row["samples"], row["batch"]) for row in rows if row["experiment"] in experiments and Setting.of(row) in others
    }
    body = []
    for samples, batch in sorted(sizes):
        found = configurations(rows, *experiments, samples=samples, batch=batch, pair_ids=False)
        wanted = {(s.method, s.objective) for s in found if s.optimizer == "muon"}
        for setting, c in found.items():
            if (setting.method, setting.objective) in wanted:
                name = f"{label(setting)}, {setting.objective}"
                body.append(
                    [name, f"{c.steps:,}", f"{samples:,.0f}", OPTIMIZERS[setting.optimizer], *c.cells(STYLE, CONCEPTS)]
                )
    return markdown(["", "steps", "samples", "optimizer", *COLUMNS, STYLE, CONCEPTS], body)


def objectives(rows: list[Row]) -> str:
    """The settings of 3_objectives beside plain softmax with as many pairs in a step and as many samples."""
    kept = [row for row in rows if row["experiment"] in ("1_global_batch", "2_fixed_steps", "3_objectives")]
    body = []
    for batch, samples in sorted({(r["batch"], r["samples"]) for r in kept if r["experiment"] == "3_objectives"}):
        same = [row for row in kept if row["samples"] == samples]
        found = configurations(same, *{row["experiment"] for row in same}, method="InfCLTrainer", batch=batch)
        for setting, c in found.items():
            ids = "yes" if setting.pair_ids else "no"
            body.append([f"{c.batch:,}", f"{c.steps:,}", setting.objective, ids, *c.cells()])
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
    for setting, c in configurations(rows, "6_several_captions").items():
        body += of_each_rate([positives(setting)], c, *FIGURES)
    return markdown(["per image", *COLUMNS, VALIDATION, *FIGURES], body)


def hard_negatives(rows: list[Row]) -> str:
    """How often an image is nearer to its caption than to the swapped one, beside the recalls."""
    found = configurations(rows, "6_several_captions", "7_hard_negatives", pair_ids=False)
    figures = (*SWAPS, STYLE, CONCEPTS)
    body = []
    for setting, c in found.items():
        if setting._replace(negatives=True) in found:
            body += of_each_rate([positives(setting), "yes" if setting.negatives else "no"], c, *figures)
    head = ["per image", "swapped captions in training", *COLUMNS, VALIDATION, *figures]
    return markdown(head, body)


def fine_tuning(rows: list[Row]) -> str:
    """Validation and new concepts are those of clip art, which the fine-tuning is about; the rest is of emoji."""
    figures = (CONCEPTS, STYLE, "zero-shot, other style")
    body = []
    for base in TUNINGS:
        for setting, c in tunings(rows, base).items():
            name = "before the fine-tuning" if setting.way == "base" else name_of_way(setting)
            body += of_each_rate([base, name], c, *figures)
    heads = ["clip art: validation", "clip art: new concepts, R@5", "emoji: other style, R@1", "emoji: zero-shot"]
    return markdown(["base", "", *COLUMNS, *heads], body)


def averages(rows: list[Row]) -> str:
    """What is kept (emoji: other style, R@1) and gained (clip art: new concepts, R@5) between start and end."""
    found = [(base, setting, front) for base in TUNINGS for setting, front in fronts(rows, base).items()]
    if not found:
        return ""
    front = found[0][2]
    columns = [(path, alpha) for path in ("line", "by_depth") for alpha in getattr(front, path)]
    body = []
    for base, setting, front in found:
        cells = (getattr(front, path)[alpha] for path, alpha in columns)
        told = (f"{kept:.1f} / {gained:.1f}" for kept, gained in cells)
        body.append([base, name_of_way(setting), str(front.seeds), *told])
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


if __name__ == "__main__":
    main()
