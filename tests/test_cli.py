"""`infcl`: options work wherever they are given, runs leave the promised files, mistakes are reported in one line."""

import argparse
import contextlib
import errno
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import typing
from dataclasses import field, fields, make_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import hypothesis
import peft
import pytest
import torch
import transformers
import yaml
from helpers import models
from helpers.demo import DEMO, ROOT, accelerate, accelerate_launch, infcl, mistake, run
from helpers.guides import blocks
from helpers.hub import hub_for_this_process, talk_to
from helpers.processes import alone, launched, on_ranks
from helpers.shards import number_of, pair, png, write_parquet, write_tar
from helpers.theirs import NOT_IN_WORDS, content
from huggingface_hub import constants
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

import hf_infcl
from hf_infcl import InfCLTrainer, InfCLTrainingArguments, ZeroShotDataset, cli
from hf_infcl.card import CardCallback
from hf_infcl.card.telling import doubtful_rate
from hf_infcl.cli import datasets as opening
from hf_infcl.cli import defaults, train
from hf_infcl.cli import models as measuring
from hf_infcl.cli import parser as parsing
from hf_infcl.cli.commands import PARSERS
from hf_infcl.cli.datasets import training_set
from hf_infcl.cli.launched import warn_of_bf16_on_cpu
from hf_infcl.cli.parser import ELSEWHERE
from hf_infcl.data.pairs import PRESETS
from hf_infcl.evaluation.metrics import metrics_of_kind
from hf_infcl.files import hub as hub_files
from hf_infcl.kernels import BACKENDS
from hf_infcl.loss import OBJECTIVES
from hf_infcl.loss.strategies import STRATEGIES
from hf_infcl.models.model_types import TOWERS
from hf_infcl.options import contrastive as theirs
from hf_infcl.options.commands import ColumnOptions, DataOptions, EvaluationOptions, GuardOptions
from hf_infcl.options.contrastive import ContrastiveOptions
from hf_infcl.options.declaring import facts_by_name
from hf_infcl.processes.lock import locked
from hf_infcl.quality.averages import interpolated
from hf_infcl.trainer import evaluating as best_metric

# ---- A run ----


