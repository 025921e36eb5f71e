"""Models in OpenCLIP's format are trained and evaluated like others, and trained models are saved in both formats."""

import json
import re
from pathlib import Path

import peft
import pytest
import torch
import transformers
from helpers import models
from helpers.demo import infcl, mistake
from helpers.hub import hub_for_this_process
from helpers.open_clip_models import config, folder_of, know_the_small_tower, letter_pairs, same_weights, tensors
from helpers.processors import clip_processor
from helpers.trainers import arguments

from hf_infcl import InfCLTrainer
from hf_infcl.models import pretrained as folders
from hf_infcl.models.open_clip import load, load_open_clip

WORDS = ["--use_cpu", "--report_to", "none", "--per_device_train_batch_size", 4]
WORDS += ["--save_steps", 1, "--logging_steps", 1]


@pytest.fixture(autouse=True)
def small_tower(monkeypatch):
    know_the_small_tower(monkeypatch)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return letter_pairs(tmp_path / "pairs", 8)


def test_a_repository_of_open_clip_is_trained_saved_and_pushed_in_both_formats(pairs, tmp_path, monkeypatch, capsys):
    source, out = folder_of("SigLIP", tmp_path / "theirs"), tmp_path / "out"
    words = ["--dataset", pairs, "--output_dir", out, *WORDS, "--max_steps", 2]
    pushes = ["--push_to_hub", "--hub_model_id", "me/mine", "--hub_always_push"]
    with hub_for_this_process(monkeypatch, tmp_path / "cache") as hub:
        hub.commits["me/theirs", "main"] = [{path.name: path.read_bytes() for path in source.iterdir()}]
        infcl("train", "--model", "me/theirs", *words, *pushes, "--save_formats", "transformers", "open_clip")
        assert not load("me/mine").conversion, "transformers' files come first"
        trees = hub.commits["me/mine", "main"]
    start, processor = load_open_clip(source)
    assert len(trees) > 2
    trees = [tree for tree in trees if folders.WEIGHTS in tree]
    pushed = [unpacked(tree, tmp_path / f"commit-{number}") for number, tree in enumerate(trees)]
    assert len(pushed) >= 2, "also while it trains"
    for folder in (*pushed, out / "checkpoint-1", out / "checkpoint-2", out):
        model = transformers.AutoModel.from_pretrained(folder)
        assert same_weights(model, load_open_clip(folder)[0])
        assert not same_weights(model, start)
        text = json.loads((folder / folders.CONFIG).read_text())["model_cfg"]["text_cfg"]
        assert text["hf_tokenizer_name"] == "me/mine", "where OpenCLIP looks for it"
        saved = transformers.AutoProcessor.from_pretrained(folder)
        assert saved.tokenizer("A, b")["input_ids"] == processor.tokenizer("a b")["input_ids"]
    card, printed = (out / "README.md").read_text(), capsys.readouterr().out
    (compared,) = re.findall(r"saved formats \| transformers and OpenCLIP. (The embeddings .*) \|", card)
    assert compared in printed
    assert re.search(r"\| converted \| from OpenCLIP's format. Captions are read as they are.* The embeddings", card)
    assert "base_model: me/theirs" in card


def unpacked(tree: dict[str, bytes], folder: Path) -> Path:
    for name, content in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_file_of_the_training_is_evaluated_like_the_folder(pairs, tmp_path):
    source = folder_of("end of text", tmp_path / "theirs")
    saved = {f"module.{name}": tensor for name, tensor in tensors("end of text").items()}
    torch.save({"epoch": 2, "state_dict": saved}, tmp_path / "epoch_2.pt")
    (source / folders.WEIGHTS).unlink()
    torch.save(saved, source / "open_clip_pytorch_model.bin")
    infcl("convert", source, tmp_path / "ours")
    results = {}
    # A file has no tokenizer; its config names the one of the folder.
    named = config("end of text")
    named["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = str(source)
    (tmp_path / "named.json").write_text(json.dumps(named))
    for name, model in {
        "folder": [source],
        "converted": [tmp_path / "ours"],
        "file": [tmp_path / "epoch_2.pt", "--open_clip_model", tmp_path / "named.json"],
    }.items():
        words = ["--eval_dataset", pairs, "--output_dir", tmp_path / name, "--use_cpu", "--report_to", "none"]
        infcl("evaluate", "--model", *model, *words)
        measured = json.loads((tmp_path / name / "eval_results.json").read_text())
        results[name] = {key: value for key, value in measured.items() if "recall" in key or key.endswith("loss")}
    assert results["folder"] == results["converted"] == results["file"]
    assert len(results["file"]) > 4


def test_formats_that_could_not_be_saved_are_refused_before_the_training(tmp_path):
    chosen = arguments(tmp_path, save_formats=["transformers", "open_clip"])
    for wrong in (["open_clip"], ["transformers", "onnx"], []):
        with pytest.raises(ValueError, match="save_formats must be transformers, or"):
            arguments(tmp_path, save_formats=wrong)
    model, _ = load_open_clip(folder_of("CLIP", tmp_path / "theirs"))
    with pytest.raises(ValueError, match="needs the processor"):
        InfCLTrainer(model, chosen, data_collator=lambda items: items)
    with pytest.raises(ValueError, match="needs the model, not model_init"):
        InfCLTrainer(None, chosen, model_init=lambda: model, processing_class=clip_processor())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="OpenCLIP loads no adapters"):
        InfCLTrainer(adapted, chosen, processing_class=clip_processor())
    other = models.BUILD["clipseg"]()
    with pytest.raises(ValueError, match="it is of the type clipseg"):
        InfCLTrainer(other, chosen, processing_class=clip_processor())


def test_adapters_of_a_model_in_the_other_format_are_merged_or_refused(pairs, tmp_path, capsys):
    source = folder_of("CLIP", tmp_path / "theirs")
    words = ["train", "--model", source, "--dataset", pairs, *WORDS, "--max_steps", 1, "--lora_rank", 2]
    line = mistake(capsys, *words, "--output_dir", tmp_path / "adapter")
    assert "Write it in the other format first with `infcl convert`, or pass --lora_merge" in line
    infcl(*words, "--output_dir", tmp_path / "merged", "--lora_merge")
    assert isinstance(transformers.AutoModel.from_pretrained(tmp_path / "merged"), transformers.CLIPModel)
