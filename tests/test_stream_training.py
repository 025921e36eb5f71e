"""Training on a stream: processes share it, logs report its progress, and interruptions leave no trace."""

import json
import multiprocessing
import platform
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.numerics import relative_error
from helpers.processes import context, join_group
from helpers.shards import pair, write_parquet, write_tar, write_tars
from helpers.streams import PAIRS, collate, stream_of
from helpers.trainers import AtEndOf, StopAt, parameters, trained, trainer_for
from transformers import TrainerCallback

from hf_infcl.data import loader as data_wait
from hf_infcl.data.loader import DataWait
from hf_infcl.trainer import loaders


class Windows(TrainerCallback):
    """Writes the numbers of the pairs in each window of this process to a file, one line per step."""

    def __init__(self, file):
        self._file = open(file, "a", encoding="utf-8")  # noqa: SIM115

    def on_step_end(self, args, state, control, **kwargs):
        tokens = [batch["input_ids"] for batch in self.trainer.training_data.window.batches]
        rows = [int((PAIRS.tokens == row).all(1).nonzero()[0]) for row in torch.cat(tokens)]
        print(json.dumps([state.global_step, rows]), file=self._file, flush=True)


def train(folder, output, steps, name, resume=None, **options):
    """Trains a model with dropout on the shards in a folder; returns the trainer."""
    windows, stream = Windows(Path(output, name)), options.pop("stream", None) or stream_of(folder)
    options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2, **options}
    options |= {"data_collator": collate, "callbacks": [windows, *options.get("callbacks", [])]}
    windows.trainer = made = trainer_for(output, models.clip(dropout=0.3, seed=5 if resume else 0), stream, **options)
    made.train(resume_from_checkpoint=resume)
    return made


def windows_of(*files):
    """The pairs of all processes in each step. Of a step that was trained twice, the last time counts."""
    steps = {}
    for file in files:
        own = dict(map(json.loads, Path(file).read_text(encoding="utf-8").splitlines()))
        for step, rows in own.items():
            steps.setdefault(step, []).extend(rows)
    return steps


# ---- Processes ----


def rank_shares(rank, world_size, folder, output):
    made = train(folder, output, 8, f"{rank}-of-{world_size}")
    history = made.state.log_history
    samples = [entry["stream_samples"] for entry in history if "loss" in entry]
    assert samples == [8 * world_size * n for n in range(1, 9)]
    (last,) = [entry for entry in history if entry["step"] == 8 and "loss" in entry]
    assert 4 <= last["stream_shards"] <= 13
    assert last["loader_samples_per_second"] > 0
    assert 0 < last["data_wait"] < 1
    return parameters(made)


def test_processes_have_different_pairs_and_the_same_weights(ranks, tmp_path):
    """accelerate neither dispatches nor shards the stream again: the windows are those of one process, split up."""
    write_tars(tmp_path / "shards", [20] * 13)
    (alone,) = ranks.run(rank_shares, 1, str(tmp_path / "shards"), str(tmp_path))
    first, second = ranks.run(rank_shares, 2, str(tmp_path / "shards"), str(tmp_path))
    assert torch.equal(first, second)
    both = windows_of(tmp_path / "0-of-2", tmp_path / "1-of-2")
    seen = [row for step in sorted(both) for row in both[step]]
    assert len(seen) == len(set(seen)) == 128
    one = [row for _, rows in sorted(windows_of(tmp_path / "0-of-1").items()) for row in rows]
    assert sorted(one) == sorted(seen[:64])
    assert relative_error(alone, first) > 0.01  # another global batch


# ---- Resuming ----