@pytest.fixture(scope="module")
def trained(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's training with two processes, from the demo's own file, with few steps."""
    folder = tmp_path_factory.mktemp("run") / "small-clip"
    config = {**DEMO, "model": str(demo / "clip-init"), "dataset": str(demo / "digits"), "output_dir": str(folder)}
    config |= {"zero_shot_dataset": str(demo / "digits"), "max_steps": 4, "eval_steps": 2, "logging_steps": 1}
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    words = [*accelerate("ddp")[2:], "-m", "hf_infcl", "train", path, "--max_steps", 3]
    code, printed = alone(accelerate_launch, *words)
    assert code == 0, printed
    return folder


def test_two_processes_train_and_leave_everything(demo, trained):
    results = json.loads((trained / "all_results.json").read_text())
    state = json.loads((trained / "trainer_state.json").read_text())
    assert state["global_step"] == 3, "the command line wins over the file"
    logs = [entry for entry in state["log_history"] if "loss" in entry]
    assert {entry["global_batch_size"] for entry in logs} == {128}
    assert 0 <= results["eval_zero_shot_acc1"] <= 1
    card = (trained / "README.md").read_text()
    assert "**128 pairs** = 32 per device × 2 accumulation steps × 2 processes |" in card
    assert "except those with equal `label`" in card
    assert f"{results['eval_zero_shot_acc1']:.4f}" in card
    assert str(demo) not in card
    assert (trained / "curves.png").stat().st_size > 10_000

    untrained = transformers.CLIPModel.from_pretrained(demo / "clip-init")
    model = transformers.CLIPModel.from_pretrained(trained)
    assert not torch.equal(model.visual_projection.weight, untrained.visual_projection.weight)
    classifier = transformers.pipeline("zero-shot-image-classification", model=str(trained))
    scores = classifier(str(demo / "digits/test/0000.png"), candidate_labels=DEMO["class_names"])
    assert {score["label"] for score in scores} == set(DEMO["class_names"])


def test_evaluate_measures_what_training_measured(demo, trained, tmp_path, capsys):
    words = ["--model", trained, "--output_dir", tmp_path, "--use_cpu", "--report_to", "none"]
    words += ["--zero_shot_dataset", demo / "digits", "--eval_dataset", demo / "digits", "--pair_id_column", "label"]
    infcl("evaluate", *words, "--class_names", *DEMO["class_names"], "--templates", *DEMO["templates"])
    measured = json.loads((tmp_path / "eval_results.json").read_text())
    before = json.loads((trained / "all_results.json").read_text())
    assert measured["eval_zero_shot_acc1"] == before["eval_zero_shot_acc1"]
    assert 0 < measured["eval_pairs_image_retrieval_recall@10"] < 1
    assert measured["eval_pairs_loss"] > 0
    names = {f"eval_pairs_{name}" for name in metrics_of_kind("pairs")}
    names |= {f"eval_zero_shot_{name}" for name in metrics_of_kind("classes")}
    assert names <= measured.keys(), "what --metric_for_best_model offers is measured"
    printed = capsys.readouterr().out
    (accuracy,) = re.findall(r"^zero_shot +acc1 +(\S+)% ", printed, re.MULTILINE)
    assert accuracy == f"{100 * measured['eval_zero_shot_acc1']:.2f}"
    assert "{'eval_" not in printed, "no dict"
    assert str(tmp_path) in printed


def test_evaluate_puts_several_models_beside_each_other(demo, trained, tmp_path, capsys):
    words = ["--output_dir", tmp_path, "--use_cpu", "--report_to", "none", "--zero_shot_dataset", demo / "digits"]
    words += ["--eval_dataset", demo / "digits", "--class_names", *DEMO["class_names"]]
    names = [demo / "clip-init", trained, demo / "clip-init"]
    infcl("evaluate", "--model", *names, *words, "--templates", *DEMO["templates"])
    results = json.loads((tmp_path / "compare_results.json").read_text())
    accuracy = json.loads((trained / "all_results.json").read_text())["eval_zero_shot_acc1"]
    assert results["models"] == list(map(str, names))
    assert results["zero_shot"]["metrics"]["acc1"][0]["second"] == accuracy
    pairs = results["pairs"]
    assert pairs["metrics"].keys() == metrics_of_kind("pairs").keys() - {"loss"}
    for change, same in pairs["metrics"].values():
        assert change["low"] <= change["second"] - change["first"] <= change["high"]
        assert same == {"first": change["first"], "second": change["first"], "low": 0, "high": 0}
    printed = capsys.readouterr().out
    assert f"\n1: {names[0]}\n2: {trained}\n3: {names[0]}\n" in printed
    assert re.search(r"\n +1 +2  2 - 1 +3  3 - 1\npairs: \d+ images\n  image_retrieval_recall@1 ", printed)
    assert re.search(
        r"\n  acc1 +\d+\.\d\d% +\d+\.\d\d%  [+-]\d+\.\d\d \[[+-].*\d+\.\d\d%  [+]0\.00 \[[+]0\.00, [+]0\.00\]", printed
    )
    with pytest.raises(SystemExit), mock.patch.object(InfCLTrainer, "evaluate") as evaluated:
        infcl("evaluate", "--model", trained, tmp_path / "nothing", *words)
    assert "There is no folder" in capsys.readouterr().err
    evaluated.assert_not_called()
    line = mistake(capsys, "evaluate", "--model", *names, *words, "--tokenizer", trained)
    assert "--tokenizer is of one model, and --model names 3." in line
    with mock.patch.object(InfCLTrainer, "evaluate") as evaluated:
        line = mistake(capsys, "evaluate", "--model", demo / "clip-init", trained, *words, "--dims", 24, 65)
    assert f"--dims 65 does not fit the embeddings of {trained}, which have 64 dimensions." in line
    evaluated.assert_not_called()


LEFT = ("README.md", "curves.png", "all_results.json", "eval_results.json", "trainer_state.json")


def left_in(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LEFT if (folder / name).exists()}


def test_a_run_of_few_steps_is_logged_saved_and_evaluated_unasked(small, tmp_path, capsys):
    infcl(*small, "--eval_dataset", tmp_path / "pairs", "--load_best_model_at_end", "--eval_pictures", 3, draws=True)
    printed = capsys.readouterr().out
    assert "--logging_steps 1 --save_strategy epoch --eval_strategy epoch --save_total_limit 3" in printed
    assert "--metric_for_best_model pairs_loss" in printed
    assert printed.count("global_batch_size 8") == 1, "what stays the same is told once"
    assert len(re.findall(r"^step \d of 7: loss ", printed, re.MULTILINE)) == 7
    tables = [line.split()[1] for line in printed.splitlines() if line.startswith("pairs ")][1:]
    assert tables == ["loss"] * (3 + ("With the weights that are saved:" in printed))
    assert "{'" not in printed, "no dict"
    assert "The global batch of 8 pairs is 8 per device × 1 accumulation step × 1 process." in printed
    last = printed.splitlines()[-1]
    assert last.startswith("It is doubtful that this model has learned anything: the training made 7 steps instead ")
    card = (tmp_path / "out/README.md").read_text()
    assert card.split("# out\n\n")[1].startswith(f"{last}\n\nThis is a `CLIPModel` trained with"), "its first sentence"
    assert (tmp_path / "out/pictures.png").stat().st_size > 1000
    assert "](pictures.png)" in (tmp_path / "out/README.md").read_text()
    state = json.loads((tmp_path / "out/trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(1, 8))
    evaluated = {e["step"]: e["eval_pairs_loss"] for e in state["log_history"] if "eval_pairs_loss" in e}
    assert evaluated.pop(0) > 0, "before the training"
    assert evaluated.keys() == {4, 7}
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-7"}
    best = min(evaluated, key=evaluated.__getitem__)
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{best}")
    assert ("With the weights that are saved:" in printed) == (best == 4), "those of the last step are measured already"


@pytest.mark.parametrize("best", [[], ["--load_best_model_at_end"]])
def test_what_was_measured_after_the_last_step_is_not_measured_again(best, small, tmp_path, monkeypatch):
    measured, evaluate = [], InfCLTrainer.evaluate
    monkeypatch.setattr(InfCLTrainer, "evaluate", lambda self, *a, **k: measured.append(k) or evaluate(self, *a, **k))
    guard = ["--guard_dataset", tmp_path / "pairs", "--eval_dataset", tmp_path / "pairs"]
    infcl(*small, *guard, "--max_steps", 2, "--eval_steps", 2, *best)
    results = json.loads((tmp_path / "out/eval_results.json").read_text())
    last = json.loads((tmp_path / "out/trainer_state.json").read_text())["log_history"]
    (logged,) = [e["eval_pairs_loss"] for e in last if e["step"] == 2 and "eval_pairs_loss" in e]
    assert results["eval_pairs_loss"] == logged
    assert "eval_guard1_pairs_loss" in results
    of_pairs = [k for k in measured if k.get("metric_key_prefix", "").startswith("eval_pairs")]
    assert len(of_pairs) == 2, "before and after"


def test_a_signal_ends_a_run_with_its_exit_code_and_the_same_command_goes_on(small, tmp_path, monkeypatch):
    out, command = tmp_path / "out", [*small, "--max_steps", 2, "--resume_from_checkpoint", "auto"]
    step = InfCLTrainer.training_step

    def asked_to_end(*args: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(InfCLTrainer, "training_step", asked_to_end)
        with pytest.raises(SystemExit) as ended:
            infcl(*command)
    assert ended.value.code == 130
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"checkpoint-1"}
    assert not (out / "all_results.json").exists(), "it is not finished"
    infcl(*command)
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 2
    assert json.loads((out / "train_results.json").read_text())["train_since_step"] == 1
    card = (out / "README.md").read_text()
    assert "| initial checkpoint | `clip-init` (random weights, by its temperature) |" in card


def test_bf16_on_a_cpu_is_told(capsys):
    for use_cpu, bf16 in ((True, False), (False, True)):
        warn_of_bf16_on_cpu(argparse.Namespace(use_cpu=use_cpu, bf16=bf16), "lit.yaml")
    assert capsys.readouterr().err == ""
    warn_of_bf16_on_cpu(argparse.Namespace(use_cpu=True, bf16=True), "lit.yaml")
    assert (
        capsys.readouterr().err
        == "bf16 of lit.yaml is slower than fp32 on most processors. For fp32 pass --bf16 false.\n"
    )


def test_ctrl_c_outside_of_a_training_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setitem(cli.PARSERS, "train", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as ended:
        infcl("train", "--help")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\ninfcl: ended by Ctrl-C\n"


def end_in(method: str, command: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the command, and ends it when the trainer calls this method."""
    with monkeypatch.context() as patch:
        patch.setattr(InfCLTrainer, method, lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            infcl(*command)


def test_a_run_that_ends_before_its_first_checkpoint_or_after_its_last_goes_on_by_the_same_command(
    small, tmp_path, monkeypatch
):
    command = [*small, "--max_steps", 2, "--eval_dataset", tmp_path / "pairs", "--resume_from_checkpoint", "auto"]
    out = tmp_path / "out"
    end_in("_save_checkpoint", command, monkeypatch)
    assert {path.name for path in out.iterdir()} >= {"README.md", "curves.png", "training_record.json"}
    assert not list(out.glob("checkpoint-*"))
    end_in("save_metrics", command, monkeypatch)
    assert list(out.glob("checkpoint-2"))
    assert not (out / "model.safetensors").exists()
    infcl(*command)
    results = json.loads((out / "all_results.json").read_text())
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    measured = [entry for entry in state["log_history"] if "eval_pairs_loss" in entry]
    assert results["eval_pairs_loss"] == measured[-1]["eval_pairs_loss"]
    assert (out / "model.safetensors").read_bytes() == (out / "checkpoint-2/model.safetensors").read_bytes()
    before = left_in(out)
    infcl(*command)
    assert left_in(out) == before
    (out / "trainer_state.json").write_text("{")  # as left by a kill during the write
    infcl(*command)
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 2


def test_results_that_a_full_disk_has_refused_are_written_by_the_same_command(small, tmp_path, monkeypatch, capsys):
    command = [*small, "--max_steps", 1, "--eval_dataset", tmp_path / "pairs", "--resume_from_checkpoint", "auto"]
    out = tmp_path / "out"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def starved(*args: Any) -> None:
        (out / "all_results.json").write_text("")  # as left by a full disk
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(InfCLTrainer, "save_metrics", starved)
        line = mistake(capsys, *command)
    assert f"The results could not be written into {out}" in line
    assert os.strerror(errno.ENOSPC) in line
    assert "Free some space, and run the same command with --resume_from_checkpoint auto" in line
    written = CardCallback.write
    with monkeypatch.context() as patch:  # the card is written again after all other results

        def write(card: CardCallback, args: Any, state: Any) -> None:
            if (out / "trainer_state.json").exists():
                raise full
            written(card, args, state)

        patch.setattr(CardCallback, "write", write)
        assert "The results could not be written" in mistake(capsys, *command)
    infcl(*command)
    assert json.loads((out / "all_results.json").read_text())["eval_pairs_loss"] > 0
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 1


def test_a_folder_with_an_earlier_run_is_refused_deleted_or_gone_on_with(small, tmp_path, capsys):
    out = tmp_path / "out"
    auto = ("--resume_from_checkpoint", "auto")
    constant = ("--lr_scheduler_type", "constant")
    infcl(*small, "--eval_dataset", tmp_path / "pairs", "--max_steps", 2, *auto, *constant)
    assert f"There is no checkpoint in {out} to resume from: the training begins." in capsys.readouterr().out
    assert left_in(out).keys() == {*LEFT}
    before = left_in(out)
    line = mistake(capsys, *small)
    assert "checkpoint-2" in line
    assert "--resume_from_checkpoint auto" in line
    assert left_in(out) == before

    # If a finished run is resumed, nothing is trained and all files stay as they are.
    infcl(*small, "--eval_dataset", tmp_path / "pairs", "--max_steps", 2, *constant, "--resume_from_checkpoint", "true")
    printed = capsys.readouterr().out
    assert "This run was finished before, after step 2, so nothing was trained. To train on, start anew" in printed
    assert f"from its weights: --model {out} and another --output_dir." in printed
    assert "stay unchanged" in printed
    assert "took" not in printed
    assert left_in(out) == before

    # Another length changes the schedule of the learning rate, if it decays.
    line = mistake(capsys, *small, "--max_steps", 3, *auto)
    assert "lr_scheduler_type was 'constant' and is 'linear', schedule_length was None and is '3 steps'" in line
    assert f"start anew from its weights: --model {out / 'checkpoint-2'}" in line
    assert left_in(out) == before
    infcl(*small, "--max_steps", 3, *auto, *constant)
    assert f"\nResumed from {out / 'checkpoint-2'}, after step 2 of 3.\n" in capsys.readouterr().out
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 3
    assert (out / "eval_results.json").exists(), "a run that goes on keeps what was measured before"

    # Nothing is deleted while another run is training there.
    before = set(out.rglob("*"))
    with locked(out, locks=True, shared=True):
        assert "Another run is training in" in mistake(capsys, *small, "--max_steps", 1, "--overwrite_output_dir")
    assert set(out.rglob("*")) == before

    # Or if an option turns out to be wrong just before the first step.
    words = ("--max_steps", 1, "--overwrite_output_dir", "--cache_features", tmp_path / "features")
    assert "the image tower trains" in mistake(capsys, *small, *words)
    assert set(out.rglob("*")) == before

    # A new run leaves nothing of the old one, although it neither evaluates nor draws.
    infcl(*small, "--max_steps", 1, "--overwrite_output_dir", "--save_strategy", "no", "--logging_strategy", "no")
    assert not list(out.glob("checkpoint-*"))
    assert left_in(out).keys() == {"README.md", "all_results.json", "trainer_state.json"}
    assert "eval_pairs_loss" not in json.loads((out / "all_results.json").read_text())
    assert "not evaluated" in (out / "README.md").read_text()
    told = mistake(capsys, *small, *auto)
    assert "holds an earlier run (all_results.json" in told, "there is nothing to go on from"
    assert "It has no checkpoint to continue from: choose another --output_dir, or delete it with --over" in told
    assert "--resume_from_checkpoint" not in told.rpartition("holds")[2]


@on_ranks(2)
def test_overwriting_deletes_on_every_machine_that_saves(rank, world_size, tmp_path):
    os.environ["LOCAL_RANK"] = "0"  # every process is the first process of a machine
    args = InfCLTrainingArguments(f"{tmp_path}/{rank}", use_cpu=True, save_on_each_node=True, report_to="none")
    results = Path(args.output_dir, "checkpoint-1"), Path(args.output_dir, "all_results.json")
    results[0].mkdir(parents=True)
    results[1].touch()
    train.EarlierDeleted(results).on_train_begin(args, None, None)
    assert not any(path.exists() for path in results)


def test_a_mixture_of_shards_is_trained_by_epochs_and_told_on_the_card(small, demo, tmp_path):
    rows = [json.loads(line) for line in (demo / "digits/train/metadata.jsonl").read_text().splitlines()[:60]]
    rows = [{**row, "wrong": "no digit"} for row in rows]
    for shard, part in enumerate((rows[:20], rows[20:40], rows[40:])):
        images = [(demo / "digits/train" / row["file_name"]).read_bytes() for row in part]
        members = [
            member
            for number, (image, row) in enumerate(zip(images, part, strict=True))
            for member in ((f"{number}.png", image), (f"{number}.json", json.dumps(row).encode()))
        ]
        write_tar(tmp_path / f"shards/{shard}.tar", members)
    where = small.index("--dataset")
    sources = [str(tmp_path / "shards/{0..1}.tar"), str(tmp_path / "shards/2.tar")]
    words = [*small[:where], "--dataset", *sources, *small[where + 2 :]]
    words += ["--streaming", "--dataset_weights", "3", "1", "--samples_per_epoch", "24", "--on_bad_sample", "skip"]
    infcl(*words, "--captions_per_image", 2, "--negative_caption_column", "wrong")
    state = json.loads((tmp_path / "out/trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (6, 2)
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["stream_samples"] for entry in logged] == [8, 16, 24, 32, 40, 48]
    assert {entry["texts_per_image"] for entry in logged} == {3}
    sources = json.loads((tmp_path / "out/training_record.json").read_text())["sources"]
    assert [(source["dataset"], source["weight"]) for source in sources] == [("shards", 0.75), ("shards", 0.25)]
    card = (tmp_path / "out/README.md").read_text()
    assert "48 pairs seen" in card
    assert "up to 2 captions of the image, drawn anew each epoch" in card
    assert "for all images also one of `wrong` of each image that has any" in card


def test_data_seed_is_that_of_the_data(tmp_path):
    """It draws the order, captions and augmentation; the seed is that of the weights and of dropout."""
    options = DataOptions([str(write_tar(tmp_path / "0.tar", pair(0)))], streaming=True)
    for given, seed in (({"data_seed": 7}, 7), ({"data_seed": 0}, 0), ({}, 3)):
        args = InfCLTrainingArguments(str(tmp_path), seed=3, max_steps=1, use_cpu=True, report_to="none", **given)
        assert training_set(options, ColumnOptions(), args).seed == seed


def test_a_licence_is_told_where_the_hub_states_it(monkeypatch, tmp_path):
    shards = tmp_path / "shards"
    options = DataOptions(["someone/pairs", "hf://datasets/a/b@main/{0..9}.tar", "a/lost", f"{shards}/{{0..9}}.tar"])
    with hub_for_this_process(monkeypatch, tmp_path / "cache") as hub:
        for name, stated in (("someone/pairs", "cc-by-4.0"), ("a/b", "[mit, cc0-1.0]")):
            hub.commits[f"datasets/{name}", "main"] = [{"README.md": f"---\nlicense: {stated}\n---\n".encode()}]
        sources = train.describe_sources(options)
    assert [(source.dataset, source.on_hub, source.license) for source in sources] == [
        ("someone/pairs", True, "cc-by-4.0"),
        ("a/b", True, "mit, cc0-1.0"),
        ("a/lost", True, None),
        ("shards", False, None),
    ]
    told: list[str] = []
    monkeypatch.setattr(hub_files.logger, "warning", lambda message, *values: told.append(message % values))
    talk_to("http://127.0.0.1:9", monkeypatch)
    sources = train.describe_sources(DataOptions(["a/b", "a/c"]))
    assert [source.license for source in sources] == ["mit, cc0-1.0", None], "read before, and not to be reached"
    assert len(told) == 1
    assert told[0].startswith("The model card states no licence for a/c, because its own card cannot be read: ")


def test_adapters_train_alone_and_are_saved_as_such(small, tmp_path):
    guard = ["--guard_dataset", tmp_path / "pairs"]
    infcl(*small, "--max_steps", 1, "--lora_rank", 4, "--lora_targets", "q_proj", "v_proj", *guard)
    out = tmp_path / "out"
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (4, 8, {"q_proj", "v_proj"})
    assert not (out / "model.safetensors").exists()
    card = (out / "README.md").read_text()
    assert "# out" in card, "the card is ours, not peft's empty one"
    assert "| layers with adapters | `q_proj` and `v_proj`; alpha 8 |" in card
    assert "| logit_scale | 14.28, frozen |" in card
    state = json.loads((out / "trainer_state.json").read_text())
    before, *_, after = (e["eval_guard1_pairs_loss"] for e in state["log_history"] if "eval_guard1_pairs_loss" in e)
    assert re.search(rf"\| {after:.4f} \|[^|]*\| {before:.4f} \|", card), "the guard set is measured before and after"
    model = transformers.AutoModel.from_pretrained(out)
    assert any("lora" in name for name, _ in model.named_parameters())


def test_the_temperature_trains_beside_adapters_if_asked(small, demo, tmp_path, capsys):
    words = [*small, "--max_steps", 1, "--lora_logit_scale", "--logit_scale_learning_rate", 0.1]
    infcl(*words, "--lora_rank", 4, "--output_dir", tmp_path / "on")
    infcl(*words, "--lora_rank", 4, "--output_dir", tmp_path / "merged", "--lora_merge")
    assert "lora_logit_scale=True has no effect without lora_rank: add lora_rank" in mistake(capsys, *words)
    start = transformers.CLIPModel.from_pretrained(demo / "clip-init").logit_scale.item()
    (kept,) = (
        value
        for name, value in load_file(tmp_path / "on/adapter_model.safetensors").items()
        if name.endswith("logit_scale")
    )
    merged = transformers.CLIPModel.from_pretrained(tmp_path / "merged").logit_scale
    assert abs(kept.item() - start) == pytest.approx(0.1, rel=0.1), "one step of Adam"
    assert merged.item() == kept.item()
    assert "frozen" not in (tmp_path / "on/README.md").read_text()


def test_adapters_are_pushed_as_such_and_merged_at_the_end_if_asked(small, demo, tmp_path, monkeypatch):
    with hub_for_this_process(monkeypatch, tmp_path / "cache") as hub:
        words = ["--max_steps", 1, "--lora_rank", 4, "--learning_rate", 1e-2, "--lora_merge"]
        infcl(*small, *words, "--push_to_hub", "--hub_model_id", "me/mine", "--hub_strategy", "every_save")
        during, after = hub.commits["me/mine", "main"][1:]
        adapter = {"adapter_config.json", "adapter_model.safetensors"}
        assert adapter <= during.keys()
        assert b'(CLIPModel.from_pretrained("path/to/clip-init"), "me/mine")' in during["README.md"]
        assert not adapter & after.keys()
        assert not adapter & {path.name for path in (tmp_path / "out").iterdir()}
        assert b"PeftModel" not in after["README.md"]
        assert b"LoRA adapters of rank 4" in after["README.md"]
        model = transformers.CLIPModel.from_pretrained("me/mine")
    base = transformers.CLIPModel.from_pretrained(demo / "clip-init")
    (tmp_path / "adapter").mkdir()
    for name in adapter:
        (tmp_path / "adapter" / name).write_bytes(during[name])
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    untrained = transformers.CLIPModel.from_pretrained(demo / "clip-init").state_dict()
    assert all(torch.equal(value, adapted[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, untrained[name]) for name, value in model.state_dict().items())


def test_adapters_are_drawn_from_the_seed_and_train_on(small, demo, tmp_path, capsys):
    words = ["--max_steps", 1, "--save_strategy", "no", "--check_samples", 0]
    for number, seed in enumerate((1, 1, 2)):
        torch.rand(number)  # the state of the process does not count
        infcl(*small, *words, "--lora_rank", 4, "--seed", seed, "--output_dir", tmp_path / f"drawn{number}")
    first, again, other = (load_file(tmp_path / f"drawn{number}/adapter_model.safetensors") for number in range(3))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)

    drawn = tmp_path / "drawn0"
    on = [*small, *words, "--model", drawn]
    line = mistake(capsys, *on, "--lora_rank", 4)
    assert f"{drawn} holds adapters, and --lora_rank 4 would add new ones" in line
    assert f"infcl convert {drawn} MERGED" in line
    assert "averages whole weights, but only adapters train" in mistake(
        capsys, *on, "--save_strategy", "epoch", "--average_with_start", 0.5
    )
    assert "would replace" in mistake(capsys, *on, "--output_dir", demo / "clip-init")
    infcl(*on, "--learning_rate", 1e-2, "--output_dir", tmp_path / "on")
    infcl(*on, "--learning_rate", 1e-2, "--output_dir", tmp_path / "merged", "--lora_merge")
    second = load_file(tmp_path / "on/adapter_model.safetensors")
    assert second.keys() == first.keys()
    moved = {name: (second[name] - first[name]).abs().max().item() for name in first}
    assert 0 < max(moved.values()) < 0.011, "one step of Adam from the adapters, not from new ones"
    card = (tmp_path / "on/README.md").read_text()
    assert "LoRA adapters of rank 4, those of drawn0" in card
    assert '(CLIPModel.from_pretrained("path/to/clip-init"), "path/to/on")' in card
    base = transformers.CLIPModel.from_pretrained(demo / "clip-init")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "on").merge_and_unload().state_dict()
    merged = transformers.CLIPModel.from_pretrained(tmp_path / "merged").state_dict()
    assert not list((tmp_path / "merged").glob("adapter*"))
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name])


