"""One number for the batch: its division, what is found by trying, and steps that run out of memory."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from helpers import models
from helpers.parity import MODELS
from helpers.shards import write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import StopAt, arguments, parameters, trainer_for
from torch import nn
from torch.utils.data import default_collate

from hf_infcl.options import arguments as batch_division
from hf_infcl.options.arguments import largest_micro_batch, possible_micro_batches
from hf_infcl.options.record import RunRecord
from hf_infcl.processes.collectives import OtherRankFailedError, Processes, alone
from hf_infcl.step import micro_batches as finding
from hf_infcl.step.grad_cache import GraphBudget
from hf_infcl.step.micro_batches import TEXTS_AT_ONCE, Trial, Trials, largest_that_fits, quickest
from hf_infcl.step.window import Window, repeated, split_batches

FREE: dict[str, Any] = {"per_device_train_batch_size": None, "gradient_accumulation_steps": None}
FOURS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
OPTIONS = {**FREE, "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0, "max_steps": 3}


# ---- The division ----


@pytest.mark.parametrize(
    ("options", "division"),
    [
        ({}, (8, 1)),
        ({"global_batch_size": 4096}, (32, 128)),
        ({"global_batch_size": 7}, (7, 1)),
        ({"global_batch_size": 60}, (30, 2)),
        ({"global_batch_size": 64, "per_device_train_batch_size": 16}, (16, 4)),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 4}, (16, 4)),
        ({"global_batch_size": 64, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}, (16, 4)),
    ],
    ids=str,
)
def test_a_global_batch_is_divided(tmp_path, options, division):
    args = arguments(tmp_path, **{**FREE, **options})
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == division
    assert args.global_batch_size == options.get("global_batch_size", 64 if options else 8)
    assert args.divides_by_itself == bool(options and not {*FREE} & options.keys())
    assert (args.texts_together, args.retain_graphs) == (1, "auto"), "nothing was tried"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be a whole number of at least 1, got 0"),
        ({"global_batch_size": 4099}, r"4,099 on 1 process cannot be divided .* has 1. Choose 4,096 or 4,112, or give"),
        (
            {"global_batch_size": 64, "per_device_train_batch_size": 7},
            r"64 is no multiple of per_device_train_batch_size=7 × 1 process, which is 7. Choose 63 or 70, or leave",
        ),
        (
            {"global_batch_size": 64, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
            r"64, but per_device_train_batch_size=8 × gradient_accumulation_steps=4 × 1 process is 32. Leave one",
        ),
        (
            {"global_batch_size": 32, "texts_at_once": 4},
            "texts_at_once=4 and gradient_accumulation_steps=1 exclude each other",
        ),
        ({"texts_at_once": "all"}, "texts_at_once must be 'auto' or an integer of at least 1, got 'all'"),
        ({"texts_at_once": 0}, "texts_at_once must be 'auto' or an integer of at least 1, got '0'"),
    ],
    ids=str,
)
def test_what_makes_up_no_global_batch_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **{**FREE, **options})


def test_a_micro_batch_that_is_changed_later_must_fit_as_well(tmp_path):
    args = arguments(tmp_path, **FREE, global_batch_size=64)
    args.per_device_train_batch_size = 16  # as a hyperparameter search does
    with pytest.raises(ValueError, match=r"64, but per_device_train_batch_size=16 .* is 32"):
        args.check()


def test_sharded_weights_are_not_tried(tmp_path):
    def search(**options: Any) -> tuple[int, str, str]:
        trainer = trainer_for(tmp_path, **{**FREE, **options})
        searched = trainer.context, None, trainer.get_train_dataloader
        with (
            mock.patch.object(finding, "memory_is_known", return_value=True),
            mock.patch.object(type(trainer.accelerator), "is_fsdp2", True),
        ):
            finding.find_micro_batches(*searched)
        args = trainer.args
        return args.per_device_train_batch_size, args.texts_at_once, args.retain_graphs

    with pytest.raises(ValueError, match="global_batch_size=16 needs a per_device_train_batch_size under FSDP"):
        search(global_batch_size=16)
    for given, graphs in ((None, "1"), ("auto", "auto"), ("2", "2")):
        assert search(per_device_train_batch_size=4, retain_graphs=given) == (4, "1", graphs)


def test_the_micro_batches_that_divide_a_global_batch(tmp_path):
    args = arguments(tmp_path, **FREE, global_batch_size=96)
    assert possible_micro_batches(args) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    assert largest_micro_batch(args, possible_micro_batches(args), 50) == 48


# ---- The search ----


class Memory:
    """A device: each pair of a kept graph takes 10 bytes for its image and 4 for its texts."""

    def __init__(self, capacity: int, own: int) -> None:
        self.capacity, self.own, self.trials = capacity, own, 0

    def taken(self, trial: Trial) -> int:
        count = -(-self.own // trial.micro_batch)
        texts = [min(trial.texts, count - first) for first in range(0, count, trial.texts)]
        texts += [0] * (count - len(texts))
        return sum(trial.micro_batch * (10 + 4 * n) for n in texts[: trial.graphs]) + 5

    def __call__(self, trial: Trial) -> tuple[int, int]:
        self.trials += 1
        if (taken := self.taken(trial)) > self.capacity:
            raise torch.OutOfMemoryError
        return taken, self.capacity - taken


@pytest.mark.parametrize("own", [8, 240, 256, 512, 1000, 2048])
@pytest.mark.parametrize("capacity", [20, 300, 3_000, 4_700, 9_000, 100_000])
def test_the_search_finds_what_fits(own, capacity):
    memory = Memory(capacity, own)
    possible = [n for n in range(1, own + 1) if own % n == 0]
    sizes = [n for n in possible if n <= finding.MOST]
    found = largest_that_fits(memory, Trial(0), "micro_batch", sizes)
    assert found == max(n for n in sizes if memory.taken(Trial(n)) <= capacity)
    assert memory.trials <= 2 + math.ceil(math.log2(len(sizes) + 1))
    count = own // found
    texts = largest_that_fits(memory, Trial(found), "texts", [n for n in TEXTS_AT_ONCE if n <= count])
    assert texts == max(n for n in (1, 2, 4) if n <= max(1, count) and memory.taken(Trial(found, n)) <= capacity)
    memory.trials = 0
    graphs = largest_that_fits(memory, Trial(found, texts), "graphs", range(1, count + 1))
    assert graphs == max(n for n in range(1, count + 1) if memory.taken(Trial(found, texts, n)) <= capacity)
    assert memory.trials <= 6


@pytest.mark.parametrize(
    ("kept", "synchronises", "found"),
    [
        (1_900, False, 512),  # three graphs of 512 leave less to encode twice than one of 1,024, and than seven of 256
        (4_096, False, 1024),  # all are kept
        (4_096, True, 512),  # but for the last one
        (1_100, False, 1024),  # a fourth is kept of each
    ],
)
def test_graphs_that_are_kept_decide_about_the_micro_batch(kept, synchronises, found):
    assert quickest([256, 512, 1024], 4096, kept, synchronises=synchronises) == found
    assert quickest([256, 512, 1024], 1024, 1_100, synchronises=synchronises) == 1024, "which is encoded once"


@pytest.mark.parametrize(
    ("fit", "pairs", "eager", "compiled"),
    [
        (1_815, 4_096, 512, 512),  # ViT-B/16, of which six graphs are kept
        (1_815, 1_024, 1024, 1024),
        (530, 1_024, 512, 256),  # ViT-L/14: three graphs of 256 are kept, or one of 512
        (3_770, 4_096, 512, 512),  # ViT-B/32 with texts of 77 tokens
        (4_200, 4_096, 1024, 1024),
    ],
)
def test_graphs_of_compiled_layers_are_smaller_than_those_of_a_trial(
    tmp_path, monkeypatch, fit, pairs, eager, compiled
):
    """The eager pairs that fit into an H200, and the micro-batches that are found."""
    args = arguments(tmp_path, **FREE, global_batch_size=pairs)
    for found, compiles in ((eager, False), (compiled, True)):
        monkeypatch.setattr(finding, "may_compile", lambda args, compiles=compiles: compiles)
        assert finding._micro_batch(args, Memory(14 * fit + 5, pairs), Trial(0)) == found


def test_nothing_fits_and_what_another_process_holds_counts(monkeypatch):
    memory = Memory(13, 64)
    assert largest_that_fits(memory, Trial(0), "micro_batch", [1, 2, 4]) == 0
    assert largest_that_fits(memory, Trial(64), "graphs", range(1, 4)) == 1
    memory = Memory(10**6, 64)
    for of_another, trial, name, candidates in (
        (32, Trial(0), "micro_batch", [16, 32, 64]),
        (2, Trial(16), "texts", [2, 4]),
        (3, Trial(16), "graphs", range(1, 5)),
    ):
        monkeypatch.setattr(Processes, "agree", lambda self, numbers, of=of_another: [numbers, [of]])
        assert largest_that_fits(memory, trial, name, candidates) == of_another


@pytest.mark.parametrize(("total", "expected"), [(80, 4), (75, 4), (74, 3), (40, 2), (39, 1), (20, 1)])
def test_graphs_are_measured_in_windows_alone(monkeypatch, total, expected):
    """Of 17 bytes each, beside 2 that rest and one more that a window takes, and a twentieth of the memory is free."""
    total, peak = 100 * total, [0]
    values = {"memory_allocated": 200, "memory_reserved": 300, "mem_get_info": (4 * total - 300, 4 * total)}
    values |= {"get_per_process_memory_fraction": 0.25}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 0))
    budget, kept = GraphBudget("auto", torch.device("cuda")), []
    for _ in range(6):
        kept.append(budget.graphs(4))
        peak[0] = 200 + 100 + 1700 * kept[-1]
        budget.end_window()
        peak[0] = total  # of an evaluation
    assert kept[:2] == [1, 1], "before the optimizer has its state"
    assert kept[3:] == [expected] * 3
    assert 300 + 1700 * expected <= 0.95 * total or expected == 1


@pytest.mark.parametrize(("alike", "expected"), [(True, 11), (False, 9)])
def test_further_graphs_may_have_been_the_smaller_ones(monkeypatch, alike, expected):
    """One takes 10 bytes, each further one 8 in the window in which they are measured, of 95 that may be used."""
    peak = [0]
    values = {"memory_allocated": 0, "memory_reserved": 0, "mem_get_info": (100, 100)}
    values |= {"get_per_process_memory_fraction": 1.0}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    budget = GraphBudget("auto", torch.device("cuda"), alike=alike)
    for _ in range(3):
        peak[0] = 10 + 8 * (budget.graphs(12) - 1)
        budget.end_window()
    assert budget.graphs(12) == expected


# ---- Batches are split and repeated ----


def batch_of_captions() -> dict[str, Any]:
    """Three images with 2, 1 and 3 captions, in no order, and three negative captions."""
    belongs = torch.tensor([1, 2, -1, 0, 2, 0, -1, 2, -1])
    return {
        "pixel_values": torch.arange(3.0)[:, None],
        "input_ids": torch.arange(9)[:, None],
        "attention_mask": torch.ones(9, 1),
        "caption_image": belongs,
        "pair_ids": torch.tensor([5, 6, 7]),
        "teacher_images": torch.arange(3.0) * 2,
        "teacher_texts": torch.arange(9.0) * 3,
        "new_images": 2,
        "return_loss": True,
    }


@pytest.mark.parametrize("largest", [1, 2])
def test_a_batch_is_split_with_its_captions(largest):
    whole = batch_of_captions()
    parts = split_batches([whole, whole], largest)
    assert [len(part["pixel_values"]) for part in parts] == ([1, 1, 1] if largest == 1 else [2, 1]) * 2
    parts = parts[: len(parts) // 2]
    for name in ("pixel_values", "pair_ids", "teacher_images"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name]), "images keep their order"
    assert sum(part["new_images"] for part in parts) == 2
    assert all(part["return_loss"] for part in parts)
    negatives, captions, first = [], {}, 0
    for part in parts:
        assert torch.equal(part["teacher_texts"], part["input_ids"].flatten() * 3.0)
        assert len(part["attention_mask"]) == len(part["input_ids"]) == len(part["caption_image"])
        for text, image in zip(part["input_ids"].flatten().tolist(), part["caption_image"].tolist(), strict=True):
            if image < 0:
                negatives.append(text)
            else:
                captions[text] = image + first
        first += len(part["pixel_values"])
    assert sorted(negatives) == [2, 6, 8]
    assert captions == {t: i for t, i in enumerate(whole["caption_image"].tolist()) if i >= 0}
    shares = [int((part["caption_image"] < 0).sum()) for part in parts]
    assert max(shares) - min(shares) <= 1


def test_a_batch_is_split_without_copies_and_repeated():
    whole = models.Pairs(6).batch(range(6))
    parts = split_batches([whole], 4)
    assert [len(part["input_ids"]) for part in parts] == [3, 3]
    assert parts[1]["pixel_values"].untyped_storage().data_ptr() == whole["pixel_values"].untyped_storage().data_ptr()
    again = repeated(whole, 8)
    assert torch.equal(again["input_ids"], whole["input_ids"][[0, 1, 2, 3, 4, 5, 0, 1]])
    more = repeated(batch_of_captions(), 4)
    assert (len(more["pixel_values"]), len(more["input_ids"])) == (4, 6 + 2 + 2 * 3)


# ---- What a training finds ----


def measured(known: Callable[[], bool] = lambda: True) -> contextlib.ExitStack:
    """A context in which the memory of the device is known, and what is tried on the CPU takes one byte of it."""
    values = {"memory_allocated": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None}
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.multiple(torch.cuda, **{n: lambda _, v=v: v for n, v in values.items()}))
    stack.enter_context(mock.patch.object(finding, "left_over", return_value=(0, 0)))
    stack.enter_context(mock.patch.object(Trials, "_reserve", return_value=0))
    stack.enter_context(mock.patch.object(finding, "memory_is_known", side_effect=lambda device: known()))
    return stack


class Limit:
    """Forwards of more images than ``images`` run out of memory."""

    def __init__(self, model: nn.Module, images: int) -> None:
        self.images, self.forwards = images, 0
        model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.forwards += 1
        if len(kwargs["pixel_values"]) > self.images:
            raise torch.OutOfMemoryError("Tried to allocate too much.")


def trained(folder: Any, limit: int | None = None, **options: Any) -> Any:
    """A training with a device whose memory holds micro-batches of so many pairs, if it is known."""
    model = options.pop("model", None) or models.clip()
    trainer = trainer_for(folder, model, **{"data": models.Pairs(64), **OPTIONS, **options})
    with measured(lambda: limit is not None):
        if limit is not None:
            trainer.limit = Limit(model, limit)
        trainer.train()
    return trainer


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_found_trains_as_if_it_had_been_given(tmp_path, caplog, dropout):
    found = trained(tmp_path, 5, global_batch_size=16, model=models.clip(dropout))
    args = found.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 4)
    (said,) = [r.getMessage() for r in caplog.records if "found in" in r.getMessage()]
    assert said.startswith("Global batch of 16 pairs = 4 × 4 × 1, 2 graphs kept: found in ")
    options = "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --texts_at_once 1 --retain_graphs 2"
    assert said.endswith(f"To fix it: {options}")
    assert torch.equal(parameters(found), parameters(trained(tmp_path, **FOURS, model=models.clip(dropout))))


def test_a_trial_changes_nothing(tmp_path):
    """Running statistics, gradients, random numbers and the precision of the forward are as before."""
    model = models.groupvit()
    trainer = trainer_for(tmp_path, model, **OPTIONS, global_batch_size=16, data=models.Pairs(64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, forward = torch.get_rng_state(), model.forward
    with measured():
        finding.find_micro_batches(trainer.context, None, trainer.get_train_dataloader)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.forward == forward
    assert all(p.grad is None for p in model.parameters())


def test_a_trial_that_runs_out_of_memory_leaves_no_autocast(tmp_path):
    """As `Accelerator.autocast` does after an error in it, before accelerate 1.11."""
    model = models.clip()
    entered: list[Any] = []
    seen: list[tuple[int, bool]] = []

    @contextlib.contextmanager
    def of_older_accelerate(accelerator: Any) -> Iterator[None]:
        entered.append(accelerator)
        yield
        entered.pop()

    def limit(tower: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append((len(kwargs["pixel_values"]), torch.is_autocast_enabled("cpu")))
        if len(kwargs["pixel_values"]) > 5:
            raise torch.OutOfMemoryError("Tried to allocate too much.")

    model.vision_model.register_forward_pre_hook(limit, with_kwargs=True)
    trainer = trainer_for(tmp_path, model, **OPTIONS, global_batch_size=16, bf16=True, data=models.Pairs(64))
    with measured(), mock.patch.object(Accelerator, "autocast", of_older_accelerate):
        finding.find_micro_batches(trainer.context, None, trainer.get_train_dataloader)
    assert trainer.args.per_device_train_batch_size == 4
    assert {pairs for pairs, _ in seen} >= {4, 8}
    assert all(in_bf16 for _, in_bf16 in seen)
    assert not entered
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", ["longest", "max_length", "unknown"])
def test_texts_are_put_together_where_they_have_one_length_or_are_padded(tmp_path, kind):
    collator: Any = partial(default_collate)  # which may have attributes
    collator.text_padding = {"input_ids": 1, "attention_mask": 0} if kind == "longest" else None
    collator.text_options, collator.max_length = {"padding": kind}, 12
    model = models.clip()
    widths = set()
    model.register_forward_pre_hook(lambda m, _, inputs: widths.add(inputs["input_ids"].shape[1]), with_kwargs=True)
    trainer = trained(tmp_path, 4, global_batch_size=32, model=model, data_collator=collator, max_steps=1)
    assert trainer.args.texts_at_once == ("1" if kind == "unknown" else "4")
    assert max(widths) == (12 if kind == "longest" else models.LENGTH), "the longest texts were tried"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ("4", "4")),
        ({"retain_graphs": "2"}, ("4", "2")),
        ({"texts_at_once": 2}, ("2", "4")),
        ({"texts_at_once": 2, "retain_graphs": "3"}, ("2", "3")),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, ("1", "auto")),  # few kernels; no trial
        ({"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16}, ("1", "1")),
    ],
    ids=str,
)
def test_texts_and_graphs_are_found_for_micro_batches_that_are_given(tmp_path, options, found):
    collator: Any = partial(default_collate)  # which may have attributes
    collator.text_padding, collator.max_length = {"input_ids": 1, "attention_mask": 0}, models.LENGTH

    def fits(trials: Any, trial: Trial, tried: Any = Trials.__call__) -> tuple[int, int]:
        tried(trials, trial)
        return 1, 10

    with mock.patch.object(Trials, "__call__", fits):
        trainer = trained(tmp_path, 16, **{**FOURS, "data_collator": collator, "max_steps": 1, **options})
    assert (trainer.args.texts_at_once, trainer.args.retain_graphs) == found
    assert trainer.args.per_device_train_batch_size == options.get("per_device_train_batch_size", 4)


def test_given_options_stay_and_a_second_training_searches_anew(tmp_path):
    trainer = trained(tmp_path, 4, global_batch_size=16, per_device_train_batch_size=2, retain_graphs="2")
    assert (trainer.args.gradient_accumulation_steps, trainer.args.retain_graphs) == (8, "2")
    trainer = trained(tmp_path, 4, global_batch_size=16)
    assert trainer.args.per_device_train_batch_size == 4
    trainer.limit.images = 2
    with measured():
        trainer.train()
    assert trainer.args.per_device_train_batch_size == 2


def test_a_batch_that_what_fits_does_not_divide_is_refused_before_the_first_step(tmp_path):
    data = models.Pairs(100)
    with mock.patch.object(batch_division, "UNTRIED", 37):
        with pytest.raises(ValueError, match=r"74 .* which is 32 pairs here: .* has 2. Choose 64 or 80, or give"):
            trained(tmp_path, 36, global_batch_size=74, data=data)
        for limit, found in ((37, 37), (12, 2)):
            trainer = trained(tmp_path, limit, global_batch_size=74, data=data)
            assert trainer.args.per_device_train_batch_size == found


def test_nothing_fits(tmp_path):
    with pytest.raises(ValueError, match="Not even micro-batches of 1 pair fit into the memory of every process"):
        trained(tmp_path, 0, global_batch_size=16)


class Noisy(models.Pairs):
    """Pairs whose images have noise of a generator of their own."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.generator = torch.Generator()

    def __getitem__(self, row: int) -> dict[str, Any]:
        item = super().__getitem__(row)
        return {**item, "pixel_values": item["pixel_values"] + torch.rand(1, generator=self.generator)}


