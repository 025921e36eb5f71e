#!/usr/bin/env python3
"""Trains rows of the committed tables again, those whose cells are as the conditions say.

    python scripts/real_pairs/runs.py results --list
    python scripts/real_pairs/runs.py results experiment=9_optimizers batch=1024 seed=0 --corpus outputs/real_pairs
    python scripts/real_pairs/runs.py wrong_and_taught wrong=0.2 'options={"leave_out": "noisy"}'

The tables are those of results/; ``icons`` needs a corpus --with_icons, ``pretrained_towers`` the packages that its
module names. A run is trained after those that it needs, such as its teacher, whose weights stay in --output_dir. Its
rows are added to the table's CSV there, where the same command finds what is done; tables.py --results reads it. A row
whose options the package does not have any more is history: its ``commit`` has the code that trained it.
"""

import argparse
import copy
import csv
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for benchmarks and real_pairs

import torch
import torch.nn.functional as F
from benchmarks import common
from benchmarks.inputs import stored_teacher
from torch import Tensor

from hf_infcl import InfCLTrainingArguments
from hf_infcl.models.adapters import resize_images
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.quality.averages import interpolated
from hf_infcl.quality.selection import WithoutNoisyPairs
from hf_infcl.step.extensions import of_kind
from hf_infcl.step.terms import SIDES, TeacherDistance
from real_pairs import pretrained_towers
from real_pairs.in_memory import prepare, to_device
from real_pairs.training import SETS, Row, Run, compile_layers, measure, new_model, recalls, train
from real_pairs.wrong_and_taught import called_wrong, of_selection, scores_of, stored, with_wrong_captions

RESULTS = Path(__file__).parent / "results"
TABLES = ("results", "wrong_and_taught", "icons", "pretrained_towers", "rules_tried")
CELLS = (  # the columns that say what was trained
    *("experiment", "method", "batch", "micro_batch", "samples", "learning_rate", "objective", "pair_ids", "seed"),
    *("evaluations", "captions", "equal_ids", "negatives", "optimizer", "way", "options", "sources", "replay", "path"),
    *("alpha", "alone", "torch_compile", "size", "times", "trained_on", "wrong", "oracle", "cleaned", "teacher"),
    *("taught_by", "weight", "side", "trained", "rate", "text", "image", "weights"),
)
EMOJI, CLIP_ART = "openmoji,fluent flat,fluent modern,twemoji", "openclipart,tuxpaint"
SOURCES = {  # by ``trained_on``
    **{"all": "", "emoji": EMOJI, "clip art": CLIP_ART, "all but icons": f"{EMOJI},{CLIP_ART}", "twemoji": "twemoji"},
    "all but twemoji": f"openmoji,fluent flat,fluent modern,{CLIP_ART}",
}
RATES = {"muon": 4e-3, "adamw": 5e-4}  # of rows without a rate
TEACHER = {"size": "small", "times": "4", "trained_on": "all", "seed": "100"}
TEACHERS: dict[str, tuple[str, dict[str, str]]] = {  # the rows that trained them
    "small 2": ("wrong_and_taught", TEACHER | {"times": "2"}),
    "small 4": ("wrong_and_taught", TEACHER),
    "large 4": ("wrong_and_taught", TEACHER | {"size": "large"}),
    "small 4 without twemoji": ("wrong_and_taught", TEACHER | {"trained_on": "all but twemoji"}),
    "icons 4": ("icons", TEACHER),
}
OF_LEDGER = {"options": '{"leave_out": "noisy"}', "seed": "0", "trained_on": "all", "optimizer": "muon", "times": "1"}
AVERAGES = (0.25, 0.5, 0.75)  # of a fine-tuning's start and its end
# Ways to train on all pairs: on images of half the height and width, and from those weights on whole ones.
HALF, AFTER_HALF = "half the pixels per side", "then all pixels"
FROM_RANDOM = ("", "base", HALF)


# ---- From rows to runs ----


def rows_of(table: str, folder: Path = RESULTS, **wanted: str) -> list[dict[str, str]]:
    """The rows with these cells; none without the table."""
    path = folder / f"{table}.csv"
    rows = common.read(path, bool)
    if rows and (unknown := sorted(wanted.keys() - rows[0].keys())):
        raise SystemExit(f"{path} has no column {', '.join(unknown)}: it has {', '.join(rows[0])}.")
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def history(table: str, row: Mapping[str, str]) -> str:
    """What of a row's training the package does not have any more; empty if the row can be trained again."""
    if table == "rules_tried":
        return "rules against wrong captions"
    if row.get("path") == "depth":
        return "averages by depth"
    if row.get("teacher") not in (None, "", "stored"):
        return f"teacher: {row['teacher']}"
    known = {field.name for field in dataclasses.fields(InfCLTrainingArguments)}
    return ", ".join(sorted(json.loads(row.get("options") or "{}").keys() - known))