def test_every_command_takes_adapters(small, demo, tmp_path, capsys):
    adapters, pairs = tmp_path / "adapters", tmp_path / "pairs"
    words = ["--max_steps", 1, "--lora_rank", 2, "--learning_rate", 1e-1, "--output_dir", adapters]
    infcl(*small, *words, "--check_samples", 0)
    measured = ["--eval_dataset", pairs, "--use_cpu", "--report_to", "none"]
    infcl("convert", adapters, tmp_path / "merged")
    infcl("convert", adapters, tmp_path / "theirs", "--to", "open_clip")
    infcl("average", demo / "clip-init", adapters, "--alpha", 0.5, "--output_dir", tmp_path / "half", "--use_cpu")
    states = [transformers.CLIPModel.from_pretrained(f).state_dict() for f in (demo / "clip-init", tmp_path / "merged")]
    half = transformers.CLIPModel.from_pretrained(tmp_path / "half").state_dict()
    for name, value in interpolated(*states, 0.5).items():
        torch.testing.assert_close(half[name], value)
    infcl("average", adapters, tmp_path / "half", "--alpha", 0.0, "--output_dir", tmp_path / "whole", "--use_cpu")
    losses, recall = {}, 0.0
    for name in ("whole", "half", "theirs", "merged", "adapters"):
        infcl("evaluate", "--model", tmp_path / name, *measured, "--output_dir", tmp_path / f"of_{name}")
        found = json.loads((tmp_path / f"of_{name}/eval_results.json").read_text())
        losses[name], recall = found["eval_pairs_loss"], found["eval_pairs_text_retrieval_recall@1"]
    assert losses["merged"] == losses["whole"] == losses["adapters"] == pytest.approx(losses["theirs"], abs=1e-5)
    assert losses["half"] != pytest.approx(losses["adapters"], abs=1e-5)
    infcl("evaluate", "--model", demo / "clip-init", adapters, *measured, "--output_dir", tmp_path / "compared")
    (compared,) = json.loads((tmp_path / "compared/compare_results.json").read_text())["pairs"]["metrics"][
        "text_retrieval_recall@1"
    ]
    assert compared["second"] == recall
    infcl("embed", adapters, pairs, "--use_cpu", "--output_dir", tmp_path / "embedded")
    with contextlib.suppress(SystemExit):
        infcl("check", *small[1:], "--model", adapters, "--output_dir", tmp_path / "checked")
    assert (tmp_path / "checked/_check.json").is_file()
    assert "holds a model already (adapter_config.json)" in mistake(capsys, "convert", tmp_path / "merged", adapters)