def test_what_is_tried_draws_nothing_from_the_dataset_of_the_workers(tmp_path):
    trainers = [
        trained(tmp_path, limit, **sizes, data=Noisy(64), dataloader_num_workers=2)
        for limit, sizes in ((5, {"global_batch_size": 16}), (None, FOURS))
    ]
    assert torch.equal(*map(parameters, trainers))


def test_a_wrong_batch_is_refused_before_it_is_tried(tmp_path):
    def without_images(items: Any) -> Any:
        return {name: value for name, value in default_collate(items).items() if name != "pixel_values"}

    with pytest.raises(ValueError, match=r'a dict with pixel_values and input_ids at least, got keys.*its "caption"'):
        trained(tmp_path, 4, global_batch_size=16, data_collator=without_images)


def rank_found(rank: int, world_size: int, folder: str) -> tuple[Any, ...]:
    trainer = trained(folder, [9, 3][rank], global_batch_size=32)
    with alone():
        assert Processes().world_size == 1

    def attempt(trial: Trial) -> tuple[int, int]:
        if rank == 0:
            raise ValueError("broken")
        return 1, 1

    with pytest.raises([ValueError, OtherRankFailedError][rank], match="broken"):
        largest_that_fits(attempt, Trial(0), "micro_batch", [1])
    return trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps, parameters(trainer)


