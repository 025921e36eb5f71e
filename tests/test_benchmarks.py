"""Named benchmarks: from a name to the figures that CLIP_benchmark defines for it."""

import importlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from helpers import models, open_clip_package
from helpers.benchmarks import (
    NAMES,
    TEMPLATES,
    coloured,
    write_classes,
    write_retrieval,
    write_sugarcrepe,
    write_xm3600,
)
from helpers.demo import infcl
from helpers.evaluation import discerning
from helpers.hub import sha_of
from helpers.pictures import write_folder
from helpers.processors import clip_processor
from helpers.shards import write_tar
from helpers.trainers import trainer_for
from huggingface_hub import ModelCard, constants
from PIL import Image

from hf_infcl.cli.benchmarks import (
    BENCHMARKS,
    GROUPS,
    OF_CLIP_BENCHMARK,
    benchmark_key,
    benchmark_sets,
    expanded,
)

SETS = ["cifar10", "voc2007_multilabel", "mscoco_captions", "sugarcrepe", "sugarcrepe++", "xm3600/sw"]


def small_clip() -> transformers.CLIPModel:
    """A random CLIP that tells the processor's texts apart."""
    return discerning(models.clip_with({"eos_token_id": 1, "pad_token_id": 0}, {})).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    small_clip().save_pretrained(folder)
    clip_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A folder of local copies, with what they contain."""
    folder = tmp_path_factory.mktemp("benchmarks") / "copies [v1]"  # which is no pattern
    subsets = {group: [name.partition("/")[2] for name in GROUPS[group]] for group in ("sugarcrepe", "sugarcrepe++")}
    return {
        "folder": folder,
        "classes": write_classes(folder / "wds_vtab-cifar10"),
        "labels": write_classes(folder / "wds_voc2007_multilabel", several=True),
        "captions": write_retrieval(folder / "wds_mscoco_captions"),
        "choices": {group: write_sugarcrepe(folder / group, names) for group, names in subsets.items()},
        "sw": write_xm3600(folder / "xm3600", ["de", "sw"])["sw"],
    }


def pixels_of(numbers: range, folder: Path) -> torch.Tensor:
    pictures = []
    for number in numbers:
        (folder / "one.png").write_bytes(coloured(number))
        pictures.append(Image.open(folder / "one.png").copy())
    return clip_processor().image_processor(pictures, return_tensors="pt")["pixel_values"]


def of_images(numbers: range, folder: Path) -> torch.Tensor:
    """Normalised embeddings [N, D] by transformers' own model and processor."""
    with torch.no_grad():
        output = small_clip().get_image_features(pixel_values=pixels_of(numbers, folder))
    return F.normalize(output.pooler_output, dim=-1)


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
    for name, first, rows in (("mscoco_captions", 100, written["captions"]), ("xm3600_sw", 300, written["sw"])):
        image_of = [image for image, captions in enumerate(rows) for _ in captions]
        scores = (
            of_texts([caption for captions in rows for caption in captions])
            @ of_images(range(first, first + 6), folder).T
        )  # [captions, 6]
        for k in (1, 5):
            hits = [image in row.topk(k).indices.tolist() for image, row in zip(image_of, scores, strict=True)]
            found[f"{name}_image_retrieval_recall@{k}"] = sum(hits) / len(hits)
            hits = [image in {image_of[n] for n in column.topk(k).indices} for image, column in enumerate(scores.T)]
            found[f"{name}_text_retrieval_recall@{k}"] = sum(hits) / 6
    images = of_images(range(200, 205), folder)
    for group, rows in written["choices"].items():
        scores = [image @ of_texts(captions).T for image, captions in zip(images, rows, strict=True)]
        better = [bool((of_one[:-1] > of_one[-1]).all()) for of_one in scores]
        for name in GROUPS[group]:
            found[f"{benchmark_key(name)}_text_acc"] = sum(better) / 5
    return {f"eval_{name}": value for name, value in found.items()}


class Batches(list):
    """What CLIP_benchmark takes for a data loader."""

    dataset = SimpleNamespace(classes=NAMES)