def test_a_checkpoint_without_a_projection_is_refused_and_trained_with_a_new_one(small, demo, tmp_path, capsys):
    broken = shutil.copytree(demo / "clip-init", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    pairs, out = tmp_path / "pairs", ["--output_dir", tmp_path / "out", "--use_cpu"]
    for words in (
        [*small, "--model", broken],
        ["evaluate", "--model", broken, "--eval_dataset", pairs, *out],
        ["evaluate", "--model", demo / "clip-init", broken, "--eval_dataset", pairs, *out],
        ["average", demo / "clip-init", broken, *out],
        ["embed", broken, pairs, *out],
        ["convert", broken, tmp_path / "theirs", "--to", "open_clip"],
    ):
        assert f"'{broken}' lacks weights of a CLIPModel: text_projection.weight" in mistake(capsys, *words)
    words = ["--max_steps", 1, "--learning_rate", 1e-9, "--new_weights", "text_projection", "--save_strategy", "no"]
    assert "only adapters train" in mistake(capsys, *small, "--model", broken, *words, "--lora_rank", 2)
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        infcl(*small, "--model", broken, *words, "--seed", seed, "--output_dir", tmp_path / f"{number}")
        drawn.append(load_file(tmp_path / f"{number}/model.safetensors")["text_projection.weight"])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(drawn[0], drawn[2])


def test_a_folder_that_is_overwritten_holds_either_a_model_or_adapters(small, tmp_path):
    words = ["--max_steps", 1, "--save_strategy", "no", "--check_samples", 0, "--overwrite_output_dir"]
    held = []
    for own in ([], ["--lora_rank", 2], []):
        infcl(*small, *words, *own)
        held.append({path.name for path in (tmp_path / "out").iterdir()} & {"config.json", "adapter_config.json"})
    assert held == [{"config.json"}, {"adapter_config.json"}, {"config.json"}]


def test_training_needs_no_matplotlib(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else object())
    infcl(*small, "--max_steps", 1)
    told = f"The curves were not drawn: `pip install matplotlib`, and `infcl card {tmp_path / 'out'}` draws them."
    assert told in capsys.readouterr().out
    assert not (tmp_path / "out/curves.png").exists()


def test_what_is_pushed_loads_where_this_package_is_not_installed(small, tmp_path, monkeypatch, capfd):
    """The real Hub client talks to a double on this machine."""
    token = "hf_" + "s3cr3t" * 6
    with hub_for_this_process(monkeypatch, tmp_path / "cache") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)  # for the process that loads the model
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        words = ["--max_steps", 2, "--save_steps", 1, "--eval_dataset", tmp_path / "pairs", "--hub_token", token]
        words += ["--push_to_hub", "--hub_model_id", "me/mine", "--hub_strategy", "checkpoint", "--hub_always_push"]
        infcl(*small, *words)
        printed = "".join(capfd.readouterr())
        files = hub.files("me/mine")
        assert {"README.md", "curves.png", "model.safetensors", "tokenizer.json", "eval_results.json"} <= files.keys()
        assert "last-checkpoint/infcl_manifest.json" in files
        assert not [path for path in files if path.startswith(("_", "checkpoint-"))]
        assert b"contrastive loss of the whole set" in files["README.md"]
        assert files["README.md"] == (tmp_path / "out/README.md").read_bytes()
        first = next(trees for trees in hub.commits.values() if len(trees) > 1)[1]
        assert b"1 of 2 planned optimizer steps" in first["README.md"], "the card travels with the first push"
        assert token not in printed
        local = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
        assert not [data for data in (*files.values(), *map(Path.read_bytes, local)) if token.encode() in data]
        code = """
import sys
import typing
sys.modules["hf_infcl"] = None  # importing it raises ImportError
from transformers import AutoProcessor, CLIPModel, pipeline
CLIPModel.from_pretrained("me/mine")
AutoProcessor.from_pretrained("me/mine")
ask = pipeline("zero-shot-image-classification", model="me/mine")
print(sorted(answer["label"] for answer in ask(sys.argv[1], candidate_labels=["one", "two"])))
"""
        picture = next((tmp_path / "pairs/test").glob("*.png"))
        assert "['one', 'two']" in run("-c", code, picture)


