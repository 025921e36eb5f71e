"""The windows of a training are full global batches of distinct rows, from data sets and from streams."""

import gc
import itertools
from collections.abc import Sequence
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from helpers import models
from helpers.processes import on_ranks
from helpers.trainers import TrainedRows, arguments, trained, trainer_for
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, Subset, default_collate, random_split
from transformers import TrainerCallback

from hf_infcl.data.replay import Epochs, TableRows
from hf_infcl.data.streams import Share
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.options.record import RunRecord
from hf_infcl.processes.collectives import Processes
from hf_infcl.processes.signals import Interruptions
from hf_infcl.step.extensions import NO_ROWS
from hf_infcl.step.terms import Context
from hf_infcl.trainer import loaders
from hf_infcl.trainer.loaders import TrainingData

# ---- Data sets ----


def windows_of(rows: int, size: int, windows: int, split: int = 4, position: int = 0, **order: Any) -> list[list[int]]:
    """The rows of so many global batches of this size of a table, read by one process in micro-batches of ``split``."""
    table = TableRows(range(rows), Share(split, size // split), list, position=position, **order)
    read = [row for batch, _ in itertools.islice(table, windows * size // split) for row in batch]
    return [read[first : first + size] for first in range(0, len(read), size)]


def test_windows_are_full_and_reshuffled_and_do_not_depend_on_the_split():
    epochs = windows_of(48, 48, 2, shuffle=True, seed=1)
    assert epochs == [torch.randperm(48, generator=torch.Generator().manual_seed(1 + n)).tolist() for n in (0, 1)]
    for size, split in ((16, 4), (24, 8)):
        assert list(itertools.chain(*windows_of(48, size, 48 // size, split, shuffle=True, seed=1))) == epochs[0]
    assert windows_of(48, 48, 1, shuffle=True, seed=2) != epochs[:1]


@pytest.mark.parametrize("rows", [16, 17, 24, 31, 32, 33, 50])
def test_every_pass_has_every_row_once_and_goes_on_within_a_window(rows):
    """Also if a training begins anywhere, as one does that resumes."""
    windows = windows_of(rows, 16, 40, shuffle=True, seed=1)
    assert all(len(set(window)) == 16 for window in windows)
    read = list(itertools.chain(*windows))
    passes = [read[first : first + rows] for first in range(0, len(read) - rows, rows)]
    assert all(sorted(one) == list(range(rows)) for one in passes)
    assert passes[0] != passes[1]
    for position in (1, 7, 22):
        assert windows_of(rows, 16, 10, position=position, shuffle=True, seed=1) == windows[position : position + 10]


def test_without_shuffling_an_epoch_begins_where_the_last_one_ended():
    windows = windows_of(50, 16, 75, shuffle=False, seed=1)
    assert list(itertools.chain(*windows)) == list(range(50)) * 24


@pytest.mark.parametrize(("rows", "of_window"), [(160, 100), (160, 40), (161, 40), (100, 100), (7, 3)])
def test_epochs_share_the_windows_of_a_training(rows, of_window):
    epochs = Epochs(rows, of_window)
    assert sum(epochs.windows(epoch) for epoch in range(9)) == epochs.begin(9) == epochs.steps(9)
    for window in range(epochs.begin(9)):
        assert epochs.begin(epochs.of(window)) <= window < epochs.begin(epochs.of(window) + 1)
    assert all(0 <= epochs.steps(n) * of_window - n * rows < of_window for n in (1, 2.5, 4))


@pytest.mark.parametrize("left", [20, 5])
def test_other_rows_come_again_instead_of_those_that_are_skipped_rows(left):
    """Also where fewer are left than a global batch has: then some of the others stay."""
    skipped_rows = torch.arange(40) >= left
    table, ordered = (TableRows(range(40), Share(4, 2), list, shuffle=shuffle, seed=1) for shuffle in (True, False))
    before = [row for batch, _ in itertools.islice(table, 20) for row in batch]
    assert table.begin_at(0, lambda: skipped_rows)
    assert not table.begin_at(0, lambda: skipped_rows.clone())
    read = [row for batch, _ in itertools.islice(table, 20) for row in batch]
    assert len(read) == len(before) == 80
    assert [row for row in before if row < left] == [row for row in read[:40] if row < left][:left] + [
        row for row in read[40:] if row < left
    ][:left]
    for window in range(0, 80, 8):
        assert len(set(read[window : window + 8])) == 8
    for one in (read[:40], read[40:]):
        counts = torch.bincount(torch.tensor(one), minlength=40)
        assert int((counts > 0).sum()) == max(8, left)
        assert counts[:left].min() == 40 // max(8, left)
    assert table.begin_at(0, lambda: torch.empty(0, dtype=torch.bool))
    assert [row for batch, _ in itertools.islice(table, 20) for row in batch] == before
    assert not ordered.begin_at(0, lambda: skipped_rows), "only what is shuffled"


class SaveAt(TrainerCallback):
    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in self.steps


def rank_rows(rank: int, world_size: int, folder: str, workers: int = 0) -> tuple[list[list[tuple]], list[float]]:
    rows = TrainedRows()
    options = {"max_steps": -1, "num_train_epochs": 4, "logging_strategy": "epoch", "gradient_accumulation_steps": 1}
    options["data"] = models.Pairs(20)
    trainer = trained(trainer_for(folder, callbacks=[rows, SaveAt(2, 4)], **options))
    epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    for step in (2, 4):
        rest = TrainedRows()
        resumed = trainer_for(folder, callbacks=[rest], **options, dataloader_num_workers=workers)
        trained(resumed, resume=f"{folder}/checkpoint-{step}")
        if world_size > 2:  # the first window is encoded once more, by which DDP orders its buckets
            assert rest.steps[0][:4] == rest.steps[0][4:]
            del rest.steps[0][:4]
        assert rest.steps[:-1] == rows.steps[step:-1]
        assert resumed.state.epoch == 4
    return rows.steps[:-1], epochs


def test_all_pairs_of_the_epochs_are_trained(
    ranks,
    tmp_path,
):
    """Where they do not fill the last window of an epoch, this goes on with pairs of the next one; also in a resume."""
    for world_size in (1, 2, 3):
        found = ranks.run(rank_rows, world_size, str(tmp_path / str(world_size)))
        steps = [[*itertools.chain(*parts)] for parts in zip(*(rows for rows, _ in found), strict=True)]
        size = 4 * world_size
        assert len(steps) == -(-80 // size), "4 epochs of 20 pairs"
        assert all(len(rows) == len(set(rows)) == size for rows in steps)
        read = list(itertools.chain(*steps))
        assert all(len(set(read[first : first + 20])) == 20 for first in (0, 20, 40, 60))
        assert all(epochs == [1, 2, 3, 4] for _, epochs in found)
    assert rank_rows(0, 1, str(tmp_path / "workers"), 2) == ranks.run(rank_rows, 1, str(tmp_path / "alone"))[0]


def test_the_start_tells_what_epochs_leave_over(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(loaders.logger, "warning", said.append)
    for pairs, epochs in ((32, 2), (37, 2), (20, 4), (20, 2.5)):
        trainer_for(tmp_path, data=models.Pairs(pairs), max_steps=-1, num_train_epochs=epochs).train()
    assert said == [
        "An epoch of 37 pairs leaves 5 over after its last full global batch of 8, which the next epoch begins with: "
        "2 epochs are 10 steps, with 6 pairs of a further epoch.",
        "An epoch of 20 pairs leaves 4 over after its last full global batch of 8, which the next epoch begins with: "
        "4 epochs are 10 steps.",
        "An epoch of 20 pairs leaves 4 over after its last full global batch of 8, which the next epoch begins with: "
        "2.5 epochs are 7 steps, with 6 pairs of a further epoch.",
    ]


class AskOnce(TrainerCallback):
    """Asks for the end of the epoch or of the training at the begin of the second window, or within it."""

    def __init__(self, flag: str, place: str, asks: bool) -> None:
        self.flag, self.place, self.asks = flag, place, asks
        self.left_gradients: list[int] = []

    def ask(self, place: str, state: Any, control: Any) -> None:
        if self.asks and place == self.place and state.global_step == 1:
            setattr(control, self.flag, True)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.left_gradients.append(sum(p.grad is not None for p in model.parameters()))
        self.ask("begin", state, control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ask("within", state, control)


def rank_is_asked(rank: int, world_size: int, folder: str, flag: str, place: str) -> tuple[list[int], int]:
    asked = AskOnce(flag, place, asks=rank == 0)
    data = models.Pairs(32 * world_size)  # four windows
    run = trained(trainer_for(folder, data=data, callbacks=[asked], max_steps=-1, num_train_epochs=2))
    return asked.left_gradients, run.state.global_step


@pytest.mark.parametrize("place", ["begin", "within"])
@pytest.mark.parametrize(("flag", "steps"), [("should_epoch_stop", 6), ("should_training_stop", 2)])
def test_a_window_that_has_begun_is_completed_before_an_epoch_or_a_training_ends(ranks, tmp_path, place, flag, steps):
    """Otherwise its gradient so far would be part of the next window's, and a rank that was not asked would wait."""
    for world_size in (1, 2):
        ends = ranks.run(rank_is_asked, world_size, str(tmp_path), flag, place)
        assert ends == [([0] * steps, steps)] * world_size


def rank_rows_of_begun_epochs(rank: int, world_size: int, folder: str, sampling: str) -> list[list[tuple]]:
    rows, asked = TrainedRows(), AskOnce("should_epoch_stop", "begin", asks=True)
    options = {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": sampling}
    run = trainer_for(folder, data=models.Pairs(70), callbacks=[asked, rows], **options)
    run.train()
    return rows.steps[:-1]


@pytest.mark.parametrize("sampling", ["random", "sequential"])
def test_an_epoch_that_ends_early_is_followed_by_the_next_one(ranks, tmp_path, sampling):
    """Five windows of 16 pairs on two processes, of which the first epoch trains two, and four of the second one."""
    found = ranks.run(rank_rows_of_begun_epochs, 2, str(tmp_path), sampling)
    windows = windows_of(70, 16, 9, shuffle=sampling == "random", seed=42)
    tokens = models.Pairs(70).tokens
    for *steps, rows in zip(*found, windows[:2] + windows[5:], strict=True):
        assert sorted(steps[0] + steps[1]) == sorted(map(tuple, tokens[rows].tolist()))


def test_a_loader_gives_one_epoch_of_full_windows_whatever_is_left_to_train(tmp_path):
    rows = TrainedRows()
    run = trainer_for(tmp_path, data=models.Pairs(37), callbacks=[rows], max_steps=5)
    for is_trained in (False, True):
        loader = run.get_train_dataloader()
        batches = [tuple(text) for batch in loader for text in batch["input_ids"].tolist()]
        assert len(loader) == 10, "five windows of two micro-batches"
        assert len(batches) == 40
        assert len(set(batches[:37])) == 37
        if is_trained:
            assert [*rows.steps[0], *rows.steps[1]] == batches[:16]
        else:
            run.train()


@on_ranks(2)
def test_a_collator_that_leaves_a_row_out_does_not_end_the_epoch(rank, world_size, tmp_path):
    batches = iter(range(100))

    def collate(items: list[Any]) -> Any:
        return default_collate(items[:3] if rank == 1 and next(batches) == 5 else items)

    run = trainer_for(tmp_path, max_steps=6, data_collator=collate)
    with pytest.raises(ValueError, match=r"rows out, or added some: the processes got \[8, 7\] rows of 8 each"):
        run.train()
    assert run.state.global_step == 2


class ToldEpochs(models.Pairs):
    """Records the epochs passed to `set_epoch`."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        if epoch not in self.epochs[-1:]:
            self.epochs.append(epoch)


class StreamOfEpochs(models.Stream):
    def __init__(self, rows: int) -> None:
        self.data = ToldEpochs(rows)

    def set_epoch(self, epoch: int) -> None:
        self.data.set_epoch(epoch)


class Wrapper(Dataset):
    """A data set like those that users write to transform the items of another one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: data,
        lambda data: Subset(data, range(17)),
        lambda data: random_split(data, [17, 3])[0],
        lambda data: ConcatDataset([models.Pairs(3), Wrapper(data)]),
        lambda data: Wrapper(Subset(ConcatDataset([data, data]), range(18))),
        lambda data: ChainDataset([models.Stream(3), data]),
    ],
    ids=["itself", "Subset", "random_split", "ConcatDataset", "nested", "ChainDataset"],
)
def test_every_epoch_reaches_a_data_set_however_it_is_wrapped(tmp_path, wrap, request):
    data = StreamOfEpochs(20) if request.node.callspec.id == "ChainDataset" else ToldEpochs(20)
    wrapped = wrap(data)
    trainer_for(tmp_path, data=wrapped, max_steps=6, gradient_accumulation_steps=2).train()
    assert getattr(data, "data", data).epochs == [0, 1, 2]


class TellsEpoch(models.Pairs):
    """Pairs whose second token is the epoch that the data set was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, row: int) -> dict[str, Any]:
        item = super().__getitem__(row)
        tokens = item["input_ids"].clone()
        tokens[1], tokens[2] = 2 + self.epoch, 2 + row
        return {**item, "input_ids": tokens}


class StreamTellsEpoch(models.Stream):
    """The same pairs as a stream."""

    def __init__(self, rows: int) -> None:
        self.data = TellsEpoch(rows)

    def set_epoch(self, epoch: int) -> None:
        self.data.set_epoch(epoch)


WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


def trained_rows(folder: Any, data: Any, *callbacks: TrainerCallback, **options: Any) -> list[list[tuple]]:
    """The text of every row of each step of a training."""
    rows = TrainedRows()
    trainer = trainer_for(
        folder, data=data, callbacks=[rows, *callbacks], **{"max_steps": 6, "gradient_accumulation_steps": 1, **options}
    )
    for callback in callbacks:
        callback.trainer = trainer  # type: ignore[attr-defined]
    trainer.train()
    return rows.steps[:-1]


@pytest.mark.parametrize("wrap", [TellsEpoch, StreamTellsEpoch, lambda rows: Subset(TellsEpoch(rows), range(rows))])
def test_every_epoch_reaches_workers_that_outlive_it(tmp_path, wrap):
    steps = trained_rows(tmp_path, wrap(8), **WORKERS)
    assert [{text[1] - 2 for text in step} for step in steps] == [{0}, {0}, {1}, {1}, {2}, {2}]


def as_table(pairs: models.Pairs) -> datasets.Dataset:
    """The pairs as a table that a user has prepared, with a column that nothing uses."""
    items = [pairs[row] for row in range(len(pairs))]
    columns = {name: [item[name].tolist() for item in items] for name in items[0]}
    return datasets.Dataset.from_dict({**columns, "unused": ["a"] * len(pairs)}).with_format("torch")


class Look(TrainerCallback):
    """Looks into the loader that it receives, and into a new one: at one batch or, after the third step, at all."""

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if state.global_step not in (1, 3):
            return
        for loader in (train_dataloader, self.trainer.get_train_dataloader()):  # type: ignore[attr-defined]
            for batch in loader:
                assert len(batch["input_ids"]) == 4
                if state.global_step != 3:
                    break


def test_an_evaluation_of_the_training_set_leaves_its_epoch(tmp_path):
    data = TellsEpoch(12)
    steps = trained_rows(tmp_path, data, eval_dataset=data, eval_strategy="steps", eval_steps=1)
    assert [{text[1] - 2 for text in step} for step in steps] == [{0}] * 3 + [{1}] * 3


@pytest.mark.parametrize("options", [{}, WORKERS], ids=["here", "workers"])
@pytest.mark.parametrize("make", [TellsEpoch, models.Stream])
def test_looking_into_the_data_changes_no_window(tmp_path, monkeypatch, make, options):
    # So long torch waits for each worker of a loader that was left half read, when the loader is collected.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    data, options = make(22), {"max_steps": 12, **options}
    bare = trained_rows(tmp_path, data, **options)
    assert trained_rows(tmp_path, data, Look(), **options) == bare
    gc.collect()


@pytest.mark.parametrize("make", [lambda pairs: pairs, as_table])
def test_ready_made_pair_ids_are_kept_among_unused_columns(tmp_path, make):
    """Pairs with one id, of which the loss has no negatives left; a column that nothing uses is dropped."""
    data = make(models.Pairs(16, repeats=16))
    trainer = trained(trainer_for(tmp_path, data=data, remove_unused_columns=True, max_steps=1))
    assert trainer.state.log_history[0]["loss"] == 0


# ---- `TrainingData` alone ----


class Counting(Interruptions):
    """Notes what is agreed."""

    def __init__(self, agreed: list[Any]) -> None:
        super().__init__()
        self.agreed = agreed

    def agree(self, numbers: Sequence[float] = ()) -> list[list[float]]:
        self.agreed.append(numbers)
        return super().agree(numbers)


def training_data(folder: Any, agreed: list[Any], resumed: RunRecord | None = None) -> TrainingData:
    context = Context(DualEncoder(models.clip()), Accelerator(cpu=True), arguments(folder), "exclude", dict)
    return TrainingData(context, Counting(agreed), None, resumed)


def test_windows_are_full_and_counted_until_the_data_ends(tmp_path):
    """Global batches of 8; each pass has two, and half of a third one, after which nothing is read or agreed."""
    agreed: list[Any] = []
    data, batch = training_data(tmp_path, agreed), models.Pairs(4).batch()
    with pytest.raises(
        ValueError, match=r"first global batch of 8 pairs was full.*\[4\] of 8 each in full micro-batch"
    ):
        data.fetch(iter([batch]), 0)
    agreed.clear()
    for epoch in range(2):
        data.begin_epoch(epoch, lambda _: NO_ROWS)
        batches = iter([{**batch, "skipped": torch.tensor([0, 1, 0, 1])} for _ in range(5)])
        lengths = []
        for step in range(1, 6):
            lengths.append(len(window := data.fetch(batches, step)))
            if len(window):
                data.end_window()
        assert lengths == [2, 2, 0, 0, 0]
        assert len(agreed) == 3 * (epoch + 1)
        assert RunRecord({}, **data.position()) == RunRecord({}, skipped_samples=8 * (epoch + 1))
    resumed = training_data(tmp_path, [], RunRecord({}, skipped_samples=16))
    assert resumed.position() == data.position()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixel_values": None}, r"dict with pixel_values and input_ids at least, got keys \['input_ids', "),
        ({"pair_ids": [1, 2, 3, 4]}, "pair_ids, if at all, as a tensor, got a list"),
        ((1, 2), "at least, got a tuple"),
    ],
)
def test_a_collator_of_other_things_is_told(tmp_path, changes, message):
    batch: Any = changes
    if isinstance(changes, dict):
        batch = {k: v for k, v in {**models.Pairs(4).batch(), **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        training_data(tmp_path, []).fetch(iter([batch] * 2), 0)


# ---- Streams ----


def test_an_exhausted_stream_agrees_no_more(tmp_path, monkeypatch):
    calls, agree = [], Processes.agree
    monkeypatch.setattr(Processes, "agree", lambda *args, **kwargs: calls.append(1) or agree(*args, **kwargs))
    trainer_for(tmp_path, data=models.Stream(20), max_steps=6, logging_strategy="no").train()
    # Agreements: two before the first step, about callbacks and compilation; in each of three passes one per full
    # window (two) and one at the end; and one for the incomplete window in the two passes that reached it.
    assert len(calls) == 2 + 3 + 3 + 3 + 2


def rank_stream(rank: int, world_size: int, folder: str) -> int:
    class CleanStart(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            assert all(p.grad is None for p in model.parameters()), "a gradient leaked into this window"

    rows = TrainedRows()
    # 42 rows: in every pass two windows of 16 on two ranks (five of 8 on one), then an incomplete one.
    trainer = trainer_for(folder, data=models.Stream(42), max_steps=12 // world_size, callbacks=[rows, CleanStart()])
    trainer.train()
    assert {len(step) for step in rows.steps[:-1]} == {8}
    return trainer.state.global_step


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_never_trains_on_a_short_window(ranks, tmp_path, world_size):
    assert ranks.run(rank_stream, world_size, str(tmp_path)) == [12 // world_size] * world_size


def rank_sized_stream(rank: int, world_size: int, folder: str) -> list[tuple[int, float]]:
    reached = []
    for length in ({"max_steps": 6}, {"max_steps": -1, "num_train_epochs": 2}):
        data = models.SizedStream(20 * world_size)
        trainer = trained(trainer_for(folder, data=data, learning_rate=1e-3, **length))
        reached.append((trainer.state.global_step, trainer.lr_scheduler.get_last_lr()[0]))
    return reached


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_that_knows_its_length_trains_to_the_end(ranks, tmp_path, world_size):
    # Two full windows per pass, and half of a third one, which is left out. Two epochs therefore take a third pass.
    for reached in ranks.run(rank_sized_stream, world_size, str(tmp_path)):
        assert reached == [(6, 0.0), (5, 0.0)]


@pytest.mark.parametrize("rows", [3, 9, 15])
@on_ranks(2)
def test_a_stream_is_not_repeated_to_fill_a_window(rank, world_size, tmp_path, rows):
    # Without InfCLTrainer, accelerate would fill the window with rows that are already in it.
    trainer = trainer_for(tmp_path, data=models.Stream(rows))
    with pytest.raises(ValueError, match=r"ended before its first global batch of 16 .* of 8 each"):
        trainer.train()


class Uneven(models.Stream):
    """A stream from which one of two workers gets ten rows and the other gets the rest."""

    def __iter__(self):
        first = torch.utils.data.get_worker_info().id == 0
        return (self.data[i] for i in (range(10) if first else range(10, len(self.data))))


def test_a_worker_s_end_is_not_the_stream_s(tmp_path):
    rows = TrainedRows()
    trainer_for(tmp_path, data=Uneven(110), max_steps=12, dataloader_num_workers=2, callbacks=[rows]).train()
    assert len({text for step in rows.steps for text in step}) == 12 * 8


class WithNames(models.Pairs):
    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**super().__getitem__(row), "photographer": None}


def test_a_collator_that_fails_on_columns_which_trainer_leaves_out_is_told(tmp_path):
    told = (
        r"collator failed: TypeError: default_collate.* and photographer, which Trainer leaves out: with remove_unused"
    )
    with pytest.raises(ValueError, match=told):
        trained(trainer_for(tmp_path, data=WithNames(8)))
    trained(trainer_for(tmp_path, data=WithNames(8), remove_unused_columns=True))
