"""A global batch that grows: the plan, exact gradients of each stage, resumes around a change, and what counts."""

import itertools
import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.parity import MODELS, EachGradient, check_each_gradient
from helpers.processes import on_ranks
from helpers.shards import numbered, write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import StopAt, TrainedRows, arguments, parameters, trained, trainer_for
from torch import Tensor, nn

from hf_infcl import reference
from hf_infcl.encoders.dual_encoder import DualEncoder
from hf_infcl.loading.batch_plan import BatchPlan, Position
from hf_infcl.loading.shares import SourceShare
from hf_infcl.options.batch_schedule import BatchSchedule, divided_batch
from hf_infcl.tools.publishing import training_facts

# 9 steps of 4 pairs, 4 of 8 and 2 of 16: 100 pairs.
GROWS = {"global_batch_schedule": ["4:0.3", "8:0.3", "16"], "gradient_accumulation_steps": 1, "max_steps": 15}


def planned(words: str, rows: int | None, **options: Any) -> BatchPlan:
    given: dict[str, Any] = {"epochs": 1, "max_steps": -1, "micro_batch": 4, "processes": 1}
    return BatchPlan(BatchSchedule.of(words.split()), rows, **{**given, **options})


# ---- The plan ----


@pytest.mark.parametrize("words", [["4:0.5", "8:.25", "16"], ["4:0.5 8:.25 16"], "4:0.5 8:.25 16"])
def test_a_schedule_may_be_one_value_or_several(words):
    assert BatchSchedule.of(words) == BatchSchedule((4, 8, 16), (0.5, 0.75))


def test_stages_get_their_shares_of_the_samples():
    plan = planned("256:0.25 512:0.25 1024:0.25 2048", None, max_steps=1080, micro_batch=256)
    sizes = [plan.size(step) for step in range(plan.steps)]
    assert (plan.steps, plan.samples) == (1080, 589_824)
    assert {size: sizes.count(size) for size in sizes} == {256: 576, 512: 288, 1024: 144, 2048: 72}
    assert sizes == sorted(sizes)
    assert [plan.micro_batches(step) for step in (0, 600, 1079)] == [1, 2, 8]


@pytest.mark.parametrize(("options", "passes"), [({"epochs": 1e30}, "1e+30"), ({"max_steps": 10**12}, "1.33e+11")])
def test_passes_without_an_end_are_refused_before_they_are_planned(options, passes):
    with pytest.raises(ValueError, match=f"about {re.escape(passes)} passes over 40 pairs, and a plan has room for"):
        planned("4:0.5 8", 40, **options)


@pytest.mark.parametrize(("rows", "epochs"), [(100, 3), (37, 5), (64, 0.5), (1000, 1)])
def test_passes_leave_out_only_rows_that_fill_no_global_batch(rows, epochs):
    plan = planned("4:0.25 8:0.25 16", rows, epochs=epochs)
    at = [plan.position(step) for step in range(plan.steps + 1)]
    assert at[0] == Position()
    for step, (now, after) in enumerate(itertools.pairwise(at)):
        size = plan.size(step)
        assert now.rows + size <= rows
        assert after.samples - now.samples == plan.samples_before(step + 1) - now.samples == size
        if after.epoch == now.epoch:
            assert (after.rows, after.windows) == (now.rows + size, now.windows + 1)
        else:
            assert (after.epoch, after.rows, after.windows) == (now.epoch + 1, 0, 0)
            assert now.rows + size + plan.size(step + 1) > rows, "the next batch had fitted into the pass"
    last = at[-1]
    assert epochs * rows <= last.epoch * rows + last.rows + 15, "a pass ended too early"
    assert last.epoch * rows + last.rows - plan.size(plan.steps - 1) < epochs * rows
    assert sum(plan.windows(epoch) for epoch in range(plan.epochs)) == plan.steps
    share = [sum(plan.size(s) for s in range(plan.steps) if plan.size(s) == size) for size in (4, 8, 16)]
    assert share[0] == pytest.approx(0.25 * epochs * rows, abs=16 + 16 * epochs)