def test_a_card_tells_what_the_training_used_and_loads_from_where_it_was_pushed(small, tmp_path, monkeypatch):
    """Each statement of the card that the arguments alone do not decide; the name on the Hub has no user."""
    classes = tmp_path / "classes"
    for number, picture in enumerate(sorted((tmp_path / "pairs/test").glob("*.png"))):
        (classes / "test" / ("even", "odd")[number % 2]).mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, classes / "test" / ("even", "odd")[number % 2])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch --mixed_precision bf16` does
    words = ["--max_steps", 1, "--optim", "sgd", "--lr_scheduler_type", "constant", "--logit_scale_learning_rate", 0.01]
    words += ["--zero_shot_dataset", classes, "--guard_dataset", classes, tmp_path / "pairs"]
    words += ["--pair_id_column", "label"]
    words += ["--push_to_hub", "--hub_model_id", "mine", "--hub_private_repo", "--hub_revision", "trial"]
    with hub_for_this_process(monkeypatch, tmp_path / "cache") as hub:
        infcl(*small, *words, "--hub_token", "hf_token", draws=True)
        assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
        card = hub.files("me/mine", "trial")["README.md"].decode()
        (snippet,) = blocks(card)
        loading = [line for line in snippet.splitlines() if "classifier(" not in line]
        exec("\n".join(loading), {})
    assert card == (tmp_path / "out/README.md").read_text()
    for row in (
        "| captions | the model reads the first ",
        "| optimizer | sgd, weight decay 0 |",
        "| learning rate | 5e-05, constant |",
        "| learning rate of logit_scale | 0.01 |",
        "| precision | bf16 autocast |",
    ):
        assert row in card, row
    interval = r"[\d.]+ to [\d.]+"
    row = rf"^\| `(\w+)`, split test \| 12 \| (.*?) \| [\d.]+ \| (?:{interval})? \| [\d.]+ \|"
    results = re.findall(row, card, re.MULTILINE)
    assert re.search(rf"top-1 accuracy \| [\d.]+ \| {interval} \|", card)
    assert {("classes", "top-1 accuracy"), ("classes", "mean per class recall")} <= set(results)
    assert ("pairs", "contrastive loss of the whole set as one batch") in results
    assert "`classes`, split test is a guard (a retention set)" in card


# ---- How often to log, save and evaluate ----


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"logging_steps": 0.01, "save_strategy": "epoch", "eval_strategy": "no", "save_total_limit": 3}),
        ("--eval_dataset d", {"save_strategy": "epoch", "eval_strategy": "epoch"}),
        ("--zero_shot_dataset d --save_steps 7", {"save_strategy": "steps", "save_steps": 7, "eval_steps": 7}),
        ("--max_steps 50", {"logging_steps": 1, "save_strategy": "steps", "save_steps": 5}),
        ("--max_steps 999 --eval_dataset d", {"logging_steps": 10, "save_steps": 100, "eval_steps": 100}),
        ("--eval_dataset d --eval_strategy steps", {"save_strategy": "epoch", "eval_steps": 0.1}),
        ("--eval_dataset d --eval_strategy no --eval_steps 5", {"eval_strategy": "no", "save_steps": 5}),
        ("--save_strategy no --logging_strategy epoch", {"save_total_limit": None, "logging_strategy": "epoch"}),
        ("--zero_shot_dataset d", {"eval_on_start": True}),
        ("--guard_dataset g", {"eval_on_start": True, "eval_strategy": "epoch"}),
        ("--guard_dataset g --eval_on_start no", {"eval_on_start": False}),
        ("--logging_steps 5 --save_total_limit 9", {"logging_steps": 5, "save_total_limit": 9}),
        ("--logging_steps 5", {"logging_first_step": False}),
        ("--recipe finetune_clip", {"logging_steps": 0.01, "logging_first_step": True}),
        ("--zero_shot_dataset d --load_best_model_at_end", {"metric_for_best_model": "zero_shot_acc1"}),
        ("--zero_shot_dataset d --save_strategy best", {"metric_for_best_model": "zero_shot_acc1"}),
        ("--eval_dataset d --lr_scheduler_type greedy", {"metric_for_best_model": "pairs_loss"}),
    ],
)
def test_what_was_not_said_is_chosen_for_few_large_steps(words, expected):
    namespace = (reader := PARSERS["train"]()).read(["--model", "m", "--dataset", "d", *words.split()])
    vars(namespace).update(defaults.intervals(namespace, reader.given))
    assert {name: getattr(namespace, name) for name in expected} == expected


def test_no_interval_is_told_of_a_batch_that_the_set_does_not_fill(tmp_path, capsys):
    args = InfCLTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", global_batch_size=8)
    defaults.print_choices(args, {"logging_steps": 0.01}, range(8))
    assert "Chosen by default: --logging_steps 1\n" in capsys.readouterr().out
    defaults.print_choices(args, {"logging_steps": 0.01}, range(7))
    assert "Chosen by default" not in capsys.readouterr().out


def test_chosen_intervals_are_told_in_steps():
    chosen = {"logging_steps": 0.01, "save_steps": 25.0, "eval_steps": 0.1, "eval_on_start": True}
    assert defaults.in_steps(chosen, 250) == "--logging_steps 3 --save_steps 25 --eval_steps 25 --eval_on_start"


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        ("0", "is 0, so that no weight changes"),
        ("1e6", "of AdamW is 1e+06, at least 0.1, so that each step replaces the weights"),
        ("0.1", "of AdamW is 0.1, at least 0.1"),
        ("0.05", None),
        ("1e-6", None),
        ("9e-7", "of AdamW is 9e-07, below 1e-06, so that weights hardly change"),
        ("1e6 --optim sgd", None),
    ],
)
def test_a_rate_that_trains_nothing_or_destroys_the_model_is_told(tmp_path, rate, told):
    words = ["--model", "m", "--dataset", "d", "--learning_rate", *rate.split(), "--use_cpu", "--report_to", "none"]
    reader = PARSERS["train"]()
    args = reader.build(reader.read([*words, "--output_dir", str(tmp_path)]))[-1]
    said = doubtful_rate(args)
    assert told in said if told else not said


def test_the_best_checkpoint_is_chosen_by_what_is_measured():
    for option in ("--save_strategy best", "--lr_scheduler_type reduce_lr_on_plateau", ""):
        namespace = PARSERS["train"]().read(
            f"--model m --dataset d --zero_shot_dataset z {option} --metric_for_best_model loss".split()
        )
        with pytest.raises(ValueError, match=r"must be one of zero_shot_acc1, .* got 'loss'"):
            defaults.check_best_metric(namespace)
    words = "--model m --dataset d --zero_shot_dataset z --load_best_model_at_end --metric_for_best_model"
    namespace = PARSERS["train"]().read([*words.split(), "eval_zero_shot_acc5"])
    defaults.check_best_metric(namespace)
    rows = datasets.Dataset.from_dict({"image": ["a.png"], "label": [0]})
    few, enough = (ZeroShotDataset(rows, class_names=list("abcde"[:count])) for count in (4, 5))
    best_metric.check_metric(namespace, best_metric.metrics_of({"zero_shot": enough}))
    with pytest.raises(ValueError, match="one of zero_shot_acc1, zero_shot_mean_per_class_recall, got"):
        best_metric.check_metric(namespace, best_metric.metrics_of({"zero_shot": few}))
    guarded = words.replace("--zero_shot_dataset z", "--guard_dataset old/pairs others/pairs").split()
    namespace = PARSERS["train"]().read([*guarded, "guard2_others_pairs_loss"])
    defaults.check_best_metric(namespace)
    namespace = PARSERS["train"]().read([*guarded, "guard1_old_pairs_acc1"])
    defaults.check_best_metric(namespace)  # it may be a folder of classes
    namespace = PARSERS["train"]().read([*guarded, "guard3_others_pairs_loss"])
    with pytest.raises(ValueError, match="one of guard1_old_pairs_loss, guard1_old_pairs_image_retrieval_recall@1, "):
        defaults.check_best_metric(namespace)


# ---- Options ----


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_value_in_a_file_means_what_it_means_in_python(tmp_path, kind):
    content = f"""
model: m
dataset: d
output_dir: {tmp_path}
hub_model_id: null
freeze:
pair_id_column: ~
learning_rate: 1e-3
max_logit_scale: .inf
save_strategy: no
use_cpu: true
bf16: no
max_steps: 7
run_name: 007
templates: ['a {{}}', '-b: {{}}']
class_names: [no, 1, 1e5, on]
report_to: [tensorboard, wandb]
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {{min_lr: 1e-6}}
accelerator_config: {{dispatch_batches: false, gradient_accumulation_kwargs: null}}
"""
    if kind == "json":
        values = yaml.load(content, Loader=yaml.BaseLoader) | {
            **{"hub_model_id": None, "freeze": None, "pair_id_column": None, "use_cpu": True, "bf16": False},
            **{"learning_rate": 1e-3, "max_logit_scale": math.inf, "max_steps": 7},
            "lr_scheduler_kwargs": {"min_lr": 1e-6},
            "accelerator_config": {"dispatch_batches": False, "gradient_accumulation_kwargs": None},
        }
        content = json.dumps(values)
    (tmp_path / f"c.{kind}").write_text(content)
    words = [str(tmp_path / f"c.{kind}"), "--max_steps", "9", "--split", "s"]
    reader = PARSERS["train"]()
    namespace = reader.read(words)
    model, _, data, columns, evaluation, _, args = reader.build(namespace)
    assert (model.model, data.dataset, data.split, columns.pair_id_column) == ("m", ["d"], "s", None)
    assert evaluation.templates == ["a {}", "-b: {}"]
    assert evaluation.class_names == ["no", "1", "1e5", "on"]
    assert (args.learning_rate, args.use_cpu, args.bf16, args.max_steps) == (1e-3, True, False, 9)
    assert (args.hub_model_id, args.freeze, args.run_name) == (None, None, "007")
    assert args.max_logit_scale == math.inf
    assert args.save_strategy == "no"
    assert args.report_to == ["tensorboard", "wandb"]
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert args.accelerator_config.dispatch_batches is False
    assert {"freeze", "split", "max_steps"} <= reader.given
    assert "seed" not in reader.given


class QuotedText(yaml.SafeDumper):
    """Quotes all text. PyYAML omits quotes that its YAML 1.1 does not need, such as those of "1e-6"."""


QuotedText.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NUMBER = st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
VALUES = {
    "run_name": st.none() | TEXT,
    "hub_private_repo": st.none() | st.booleans(),
    "use_cpu": st.booleans(),
    "max_steps": st.integers(-(10**12), 10**12),
    "learning_rate": NUMBER,
    "eval_steps": st.none() | NUMBER,
    "class_names": st.none() | st.lists(TEXT, min_size=1, max_size=3),
    "templates": st.lists(TEXT, min_size=1, max_size=3),
    "report_to": st.none() | TEXT | st.lists(TEXT, max_size=3),
    "lr_scheduler_kwargs": st.none() | st.dictionaries(TEXT, JSON, max_size=3),
}


parser = functools.cache(PARSERS["train"])


@hypothesis.settings(deadline=None)
@hypothesis.example(values={"report_to": "--", "templates": ["--", "a"]}, flow=False)  # argparse drops the first
@hypothesis.given(values=st.fixed_dictionaries({}, optional=VALUES), flow=st.booleans())
@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_any_value_comes_out_of_a_file_as_it_went_in(tmp_path_factory, kind, values, flow):
    path = tmp_path_factory.getbasetemp() / f"any.{kind}"
    everything = {"model": "m", "dataset": "d", **values}
    if kind == "json":
        path.write_text(json.dumps(everything), encoding="utf-8")
    else:
        path.write_text(yaml.dump(everything, Dumper=QuotedText, default_flow_style=flow, allow_unicode=True), "utf-8")
    namespace = parser().read([str(path)])
    assert parser().given == everything.keys()
    for name, value in values.items():
        assert getattr(namespace, name) == value
        assert type(getattr(namespace, name)) is type(value)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    name=st.sampled_from([*VALUES, "model", "seed", "optim"]) | TEXT,
    value=st.text(max_size=30) | st.text(":-[]{}&*!|>'\"%@`#,? \n\tx0~", max_size=20),
)
def test_no_file_leads_to_a_traceback(tmp_path_factory, name, value):
    path = tmp_path_factory.getbasetemp() / "rubbish.yaml"
    path.write_text(f"model: m\ndataset: d\n{name}: {value}", encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(SystemExit):
        parser().read([str(path)])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--model m", "required: --dataset"),
        ("--model m --dataset d --no_such_argument 1", "There is no option --no_such_argument."),
        ("--model m --dataset d --learnin_rate 1", "no option --learnin_rate. Did you mean --learning_rate?"),
        ("--modle m", "Did you mean --model?"),
        ("--batch_size 8", " or --per_device_train_batch_size?"),
        ("--per_device_batch_size 8", "Did you mean --per_device_eval_batch_size or --per_device_train_batch_size?"),
        ("--lr 1e-4", "There is no option --lr. Did you mean --learning_rate?"),
        ("--model m --dataset d --no_bf16", "There is no option --no_bf16. Write --bf16 false."),
        ("--model m --dataset d --learning_rate fast", "invalid float value: 'fast'"),
        ("--model m --dataset d --strategy star", "strategy must be one of"),
        ("--model m more --dataset d", "'more' belongs to no option: --model takes one value."),
        ("--model m --dataset d --eval_dataset en de", "takes one value. Measure each set with `infcl evaluate`"),
        (
            "c.yaml: model: m\ndataset: d\neval_dataset: [{path: en}, de]\n",
            "c.yaml: eval_dataset must be a single value, not a list. Measure each set with",
        ),
        (
            "--model m --dataset d --caption_column en de",
            "takes one value. Join several columns into one of lists: rows.",
        ),
        (
            "c.yaml: model: m\ndataset: d\ncaption_column: [en, de]\n",
            "not a list. Join several columns into one of lists",
        ),
        ("c.yaml: model: m\ndataset: d\nsamples_per_epoch: many\n", "c.yaml: argument --samples_per_epoch"),
        (
            "c.yaml: model: m\ndataset: d\ndataset_weights: [1, x]\n",
            "c.yaml: argument --dataset_weights/--dataset-weights: invalid float value: 'x'",
        ),
        ("m/a d/plain", "'m/a' 'd/plain' belong to no option. Every value follows its option: --NAME VALUE."),
        ("missing.yaml", "There is no file"),
        ("--recipe nothing", "no recipe 'nothing'. The recipes are distill, finetune_alone, "),
        ("mine.yaml --recipe lora", "--recipe lora and mine.yaml are both files of options"),
        ("--model m --dataset d --load_best_model_at_end", "load_best_model_at_end needs something to evaluate"),
        (
            "--model m --dataset d --load_best_model_at_end --zero_shot_dataset z --metric_for_best_model eval_loss",
            "must be one of zero_shot_acc1, zero_shot_acc5, zero_shot_mean_per_class_recall, got 'loss'",
        ),
        ("c.yaml: model: m\ndataset: d\nno_dataloader_pin_memory: true\n", "Write dataloader_pin_memory: false."),
        ("c.yaml: model: m\ndataset: d\nrecipe: lora\n", "recipe only works on the command line."),
        ("c.yaml: - a\n- list\n", "must map names of options to values"),
        ("c.yaml: model: [unclosed\n", "c.yaml is not YAML: line 2"),
        ('c.json: {"model": "m",}', "c.json is not JSON: line 1"),
        ("c.yaml: model: m\ndataset: d\nlearnin-rate: 1\n", "no option --learnin_rate. Did you mean --learning_rate?"),
        ("c.yaml: model:\ndataset: d\n", "model must have a value"),
        ("c.yaml: model: [a, b]\ndataset: d\n", "model must be a single value, not a list"),
        ("c.yaml: model: m\ndataset: d\nseed: {a: 1}\n", "seed must be a single value, not a mapping"),
        ("c.yaml: model: m\ndataset: d\ntemplates: [a, [b]]\n", "templates must be a list of single values"),
        ("c.yaml: hub_token: [hf_abcdefgh\n", "line 2"),
    ],
)
def test_misuse_is_explained_in_one_line(monkeypatch, capsys, tmp_path, words, complaint):
    """With a file of options, its content follows its name."""
    monkeypatch.chdir(tmp_path)
    if words.startswith("c."):
        words, _, content = words.partition(": ")
        Path(words).write_text(content)
    line = mistake(capsys, "train", *words.split())
    assert complaint in line
    assert "hf_abcdefgh" not in line
    assert len(line) < 500, "no page of usage"


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "122")
    with pytest.raises(SystemExit) as end:
        infcl(*words)
    assert not end.value.code
    return capsys.readouterr().out


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # argparse tells them in no other way


