"""A run that is resumed with changes trains what is left of it, in samples, and says what was changed, and when."""

import itertools
from typing import Any

import pytest
import torch
from helpers import models
from helpers.shards import numbered, write_tars
from helpers.streams import collate, stream_of
from helpers.trainers import StopAt, TrainedRows, parameters, trained, trainer_for

from hf_infcl import InfCLTrainer
from hf_infcl.checkpoints.record import Stage
from hf_infcl.options.batch_schedule import EqualBatches
from hf_infcl.tools.publishing import Source, training_facts
from hf_infcl.tools.publishing.cards import model_card
from hf_infcl.tools.publishing.facts import TrainingFacts

DATA = [Source("me/data", on_hub=True)]
EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps"}


def part(folder: Any, data: Any, stop: int = 0, **options: Any) -> tuple[InfCLTrainer, list[list[tuple]]]:
    """One part of a run, up to a step if one is given, and the rows of each of its steps."""
    rows = TrainedRows()
    options = {**EPOCHS, "save_steps": stop or 1000, "resume_with_changes": True, **options}
    options["callbacks"] = [rows, *([StopAt(stop)] if stop else [])]
    return trained(trainer_for(folder, data=data, **options), resume="auto"), rows.steps[:-1]


# ---- What is left ----


@pytest.mark.parametrize(
    ("pairs", "stop", "batches", "epochs", "steps"),
    [
        (61, 20, (1, 4), 2, 2),  # 20 pairs of the second pass are trained, of the other 41 two batches of 16
        (61, 20, (1, 3), 2, 3),
        (61, 11, (2, 1), 2, 7),  # a smaller batch: 32 pairs of the second pass are trained
        (50, 67, (1, 4), 6, 1),  # epoch 5.58 of 6
        (61, 15, (1, 4), 2, 3),  # at the end of a pass
        (61, 14, (1, 2), 1.5, 4),  # 5 pairs of the first pass are too few; half of the second pass are 4 batches of 7
    ],
)
def test_what_is_left_of_the_epochs_is_trained_with_another_batch(tmp_path, pairs, stop, batches, epochs, steps):
    data = models.Pairs(pairs)
    first, later = ({"gradient_accumulation_steps": n, "num_train_epochs": epochs} for n in batches)
    earlier, before = part(tmp_path, data, stop, **first)
    resumed, rows = part(tmp_path, data, **later)
    assert resumed.steps_trained == len(rows) == steps == resumed.state.max_steps - stop
    assert resumed.samples_seen == earlier.samples_seen + steps * 4 * batches[1]
    # No pair is trained twice in a pass, and only those are left out that fill no global batch.
    per_pass = pairs // (4 * batches[0])
    begun = before[stop // per_pass * per_pass :]
    if pairs - sum(map(len, begun)) < 4 * batches[1]:
        begun = []
    left = (pairs - sum(map(len, begun))) // (4 * batches[1])
    of_pass = list(itertools.chain(*begun, *rows[:left]))
    assert len(set(of_pass)) == len(of_pass)


@pytest.mark.parametrize("sampling", ["random", "sequential"])
def test_the_rest_of_a_pass_follows_the_trained_pairs_and_is_resumed_to_the_bit(tmp_path, sampling):
    data, options = models.Pairs(61), {"train_sampling_strategy": sampling, "learning_rate": 1e-2}
    part(tmp_path, data, 5, **options)
    _, rows = part(tmp_path, data, 7, gradient_accumulation_steps=4, **options)
    again, rest = part(tmp_path, data, gradient_accumulation_steps=4, **options)
    order = torch.arange(61) if sampling == "sequential" else torch.randperm(61, generator=_seeded(42))
    assert [sorted(step) for step in rows] == [
        sorted(map(tuple, data.tokens[order[at : at + 16]].tolist())) for at in (20, 36)
    ]
    assert again.state.max_steps == 5 + 2 + 3, "61 - 20 pairs of the first pass, and all of the second"
    part(tmp_path / "whole", data, 5, **options)
    whole, at_once = part(tmp_path / "whole", data, gradient_accumulation_steps=4, **options)
    assert at_once == rows + rest
    assert torch.equal(parameters(whole), parameters(again))
    if sampling == "sequential":
        flat = [row for step in at_once for row in sorted(step)]
        expected = [tuple(data.tokens[row % 61].tolist()) for row in range(20, 20 + 5 * 16)]
        assert sorted(flat) == sorted(expected), "a pass begins with the row after the last one"


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_learning_rate_goes_on_with_the_samples_that_are_left(tmp_path):
    options = {"learning_rate": 1e-3, "lr_scheduler_type": "linear"}
    part(tmp_path, models.Pairs(64), 8, num_train_epochs=1, **options)  # half of 16 steps
    resumed, _ = part(tmp_path, models.Pairs(64), num_train_epochs=1, gradient_accumulation_steps=4, **options)
    rates = [entry["learning_rate"] for entry in resumed.state.log_history if "loss" in entry]
    assert rates[7:] == pytest.approx([1e-3 * 9 / 16, 1e-3 / 2, 1e-3 / 4])


@pytest.mark.parametrize("batches", [(1, 4), (4, 1)])
@pytest.mark.parametrize("kind", ["rows", "stream", "sized stream"])
def test_max_steps_counts_steps_of_any_batch(tmp_path, batches, kind):
    data = {"rows": models.Pairs(70), "stream": models.Stream(300), "sized stream": models.SizedStream(300)}[kind]
    earlier, _ = part(tmp_path, data, 6, max_steps=10, gradient_accumulation_steps=batches[0])
    resumed, rows = part(tmp_path, data, max_steps=10, gradient_accumulation_steps=batches[1])
    assert (resumed.steps_trained, resumed.samples_seen) == (4, earlier.samples_seen + 4 * 4 * batches[1])
    assert {len(step) for step in rows} == {4 * batches[1]}
    if kind != "rows":
        first = -(-6 * batches[0] // batches[1]) * 4 * batches[1]  # after whole windows
        assert set(rows[0]) == set(map(tuple, data.data.tokens[first : first + 4 * batches[1]].tolist()))


def test_a_stream_of_shards_and_replayed_pairs_train_what_is_left(tmp_path):
    write_tars(tmp_path / "shards", [40] * 4)

    def stream() -> Any:
        return stream_of(tmp_path / "shards", samples_per_epoch=61, lanes=1)

    options = {"data_collator": collate}
    part(tmp_path / "stream", stream(), 20, **options)
    resumed, _ = part(tmp_path / "stream", stream(), gradient_accumulation_steps=4, **options)
    assert (resumed.steps_trained, resumed.samples_seen) == (2, 80 + 32)

    def replay(stop: int = 0, **changes: Any) -> InfCLTrainer:
        options = {**EPOCHS, "replay_share": 0.5, "save_steps": stop or 1000, "resume_with_changes": True, **changes}
        options |= {"replay_dataset": models.Pairs(30, seed=1), "callbacks": [StopAt(stop)] if stop else []}
        return trained(trainer_for(tmp_path / "replay", data=models.Pairs(30), **options), resume="auto")

    replay(20)  # 15 steps of 2 new pairs, and 5 of the second pass, in which 20 of 30 pairs are left
    assert replay(gradient_accumulation_steps=4).steps_trained == 2


def test_a_table_can_take_the_place_of_a_stream_and_of_a_replay(tmp_path):
    write_tars(tmp_path / "shards", [40] * 4)
    shards = stream_of(tmp_path / "shards", lanes=1)
    for replay in (None, shards):
        options = {"max_steps": 6, "data_collator": collate, "resume_with_changes": True, "save_steps": 3}
        options |= {"save_strategy": "steps", "replay_dataset": replay, "replay_share": replay and 0.5}
        folder = tmp_path / f"replay {replay is not None}"
        trained(trainer_for(folder, data=shards, callbacks=[StopAt(3)], **options))
        options |= {"replay_dataset": None, "replay_share": None}
        table, rows = numbered(range(48)), TrainedRows()
        resumed = trained(trainer_for(folder, data=table, callbacks=[rows], **options), resume="auto")
        assert (resumed.steps_trained, resumed.samples_seen) == (3, 48)
        assert len({row for step in rows.steps for row in step}) == 24, "no row comes twice"


def test_the_kinds_of_new_and_old_pairs_stay(tmp_path):
    write_tars(tmp_path / "shards", [40] * 4)
    sets = {"stream": stream_of(tmp_path / "shards", lanes=1), "table": numbered(range(40))}

    def run(new: str, old: str) -> InfCLTrainer:
        options = {"max_steps": 6, "data_collator": collate, "resume_with_changes": True, "save_steps": 3}
        options |= {"save_strategy": "steps", "replay_dataset": sets[old], "replay_share": 0.5}
        return trainer_for(tmp_path / "out", data=sets[new], **options)

    trained(run("table", "stream"))
    for new, old in (("table", "table"), ("stream", "table"), ("stream", "stream")):
        with pytest.raises(ValueError, match="holds no position in new and old pairs of these kinds"):
            run(new, old).train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-3")


def test_a_model_of_another_size_cannot_take_the_weights(tmp_path):
    trained(trainer_for(tmp_path, save_strategy="steps", save_steps=1))
    larger = trainer_for(tmp_path, image_size=24, resume_with_changes=True)
    with pytest.raises(ValueError, match=r"model was 'CLIPModel with .* and is 'CLIPModel .*its weights do not fit"):
        larger.train(resume_from_checkpoint=True)


def test_a_smaller_training_set_ends_the_pass_that_has_begun(tmp_path):
    part(tmp_path, models.Pairs(61), 12)
    resumed, _ = part(tmp_path, models.Pairs(41))
    assert resumed.steps_trained == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 4}, r"step 12, which is epoch 2, and num_train_epochs=2 leaves .* 16 pairs"),
        ({"num_train_epochs": 1}, r"step 12, which is epoch 2, and num_train_epochs=1 leaves no .* 4 pairs"),
        ({"max_steps": 9}, r"step 12, and max_steps=9 allows no further one"),
        ({"global_batch_schedule": ["4:0.5", "8"]}, r"step 12, which is epoch 2, and num_train_epochs=2"),
    ],
)
def test_changes_that_leave_nothing_to_train_are_an_error(tmp_path, changes, message):
    part(tmp_path, models.Pairs(25), save_steps=12)
    with pytest.raises(ValueError, match=f"Nothing is left to train: .*checkpoint-12 was saved after {message}"):
        part(tmp_path, models.Pairs(25), **changes)
    same, _ = part(tmp_path, models.Pairs(25))  # without any, it is complete, although they are allowed
    assert same.steps_trained == 0


