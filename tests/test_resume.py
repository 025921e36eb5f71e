"""A resumed training has the same windows, random state and weights, or raises an error that gives the reason."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers import models
from helpers.numerics import relative_error
from helpers.pictures import picture
from helpers.processes import on_ranks
from helpers.processors import clip_processor
from helpers.trainers import StopAt, TrainedRows, arguments, parameters, trained, trainer_for

from hf_infcl import InfCLTrainer
from hf_infcl.data import ContrastiveCollator, ImageTextDataset
from hf_infcl.options.record import options_of_arguments
from hf_infcl.processes.lock import LOCK_NAME

# ---- The same weights ----

# Two windows per epoch; step 3 is in the middle of the second epoch.
OPTIONS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2, "save_total_limit": 1}


def check_resume(folder: str, data: Any, stop: int = 3, seed: int = 99, **options: Any) -> None:
    """A run that stops, and is resumed by a trainer with other weights and random state, ends with the same weights."""
    options = {**OPTIONS, "save_steps": stop, **options}
    whole = trainer_for(f"{folder}/whole", models.clip(dropout=0.3), data, **{**options, "save_strategy": "no"})
    whole.train()
    trainer_for(f"{folder}/parts", models.clip(dropout=0.3), data, **options, callbacks=[StopAt(stop)]).train()
    assert os.path.isdir(f"{folder}/parts/checkpoint-{stop}")
    torch.manual_seed(seed)
    resumed = trained(trainer_for(f"{folder}/parts", models.clip(dropout=0.3, seed=5), data, **options), resume=True)
    assert resumed.state.global_step == 6
    assert torch.equal(parameters(whole), parameters(resumed))
    kept = ("loss", "grad_norm", "logit_scale")
    history = [[{k: e[k] for k in kept} for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert history[0] == history[1]
    assert len(history[0]) == 6
    seconds = [entry["train_seconds"] for entry in resumed.state.log_history if "loss" in entry]
    assert seconds == sorted(seconds), "the duration goes on from that of the part before"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks(always_ring=True)
def test_resume_is_bit_identical_with_dropout(rank, world_size, tmp_path):
    check_resume(tmp_path, models.Pairs(16 * world_size + 3), seed=99 + rank)


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_log_after_a_resume_has_the_mean_loss_of_its_whole_interval(rank, world_size, tmp_path):
    data, options = models.Pairs(16 * world_size + 3), {**OPTIONS, "logging_steps": 4, "logging_first_step": False}
    whole = trained(trainer_for(f"{tmp_path}/whole", models.clip(), data, **options))
    trainer_for(f"{tmp_path}/parts", models.clip(), data, **options, callbacks=[StopAt(3)]).train()
    resumed = trainer_for(f"{tmp_path}/parts", models.clip(), data, **options)
    of_rest = resumed.train(resume_from_checkpoint=True).training_loss
    logged = [[(e["step"], e["loss"]) for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert logged[0] == logged[1]
    assert [step for step, _ in logged[0]] == [4]
    one_by_one = trained(trainer_for(f"{tmp_path}/each", models.clip(), data, **{**options, "logging_steps": 1}))
    losses = [e["loss"] for e in one_by_one.state.log_history if "loss" in e]
    assert logged[0][0][1] == pytest.approx(sum(losses[:4]) / 4)
    assert of_rest == pytest.approx(sum(losses[3:]) / 3), "that of the steps that this training made"


@pytest.mark.parametrize("persistent", [False, True])
def test_resume_is_bit_identical_with_workers(tmp_path, persistent):
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": persistent}
    check_resume(str(tmp_path), models.Pairs(19), **options)


def test_rows_that_the_main_process_would_send_out_are_refused(tmp_path):
    with pytest.raises(ValueError, match="dispatch_batches=True is not supported: the main process would read"):
        trainer_for(tmp_path, accelerator_config={"dispatch_batches": True})


# ---- A finished run ----


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.name != LOCK_NAME}


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 3, "save_strategy": "steps", "save_steps": 2},
        {"max_steps": 3, "save_strategy": "epoch"},
        {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "data": models.Stream(20)},
        {"max_steps": -1, "num_train_epochs": 1.5, "save_strategy": "epoch", "data": models.SizedStream(20)},
        {"max_steps": 4, "save_strategy": "epoch"},
    ],
    ids=["steps", "epoch", "stream", "sized stream", "border"],
)
@pytest.mark.parametrize("fewer", [0, 1])
def test_a_finished_run_trains_nothing_when_resumed(tmp_path, options, fewer, caplog):
    options = {"data": models.Pairs(20), "save_total_limit": 2, "lr_scheduler_type": "constant", **options}
    whole = trained(trainer_for(tmp_path, **options))
    assert whole.steps_trained == whole.state.global_step
    before = files(tmp_path)
    if options["max_steps"] > 0:
        options["max_steps"] -= fewer
    resumed = trainer_for(tmp_path, models.clip(seed=5), **options)
    output = resumed.train(resume_from_checkpoint=True)
    assert output.global_step == whole.state.global_step
    assert resumed.steps_trained == 0
    assert torch.equal(parameters(resumed), parameters(whole))
    assert files(tmp_path) == before
    assert "Nothing is left to train" in caplog.text


# ---- Another run ----


def stopped(folder: Any, **options: Any) -> None:
    trainer_for(folder, **{**OPTIONS, **options}, callbacks=[StopAt(3)]).train()


@pytest.fixture(scope="module")
def stopped_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    """A checkpoint of each kind of model."""
    folders = {build: tmp_path_factory.mktemp("stopped") for build in (models.clip, models.siglip)}
    for build, folder in folders.items():
        stopped(folder, model=build())
    return {build: str(folder / "checkpoint-3") for build, folder in folders.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gradient_accumulation_steps": 1},
            r"global_batch_size was 8 and is 4\. .* start anew from its weights: --model \S*checkpoint-3$",
        ),
        ({"objective": "softmax"}, r"objective was 'sigmoid' and is 'softmax'"),
        ({"model": models.siglip()}, r"model was 'CLIPModel with .* parameters' and is 'SiglipModel with "),
        ({"data": models.Pairs(39)}, r"data was 'Pairs, 40 rows, .* and is 'Pairs, 39 rows, "),
        ({"data_seed": 7}, r"data was 'Pairs, .* seed 42' and is 'Pairs, .* seed 7'"),
        ({"optim": "adafactor"}, r"optimizer was 'adamw_torch of (.*) parameters' and is 'adafactor of \1 parameters'"),
        ({"freeze": "image"}, r"optimizer was 'adamw_torch of .* parameters' and is 'adamw_torch of .* parameters'"),
        ({"logit_scale_learning_rate": 1e-4}, r"logit_scale_learning_rate was None and is 0\.0001"),
        ({"learning_rate": 1e-3}, r"learning_rate was 0\.01 and is 0\.001"),
        ({"weight_decay": 0.5}, r"weight_decay was 0\.0 and is 0\.5"),
        (
            {"adam_beta2": 0.5, "max_grad_norm": 9},
            r"adam_beta2 was 0\.999 and is 0\.5, max_grad_norm was 1\.0 and is 9",
        ),
        ({"lr_scheduler_type": "cosine"}, r"lr_scheduler_type was 'linear' and is 'cosine'"),
        ({"warmup_steps": 2}, r"warmup_steps was 0 and is 2"),
        ({"max_steps": 9}, r"schedule_length was '6 steps' and is '9 steps'"),
        ({"bf16": True}, r"mixed_precision was 'no' and is 'bf16'"),
        ({"model": models.clip(dropout=0.5)}, r"config\.text_config\.attention_dropout was 0\.0 and is 0\.5"),
        ({"train_sampling_strategy": "sequential"}, r"data was .*shuffled.* and is .*in order"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_run_s_checkpoint_is_refused(tmp_path, stopped_runs, changes, message):
    build = models.siglip if "objective" in changes else models.clip
    run = trainer_for(tmp_path, **{**OPTIONS, "model": build(), **changes})
    with pytest.raises(ValueError, match=message):
        run.train(resume_from_checkpoint=stopped_runs[build])


# ---- What may change ----


def test_what_decides_nothing_may_change(tmp_path):
    stopped(tmp_path)
    changes = {"logging_steps": 2, "save_steps": 5, "eval_strategy": "no", "retain_graphs": "2", "skip_nonfinite": 3}
    resumed = trained(trainer_for(tmp_path, **{**OPTIONS, **changes, "optim": "adamw_torch_fused"}), resume=True)
    assert resumed.steps_trained == 3


def test_the_intervals_of_the_command_replace_those_of_the_checkpoint(tmp_path, caplog):
    every: dict[str, Any] = {
        "max_steps": 8,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "eval_dataset": models.Pairs(8),
    }
    before = {"logging_steps": 1, "save_steps": 2, "eval_steps": 2, "callbacks": [StopAt(2)]}
    trainer_for(tmp_path, **every, **before).train()
    changed = {"logging_steps": 2, "save_steps": 3, "eval_steps": 4}
    resumed = trained(trainer_for(tmp_path, **every, **changed), resume="auto")
    history = [entry for entry in resumed.state.log_history if entry["step"] > 2]
    assert [entry["step"] for entry in history if "loss" in entry] == [4, 6, 8]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [4, 8]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} >= {"checkpoint-3", "checkpoint-6"}
    told = "logging_steps was 1 and is 2, eval_steps was 2 and is 4, save_steps was 2 and is 3"
    assert f"checkpoint-2 is resumed with other intervals: {told}." in caplog.text


def test_a_training_whose_rate_does_not_decay_can_be_longer(tmp_path):
    options = {**OPTIONS, "max_steps": -1, "num_train_epochs": 1.2, "lr_scheduler_type": "constant"}
    rows, of_whole = TrainedRows(), TrainedRows()
    trainer_for(tmp_path, **options).train()
    options["num_train_epochs"] = 3
    resumed = trained(trainer_for(tmp_path, **options, callbacks=[rows]), resume=str(tmp_path / "checkpoint-6"))
    whole = trained(trainer_for(tmp_path / "whole", **options, callbacks=[of_whole]))
    assert (resumed.steps_trained, resumed.state.max_steps) == (9, 15)
    assert rows.steps == of_whole.steps[6:]
    assert torch.equal(parameters(resumed), parameters(whole))


def test_every_argument_that_decides_is_recorded(tmp_path):
    """All fields that are not named as undecisive, those that a later transformers adds included."""
    recorded = options_of_arguments(arguments(tmp_path), "no").keys() - {"mixed_precision", "schedule_length"}
    assert recorded == {
        *("seed", "optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay", "max_grad_norm"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        *("optimizer", "muon_learning_rate", "muon_parameters", "adamw_parameters", "freeze", "max_logit_scale"),
        *("logit_scale_learning_rate", "image_learning_rate", "text_learning_rate"),
        *("no_decay_parameters", "freeze_layers", "patch_dropout"),
        *("keep_features", "image_size", "max_text_tokens"),
        *("replay_share", "matryoshka_dims", "contrastive_weight", "leave_out"),
        *("teacher", "teacher_weight", "teacher_side", "teacher_missing"),
        *("remove_unused_columns", "label_smoothing_factor", "neftune_noise_alpha"),
    }


def own_optimizer(folder: Any, optimizer: Any, scheduler: Any, **options: Any) -> InfCLTrainer:
    model = models.clip()
    made = optimizer(model.parameters())
    return trainer_for(folder, model, **{**OPTIONS, **options}, optimizers=(made, scheduler(made)))


def test_the_options_of_one_s_own_optimizer_and_schedule_are_compared(tmp_path):
    def schedule(optimizer: Any, gamma: float = 0.5) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)

    sgd, other = partial(torch.optim.SGD, lr=0.1, momentum=0.5), partial(torch.optim.SGD, lr=0.2, momentum=0.9)
    own_optimizer(tmp_path, sgd, schedule, callbacks=[StopAt(3)]).train()
    message = r"lr was 0\.1 and is 0\.2, momentum was 0\.5 and is 0\.9, gamma of the schedule was 0\.5 and is 1\.0\."
    with pytest.raises(ValueError, match=message):
        own_optimizer(tmp_path, other, partial(schedule, gamma=1.0)).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="optimizer was 'SGD' and is 'Adam'"):
        own_optimizer(tmp_path, torch.optim.Adam, schedule).train(resume_from_checkpoint=True)


class Counting(torch.optim.SGD):
    """Keeps its progress in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_progress_in_the_groups_of_an_optimizer_is_no_option(tmp_path):
    def groups(parameters: Any, momentum: float = 0.5) -> Any:
        return Counting([{"params": list(parameters), "k": 0}], lr=0.1, momentum=momentum)

    constant = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
    options = {"lr_scheduler_type": "constant"}
    first = trained(own_optimizer(tmp_path, groups, constant, max_steps=3, **options))
    first.args.max_steps = 6
    first.train(resume_from_checkpoint=True)  # by the same trainer, whose optimizer has progressed
    resumed = trained(own_optimizer(tmp_path, groups, constant, **options, max_steps=8), resume=True)
    assert resumed.optimizer.param_groups[0]["k"] == 8


