"""Named benchmarks: from a name to the figures that CLIP_benchmark defines for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import models
from helpers.benchmarks import NAMES, TEMPLATES, coloured, write_classes, write_retrieval, write_sugarcrepe
from helpers.demo import infcl
from helpers.evaluation import discerning
from helpers.processors import clip_processor
from helpers.trainers import trainer_for
from PIL import Image

from hf_infcl.benchmarks import benchmark_sets
from hf_infcl.benchmarks.names import GROUPS

SETS = ["cifar10", "voc2007_multilabel", "mscoco_captions", "sugarcrepe"]


def small_clip() -> transformers.CLIPModel:
    """A random CLIP that tells the processor's texts apart."""
    torch.manual_seed(0)
    text = {**models.TEXT, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config=models.VISION, projection_dim=12)
    return discerning(transformers.CLIPModel(config)).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    small_clip().save_pretrained(folder)
    clip_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A folder of local copies, with what they contain."""
    folder = tmp_path_factory.mktemp("benchmarks")
    subsets = [name.partition("/")[2] for name in GROUPS["sugarcrepe"]]
    return {
        "folder": folder,
        "classes": write_classes(folder / "wds_vtab-cifar10"),
        "labels": write_classes(folder / "wds_voc2007_multilabel", several=True),
        "captions": write_retrieval(folder / "wds_mscoco_captions"),
        "choices": write_sugarcrepe(folder / "sugarcrepe", subsets),
    }


def of_images(numbers: range, folder: Path) -> torch.Tensor:
    """Normalised embeddings [N, D] by transformers' own model and processor."""
    pictures = []
    for number in numbers:
        (folder / "one.png").write_bytes(coloured(number))
        pictures.append(Image.open(folder / "one.png").copy())
    pixels = clip_processor().image_processor(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return F.normalize(small_clip().get_image_features(pixel_values=pixels).pooler_output, dim=-1)


def of_texts(texts: list[str]) -> torch.Tensor:
    tokens = clip_processor().tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return F.normalize(small_clip().get_text_features(**inputs).pooler_output, dim=-1)


def expected(written: dict[str, Any], folder: Path) -> dict[str, float]:
    """The figures by their definitions, image by image and class by class."""
    classifier = torch.stack(
        [F.normalize(of_texts([t.replace("{c}", name) for t in TEMPLATES]).mean(0), dim=-1) for name in NAMES]
    )
    scores = of_images(range(9), folder) @ classifier.T
    labels, flags = written["classes"], written["labels"]
    top = [row.argsort(descending=True).tolist() for row in scores]
    right = torch.tensor([found[0] == label for found, label in zip(top, labels, strict=True)]).double()
    found = {
        "vtab_cifar10_acc1": right.mean().item(),
        "vtab_cifar10_acc5": sum(label in t[:5] for t, label in zip(top, labels.tolist(), strict=True)) / 9,
        "vtab_cifar10_mean_per_class_recall": torch.stack([right[labels == c].mean() for c in range(6)]).mean().item(),
    }
    precisions = []
    for c in range(6):
        order = scores[:, c].argsort(descending=True).tolist()
        places = [place for place, row in enumerate(order, 1) if flags[row, c]]
        precisions.append(sum(n / place for n, place in enumerate(places, 1)) / max(len(places), 1))
    found["voc2007_multilabel_mean_average_precision"] = sum(precisions) / 6
    captions = [caption for row in written["captions"] for caption in row]
    scores = of_texts(captions) @ of_images(range(100, 106), folder).T  # [30, 6]
    for k in (1, 5):
        hits = [n // 5 in row.topk(k).indices.tolist() for n, row in enumerate(scores)]
        found[f"mscoco_captions_image_retrieval_recall@{k}"] = sum(hits) / 30
        hits = [any(n // 5 == row for n in column.topk(k).indices.tolist()) for row, column in enumerate(scores.T)]
        found[f"mscoco_captions_text_retrieval_recall@{k}"] = sum(hits) / 6
    images = of_images(range(200, 205), folder)
    better = [
        (image @ of_texts([right]).T > image @ of_texts([wrong]).T).item()
        for image, (right, wrong) in zip(images, written["choices"], strict=True)
    ]
    for name in GROUPS["sugarcrepe"]:
        found[f"{name.replace('/', '_')}_text_acc"] = sum(better) / 5
    return {f"eval_{name}": value for name, value in found.items()}


def test_a_command_measures_benchmarks_by_name(checkpoint, written, tmp_path, capsys):
    words = ["evaluate", "--model", checkpoint, "--output_dir", tmp_path, "--use_cpu", "--report_to", "none"]
    infcl(*words, "--per_device_eval_batch_size", 4, "--benchmark", *SETS, "--benchmark_folder", written["folder"])
    found = json.loads((tmp_path / "eval_results.json").read_text())
    by_definition = expected(written, tmp_path)
    assert {name: found[name] for name in by_definition} == pytest.approx(by_definition, abs=1e-6)
    assert len(set(by_definition.values()) - {0, 1}) > 5, "figures that a mistake would change"
    assert found["eval_mean_sugarcrepe"] == pytest.approx(by_definition["eval_sugarcrepe_add_att_text_acc"])
    assert found["eval_vtab_cifar10_prompts"] == ["a c.", "the c", "a d e."]
    assert found["eval_mscoco_captions_revision"].startswith("sha256:")
    told = capsys.readouterr().out
    assert "vtab_cifar10 is the benchmark vtab/cifar10 (clip-benchmark/wds_vtab-cifar10 at sha256:" in told
    recall = sum(by_definition[f"eval_mscoco_captions_{way}_retrieval_recall@1"] for way in ("image", "text")) / 2
    lines = [line.split() for line in told.splitlines()]
    assert ["mscoco_captions", f"{100 * recall:.2f}%", "mean", "recall@1"] in lines
    assert any(line[:2] == ["mean_sugarcrepe", f"{100 * found['eval_mean_sugarcrepe']:.2f}%"] for line in lines)


def rank_benchmarks(rank: int, world_size: int, folder: str, benchmarks: str) -> dict[str, float]:
    sets = benchmark_sets(["cifar10", "voc2007_multilabel", "mscoco_captions", "sugarcrepe/add_att"], benchmarks)
    options: dict[str, Any] = {"eval_dataset": sets, "processing_class": clip_processor(), "data_collator": None}
    trainer = trainer_for(folder, small_clip(), per_device_eval_batch_size=2, **options)
    return trainer.evaluate()


def test_figures_are_the_same_on_three_processes(ranks, written, tmp_path):
    by_definition = expected(written, tmp_path)
    for found in ranks.run(rank_benchmarks, 3, str(tmp_path), str(written["folder"])):
        same = {name: value for name, value in by_definition.items() if name in found}
        assert len(same) == 9
        assert {name: found[name] for name in same} == pytest.approx(same, abs=1e-6)