def rank_resumes(rank, world_size, folder, output):
    epochs = {"stream": stream_of(folder, samples_per_epoch=35), "num_train_epochs": 2 * world_size}
    for stop, options in ((3, {}), (6, {"offload_inputs": True}), (5, {**epochs, "max_steps": -1})):
        stop_options = {**options, "save_steps": stop}
        whole = train(folder, output, 9, f"whole-{rank}", save_strategy="no", **options)
        train(folder, output, 9, f"parts-{rank}", callbacks=[StopAt(stop)], **stop_options)
        torch.manual_seed(rank + 7)
        resumed = train(folder, output, 9, f"parts-{rank}", f"{output}/checkpoint-{stop}", **stop_options)
        assert resumed.state.global_step == whole.state.global_step == 9
        assert resumed.state.epoch == whole.state.epoch
        assert torch.equal(parameters(whole), parameters(resumed))
        assert windows_of(f"{output}/whole-{rank}") == windows_of(f"{output}/parts-{rank}")
        for entry, other in zip(whole.state.log_history, resumed.state.log_history, strict=True):
            assert entry.get("stream_samples") == other.get("stream_samples")
    return parameters(whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_is_bit_identical(ranks, tmp_path, world_size):
    """With dropout; in the middle of several passes or, with epochs, at the end of an epoch."""
    write_tars(tmp_path / "shards", [6] * 8)
    ranks.run(rank_resumes, world_size, str(tmp_path / "shards"), str(tmp_path), timeout=300)


def test_pre_emption_loses_no_window_that_was_fetched(tmp_path):
    """Processes agree on the signal when the next window has been fetched; that window is not trained."""
    write_tars(tmp_path / "shards", [6] * 8)
    output = str(tmp_path)
    whole = train(tmp_path / "shards", f"{output}", 9, "whole", save_strategy="no")
    asked = AtEndOf(4, lambda: signal.raise_signal(signal.SIGTERM))  # to end, as by a scheduler
    with pytest.raises(SystemExit):
        train(tmp_path / "shards", output, 9, "parts", callbacks=[asked], save_strategy="no")
    resumed = train(tmp_path / "shards", output, 9, "parts", f"{output}/checkpoint-4")
    assert windows_of(tmp_path / "whole") == windows_of(tmp_path / "parts")
    assert torch.equal(parameters(whole), parameters(resumed))


def rank_stops(rank, world_size, folder, output):
    train(folder, output, 10, f"two-{rank}", callbacks=[StopAt(6)])


def test_one_process_goes_on_where_two_stopped(ranks, tmp_path):
    write_tars(tmp_path / "shards", [15] * 8)
    output = str(tmp_path)
    ranks.run(rank_stops, 2, str(tmp_path / "shards"), output)
    both = windows_of(tmp_path / "two-0", tmp_path / "two-1")
    options = {"gradient_accumulation_steps": 4, "dataloader_num_workers": 4}
    train(tmp_path / "shards", output, 10, "one", f"{output}/checkpoint-6", **options)
    alone = windows_of(tmp_path / "one")
    assert sorted(alone) == [7, 8, 9, 10]
    train(tmp_path / "shards", output, 10, "whole", **options)
    whole = windows_of(tmp_path / "whole")
    assert {step: sorted(rows) for step, rows in (both | alone).items()} == {s: sorted(r) for s, r in whole.items()}
    options["dataloader_num_workers"] = 3
    with pytest.raises(ValueError, match=r"4 lanes .* 1 process with 3 .* dataloader_num_workers to one of"):
        train(tmp_path / "shards", output, 10, "no", f"{output}/checkpoint-6", **options)


def serve(rank, port, folder, output, last):
    """One of two processes of a training, as started by a launcher, which resumes where the last one was killed.

    At the end of step ``last``, if it is given, it waits to be killed.
    """
    torch.set_num_threads(1)
    join_group(rank, 2, port)
    multiprocessing.set_start_method("fork", force=True)  # for the workers; otherwise that of this process
    options = {"dataloader_num_workers": 2, "save_steps": 1, "callbacks": [AtEndOf(last, lambda: time.sleep(60))]}
    made = train(folder, output, 12, f"windows-{rank}", "auto", **options)
    torch.save(parameters(made), f"{output}/weights-{rank}.pt")
    made.accelerator.end_training()


def test_three_hard_kills_leave_no_trace(tmp_path):
    """2 processes × 2 workers, more than two passes: windows, their order and the weights are the same."""
    write_tars(tmp_path / "shards", [9] * 8)
    draw = random.Random(3)

    def launch(output, kill_after=None):
        output.mkdir(exist_ok=True)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        last = None if kill_after is None else kill_after + 2
        given = store.port, str(tmp_path / "shards"), str(output), last
        processes = [context().Process(target=serve, args=(rank, *given)) for rank in (0, 1)]
        for process in processes:
            process.start()
        while kill_after is not None and all(process.is_alive() for process in processes):
            done = (output / "windows-0").read_text().splitlines() if (output / "windows-0").is_file() else []
            if done and json.loads(done[-1])[0] >= kill_after:
                time.sleep(draw.uniform(0, 0.3))  # any moment of the next steps
                for process in processes:
                    process.kill()
            time.sleep(0.01)
        for process in processes:
            process.join(120)
            process.kill()  # if it hangs
        return [process.exitcode for process in processes]

    assert launch(tmp_path / "whole") == [0, 0]
    for kill_after in (2, 5, 9):
        assert launch(tmp_path / "parts", kill_after) == [-9, -9]
    assert launch(tmp_path / "parts") == [0, 0]
    for rank in (0, 1):
        assert windows_of(tmp_path / "parts" / f"windows-{rank}") == windows_of(tmp_path / "whole" / f"windows-{rank}")
        one, other = (torch.load(tmp_path / name / f"weights-{rank}.pt") for name in ("whole", "parts"))
        assert torch.equal(one, other)
    steps = windows_of(*(tmp_path / "whole" / f"windows-{rank}" for rank in (0, 1)))
    assert sorted(steps) == list(range(1, 13))
    assert {number: len(rows) for number, rows in steps.items()} == dict.fromkeys(range(1, 13), 16)
    counted = Counter(row for rows in steps.values() for row in rows)
    assert sorted(counted) == list(range(72))
    assert 2 <= min(counted.values()) <= max(counted.values()) <= 4  # in 2.7 passes


def test_a_checkpoint_without_a_place_or_of_other_shards_is_refused(tmp_path):
    write_tars(tmp_path / "shards", [15] * 8)
    output = str(tmp_path)
    train(tmp_path / "shards", output, 3, "one")
    with (tmp_path / "shards" / "00002.tar").open("ab") as file:
        file.write(bytes(10240))
    with pytest.raises(ValueError, match=r"content was '8 shards \w{16}' and is '8 shards \w{16}'"):
        train(tmp_path / "shards", output, 6, "two", str(tmp_path / "checkpoint-3"))
    (tmp_path / "shards" / "00002.tar").unlink()
    with pytest.raises(ValueError, match=r"content was '8 shards .* and is '7 shards "):
        train(tmp_path / "shards", output, 6, "two", str(tmp_path / "checkpoint-3"))
    trainer_for(f"{output}/rows", save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match=r"data was 'Pairs, .* and is 'ImageTextStream"):
        train(tmp_path / "shards", output, 6, "two", f"{output}/rows/checkpoint-2")


# ---- Looking ----


class Look(TrainerCallback):
    """Looks into the training data during the training, on rank 0 only, as a user who wants to see a batch."""

    def __init__(self, rank):
        self.looks, self.seen = rank == 0, []

    def look(self, dataloader):
        self.seen.append(next(iter(dataloader))["input_ids"])

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        if self.looks:
            self.look(train_dataloader)
            self.look(self.trainer.get_train_dataloader())


def rank_looks(rank, world_size, folder, output):
    look = Look(rank)
    stream = stream_of(folder)
    train(folder, f"{output}/whole", 6, f"{rank}", stream=stream)
    windows = Windows(Path(output, "seen", str(rank)))
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2}
    options |= {"data_collator": collate, "callbacks": [look, windows]}
    look.trainer = windows.trainer = trainer_for(f"{output}/seen", models.clip(dropout=0.3), stream, **options)
    if rank == 0:
        look.look(look.trainer.get_train_dataloader())
    look.trainer.train()
    if rank == 0:
        first, *during = look.seen
        assert all(torch.equal(batch, first) for batch in during[1::2]), "a new loader begins with the run"
        assert len({tuple(batch.flatten().tolist()) for batch in during[::2]}) == 6, "the training's goes on with it"
    train(folder, f"{output}/resumed", 6, f"{rank}", f"{output}/seen/checkpoint-3", stream=stream)


