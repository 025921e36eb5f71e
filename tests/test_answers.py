"""The page of answers has the table of the package, with figures that its links prove; commands end with its lines."""

import re
import shlex
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.demo import infcl
from helpers.guides import ROOT

from hf_infcl.encoders.dual_encoder import DualEncoder
from hf_infcl.tools.cli.check import line_of_answer
from hf_infcl.tools.cli.commands import PARSERS
from hf_infcl.tools.planning.answers import ANSWERS, PAGE, TOO_FEW_STEPS, answer_line, choose_answer, table


def test_the_page_has_the_table_of_the_package():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page.count("| I have | write |") == 1
    assert table() in page, f"copy this into the page:\n{table()}"


def section(link: str) -> str:
    """The part of a page that a link names, up to the next heading."""
    path, anchor = link.split("#")
    text = (ROOT / PAGE).parent.joinpath(path).read_text(encoding="utf-8")
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        if re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lower()).replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"{path} has no section {anchor}")


@pytest.mark.parametrize("name", ANSWERS)
def test_every_figure_stands_where_its_link_leads(name):
    links = re.findall(r"\[([^]]*)\]\(([^)]*)\)", ANSWERS[name].gain + ANSWERS[name].price)
    assert links or ANSWERS[name].gain == "not measured"
    for words, link in links:
        figures = re.findall(r"\d[\d,]*(?:\.\d+)?", words)
        assert figures, words
        for figure in figures:
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", section(link)), f"{figure} in {link}"


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_to_be_written_is_accepted(name):
    words = shlex.split(ANSWERS[name].write.replace("torchrun --nproc_per_node 8 -m hf_infcl ...", ""))
    given = ["--dataset", "my/images", "--eval_dataset", "my/images", "--model", "my/clip", "--output_dir", "out"]
    namespace, known = PARSERS["train"]().read([*words, *given])
    assert {word[2:] for word in words if word.startswith("--")} <= known
    assert namespace.output_dir == "out"


@pytest.mark.parametrize(
    ("options", "facts", "name"),
    [
        ({}, {"pairs": None}, "batch"),
        ({}, {"pairs": 500}, "few pairs"),
        ({"freeze": "image", "keep_features": 3}, {"pairs": 50_000}, "pairs"),
        ({}, {"pairs": 5_000_000}, "many pairs"),
        ({"replay_dataset": ["old"]}, {"pairs": 500}, "old pairs"),
        ({"optimizer": "muon"}, {"pairs": 500}, "random weights"),
        ({"optimizer": "muon"}, {"pairs": 20_000_000}, "more"),
        ({"leave_out": "noisy", "gpus": 8}, {"pairs": 500}, "noisy"),
        ({"teacher_embeddings": ["stored"], "leave_out": "noisy"}, {"pairs": 500}, "teacher"),
        ({}, {"pairs": 500, "texts": 3.0}, "several captions"),
        ({"negative_caption_column": "wrong"}, {"pairs": 500}, "swapped words"),
        ({}, {"pairs": 500, "foreign": True}, "languages"),
        ({"freeze": "image"}, {"pairs": 500}, "frozen images"),
        ({"gpu_memory": 8}, {"pairs": 500}, "small GPU"),
        ({"gpus": 2, "gpu_memory": 80}, {"pairs": 500}, "many GPUs"),
        ({"captions_per_image": 3}, {"pairs": 500}, "several captions"),
        ({"leave_out": "0.2"}, {"pairs": 500}, "few pairs"),  # a share, with which nothing was measured
        ({"learning_rate": 1e-3}, {"pairs": 17_000}, "random weights"),  # of AdamW, where Muon is measured to be better
        ({"learning_rate": 1e-3}, {"pairs": 20_000_000}, "more"),
        ({"learning_rate": 5e-5}, {"pairs": 17_000}, "pairs"),
        ({"learning_rate": 1e-3, "lora_rank": 8}, {"pairs": 50_000}, "pairs"),
        ({"learning_rate": 1e-3, "freeze": "text"}, {"pairs": 50_000}, "pairs"),
        ({"optimizer": "muon", "guard_dataset": ["old"]}, {"pairs": 50_000}, "pairs"),  # a checkpoint that knows them
    ],
)
def test_the_answer_that_fits(options, facts, name):
    assert choose_answer(options, **facts) is ANSWERS[name]


