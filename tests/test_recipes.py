"""The recipes and launch configurations: each trains, with the changes that a small machine needs."""

import json
import math
import os
import re
import socket
import subprocess
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import compare_versions
from helpers.demo import CONFIGS, ROOT, SCRIPTS, accelerate, exit_code, infcl, infcl_launched, run
from helpers.processes import as_on_accelerators, launched
from helpers.shards import write_tar

from hf_infcl import InfCLTrainingArguments
from hf_infcl.cli.commands import PARSERS
from hf_infcl.cli.parser import Parser
from hf_infcl.models.sharding import FSDP_SINCE
from hf_infcl.options.declaring import RECIPES


def changes(small: list[Any], tmp_path: Path, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which a recipe runs on a small machine, for two steps."""
    _, _, model, _, pairs, _, out, *_ = small
    changed = {
        "model": model,
        "output_dir": out,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
    }
    changed |= {"global_batch_size": 8, "per_device_train_batch_size": 4, "dataloader_num_workers": 0}
    if recipe.get("streaming"):
        images = sorted((pairs / "train").glob("*.png"))
        files = [(f"{image.stem}.{kind}", image.read_bytes()) for image in images for kind in ("png", "txt")]
        write_tar(tmp_path / "shards/0.tar", [(n, b"a digit" if n.endswith("txt") else data) for n, data in files])
        changed |= {"dataset": tmp_path / "shards/0.tar"}
    else:
        changed |= {"dataset": pairs, "eval_dataset": pairs}
    changed |= {name: pairs for name in ("replay_dataset", "guard_dataset") if name in recipe}
    if "teacher_embeddings" in recipe:
        changed["teacher_embeddings"] = tmp_path / "teacher"
        words = ["--use_cpu", "--output_dir", tmp_path / "teacher"]
        infcl("embed", model, pairs, *words)
    if "cache_features" in recipe:
        changed["cache_features"] = tmp_path / "features"
    return changed


def as_words(values: Mapping[str, Any]) -> list[str]:
    return [str(word) for name, value in values.items() for word in (f"--{name}", value)]


def logs(out: Path) -> list[dict[str, Any]]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_train(small, tmp_path, name):
    text, out = RECIPES[name].read_text(), tmp_path / "out"
    recipe = yaml.safe_load(text)
    infcl("train", *as_words(changes(small, tmp_path, recipe)), "--recipe", name)
    results = json.loads((out / "all_results.json").read_text())
    assert math.isfinite(results["train_loss"])
    assert ("eval_pairs_loss" in results) == ("streaming" not in recipe)
    rate, card = float(recipe["learning_rate"]), (out / "README.md").read_text()
    assert f"learning rate | {rate:g}, cosine" in card, "the rate is that of the recipe with every batch"
    if "optimizer" in recipe:
        muon = float(recipe["muon_learning_rate"])
        assert re.search(rf"\| updated by Muon \| matrices of layers \(\d+, learning rate {muon:g}\)", card)
    assert len(text.split("model:")[0].splitlines()) >= 4, "it says how it is started and when it is for"
    assert all(entry["learning_rate"] <= rate for entry in logs(out))
    assert [entry.get("replay_samples") for entry in logs(out)] == ([4, 8] if "replay_share" in recipe else [None] * 2)
    assert (out / "average_results.json").exists() == ("average_with_start" in recipe)


# ---- The same options for every command ----


def built(command: str, *words: Any) -> InfCLTrainingArguments:
    """The arguments of a command, as it builds them."""
    parser = PARSERS[command]()
    assert isinstance(parser, Parser)
    args = parser.build(parser.read([str(word) for word in words]))[-1]
    assert isinstance(args, InfCLTrainingArguments)
    return args


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_checked_on_a_machine_without_a_gpu(small, tmp_path, name, capsys):
    recipe = yaml.safe_load(RECIPES[name].read_text())
    changed = changes(small, tmp_path, recipe)
    del changed["use_cpu"], changed["max_steps"]
    words = [*as_words(changed), "--recipe", name, "--check_samples", 4, "--overwrite_output_dir"]
    words += ["--resume_from_checkpoint", ""] if "resume_from_checkpoint" in recipe else []
    if "streaming" not in recipe:
        words += ["--early_stopping_patience", 2]
    assert exit_code("check", *words) in (0, 1), capsys.readouterr().err  # 1 if something spoils the training


SAMPLES = {int: ("2", "0"), float: ("0.5", "0"), bool: ("true", "false")}


def test_no_command_refuses_an_option_that_the_training_takes(tmp_path, capsys):
    base = ["--model", "m", "--dataset", "d", "--eval_dataset", "d", "--output_dir", tmp_path]
    base += ["--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 2]
    tried = 0
    for option, hint in typing.get_type_hints(InfCLTrainingArguments).items():
        is_option = option in InfCLTrainingArguments.__dataclass_fields__ and option != "use_cpu"
        kinds = (hint, *typing.get_args(hint)) if is_option else ()
        for value in [value for kind in kinds for value in SAMPLES.get(kind, ())]:
            try:
                built("train", *base, "--use_cpu", f"--{option}", value)
            except SystemExit:
                continue
            tried += 1
            built("check", *base, f"--{option}", value)
    assert tried > 100


@pytest.mark.parametrize(
    ("of_file", "typed", "complaint"),
    [
        ({"freeze": "image"}, "--patch_dropout 0.5", "exclude each other: a frozen tower"),
        ({"warmup_steps": 5}, "--lr_scheduler_type constant", "type=constant exclude each other"),
        ({"freeze": "image", "cache_features": "c"}, "--augmentation crop", "exclude each other: what is frozen"),
        ({"max_steps": 5}, "--num_train_epochs 2", "no effect with max_steps=5 of mine.yaml. Pass --max_"),
        ({"save_strategy": "epoch"}, "--save_steps 5", "no effect with save_strategy=epoch of mine.yaml."),
        ({"eval_strategy": "epoch"}, "--eval_steps 5", "no effect with eval_strategy=epoch of mine.yaml."),
        ({"torch_compile_mode": "default"}, "--torch_compile false", "no effect with torch_compile_mode=default of"),
        ({"streaming": True, "samples_per_epoch": 99}, "--streaming false", "samples_per_epoch=99 has no effect"),
        ({"resume_from_checkpoint": "auto"}, "--overwrite_output_dir", "resume_from_checkpoint=auto exclude each"),
        ({"optimizer": "muon", "muon_learning_rate": 1}, "--optim adafactor", "optim=adafactor exclude each other"),
        (
            {"global_batch_size": 64},
            "--per_device_train_batch_size 7 --gradient_accumulation_steps 2",
            "is 14. Leave one of them out",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_of_the_command_line_that_a_file_excludes_is_refused(tmp_path, capsys, of_file, typed, complaint):
    base = {"model": "m", "dataset": ["d"], "eval_dataset": "d", "output_dir": str(tmp_path / "out"), "use_cpu": True}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(base | of_file))
    with pytest.raises(SystemExit):
        built("train", tmp_path / "mine.yaml", *typed.split())
    assert complaint in (said := " ".join(capsys.readouterr().err.split()))
    assert "mine.yaml sets " in said or "of mine.yaml" in said


@pytest.mark.parametrize(
    ("typed", "batch"),
    [
        ("", 2048),
        ("--per_device_train_batch_size 16", 2048),
        ("--gradient_accumulation_steps 4", 2048),
        ("--global_batch_size 512", 512),
        ("--global_batch_size 512 --per_device_train_batch_size 64", 512),
    ],
)
def test_the_command_line_wins_over_a_recipe_and_one_factor_divides_its_batch(small, tmp_path, capsys, typed, batch):
    _, _, model, *_ = small
    words = ["--recipe", "finetune_clip", "--model", model, "--dataset", "d", "--output_dir", tmp_path, *typed.split()]
    args = built("train", *words, "--use_cpu")
    assert args.global_batch_size == batch
    assert args.divides_by_itself == ("per_device" not in typed and "accumulation" not in typed)


def test_a_factor_that_does_not_divide_the_batch_of_a_recipe_is_refused(tmp_path, capsys):
    words = ["--recipe", "finetune_clip", "--dataset", "d", "--output_dir", tmp_path, "--use_cpu"]
    with pytest.raises(SystemExit):
        built("train", *words, "--per_device_train_batch_size", 100)
    assert "2,048 is no multiple of per_device_train_batch_size=100" in (said := capsys.readouterr().err)
    assert "Choose 2,000 or 2,100, or leave per_device_train_batch_size out." in said


def test_options_of_one_file_that_exclude_each_other_are_refused(tmp_path, capsys):
    options = {"model": "m", "dataset": ["d"], "output_dir": str(tmp_path), "use_cpu": True, "patch_dropout": 0.5}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**options, "freeze": "image"}))
    for words in ([], ["--learning_rate", "1e-3"], ["--freeze", "image", "--patch_dropout", "0.5"]):
        with pytest.raises(SystemExit):
            built("train", tmp_path / "mine.yaml", *words)
        assert "patch_dropout=0.5 and freeze=image exclude each other" in capsys.readouterr().err


def check_trained(out: Path, pairs: int) -> None:
    """Checks that two steps of this many pairs have left a checkpoint that transformers can load."""
    seen = logs(out)
    assert {entry["global_batch_size"] for entry in seen} == {pairs}
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 2
    model, info = transformers.CLIPModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert model.logit_scale.shape == ()


def under(config: str, words: list[str]) -> None:
    """A process of `accelerate launch --config_file`, on a CPU as if it were an accelerator."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    options = ["--config_file", config, "--main_process_port", "0", "script"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    environment = prepare_multi_gpu_env(args)
    os.environ.update({k: v for k, v in environment.items() if k.startswith(("ACCELERATE_", "FSDP_"))})
    as_on_accelerators()
    try:
        infcl_launched(*words)
    finally:
        # One write, so that the lines of two processes stay whole.
        os.write(1, f"Trained under {AcceleratorState().distributed_type.name}\n".encode())


def sharded_training(small: list[Any], tmp_path: Path) -> list[str]:
    """The words of a recipe's training of sharded parameters, without a micro-batch."""
    if compare_versions("accelerate", "<", FSDP_SINCE):
        pytest.skip(f"FSDP needs accelerate {FSDP_SINCE}")
    recipe = RECIPES["finetune_clip"]
    changed = changes(small, tmp_path, yaml.safe_load(recipe.read_text()))
    del changed["per_device_train_batch_size"]
    return ["train", str(recipe), *as_words(changed | {"use_cpu": False, "bf16": False, "global_batch_size": 16})]


def test_launch_configs_train_an_ordinary_checkpoint(small, tmp_path):
    """test_cli.py covers the configuration for DDP. The accumulation follows from the numbers that are given."""
    words = [*sharded_training(small, tmp_path), "--per_device_train_batch_size", "4"]
    code, printed = launched(under, str(CONFIGS / "fsdp2.yaml"), words)
    assert code == 0, printed
    assert printed.count("Trained under FSDP") == 2
    check_trained(tmp_path / "out", 16)


def test_sharded_trainings_of_a_recipe_ask_for_the_micro_batch(small, tmp_path):
    code, printed = launched(under, str(CONFIGS / "fsdp2.yaml"), sharded_training(small, tmp_path))
    assert code != 0
    assert "global_batch_size=16 needs a per_device_train_batch_size under FSDP, where" in printed
    assert "Give it; the accumulation follows." in printed


def test_several_nodes_train_together(small, tmp_path, monkeypatch):
    """Runs the command that the script gives each node, for two nodes of one process each, both on this machine."""
    (tmp_path / "bin").mkdir()
    srun = r"""printf '%s\0' $TORCH_DISABLE_SHARE_RDZV_TCP_STORE "${@}" """
    for name, line in (("scontrol", "echo localhost; echo another"), ("srun", srun)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    recipe = yaml.safe_load(RECIPES["from_scratch"].read_text())
    changed = changes(small, tmp_path, recipe)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_JOB_NODELIST": "localhost,another", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    slurm |= {
        "SLURM_GPUS_ON_NODE": "1",
        "RENDEZVOUS_PORT": str(port),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    script = CONFIGS / "several_nodes.sh"
    done = subprocess.run(
        [script, *as_words(changed)], cwd=ROOT, env=os.environ | slurm, capture_output=True, check=True
    )
    own_store, *command = done.stdout.decode().split("\0")[:-1]
    assert own_store == "1"
    command = command[command.index("torchrun") :]
    where = command.index("-m")
    assert command[where : where + 3] == ["-m", "hf_infcl", "train"]
    monkeypatch.chdir(ROOT)
    code, printed = launched(infcl_launched, *command[where + 2 :], options=command[1:where], nodes=2)
    assert code == 0, printed
    check_trained(tmp_path / "out", 8)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [path.stem for path in sorted(CONFIGS.glob("*.yaml"))])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_launch_configs_train_an_ordinary_checkpoint_on_gpus(demo, tmp_path, config, precision):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    pytest.importorskip("datasets")
    words = ["--model", demo / "clip-init", "--dataset", demo / "digits", "--output_dir", tmp_path, "--max_steps", 4]
    words += ["--per_device_train_batch_size", 32, "--gradient_accumulation_steps", 4, "--learning_rate", "2e-3"]
    words += ["--logging_steps", 1, "--report_to", "none", "--save_steps", 2, "--eval_dataset", demo / "digits"]
    run(*accelerate(config), SCRIPTS / "train.py", *words, *(["--bf16"] if precision == "bf16" else []))
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results["eval_pairs_loss"] > 0
    logs = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    assert losses[-1] < losses[0]
    model, info = transformers.CLIPModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert model.logit_scale.shape == ()
