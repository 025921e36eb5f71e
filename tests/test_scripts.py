"""The scripts: the parts of the demo, the comparison of global batches, the benchmarks, the launch configurations."""

import argparse
import ast
import csv
import functools
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.commands.config.config_args import load_config_from_file
from helpers.demo import CONFIGS, DEMO, ROOT, SCRIPTS, all_digits, run
from helpers.pictures import write_folder
from helpers.processes import alone, launched, without_os_exit

from hf_infcl import load_pairs


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def test_no_script_has_the_name_of_a_package_that_is_imported():
    """Programs that run with scripts/ on their path would import the script instead of the package."""
    files = [*(ROOT / "hf_infcl").rglob("*.py"), *SCRIPTS.rglob("*.py")]
    ours = {"make_digits", "make_small_clip", "benchmarks", "real_pairs"}  # scripts import these from each other
    imported = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(str(node.module).partition(".")[0])
    assert {"evaluate", "torch", "transformers"} <= imported
    names = {path.stem for path in SCRIPTS.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not (imported | sys.stdlib_module_names) - ours & names


# ---- The demo's parts ----


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All digits."""
    return all_digits(tmp_path_factory.getbasetemp())


def test_digits_are_an_ordinary_image_dataset(demo):
    train, test = (load_pairs(str(demo / "digits"), split=split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1497, 300)
    assert train[0]["image"].size == (8, 8)
    for split in (train, test):
        share = torch.bincount(torch.tensor(split["label"])) / len(split)
        assert len(share) == 10
        assert share.min() > 0.09, "every digit in proportion"
    captions = [caption for row in train["caption"] for caption in row]
    assert all(len(row) == len(set(row)) == 4 for row in train["caption"])
    assert len(set(captions)) > 200
    prompts = {template.format(name) for template in DEMO["templates"] for name in DEMO["class_names"]}
    assert not prompts & set(captions), "zero-shot prompts are not training captions"


def test_the_untrained_clip_is_an_ordinary_checkpoint(demo):
    model = transformers.AutoModel.from_pretrained(demo / "clip-init").eval()
    processor = transformers.AutoProcessor.from_pretrained(demo / "clip-init")
    tokenizer = processor.tokenizer
    assert type(model) is transformers.CLIPModel
    assert model.config.text_config.eos_token_id == tokenizer.eos_token_id != 2
    assert tokenizer.model_max_length == model.config.text_config.max_position_embeddings

    # The text tower takes its result from the first end-of-text token. Padding must not change it or end a text early.
    texts = ["a handwritten 7", "the café ~ £ 8!"]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert ids.index(tokenizer.eos_token_id) == len(ids) - 1, tokenizer.convert_ids_to_tokens(ids)
    with torch.no_grad():
        alone = [model.get_text_features(**tokenizer(text, return_tensors="pt")).pooler_output for text in texts]
        padded = tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt")
        together = model.get_text_features(**padded).pooler_output
    torch.testing.assert_close(torch.cat(alone), together)

    inputs = processor(images=load_pairs(str(demo / "digits"), split="test")[0]["image"], return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 8, 8)
    assert -1 <= inputs["pixel_values"].min() < inputs["pixel_values"].max() <= 1


def test_the_tokenizer_is_the_same_every_time(demo, script):
    captions = [caption for row in load_pairs(str(demo / "digits"), split="train")["caption"] for caption in row]
    saved = transformers.AutoProcessor.from_pretrained(demo / "clip-init").tokenizer
    for _ in range(3):
        again = script("make_small_clip").train_tokenizer(captions)
        assert again.get_vocab() == saved.get_vocab()
        text = "a handwritten 7, someone wrote it"
        assert again(text).input_ids == saved(text).input_ids


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders pairs/ and blank/ of two images each, the captions of the second being empty, and a file."""
    folder = tmp_path_factory.mktemp("captioned")
    for name, captions in {"pairs": ["a cat", "two dogs"], "blank": ["", " "]}.items():
        write_folder(folder / name, captions)
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--dataset blank", "All captions in the column 'caption' of blank are empty."),
        ("--split tset", "The split 'tset' of 'pairs' cannot be loaded"),
        ("--caption_column text", "The dataset has no column 'text'."),
        ("--dataset shards/{000..007}.tar", "names files, and a folder or a Hub id is read here."),
        ("--dataset https://me:secret@host/a.tar", "host/a.tar names files, and a folder or a Hub id is read here."),
        ("--width 0", "--width must be a multiple of 16"),
        ("--width 8", "--width must be a multiple of 16"),
        ("--width -32", "--width must be a multiple of 16"),
        ("--patch_size 0", "--image_size 32 must be a multiple of --patch_size 0"),
        ("--patch_size 64", "--image_size 32 must be a multiple of --patch_size 64"),
        ("--patch_size 5", "--image_size 32 must be a multiple of --patch_size 5"),
        ("--image_size 0", "--image_size 0 must be a multiple of --patch_size 8, both at least 1 pixel."),
        ("--layers 0", "--layers and --vocabulary must be at least 1, got 0 and 4096."),
        ("--vocabulary -1", "--layers and --vocabulary must be at least 1, got 2 and -1."),
        ("--vocabulary 100", "A vocabulary of 100 tokens is too small"),
        ("--output_dir file", "--output_dir file is a file."),
        ("--output_dir pairs", "--output_dir pairs is in the folder of the data, pairs."),
        ("--output_dir pairs/train/clip", "--output_dir pairs/train/clip is in the folder of the data, pairs."),
    ],
)
def test_no_small_clip_is_made_of_what_is_wrong(captioned, script, monkeypatch, words, complaint):
    monkeypatch.chdir(captioned)
    before = sorted(captioned.rglob("*"))
    given = ["--dataset", "pairs", "--output_dir", "clip", *words.split()]
    monkeypatch.setattr(sys, "argv", ["make_small_clip.py", *given])
    with pytest.raises(SystemExit) as end:
        script("make_small_clip").main()
    assert str(end.value.code).startswith("make_small_clip.py: error: ")
    assert complaint in str(end.value.code)
    assert "\n" not in str(end.value.code)
    assert "secret" not in str(end.value.code)
    assert sorted(captioned.rglob("*")) == before


