"""The corpus of real pairs and its experiments, on pictures drawn here: no downloads, and one tiny model is trained."""

import csv
import dataclasses
import importlib
import json
import math
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.demo import SCRIPTS
from PIL import Image, ImageDraw

from hf_infcl.data.loader import check_batch
from hf_infcl.step.terms import TeacherDistance

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
    options = {"evaluations": 0, "options": '{"replay_share": 0.4}', "replay": "b,c", "sources": "a"}
    run = training.Run("toy", "InfCLTrainer", 5, 5, 25, 1e-2, **options)
    training.train(run, data, {}, toy=True)
    assert [sorted(batch)[:3] for batch in batches] == [[0, 1, 2]] * 5
    assert {number for batch in batches for number in batch[3:]} == {3, 4, 5, 6, 7}


def test_both_trainers_have_the_same_muon(module):
    """With a micro-batch of the whole batch, both trainers compute one training, AdamW's part and Muon's."""
    training = module("training")
    data = corpus_of(["a"] * 8, module("in_memory").LENGTH)

    def trained(method: str, optimizer: str) -> dict[str, torch.Tensor]:
        run = training.Run("toy", method, 4, 4, 12, 2e-2, evaluations=0, optimizer=optimizer)
        return dict(training.train(run, data, {}, toy=True)[1].model.named_parameters())

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


def test_every_row_can_be_trained_again_or_is_history_with_its_commit(module):
    """Their batches are made of micro-batches, and InfCLTrainer knows their options; the page lists the others."""
    runs, training = module("runs"), module("training")
    known = [path.stem for path in runs.RESULTS.glob("*.csv")]
    assert sorted(known) == sorted(runs.TABLES)
    past, rates = {}, set()
    for table in runs.TABLES:
        rows = runs.rows_of(table)
        chosen, reasons = runs.chosen_runs(table, [])
        averages = [row for row in rows if row.get("path") == "line"]
        made = {runs.run_of(table, row) for row in rows if not runs.history(table, row)}
        assert made == chosen.keys()
        assert len(reasons) + len(averages) + len(chosen) <= len(rows)
        for why, commit in reasons:
            past.setdefault(why, set()).add(commit.removesuffix("-dirty"))
        for run in chosen:
            assert run.method in training.TRAINERS
            assert run.batch % run.micro_batch == 0
            assert run.samples % run.batch == 0, "equal samples"
            assert run.samples // run.batch >= 5, "enough steps"
            if run.method == "InfCLTrainer":  # it refuses options that it does not know
                args = training.arguments(dataclasses.replace(run, replay=""), "unused", on_gpu=False)
                assert not run.towers or 0 < args.text_learning_rate <= args.learning_rate
            if (run.experiment, run.method) == ("1_global_batch", "InfCLTrainer"):
                rates.add((run.batch, run.learning_rate))
    for batch in (512, 1024, 2048, 4096, 8192):
        for by_rule in (5e-4 * batch / 256, 5e-4 * (batch / 256) ** 0.5):
            assert any(b == batch and math.isclose(rate, by_rule, rel_tol=0.05) for b, rate in rates), "tried"
    page = (SCRIPTS / "real_pairs/results/HISTORY.md").read_text()
    lines = re.findall(r"^- `(.*)`: `(.*)`$", page, re.MULTILINE)
    told = {why: set(commits.split("`, `")) for why, commits in lines}
    assert told == past


