"""Compared with OpenCLIP's own package: embeddings, pictures, texts, folders, and a model that was trained here."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import open_clip_pixels
import pytest
import tokenizers
import torch
import transformers
from helpers import open_clip_models, open_clip_package, texts
from helpers.demo import infcl
from helpers.guides import ROOT, blocks
from helpers.open_clip_models import CASES, DIFFERENCES, LARGEST, config, folder_of, load_processor, of_package, tensors
from helpers.processes import Ranks
from PIL import Image

from hf_infcl import InfCLTrainingArguments
from hf_infcl.data import load_pairs
from hf_infcl.models import open_clip as comparison
from hf_infcl.models import open_clip_inputs as tokenizing
from hf_infcl.models import pretrained as folders
from hf_infcl.models.open_clip import convert, from_open_clip, repaired, to_open_clip
from hf_infcl.models.open_clip_names import transformers_config

GUIDE = (ROOT / "hf_infcl/trainer/README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def package() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that has imported OpenCLIP."""
    if not open_clip_package.is_installed():
        pytest.skip("compares with OpenCLIP, which scripts/environment.sh installs")
    pool = Ranks()
    yield lambda function, *args: pool.run(rank_with_package, 1, function, *args)[0]
    pool.close()


def rank_with_package(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        open_clip = open_clip_package.imported()
        open_clip_models.know_the_small_tower(patch)
        return function(open_clip, *args)


# ---- Embeddings ----


def compare_embeddings(open_clip: Any) -> None:
    for case in CASES:
        for seed in range(2):
            given = tensors(case, seed)
            model, _ = from_open_clip(given, config(case))
            shapes = {name: list(tensor.shape) for name, tensor in of_package(case).state_dict().items()}
            assert shapes == open_clip_models.recorded()[case]["shapes"]
            for cosine, largest in (
                comparison.differences(model, given, config(case)),
                comparison.differences(model, *to_open_clip(model, load_processor(case))),
            ):
                assert cosine > 1 - 1e-6, case
                assert largest < LARGEST, case
    name = "transformer.resblocks.1.attn.in_proj_weight"
    model, _ = from_open_clip(tensors("CLIP"), config("CLIP"))
    exchanged = tensors("CLIP")
    exchanged[name] = exchanged[name].roll(24, dims=0)
    assert comparison.differences(model, exchanged, config("CLIP"))[0] < comparison.ENOUGH


def test_embeddings_of_both_directions_are_those_of_the_package(package):
    package(compare_embeddings)


def compare_configs(open_clip: Any) -> set[str]:
    with pytest.raises(ValueError, match=r"Did you mean .*ViT-B-32"):
        folders.named_config("ViT-B32")
    return {name for name in open_clip.list_models() if is_known(folders.named_config(name))}


def is_known(fields: dict[str, Any]) -> bool:
    try:
        transformers_config(fields)
    except ValueError as error:
        if "OpenCLIP itself" not in str(error):
            raise
        return False
    return True


def test_the_table_of_differences_has_every_config_that_the_package_and_transformers_share(package):
    with DIFFERENCES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = package(compare_configs)
    assert len(known) == 64
    assert Counter(row["config"] for row in rows) == dict.fromkeys(known, 4), "two directions of two seeds"
    assert min(float(row["cosine"]) for row in rows) > 1 - 1e-6
    assert max(float(row["largest"]) for row in rows) < LARGEST


# ---- Folders ----


def compare_inputs(open_clip: Any, case: str, folder: Path) -> None:
    convert(folder_of(case, folder / "theirs"), folder / "ours")
    convert(folder / "ours", folder / "ours", to="open_clip")
    model = transformers.AutoModel.from_pretrained(folder / "ours")
    ours = transformers.AutoProcessor.from_pretrained(folder / "ours", backend="pil")
    for name in ("theirs", "ours"):
        theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder / name}")
        tokenize = open_clip.get_tokenizer(f"local-dir:{folder / name}")
        random = np.random.default_rng(0)
        images = [Image.fromarray(random.integers(0, 256, (h, 20, 3), dtype=np.uint8)) for h in (20, 25, 30)]
        words = ["a b c", "  a b_c d  "] if case == "SigLIP" else ["a b c", "  a   b c d  "]
        batch = ours(text=words, images=images, padding="max_length", truncation=True, return_tensors="pt")
        pixels, ids = torch.stack([transform(image) for image in images]), tokenize(words)
        torch.testing.assert_close(batch["pixel_values"], pixels, atol=1e-5, rtol=0)
        assert torch.equal(batch["input_ids"], ids)
        with torch.no_grad():
            output = model(pixel_values=pixels, input_ids=ids)
            both = theirs.eval().encode_image(pixels, normalize=True), theirs.encode_text(ids, normalize=True)
        torch.testing.assert_close((output.image_embeds, output.text_embeds), both, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", ["CLIP", "SigLIP"])
def test_the_package_loads_a_folder_with_the_same_pixels_tokens_and_embeddings(package, case, tmp_path):
    package(compare_inputs, case, tmp_path)


def recalls_of_package(open_clip: Any, folder: Path, pairs: Path) -> dict[str, float]:
    """Recalls with the package's loader, transform and tokenizer, and ranks by sorting."""
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    rows = load_pairs(str(pairs), split="test")
    with torch.no_grad():
        images = model.eval().encode_image(torch.stack([transform(row["image"]) for row in rows]), normalize=True)
        words = model.encode_text(tokenize([row["caption"] for row in rows]), normalize=True)
    logits = images @ words.T
    first = torch.arange(len(rows))[:, None]
    return {
        f"eval_pairs_{name}_retrieval_recall@{k}": (scores.topk(k).indices == first).any(1).double().mean().item()
        for name, scores in (("text", logits), ("image", logits.T))
        for k in (1, 5)
    }


def test_a_model_trained_here_has_the_same_recalls_with_the_package_s_loader(package, tmp_path):
    pairs = open_clip_models.letter_pairs(tmp_path / "pairs", 40)
    source, out = folder_of("end of text", tmp_path / "theirs"), tmp_path / "out"
    words = ["--dataset", pairs, "--eval_dataset", pairs, "--use_cpu", "--report_to", "none"]
    words += ["--per_device_train_batch_size", 8, "--learning_rate", 1e-3, "--max_steps", 2]
    infcl("train", "--model", source, *words, "--output_dir", out, "--save_formats", "transformers", "open_clip")
    measured = json.loads((out / "eval_results.json").read_text())
    found = package(recalls_of_package, out, pairs)
    assert 0 < found["eval_pairs_text_retrieval_recall@5"] < 1, "recalls that say something"
    assert {name: round(one, 4) for name, one in found.items()} == {name: round(measured[name], 4) for name in found}


# ---- Pixels ----


def test_pictures_have_the_package_s_pixels_as_the_table_of_pixels_says(package):
    with open_clip_pixels.PIXELS.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    for row, now in zip(table, package(open_clip_pixels.rows, 2), strict=True):
        assert [row[name] for name in list(now)[:3]] == list(now.values())[:3]
        for name in ("within_1", "shifted"):
            assert (row[name] == row["number"]) == (now[name] == 2), (name, row, now)
        cropped = row["resize_mode"] == "shortest" and row["pictures"] == "sizes of 3 mod 4"
        assert (now["shifted"] == 2) == cropped
        assert (now["within_1"] == 2) == (row["pictures"] in open_clip_pixels.ALIKE and not cropped)


# ---- Texts ----


def compare_texts(open_clip: Any, folder: Path) -> tuple[Counter, Counter]:
    """The kinds of texts whose ids differ, as they are and repaired."""
    rows = texts.drawn(154)
    _, written = zip(*rows, strict=True)
    clip = tokenizing.prepared(tokenizing.clip_tokenizer(), {"context_length": 77, "vocab_size": 49408})
    pairs = [(clip, open_clip.get_tokenizer("ViT-B-32"), 0)]
    trained = tokenizers.SentencePieceUnigramTokenizer()
    trained.train_from_iterator(
        [text.lower() for text in written], 9000, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, **special).save_pretrained(folder)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    fields = {"hf_tokenizer_name": ".", "tokenizer_kwargs": {"clean": "canonicalize"}, "vocab_size": len(loaded)}
    siglip = tokenizing.prepared(loaded, fields | {"context_length": 64, "no_causal_mask": True})
    pairs.append((siglip, open_clip.tokenizer.HFTokenizer(str(folder), context_length=64, clean="canonicalize"), 0))
    raw, changed = Counter(), Counter()
    for ours, theirs, pad in pairs:
        length = ours.model_max_length
        expected = theirs(list(written)).tolist()
        for counted, change in ((raw, str), (changed, repaired)):
            ids = ours([change(text) for text in written], truncation=True)["input_ids"]
            padded = [row + [pad] * (length - len(row)) for row in ids]
            counted.update(kind for (kind, _), a, b in zip(rows, padded, expected, strict=True) if a != b)
    return raw, changed


def test_two_thousand_texts_have_the_package_s_tokens_if_they_are_repaired_as_it_does(package, tmp_path):
    raw, changed = package(compare_texts, tmp_path)
    assert not texts.PLAIN & raw.keys()
    assert set(raw) >= {"HTML", "quotes", "mojibake", "control characters", "other scripts"}
    assert set(changed) <= {"special tokens"}


# ---- The defaults of its training ----


def defaults_of_training(open_clip: Any) -> dict[str, Any]:
    from open_clip_train.params import parse_args

    return vars(parse_args(["--model", "ViT-B-32"]))


def test_the_guide_names_the_defaults_of_openclip_s_training(package):
    """Whoever switches gets another training otherwise."""
    theirs = package(defaults_of_training)
    (block,) = [text for text in blocks(GUIDE, "bash") if "--adam_beta2" in text]
    args = transformers.HfArgumentParser(InfCLTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", *block.replace("\\\n", "").split()]
    )[0]
    assert (args.learning_rate, args.weight_decay) == (theirs["lr"], theirs["wd"])
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (theirs["beta1"], theirs["beta2"], theirs["eps"])
    assert (args.warmup_steps, args.num_train_epochs) == (theirs["warmup"], theirs["epochs"])
    assert (args.lr_scheduler_type, args.max_grad_norm) == (theirs["lr_scheduler"], theirs["grad_clip_norm"] or 0)
    own = InfCLTrainingArguments("out", use_cpu=True)
    shown = (own.learning_rate, own.adam_beta2, own.adam_epsilon, own.weight_decay, own.warmup_steps)
    assert (*shown, own.lr_scheduler_type, own.max_grad_norm) == (5e-5, 0.999, 1e-8, 0, 0, "linear", 1), "ours"
    assert own.num_train_epochs == 3