def test_a_small_clip_does_not_replace_a_model(captioned, script, monkeypatch, tmp_path):
    words = ["make_small_clip.py", "--dataset", str(captioned / "pairs"), "--output_dir", str(tmp_path / "clip")]
    monkeypatch.setattr(sys, "argv", words)
    script("make_small_clip").main()
    written = (tmp_path / "clip/model.safetensors").read_bytes()
    monkeypatch.setattr(sys, "argv", [*words, "--seed", "1"])
    with pytest.raises(SystemExit, match=r"clip already holds a model\. Choose another --output_dir\."):
        script("make_small_clip").main()
    assert (tmp_path / "clip/model.safetensors").read_bytes() == written


def test_the_help_of_the_small_clip_does_not_import_torch():
    code = "import sys; sys.path.insert(0, 'scripts'); import make_small_clip; print({'torch'} & {*sys.modules})"
    assert run("-c", code) == "set()\n"


def test_global_batch_compares_like_with_like(script, monkeypatch, tmp_path):
    comparison = script("global_batch")
    monkeypatch.setattr(comparison, "SIZES", {"train": 1024, "validation": 40, "test": 60})
    monkeypatch.setattr(comparison, "EPOCHS", 2)
    monkeypatch.setattr(comparison, "small_clip", functools.partial(comparison.small_clip, width=16, layers=1))
    comparison.data.cache_clear()
    runs = [comparison.train(method, 1e-3, 0)[-1] for method in comparison.METHODS]
    (*_, again) = comparison.train(comparison.GLOBAL, 1e-3, 1)
    comparison.data.cache_clear()
    assert {row["pairs_seen"] for row in runs} == {2048}
    assert [row["optimizer_steps"] for row in runs] == [4, 128, 4, 32, 16]
    assert len({row["test_loss"] for row in (*runs, again)}) == len(runs) + 1

    runs += [{**row, "seed": 1} for row in runs]
    comparison.plot(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    lines = comparison.table(runs, dict.fromkeys(comparison.METHODS, 1e-3)).splitlines()
    assert len(lines) == 2 + len(comparison.METHODS)
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_global_batch_data_has_one_right_answer(script, monkeypatch):
    comparison = script("global_batch")
    comparison.data.cache_clear()
    captions = [caption for _, split in comparison.data().values() for caption in split]
    assert len(set(captions)) == len(captions) == sum(comparison.SIZES.values())
    images = [images.flatten(1) for images, _ in comparison.data().values()]
    assert all(-1 <= image.min() < image.max() <= 1 for image in images)


# ---- Benchmarks: that they run and draw. Their GPU paths (events, memory, NCCL) need GPUs. ----


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_names_its_commit(script, monkeypatch):
    common = script("benchmarks.common")
    monkeypatch.delenv("HF_INFCL_COMMIT", raising=False)
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", common.commit())
    monkeypatch.setenv("HF_INFCL_COMMIT", "abc1234")
    assert common.environment(torch.device("cpu"))["commit"] == "abc1234"


def measure(benchmark: Any, *words: Any) -> list[dict[str, str]]:
    """Runs a module of benchmarks/ in this process; returns the rows, if --output is the last option."""
    benchmark.common.run_benchmark(benchmark, [*map(str, words)])
    return rows_of(words[-1]) if "--output" in words else []


def benchmark(*words: str) -> None:
    """Runs benchmark.py as the main program of this process."""
    sys.path.insert(0, str(SCRIPTS))
    with (
        mock.patch.dict(os.environ, HF_INFCL_COMMIT="abc1234"),
        mock.patch.object(sys, "argv", ["benchmark.py", *words]),
        without_os_exit(),
    ):
        runpy.run_path(str(SCRIPTS / "benchmark.py"), run_name="__main__")


def on_two(*words: Any) -> None:
    code, printed = launched(benchmark, *map(str, words))
    assert code == 0, printed


def test_benchmark_ring_compares_losses_of_one_gradient(tmp_path):
    words = ["--per-gpu-batch-sizes", 32, "--global-batch-sizes", 24, "--dims", 16, "--dtype", "float32"]
    on_two("ring", *words, "--objectives", "softmax", "sigmoid", "--milliseconds", 5, "--output", tmp_path / "ring.csv")
    rows = rows_of(tmp_path / "ring.csv")
    assert {(row["objective"], row["batch_size"]) for row in rows} == {
        (objective, batch) for objective in ("softmax", "sigmoid") for batch in ("64", "24")
    }
    others = [row for row in rows if row["implementation"] != "no communication"]
    assert {"hf_infcl", "ring untiled (Ring-CL)", "CLIP", "OpenCLIP local loss", "DisCo-CLIP"} < {
        row["implementation"] for row in others
    }
    assert not any(row["note"] for row in rows), rows
    assert {row["commit"] for row in rows} == {"abc1234"}
    assert all(float(row["gradient_difference"]) < 1e-5 for row in others), rows
    assert all(float(row["ms"]) > 0 and float(row["efficiency"]) > 0 for row in rows)
    assert (tmp_path / "ring.png").stat().st_size > 10_000


def test_benchmark_ring_measures_the_host_of_a_ring_without_a_network(script, tmp_path):
    words = ["--blocks", 4, "--gathered", 2, "--per-gpu-batch-sizes", 8, "--dims", 16, "--dtype", "float32"]
    (row,) = measure(script("benchmarks.ring"), *words, "--output", tmp_path / "blocks.csv")
    assert (row["blocks"], row["gathered"], row["implementation"]) == ("4", "2", "launched")
    assert 0 < float(row["host_us"]) <= float(row["device_us"])


def test_the_table_of_exchanges_is_what_is_chosen(script):
    ring = script("benchmarks.ring")
    committed = rows_of(ring.RESULTS / "exchange.csv")
    chosen = [{name: str(value) for name, value in row.items()} for row in ring.predictions()]
    assert committed == chosen, "python scripts/benchmark.py ring --predict writes it again"
    assert {row["exchange"] for row in committed} > {"all texts gathered", "a ring of 2 processes"}
    assert any("machines" in row["exchange"] for row in committed)


def test_benchmark_ring_measures_several_captions(script, tmp_path):
    words = ["--per-gpu-batch-sizes", 8, "--dims", 16, "--dtype", "float32", "--milliseconds", 5, "--captions", 3]
    rows = measure(script("benchmarks.ring"), *words, "--output", tmp_path / "ring.csv")
    assert [row["implementation"] for row in rows] == ["no communication, 3 captions", "hf_infcl, 3 captions"]
    assert all(float(row["ms"]) > 0 and not row["note"] for row in rows), rows


def test_benchmark_memory_runs_without_torchrun_too(tmp_path):
    words = ["--per-gpu-batch-sizes", 24, "--global-batch-sizes", 48, "--dim", 16, "--dtype", "float32"]
    on_two("memory", *words, "--output", tmp_path / "memory.csv")
    code, printed = alone(benchmark, "memory", *map(str, words), "--output", str(tmp_path / "memory.csv"))
    assert code == 0, printed
    rows = rows_of(tmp_path / "memory.csv")
    assert {(row["world_size"], row["batch_size"]) for row in rows} == {("2", "48"), ("1", "24"), ("1", "48")}
    assert not any(row["peak_mib"] for row in rows), "nothing is made up on a CPU"


def test_benchmark_step_trains_each_way(script, tmp_path):
    words = ["--model", "tiny", "--micro-batch-size", 2, "--pool", 2, "--steps", 1]
    output = ["--output", tmp_path / "step.csv"]
    measure(script("benchmarks.step"), *words, "--accumulation-steps", 2, "--warmup", 1, *output)
    on_two("step", *words, "--global-batch-sizes", 12, "--warmup", 0, "--pixel-dtype", "uint8", *output)
    rows = rows_of(tmp_path / "step.csv")
    assert {row["implementation"] for row in rows if row["comparison"] == "overhead"} >= {
        *("Trainer", "hf_infcl", "hf_infcl retain all", "hf_infcl freeze image", "OpenCLIP accumulation"),
        "hf_infcl matryoshka",
    }
    assert {row["implementation"] for row in rows if row["comparison"] == "table"} == {
        *("hf_infcl", "hf_infcl offload", "CLIP", "OpenCLIP local loss", "DisCo-CLIP")
    }
    assert all(float(row["images_per_s"]) > 0 for row in rows), rows
    assert {row["accumulation_steps"] for row in rows} == {"2", "3"}
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_benchmark_step_measures_each_batch_and_length_of_texts(script, tmp_path):
    words = ["--model", "tiny", "--micro-batch-size", 2, "--pool", 2, "--steps", 1, "--warmup", 1]
    words += ["--accumulation-steps", 2, 3, "--text-tokens", 4, 6, "--implementations", "hf_infcl"]
    step = script("benchmarks.step")
    rows = measure(step, *words, "--output", tmp_path / "step.csv")
    names = "text_tokens", "accumulation_steps", "batch_size", "implementation"
    assert [tuple(row[name] for name in names) for row in rows] == [
        (tokens, steps, batch, name)
        for tokens in ("4", "6")
        for steps, batch in (("2", "4"), ("3", "6"))
        for name in ("Trainer", "hf_infcl")
    ]


def test_benchmark_step_measures_each_image_size_and_share_of_patches(script, tmp_path):
    words = ["--model", "tiny", "--micro-batch-size", 2, "--pool", 2, "--steps", 1, "--accumulation-steps", 2]
    words += ["--warmup", 1, "--implementations", "hf_infcl", "OpenCLIP accumulation"]
    step, training, output = script("benchmarks.step"), script("benchmarks.training"), tmp_path / "step.csv"
    with pytest.raises(SystemExit, match="12 is no multiple of the patches of tiny, which are of 8 pixels"):
        measure(step, *words, "--image-size", 16, 12, "--output", output)
    assert not output.exists(), "it refuses before it measures"

    lengths: set[tuple[str, int]] = set()
    train = training.train

    def watched(kind: Any, model: Any, *args: Any, **options: Any) -> Any:
        layer = model.vision_model.encoder.layers[0]
        layer.register_forward_pre_hook(
            lambda _, args, given: lengths.add((kind.__name__, tokens_of(args, given))), with_kwargs=True
        )
        return train(kind, model, *args, **options)

    with mock.patch.object(training, "train", watched):
        rows = measure(step, *words, "--image-size", 16, 32, "--patch-dropout", 0, 0.5, "--output", output)
    assert [(row["image_size"], row["patch_dropout"], row["implementation"]) for row in rows] == [
        (size, share, name)
        for size in ("16", "32")
        for share in ("0.0", "0.5")
        for name in ("Trainer", "hf_infcl", "OpenCLIP accumulation")
    ]
    names = "PlainTrainer", "PooledInfCLTrainer", "OpenCLIPTrainer"
    assert lengths == {(name, 1 + patches) for name in names for patches in (4, 2, 16, 8)}
    assert (tmp_path / "step.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        ("hf_infcl", ["Trainer", "hf_infcl", "hf_infcl, compiled"]),
        ("hf_infcl, compiled", ["Trainer", "hf_infcl, compiled"]),
    ],
)
def test_benchmark_step_measures_what_it_is_asked_for(script, asked, measured):
    step, parser = script("benchmarks.step"), argparse.ArgumentParser()
    step.add_arguments(parser)
    args = parser.parse_args(["--model", "tiny", "--compile", "--implementations", asked])
    args = argparse.Namespace(**{**vars(args), "image_size": 16, "patch_dropout": 0.0, "accumulation_steps": 2})
    with mock.patch.object(step, "measured", side_effect=lambda *_: {"images_per_s": 2.0}):
        rows = list(step.overhead(args, [], torch.device("cpu")))
    assert [row["implementation"] for row in rows] == measured


