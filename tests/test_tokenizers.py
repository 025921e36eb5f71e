"""The tokenizer is the model's, and pads where its text tower does not read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.demo import mistake
from helpers.pictures import write_folder
from helpers.processors import END, clip_processor, siglip_processor
from helpers.trainers import trainer_for

from hf_infcl import ContrastiveCollator
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.models.model_types import fit_tokenizer
from hf_infcl.models.open_clip import load

OF_VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")


def saved(folder: Path, **options: Any) -> Path:
    models.clip(end=END).save_pretrained(folder)
    clip_processor(**options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose folder lacks the vocabulary of its CLIPTokenizer, and pictures."""
    made = tmp_path_factory.mktemp("folder")
    saved(made / "model")
    transformers.CLIPTokenizer().save_pretrained(made / "model")
    for name in OF_VOCABULARY:
        (made / "model" / name).unlink(missing_ok=True)
    write_folder(made / "pictures", [f"{letter} b" for letter in "abcdefghijkl"])
    return made


@pytest.mark.parametrize("command", ["train", "check", "evaluate", "embed", "score", "convert", "average"])
def test_a_checkpoint_without_its_vocabulary_is_refused(folder, tmp_path, capsys, command):
    model, data, out = folder / "model", folder / "pictures", ["--output_dir", tmp_path / "out"]
    words = {
        "train": ["--model", model, "--dataset", data, *out, "--use_cpu", "--bf16", "false"],
        "check": ["--model", model, "--dataset", data, *out],
        "evaluate": ["--model", model, "--eval_dataset", data, *out, "--use_cpu"],
        "embed": [model, "--dataset", data, *out, "--use_cpu"],
        "score": [model, data, *out, "--use_cpu"],
        "convert": [model, tmp_path / "out", "--to", "open_clip"],
        "average": [model, model, *out],
    }[command]
    said = mistake(capsys, command, *words)
    assert "The tokenizer, a CLIPTokenizer, has 0 words beside its special tokens, and the model 64 token" in said
    assert "Copy the files of its vocabulary (tokenizer.json, or vocab.json and merges.txt)" in said
    assert not any(Path(tmp_path).glob("out/*.safetensors"))


@pytest.mark.parametrize("kind", ["BertTokenizer", "XLMRobertaTokenizer", "T5Tokenizer", "GemmaTokenizer"])
def test_whatever_transformers_makes_of_no_vocabulary_is_refused(tmp_path, kind):
    processor = clip_processor()
    processor.tokenizer = getattr(transformers, kind)()
    with pytest.raises(ValueError, match=f"a {kind}, has [01] words beside its special tokens"):
        trainer_for(tmp_path, data_collator=None, processing_class=processor)
    with pytest.raises(ValueError, match="so it is not the tokenizer of this model"):
        trainer_for(tmp_path, data_collator=ContrastiveCollator(processor, 6))


def test_another_model_s_tokenizer_is_refused():
    config = transformers.CLIPConfig(text_config={"vocab_size": 49408})
    with pytest.raises(ValueError, match="has 26 words beside its special tokens, and the model 49,408 token"):
        fit_tokenizer(clip_processor().tokenizer, config)


@pytest.mark.parametrize("kind", models.BUILD)
def test_an_embedding_does_not_depend_on_its_batch_if_the_tokenizer_pads_on_the_left(kind, tmp_path):
    model = models.BUILD[kind]().eval()
    processor = siglip_processor() if kind.startswith("siglip") else clip_processor()
    processor.tokenizer.padding_side = "left"
    collator = ContrastiveCollator.for_model(processor, model.config)
    encoder, end = DualEncoder(model), models.VOCABULARY - 1
    with torch.no_grad():
        together, alone = (
            encoder.encode_texts({**one, "input_ids": one["input_ids"].where(one["input_ids"] != END, end)})
            for one in map(collator.tokenize, (["a", "a b c d"], ["a"]))
        )
    torch.testing.assert_close(together[:1], alone)
    processor.save_pretrained(tmp_path)
    side = transformers.AutoTokenizer.from_pretrained(tmp_path).padding_side
    assert side == ("left" if kind.startswith("siglip") else "right"), "SigLIP reads the last position"


def test_a_tower_of_one_s_own_keeps_the_side(caplog):
    tokenizer = clip_processor(padding_side="left").tokenizer
    fit_tokenizer(tokenizer, None)
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    model = saved(tmp_path / "model")
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match=rf"{name} is a pointer of Git LFS in place of the file: run `git lfs pull`"):
        load(str(model))