@pytest.mark.parametrize(
    ("options", "known", "name"),
    [
        ({}, 500, "several captions"),
        ({"caption_templates": ["a {c}", "the {c}"]}, 500, "few pairs"),  # which say the same
        ({"caption_templates": ["a {c}", "the {c}"]}, None, "pairs"),  # a stream, of which so many were read
        ({"caption_templates": ["a {c}", "the {c}"], "samples_per_epoch": 5_000_000}, None, "many pairs"),
    ],
)
def test_the_answer_for_a_set_that_was_checked(options, known, name):
    facts: Any = types.SimpleNamespace(pairs=known, looks=10_000, tokens=[5] * 20_000, caption_ids=range(10_000))
    pairs = known or options.get("samples_per_epoch")
    expected = answer_line(ANSWERS[name], options, pairs=pairs or 10_000, at_least=pairs is None, texts=2)
    assert "--captions_per_image 3" not in expected, "they have two"
    assert line_of_answer(options, (), facts, []) == expected


@pytest.mark.parametrize(
    ("name", "options", "pairs", "write"),
    [
        ("many GPUs", {"gpus": 4}, None, "torchrun --nproc_per_node 4 -m hf_infcl ..."),
        ("few pairs", {}, 32, "--recipe finetune_alone --global_batch_size 8 --num_train"),
        ("few pairs", {}, 500, "--recipe finetune_alone --global_batch_size 64 --num_train"),
        ("few pairs", {"global_batch": 48}, 500, "--recipe finetune_alone --global_batch_size 48 --num_train"),
        ("few pairs", {"global_batch": 48}, 32, "--recipe finetune_alone --global_batch_size 8 --num_train"),
        ("frozen images", {}, 500, "--recipe lit --global_batch_size 64 --num_train_epochs 13\n"),  # in place of 8,192
        ("frozen images", {"recipe": "lit"}, 50_000, "--recipe lit --global_batch_size 4096\n"),
        ("frozen images", {"recipe": "lit"}, 500_000, "--recipe lit\n"),
        ("frozen images", {"recipe": "lit", "num_train_epochs": 2}, 500_000, "--recipe lit\n"),
        (
            "few pairs",
            {"global_batch": 64},
            120,
            "--recipe finetune_alone --global_batch_size 64 --num_train_epochs 54 ",
        ),
        (
            "pairs",
            {"global_batch": 4096},
            50_000,
            "--recipe finetune_alone --global_batch_size 4096 --num_train_epochs 9\n",
        ),
        ("pairs", {"global_batch": 4096, "epochs": 20.0}, 50_000, "--recipe finetune_alone --global_batch_size 4096\n"),
        ("pairs", {"global_batch": 4096, "epochs": 1.0}, 50_000, "--recipe finetune_alone --global_batch_size 256\n"),
        ("pairs", {"global_batch": 4096, "max_steps": 20}, 50_000, "--recipe finetune_alone --global_batch_size 4096"),
        ("many pairs", {}, 1_000_000, "--recipe finetune_clip --streaming --samples_per_epoch 1000000 --torch_compile"),
        ("many pairs", {"samples_per_epoch": 2_000_000}, 3_000_000, "--samples_per_epoch 2000000 --torch_compile"),
        ("many pairs", {"dataset": ["a/table"]}, 1_000_000, "--recipe finetune_clip --torch_compile"),
        ("old pairs", {"replay_dataset": ["my old"]}, 500, "--guard_dataset 'my old' --num_train_epochs 7\n"),
        ("several captions", {"captions_per_image": 2}, None, "image you have written: --captions_per_image 2\n"),
        ("few pairs", {"num_train_epochs": 200}, 500, "--global_batch_size 64 --num_train_epochs 200 --early"),
        (
            "few pairs",
            {
                "recipe": "finetune_alone",
                "global_batch_size": 64,
                "num_train_epochs": 200.0,
                "early_stopping_patience": 3,
            },
            500,
            "you have written: --recipe finetune_alone --global_batch_size 64 --num_train_epochs 200 --early",
        ),
        ("frozen images", {"num_train_epochs": 200}, 20_000, "--recipe lit --global_batch_size 4096\n"),  # a quarter
        # From random weights a thousand steps in the epochs that were measured, and the batch that leaves two.
        (
            "teacher",
            {"global_batch_size": 128, "optimizer": "muon"},
            2000,
            "--global_batch_size 128 --num_train_epochs 64",
        ),
        ("random weights", {"global_batch": 256}, 500, "--global_batch_size 256 --num_train_epochs 137\n"),
        ("random weights", {"num_train_epochs": 16}, 150_101, "--global_batch_size 1024\n"),
        ("random weights", {"num_train_epochs": 64}, 150_101, "--global_batch_size 4096\n"),
        ("random weights", {}, 50_000, "--global_batch_size 256 --num_train_epochs 6\n"),
    ],
)
def test_an_answer_has_the_numbers_of_the_user(name, options, pairs, write):
    assert write in answer_line(ANSWERS[name], options, options, pairs=pairs)