def run_of(table: str, row: Mapping[str, str]) -> Run:
    """The run that has made a row."""
    if table == "results":
        return _of_results(row)
    optimizer, seed = row["optimizer"], int(row["seed"])
    same: Any = {"table": table, "samples": int(row["samples"]), "optimizer": optimizer, "seed": seed}
    if table == "pretrained_towers":
        way = "full" if row["way"] == "tuned" else row["way"]
        options = json.loads(row["options"])
        same |= {"sources": {"": "", "base": EMOJI, "full": CLIP_ART}[way], "way": way, "towers": row["trained"]}
        same |= {"replay": EMOJI if "replay_share" in options else "", "compiled": False}
        rate = (4 if optimizer == "muon" else 1) * float(row["rate"])
        run = Run(method="InfCLTrainer", batch=512, micro_batch=512, learning_rate=rate, **same)
        rates = {f"{side}_learning_rate": float(row[side]) * run.adamw_rate for side in ("image", "text")}
        return dataclasses.replace(run, options=json.dumps(rates | options))
    tuned, method = row["trained_on"] == "clip art", row.get("method") or "InfCLTrainer"
    batch = 512 if tuned else int(row.get("batch") or 1024)
    of_teacher = 3e-3 if row["times"] == "2" else 2e-3
    rate = 1e-3 if tuned else float(row.get("rate") or (of_teacher if seed == 100 else RATES[optimizer]))
    same |= {"way": "full" if tuned else "", "sources": SOURCES[row["trained_on"]], "options": row["options"]}
    same |= {"wrong": row["wrong"], "oracle": row["oracle"] == "True", "cleaned": float(row["cleaned"])}
    same |= {"taught_by": row.get("taught_by", ""), "weight": float(row["weight"]), "side": row["side"]}
    same |= {"size": row["size"], "pair_ids": row.get("pair_ids") == "True", "captions": int(row.get("captions") or 1)}
    micro_batch = 256 if method == "Trainer" else min(batch, 1024)
    return Run(method=method, batch=batch, micro_batch=micro_batch, learning_rate=rate, **same)


def _of_results(row: Mapping[str, str]) -> Run:
    values: dict[str, Any] = {"table": "results", "compiled": row["torch_compile"] == "True"}
    casts: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": "True".__eq__}
    for field in dataclasses.fields(Run):
        if text := row.get(field.name):  # rows from before a column was added have its default
            values[field.name] = casts[str(field.type)](text)
    sources = {"": "", HALF: "", AFTER_HALF: "", "base": EMOJI}.get(row["way"], CLIP_ART)
    return Run(**{"sources": sources, **values})


def needed_by(run: Run) -> dict[str, Run]:
    """The runs whose weights a run needs: its start, its teacher, and the one whose ledger says what is wrong."""
    found = {}
    if run.way not in FROM_RANDOM:
        before = HALF if run.way == AFTER_HALF else "base"
        of_base: dict[str, dict[str, str]] = {
            "results": {"experiment": run.experiment, "way": before, "seed": str(run.seed)},
            "pretrained_towers": {"optimizer": run.optimizer, "way": "base", "seed": str(run.seed)},
            "wrong_and_taught": {"trained_on": "emoji"},
        }
        found["start"] = run_of(run.table, rows_of(run.table, **of_base[run.table])[0])
    if run.taught_by:
        table, wanted = TEACHERS[run.taught_by]
        found["teacher"] = run_of(table, rows_of(table, **wanted)[0])
    if run.cleaned and not run.way:
        (row, *_) = rows_of("wrong_and_taught", wrong=run.wrong, **OF_LEDGER)
        found["ledger"] = run_of("wrong_and_taught", row)
    return found


# ---- Training ----


def make_model(run: Run, data: dict[str, Any], *, toy: bool) -> Any:
    torch.manual_seed(run.seed)
    model = pretrained_towers.two_towers(run.towers) if run.towers else None
    model = model or new_model(data, run.seed, run.objective, toy=toy, size=run.size)
    return model.to(data["images"].device)


def for_way(model: Any, way: str) -> Any:
    """The model with what this way of fine-tuning trains."""
    if way == "LoRA":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        model.base_model.model.logit_scale.requires_grad_(True)
    elif way == "locked image tower":
        model.vision_model.requires_grad_(False)
        model.visual_projection.requires_grad_(False)
    return model