def rank_given(rank: int, world_size: int, folder: str) -> torch.Tensor:
    return parameters(trained(folder, per_device_train_batch_size=2, gradient_accumulation_steps=8))


def test_processes_agree_on_what_the_smallest_can_hold(ranks, tmp_path):
    found = ranks.run(rank_found, 2, str(tmp_path))
    given = ranks.run(rank_given, 2, str(tmp_path))
    for micro_batch, accumulation, weights in found:
        assert (micro_batch, accumulation) == (2, 8)
        assert torch.equal(weights, given[0])


def test_replay_and_streams(tmp_path):
    write_tars(shards := tmp_path / "shards", [10] * 8)
    for replays in (False, True):
        trainers = []
        for limit, given in ((4, {"global_batch_size": 16}), (None, FOURS)):
            data = {"data": stream_of(shards), "data_collator": collate}
            data |= {"replay_dataset": stream_of(shards, seed=3), "replay_share": 0.5} if replays else {}
            trainers.append(trained(tmp_path, limit, **given, **data))
        assert trainers[0].args.per_device_train_batch_size == 4
        assert torch.equal(*map(parameters, trainers))


# ---- Steps that run out of memory ----


class RunsOut:
    """Memory runs out from forward number ``number``, or its backward, on; at most so many times."""

    def __init__(self, model: nn.Module, number: int, *, backward: bool = False, images: int = 4, most: int = 9):
        self.number, self.backward, self.images, self.most = number, backward, images, most
        self.forwards = self.raised = 0
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.large = len(kwargs["pixel_values"]) >= self.images
        self.forwards += 1
        if not self.backward and self._due():
            self._run_out()

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self.backward and self._due() and outputs.image_embeds.requires_grad:
            outputs.image_embeds.register_hook(lambda gradient: self._run_out())

    def _due(self) -> bool:
        return self.large and self.forwards >= self.number and self.raised < self.most

    def _run_out(self) -> None:
        self.raised += 1
        raise torch.OutOfMemoryError("Tried to allocate too much.")