@pytest.mark.parametrize("options", [{"rows": 53, "epochs": 3}, {"rows": None, "max_steps": 19}])
def test_a_plan_from_any_step_is_the_rest_of_the_whole_plan(options):
    whole = planned("4:0.25 8:0.25 16", **options)
    for step in range(whole.steps):
        rest = planned("4:0.25 8:0.25 16", **options, at=whole.position(step))
        assert (rest.steps, rest.samples) == (whole.steps, whole.samples)
        assert [rest.position(s) for s in range(step, whole.steps + 1)] == [
            whole.position(s) for s in range(step, whole.steps + 1)
        ]
        assert [rest.size(s) for s in range(step, whole.steps)] == [whole.size(s) for s in range(step, whole.steps)]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_row_is_in_one_micro_batch_of_one_process(processes):
    plan = planned("4:0.25 8:0.25 16", 60, epochs=2, processes=processes)
    share, places = SourceShare(plan), []
    while (place := plan.place(len(places))) is not None:
        places.append(place)
    for step in range(plan.steps):
        own = [place for place in places if place.at.step == step]
        assert len(own) == plan.micro_batches(step) * processes
        assert len({place.section.micro_batch for place in own}) == 1
        assert {place.at for place in own} == {plan.position(step)}
        assert [row for place in own for row in share.pairs(place)] == list(range(plan.size(step)))


@pytest.mark.parametrize(
    ("size", "processes", "divided"), [(16, 1, (4, 4)), (16, 2, (4, 2)), (4, 2, (2, 1)), (4, 4, (1, 1)), (3, 1, (3, 1))]
)
def test_micro_batches_shrink_only_where_the_batch_is_smaller(size, processes, divided):
    assert divided_batch(size, 4, processes) == divided


# ---- Exact gradients through every stage ----

STAGES = {"global_batch_schedule": ["12:0.3", "24:0.3", "48"], "gradient_accumulation_steps": 1, "max_steps": 9}
SIZES = [12] * 5 + [24] * 3 + [48]


def rank_gradients(
    rank: int, world_size: int, folder: str, micro_batch: int, objective: str
) -> tuple[list[Tensor], list[list[Tensor]]]:
    seen = EachGradient()
    options = {"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 0, **STAGES}
    options |= {"per_device_train_batch_size": micro_batch, "callbacks": [seen]}
    trainer_for(folder, MODELS[objective](), models.Pairs(110), **options).train()
    return seen.weights, seen.gradients


def gradients_of_whole_batches(objective: str, weights: list[Tensor]) -> list[list[Tensor]]:
    """Plain autograd in one process: the rows of each pass in their order, in batches of the stages' sizes."""
    model, data, found, first, epoch = MODELS[objective](), models.Pairs(110), [], 0, 0
    encoder = DualEncoder(model)
    for size, at in zip(SIZES, weights, strict=True):
        nn.utils.vector_to_parameters(at, model.parameters())
        if first + size > 110:
            first, epoch = 0, epoch + 1
        order = torch.randperm(110, generator=torch.Generator().manual_seed(42 + epoch))
        embeds = encoder.embed(model, data.batch(order[first : first + size]))
        loss = reference.contrastive_loss(*embeds, *encoder.scale_and_bias(), objective=objective)
        found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
        first += size
    return found


@pytest.mark.parametrize("objective", MODELS)
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 4), (2, 6), (3, 8), (1, 24)])
def test_gradients_of_each_stage_equal_one_process_with_the_whole_batch(
    ranks, tmp_path, world_size, micro_batch, objective
):
    of_ranks = ranks.run(rank_gradients, world_size, str(tmp_path), micro_batch, objective, always_ring=True)
    check_each_gradient(of_ranks, partial(gradients_of_whole_batches, objective))


# ---- The order of the samples, and resumes ----


def rows_of_steps(folder: Path, data: Any, **options: Any) -> list[list[tuple]]:
    rows = TrainedRows()
    trainer_for(folder, models.clip(), data, callbacks=[rows], **{**GROWS, **options}).train()
    return rows.steps[:-1]