@pytest.mark.parametrize("world_size", [1, 2])
def test_looking_into_the_data_moves_no_stream(ranks, tmp_path, world_size):
    """Before and during the training, on one process; its checkpoint is that of a training without looks."""
    write_tars(tmp_path / "shards", [20] * 8)
    for name in ("whole", "seen", "resumed"):
        (tmp_path / name).mkdir()
    ranks.run(rank_looks, world_size, str(tmp_path / "shards"), str(tmp_path))
    for rank in map(str, range(world_size)):
        whole = windows_of(tmp_path / "whole" / rank)
        assert windows_of(tmp_path / "seen" / rank) == whole
        assert windows_of(tmp_path / "resumed" / rank) == {step: whole[step] for step in (4, 5, 6)}


# ---- Epochs ----


def test_epochs_are_of_samples_per_epoch(tmp_path):
    write_parquet(tmp_path / "a.parquet", range(200))
    stream = stream_of(tmp_path / "a.parquet", samples_per_epoch=30)
    made = train(tmp_path, str(tmp_path), -1, "log", stream=stream, num_train_epochs=4, save_strategy="epoch")
    assert made.state.global_step == 15
    assert made.state.epoch == 4
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        train(tmp_path, str(tmp_path), -1, "log", stream=stream_of(tmp_path / "a.parquet"))
    assert sorted(f.name for f in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (12, 15, 4, 8)]
    words = r"training set has 7 pairs, fewer than one global batch of 8 .* or raise a stream's samples_per_epoch\.$"
    with pytest.raises(ValueError, match=words):
        train(tmp_path, str(tmp_path), -1, "log", stream=stream_of(tmp_path / "a.parquet", samples_per_epoch=7))