def halving(folder: Any, number: int, *, backward: bool = False, **options: Any) -> tuple[Any, RunsOut]:
    model = options.pop("model", None) or models.clip()
    with mock.patch.object(batch_division, "UNTRIED", 4):
        options = {"data": models.Pairs(64), **OPTIONS, "global_batch_size": 16, **options}
        trainer = trainer_for(folder, model, **options)
    assert trainer.args.per_device_train_batch_size == 4
    return trainer, RunsOut(trainer.model, number, backward=backward)


# A window of 4 micro-batches takes 4 forwards in the first pass, and 3 in the second.
PLACES = [("softmax", *place) for place in ((8, False), (11, False), (12, False), (14, False), (9, True), (14, True))]
PLACES += [("sigmoid", 8, False), ("sigmoid", 14, True)]


@pytest.mark.parametrize(("objective", "number", "backward"), PLACES)
def test_a_step_that_runs_out_of_memory_is_repeated_with_halved_micro_batches(
    tmp_path, once, caplog, objective, number, backward
):
    expected = once(objective, lambda: parameters(trained(tmp_path, **FOURS, model=MODELS[objective]())))
    trainer, memory = halving(tmp_path, number, backward=backward, model=MODELS[objective]())
    trainer.train()
    assert memory.raised == 1, "memory ran out once"
    assert trainer.args.largest_micro_batch == 2
    assert [len(trainer.training_data.window.sizes[0])] == [0], "the last window was let go of"
    torch.testing.assert_close(parameters(trainer), expected, rtol=1e-5, atol=1e-6)
    (said,) = [r.getMessage() for r in caplog.records if "ran out of memory" in r.getMessage()]
    assert said.startswith(
        "The step after step 1 ran out of memory with micro-batches of 4 pairs. It is repeated with 2"
    )