def test_a_row_names_its_run(module):
    runs = module("runs")

    def run(table: str, **wanted: str) -> Any:
        (found, *_) = runs.chosen_runs(table, [f"{name}={value}" for name, value in wanted.items()])[0]
        return found

    assert (
        run("results", experiment="9_optimizers", batch="1024", samples="589824", learning_rate="0.004").batch == 1024
    )
    tuned = run("results", experiment="13_replay_of_others", way="full", replay="twemoji", seed="1")
    assert (tuned.sources, tuned.replay, tuned.experiment) == ("openclipart,tuxpaint", "twemoji", "13_replay_of_others")
    of_base = run("results", experiment="13_replay_of_others", way="base", seed="1")
    assert of_base.sources == "openmoji,fluent flat,fluent modern", "its own sources"
    assert runs.needed_by(tuned) == {"start": of_base}
    teacher = run("wrong_and_taught", taught_by="small 4 without twemoji", teacher="stored", seed="0")
    (needed,) = runs.needed_by(teacher).values()
    assert (needed.seed, needed.learning_rate, needed.samples) == (100, 2e-3, 4 * 589_824)
    assert needed.sources == "openmoji,fluent flat,fluent modern,openclipart,tuxpaint"
    ledger = runs.needed_by(run("wrong_and_taught", cleaned="0.9", wrong="0.2", trained_on="all"))["ledger"]
    assert (ledger.wrong, ledger.options, ledger.learning_rate) == ("0.2", '{"leave_out": "noisy"}', 4e-3)
    scored = runs.needed_by(run("wrong_and_taught", cleaned="0.5", trained_on="clip art"))
    assert scored.keys() == {"start"}, "its start calls the pairs wrong"
    assert scored["start"].sources == "openmoji,fluent flat,fluent modern,twemoji"
    parts = run("icons", method="Trainer")
    assert (parts.batch, parts.micro_batch, parts.learning_rate) == (4096, 256, 4e-3)
    kept = run("pretrained_towers", way="tuned", optimizer="muon", options='{"replay_share": 0.5}', seed="2")
    assert json.loads(kept.options) == {
        **{"image_learning_rate": 3e-4, "text_learning_rate": pytest.approx(6e-5), "replay_share": 0.5}
    }
    assert (kept.replay.count(","), kept.learning_rate) == (3, pytest.approx(1.2e-3))
    assert runs.needed_by(kept)["start"].way == "base"
    with pytest.raises(SystemExit, match="has no column batches"):
        runs.chosen_runs("icons", ["batches=1024"])


def test_chosen_rows_are_trained_after_what_they_need_and_not_twice(module, drawings, tmp_path, monkeypatch, capsys):
    corpus, runs, training = module("corpus"), module("runs"), module("training")
    corpus.build(drawings, tmp_path / "corpus", 32, processes=1)
    trained, train = [], training.train
    monkeypatch.setattr(runs, "train", lambda run, *args, **more: trained.append(run) or train(run, *args, **more))
    monkeypatch.setattr(runs, "called_wrong", lambda scores, probability: torch.arange(len(scores)) < 3)
    every = ["--corpus", str(tmp_path / "corpus"), "--output_dir", str(tmp_path / "runs"), "--toy"]

    def begin(table: str, *conditions: str) -> list[dict[str, str]]:
        monkeypatch.setattr(sys, "argv", ["runs.py", table, *conditions, *every])
        runs.main()
        return runs.rows_of(table, tmp_path / "runs")

    wrong = ("wrong=0.2", "trained_on=all", "size=small", "optimizer=muon", "oracle=False", "seed=1", "samples=589824")
    options = '{"leave_out": "noisy"}'
    rows = begin("wrong_and_taught", *wrong, "cleaned=0.5", "options={}")
    assert [(run.options, run.sources.count("removed")) for run in trained] == [(options, 0), ("{}", 0)], "the ledger"
    assert [row["cleaned"] for row in rows] == ["0.5"]
    assert 0 <= float(rows[0]["vendor_recall@1"]) <= 100
    begin("wrong_and_taught", *wrong, "cleaned=0.5", "options={}")
    assert len(trained) == 2, "it is done"
    rows = begin("wrong_and_taught", "wrong=0.0", "taught_by=small 4", "side=text", "seed=0")
    assert [run.seed for run in trained[2:]] == [100, 0], "the teacher, then its student"
    assert {"vendor_recall@1_of_32", "validation"} < rows[-1].keys()
    begin("wrong_and_taught", "wrong=0.0", "taught_by=small 4", "side=image", "seed=0")
    assert len(trained) == 5, "the teacher is there"
    module("tables").means(tmp_path / "runs/wrong_and_taught.csv", {"side": "side"})

    monkeypatch.setitem(training.TRAINERS, "OpenCLIP accumulation", None)
    begin("results", "experiment=5_cost", "method=Trainer", "batch=256")
    found = begin("results", "experiment=16_cost_of_tokens", 'options={"patch_dropout": 0.5}')
    assert [row["method"] for row in found] == ["Trainer", "InfCLTrainer"]
    assert {row["finished"] for row in found} == {"True"}
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["runs.py", "results", "experiment=17_growing_batch", "--list"])
    runs.main()
    assert capsys.readouterr().out.endswith("history: global_batch_schedule, commit f5f50e3.\n0 runs.\n")


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

    rows = tables.read_numbers(tmp_path / "results.csv")
    rows = [row for row in rows if row["experiment"] != tables.COST_OF_OPTIMIZERS]
    pictures.draw_optimizers(rows, tmp_path / "one.png")
    one, two = (Image.open(tmp_path / f"{name}.png").width for name in ("one", "optimizers"))
    assert two == 2 * one, "the time has a panel of its own"
    nothing = [tables.optimizers, tables.averages, tables.growing_batches, tables.fewer_tokens, tables.cost]
    assert {table([]) for table in nothing} == {""}
    assert tables.wrong_and_taught(tables.wrong_and_taught_rows(tmp_path / "none.csv")) == ""
    assert {c.steps for c in tables.at_fixed_steps(rows, 576)} == {576}