def perform(run: Run, data: dict[str, Any], folder: Path, origin: Row, *, toy: bool, keep: bool) -> list[Row]:
    """Trains a run after those that it needs, and may keep its weights in the folder; returns what was measured."""
    needed = {kind: weights_of(other, data, folder, origin, toy=toy) for kind, other in needed_by(run).items()}
    device, on_gpu = data["images"].device, data["images"].is_cuda
    size = data["images"].shape[-1]
    if run.way == HALF:
        data = of_half_size(data)
    changed, captions, is_wrong = with_wrong_captions(data, run.wrong)
    model = make_model(run, of_half_size(data) if run.way == AFTER_HALF else data, toy=toy)
    if start := needed.get("start"):
        model.load_state_dict(start["model"])
        resize_images(DualEncoder(model), size)
    removed = is_wrong if run.oracle else torch.zeros_like(is_wrong)
    if run.cleaned and start:
        of_run = torch.tensor([source in run.sources.split(",") for source in data["sources"]], device=device)
        removed[of_run] = called_wrong(scores_of(model, changed, of_run), run.cleaned)
    elif run.cleaned:
        removed = called_wrong(needed["ledger"]["averages"], run.cleaned).to(device)
    if removed.any():
        named = zip(removed.tolist(), data["sources"], strict=True)
        changed["sources"] = ["removed" if bad else name for bad, name in named]
    if run.towers and run.towers != "both":
        changed = pretrained_towers.of_features(changed)
    guests: dict[str, Any] = {}
    if run.taught_by:
        teacher = make_model(needed_by(run)["teacher"], data, toy=toy)
        teacher.load_state_dict(needed["teacher"]["model"])
        images, texts = stored(teacher, data)
        sides = SIDES if run.side == "both" else [run.side]
        changed["stored"] = images, texts[captions]
        guests["extensions"] = [TeacherDistance(stored_teacher(sides), run.weight)]
    tunes = run.way not in ("", HALF, AFTER_HALF)
    if tunes:
        changed["sets"] = sets_of_clip_art(changed["sets"])
    if run.compiled and on_gpu and not (start and tunes):
        compile_layers(model, texts=run.captions == 1 and not run.negatives)
    first = copy.deepcopy(model.state_dict())
    every = ",".join(sorted(set(data["sources"])))
    of_toy = {"batch": 8, "micro_batch": 4, "samples": 32} if toy else {}
    trained = dataclasses.replace(run, sources=run.sources or every if removed.any() else run.sources, **of_toy)
    rows, trainer = train(trained, changed, origin, model=for_way(model, run.way), toy=toy, **guests)
    (model := trainer.model).eval()
    if run.way == "LoRA":
        model = model.merge_and_unload()
    weights = {"model": model.state_dict()}
    more: Row = {}
    for selection in of_kind(trainer.window_step.extensions, WithoutNoisyPairs) if "leave_out" in run.options else []:
        of_set = torch.tensor([not run.sources or name in run.sources.split(",") for name in data["sources"]])
        more |= of_selection(selection, is_wrong[of_set.to(device)])
        weights["averages"] = selection.averages.state_dict()["averages"][1]
    if keep:
        torch.save(weights, weights_file(run, folder))
    if run.table == "results":
        return [*rows, *(_averages(rows[-1], first, model, changed) if start and tunes else ())]
    if removed.any() and not run.oracle:
        more |= {"removed": int(removed.sum()), "wrong_kept": int((is_wrong & ~removed).sum())}
    more |= {"seconds": rows[-1]["seconds"], **origin}
    return [recalls(rows[-1]) | _widths(run, model, changed) | _halves(run, first, model, changed) | more]


def weights_file(run: Run, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(repr(run).encode()).hexdigest()[:16]}.pt"


def weights_of(run: Run, data: dict[str, Any], folder: Path, origin: Row, *, toy: bool) -> dict[str, Any]:
    """The weights of a run, which is trained if they are not there, and its averages of the pairs."""
    if not (path := weights_file(run, folder)).exists():
        print(f"First {run} is trained.", flush=True)
        perform(run, data, folder, origin, toy=toy, keep=True)
    return torch.load(path, weights_only=True, map_location=data["images"].device)


def _averages(row: Row, start: dict[str, Tensor], model: Any, data: dict[str, Any]) -> Iterator[Row]:
    """The row of a fine-tuning with what averages of its start and its end measure."""
    end = copy.deepcopy(model.state_dict())
    for alpha in AVERAGES:
        model.load_state_dict(interpolated(start, end, alpha))
        found = {**measure(model, data, SETS), "logit_scale": round(model.logit_scale.exp().item(), 4)}
        yield {**row, **found, "path": "line", "alpha": alpha}