def tokens_of(args: Any, given: Any) -> int:
    return (args[0] if args else given["hidden_states"]).shape[1]


def test_benchmark_optimizer_compares_steps(tmp_path):
    words = ["--models", "tiny", "--seconds", 0.01, "--output", tmp_path / "optimizer.csv"]
    on_two("optimizer", *words)
    code, printed = alone(benchmark, "optimizer", *map(str, words), "--implementations", "AdamW", "hf_infcl")
    assert code == 0, printed
    rows = rows_of(tmp_path / "optimizer.csv")
    assert [(row["world_size"], row["implementation"]) for row in rows] == [
        *(("2", name) for name in ("AdamW", "torch Muon", "hf_infcl", "hf_infcl redundant")),
        *(("1", name) for name in ("AdamW", "hf_infcl")),
    ]
    assert all(float(row["ms"]) > 0 and not row["note"] and not row["peak_mib"] for row in rows), rows
    assert all(float(row["difference"]) < 0.02 for row in rows if row["implementation"] != "AdamW")
    adamw, *_, ours = (float(row["state_mib"]) for row in rows)
    assert ours < adamw, "one buffer for a matrix instead of two"


def test_benchmark_evaluation_compares_with_the_forward(script, tmp_path):
    words = ["--model", "tiny", "--images", 16, "--classes", 3, "--templates", 2, "--batch", 4, "--workers", 0]
    workers, *rows = measure(script("benchmarks.evaluation"), *words, "--output", tmp_path / "evaluation.csv")
    assert (workers["implementation"], workers["dtype"]) == ("workers, jpeg", "")
    assert float(workers["per_second"]) > 0
    ways = ("forward", "evaluate, jpeg", "evaluate, pool")
    assert [(row["dtype"], row["implementation"]) for row in rows] == [(d, w) for d in ("fp32", "bf16") for w in ways]
    assert all(float(row["per_second"]) > 0 for row in rows), rows
    for row in rows:
        assert bool(row["loop_per_second"]) == row["implementation"].startswith("evaluate")
        if row["loop_per_second"]:
            whole, loop = 16 / float(row["per_second"]), 12 / float(row["loop_per_second"])
            assert 0 < loop < whole - float(row["start_s"]) + 0.01, "the start, the loop and the end are its parts"
    assert float(rows[0]["error"]) < 1e-6 < float(rows[3]["error"]) < 0.05