class Encoders:
    """What CLIP_benchmark takes for a model, with its tokenizer, whose tensors are both of transformers' in one."""

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        return small_clip().get_image_features(pixel_values=pixels).pooler_output

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        ids, mask = tokens.unbind(1)
        return small_clip().get_text_features(input_ids=ids, attention_mask=mask).pooler_output

    def tokenize(self, texts: list[str]) -> torch.Tensor:
        tokens = clip_processor().tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return torch.stack([tokens["input_ids"], tokens["attention_mask"]], dim=1)


@pytest.mark.skipif(
    not open_clip_package.FOLDER.is_dir(), reason="clip_benchmark is in the project's environment alone"
)
def test_figures_are_those_of_clip_benchmarks_own_functions(written, tmp_path):
    names = ("zeroshot_classification", "zeroshot_retrieval", "image_caption_selection")
    with mock.patch.object(sys, "path", [*sys.path, str(open_clip_package.FOLDER)]):
        classes, pairs, choices = (importlib.import_module(f"clip_benchmark.metrics.{name}") for name in names)
    model, of_all = Encoders(), {"device": "cpu", "amp": False}
    with_prompts = {"classnames": NAMES, "templates": TEMPLATES, **of_all}
    found = {}
    for name, labels in (("vtab_cifar10", written["classes"]), ("voc2007_multilabel", written["labels"])):
        batches = Batches([(pixels_of(range(9), tmp_path), labels)])
        # It converts arrays of one number, which numpy 2.4 refuses.
        with mock.patch.object(classes, "float", lambda array: array.item(), create=True):
            found[name] = classes.evaluate(model, batches, model.tokenize, **with_prompts)
    for name, first, rows in (("mscoco_captions", 100, written["captions"]), ("xm3600_sw", 300, written["sw"])):
        batches = Batches([(pixels_of(range(first, first + 6), tmp_path), rows)])
        found[name] = pairs.evaluate(model, batches, model.tokenize, recall_k_list=[1, 5], **of_all)
    batches = Batches([(pixels_of(range(200, 205), tmp_path), written["choices"]["sugarcrepe"])])
    measured = choices.evaluate(model, batches, model.tokenize, **of_all)
    found["sugarcrepe_add_att"] = {"text_acc": measured["text_acc"]}
    theirs = {f"eval_{key}_{name}": value for key, one in found.items() for name, value in one.items()}
    ours = expected(written, tmp_path)
    assert len(theirs) == 13
    assert theirs == pytest.approx({name: ours[name] for name in theirs}, abs=1e-6)


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
    sets = benchmark_sets([*SETS[:3], "sugarcrepe/add_att", "sugarcrepe++/swap_obj", "xm3600/sw"], benchmarks)
    options: dict[str, Any] = {"eval_dataset": sets, "processing_class": clip_processor(), "data_collator": None}
    trainer = trainer_for(folder, small_clip(), per_device_eval_batch_size=2, **options)
    return trainer.evaluate()


def test_figures_are_the_same_on_three_processes(ranks, written, tmp_path):
    by_definition = expected(written, tmp_path)
    for found in ranks.run(rank_benchmarks, 3, str(tmp_path), str(written["folder"])):
        same = {name: value for name, value in by_definition.items() if name in found}
        assert len(same) == 14
        assert {name: found[name] for name in same} == pytest.approx(same, abs=1e-6)


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_hub_s_sets_are_read_from_its_cache_with_their_commit(hub, written, monkeypatch):
    folder, repository = written["folder"] / "wds_vtab-cifar10", ("datasets/clip-benchmark/wds_vtab-cifar10", "main")
    tree = tree_of(folder)
    hub.commits[repository] = [{**tree, "train/0.tar": b"not needed", "classnames.txt": b"a\nb\nc\nd\ne\nf\n"}]
    (first,) = benchmark_sets(["cifar10"]).values()
    assert first.benchmark.revision == sha_of(hub.commits[repository][-1])
    assert not (first.benchmark.folder / "train").exists()
    hub.commits[repository].append(tree)
    (second,) = benchmark_sets(["vtab/cifar10"]).values()
    assert second.benchmark.revision == sha_of(tree) != first.benchmark.revision
    assert (first.class_names[0], second.class_names) == ("a", NAMES)
    assert [second[row]["label"] for row in range(9)] == written["classes"].tolist()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (offline,) = benchmark_sets(["cifar10"]).values()
    assert offline.benchmark == second.benchmark