def test_another_split_of_the_same_global_batch_goes_on(tmp_path, caplog):
    stopped(tmp_path, logging_steps=0.3)
    options = {**OPTIONS, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    resumed = trained(trainer_for(tmp_path, **options, logging_steps=0.3), resume=True)
    assert not re.search(r"from args|other intervals", caplog.text), "the same share is no change"
    whole = trained(trainer_for(tmp_path / "whole", **OPTIONS))
    assert relative_error(parameters(resumed), parameters(whole)) < 5e-5


# In the first steps Adam divides by small numbers, which amplifies rounding; a tenth of the learning rate reduces it.
GENTLE = {**OPTIONS, "learning_rate": 1e-3}


def rank_stops(rank: int, world_size: int, folder: str) -> None:
    stopped(folder, **GENTLE, gradient_accumulation_steps=1)


def test_another_number_of_processes_goes_on_with_the_same_batches(ranks, tmp_path):
    ranks.run(rank_stops, 2, str(tmp_path))
    rows, rows_of_whole = TrainedRows(), TrainedRows()
    resumed = trained(trainer_for(tmp_path, **GENTLE, callbacks=[rows]), resume=True)
    whole = trained(trainer_for(tmp_path / "whole", **GENTLE, callbacks=[rows_of_whole]))
    assert [sorted(step) for step in rows.steps] == [sorted(step) for step in rows_of_whole.steps[3:]]
    assert relative_error(parameters(resumed), parameters(whole)) < 5e-5


def pairs_of(captions: str) -> ImageTextDataset:
    return ImageTextDataset(datasets.Dataset.from_dict({"image": [picture(0)] * 40, "caption": list(captions)}))


def test_other_captions_of_the_same_number_are_other_data(tmp_path):
    options = {**OPTIONS, "data_collator": ContrastiveCollator(clip_processor())}
    stopped(tmp_path, data=pairs_of("ab" * 20), **options)
    with pytest.raises(ValueError, match=r"of another run: content was '\w{16}' and is '\w{16}'"):
        trainer_for(tmp_path, data=pairs_of("ac" * 20), **options).train(resume_from_checkpoint=True)


def test_other_options_of_the_data_are_refused(tmp_path):
    def run(max_length: int | None = None, **options: Any) -> InfCLTrainer:
        columns = {"image": [picture(0)] * 40, "caption": ["a"] * 40, "other": ["a"] * 40}
        collator = ContrastiveCollator(clip_processor(), max_length)
        data = ImageTextDataset(datasets.Dataset.from_dict(columns), **options)
        return trainer_for(tmp_path, data=data, data_collator=collator, **{**OPTIONS, "save_steps": 1, "max_steps": 2})

    first = run()
    first.add_callback(StopAt(1))
    first.train()
    for changes, message in (
        ({"augmentation": "crop"}, "dataset: augmentation was 'none' and is 'crop'"),
        ({"caption_column": "other"}, "dataset: caption_column was 'caption' and is 'other'"),
        ({"seed": 3}, "dataset: seed was 0 and is 3"),
        ({"min_side": 8}, "dataset: min_side was None and is 8"),
        ({"all_captions": True}, "dataset: all_captions was False and is True"),
        ({"max_length": 5}, "collator: max_length was .* and is 5"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**changes).train(resume_from_checkpoint=True)


@on_ranks(2)
def test_a_rank_with_other_data_is_refused_before_the_first_step(rank, world_size, tmp_path):
    collator = ContrastiveCollator(clip_processor())
    for data, difference in (
        (pairs_of(("ab" if rank == 0 else "ac") * 20), r"content is '\w{16}' on rank 0 and '\w{16}' on rank 1\."),
        (models.Pairs(40 + rank), "data is 'Pairs, 40 rows, .*' on rank 0 and 'Pairs, 41 rows, .*' on rank 1"),
    ):
        run = trainer_for(tmp_path, data=data, **OPTIONS, data_collator=collator)
        with pytest.raises(ValueError, match=f"The ranks would train different runs: {difference}"):
            run.train()


def rank_has_another_evaluation(rank: int, world_size: int, folder: str) -> None:
    with pytest.raises(ValueError, match=r"The evaluation set of eval_\* has \[8, 40\] rows on the ranks"):
        trainer_for(folder).evaluate(models.Pairs((8, 40)[rank]))
    with pytest.raises(ValueError, match="resume_from_checkpoint is None on rank 0 and 'auto' on rank 1"):
        trainer_for(folder).train(resume_from_checkpoint=(None, "auto")[rank])


def test_a_rank_with_another_evaluation_set_or_start_is_refused(ranks, tmp_path, backend):
    ranks.run(rank_has_another_evaluation, 2, str(tmp_path), backend=backend)


@on_ranks(2)
def test_a_rank_with_other_options_is_refused_before_the_first_step(rank, world_size, tmp_path):
    """With most of these options, the processes would wait for each other forever or train different weights."""
    several = {
        "learning_rate": (0.001, 0.01),
        "save_steps": (2, 3),
        "strategy": ("gather", "ring"),
        "bf16": (False, True),
    }
    own = {name: values[rank] for name, values in several.items()}
    with pytest.raises(ValueError, match=r"The ranks would train different runs: learning_rate is 0\.001 on") as told:
        trainer_for(tmp_path, **{**OPTIONS, **own}).train()
    for name, (here, there) in several.items():
        assert f"{name} is {here!r} on rank 0 and {there!r} on rank 1" in str(told.value)
    mine = {"run_name": f"rank {rank}", "disable_tqdm": bool(rank), "log_level": "error"}
    run = trainer_for(f"{tmp_path}/shared", **{**OPTIONS, **mine, "max_steps": 1, "save_strategy": "no"})
    run.args.dataloader_pin_memory = bool(rank)  # use_cpu has set it to False
    run.train()


def test_a_state_that_does_not_fit_the_optimizer_is_told(tmp_path):
    def trainer(groups: int, **options: Any) -> InfCLTrainer:
        model = models.clip()
        parts = [list(model.parameters())[place::groups] for place in range(groups)]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.1)
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
        return trainer_for(tmp_path, model, optimizers=(optimizer, None), **saving, **options)

    trainer(1, callbacks=[StopAt(1)]).train()
    with pytest.raises(ValueError, match=r"state in .*checkpoint-1 does not fit this run .*--model .*checkpoint-1"):
        trainer(2).train(resume_from_checkpoint=True)