def test_micro_batches_are_halved_until_they_fit_and_no_further(tmp_path):
    trainer, memory = halving(tmp_path, 1)
    memory.images = 2
    trainer.train()
    assert (memory.raised, trainer.args.largest_micro_batch) == (2, 1)
    trainer, memory = halving(tmp_path, 1)
    memory.images = 1
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


# groupvit has running statistics. test_repeated_steps.py has other options, to the bit.
def test_running_statistics_are_exact_in_a_repeated_step(tmp_path):
    given = {"learning_rate": 1e-4}
    repeated, _ = halving(tmp_path, 10, model=models.groupvit(), **given)
    trainers = [repeated, trained(tmp_path, model=models.groupvit(), **FOURS, **given)]
    repeated.train()
    assert trainers[0].args.largest_micro_batch == 2
    # They depend on the micro-batch, but every image counts once.
    counted = [{n: b for n, b in t.model.named_buffers() if "num_batches" in n} for t in trainers]
    for name, number in counted[1].items():
        assert counted[0][name] == number / 12 * (4 + 8 + 8), name


@pytest.mark.parametrize("images", [4, 5])
def test_what_is_logged_and_counted_is_that_of_whole_micro_batches(tmp_path, images):
    """Also where halves differ by one pair."""
    counted: dict[str, Any] = {"include_num_input_tokens_seen": "all", "max_steps": 4}
    with mock.patch.object(batch_division, "UNTRIED", images):
        halved = trainer_for(tmp_path, data=models.Pairs(64), **{**OPTIONS, "global_batch_size": 3 * images, **counted})
    memory = RunsOut(halved.model, 6, images=images)
    halved.train()
    assert memory.raised == 1
    sizes = {"per_device_train_batch_size": images, "gradient_accumulation_steps": 3}
    whole = trained(tmp_path, **sizes, **counted)
    for name in ("total_flos", "num_input_tokens_seen"):
        assert getattr(halved.state, name) == getattr(whole.state, name) > 0, name