def test_openclip_accumulation_has_the_gradient_of_the_whole_batch(script):
    inputs, training = script("benchmarks.inputs"), script("benchmarks.training")
    pool = inputs.make_pool("tiny", 3, 4, torch.float32)
    gradients = []
    for trainer_class in (training.OpenCLIPTrainer, training.PooledInfCLTrainer):

        class Kept(trainer_class):
            def _clip_grad_norm(self, model: Any) -> Any:
                gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                return super()._clip_grad_norm(model)

        training.train(Kept, inputs.build("tiny"), pool, 1, 3)
    theirs, ours = gradients
    assert theirs.keys() == ours.keys()
    scale = theirs.pop("logit_scale") / ours.pop("logit_scale")
    assert scale.item() == pytest.approx(3, rel=1e-4), "counted once per micro-batch"
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_plots_show_the_newest_rows(script, tmp_path):
    common = script("benchmarks.common")
    columns = ("date", "device", "implementation", "ms")
    for date, device, name, ms in (
        ("2025-12-01", "an older GPU", "c", 9),
        ("2026-01-01", "a GPU", "a", 5),
        ("2026-02-01", "a GPU", "a", 3),
        ("2026-01-01", "a GPU", "b", 4),
        ("2026-03-01", "a GPU", "b", ""),
        ("2026-04-01", "a GPU measured once", "d", 1),
    ):
        row = {"date": date, "device": device, "implementation": name, "ms": ms}
        common.append(tmp_path / "t.csv", columns, row)
    rows = common.newest(tmp_path / "t.csv", ("implementation",), lambda row: row["ms"])
    assert [(row["implementation"], row["ms"]) for row in rows] == [("a", "3"), ("b", "4")]
    rows = common.newest(tmp_path / "t.csv", ("implementation",), lambda row: row["ms"], "an older GPU")
    assert [row["implementation"] for row in rows] == ["c"]
    with pytest.raises(SystemExit, match="other columns"):
        common.append(tmp_path / "t.csv", (*columns, "more"), {})