# ---- The intervals ----


def test_the_intervals_of_the_command_replace_those_of_the_checkpoint(tmp_path, caplog):
    every = {"max_steps": 8, "eval_strategy": "steps", "eval_dataset": models.Pairs(8)}
    part(tmp_path, models.Pairs(40), 2, logging_steps=1, eval_steps=2, **every)
    changed = {"logging_steps": 2, "save_steps": 3, "eval_steps": 4, "resume_with_changes": False}
    resumed, _ = part(tmp_path, models.Pairs(40), **every, **changed)
    history = [entry for entry in resumed.state.log_history if entry["step"] > 2]
    assert [entry["step"] for entry in history if "loss" in entry] == [4, 6, 8]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [4, 8]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} >= {"checkpoint-3", "checkpoint-6"}
    told = "logging_steps was 1 and is 2, eval_steps was 2 and is 4, save_steps was 2 and is 3"
    assert f"checkpoint-2 is resumed with other intervals: {told}." in caplog.text


# ---- Stages ----


def test_the_card_lists_the_stages_of_a_run_that_was_resumed_with_changes(tmp_path):
    options = {"num_train_epochs": 4}
    part(tmp_path, models.Pairs(25), 6, **options)
    part(tmp_path, models.Pairs(25), 8, learning_rate=1e-3, gradient_accumulation_steps=2, **options)
    # An interruption is no stage.
    part(tmp_path, models.Pairs(25), 9, learning_rate=1e-3, gradient_accumulation_steps=2, **options)
    last, _ = part(tmp_path, models.Pairs(25, repeats=2), 11, seed=3, learning_rate=1e-3, **options)
    first, second = last.resumption.stages
    assert first == Stage(6, 24, ["global_batch_size was 4 and is 8", "learning_rate was 5e-05 and is 0.001"])
    assert (second.step, second.samples_seen) == (9, 48)
    assert "global_batch_size was 8 and is 4" in second.changes
    made = training_facts(last, model_class="CLIPModel", start="me/clip", sources=DATA, pair_id_column=None)
    made.save(tmp_path)
    card = str(model_card(TrainingFacts.load(tmp_path)))
    assert "| stages | steps 1 to 6 with 24 pairs; steps 7 to 9 with 24 pairs, where `global_batch_size was 4" in card
    assert "; steps 10 to 11 with 8 pairs, where `global_batch_size was 8 and is 4`, " in card
    assert "The other rows describe the last stage |" in card


