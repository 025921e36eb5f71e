"""The recipes and launch configurations: each trains, with the changes that a small machine needs."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import compare_versions
from helpers.demo import CONFIGS, ROOT, SCRIPTS, accelerate, infcl, infcl_launched, run
from helpers.processes import as_on_accelerators, launched
from helpers.shards import write_tar

from hf_infcl.cli.parser import RECIPES
from hf_infcl.encoders.sharding import FSDP_SINCE


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
    changed |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "dataloader_num_workers": 0}
    if recipe.get("streaming"):
        images = sorted((pairs / "train").glob("*.png"))
        files = [(f"{image.stem}.{kind}", image.read_bytes()) for image in images for kind in ("png", "txt")]
        write_tar(tmp_path / "shards/0.tar", [(n, b"a digit" if n.endswith("txt") else data) for n, data in files])
        changed |= {"dataset": tmp_path / "shards/0.tar", "torch_compile": False}
    else:
        changed |= {"dataset": pairs, "eval_dataset": pairs}
    changed |= {name: pairs for name in ("replay_dataset", "guard_dataset") if name in recipe}
    if "teacher_embeddings" in recipe:
        changed["teacher_embeddings"] = tmp_path / "teacher"
        words = ["--use_cpu", "--format", "npy", "--output_dir", tmp_path / "teacher"]
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
    assert ("eval_pairs_loss" in results) == ("eval_dataset" in recipe)
    rate = float(recipe["learning_rate"])
    if "learning_rate_batch_size" in recipe:
        rate *= 8 / recipe["learning_rate_batch_size"]
    assert f"learning rate | {rate:g}, cosine" in (out / "README.md").read_text()
    assert len(text.split("model:")[0].splitlines()) >= 4, "it says how it is started and when it is for"
    assert all(entry["learning_rate"] <= rate for entry in logs(out))
    assert [entry.get("replay_samples") for entry in logs(out)] == ([4, 8] if "replay_share" in recipe else [None] * 2)
    assert (out / "average_results.json").exists() == ("average_with_start" in recipe)


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
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    options = ["--config_file", config, "--main_process_port", "0", "script"]
    args, config_file, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(config_file.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
    os.environ.update({k: v for k, v in environment.items() if k.startswith(("ACCELERATE_", "FSDP_"))})
    as_on_accelerators()
    try:
        infcl_launched(*words)
    finally:
        print("Trained under", AcceleratorState().distributed_type.name)


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero1", "deepspeed_zero2"])
def test_launch_configs_train_an_ordinary_checkpoint(small, tmp_path, name):
    """test_cli.py covers the configuration for DDP."""
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    if name == "fsdp2" and compare_versions("accelerate", "<", FSDP_SINCE):
        pytest.skip(f"FSDP needs accelerate {FSDP_SINCE}")
    recipe = RECIPES["finetune_clip"]
    changed = changes(small, tmp_path, yaml.safe_load(recipe.read_text()))
    changed |= {"use_cpu": False, "bf16": False, "gradient_accumulation_steps": 1}
    words = ["train", str(recipe), *as_words(changed)]
    code, printed = launched(under, str(CONFIGS / f"{name}.yaml"), words)
    assert code == 0, printed
    assert printed.count(f"Trained under {name.rstrip('12').partition('_')[0].upper()}") == 2
    check_trained(tmp_path / "out", 8)


def test_several_nodes_train_together(small, tmp_path, monkeypatch):
    """Runs the command that the script gives each node, for two nodes of one process each, both on this machine."""
    (tmp_path / "bin").mkdir()
    for name, line in (("scontrol", "echo localhost; echo another"), ("srun", r"printf '%s\0' \"$@\"")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n".replace('\\"', '"'))
        (tmp_path / "bin" / name).chmod(0o755)
    recipe = yaml.safe_load(RECIPES["from_scratch"].read_text())
    changed = changes(small, tmp_path, recipe) | {"gradient_accumulation_steps": 1}
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
    command = done.stdout.decode().split("\0")[:-1]
    where = command.index("-m")
    assert command[0] == "torchrun"
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
    if config.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
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