def test_no_rate_is_drawn_where_launches_limit_the_yardstick(script):
    ring = script("benchmarks.ring")
    rows = [
        {"world_size": "8", "objective": "softmax", "dtype": "bfloat16", "dim": "512", "implementation": name}
        | {"ms": ms, "gpairs_per_s": rate}
        for name, ms, rate in ((ring.ALONE, "261", "132"), (ring.ALONE, "16.4", "131"), (ring.ALONE, "6.7", "20"))
    ]
    ours = {**rows[0], "implementation": ring.OURS, "ms": "2.4", "gpairs_per_s": "55"}
    assert [ring.yardstick(rows, [row, ours]) for row in rows] == [261, 16.4, None]
    assert ring.yardstick(rows, [ours]) is None


def test_tables_need_no_rows_and_the_committed_ones_are_those_of_the_committed_rows(script, monkeypatch, tmp_path):
    tables, where = script("benchmarks.tables"), argparse.Namespace(output=tmp_path / "TABLES.md")
    tables.run(where)
    assert where.output.read_text() == (tables.RESULTS / "TABLES.md").read_text()
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.run(where)
    written = where.output.read_text()
    assert "2410.17243" in written
    assert len([line for line in written.splitlines() if line.startswith("|")]) == 9 + 8 + 6


