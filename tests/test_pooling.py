"""Texts that a model does not read to their end are refused; texts that are equal to it for other reasons are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.demo import infcl
from helpers.pictures import write_folder
from helpers.processors import clip_processor
from helpers.trainers import parameters, trainer_for
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers import models as vocabularies

from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.models.model_types import AT_LARGEST, Pooling, SameEmbeddings
from hf_infcl.models.open_clip import convert

BEGIN, END, OTHER = 0, models.VOCABULARY - 2, models.VOCABULARY - 1  # the last was added behind the end
TOWERS = ["aimv2", "clip", "clipseg", "groupvit", "metaclip_2", "owlv2", "owlvit"]


def with_end(kind: str, token: int) -> Any:
    """A model of this type whose config has this eos_token_id."""
    torch.manual_seed(0)
    config = models.BUILD[kind]().config
    config.text_config.eos_token_id = token
    return transformers.AutoModel.from_config(config).eval()


@pytest.mark.parametrize("kind", models.BUILD)
@pytest.mark.parametrize("token", [END, 2, BEGIN, 40], ids=["the end", "old", "the begin", "none"])
def test_of_each_type_what_is_refused_is_what_has_one_embedding(kind, token):
    model = with_end(kind, token)
    encoder = DualEncoder(model)
    assert (encoder.pooling is not None) == (kind in TOWERS)
    for texts in (
        [[BEGIN, 7, 8, 9, END], [BEGIN, 7, 8, 10, END]],
        [[BEGIN, 7, OTHER, 9, END], [BEGIN, 7, OTHER, 10, END]],
        [[BEGIN, 7, OTHER, 9, END], [BEGIN, 8, OTHER, 9, END]],
    ):
        for padding in ([], [1]):
            tokens = torch.tensor([text + padding for text in texts])
            mask = torch.tensor([[1] * 5 + [0] * len(padding)] * 2)
            for inputs in ({"input_ids": tokens, "attention_mask": mask}, {"input_ids": tokens}):
                with torch.no_grad():
                    first, second = encoder._normalised(model.get_text_features(**inputs))
                if torch.allclose(first, second, atol=1e-6):
                    with pytest.raises(ValueError, match=f"the tokenizer ends texts with {END}.*have one embedding"):
                        SameEmbeddings(encoder.pooling).check(**inputs)
                else:
                    SameEmbeddings(encoder.pooling).check(**inputs)


@pytest.mark.parametrize("masked", [True, False])
def test_texts_that_are_equal_for_other_reasons_are_no_fault(masked):
    pooling = Pooling(END)
    texts = torch.tensor(
        [
            [BEGIN, 7, 8, END, 1, 1, 1],  # twice, and once padded with the end
            [BEGIN, 7, 8, END, 1, 1, 1],
            [BEGIN, 7, 8, END, END, END, END],
            [BEGIN, END, 9, END, 1, 1, 1],  # the end token written out in the text
            [BEGIN, END, 10, END, 1, 1, 1],
            [BEGIN, END, 1, 1, 1, 1, 1],
        ]
    )
    mask = torch.tensor([[1] * 4 + [0] * 3] * 5 + [[1, 1] + [0] * 5])
    for found in (pooling, Pooling(2, AT_LARGEST)):
        SameEmbeddings(found).check(texts, mask if masked else None)
    # A padding above the end is behind it.
    padded = torch.tensor([[BEGIN, 7, END, OTHER], [BEGIN, 8, END, OTHER]])
    SameEmbeddings(Pooling(2, AT_LARGEST)).check(padded, torch.tensor([[1, 1, 1, 0]] * 2) if masked else None)


def processor() -> Any:
    """Words of one letter between <s> and </s>, and <new>, a token that was added behind them."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", *"abcdefghijkl", "</s>"])}
    backend = Tokenizer(vocabularies.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("<s>", 1), ("</s>", len(vocabulary) - 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<pad>", "bos_token": "<s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=8, **named)
    tokenizer.add_tokens(["<new>"])
    return transformers.CLIPProcessor(clip_processor().image_processor, tokenizer)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folders of a model for each eos_token_id, and of pairs whose captions begin with the added token or not."""
    folder = tmp_path_factory.mktemp("pooling")
    for token in (2, 14, 20):
        text = {"vocab_size": 32, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": token}
        models.clip_with(text, {}).save_pretrained(folder / str(token))
        processor().save_pretrained(folder / str(token))
    for name, begin in (("new", "<new> "), ("plain", "")):
        for split in ("train", "test"):
            captions = [begin + letters for letters in ("a b", "a c", "d e", "f g", "h i", "j k", "l a", "b l")]
            write_folder(folder / name / split, captions, (16, 16))
    return folder


def words_of(command: str, model: Path, data: Path, out: Path) -> list[Any]:
    sizes = ["--per_device_train_batch_size", 4, "--max_steps", 1, "--report_to", "none"]
    each = {
        "train": ["--model", model, "--dataset", data, *sizes],
        "check": ["--model", model, "--dataset", data, *sizes],
        "evaluate": ["--model", model, "--eval_dataset", data],
        "embed": [model, data, "--split", "train"],
    }
    return [command, *each[command], "--output_dir", out, "--use_cpu", "--dataloader_num_workers", 0]


@pytest.mark.parametrize("command", ["train", "check", "evaluate", "embed"])
def test_each_command_names_the_two_ids_and_the_cure(command, places, tmp_path, capsys):
    for token, data, of_config in (
        (2, "new", "eos_token_id of the model's text_config is 2, by which old configs mean the largest token"),
        (20, "plain", "eos_token_id of the model's text_config is 20"),
    ):
        with pytest.raises((SystemExit, ValueError)) as end:
            infcl(*words_of(command, places / str(token), places / data, tmp_path / f"{token}"))
        captured = capsys.readouterr()
        printed = captured.out + captured.err + str(end.value)
        assert of_config in printed
        assert "the tokenizer ends texts with 14" in printed
        assert "Set eos_token_id to 14" in printed
        assert "If 14 is a part of a word, the tokenizer adds no end token" in printed
        assert getattr(end.value, "code", 1) != 0


@pytest.mark.parametrize(("token", "data"), [(2, "plain"), (14, "new")])
def test_a_model_whose_texts_are_read_is_no_finding(token, data, places, tmp_path, capsys):
    infcl(*words_of("check", places / str(token), places / data, tmp_path))  # exits with 0
    assert "one embedding" not in capsys.readouterr().out
    infcl(*words_of("embed", places / str(token), places / data, tmp_path / "embeddings"))


def test_nothing_is_trained_before_it_is_told(tmp_path):
    data = models.Pairs(40)
    data.tokens[:, 1] = 5  # the first token behind the begin
    trainer = trainer_for(tmp_path, with_end("clip", 5), data)
    before = parameters(trainer)
    with pytest.raises(ValueError, match=r"eos_token_id of the model's text_config is 5.*ends texts with 63"):
        trainer.train()
    assert torch.equal(parameters(trainer), before)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("token", [2, 20])
def test_it_is_not_converted(token, places, tmp_path):
    with pytest.raises(ValueError, match=f"eos_token_id of the model's text_config is {token}, .*ends texts with 14"):
        convert(places / str(token), tmp_path / "theirs", to="open_clip")
    assert not (tmp_path / "theirs").exists()


def test_a_model_with_the_right_end_is_converted_with_an_added_token(places, tmp_path):
    assert "was written" in convert(places / "14", tmp_path / "theirs", to="open_clip")[-1]