def test_a_download_that_is_not_whole_is_told(hub, written):
    tree = tree_of(written["folder"] / "wds_vtab-cifar10")
    hub.commits["datasets/clip-benchmark/wds_vtab-cifar10", "main"] = [tree]
    hub.shortened.add("test/1.tar")
    with pytest.raises(ValueError, match=r"^The benchmark vtab/cifar10: .*wds_vtab-cifar10 could not be .*1.tar"):
        benchmark_sets(["cifar10"])
    hub.shortened.clear()
    del tree["test/0.tar"]
    with pytest.raises(ValueError, match=r"test lacks 1 of 2 shards: 0.tar"):
        benchmark_sets(["cifar10"])
    with pytest.raises(ValueError, match=r"clip-benchmark/wds_imagenet1k could not be downloaded.*--benchmark_folder"):
        benchmark_sets(["imagenet1k"])


def test_names_and_groups_are_those_of_clip_benchmark():
    assert len(OF_CLIP_BENCHMARK) == 41 + 7
    assert len(BENCHMARKS) == 41 + 7 + 5 + 36
    assert [len(GROUPS[group]) for group in ("vtab", "vtab+", "retrieval", "sugarcrepe")] == [19, 36, 3, 7]
    assert expanded(["retrieval", "flickr8k", "flowers"]) == [*GROUPS["retrieval"], "vtab/flowers"]
    with pytest.raises(ValueError, match=r"no benchmark 'imagnet1k'. Did you mean imagenet1k"):
        expanded(["imagnet1k"])


def replace_text(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "classnames.txt").unlink(), "has no classnames.txt"),
        (replace_text("zeroshot_classification_templates.txt", "a {c}\na photo\n"), "must have one {c}, not 'a photo'"),
        (replace_text("classnames.txt", "a\nb\n"), r"holds \[2, 3, 4, 5\], but there are 2 class names"),
        (replace_text("dataset_type.txt", "captioning"), "says 'captioning', which is none of"),
        (replace_text("dataset_type.txt", "retrieval"), "No caption was found|must have one image and a .txt"),
        (replace_text("test/nshards.txt", "many"), "must hold the number of shards, not 'many'"),
        (replace_text("test/nshards.txt", "0"), "must hold the number of shards, not '0'"),
        (replace_text("test/nshards.txt", "1000000000000"), "lacks 999,999,999,998 of .* shards: 2.tar, 3.tar, "),
        (replace_text("test/nshards.txt", "9" * 5000), "must hold the number of shards, not '9{36}'"),
        (lambda folder: (folder / "test/1.tar").rename(folder / "test/01.tar"), "lacks 1 of 2 shards: 1.tar. Download"),
        (lambda folder: (folder / "test/1.tar").write_bytes(b"x" * 700), "1.tar' is damaged"),
        (shutil.rmtree, "has no folder wds_mine"),
    ],
)
def test_a_set_that_is_not_as_it_should_be_is_told(tmp_path, damage, message):
    write_classes(tmp_path / "wds_mine")
    (whole,) = benchmark_sets(["mine"], str(tmp_path)).values()
    damage(tmp_path / "wds_mine")
    assert (whole.benchmark.on_hub, len(whole)) == (False, 9)
    message = "There is no benchmark 'mine'" if damage is shutil.rmtree else f"^The benchmark mine: .*(?:{message})"
    with pytest.raises(ValueError, match=message):
        benchmark_sets(["mine"], str(tmp_path))


def test_labels_that_state_a_huge_array_are_told(tmp_path):
    write_classes(tmp_path / "wds_mine", several=True)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**13,)})
    write_tar(tmp_path / "wds_mine/test/1.tar", [("s5.png", coloured(5)), ("s5.npy", header.getvalue())])
    with pytest.raises(ValueError, match=r"^The benchmark mine: Sample 's5' of .* has a .npy that cannot be read"):
        benchmark_sets(["mine"], str(tmp_path))


@pytest.mark.parametrize("names", [("a-b", "a_b"), ("pairs",), ("zero_shot",)])
def test_two_sets_whose_metrics_would_have_the_same_names_are_told(tmp_path, names):
    for name in names:
        write_classes(tmp_path / f"wds_{name}")
    with pytest.raises(ValueError, match=f"^The benchmark {names[-1]}: .* names eval_{names[-1]}_... of another set's"):
        benchmark_sets(names, str(tmp_path))