# ---- Seeds ----


def test_data_seed_is_the_stream_s_or_refused(tmp_path):
    write_tars(tmp_path / "shards", [20])
    train(tmp_path / "shards", str(tmp_path), 1, "log", data_seed=7, stream=stream_of(tmp_path / "shards", seed=7))
    with pytest.raises(ValueError, match=r"data_seed=7 would have no effect.* seed, which is 0.*ImageTextStream"):
        train(tmp_path / "shards", str(tmp_path), 1, "log", data_seed=7)
    with pytest.raises(ValueError, match=r"data_seed=7 would have no effect: the order of a Stream depends"):
        trainer_for(tmp_path, data=models.Stream(20), data_seed=7)


# ---- Errors ----


def rank_fails(rank, world_size, folder, output, skip, words):
    stream = stream_of(folder, on_bad_sample="skip" if skip else "raise", lanes=2)
    if skip:
        made = train(folder, output, 6, f"{rank}", stream=stream)
        assert {e["skipped_samples"] for e in made.state.log_history if e.get("step") == 6 and "loss" in e} == {1}
        return
    with pytest.raises((ValueError, RuntimeError), match=words):
        train(folder, output, 6, f"{rank}", stream=stream)


@pytest.mark.parametrize("kind", ["bad sample", "truncated", "short"])
def test_an_error_in_the_shards_of_one_process_stops_all_with_its_name(ranks, tmp_path, kind):
    sizes = [6, 5] if kind == "short" else [50, 49]
    write_tars(tmp_path / "shards", sizes)
    if kind == "bad sample":
        files = [member for number in range(200, 250) for member in pair(number)]
        write_tar(tmp_path / "shards" / "00001.tar", [*files[:30], ("bad.png", b"no image"), *files[30:]])
        words = r"Sample 'bad' of the shard '.*00001.tar' is bad: it has no caption"
    elif kind == "truncated":
        shard = tmp_path / "shards" / "00001.tar"
        shard.write_bytes(shard.read_bytes()[:70_000])
        words = r"The shard '.*00001.tar' is truncated: byte \d+ .* on_bad_sample=\"skip\""
    else:
        words = r"The stream is shorter than one global batch, which takes 16 pairs of it: lane \d of 2, .*0000\d.tar"
    ranks.run(rank_fails, 2, str(tmp_path / "shards"), str(tmp_path), False, words)
    if kind != "short":
        ranks.run(rank_fails, 2, str(tmp_path / "shards"), str(tmp_path), True, "")


