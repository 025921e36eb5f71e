"""Tables of what scripts have measured that run jobs side by side, such as wrong_and_taught.csv."""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from .rows import CONCEPTS, OPTIMIZERS, STYLE, VALIDATION, markdown

# The columns of scripts that run jobs side by side, and what the tables call them.
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


def wrong_and_taught_rows(path: Path) -> dict[tuple[str, ...], dict[str, Mapping[str, str]]]:
    """The rows of wrong_and_taught.csv by setting and seed; the newest run of a seed counts. Empty without the file."""
    if not path.exists():
        return {}
    found: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = defaultdict(dict)  # by setting and seed
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            wrong, cleaned = row["wrong"], float(row["cleaned"] or 0)
            share = "titles of collections" if wrong == "titles" else f"{float(wrong):.0%}"
            kept = "right pairs" if row["oracle"] == "True" else f"cleaned at {cleaned:g}" if cleaned else "all"
            taught = f"{row['teacher']}, {row['taught_by']}, β {row['weight']}, {row['side']}" if row["teacher"] else ""
            options = " ".join(f"`{name}` {value}" for name, value in json.loads(row["options"]).items())
            length = [row["trained_on"], row["size"], OPTIMIZERS[row["optimizer"]], f"{int(row['samples']):,}"]
            found[(*length, share, kept, taught, options)][row["seed"]] = row
    return found


def wrong_and_taught(found: Mapping[tuple[str, ...], Mapping[str, Mapping[str, str]]]) -> str:
    """The means over the seeds of each setting of wrong_and_taught.csv."""
    body, figures = [], ("vendor_recall@1", "concepts_recall@5", "validation")
    for setting, rows in sorted(found.items()):
        body.append([*setting, str(len(rows)), *(_mean(rows.values(), name) for name in figures)])
    head = ["trained on", "student", "optimizer", "samples", "wrong captions", "pairs", "teacher", "options", "seeds"]
    return markdown([*head, *(SIDE_BY_SIDE[name] for name in figures)], body)


def means(path: Path, setting: Mapping[str, str]) -> str:
    """The means over the seeds of each setting of a script that runs jobs side by side; empty without its file.

    Args:
        path: its CSV.
        setting: the columns that tell settings apart, by the heads of the table.
    """
    if not path.exists():
        return ""
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[tuple(row[column] for column in (*setting.values(), "samples"))].append(row)
    figures = [name for name in SIDE_BY_SIDE if all(name in row for rows in found.values() for row in rows)]
    body = []
    for key, rows in sorted(found.items(), key=lambda item: [(len(part), part) for part in item[0]]):
        *names, samples = (OPTIMIZERS.get(part, part) for part in key)
        body.append([*names, f"{int(samples):,}", str(len(rows)), *(_mean(rows, name) for name in figures)])
    return markdown([*setting, "samples", "seeds", *(SIDE_BY_SIDE[name] for name in figures)], body)


def _mean(rows: Iterable[Mapping[str, str]], name: str) -> str:
    """The mean of the rows that have a value: recalls and seconds with one digit after the point, shares with three."""
    values = [float(row[name]) for row in rows if row[name]]
    digits = 3 if name in ("right_left_out", "wrong_among_kept", "auc") else 1
    return f"{statistics.mean(values):.{digits}f}" if values else ""