def test_a_bad_row_of_a_repeated_step_is_named(tmp_path):
    data = models.Pairs(64)
    data.images[17] = torch.nan
    trainer, memory = halving(tmp_path, 1, data=data)
    with pytest.raises(ValueError, match=r"image embeddings of micro-batch \d, row \d \(17 of the training set\)"):
        trainer.train()
    assert memory.raised == 1


@pytest.mark.parametrize("known", [False, True])
def test_without_the_one_number_a_step_ends_the_run_and_says_what_would_fit(tmp_path, caplog, known):
    model = models.clip()
    trainer = trainer_for(tmp_path, model, **{**OPTIONS, **FOURS, "data": models.Pairs(64)})
    memory = RunsOut(model, 5, images=3)
    with measured(lambda: known and memory.raised > 0), pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    sizes = "per_device_train_batch_size and gradient_accumulation_steps"
    assert (f"out of memory. 2 and 8 would fit as {sizes}, with the same result. " in caplog.text) == known
    assert f"Pass global_batch_size=16 in place of {sizes}" in caplog.text


def rank_halving(rank: int, world_size: int, folder: str, failing: int, number: int, backward: bool) -> Any:
    trainer, _ = halving(folder, number if rank == failing else 10**9, backward=backward, global_batch_size=32)
    trainer.train()
    return trainer.args.largest_micro_batch, parameters(trainer)