def test_benchmark_data_measures_each_way_to_a_batch(script, tmp_path):
    data, words = script("benchmarks.data"), ["--rounds", 1, "--images", 12, "--batch", 4, "--parts", "worker", "tar"]
    few = functools.partial(data.write_tar, samples=40)
    with mock.patch.object(data, "write_tar", lambda path, files, samples: few(path, files)):
        found = measure(data, *words, "--output", tmp_path / "data.csv")
    rows = {row["implementation"]: row for row in found}
    assert {"OpenCLIP, training", "hf_infcl, center crop", "hf_infcl, random crop", "tarfile"} <= rows.keys()
    assert all(float(row["ms"]) > 0 for row in rows.values())
    assert (tmp_path / "data.png").exists()


@pytest.mark.parametrize("name", ["loss", "ring", "memory", "step", "data"])
def test_plots_of_the_committed_rows_can_be_drawn_again(script, tmp_path, name):
    benchmark, table = script(f"benchmarks.{name}"), tmp_path / f"{name}.csv"
    table.write_bytes((SCRIPTS / f"benchmarks/results/{name}.csv").read_bytes())
    benchmark.plot(table)
    assert table.with_suffix(".png").stat().st_size > 10_000
    assert list(rows_of(table)[0]) == benchmark.COLUMNS


