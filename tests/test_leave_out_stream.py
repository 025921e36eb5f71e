"""`infcl train --leave_out noisy` on tar shards: what it finds, after a kill, and on another number of processes."""

import functools
import itertools
import json
import multiprocessing
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers import models
from helpers.demo import infcl, infcl_launched
from helpers.pictures import file_of
from helpers.processes import context, launched
from helpers.processors import END, clip_processor
from helpers.shards import write_tar
from helpers.trainers import killed_at
from PIL import Image
from safetensors.torch import load_file

from hf_infcl import ImageTextStream, InfCLTrainer
from hf_infcl.shards.names import sample_key
from hf_infcl.tools.scoring.excluding import stream_kept
from hf_infcl.tools.scoring.ledger import LEDGER_FILE, Ledger

PAIRS, STEPS, SAVED, KILLED = 256, 40, 32, 35
QUARTERS, COLOURS = 4, 6


def write_shards(folder: Path) -> np.ndarray:
    """Pictures of four quarters, each in one of six colours, which captions name; of every fourth pair it is another's.

    Returns:
        [pairs] bool, which captions are another's.
    """
    generator = np.random.default_rng(0)
    colours = generator.integers(0, 256, (QUARTERS, COLOURS, 3))
    values = generator.integers(0, COLOURS, (PAIRS, QUARTERS))
    letters = np.array([*"abcdefghijklmnopqrstuvwx"]).reshape(QUARTERS, COLOURS)
    wrong = generator.permutation(PAIRS)[: PAIRS // 4]
    described = np.arange(PAIRS)
    described[wrong] = np.roll(wrong, 1)
    for shard in range(4):
        members = []
        for row in range(shard, PAIRS, 4):
            picture = colours[np.arange(QUARTERS), values[row]].reshape(2, 2, 3).repeat(8, 0).repeat(8, 1)
            picture = (picture + generator.normal(0, 5, picture.shape)).clip(0, 255).astype(np.uint8)
            caption = " ".join(letters[np.arange(QUARTERS), values[described[row]]])
            members += [(f"{row:03d}.png", file_of(Image.fromarray(picture))), (f"{row:03d}.txt", caption.encode())]
        write_tar(folder / f"{shard}.tar", members)
    return described != np.arange(PAIRS)


def words(folder: Path, out: Path, accumulation: int = 4, **options: Any) -> list[Any]:
    given: dict[str, Any] = {"model": folder / "model", "dataset": f"{folder}/shards/*.tar", "output_dir": out}
    given |= {"per_device_train_batch_size": 32, "gradient_accumulation_steps": accumulation, "max_steps": STEPS}
    given |= {"learning_rate": 1e-2, "optimizer": "muon", "muon_learning_rate": 0.02, "lr_scheduler_type": "constant"}
    given |= {"save_strategy": "steps", "save_steps": SAVED, "logging_steps": 1, "leave_out": "noisy", "lanes": 4}
    given |= {"shuffle_buffer": 8, "check_samples": 0, "use_cpu": "true", "report_to": "none", "disable_tqdm": "true"}
    return [
        "train",
        "--streaming",
        *(word for name, value in (given | options).items() for word in (f"--{name}", value)),
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model and shards, and in ``whole`` a training from its begin to its end."""
    folder = tmp_path_factory.mktemp("leave_out")
    wide = {"hidden_size": 64, "intermediate_size": 128}
    models.clip_with({**wide, "eos_token_id": END}, wide, width=32).save_pretrained(folder / "model")
    clip_processor().save_pretrained(folder / "model")
    np.save(folder / "wrong.npy", write_shards(folder / "shards"))
    infcl(*words(folder, folder / "whole"))
    return folder


def left_out(out: Path) -> list[float]:
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["left_out"] for entry in log if "left_out" in entry]


def ledger_of(out: Path) -> Ledger:
    return Ledger.read(out / LEDGER_FILE)


def weights(out: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load_file(out / "model.safetensors").items())])


def test_wrong_captions_are_found_and_can_be_excluded(place):
    shares, ledger, wrong = left_out(place / "whole"), ledger_of(place / "whole"), np.load(place / "wrong.npy")
    begin = next(step for step, share in enumerate(shares) if share)
    assert 10 < begin < SAVED - 2, "it has begun when the checkpoint is written"
    assert 0.1 < np.mean(shares[begin:]) < 0.3
    rows = {sample_key(f"0/{row % 4}.tar", f"{row:03d}"): row for row in range(PAIRS)}
    is_wrong = wrong[[rows[int(key)] for key in ledger.key]]
    above = (ledger.score[~is_wrong][:, None] > ledger.score[is_wrong]).mean()
    assert len(ledger) == PAIRS
    assert above > 0.9, "the area under the curve of finding them"
    assert ledger.left_out.mean() == pytest.approx(shares[-1], abs=0.05), "the steps at the end have half of the pairs"
    assert ledger.left_out[is_wrong].mean() > 0.5 > 0.1 > ledger.left_out[~is_wrong].mean()
    least = np.sort(ledger.p_wrong)[-40]
    stream = ImageTextStream(f"{place}/shards/*.tar", lanes=4, samples_per_epoch=PAIRS)
    kept = stream_kept(stream, f"{place / 'whole' / LEDGER_FILE}:{least}")
    passed = {item["pair_id"] for (item,), _ in itertools.islice(kept.batches(1), 2 * PAIRS)}
    assert len(passed) == PAIRS - len(ledger.wrong(least)) <= PAIRS - 40


class ShardVanishes(transformers.TrainerCallback):
    """A shard vanishes when the training has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        (self.folder / "0.tar").unlink()


def test_a_shard_that_vanishes_at_the_end_leaves_the_results_and_the_ledger(place, tmp_path, monkeypatch):
    folder = tmp_path / "shards"
    shutil.copytree(place / "shards", folder)
    content = ImageTextStream(f"{folder}/*.tar").content_fingerprint()
    vanishing = functools.partial(InfCLTrainer, callbacks=[ShardVanishes(folder)])
    monkeypatch.setattr("hf_infcl.tools.cli.train.InfCLTrainer", vanishing)
    few = {"max_steps": 2, "save_strategy": "no"}
    infcl(*words(place, tmp_path / "out", dataset=f"{folder}/*.tar", **few))
    assert not (folder / "0.tar").exists()
    assert ledger_of(tmp_path / "out").content == content
    assert "pairs left out" in (tmp_path / "out" / "README.md").read_text()


def killed(folder: Path, out: Path) -> None:
    from hf_infcl.tools.cli import train

    train.InfCLTrainer = functools.partial(InfCLTrainer, callbacks=[killed_at(KILLED)])  # type: ignore[assignment, misc]
    infcl(*words(folder, out))


def test_a_killed_training_resumes_to_the_bit_and_on_two_processes_with_the_same_decisions(place, tmp_path):
    process: multiprocessing.Process = context().Process(target=killed, args=(place, tmp_path / "run"))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    infcl(*words(place, tmp_path / "run", resume_from_checkpoint="auto"))
    assert torch.equal(weights(tmp_path / "run"), weights(place / "whole"))
    assert left_out(tmp_path / "run") == left_out(place / "whole")
    for name in ("key", "score", "p_wrong", "left_out"):
        np.testing.assert_array_equal(*(getattr(ledger_of(out), name) for out in (tmp_path / "run", place / "whole")))
    checkpoint = place / "whole" / f"checkpoint-{SAVED}"
    code, printed = launched(
        infcl_launched, *words(place, tmp_path / "two", accumulation=2, resume_from_checkpoint=checkpoint)
    )
    assert code == 0, printed
    assert left_out(tmp_path / "two") == left_out(place / "whole")
    two, one = (ledger_of(out) for out in (tmp_path / "two", place / "whole"))
    np.testing.assert_array_equal(two.key, one.key)
    np.testing.assert_allclose(two.score, one.score, atol=2e-3)