def test_order_is_that_of_a_constant_batch(tmp_path):
    data = models.Pairs(100)
    grown = rows_of_steps(tmp_path / "grown", data)
    constant = {"global_batch_schedule": None, "gradient_accumulation_steps": 1, "max_steps": 25}
    whole = rows_of_steps(tmp_path / "constant", data, **constant)
    assert [len(rows) for rows in grown] == [4] * 9 + [8] * 4 + [16] * 2
    assert list(chain(*grown)) == list(chain(*whole))[: sum(map(len, grown))]


def check_resume(folder: Path, data: Any, stops: Sequence[int], **options: Any) -> None:
    """A run that stops at these steps, and goes on with other weights and random state, ends with the same weights."""
    options = {**GROWS, "learning_rate": 1e-2, **options}
    whole = trained(trainer_for(folder / "whole", models.clip(dropout=0.3), data(), **options))
    for number, stop in enumerate((*stops, 0)):
        options |= {"save_strategy": "steps", "save_steps": stop or 100, "callbacks": [StopAt(stop)] if stop else []}
        model = models.clip(dropout=0.3, seed=5 * number)
        resumed = trained(trainer_for(folder / "parts", model, data(), **options), resume="auto")
        assert resumed.state.global_step == stop or not stop
    kept = ("loss", "grad_norm", "learning_rate", "global_batch_size", "samples_seen", "epoch")
    history = [[{k: e[k] for k in kept} for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert history[0] == history[1]
    assert torch.equal(parameters(whole), parameters(resumed))
    assert resumed.samples_seen == whole.samples_seen == sum(e["global_batch_size"] for e in history[0])
    assert resumed.steps_trained == whole.steps_trained - stops[-1]
    (end,) = (entry for entry in resumed.state.log_history if "train_steps_per_second" in entry)
    pairs = sum(entry["global_batch_size"] for entry in history[1][stops[-1] :])
    told = end["train_samples_per_second"] / end["train_steps_per_second"]
    assert told == pytest.approx(pairs / resumed.steps_trained, rel=0.01), "of the steps of this call"


@pytest.mark.parametrize(
    ("stops", "options"),
    [
        ((1, 9, 10, 11, 13, 14), {}),
        ((11,), {"dataloader_num_workers": 2}),
        ((11,), {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "offload_inputs": True}),
        ((11,), {"max_steps": -1, "num_train_epochs": 2.5, "train_sampling_strategy": "sequential"}),
        ((11,), {"optimizer": "muon"}),
    ],
    ids=["around each change", "workers", "persistent", "epochs in order", "muon"],
)
def test_resume_is_bit_identical(tmp_path, stops, options):
    check_resume(tmp_path, lambda: models.Pairs(61), stops, **options)


def test_resume_of_a_stream_is_bit_identical(tmp_path):
    write_tars(tmp_path / "shards", [40] * 4)
    options = {"data_collator": collate, "dataloader_num_workers": 1}
    check_resume(tmp_path / "runs", lambda: stream_of(tmp_path / "shards"), (9, 10, 12), **options)


@on_ranks(2)
def test_resume_of_two_processes_is_bit_identical(rank, world_size, tmp_path):
    check_resume(Path(tmp_path), lambda: models.Pairs(61), (11,), per_device_train_batch_size=2)


def rank_stream(rank: int, world_size: int, folder: str, output: str) -> list[list[tuple]]:
    return rows_of_steps(Path(output), stream_of(Path(folder)), data_collator=collate, per_device_train_batch_size=2)


def test_a_stream_has_the_same_global_batches_on_any_number_of_processes(ranks, tmp_path):
    write_tars(tmp_path / "shards", [40] * 4)
    one, two = (
        [
            sorted(chain(*rows))
            for rows in zip(*ranks.run(rank_stream, n, str(tmp_path / "shards"), str(tmp_path / str(n))), strict=True)
        ]
        for n in (1, 2)
    )
    assert one == two
    assert [len(rows) for rows in one] == [4] * 9 + [8] * 4 + [16] * 2


def test_the_same_stages_in_other_words_are_no_other_run(tmp_path):
    options = {**GROWS, "save_strategy": "steps", "save_steps": 6}
    trainer_for(tmp_path, models.clip(), models.Pairs(61), **options, callbacks=[StopAt(6)]).train()
    options |= {"global_batch_schedule": "4:.3 8:0.30 16"}
    resumed = trained(trainer_for(tmp_path, models.clip(), models.Pairs(61), **options), resume=True)
    assert resumed.steps_trained == 9
    assert resumed.args.global_batch_schedule == ["4:0.3", "8:0.3", "16"]


@pytest.mark.parametrize("length", [{"max_steps": 15}, {"max_steps": -1, "num_train_epochs": 1.5}])
def test_a_finished_run_trains_nothing_when_resumed(tmp_path, length):
    options = {**GROWS, "save_strategy": "epoch", **length}
    whole = trained(trainer_for(tmp_path, models.clip(), models.Pairs(61), **options))
    again = trained(trainer_for(tmp_path, models.clip(), models.Pairs(61), **options), resume=True)
    assert (again.steps_trained, again.samples_seen) == (0, whole.samples_seen)
    assert torch.equal(parameters(whole), parameters(again))


# ---- What counts ----


def test_learning_rate_runs_over_samples(tmp_path):
    options = {**GROWS, "learning_rate": 1.0, "warmup_steps": 3, "optim": "sgd"}
    trainer, rates = trainer_for(tmp_path, models.clip(), models.Pairs(100), **options), []
    trainer.create_optimizer_and_scheduler(15)
    optimizer, schedule, plan = trainer.optimizer, trainer.lr_scheduler, trainer.batch_plan
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    samples = [plan.samples_before(step) for step in range(15)]
    at = [15 * seen / plan.samples for seen in samples]
    expected = [step / 3 if step < 3 else (15 - step) / 12 for step in at]
    assert rates == pytest.approx(expected)


def test_epochs_evaluations_and_saves_follow_the_plan(tmp_path):
    options = {**GROWS, "max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"include_num_input_tokens_seen": "all"}
    trainer = trained(trainer_for(tmp_path, models.clip(), models.Pairs(50), eval_dataset=models.Pairs(8), **options))
    plan, history = trainer.batch_plan, trainer.state.log_history
    evaluated = [entry for entry in history if "eval_loss" in entry]
    assert [entry["epoch"] for entry in evaluated] == [1, 2, 3]
    ends = [sum(plan.windows(number) for number in range(epoch + 1)) for epoch in range(3)]
    assert [entry["step"] for entry in evaluated] == ends == [12, 12 + plan.windows(1), plan.steps]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == sorted(f"checkpoint-{end}" for end in ends)
    assert trainer.state.global_step == plan.steps == trainer.state.max_steps
    epochs = [entry["epoch"] for entry in history if "loss" in entry]
    assert epochs[:3] == pytest.approx([4 / 48, 8 / 48, 12 / 48])
    assert trainer.state.total_flos == trainer.floating_point_ops(models.Pairs(4).batch()) * plan.samples / 4
    assert trainer.state.num_input_tokens_seen == models.LENGTH * plan.samples


@pytest.mark.parametrize(("max_steps", "passes"), [(10, 52 / 60), (15, 1 + 24 / 56), (20, 1 + 48 / 56)])
def test_the_last_pass_counts_by_its_rows(max_steps, passes):
    plan = planned("4:0.5 8", 60, max_steps=max_steps)
    assert plan.epochs_before(plan.steps) == pytest.approx(passes)


@pytest.mark.parametrize(("stop", "batch"), [(9, 4), (10, 8), (15, 16)])
def test_card_names_the_last_batch_that_was_trained(tmp_path, stop, batch):
    trainer = trained(trainer_for(tmp_path, models.clip(), models.Pairs(100), **GROWS, callbacks=[StopAt(stop)]))
    facts = training_facts(trainer, model_class="CLIPModel", start="me/clip", sources=[], pair_id_column=None)
    assert (facts.global_batch_size, facts.steps) == (batch, stop)
    assert facts.planned_steps == (15 if stop < 15 else None)


def test_progress_bar_counts_pairs(tmp_path, capsys):
    trainer_for(tmp_path, models.clip(), models.Pairs(100), **GROWS, disable_tqdm=False).train()
    assert "100/100" in capsys.readouterr().err.replace("pairs", "")


def test_graphs_are_planned_anew_for_each_batch(tmp_path, monkeypatch):
    from hf_infcl.windows import memory

    made, forgotten = [], []
    real = memory.GraphBudget
    monkeypatch.setattr(memory, "GraphBudget", lambda *args: made.append(args) or real(*args))
    monkeypatch.setattr(memory, "forget_recordings", lambda: forgotten.append(True))
    trainer = trainer_for(tmp_path, models.clip(), models.Pairs(100), **GROWS)
    before = len(made)
    trainer.train()
    assert (len(made) - before, len(forgotten)) == (3, 2)  # with that of the begin of the training


def test_features_of_a_frozen_tower_are_read_from_the_cache(tmp_path):
    data, ends = numbered(range(40)), []
    for cache in (None, str(tmp_path / "features")):
        options = {**GROWS, "freeze": "image", "cache_features": cache, "learning_rate": 1e-2}
        ends.append(parameters(trained(trainer_for(tmp_path / "out", data=data, **options))))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


# ---- Bad input ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_schedule": ["4:0.5"]}, r"must be global batches with their shares.*got 4:0.5"),
        ({"global_batch_schedule": ["8:0.5", "4"]}, "grow, got 8:0.5 4"),
        ({"global_batch_schedule": ["0:0.5", "4"]}, "at least one pair"),
        ({"global_batch_schedule": "8:0.5 8"}, "grow, got 8:0.5 8"),
        ({"global_batch_schedule": ["4:0.7", "8:0.4", "16"]}, "gets the rest"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 contradicts global_batch_schedule"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    options = {**GROWS, "eval_strategy": "steps", "metric_for_best_model": "loss", **options}
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (models.Pairs(100), {"global_batch_schedule": ["4:0.5", "18"]}, "18 pairs.* share equally. 16 pairs would do"),
        (models.Pairs(10), {}, "10 pairs, fewer than one global batch of 16 .* Lower it, for example to 2, use more"),
        (
            models.Pairs(30),
            {"max_steps": -1, "num_train_epochs": 1, "global_batch_schedule": ["4:0.5", "20"]},
            "batch of 20 pairs that no step would train: a pass over 30 pairs ends where it no longer fits in",
        ),
        (
            models.Pairs(100),
            {"max_steps": 2},
            "16 pairs that no step would train: the 2 steps with 12 pairs in all are too few for its share. Give",
        ),
        (
            models.Pairs(100),
            {"max_steps": -1, "num_train_epochs": 0.1},
            r"16 pairs that no step would train: the 2 steps with 12 pairs in all are too few for its share",
        ),
        (models.Pairs(100), {"global_batch_schedule": ["4:0.001", "16"]}, "batch of 4 pairs that no step would train"),
        (models.Stream(100), {}, "needs a dataset with a length or an ImageTextStream, got a Stream"),
    ],
)
def test_batches_that_the_data_cannot_fill_are_refused(tmp_path, data, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, models.clip(), data, **{**GROWS, **options})


def test_smaller_micro_batches_of_a_stream_are_refused(tmp_path):
    write_tars(tmp_path / "shards", [40] * 4)
    options = {**GROWS, "per_device_train_batch_size": 8, "data_collator": collate}
    with pytest.raises(ValueError, match=r"batch of 4 pairs.*micro-batches of a stream.*at most 4"):
        trainer_for(tmp_path / "out", models.clip(), stream_of(tmp_path / "shards"), **options)