# ---- Waiting ----


def test_data_wait_is_the_share_of_training_and_leaves_the_rest_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(data_wait.time, "perf_counter", lambda: now[0])

    def window(wait, work, wait_for):
        with wait_for.waiting():
            now[0] += wait
        now[0] += work
        with wait_for.stopped():
            now[0] += 1000  # an evaluation

    wait = DataWait()
    window(500, 500, wait)  # workers start
    assert (wait.windows, wait.share(), wait.since_last()) == (0, 0, (0, 0))
    window(1, 3, wait)
    assert (wait.since_last(), wait.share()) == ((4, 1), 0.25)
    window(0, 4, wait)
    assert (wait.windows, wait.since_last(), wait.share()) == (2, (4, 0), 0.125)
    window(0, 4, wait)
    window(3, 1, wait)
    assert wait.since_last() == (4, 1.5)


def test_a_training_that_waits_for_its_data_says_what_helps(tmp_path, monkeypatch):
    write_tars(tmp_path / "shards", [50] * 4)
    monkeypatch.setattr(loaders, "WAIT_SHARE", 0.0)
    monkeypatch.setattr(loaders, "WAIT_WINDOWS", 3)
    said = []
    monkeypatch.setattr(loaders.logger, "warning", said.append)
    train(tmp_path / "shards", str(tmp_path), 8, "log")
    (warning,) = [message for message in said if "waited for its data" in message]
    assert "Raise dataloader_num_workers, which is 0" in warning
    assert "pip install simplejpeg" in warning


def rank_is_slow(rank, world_size, folder, where):
    model, said = models.clip(), []
    of_data, of_model = (0.2 * rank, 0) if where == "data" else (0, 0.15 * rank)
    model.vision_model.register_forward_pre_hook(lambda *_: time.sleep(of_model))

    def slowly(*args):
        time.sleep(of_data)
        return collate(*args)

    with mock.patch.multiple(loaders, WAIT_WINDOWS=2), mock.patch.object(loaders.logger, "warning", said.append):
        options = {"data_collator": slowly, "max_steps": 5}
        run = trained(trainer_for(f"{folder}/{rank}", model, stream_of(f"{folder}/shards"), **options))
    last = [entry for entry in run.state.log_history if "loss" in entry][-1]
    said = [message for message in said if "The other processes wait for rank" in message]
    return {name: last[name] for name in ("slowest_rank", "slowest_rank_seconds")}, said


@pytest.mark.parametrize("where", ["data", "model"])
def test_a_slow_process_is_named_and_says_so_once(ranks, tmp_path, where):
    write_tars(tmp_path / "shards", [60] * 4)
    (logs, nothing), (same, (warning,)) = ranks.run(rank_is_slow, 2, str(tmp_path), where)
    assert logs == same
    assert logs["slowest_rank"] == 1
    assert logs["slowest_rank_seconds"] >= (0.4 if where == "data" else 0.3)  # of two micro-batches
    assert not nothing
    seconds = [float(number) for number in re.findall(r"([\d.e-]+) s\b", warning)]
    assert re.match(rf"The other processes wait for rank 1 on {re.escape(platform.node())}: of a step of", warning)
    step, of_rank, of_data, median = seconds
    assert step > of_rank - 0.05 > median
    assert (of_data > 0.3) == (where == "data")