IN_TWO = [(0, 8, False), (1, 8, False), (0, 12, False), (1, 13, False), (0, 9, True), (1, 12, True)]


@pytest.mark.parametrize(("failing", "number", "backward"), IN_TWO)
def test_all_processes_repeat_a_step_for_which_one_has_no_memory(ranks, tmp_path, once, failing, number, backward):
    """In the first pass, and in the second one before the last micro-batch, where gradients are exchanged."""
    plain = once("two processes", lambda: parameters(trained(tmp_path, **FOURS | {"gradient_accumulation_steps": 8})))
    for largest, weights in ranks.run(rank_halving, 2, str(tmp_path), failing, number, backward):
        assert largest == 2
        torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)


def rank_too_late(rank: int, world_size: int, folder: str) -> str:
    trainer, _ = halving(folder, 14, backward=True, global_batch_size=32)  # in all of them, or they would wait
    try:
        trainer.train()
    except (torch.OutOfMemoryError, OtherRankFailedError) as error:
        return type(error).__name__
    return ""


def test_a_backward_that_exchanges_gradients_is_not_repeated(ranks, tmp_path):
    assert ranks.run(rank_too_late, 2, str(tmp_path)) == ["OutOfMemoryError"] * 2


# ---- Resuming ----


def test_a_resumed_run_has_the_same_micro_batches_to_the_bit(tmp_path):
    # Of AdamW, rounding decides about the sign of a step where a gradient is next to nothing.
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "sgd", "optim_args": "momentum=0.9"}
    whole, _ = halving(tmp_path / "whole", 10, **saved)
    whole.train()
    stopped, _ = halving(tmp_path / "stopped", 10, **saved, callbacks=[StopAt(2)])
    stopped.train()
    record = RunRecord.read(tmp_path / "stopped/checkpoint-2")
    assert record is not None
    assert record.micro_batches is not None
    assert record.micro_batches["largest_micro_batch"] == 2
    assert record.micro_batches["machines"] == ["cpu"]
    resumed = trainer_for(tmp_path / "stopped", data=models.Pairs(64), **{**OPTIONS, "global_batch_size": 16, **saved})
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.args.per_device_train_batch_size, resumed.args.largest_micro_batch) == (4, 2)
    assert torch.equal(parameters(resumed), parameters(whole))
    # ---- On another machine ----
    other = trainer_for(tmp_path / "stopped", data=models.Pairs(64), **{**OPTIONS, "global_batch_size": 16, **saved})
    with mock.patch.object(finding, "_machines", return_value=["another"]):
        other.train(resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-2"))
    assert (other.args.per_device_train_batch_size, other.args.largest_micro_batch) == (16, None)
    torch.testing.assert_close(parameters(other), parameters(whole), rtol=0, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(parameters(other), parameters(stopped), rtol=0, atol=1e-6)


def test_the_micro_batch_of_a_stream_stays_on_another_machine(tmp_path):
    """The order of a stream depends on it, so that another one would be refused."""
    write_tars(tmp_path / "shards", [20] * 4)
    options = {"global_batch_size": 16, "max_steps": 4, "data_collator": collate}
    options |= {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    stopped = trained(tmp_path, 5, data=stream_of(tmp_path / "shards"), **options, callbacks=[StopAt(2)])
    assert stopped.args.per_device_train_batch_size == 4
    for known in (False, True):
        other = trainer_for(tmp_path, data=stream_of(tmp_path / "shards"), **{**OPTIONS, **options})
        with (
            mock.patch.object(finding, "_machines", return_value=["another"]),
            measured(lambda known=known: known),
        ):
            other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert other.args.per_device_train_batch_size == 4
        assert other.args.gradient_accumulation_steps == 4
        assert other.state.global_step == 4


def test_windows_keep_what_was_loaded_only_if_a_step_may_be_repeated():
    batches = [models.Pairs(4).batch(range(4)) for _ in range(2)]
    assert Window(batches).loaded == []
    window = Window(batches, {"input_ids": 0, "attention_mask": 0}, 2, keeps_loaded=True)
    window.release(0)
    assert [len(batch["input_ids"]) for batch in window.loaded] == [4, 4]
    assert all("pixel_values" in batch for batch in window.loaded)