def test_a_rate_at_an_edge_has_a_star_and_a_batch_that_grows_its_sizes(module):
    rows = module("tables")

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
    assert [c.steps for c in tables.of_batches(rows, samples=589_824)] == [1152, 144]
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
    assert splits.near_duplicates(looks, [], of_each_other=True).tolist() == [False, True, False, False, False]
    assert splits.near_duplicates(looks, looks[4:], of_each_other=True).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("side", ["image", "text"])
def test_a_side_is_taught_by_the_teacher_s_embeddings_of_it(module, side):
    term = TeacherDistance(module("runs").stored_teacher([side]), 1.0)
    features = F.normalize(torch.randn(2, 6, 8), dim=-1)
    known = features.roll(1, dims=-1)
    references = term.reference({"teacher_images": known[0], "teacher_texts": known[1]}, {})
    place = ["image", "text"].index(side)
    wanted = (features[place] - known[place]).square().sum(1).mean()
    torch.testing.assert_close(term.value(tuple(features), references), wanted)


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


def test_sets_of_clip_art_keep_their_swaps(module):
    """Each caption is the number of its image here, and so is each swapped one."""
    rows, swapped = torch.arange(6), torch.tensor([0, 1, 1, 3, 5, 5])
    clip_art = torch.tensor([0, 0, 1, 0, 1, 1]).bool()
    swaps = {"image": swapped, "tokens": swapped, "kind": torch.zeros(6)}
    of_set = {"images": rows, "tokens": rows, "clip_art": clip_art, "swaps": swaps}
    sets = dict.fromkeys(("validation", "concepts", "vendor"), of_set)
    found = module("runs").sets_of_clip_art(sets)
    assert found["concepts"]["images"].tolist() == found["validation"]["images"].tolist() == [2, 4, 5]
    assert found["concepts"]["swaps"]["tokens"].tolist() == [5, 5]
    assert found["vendor"] is of_set, "the guard"
    assert of_set["swaps"] is swaps, "the data stays as it is"
    for values in found.values():
        assert torch.equal(values["images"][values["swaps"]["image"]], values["swaps"]["tokens"])


def test_a_frozen_norm_is_the_batch_norm_in_evaluation(module):
    norm = torch.nn.BatchNorm2d(3)
    torch.nn.init.normal_(norm.weight)
    norm(torch.randn(8, 3, 5, 5) * 3 + 1)  # which moves its statistics
    frozen = module("pretrained_towers").FrozenNorm(norm)
    images = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(frozen.train()(images), norm.eval()(images))
    assert not list(frozen.buffers())
    assert {name for name, _ in frozen.named_parameters()} == {"weight", "bias"}