def test_what_differs_in_an_optimizer_of_one_s_own_is_in_its_stage(tmp_path):
    def run(stop: int, rate: float) -> InfCLTrainer:
        model = models.clip()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        made = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)
        options = {**EPOCHS, "max_steps": 4, "save_steps": stop, "resume_with_changes": True}
        options |= {"optimizers": made, "callbacks": [StopAt(stop)]}
        return trained(trainer_for(tmp_path, model, models.Pairs(8), **options), resume="auto")

    run(2, 0.1)
    assert run(3, 0.2).resumption.stages == [Stage(2, 8, ["lr was 0.1 and is 0.2"])]


# ---- Shares ----


def test_shares_are_of_the_samples_where_batches_have_had_other_sizes():
    course = EqualBatches(16, steps=10, begin=8, earlier=32)  # 8 steps of 4 pairs, then 2 of 16
    assert (course.samples, course.samples_before(4), course.samples_before(9)) == (64, 16, 48)
    assert [course.first_step(share) for share in (0.25, 0.5, 0.6, 0.9)] == [4, 8, 9, 10]
    assert [course.last_steps(share) for share in (0.0, 0.1, 0.25, 0.3, 0.5, 1.0)] == [0, 1, 1, 2, 2, 10]
    same = EqualBatches(16, steps=10, begin=8, earlier=128)
    assert [same.first_step(share) for share in (0.25, 0.5, 0.6)] == [2, 5, 6]
    assert [same.last_steps(share) for share in (0.0, 0.1, 0.25)] == [0, 1, 3]
