"""The package accepts the commands and the Python code of the guides, and the links of the guides have targets."""

import ast
import json
import re
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers.demo import infcl
from helpers.guides import ROOT, block_of, blocks, replaced
from transformers.trainer import TRAINING_ARGS_NAME

from hf_infcl.cli.commands import PARSERS
from hf_infcl.options.contrastive import ContrastiveOptions
from hf_infcl.trainer.model_files import NOT_PUSHED

GUIDES = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in ("scripts", "hf_infcl", "model_cards")),
    *(ROOT / "scripts" / name for name in ("ANSWERS.md", "AFTER_TRAINING.md")),
    *(ROOT / "hf_infcl" / package / "README.md" for package in ("data", "loss", "models", "trainer")),
]
TEXT = "\n".join(guide.read_text(encoding="utf-8") for guide in GUIDES)
PAGES = [
    *GUIDES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")),
    *(
        ROOT / folder / "README.md"
        for folder in ("tests", "scripts/benchmarks", "scripts/benchmarks/results", "scripts/real_pairs")
    ),
]


def commands() -> list[str]:
    lines = "\n".join(blocks(TEXT, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.match("infcl (train|evaluate|average|embed) ", line)]


def test_there_are_commands_of_all_kinds():
    kinds = {shlex.split(command)[1] for command in commands()}
    assert kinds == {"train", "evaluate", "average", "embed"}


@pytest.mark.parametrize("line", commands())
def test_every_option_of_a_command_is_known(line):
    _, command, *words = shlex.split(line)
    namespace = (reader := PARSERS[command]()).read(words)
    assert {word[2:] for word in words if word.startswith("--")} <= reader.given
    assert namespace.output_dir


def test_every_option_that_is_named_exists():
    named = set()
    for guide in GUIDES:
        # Options of other programs are in the first column of a table, or contain hyphens.
        text = re.sub(r"^\|[^|]*\|", "", guide.read_text(encoding="utf-8"), flags=re.MULTILINE)
        named |= set(re.findall(r"--[a-z0-9_]+(?![a-z0-9_-])", text))
    # argparse tells them in no other way.
    known = {option for parser in PARSERS.values() for option in parser()._option_string_actions}
    of_launchers = {"--nproc_per_node", "--nnodes", "--config_file", "--num_processes"}
    of_launchers |= {"--node_rank", "--master_addr", "--workers", "--use_gpu"}  # the latter of scripts/ray_train.py
    assert named - known - of_launchers - {"--sort", "--version"} == set()


@pytest.mark.parametrize("block", blocks(TEXT))
def test_python_can_be_parsed(block):
    ast.parse(block)


def test_the_readme_s_training_from_python(demo, small, tmp_path, monkeypatch):
    """Runs with a small model and 26 pairs on a CPU. The fixture `small` creates the folder of pairs."""
    block = block_of("README.md", "import torch\nfrom transformers import AutoModel")
    changes = {
        '"openai/clip-vit-base-patch32"': repr(str(demo / "clip-init")),
        "my/images": str(tmp_path / "pairs"),
        "global_batch_size=256": "global_batch_size=16",
        "bf16=True,": "use_cpu=True, report_to='none',",
    }
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(replaced(block, changes), names)
    assert names["trainer"].args.global_batch_size == 16
    assert "eval_loss" in names["trainer"].state.log_history[-1]
    assert (tmp_path / "outputs/clip/model.safetensors").is_file()


def run_script(path: str, *words: str) -> None:
    with mock.patch.object(sys, "argv", [path, *words]):
        runpy.run_path(str(ROOT / path), run_name="__main__")


def test_the_small_model_of_the_guide_is_made_and_trained(small, tmp_path, monkeypatch, capsys):
    """With two steps. The fixture creates the folder of pairs."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    block = block_of("scripts/README.md", "make_small_clip.py", "bash")
    make, train = block.replace("\\\n", " ").replace("my/images", str(tmp_path / "pairs")).strip().splitlines()
    run_script(*shlex.split(make)[1:])
    assert "random weights for images of 32 pixels" in capsys.readouterr().out
    changes = {"--max_steps 200": "--max_steps 2", "--global_batch_size 64": "--global_batch_size 8"}
    train = replaced(train, changes)
    infcl(*shlex.split(train)[1:], "--report_to", "none")
    printed = capsys.readouterr().out
    assert "The model, its card (README.md) and its results (*.json) are in outputs/small-clip." in printed
    infcl("embed", "outputs/small-clip", tmp_path / "pairs", "--use_cpu", "--output_dir", "outputs/embeddings")


def test_the_student_of_the_guide_is_taught(demo, small, tmp_path, monkeypatch, capsys):
    """By a model that is no larger, in two steps, and made with the default width. The fixture creates the pairs."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    run_script("scripts/make_small_clip.py", "--dataset", str(tmp_path / "pairs"), "--output_dir", "outputs/clip-init")
    block = block_of("scripts/README.md", "--matryoshka_dims", "bash")
    changes = {
        "openai/clip-vit-large-patch14": str(demo / "clip-init"),
        "my/images": str(tmp_path / "pairs"),
        "--global_batch_size 256": "--global_batch_size 8 --max_steps 2",
        "\\\n": " ",
    }
    for line in replaced(block, changes).strip().splitlines():
        infcl(*shlex.split(line)[1:], "--use_cpu", "--report_to", "none")
    assert json.loads(Path("outputs/small/config.json").read_text())["matryoshka_dims"] == [32, 64]
    assert json.loads(Path("outputs/small-64/eval_results.json").read_text())
    capsys.readouterr()
    words = ["--recipe", "distill", "--model", "outputs/clip-init", "--use_cpu"]
    words += ["--dataset", tmp_path / "pairs", "--eval_dataset", tmp_path / "pairs"]
    with pytest.raises(SystemExit):
        infcl("check", *words, "--teacher_embeddings", "outputs/teacher")
    assert re.search(r"Teacher: .*clip-init.*, of \d+ dimensions. They are of these pairs.", capsys.readouterr().out)


def text_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub creates for the headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page):
    for path, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text_of(page)):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_every_message_in_the_table_of_errors_is_said_by_the_package():
    texts = []
    for path in (ROOT / "hf_infcl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    table = (ROOT / "scripts/README.md").read_text(encoding="utf-8").partition("goes wrong")[2]
    of_libraries = "CUDA out of memory", "nan", "Your setup doesn't support bf16/gpu", "Using fsdp only works"
    messages = re.findall(r"^\| (?:the loss is )?`([^`]+)`", table, re.MULTILINE)
    assert len(messages) >= 10
    for message in messages:
        if not message.startswith(of_libraries):
            for part in re.split(r" *\.\.\.,? *|\bN ", message):
                assert any(part in text for text in texts), message


def test_a_copy_of_a_model_leaves_out_what_a_push_leaves_out():
    guide = (ROOT / "scripts/README.md").read_text(encoding="utf-8")
    for command in ("rsync -a", "hf upload me/my-clip"):
        (line,) = [line for line in guide.splitlines() if command in line and "--exclude" in line]
        assert re.findall(r"--exclude '?([^'` ]+)", line) == [*NOT_PUSHED, TRAINING_ARGS_NAME]


def test_the_guide_names_every_option_once_and_the_help_explains_it(capsys):
    guide = (ROOT / "hf_infcl/trainer/README.md").read_text(encoding="utf-8")
    listed = guide.partition("\n## Options\n")[2].partition("Options of `TrainingArguments` that")[0]
    named = re.findall(r"`(\w+)`[,\n ]", listed.partition("explains:")[2])
    assert sorted(named) == sorted(option.name for option in fields(ContrastiveOptions))
    assert all(option.metadata["help"] for option in fields(ContrastiveOptions))


def test_nothing_reads_do_predict_and_the_guide_says_so():
    assert "`--do_predict` does nothing" in TEXT
    assert not [path for path in (ROOT / "hf_infcl").rglob("*.py") if "do_predict" in path.read_text(encoding="utf-8")]