# ---- Launching ----


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_configs_say_what_their_names_do(path):
    config = load_config_from_file(str(path))
    kind = "MULTI_GPU" if path.stem == "ddp" else path.stem.rstrip("2").upper()
    assert (config.distributed_type, config.num_processes) == (kind, 2)
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


def test_accelerate_starts_one_process_of_a_config_for_cpus_as_the_guide_says(tmp_path):
    assert "accelerate starts one process for a config with `MULTI_CPU`" in " ".join(
        (SCRIPTS / "README.md").read_text().split()
    )
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 2}
    (tmp_path / "cpus.json").write_text(json.dumps({**config, "num_machines": 1, "use_cpu": True}))
    (tmp_path / "program.py").write_text("import os; print(os.environ.get('WORLD_SIZE', '1'))")
    words = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "cpus.json")]
    assert run(*words, str(tmp_path / "program.py")).splitlines()[-1] == "1"


@pytest.mark.parametrize("path", [*sorted(SCRIPTS.rglob("*.sh")), ROOT / ".ci/run"], ids=lambda path: path.name)
def test_shell_scripts_are_well_formed(path):
    subprocess.run(["bash", "-n", path], check=True)
    if path.name != "environment.sh":  # this one is sourced, not executed
        assert os.access(path, os.X_OK)
        assert "set -euo pipefail" in path.read_text()


# ---- The notebook ----


def test_the_notebook_runs(demo, tmp_path, monkeypatch):
    """Runs every cell, in order, in one process, without a GPU and with fewer steps."""

    def make_digits(command: list[str], check: bool) -> None:
        assert command[:3] == [sys.executable, "make_digits.py", "--output_dir"]
        shutil.copytree(demo, command[3])

    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", make_digits)
    seen: dict[str, Any] = {}
    for cell in json.loads((SCRIPTS / "fine_tuning.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "it is committed without outputs"
            exec("".join(cell["source"]).replace("gpu else 240", "gpu else 4"), seen)
    assert seen["trainer"].state.global_step == 4
    assert seen["difference"] < 1e-4
    assert set(seen["best"]) == {"label", "score"}