def test_a_part_of_a_stream_says_nothing_of_the_number_of_steps():
    options = {"global_batch": 4096}
    for read in (3000, 50_000):
        said = answer_line(ANSWERS["pairs"], options, options, pairs=read, at_least=True)
        assert "--global_batch_size 4096\n" in said


@pytest.mark.parametrize("name", ANSWERS)
def test_no_answer_makes_too_few_steps(name):
    """Whatever the recipe says of batch and epochs."""
    for pairs in (30, 500, 3000, 50_000, 5_000_000):
        words = shlex.split(answer_line(ANSWERS[name], pairs=pairs).partition("\n")[0].partition(": ")[2])
        if {"--recipe", "--global_batch_size"}.isdisjoint(words):
            continue  # such an answer changes neither
        files = ["--dataset", "my/images", "--model", "my/clip", "--output_dir", "out"]
        options, known = PARSERS["train"]().read([*words, *files])
        if "max_steps" in known:
            continue
        batch = options.global_batch_size or options.per_device_train_batch_size * options.gradient_accumulation_steps
        steps = options.num_train_epochs * pairs / batch * (2 if options.replay_dataset else 1)
        assert steps >= TOO_FEW_STEPS, (pairs, words)


@pytest.mark.parametrize(
    ("name", "options", "pairs"),
    [
        ("pairs", {"recipe": "lora"}, 50_000),
        ("pairs", {"lora_rank": 8}, 50_000),
        ("many pairs", {"recipe": "finetune_alone"}, 5_000_000),
        ("batch", {"global_batch": 64}, None),
        ("few pairs", {}, 7),
    ],
)
def test_no_answer_contradicts_the_user(name, options, pairs):
    assert answer_line(ANSWERS[name], options, options, pairs=pairs) == ""


def test_plan_and_check_end_with_the_line_that_fits(small: list[Any], tmp_path, capsys):
    _, _, random, *_ = small
    infcl("plan", "--model", random, "--global_batch", 64, "--dataset_size", 70_000)
    assert "\nFor random weights and up to ten million pairs: --optimizer muon" in capsys.readouterr().out
    (model := tmp_path / "model").mkdir()
    shutil.copy(Path(random, "config.json"), model)  # whose weights are not known
    infcl("plan", "--model", model, "--global_batch", 64, "--dataset_size", 70_000)
    printed = capsys.readouterr().out
    assert (
        "\nFor a checkpoint and 70,000 pairs, no old ones: --recipe finetune_alone --global_batch_size 64\n" in printed
    )
    assert "what the checkpoint knew (old), recall@5 on what it is trained on (new); before → after): old 37" in printed
    infcl("plan", "--recipe", "lora", "--model", model, "--dataset_size", 70_000)
    said = capsys.readouterr()
    assert PAGE not in said.out, "which knows no better LoRA"
    assert "Workers that load data" not in said.err, "of this machine, which trains nothing"
    with pytest.raises(SystemExit):
        infcl("check", *small[1:], "--output_dir", tmp_path / "checked")
    printed = capsys.readouterr().out
    assert printed.endswith(f"\n{answer_line(ANSWERS['several captions'], pairs=26)}\n"), "as the digits have"
    assert "](" not in printed


@pytest.mark.parametrize(
    ("build", "is_random"),
    [
        (models.clip, True),
        (models.siglip, True),
        (models.align, True),
        (models.tipsv2, True),
        (models.vision_text_dinov2, False),  # whose towers may come from two checkpoints
    ],
)
def test_a_folder_and_its_model_look_random_alike(tmp_path, build, is_random):
    encoder = DualEncoder(build())
    for step in range(3):
        if step == 1:  # as a training begins: another value for SigLIP alone
            encoder.initialise_sigmoid()
        elif step == 2:
            with torch.no_grad():
                encoder.temperature_parameters[0].add_(0.01)
        encoder.model.save_pretrained(tmp_path)
        name = choose_answer({"model": str(tmp_path)}, pairs=50_000).have
        assert (name == ANSWERS["random weights"].have) == encoder.looks_random() == (is_random and step < 2)


@pytest.mark.parametrize(
    "name", ["random weights", "more", "noisy", "teacher", "several captions", "swapped words", "batch"]
)
def test_what_was_measured_from_random_weights_says_with_which_optimizer(name):
    have, _, gain, *_ = ANSWERS[name]
    assert "random weights" in have + gain
    assert "with AdamW" in gain
    assert "with Muon" in gain


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("from_scratch", "random weights"), ("finetune_clip", "pairs"), ("lit", "frozen images"), ("lora", "pairs")],
)
def test_a_recipe_gets_the_answer_of_its_weights(recipe, name):
    namespace, _ = PARSERS["train"]().read(["--recipe", recipe])
    assert choose_answer(vars(namespace), pairs=200_000) is ANSWERS[name]