def helps_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {action.dest: str(action.help) for action in actions_of(parser)}


def options_of(text: str) -> list[str]:
    return re.findall(r"^  --(\w+)", text, re.MULTILINE)


def test_the_help_of_a_training_is_of_a_page_and_a_half_and_the_whole_one_begins_with_what_is_our_own(
    capsys, monkeypatch
):
    short, whole = (help_of(capsys, monkeypatch, "train", "--help", *more) for more in ([], ["all"]))
    assert len(short.splitlines()) <= 1.5 * 66
    for text in (short, whole):
        assert not re.search(r"\(default:\s+None\)", text), "the help of an option says what None means"
        assert "window" not in text, "it is a step to someone at a command line"
    of_transformers = {one.name for one in fields(theirs.of_transformers())}
    every = options_of(whole)
    shown = options_of(short)
    assert len(shown) - 1 <= 60, "besides --help"
    assert shown[:5] == ["help", "recipe", "dataset", "streaming", "samples_per_epoch"], "in the order of the places"
    assert shown.index("max_steps") < shown.index("early_stopping_patience") < shown.index("learning_rate")
    assert {"use_cpu", "eval_strategy", "logging_steps", "exclude", "teacher_embeddings"} <= set(shown)
    assert not {"lanes", "shuffle_buffer", "backend", "strategy", "dataset_name", "split", "label_column"} & set(shown)
    assert "ONE contrastive batch" in short, "what gradient_accumulation_steps means here"
    assert set(shown) < set(every)
    assert set(every) - {"help"} == helps_of(PARSERS["train"]()).keys() - {"help"}
    is_theirs = [name in of_transformers for name in every]
    assert is_theirs == sorted(is_theirs), "what is our own comes first"


def test_the_help_of_an_evaluation_lists_what_evaluates(capsys, monkeypatch):
    shown = set(options_of(help_of(capsys, monkeypatch, "evaluate", "--help")))
    assert {"model", "eval_dataset", "per_device_eval_batch_size", "output_dir", "equal_ids"} <= shown
    assert not shown & {"learning_rate", "num_train_epochs", "save_steps", "freeze", "skip_nonfinite", "push_to_hub"}


