"""Blocks of Python of the guides that no test of their topic runs, on a small model and 26 pairs."""

import re
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from helpers.guides import ROOT, block_of, replaced
from helpers.pictures import picture
from helpers.trainers import trained
from transformers import AutoModel, AutoProcessor

from hf_infcl import (
    ContrastiveCollator,
    ImageTextDataset,
    ImageTextStream,
    InfCLTrainer,
    InfCLTrainingArguments,
    load_pairs,
)
from hf_infcl.quality.ledger import Ledger


@pytest.fixture
def names(demo, small, tmp_path) -> dict[str, Any]:
    """What the blocks use. The fixture `small` creates the folder of pairs."""
    checkpoint = demo / "clip-init"
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2, "use_cpu": True, "report_to": "none"}
    return {
        "InfCLTrainer": InfCLTrainer,
        "model": AutoModel.from_pretrained(checkpoint, dtype=torch.float32),
        "processor": AutoProcessor.from_pretrained(checkpoint),
        "args": InfCLTrainingArguments(str(tmp_path / "out"), gradient_accumulation_steps=2, **options),
        "pairs": ImageTextDataset(load_pairs(str(tmp_path / "pairs"), split="test"), all_captions=True),
    }


def test_metrics_of_your_own(names):
    exec(block_of("scripts/README.md", "def compute_metrics"), names)
    found = names["trainer"].evaluate()
    assert -1 <= found["eval_cosine"] <= 1
    assert "eval_image_retrieval_recall@1" in found

    pairs, model = names["pairs"], names["model"].eval()
    with torch.no_grad():
        batch = ContrastiveCollator(names["processor"])([{**row, "caption": row["caption"][:1]} for row in pairs])
        outputs = model(**{name: batch[name] for name in ("pixel_values", "input_ids", "attention_mask")})
    cosines = (outputs.image_embeds * outputs.text_embeds).sum(1).numpy()
    assert found["eval_cosine"] == pytest.approx(np.mean(cosines), abs=1e-5)


def test_the_pairs_of_a_ledger_are_left_out(tmp_path, small):
    pairs, file = str(tmp_path / "pairs"), tmp_path / "ledger.parquet"
    whole = ImageTextDataset(load_pairs(pairs, split="train"))
    scores = np.where(np.arange(len(whole)) % 5 == 0, -1.0, 5.0)
    Ledger(whole.content_fingerprint(), np.arange(len(whole)), scores).write(file)
    changes, names = {"my/images": pairs, "outputs/scores/_ledger.parquet": str(file)}, {}
    exec(replaced(block_of("hf_infcl/trainer/README.md", "rows_kept"), changes), names)
    assert names["kept"].tolist() == [row for row in range(len(whole)) if row % 5]
    assert len(names["train_dataset"]) == len(names["kept"])


def test_a_folder_becomes_a_shard(tmp_path):
    (tmp_path / "files").mkdir()
    for number in range(4):
        picture(number).save(tmp_path / f"files/{number}.jpg")
        (tmp_path / f"files/{number}.txt").write_text(f"number {number}")
    guide = (ROOT / "hf_infcl/data/README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`(tar [^`]+)`", guide)
    words = command.replace("shards/", f"{tmp_path}/").replace("my/files", str(tmp_path / "files")).split()
    subprocess.run(words, check=True)
    stream = ImageTextStream(str(tmp_path / "00000.tar"))
    items, _ = next(iter(stream.batches(4, list)))
    assert sorted(item["caption"][0] for item in items) == [f"number {number}" for number in range(4)]


def test_a_streamed_dataset_trains(names, tmp_path):
    changes = {'"my/images"': f'"imagefolder", data_dir={str(tmp_path / "pairs")!r}'}
    changes |= {'[row["caption"]]': 'row["caption"][:1]'}  # the captions of the digits are lists
    exec(replaced(block_of("hf_infcl/data/README.md", "streaming=True"), changes), names)
    parts = {"train_dataset": names["train_dataset"], "processing_class": names["processor"]}
    trainer = trained(InfCLTrainer(names["model"], names["args"], **parts))
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[-1]["train_loss"] > 0