def test_a_language_and_any_repository_in_the_layout_are_read_from_the_hub(hub, written):
    tree = tree_of(written["folder"] / "xm3600")
    hub.commits["datasets/floschne/xm3600", "main"] = [tree]
    (german,) = benchmark_sets(["xm3600/de"]).values()
    assert (german.benchmark.revision, len(german)) == (sha_of(tree), 6)
    assert not list(german.benchmark.folder.glob("data/sw-*"))
    with pytest.raises(ValueError, match=r"^The benchmark xm3600/fil: .* has no data/fil-\*.parquet. Fill it with"):
        benchmark_sets(["xm3600/fil"])
    tree = tree_of(written["folder"] / "wds_vtab-cifar10")
    hub.commits["datasets/somebody/wds_sorts_test", "main"] = [tree]
    ((key, of_somebody),) = benchmark_sets(["somebody/wds_sorts_test"]).items()
    assert (key, of_somebody.benchmark.dataset) == ("somebody_wds_sorts_test", "somebody/wds_sorts_test")
    with pytest.raises(ValueError, match=r"no benchmark 'vtab/cifar11'. Did you mean vtab/cifar10"):
        expanded(["vtab/cifar11"])


def test_sugarcrepe_says_which_files_it_needs(tmp_path):
    for folder in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=r"github.com/RAIVNLab/sugar-crepe to .*sugarcrepe/data.*val2017"):
            benchmark_sets(["sugarcrepe"], folder)
    write_sugarcrepe(tmp_path / "sugarcrepe", ["swap_obj"])
    (tmp_path / "sugarcrepe/val2017/000000000003.jpg").unlink()
    with pytest.raises(ValueError, match=r"^The benchmark sugarcrepe/swap_obj: Entry '9' .* is about 000000000003.jpg"):
        benchmark_sets(["sugarcrepe/swap_obj"], str(tmp_path))


def test_a_training_states_benchmarks_with_their_commit_where_the_hub_looks(hub, checkpoint, written, tmp_path):
    write_folder(tmp_path / "pairs/train", "abcdefgh", (16, 16))
    for name in ("vtab-cifar10", "voc2007_multilabel"):
        tree = tree_of(written["folder"] / f"wds_{name}")
        hub.commits[f"datasets/clip-benchmark/wds_{name}", "main"] = [tree]
        if name == "vtab-cifar10":
            # A name that another one begins with: their metrics must not be mixed.
            hub.commits["datasets/clip-benchmark/wds_voc2007", "main"] = [tree]
            commit = sha_of(tree)
    out = tmp_path / "out"
    words = ["train", "--model", checkpoint, "--dataset", tmp_path / "pairs", "--output_dir", out, "--use_cpu"]
    words += ["--per_device_train_batch_size", 8, "--max_steps", 1, "--report_to", "none", "--check_samples", 0]
    words += ["--save_strategy", "no", "--learning_rate", 1e-4, "--metric_for_best_model", "voc2007_acc1"]
    infcl(*words, "--eval_benchmark", "voc2007", "voc2007_multilabel", "--guard_benchmark", "cifar10")
    facts = json.loads((out / "training_record.json").read_text())
    sets = {one["key"]: one for one in facts["evaluations"]}
    assert list(sets) == ["voc2007", "voc2007_multilabel", "guard_vtab_cifar10"]
    assert [one["guard"] for one in sets.values()] == [False, False, True]
    assert all("acc1" in sets["voc2007"][when] for when in ("metrics", "before"))
    assert "mean_average_precision" in sets["voc2007_multilabel"]["metrics"]
    assert "acc1" not in sets["voc2007_multilabel"]["metrics"]
    (result,) = yaml.safe_load((out / ".eval_results/clip-benchmark_wds_vtab-cifar10.yaml").read_text())[:1]
    assert result["dataset"] == {"id": "clip-benchmark/wds_vtab-cifar10", "task_id": "acc1", "revision": commit}
    card = ModelCard.load(out / "README.md")
    of_cifar = [one for one in card.data.eval_results if one.dataset_type == "clip-benchmark/wds_vtab-cifar10"]
    assert {(one.task_type, one.dataset_revision) for one in of_cifar} == {("zero-shot-image-classification", commit)}
    assert f"was read at `{commit}`" in card.text