def test_options_are_read_and_helps_are_printed_without_torch():
    """An import of torch takes seconds."""
    code = """
import contextlib, sys
sys.modules["torch"] = None  # importing it raises ImportError
from hf_infcl.cli import main
for words in (["train", "--help"], ["evaluate", "--help", "all"], ["train", "--modle", "m"],
              ["train", "--model", "m", "--dataset", "d", "--max_steps", "many"], ["card", "--help"],
              ["average", "--help"], ["convert", "--help"], ["trian"]):
    with contextlib.suppress(SystemExit):
        main(words=words)
"""
    output = run("-c", code)
    assert "There is no option --modle. Did you mean --model?" in output
    assert "invalid int value: 'many'" in output
    assert "argument COMMAND: invalid choice: 'trian' (choose from" in output


def fields_of(options: Any) -> list[dict[str, Any]]:
    return [vars(action) for action in actions_of(transformers.HfArgumentParser(options))]


@pytest.mark.skipif(transformers.__version__ != theirs.release_of_file(), reason="the file is of another release")
def test_the_file_of_options_has_those_of_the_pinned_release():
    """Names, types, choices, defaults and help texts of all options of a training."""
    assert theirs.FILE.read_text(encoding="utf-8") == content(), "run tests/helpers/theirs.py"
    assert InfCLTrainingArguments.__bases__ == (ContrastiveOptions, TrainingArguments)
    read = fields_of(theirs.of_transformers())
    ours = {one.name for one in fields(ContrastiveOptions)}
    real = [action for action in fields_of(TrainingArguments) if action["dest"] not in NOT_IN_WORDS | ours]
    assert [action["dest"] for action in read] == [action["dest"] for action in real]
    for of_file, of_class in zip(read, real, strict=True):
        kinds = [typing.get_origin(kind) or kind for kind in (action.pop("type") for action in (of_file, of_class))]
        choices = [[*(action.pop("choices") or ())] for action in (of_file, of_class)]
        assert choices[0] == choices[1]
        for action in (of_file, of_class):
            del action["container"]
        assert of_file == of_class
        if not choices[0] and of_file["dest"] != "debug":
            assert kinds[0] == kinds[1], of_file["dest"]


def test_the_file_is_of_the_release_that_is_pinned_for_the_newest_python():
    pinned = re.findall(r"^transformers==(\S+);", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert theirs.release_of_file() == pinned[0]


def test_options_of_another_release_are_accepted(monkeypatch, tmp_path, capsys):
    """A name that the installed class has and the file lacks; one that it lacks is refused."""
    words = ["--model", "m", "--dataset", "d", "--use_cpu", "--report_to", "none", "--output_dir", str(tmp_path)]
    every = fields(theirs.of_transformers())
    there = {"__module__": theirs.__name__}  # where their types are known
    lacking = make_dataclass("Options", [(f.name, f.type, f) for f in every if f.name != "seed"], namespace=there)
    with monkeypatch.context() as patched:
        patched.setattr(parsing, "of_transformers", lambda: lacking)
        patched.setattr(parsing, "release_of_file", lambda: "0.0")
        reader = PARSERS["train"]()
        namespace = reader.read([*words, "--seed", "7"])
        assert "seed" in reader.given
        assert reader.build(namespace)[-1].seed == 7
    added = make_dataclass("Options", [("gone", int, field(default=1, metadata={"help": ""}))], bases=(lacking,))
    monkeypatch.setattr(parsing, "of_transformers", lambda: added)
    reader = PARSERS["train"]()
    with pytest.raises(SystemExit):
        reader.build(reader.read([*words, "--gone", "2"]))
    assert "has no option gone" in capsys.readouterr().err


def test_augmentations_of_the_command_are_those_of_the_datasets():
    """The command has a list of its own, because its help is read without the datasets, which import torch."""
    assert facts_by_name(DataOptions)["augmentation"].choices == PRESETS


def test_helps_name_the_choices_of_our_own_options():
    helps = helps_of(PARSERS["train"]())
    for name, values in (
        *(("objective", OBJECTIVES), ("strategy", STRATEGIES), ("backend", BACKENDS), ("freeze", TOWERS)),
        ("equal_ids", ("exclude", "positive")),
    ):
        choices = facts_by_name(InfCLTrainingArguments)[name].choices
        assert tuple(choices() if callable(choices) else choices) == tuple(values)
        assert all(re.search(rf"\b{value}\b", helps[name]) for value in values), name


def test_names_of_other_programs_lead_to_ours():
    known = helps_of(PARSERS["train"]()).keys()
    assert not ELSEWHERE.keys() & known
    for name, ours in ELSEWHERE.items():
        assert ours.startswith("Omit it: ") or re.match(r"--(\w+)", ours)[1] in known, name


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *(("--train_file f", "Did you mean --dataset?"), ("--validation_file f", "Did you mean --eval_dataset?")),
        *(("--model_name_or_path m", "Did you mean --model?"), ("--max_seq_length 9", "mean --max_text_tokens?")),
        *(("--train-data f", "Did you mean --dataset?"), ("--csv-img-key f", "Did you mean --image_column?")),
        *(("--lock-image", "Did you mean --freeze image?"), ("--siglip", "Did you mean --objective sigmoid?")),
        *(("--pretrained m", "Did you mean --model?"), ("--aug-cfg x", "Did you mean --augmentation?")),
        *(("--local-loss", "Omit it: every strategy gives the"), ("--token x", "Omit it: HF_TOKEN in the environment")),
        ("--mini_batch_size 64", "Did you mean --global_batch_size, and the micro-batch that fits is found?"),
        ("--max_train_samples 9", "Did you mean --split 'train[:1000]'?"),
        *(
            ("--model_revision r", "Omit it: download that revision"),
            ("--use-naflex", "Omit it: it has no counterpart"),
        ),
        *(("--loss x", "Did you mean --objective?"), ("--image-mean 0.5", "Omit it: that comes with the model")),
    ],
)
def test_names_of_peers_are_known_before_similar_ones(theirs, ours, capsys):
    assert ours in mistake(capsys, "train", *theirs.split())


def test_the_guide_s_table_for_openclip_is_that_of_the_command():
    guide = (ROOT / "hf_infcl/trainer/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \| (.*) \|$", guide.partition("## Switching from OpenCLIP")[2], re.MULTILINE)
    known = helps_of(PARSERS["train"]()).keys() | {"batch_size", "name"}
    assert len(rows) > 10
    for left, right in rows:
        for name in re.findall(r"--([a-z-]+)", left):
            written = ELSEWHERE.get(name.replace("-", "_"), "")
            assert written or name.replace("-", "_") in known, name
            if written.startswith("--") and name not in ("dataset-type", "accum-freq"):  # the rows name a whole
                assert written.split()[0] in right, name


def test_the_command_alone_lists_its_commands(capsys):
    with pytest.raises(SystemExit) as end:
        infcl()
    assert end.value.code == 2
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in cli.PARSERS)


def test_version_says_what_a_bug_report_needs(capsys):
    with pytest.raises(SystemExit) as end:
        infcl("--version")
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"hf_infcl {hf_infcl.__version__}"
    for package in ("torch", "transformers"):
        assert f"{package} {metadata.version(package)}" in lines


def test_a_reader_that_ends_early_is_no_error(monkeypatch, capfd, demo, tmp_path):
    """For example `infcl ... | head`, with and without buffering of Python's output."""
    commands = [["convert", demo / "clip-init", tmp_path / f"{n}", "--to", "open_clip"] for n in range(2)]
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
    before = os.dup(1)
    for buffering, words in ((1, commands[0]), (-1, commands[1]), (-1, ["train", "--help"])):
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        with open(1, "w", buffering, closefd=False) as output, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", output)
            with pytest.raises(SystemExit) as end:
                infcl(*words)
        os.dup2(before, 1)
        assert end.value.code == 1
    os.close(before)
    assert capfd.readouterr().err == ""


def test_a_broken_pipe_of_something_else_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "evaluation_datasets", mock.Mock(side_effect=BrokenPipeError("of a worker")))
    with pytest.raises(BrokenPipeError, match="of a worker"):
        infcl("evaluate", "--model", "some", "--eval_dataset", "some", "--output_dir", tmp_path)


# ---- Mistakes in data and models ----