def _halves(run: Run, start: dict[str, Tensor], model: Any, data: dict[str, Any]) -> Row:
    """What the mean of a fine-tuning's start and its end finds, of pretrained towers."""
    if not run.towers or run.way != "full":
        return {}
    model.load_state_dict(interpolated(start, copy.deepcopy(model.state_dict()), 0.5))
    return {f"averaged_{name}": value for name, value in recalls(measure(model, data, list(data["sets"]))).items()}


def _widths(run: Run, model: Any, data: dict[str, Any]) -> Row:
    """What the first dimensions of the embeddings find, of students and where these are trained."""
    found: Row = {}
    for width in (32, 64, 128) if run.taught_by or "matryoshka_dims" in run.options else ():
        of_width = recalls(measure(model, data, ("validation", "vendor", "concepts"), width))
        found |= {f"{name}_of_{width}": round(value, 2) for name, value in of_width.items() if name != "validation"}
    return found


def of_half_size(data: dict[str, Any]) -> dict[str, Any]:
    """The data with images of half the height and width."""

    def half(values: dict[str, Any]) -> dict[str, Any]:
        halves = (F.avg_pool2d(part.float(), 2).round().to(part.dtype) for part in values["images"].split(4096))
        return {**values, "images": torch.cat([*halves])}

    return {**half(data), "sets": {name: half(values) for name, values in data["sets"].items()}}


def sets_of_clip_art(sets: dict[str, Any]) -> dict[str, Any]:
    """The sets of held-out concepts, of clip art in place of all; those of emoji are the guard."""
    found = dict(sets)
    for name in ("validation", "concepts"):
        values = dict(sets[name])
        chosen, swaps = values["clip_art"], values.pop("swaps")
        of_chosen = chosen[swaps["image"]]
        found[name] = {key: value[chosen] for key, value in values.items()}
        places = chosen.cumsum(0) - 1
        found[name]["swaps"] = {key: value[of_chosen] for key, value in swaps.items()}
        found[name]["swaps"]["image"] = places[swaps["image"][of_chosen]]
    return found


# ---- The command ----


def chosen_runs(table: str, conditions: Sequence[str]) -> tuple[dict[Run, Row], list[tuple[str, str]]]:
    """The runs of the rows that the conditions choose, each with its cells; and of rows that are history why, and the
    commit that made them."""
    rows = rows_of(table, **dict(condition.split("=", 1) for condition in conditions))
    past = [(reason, row["commit"]) for row in rows if (reason := history(table, row))]
    runs: dict[Run, Row] = {}
    for row in rows:
        if not history(table, row) and not row.get("path"):  # averages are made with their fine-tuning
            runs.setdefault(run_of(table, row), {name: row[name] for name in CELLS if name in row})
    return runs, past


def add(rows: Sequence[Row], path: Path) -> None:
    before = rows_of(path.stem, path.parent)
    columns = list(dict.fromkeys(column for row in (*before, *rows) for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows([*before, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("conditions", nargs="*", metavar="COLUMN=CELL", help="which rows; by default all")
    parser.add_argument("--corpus", type=Path, default=Path("outputs/real_pairs"), help="of scripts/real_pairs.py")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/runs"), help="one for each process")
    parser.add_argument("--list", action="store_true", help="print the runs and the rows that are history; train none")
    parser.add_argument("--toy", action="store_true", help="a few steps of a tiny model: to try everything out")
    args = parser.parse_args()
    runs, past = chosen_runs(args.table, args.conditions)
    for reason, commit in dict.fromkeys(past):
        print(f"{past.count((reason, commit))} rows are history: {reason}, commit {commit}.")
    if args.list:
        print(*runs, f"{len(runs)} runs.", sep="\n")
        return
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # a layer is compiled once for every micro-batch that a run has
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = pretrained_towers.tokenizer() if args.table == "pretrained_towers" else None
    data = to_device(prepare(args.corpus, with_icons=args.table == "icons", tokenizer=tokens), device)
    path, origin = args.output_dir / f"{args.table}.csv", common.environment(device, "transformers")
    done = {run_of(args.table, row) for row in rows_of(args.table, args.output_dir)}
    needed = {other for run in runs for other in needed_by(run).values()}
    for run, cells in runs.items():
        if run not in done:
            measured = perform(run, data, args.output_dir, origin, toy=args.toy, keep=run in needed)
            found = [{**cells, **row} for row in measured]
            print(found[-1], flush=True)
            add(found, path)


if __name__ == "__main__":
    main()
