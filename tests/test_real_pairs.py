"""The corpus of real pairs and its experiments, on pictures drawn here: no downloads, and one tiny model is trained."""

import csv
import dataclasses
import importlib
import json
import math
import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.demo import SCRIPTS
from PIL import Image, ImageDraw

from hf_infcl.loading.batch_checks import check_batch

SHAPES = {
    "circle": lambda draw, box, colour: draw.ellipse(box, fill=colour),
    "square": lambda draw, box, colour: draw.rectangle(box, fill=colour),
    "triangle": lambda draw, box, colour: draw.polygon([(box[0], box[3]), (box[2], box[3]), box[:2]], fill=colour),
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of scripts/real_pairs."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return lambda name: importlib.import_module(f"real_pairs.{name}")


def picture(path: Path, shape: str, colour: str, place: int) -> Path:
    image = Image.new("RGBA", (40, 40))
    SHAPES[shape](ImageDraw.Draw(image), (4 + place, 6, 24 + place, 30 + place // 2), colour)
    image.save(path)
    return path


@pytest.fixture
def drawings(module, tmp_path) -> list[Any]:
    """Shapes in colours from two vendors, "google" and "openmoji"; each concept is a shape in a colour."""
    found = []
    for vendor, place in (("google", 0), ("openmoji", 9)):
        for shape in SHAPES:
            for colour in ("red", "lime", "blue", "gold", "black", "cyan", "navy", "pink"):
                path = picture(tmp_path / f"{vendor} {colour} {shape}.png", shape, colour, place)
                name = f"{colour} {shape}"
                found.append(module("sources").Drawing(vendor, path, name, shape, [colour, shape], name))
    return found


def test_splits_share_no_concept_no_vendor_and_no_near_duplicate(module, drawings, tmp_path):
    corpus, splits = module("corpus"), module("splits")
    tested = [d for d in drawings if d.source == "openmoji" and splits.split_of(d.concept) == "test"]
    trained = [d for d in drawings if d.source == "openmoji" and splits.split_of(d.concept) == "train"]
    assert len(tested) >= 2, "the toy has something to hold out"
    # A test drawing that looks like a training drawing, and a file that is not a picture.
    copied = dataclasses.replace(tested[0], file=trained[0].file)
    broken = dataclasses.replace(trained[0], name="broken", file=tmp_path / "broken.png")
    broken.file.write_bytes(b"no picture")
    given = [copied if d is tested[0] else d for d in drawings] + [broken]

    summary = corpus.build(given, tmp_path / "corpus", 32, shard_size=10, processes=1)
    rows, images = [], []
    for shard in sorted((tmp_path / "corpus").glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            for entry in tar:
                content = tar.extractfile(entry).read()
                if entry.name.endswith(".json"):
                    rows.append(json.loads(content))
                else:
                    (tmp_path / "image.webp").write_bytes(content)
                    images.append(Image.open(tmp_path / "image.webp").convert("RGB"))
    held = {}
    for part in ("held_out_concepts/validation", "held_out_concepts/test", "held_out_vendor/test"):
        folder = tmp_path / "corpus/evaluation" / part
        held[part] = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        looks = [splits.Looks.of(Image.open(folder / row["file_name"])) for row in held[part]]
        assert not splits.near_duplicates(looks, [splits.Looks.of(image) for image in images]).any()
        assert len({row["caption"] for row in held[part]}) == len(held[part]), "one picture of each name"

    concepts = {row["concept"] for row in rows}
    assert {row["source"] for row in rows} == {"openmoji"}, "the held-out vendor is not trained on"
    assert len(rows) == len(images) == len(trained) == summary["sizes"]["train"]
    assert all(len(row["caption"]) == 3 for row in rows), "several captions"
    assert not concepts & {row["concept"] for part in list(held)[:2] for row in held[part]}
    assert {row["concept"] for row in held["held_out_vendor/test"]} <= concepts
    assert tested[0].name not in {row["caption"] for row in held["held_out_concepts/test"]}
    assert summary["near_duplicates_dropped"]["test"] == 1
    assert summary["not_rendered"] == 1
    assert images[0].size == (32, 32)


def test_near_duplicates_agree_in_outline_and_in_colour(module, tmp_path):
    splits = module("splits")

    def looks(shape: str, colour: str, place: int, side: int = 64) -> Any:
        image = Image.open(picture(tmp_path / "picture.png", shape, colour, place))
        white = Image.new("RGBA", image.size, "white")
        return splits.Looks.of(Image.alpha_composite(white, image).convert("RGB").resize((side, side)))

    first = [looks("circle", "red", 3)]
    same = {"another size": looks("circle", "red", 3, 100)}
    others = {"colour": looks("circle", "blue", 3), "outline": looks("triangle", "red", 3)}
    assert splits.near_duplicates(list(same.values()), first).tolist() == [True]
    assert splits.near_duplicates(list(others.values()), first).tolist() == [False, False]
    assert splits.near_duplicates(first, []).tolist() == [False]


@pytest.mark.parametrize(
    ("names", "concept"),
    [
        (("woman farmer: dark skin tone", "man farmer", "farmer"), "farmer"),
        (("family: man, woman, girl", "family"), "family"),
        (("man walking: facing right", "person walking: light skin tone"), "walking"),
        (("flag: france",), "flag: france"),
        (("woman", "woman: medium skin tone"), "woman"),
    ],
)
def test_variants_of_a_motif_are_one_concept(module, names, concept):
    assert {module("sources").concept_of(name) for name in names} == {concept}


@pytest.mark.parametrize(
    ("caption", "kind", "swapped"),
    [
        ("woman farmer: dark skin tone", "attribute", {"man farmer: dark skin tone"}),
        ("green apple", "attribute", {"red apple"}),
        ("nine o’clock", "number", {"six o’clock"}),
        ("keycap: 4", "number", {"keycap: 10"}),
        ("left-facing fist", "relation", {"right-facing fist"}),
        ("face with mask", "relation", {"face without mask"}),
    ],
)
def test_a_swap_makes_a_caption_wrong_by_one_word(module, caption, kind, swapped):
    found = module("swaps").swaps_of(caption)
    assert swapped <= {swap.caption for swap in found if swap.kind == kind}
    for swap in found:
        assert sum(a != b for a, b in zip(swap.caption.split(), caption.split(), strict=True)) == 1
    # An orange (the fruit), a light bulb, a number that is not a count; and no word that is already in the caption.
    for unchanged in ("tangerine orange", "light bulb", "upside-down face", "formula one", "view top bottom"):
        assert module("swaps").swaps_of(unchanged) == []
    assert "red and red flag" not in {swap.caption for swap in module("swaps").swaps_of("red and black flag")}
    assert module("swaps").negative_captions(["man", "woman"]) == []


def test_several_captions_and_negatives_are_drawn_as_the_collator_gives_them(module):
    counts, negative_counts = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
    data = {
        "images": torch.zeros(3, 3, 8, 8, dtype=torch.uint8),
        "tokens": torch.arange(9).view(3, 3, 1),  # image i has captions 3 i, 3 i + 1 and 3 i + 2
        "counts": counts,
        "negatives": torch.tensor([[100], [101], [120]]),  # of image 0 and of image 2
        "negative_counts": negative_counts,
        "sources": ["a", "a", "a"],
    }
    pairs = module("in_memory").InMemory(data, seed=0, captions_per_image=2, negatives=True)
    seen = []
    for _ in range(40):
        batch = pairs.collate([pairs[row] for row in (2, 0, 1)])
        check_batch(batch, "positive")
        texts, image = batch["input_ids"][:, 0], batch["caption_image"]
        assert image.tolist() == [0, 0, 1, 2, 2, -1, -1]
        rows = torch.tensor([2, 0, 1])[image[:5]]
        assert (texts[:5] // 3 == rows).all(), "captions of their images"
        assert (texts[:5] % 3 < counts[rows]).all()
        assert len(set(texts[:5].tolist())) == 5, "different ones"
        assert texts[5] == 120, "the negatives stand in the order of their images"
        seen += texts.tolist()
    assert set(seen) == {0, 3, 4, 6, 7, 8, 100, 101, 120}


def test_the_best_rate_is_looked_for_beyond_the_grid_while_the_best_so_far_gets_the_other_seeds(module):
    module("training")
    experiments = module("experiments")
    run = module("training").Run("toy", "InfCLTrainer", 8, 8, 64, 1e-3)
    plan = experiments.Plan(run, (1e-3, 2e-3), (0, 1, 2))

    def wanted(scores: dict[float, float]) -> list[tuple[float, int]]:
        return [(r.learning_rate, r.seed) for r in plan.wanted({(rate, 0): s for rate, s in scores.items()})]

    assert wanted({}) == [(1e-3, 0), (2e-3, 0), (1e-3, 1), (1e-3, 2)], "the first rate is thought to be the best"
    assert wanted({2e-3: 0.5}) == [(1e-3, 0), (2e-3, 1), (2e-3, 2)]
    assert wanted({1e-3: 0.1, 2e-3: 0.5}) == [(4e-3, 0), (2e-3, 1), (2e-3, 2)]
    assert wanted({1e-3: 0.5, 2e-3: 0.1}) == [(5e-4, 0), (1e-3, 1), (1e-3, 2)]
    assert wanted({1e-3: 0.1, 2e-3: 0.5, 4e-3: 0.3}) == [(2e-3, 1), (2e-3, 2)]
    plan = experiments.Plan(run, (1e-3,), (0, 1, 2))
    assert wanted({1e-3: 0.1, 2e-3: 0.5}) == [(1e-3, 1), (1e-3, 2)], "a single rate is not tuned"


def test_what_ended_earlier_is_not_run_again(module, tmp_path):
    training, experiments = module("training"), module("experiments")
    run = training.Run("toy", "InfCLTrainer", 8, 8, 64, 1e-3)
    plans = [experiments.Plan(run, (1e-3, 2e-3), (0, 1))]
    worker = experiments.Worker(None, None, 0)
    table = tmp_path / "results.csv"
    queue = experiments.Queue(plans, table, math.inf, {})
    for value in (0.5, 0.1):
        worker.plan, worker.run = queue.next_for(worker, [worker])
        measured = {f"validation_image_recall@{k}": value for k in (1, 5, 10)}
        queue.finished(worker, [{**vars(worker.run), "way": "", "finished": True, "seconds": 1.0, **measured}], "")

    again = experiments.Queue(plans, table, math.inf, {})
    assert again.next_for(worker, [worker])[1] == dataclasses.replace(run, learning_rate=5e-4), "the best was the least"
    assert again.next_for(worker, [worker])[1] == dataclasses.replace(run, seed=1), "the best so far"
    assert again.next_for(worker, [worker]) is None
    assert len(table.read_text().splitlines()) == 3

    larger = [experiments.Plan(dataclasses.replace(run, micro_batch=4), (1e-3, 2e-3), (0, 1))]
    same = experiments.Queue(larger, table, math.inf, {}).next_for(worker, [worker])[1]
    assert same.learning_rate == 5e-4, "what InfCLTrainer learns does not depend on the micro-batch"
    header, *rows = table.read_text().splitlines()
    columns = header.split(",")
    new = ("captions", "equal_ids", "negatives", "optimizer")
    places = [columns.index(name) for name in columns if name not in new]
    older = [",".join(line.split(",")[place] for place in places) for line in (header, *rows)]
    table.write_text("\n".join(older) + "\n")
    of_older = experiments.Queue(plans, table, math.inf, {}).next_for(worker, [worker])[1]
    assert of_older.learning_rate == 5e-4, "rows from before some columns"
    others = [experiments.Plan(dataclasses.replace(run, samples=32), (1e-3, 2e-3), (0, 1))]
    assert experiments.Queue(others, table, math.inf, {}).next_for(worker, [worker])[1].learning_rate == 1e-3


def test_plans_that_share_a_run_share_its_score(module, tmp_path):
    """A plan of one rate can stand first, and one that tunes the rate further down."""
    training, experiments = module("training"), module("experiments")
    run = training.Run("toy", "InfCLTrainer", 8, 8, 64, 2e-3, optimizer="muon")
    first, tuned = experiments.Plan(run, (2e-3,), (0, 1)), experiments.Plan(run, (2e-3, 1e-3, 4e-3), (0, 1))
    other = experiments.Plan(dataclasses.replace(run, optimizer="adamw"), (2e-3,), (0,))
    queue = experiments.Queue([first, tuned, other], tmp_path / "results.csv", math.inf, {})
    worker, order = experiments.Worker(None, None, 0), []
    values = {2e-3: 0.4, 1e-3: 0.1, 4e-3: 0.3}
    while (found := queue.next_for(worker, [worker])) is not None:
        worker.plan, worker.run = found
        order.append((found[1].optimizer, found[1].learning_rate, found[1].seed))
        measured = {"validation_image_recall@1": values[found[1].learning_rate]}
        queue.finished(worker, [{**vars(worker.run), "way": "", "finished": True, "seconds": 1.0, **measured}], "")
    assert order == [("muon", 2e-3, 0), ("muon", 2e-3, 1), ("muon", 1e-3, 0), ("muon", 4e-3, 0), ("adamw", 2e-3, 0)]


def test_fine_tunings_follow_their_base_and_are_not_run_again(module, tmp_path):
    """A base is trained once for all its fine-tunings, and again in a later session only if one of them is missing."""
    training, experiments = module("training"), module("experiments")
    base = training.Run("toy", "InfCLTrainer", 8, 8, 128, 1e-3, way="base")
    full = dataclasses.replace(base, samples=64, learning_rate=1e-4, way="full")
    keeping = dataclasses.replace(full, options='{"weight_decay": 0.0}')
    of_base = [experiments.Plan(run, (1e-4,), (0, 1), base=base) for run in (full, keeping)]
    plans, table = [experiments.Plan(base, (1e-3,), (0, 1)), *of_base], tmp_path / "results.csv"
    workers = [experiments.Worker(None, None, 0) for _ in range(4)]

    def begun(queue: Any) -> list[Any]:
        for worker in workers:
            if worker.plan is None and (task := queue.next_for(worker, workers)) is not None:
                worker.plan, worker.run = task
        return [worker.run and (worker.run.way, worker.run.options, worker.run.seed) for worker in workers]

    def end(queue: Any, worker: Any) -> None:
        measured = {"finished": True, "seconds": 1.0, "validation_image_recall@1": 0.5}
        queue.finished(worker, [{**vars(worker.run), **measured}], "")

    queue = experiments.Queue(plans, table, math.inf, {})
    assert begun(queue) == [("base", "", 0), ("base", "", 1), None, None]
    end(queue, workers[1])
    assert begun(queue) == [("base", "", 0), ("full", "", 1), ("full", keeping.options, 1), None]
    for worker in workers[1:3]:
        end(queue, worker)
    workers[0].plan = workers[0].run = None  # the session ended
    again = experiments.Queue(plans, table, math.inf, {})
    assert begun(again) == [("base", "", 0), None, None, None], "seed 1 is complete"
    end(again, workers[0])
    assert begun(again) == [("full", "", 0), ("full", keeping.options, 0), None, None]
    for worker in workers[:2]:
        end(again, worker)
    assert begun(experiments.Queue(plans, table, math.inf, {})) == [None] * 4
    assert len(table.read_text().splitlines()) == 1 + 6, "no row twice"


def test_no_run_is_begun_that_earlier_ones_of_this_machine_tell_to_be_too_long(module, tmp_path):
    training, experiments = module("training"), module("experiments")
    run = training.Run("toy", "InfCLTrainer", 8, 8, 64, 1e-3)
    plan, more = experiments.Plan(run, (1e-3,), (0, 1)), experiments.Plan(dataclasses.replace(run, samples=32), (1e-3,))
    worker, table = experiments.Worker(None, None, 0), tmp_path / "results.csv"
    machine = {"device": "this", "torch_compile": True}
    queue = experiments.Queue([plan], table, math.inf, machine)
    worker.plan, worker.run = queue.next_for(worker, [worker])
    row = {**vars(worker.run), "finished": True, "seconds": 640.0, "validation_image_recall@1": 0.5}
    queue.finished(worker, [{**row, **machine}], "")  # 10 seconds per sample

    def begun(plan: Any, seconds: float, **other: Any) -> bool:
        queue = experiments.Queue([plan], table, time.monotonic() + seconds, {**machine, **other})
        found = queue.next_for(worker, [worker])
        assert bool(queue.skipped) == (found is None)
        return found is not None

    assert [begun(plan, 700), begun(plan, 720)] == [False, True], "the second seed, with a tenth for the measuring"
    assert [begun(more, 340), begun(more, 360)] == [False, True], "half of the samples"
    costly = dataclasses.replace(run, experiment="cost", evaluations=0)
    queue = experiments.Queue([experiments.Plan(costly, (1e-3,), (0,))], table, math.inf, machine)
    worker.plan, worker.run = queue.next_for(worker, [worker])
    queue.finished(worker, [{**row, **machine, **vars(costly), "seconds": 6400.0}], "")
    assert begun(plan, 720), "a run for its cost is short and compiles nevertheless: it tells nothing about others"
    assert begun(plan, 1, device="another")
    assert begun(plan, 1, torch_compile=False)


def corpus_of(sources: list[str], length: int) -> dict[str, Any]:
    """Random pairs of these sources."""
    generator, count = torch.Generator().manual_seed(0), len(sources)
    tokens = torch.randint(3, 20, (count, 1, length), generator=generator, dtype=torch.int32)
    tokens[..., -1] = 1  # the end, where the text tower reads its result
    images = torch.randint(256, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
    counts = torch.ones(count, dtype=torch.int64)
    return {"images": images, "tokens": tokens, "counts": counts, "sources": sources, "vocabulary": 20}


def test_old_pairs_of_other_sources_are_mixed_into_a_fine_tuning(module, monkeypatch):
    training, in_memory = module("training"), module("in_memory")
    data, batches = corpus_of([*"aaacbbbb"], in_memory.LENGTH), []
    collate = in_memory.InMemory.collate
    monkeypatch.setattr(in_memory.InMemory, "collate", lambda own, rows: batches.append(rows) or collate(own, rows))
    options = {"evaluations": 0, "options": '{"replay_share": 0.4}', "replay": "b,c"}
    run = training.Run("toy", "InfCLTrainer", 5, 5, 25, 1e-2, **options)
    training.train(run, data, {}, sources=["a"], toy=True)
    assert [sorted(batch)[:3] for batch in batches] == [[0, 1, 2]] * 5
    assert {number for batch in batches for number in batch[3:]} == {3, 4, 5, 6, 7}


def test_both_trainers_have_the_same_muon(module):
    """With a micro-batch of the whole batch, both trainers compute one training, AdamW's part and Muon's."""
    training = module("training")
    data = corpus_of(["a"] * 8, module("in_memory").LENGTH)

    def trained(method: str, optimizer: str) -> dict[str, torch.Tensor]:
        run = training.Run("toy", method, 4, 4, 12, 2e-2, evaluations=0, optimizer=optimizer)
        return dict(training.train(run, data, {}, toy=True)[1].named_parameters())

    ours, theirs, adamw = (trained(*of) for of in (("InfCLTrainer", "muon"), ("Trainer", "muon"), ("Trainer", "adamw")))
    for name, parameter in ours.items():
        if "k_proj.bias" not in name:  # adds the same to all logits of an attention: its gradient is rounding alone
            assert (theirs[name] - parameter).norm() <= 0.01 * parameter.norm(), name
    layer = "vision_model.encoder.layers.0.mlp.fc1.weight"
    assert (adamw[layer] - ours[layer]).norm() > 0.1 * ours[layer].norm(), "another optimizer"


@pytest.mark.parametrize(
    ("optimizer", "rate", "of_the_rest"), [("adamw", 1e-3, 1e-3), ("muon", 1e-3, 2.5e-4), ("muon", 8e-3, 5e-4)]
)
def test_adamw_has_at_most_its_best_rate_beside_muon(module, optimizer, rate, of_the_rest):
    run = module("training").Run("toy", "InfCLTrainer", 4, 4, 8, rate, optimizer=optimizer)
    args = module("training").arguments(run, "unused", on_gpu=False)
    assert (args.learning_rate, args.muon_learning_rate) == (of_the_rest, rate if optimizer == "muon" else None)


def test_the_files_of_the_experiments_can_be_run(module):
    training, experiments = module("training"), module("experiments")
    files = sorted((SCRIPTS / "real_pairs/experiments").glob("*.yaml"))
    plans = experiments.read_plans(files)
    assert {plan.run.experiment for plan in plans} == {path.stem for path in files}
    ours = [plan for plan in plans if (plan.run.experiment, plan.run.method) == ("1_global_batch", "InfCLTrainer")]
    for plan in ours:
        factor = plan.run.batch / 256
        for by_rule in (5e-4 * factor, 5e-4 * factor**0.5):
            assert any(math.isclose(rate, by_rule, rel_tol=0.05) for rate in plan.rates), "the rules' rates are tried"
    for plan in plans:
        for run in (plan.run, plan.base or plan.run):
            assert run.method in training.TRAINERS
            assert run.batch % run.micro_batch == 0
            assert run.samples // run.batch >= 5, "enough steps"
            if run.method == "InfCLTrainer":  # it refuses options that it does not know
                training.arguments(dataclasses.replace(run, replay=""), "unused", on_gpu=False)
    tokens = [json.loads(plan.run.options or "{}") for plan in plans if plan.run.experiment == "15_fewer_tokens"]
    assert {found["patch_dropout"] for found in tokens} == {0.5, 0.75}


def test_the_committed_tables_are_those_of_the_committed_rows(module, tmp_path, monkeypatch):
    """Whatever rule of the tables changes, such as that validation chooses the rate, a figure of theirs does, too."""
    tables, pictures = module("tables"), module("pictures")
    for path in tables.RESULTS.glob("*.csv"):
        shutil.copy(path, tmp_path)
    head, *lines = csv.reader((tmp_path / "wrong_and_taught.csv").read_text().splitlines())
    place = head.index("vendor_recall@1")
    earlier = [[*line[:place], "0", *line[place + 1 :]] for line in lines]  # of each seed, which do not count
    with (tmp_path / "wrong_and_taught.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *earlier, *lines])
    monkeypatch.setattr(sys, "argv", ["tables.py", "--results", str(tmp_path)])
    tables.main()
    assert (tmp_path / "TABLES.md").read_text() == (tables.RESULTS / "TABLES.md").read_text()

    rows = [row for row in tables.read(tmp_path / "results.csv") if row["experiment"] != tables.COST_OF_OPTIMIZERS]
    pictures.draw_optimizers(rows, tmp_path / "one.png")
    one, two = (Image.open(tmp_path / f"{name}.png").width for name in ("one", "optimizers"))
    assert two == 2 * one, "the time has a panel of its own"
    nothing = [tables.optimizers, tables.averages, tables.growing_batches, tables.fewer_tokens, tables.cost]
    assert {table([]) for table in nothing} == {""}
    assert tables.wrong_and_taught(tables.wrong_and_taught_rows(tmp_path / "none.csv")) == ""
    assert {c.steps for c in tables.at_fixed_steps(rows).values()} == {576}


def test_a_rate_at_an_edge_has_a_star_and_a_batch_that_grows_its_sizes(module):
    rows = module("rows")

    def cell(*scores: float) -> str:
        run = {"seed": 0, "finished": True, "batch": 512}
        rates = [{**run, "learning_rate": 2**n, "validation_recall": s} for n, s in enumerate(scores)]
        return rows.Configuration(rates).rate_cell

    assert [cell(0.3, 0.4), cell(0.4, 0.3), cell(0.3, 0.4, 0.3), cell(0.3)] == ["2*", "1*", "2", "1"]
    options = '{"global_batch_schedule": ["512:0.25", "1024"]}'
    grows = rows.Setting("InfCLTrainer", 1024, "softmax", False, options=options)
    assert rows.label(grows) == "`InfCLTrainer`, 512 → 1,024"


def test_objectives_stand_beside_plain_softmax_of_as_many_steps(module):
    tables = module("tables")

    def row(experiment: str, batch: int, samples: int, **more: Any) -> Any:
        figures = dict.fromkeys({column for columns in tables.FIGURES.values() for column in columns}, 0.5)
        run = {"experiment": experiment, "method": "InfCLTrainer", "batch": batch, "samples": samples, "seed": 0}
        run |= {"steps": samples // batch, "learning_rate": 1e-3, "finished": True, "validation_image_recall@1": 0.1}
        return {**figures, **run, "objective": "softmax", "pair_ids": False, **more}

    rows = [
        row("1_global_batch", 512, 589_824),
        row("1_global_batch", 4096, 589_824),
        row("2_fixed_steps", 512, 294_912),
        row("2_fixed_steps", 4096, 2_359_296),
        row("3_objectives", 512, 589_824, objective="sigmoid"),
        row("3_objectives", 4096, 2_359_296, pair_ids=True),
    ]
    lines = [line.split(" | ")[:4] for line in tables.objectives(rows).splitlines()[2:]]
    assert lines == [
        ["| 512", "1,152", "sigmoid", "no"],
        ["| 512", "1,152", "softmax", "no"],
        ["| 4,096", "576", "softmax", "no"],
        ["| 4,096", "576", "softmax", "yes"],
    ]
    assert [c.steps for c in tables.at_fixed_samples(rows, 589_824).values()] == [1152, 144]
    muon = row("9_optimizers", 512, 589_824, objective="sigmoid", optimizer="muon")
    assert tables.losses_of_optimizers([*rows, muon]).count("sigmoid") == 2
    assert "softmax" not in tables.losses_of_optimizers([*rows, muon]), "Muon has no such row of that batch"


def test_the_picture_of_examples_frames_the_right_drawings(module, tmp_path):
    pictures = module("pictures")
    folder = tmp_path / "evaluation/held_out_vendor/test"
    folder.mkdir(parents=True)
    lines = []
    for number in range(10):
        picture(folder / f"{number}.png", "circle", "red", number)
        lines.append(json.dumps({"file_name": f"{number}.png", "name": f"the circle {number}"}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))
    common = {
        "experiment": "2_fixed_steps",
        "objective": "softmax",
        "pair_ids": False,
        "learning_rate": 1e-3,
        "seed": 0,
    }
    common |= {"steps": 576, "finished": True, "validation_image_recall@1": 0.1}

    def green(found: list[int]) -> int:
        """The number of green pixels, which belong to frames, if every caption retrieves these drawings."""
        rows = [
            {**common, "method": method, "batch": batch, "samples": 576 * batch, "vendor_examples": str([found] * 10)}
            for method, batch in (("InfCLTrainer", 256), ("Trainer", 4096), ("InfCLTrainer", 4096))
        ]
        pictures.draw_examples(rows, tmp_path, tmp_path / "examples.png")
        pixels = np.asarray(Image.open(tmp_path / "examples.png").convert("RGB"))
        return int((pixels == tuple(bytes.fromhex(pictures.GREEN[1:]))).all(-1).sum())

    assert green([0, 1, 2, 3, 4]) == green([5, 6, 7, 8, 9]) > 0, "five of the ten captions each"
    assert green([0, 0, 0, 0, 0]) == green([0, 1, 2, 3, 4])


def iconify(folder: Path, sets: dict[str, dict[str, Any]]) -> Path:
    """A package like @iconify/json with these sets: icons by name, and what else each set has."""
    square = '<path fill="currentColor" d="M4 4h16v16H4z"/>'
    (folder / "json").mkdir(parents=True)
    about = {}
    for prefix, found in sets.items():
        licence = {"spdx": found.pop("licence", "MIT")}
        about[prefix] = {
            "name": prefix,
            "author": {"name": "me"},
            "license": licence,
            "category": found.pop("of", "UI"),
        }
        icons = {name: {"body": square} for name in found.pop("icons")}
        content = {"prefix": prefix, "icons": icons, "width": 24, "height": 24, **found}
        (folder / f"json/{prefix}.json").write_text(json.dumps(content))
    (folder / "collections.json").write_text(json.dumps(about))
    return folder


def test_icons_have_names_without_style_and_what_their_set_says_of_them(module, tmp_path):
    icons = module("icons")
    package = iconify(
        tmp_path / "package",
        {
            "mono": {
                "icons": ["alarm-24-bold", "alarm-20-bold", "alarm-24-thin", "user-01", "github", "brand-x", "a"],
                "suffixes": {"24-bold": "", "20-bold": "", "24-thin": ""},
                "aliases": {"clock-24-bold": {"parent": "alarm-24-bold"}, "left": {"parent": "user-01", "hFlip": True}},
                "categories": {"Time & Date": ["alarm-24-bold"]},
            },
            "plain": {"icons": ["traffic-light", "bulb", "bulb-light", "bell-outline"]},
            "paid": {"icons": ["wheel"], "licence": "CC-BY-NC-4.0"},
            "copyleft": {"icons": ["wheel"], "licence": "GPL-3.0"},
            "flag": {"icons": ["de"]},
            **{name: {"icons": ["github"], "of": "Logos"} for name in icons.BRANDS},
        },
    )
    found = icons.read_icons(package)
    assert [(icon.source, icon.captions) for icon in found] == [
        ("mono", ["alarm", "alarm bold, clock", "time date: alarm"]),
        ("mono", ["alarm", "alarm thin"]),
        ("mono", ["user"]),
        ("plain", ["traffic light"]),
        ("plain", ["bulb"]),
        ("plain", ["bulb", "bulb light"]),
        ("plain", ["bell", "bell outline"]),
    ]
    assert list(icons.licences(package)) == ["mono", "plain"]
    assert 'viewBox="0 0 24 24"' in found[0].svg


def test_no_icon_is_trained_on_that_a_test_set_has(module, drawings, tmp_path):
    """Neither by concept nor by looks, of the other drawings or of icons; what is written of the others stays."""
    corpus, icons, splits, in_memory = (module(name) for name in ("corpus", "icons", "splits", "in_memory"))

    class Drawn(icons.Icon):
        def render(self, size: int) -> Image.Image:
            return self.drawn.resize((size, size))

    def icon(name: str, number: int, source: str = "mono") -> Any:
        found = Drawn(source, tmp_path, name, "unsorted", [], name)
        pattern = np.random.default_rng(number).integers(0, 256, (4, 4), dtype=np.uint8)
        found.drawn = Image.fromarray(pattern).convert("RGB").resize((64, 64), Image.Resampling.NEAREST)
        return found

    held = [d for d in drawings if splits.split_of(d.concept) == "test"]
    names = [f"thing {chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(60)]
    given = [icon(name, number) for number, name in enumerate(names)]
    copied, of_test = icon("copied", 0), icon("looks tested", 1000)
    of_test.drawn = held[0].render(64)
    given += [copied, of_test, icon(f"{held[0].concept}s off", 1001)]
    given += [icon(name, 2000 + number, icons.HELD_OUT_SET) for number, name in enumerate([*names[:20], "untrained"])]
    sets = {"mono": {"title": "Mono", "author": "me", "licence": "MIT"}}
    without = corpus.build(drawings, tmp_path / "without", 32, processes=1)
    summary = corpus.build(drawings, tmp_path / "with", 32, processes=1, icons_found=given, icon_sets=sets)

    old = [path for path in sorted((tmp_path / "without").rglob("*")) if path.is_file() and path.name != "corpus.json"]
    for path in old:
        assert (tmp_path / "with" / path.relative_to(tmp_path / "without")).read_bytes() == path.read_bytes()
    assert {name: summary[name] for name in without} == without
    import pyarrow.parquet as pq

    rows = {part: pq.read_table(tmp_path / "with" / place).to_pylist() for part, place in icons.ICONS.items()}
    assert {part: len(found) for part, found in rows.items()} == summary["icons"]
    shown = {part: {row["name"] for row in found} for part, found in rows.items()}
    assert shown["train"] == {name for name in names if splits.split_of(name) == "train"}
    assert shown["test"] == {name for name in names if splits.split_of(name) == "test"} != set()
    assert shown["another set"] == {name for name in names[:20] if splits.split_of(name) == "train"}
    assert summary["icon_sets"]["mono"] == {
        **sets["mono"],
        "pairs": sum(map(len, rows.values())) - len(shown["another set"]),
    }
    table = (tmp_path / "with/icons/LICENCES.md").read_text()
    assert f"| `mono` | Mono | me | MIT | {summary['icon_sets']['mono']['pairs']} |" in table

    data = in_memory.prepare(tmp_path / "with", with_icons=True)
    assert len(data["images"]) == without["sizes"]["train"] + len(rows["train"])
    assert data["sources"][-1] == "mono"
    first = next(icon for icon in given if icon.name == rows["train"][0]["name"])
    shades = torch.from_numpy(np.array(first.render(32))).permute(2, 0, 1).int()
    read = data["images"][without["sizes"]["train"]].int()
    assert (read - shades).abs().max() <= 8, "16 shades of grey"
    assert len(data["sets"]["icons"]["images"]) == len(rows["test"])
    assert len(data["sets"]["icon_set"]["tokens"]) == len(rows["another set"])
    assert len(in_memory.prepare(tmp_path / "with")["images"]) == without["sizes"]["train"], "icons are asked for"


def test_repeated_pictures_are_those_like_an_earlier_one_that_stays(module):
    splits = module("splits")
    drawn = np.random.default_rng(0).integers(0, 2, (3, 128)).astype(bool)
    outlines = [drawn[0], drawn[0].copy(), drawn[0].copy(), drawn[1], drawn[2]]
    outlines[1][:12] ^= True  # as near as it may be to the first
    outlines[2][:24] ^= True  # as near to the second, which is not kept, but not to the first
    looks = [splits.Looks(outline, np.zeros(192, np.float32)) for outline in outlines]
    assert splits.repeated(looks, []).tolist() == [False, True, False, False, False]
    assert splits.repeated(looks, looks[4:]).tolist() == [False, True, False, False, True]


def test_runs_of_teachers_find_their_teachers(module):
    taught = module("wrong_and_taught")
    names = ["teachers", "base", "taught", "taught by large", "tuned", *taught.of_teachers()]
    jobs = taught.make_jobs(names)
    assert {key for job in jobs for key in job} == {*taught.PLAIN, "seed", "rate", "save"}, "no word is misspelt"
    saved = {f"{kind} {job['save']}.pt" for job in jobs if "save" in job for kind in ("stored", "model")}
    assert {name for job in jobs for name in taught.needed_by(job)} <= saved
    runs = [str(job) for job in taught.make_jobs(list(taught.of_teachers()))]
    assert len(set(runs)) == len(runs), "no run is in it twice"


def test_similarities_of_a_teacher_are_learned_from_its_softmax_both_ways(module):
    taught = module("wrong_and_taught")
    images, texts, of_images, of_texts = F.normalize(torch.randn(4, 6, 5), dim=-1).unbind()
    term = taught.TeacherSimilarities(0.5, 20.0, torch.device("cpu"))
    ours, theirs = images @ texts.T / 0.07, 20 * of_images @ of_texts.T
    wanted = -sum((b.softmax(1) * a.log_softmax(1)).sum(1).mean() for a, b in ((ours, theirs), (ours.T, theirs.T)))
    torch.testing.assert_close(term.value((images, texts), (of_images, of_texts)), 0.25 * wanted)


@pytest.mark.parametrize("side", ["image", "text"])
def test_a_side_is_taught_by_the_teacher_s_embeddings_of_it(module, tmp_path, side):
    taught, data = module("wrong_and_taught"), {"images": torch.zeros(1), "stored": (None, None)}
    job = {**taught.PLAIN, **module("wrong_and_taught_runs").stored_by("small 4", side=side)}
    term = taught._term(job, data, tmp_path, 8)
    features = F.normalize(torch.randn(2, 6, 8), dim=-1)
    known = features.roll(1, dims=-1)
    references = term.reference({"stored_images": known[0], "stored_texts": known[1]}, {})
    place = ["image", "text"].index(side)
    wanted = (features[place] - known[place]).square().sum(1).mean()
    torch.testing.assert_close(term.value(tuple(features), references), wanted)


def test_a_wider_teacher_has_the_same_similarities(module, tmp_path):
    taught, data = module("wrong_and_taught"), {"images": torch.zeros(1)}
    images, texts = torch.randn(6, 8), torch.randn(6, 2, 8)
    data["stored"] = images, texts
    job = {**taught.PLAIN, "seed": 0, **module("wrong_and_taught_runs").stored_by("small 4"), "teacher": "wider"}
    term = taught._term(job, data, tmp_path, 8)
    assert [weight.shape for weight in term.parameters()] == [(12, 8)] * 2
    wider_images, wider_texts = data["stored"]
    torch.testing.assert_close(wider_images @ wider_texts[:, 1].T, images @ texts[:, 1].T)


def test_titles_of_collections_are_wrong_captions(module, drawings, tmp_path):
    sources, corpus, in_memory = module("sources"), module("corpus"), module("in_memory")
    for number in range(6):
        picture(tmp_path / f"apple_{number}.png", "circle", "red", number)
        title = "Lemon Theme" if number < 5 else "A red apple"
        (tmp_path / f"apple_{number}.svg").write_text(f"<dc:title>{title}</dc:title>")
    found = sources._clip_art(tmp_path, tmp_path)
    assert [(d.name, d.title) for d in found[-2:]] == [("apple", "lemon theme"), ("a red apple", "")]

    given = [dataclasses.replace(d, title="theme") if d.name.startswith("red") else d for d in drawings]
    corpus.build(given, tmp_path / "corpus", 32, processes=1)
    data = in_memory.prepare(tmp_path / "corpus")
    changed, captions, is_wrong = module("wrong_and_taught").with_wrong_captions(data, "titles")
    assert captions.tolist() == [*range(len(data["counts"]))]
    assert 0 < is_wrong.sum() < len(is_wrong)
    assert torch.equal(changed["tokens"][~is_wrong], data["tokens"][~is_wrong])
    assert (changed["tokens"][is_wrong] == data["titles"][0]).all()
    assert set(changed["counts"][is_wrong].tolist()) == {1}
    assert not torch.equal(changed["tokens"], data["tokens"]), "the data stays as it is"


def test_runs_with_icons_and_of_pretrained_towers_can_be_made(module):
    """Their batches are made of micro-batches, and InfCLTrainer knows their options."""
    training, taught, towers = module("training"), module("wrong_and_taught"), module("pretrained_towers")
    parts = taught.with_icons()
    jobs = taught.make_jobs(list(parts))
    assert {job["batch"] for job in jobs} == {256, 1024, 4096, 16_384}
    for job in jobs:
        micro = 256 if job["method"] == "Trainer" else min(job["batch"], taught.MICRO_BATCH)
        assert job["batch"] % micro == 0
        assert set(job) <= {*taught.PLAIN, "seed", "rate", "save"}, "no word is misspelt"
        assert job["times"] * taught.SAMPLES % job["batch"] == 0, "equal samples"
    of_256 = [i % 4 for i, job in enumerate(parts["icons"]) if job["batch"] == 256]
    assert of_256 == [0, 1, 2, 3], "on GPUs of their own"
    waiting = {name for job in jobs for name in taught.needed_by(job)}
    assert waiting == {f"stored {job['save']}.pt" for job in jobs if "save" in job}
    jobs = towers.make_jobs(["lit", "both", "rates", "less", "keeping", "short"])
    assert {name for job in jobs for name in towers.needed_by(job)} == {job["save"] for job in jobs if "save" in job}
    for job in jobs:
        run = towers.run_of(job, toy=False)
        assert set(job) - {"save"} == {*towers.PLAIN}
        assert run.samples % run.batch == 0
        args = training.arguments(run, "unused", on_gpu=False)
        assert args.text_learning_rate == pytest.approx(args.learning_rate * job["text"])


def test_a_toy_of_pretrained_towers_keeps_clip_art_and_the_rest_with_their_swaps(module):
    """Each caption is the number of its image here, and so is each swapped one."""
    towers, rows, swapped = module("pretrained_towers"), torch.arange(6), torch.tensor([0, 1, 1, 3, 5, 5])
    clip_art = torch.tensor([0, 0, 1, 0, 1, 1]).bool()
    swaps = {"image": swapped, "tokens": swapped, "kind": torch.zeros(6)}
    of_set = {"images": rows, "tokens": rows, "clip_art": clip_art, "swaps": swaps}
    data = {**dict.fromkeys(("images", "tokens", "counts"), rows), "sources": [*3 * ["openmoji"], *3 * ["tuxpaint"]]}
    toy = towers.without({**data, "sets": dict.fromkeys(("validation", "concepts", "vendor"), of_set)}, 2)
    assert sorted(toy["images"].tolist()) == sorted(toy["counts"].tolist()) == [0, 1, 3, 4]
    assert [data["sources"][row] for row in toy["tokens"].tolist()] == toy["sources"]
    assert sorted(toy["sets"]["vendor"]["images"].tolist()) == [0, 1, 2, 4]
    assert toy["sets"]["vendor"]["swaps"]["tokens"].tolist() == [0, 1, 1]
    of_clip_art = towers.sets_of_clip_art(toy["sets"])
    assert of_clip_art["concepts"]["images"].tolist() == [2, 4]
    for found in (*toy["sets"].values(), *of_clip_art.values()):
        assert torch.equal(found["images"][found["swaps"]["image"]], found["swaps"]["tokens"])


def test_a_frozen_norm_is_the_batch_norm_in_evaluation(module):
    norm = torch.nn.BatchNorm2d(3)
    torch.nn.init.normal_(norm.weight)
    norm(torch.randn(8, 3, 5, 5) * 3 + 1)  # which moves its statistics
    frozen = module("pretrained_towers").FrozenNorm(norm)
    images = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(frozen.train()(images), norm.eval()(images))
    assert not list(frozen.buffers())
    assert {name for name, _ in frozen.named_parameters()} == {"weight", "bias"}