TRAIN = "train --model DEMO/clip-init --dataset DEMO/digits"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("evaluate --model m", "Pass --eval_dataset, --zero_shot_dataset or --benchmark"),
        ("evaluate --model m --zero_shot_dataset z --eval_pictures 3", "eval_pictures=3 has no effect without"),
        ("evaluate --model m --eval_dataset d --eval_pictures -1", "eval_pictures must be a whole number of at least"),
        ("train --model m --dataset ./no/such/folder", "at './no/such/folder'"),
        (
            "train --model ./no/such/model --dataset DEMO/digits",
            "There is no folder './no/such/model' to load a model from. A path is relative to",
        ),
        ("train --model DEMO/digits --dataset DEMO/digits", "digits' does not hold a model that can be loaded"),
        (f"{TRAIN} --lora_merge", "the adapters of --lora_rank, which is not given"),
        (f"{TRAIN} --caption_column text", "'label']. Name the right one with caption_column (--caption"),
        ("train --model m --dataset d --augmentation rotate", "'none', 'crop', 'flip_crop', got 'rotate'"),
        ("train --model m --dataset d --on_bad_sample ignore", "one of 'raise', 'skip', got 'ignore'"),
        (f"{TRAIN} --lora_rank 0", "lora_rank must be a whole number of at least 1, got 0"),
        ("train --model m --dataset DEMO/digits --output_dir DEMO/digits/run", "run is inside the folder of --dataset"),
        ("train --model DEMO/clip-init --dataset d --output_dir DEMO/clip-init", "is inside the folder of --model"),
        ('train --model m --dataset d --accelerator_config {"nope":1}', "unexpected keyword argument 'nope'"),
        (
            "train --model m --dataset d --overwrite_output_dir --resume_from_checkpoint auto",
            "the other continues it. Omit one of them.",
        ),
        (
            "train --model m --dataset d --dataloader_prefetch_factor -1",
            "dataloader_prefetch_factor must be a whole number of at",
        ),
        (
            "train --model m --dataset d --captions_per_image 0",
            "captions_per_image must be a whole number of at least 1",
        ),
        ("train --model m --dataset DEMO/digits --streaming", "Pass --max_steps or --samples_per_epoch"),
        ("train --model m --dataset DEMO/digits --streaming --max_steps 1", "reads .tar and .parquet files, but"),
        ("score m --dataset d", "There is no option --dataset. Did you mean --data_seed? Before the options"),
        ("train --model m --dataset a b", "Only shards that are read with --streaming can have several"),
        (
            "train --model m --dataset a --lanes 2",
            "lanes=2 has no effect without streaming: add streaming or drop",
        ),
        (
            "train --model m --dataset a --replay_caption_column txt",
            "Write it behind the name of the set: --replay_dataset 'NAME?caption_column=VALUE'.",
        ),
        ("evaluate --model m --eval_dataset a --eval_split b", "the set: --eval_dataset 'NAME?split=VALUE'."),
        ("train --model m --dataset a --replay_share 0.5", "--replay_share has no effect without --replay_dataset"),
        (f"{TRAIN} --per_device_train_batch_size 5000", "batch of 5,000 pairs ("),
        (f"{TRAIN} --push_to_hub --hub_model_id me/b?d", "'me/b?d'. Name another one with hub_model_id."),
    ],
)
def test_what_is_wrong_with_data_or_model_is_one_line(demo, tmp_path, capsys, words, complaint):
    words = words.replace("DEMO", str(demo)).split()
    assert complaint in mistake(capsys, words[0], "--use_cpu", "--output_dir", tmp_path, *words[1:])


def test_a_bad_image_that_a_worker_finds_is_one_line(small, tmp_path, capsys):
    (tmp_path / "pairs/train/0003.png").write_bytes(b"no image")
    line = mistake(capsys, *small, "--dataloader_num_workers", 1)
    assert re.search(r"error: Row 3 of --dataset .* is bad: column 'image': .* not an image of a known format", line)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "processor_config.json"])
def test_a_damaged_model_is_one_line(demo, tmp_path, capsys, name):
    shutil.copytree(demo / "clip-init", tmp_path / "model")
    (tmp_path / "model" / name).write_text("[]")
    words = ["--dataset", demo / "digits", "--use_cpu", "--output_dir", tmp_path / "out"]
    line = mistake(capsys, "train", "--model", tmp_path / "model", *words)
    assert f"'{tmp_path / 'model'}' does not hold a model that can be loaded with its config" in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "epoch_1.pt",
            "is a file. A model of transformers is named by its folder. Weights of OpenCLIP's training need",
        ),
        ("checkpoints/epoch_1.pt", "name the .pt file itself and pass --open_clip_model"),
        ("model/open_clip_config.json", "is damaged, or is no config of OpenCLIP"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_of_openclip_is_one_line(tmp_path, capsys, name, words):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    model = path if path.parent == tmp_path else path.parent
    assert words in mistake(capsys, "check", "--model", model, "--dataset", "d")


def test_a_model_of_another_type_is_one_line(demo, tmp_path, capsys):
    """Before a model is measured, and where none is loaded."""
    transformers.BertModel(transformers.BertConfig(**models.BERT)).save_pretrained(tmp_path / "model")
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / "clip-init" / name, tmp_path / "model")
    out = ["--output_dir", tmp_path / "out"]
    for words in (
        ["check", "--model", tmp_path / "model", "--dataset", demo / "digits", *out],
        ["evaluate", "--model", demo / "clip-init", tmp_path / "model", "--eval_dataset", demo / "digits", *out],
    ):
        line = mistake(capsys, *words)
        assert f"The model of '{tmp_path / 'model'}' (model_type 'bert') is not a dual encoder that" in line


def test_a_model_that_is_not_there_is_told_with_what_was_tried(tmp_path, capsys, monkeypatch):
    command = ["check", "--model", "openai/clip-vit-bas", "--dataset", "d"]
    with hub_for_this_process(monkeypatch, tmp_path / "cache"):
        line = mistake(capsys, *command)
        assert "There is no folder 'openai/clip-vit-bas', and the Hub has no model of this name" in line
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        line = mistake(capsys, *command)
        assert "the Hub could not be reached" in line
        assert "run `hf download openai/clip-vit-bas config.json`" in line, "a check needs no weights"
    assert "no folder 'a/b/c', and the name is not the id" in mistake(capsys, *command[:2], "a/b/c", *command[3:])


def test_a_folder_before_the_options_is_named_as_it_was_written(demo, tmp_path, capsys):
    words = [demo / "clip-init", demo / "digit", "--use_cpu", "--output_dir", tmp_path / "out"]
    for command in ("score", "embed"):
        line = mistake(capsys, command, *words)
        assert f"at '{demo / 'digit'}': no such folder exists, but there is '{demo / 'digits'}'." in line
        assert "--dataset" not in line
        assert ("error: DATA " in line) == (command == "score")


def test_a_conversion_to_onnx_is_told_where_that_is(capsys):
    line = mistake(capsys, "convert", "clip", "onnx", "--to", "onnx")
    assert "transformers or open_clip, got 'onnx'. scripts/AFTER_TRAINING.md exports the towers to ONNX" in line


def test_embeddings_that_are_missing_are_told_with_the_command_that_writes_them(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model", demo / "clip-init", f"--dataset={demo / 'digits'}?caption_column=caption", "--split", "train"]
    words += ["--teacher_embeddings", "teacher", "--use_cpu", "--max_steps", 1, "--output_dir", tmp_path / "out"]
    for command in ("check", "train"):
        line = mistake(capsys, command, *words)
        assert "there is no folder teacher." in line
    told = line.partition("infcl embed TEACHER ")[2]
    infcl("embed", demo / "clip-init", *shlex.split(told), "--use_cpu")
    infcl("train", *words, "--global_batch_size", 8)
    assert "teacher_loss" in capsys.readouterr().out


def test_a_package_that_is_not_installed_is_one_line_whichever_library_asks_for_it(demo, tmp_path, capsys, monkeypatch):
    words = ["train", "--model", demo / "clip-init", "--dataset", demo / "digits", "--use_cpu"]
    words += ["--output_dir", tmp_path, "--max_steps", 1, "--per_device_train_batch_size", 8]

    def none(*_: Any) -> Any:
        raise ImportError("You need to install `bitsandbytes`")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.integrations.integration_utils, "is_clearml_available", lambda: False)
        assert "pip install clearml" in mistake(capsys, *words, "--report_to", "clearml")
    monkeypatch.setattr(transformers.Trainer, "create_optimizer", none)
    assert "You need to install `bitsandbytes`" in mistake(capsys, *words, "--report_to", "none")


@pytest.mark.parametrize(("dataset", "reason"), [("pairs", "Row 11 "), ("./no/such", "./no/such")])
def test_two_processes_tell_a_mistake_once_and_show_no_traceback_of_ours(small, tmp_path, dataset, reason):
    """A bad image that one of them reads, and a data set that neither finds."""
    (tmp_path / "pairs/train/0011.png").write_text("no image")
    words = ["--dataset", tmp_path / dataset if dataset == "pairs" else dataset]
    code, output = launched(infcl, *small, *words)
    assert code != 0
    lines = [line for line in output.splitlines() if reason in line]
    assert len([line for line in lines if line.startswith("infcl train: error: ")]) == 1, output
    assert len(lines) <= 2, "and the log of the rank that failed"
    assert "hf_infcl/cli" not in output


def test_paths_in_parquet_are_relative_to_the_file_for_every_option_that_names_a_dataset(tmp_path):
    for split in ("train", "test"):
        write_parquet(tmp_path / "table" / split / "0.parquet", [7], picture=["7.png"], label=[0])
        (tmp_path / "table" / split / "7.png").write_bytes(png(7))
    folder = str(tmp_path / "table")
    columns = ColumnOptions(image_column="picture")
    data, guards = DataOptions(dataset=[folder]), GuardOptions(guard_dataset=[folder])
    evaluation = EvaluationOptions(eval_dataset=folder, zero_shot_dataset=folder, class_names=["a"])
    args = InfCLTrainingArguments(str(tmp_path), use_cpu=True)
    opened = [
        training_set(data, columns, args),
        *opening.guard_datasets(columns, guards, evaluation, data).values(),
        *opening.evaluation_datasets(columns, evaluation).values(),
    ]
    assert [number_of(dataset[0]) for dataset in opened] == [7] * 4
