"""`InfCLTrainer` as a Trainer: logs, options and errors.

test_parity.py covers gradients, test_windows.py the windows of a training, and test_resume.py resuming.
"""

import itertools
import math
import os
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType, ParallelismConfig
from helpers import models
from helpers.evaluation import Captioned, collate_captions
from helpers.parity import Gradients
from helpers.pictures import picture
from helpers.processes import forget, on_ranks
from helpers.processors import clip_processor
from helpers.trainers import StopAt, arguments, parameters, trained, trainer_for
from torch.utils.data import ConcatDataset, Subset, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_infcl import ContrastiveCollator, ImageTextDataset, InfCLTrainer, InfCLTrainingArguments
from hf_infcl.models import sharding
from hf_infcl.models.dual_encoder import DualEncoder
from hf_infcl.processes.collectives import Processes


class DownTracker(TrainerCallback):
    """A tracker of transformers whose server does not answer after its first call."""

    def __init__(self, event: str) -> None:
        self.calls = 0
        setattr(self, event, self.fail)

    def fail(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        raise ConnectionError("https://key@tracker.example/api does not answer.")


@pytest.mark.parametrize("event", ["on_train_begin", "on_log"])
def test_a_tracker_whose_server_is_down_does_not_end_the_training(tmp_path, monkeypatch, caplog, event):
    monkeypatch.setattr(DownTracker, "__module__", "transformers.integrations.integration_utils")
    tracker = DownTracker(event)
    trainer = trainer_for(tmp_path, max_steps=3, callbacks=[tracker])
    assert trainer.train().global_step == 3
    assert tracker.calls == 1
    (line,) = [record.getMessage() for record in caplog.records if "DownTracker" in record.getMessage()]
    assert line == (
        "DownTracker records nothing from now on, because of its error: ConnectionError: "
        "https://***@tracker.example/api does not answer."
    )


def test_errors_of_other_callbacks_end_the_training(tmp_path):
    with pytest.raises(ConnectionError):
        trainer_for(tmp_path, callbacks=[DownTracker("on_log")]).train()


# ---- Options of Trainer that have to keep working ----


class Tracker(TrainerCallback):
    """Receives the numbers given to `on_log`, as TensorBoard, Weights & Biases, trackio and MLflow do."""

    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.entries.append({name: value for name, value in logs.items() if isinstance(value, (int, float))})


def test_trackers_get_all_figures_of_a_contrastive_run(tmp_path):
    tracker = Tracker()
    data = models.Pairs(8)  # one global batch
    trainer = trainer_for(tmp_path, models.siglip(), data, max_steps=3, max_grad_norm=1e-3, callbacks=[tracker])
    with torch.no_grad():
        images, texts = DualEncoder(trainer.model).embed(trainer.model, data.batch())
    trainer.train()
    entries = [entry for entry in tracker.entries if "loss" in entry]
    assert len(entries) == 3
    for entry in entries:
        for key in ("loss", "logit_scale", "logit_bias", "learning_rate", "samples_per_second"):
            assert math.isfinite(entry[key]), key
        assert entry["global_batch_size"] == 8
        towers = entry["grad_norm_image"] ** 2 + entry["grad_norm_text"] ** 2
        assert 1e-4 < towers <= entry["grad_norm"] ** 2, "of the gradient before it is clipped"
    assert entries[0]["positive_cosine"] == pytest.approx((images * texts).sum(1).mean().item(), rel=1e-5)
    assert entries[2]["positive_cosine"] != entries[0]["positive_cosine"]
    assert [entry["samples_seen"] for entry in entries] == [8, 16, 24]
    assert entries[0]["logit_scale"] == pytest.approx(10, rel=1e-3)
    assert entries[0]["logit_bias"] == pytest.approx(-10, rel=1e-3)


def test_samples_per_second_are_of_the_rows_that_are_trained(tmp_path):
    trainer = trainer_for(tmp_path, data=models.Pairs(15), max_steps=-1, num_train_epochs=2)
    metrics = trainer.train().metrics
    assert metrics["train_samples_per_second"] == pytest.approx(8 * metrics["train_steps_per_second"], rel=0.01)


class CountedWalks(TrainerCallback):
    """Counts for each step how often a module is listed or set to training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        self._count = 0
        for name in ("named_modules", "train"):
            monkeypatch.setattr(torch.nn.Module, name, self._counted(getattr(torch.nn.Module, name)))

    def _counted(self, method: Any) -> Any:
        def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._count += 1
            return method(module, *args, **kwargs)

        return counted

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(self._count)
        self._count = 0


def test_a_further_micro_batch_does_not_walk_through_the_model_again(tmp_path, monkeypatch):
    """Not even to count the operations, for which Trainer lists all parameters."""
    data, steps = models.Pairs(8), []
    for size in (8, 2):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        with monkeypatch.context() as patch:
            walks = CountedWalks(patch)
            trainer = trained(trainer_for(tmp_path, models.clip(), data, max_steps=3, callbacks=[walks], **split))
        steps.append(walks.steps[2])
        assert trainer.state.total_flos == 3 * Trainer.floating_point_ops(trainer, data.batch())
    modules = sum(1 for _ in trainer.model.modules())
    assert 0 < steps[0] <= steps[1] < steps[0] + modules, "less than one walk for three more micro-batches"


@pytest.mark.parametrize(
    ("build", "limit", "expected"),
    [(models.clip, None, 100.0), (models.clip, 20.0, 20.0), (models.siglip, None, 3000.0), (models.siglip, 20.0, 20.0)],
)
def test_logit_scale_is_clamped_after_each_step_and_told_if_by_default(tmp_path, build, limit, expected, caplog):
    model = build()
    with torch.no_grad():
        model.logit_scale.fill_(math.log(3000))
    trainer = trainer_for(tmp_path, model, max_steps=1, learning_rate=1e-9, max_logit_scale=limit)
    assert "lowers it" not in caplog.text, "it may only be there to evaluate"
    trainer.train()
    assert trainer.state.log_history[0]["logit_scale"] == pytest.approx(expected, rel=1e-3)
    told = "is 3000, and the first step lowers it to 100" in caplog.text and "max_logit_scale=300" in caplog.text
    assert told == (expected == 100)
    assert caplog.text.count("lowers it") == told


def _gradients(folder: Any, model: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    seen = Gradients()
    torch.manual_seed(0)
    trainer_for(folder, model, max_steps=1, max_grad_norm=0.0, callbacks=[seen], **options).train()
    return {name.removeprefix("_orig_mod."): g for name, g in seen.seen.items()}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "option",
    [{"gradient_checkpointing": True}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}],
    ids=["checkpointing", "compile"],
)
def test_gradient_checkpointing_and_compile_change_nothing(tmp_path, option, dropout):
    plain = _gradients(tmp_path, models.clip(dropout))
    other = _gradients(tmp_path, models.clip(dropout), **option)
    assert plain.keys() == other.keys()
    whole = torch.stack([g.norm() for g in plain.values()]).norm()
    for name, gradient in plain.items():
        assert (other[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * whole, name


def test_bf16_is_within_its_rounding(tmp_path):
    plain, mixed = _gradients(tmp_path), _gradients(tmp_path, bf16=True)
    whole = torch.stack([g.norm() for g in plain.values()]).norm()
    difference = torch.stack([(mixed[name] - g).norm() for name, g in plain.items()]).norm()
    assert 1e-6 * whole < difference < 0.05 * whole  # bf16 was used, and nothing else changed


def test_matrices_alone_decay(tmp_path):
    trainer = trainer_for(tmp_path, weight_decay=0.1)
    names = set(trainer.get_decay_parameter_names(trainer.model))
    assert "visual_projection.weight" in names
    by_name = dict(trainer.model.named_parameters())
    assert all(by_name[name].ndim >= 2 for name in names)
    assert "logit_scale" not in names
    assert "vision_model.embeddings.class_embedding" not in names


def test_learning_rates_follow_their_own_rules(tmp_path):
    """logit_scale has its own rate; all follow the schedule."""
    seen = []

    class Rates(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            seen.append([group["lr"] for group in optimizer.param_groups])

    options = {"learning_rate": 1e-3, "logit_scale_learning_rate": 1e-2}
    trainer = trainer_for(tmp_path, models.siglip(), callbacks=[Rates()], **options)  # 2 steps
    trainer.train()
    matrices, vectors, temperature = (group["params"] for group in trainer.optimizer.param_groups)
    assert {id(p) for p in temperature} == {id(trainer.model.logit_scale), id(trainer.model.logit_bias)}
    assert len({id(p) for p in (*matrices, *vectors, *temperature)}) == len(list(trainer.model.parameters()))
    assert seen[0] == pytest.approx([0.5e-3, 0.5e-3, 0.5e-2])
    assert seen[1] == [0, 0, 0]
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0] == pytest.approx(1e-3)


def test_learning_rates_of_an_optimizer_that_was_passed_are_its_own(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="logit_scale_learning_rate apply only to an optimizer that the trainer"):
        trainer_for(tmp_path, logit_scale_learning_rate=1e-2, optimizers=(optimizer, None))


def test_the_temperature_of_a_model_of_model_init_trains_at_its_own_rate(tmp_path):
    options = {"model_init": lambda: models.clip(), "max_steps": 1, "lr_scheduler_type": "constant"}
    trainer = trainer_for(tmp_path, **options, logit_scale_learning_rate=1e-2)
    for _ in range(2):  # each call trains another model
        trainer.train()
        assert trainer.optimizer.param_groups[-1]["params"][0] is trainer.model.logit_scale
        assert abs(trainer.model.logit_scale.item() - models.clip().logit_scale.item()) == pytest.approx(1e-2, rel=0.01)


def test_model_init_starts_sigmoid_where_it_should(tmp_path):
    trainer = trained(trainer_for(tmp_path, model_init=lambda: models.siglip(), max_steps=1))
    assert trainer.state.log_history[0]["logit_scale"] == pytest.approx(10, rel=1e-3)


# ---- Errors ----


def rank_failure(rank: int, world_size: int, folder: str, batch: int, data: Any) -> str:
    calls = itertools.count(1)

    def collate(items: Any) -> Any:
        if next(calls) == batch and rank == 1:
            raise MemoryError("no room")
        return default_collate(items)

    try:
        trainer_for(folder, data=data, max_steps=5, data_collator=collate).train()
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("data", [models.Pairs(96), models.Stream(96)], ids=["rows", "stream"])
def test_a_rank_with_bad_data_stops_all_ranks_with_its_reason(ranks, tmp_path, batch, data):
    for rank, error in enumerate(ranks.run(rank_failure, 2, str(tmp_path), batch, data, timeout=50)):
        assert "MemoryError: no room" in error
        assert error.startswith("MemoryError" if rank == 1 else "OtherRankFailedError: All ranks stop")


def test_a_loss_of_one_s_own_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compute_loss_func"):
        InfCLTrainer(models.clip(), arguments(tmp_path), default_collate, compute_loss_func=print)


def test_one_process_with_several_gpus_is_refused(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setattr(InfCLTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"2 GPUs.*accelerate launch.*CUDA_VISIBLE_DEVICES"):
        InfCLTrainer(models.clip(), args, default_collate, train_dataset=models.Pairs(8))


def test_plain_training_arguments_are_refused(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="InfCLTrainingArguments, got TrainingArguments"):
        InfCLTrainer(models.clip(), args, default_collate, train_dataset=models.Pairs(8))


class Pictures(torch.utils.data.Dataset):
    """Unprocessed pairs with images of several sizes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, object]:
        return {"image": np.asarray(picture(row, (20 + row, 24))), "caption": [" ".join("abcdefghijklmnop"[row:])]}


def test_images_travel_in_uint8_and_train_and_evaluate_like_normalised_ones(tmp_path):
    """Also tests the default collator: its captions fit the text tower, and the model trains on them."""
    seen = {}
    for name, collator in (("default", None), ("float", ContrastiveCollator(clip_processor(), max_length=16))):
        options = {"eval_dataset": Pictures(), "per_device_eval_batch_size": 5, "offload_inputs": name == "default"}
        options |= {"processing_class": clip_processor(model_max_length=None), "data_collator": collator}
        trainer = trainer_for(tmp_path, data=Pictures(), **options)
        dtypes = {batch["pixel_values"].dtype for batch in trainer.get_train_dataloader()}
        assert dtypes == {torch.uint8 if name == "default" else torch.float32}
        trainer.train()
        seen[name] = (parameters(trainer), trainer.evaluate()["eval_loss"])
    assert torch.equal(seen["default"][0], seen["float"][0])
    assert seen["default"][1] == seen["float"][1]


def in_uint8(rows: list) -> dict[str, torch.Tensor]:
    batch = default_collate(rows)
    return batch | {"pixel_values": batch["pixel_values"].to(torch.uint8)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_collator": in_uint8}, r"a function, returns pixel_values in uint8.*method normalise"),
        (
            {"data": Captioned(30), "data_collator": collate_captions},
            r"has \d captions, and equal_ids is 'exclude'.*ImageTextDataset.* a Dataset or collator of your own",
        ),
        ({"model": models.clip().requires_grad_(False)}, "no parameter of the model requires a gradient"),
    ],
    ids=["uint8", "several captions", "frozen"],
)
def test_models_and_batches_that_cannot_train_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, **options).train()


def test_another_model_is_named_before_its_processor(tmp_path):
    with pytest.raises(ValueError, match=r"Linear .* is not a dual encoder that contrastive training can split"):
        InfCLTrainer(torch.nn.Linear(2, 2), arguments(tmp_path), processing_class=object())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "clip"}, "objective must be one of None, 'softmax', 'sigmoid', got 'clip'"),
        ({"strategy": "star"}, "strategy must be one of .*'ring'.*, got 'star'"),
        ({"backend": "cuda"}, "backend must be one of .*, got 'cuda'"),
        ({"max_logit_scale": 0.5}, "max_logit_scale must be a number of at least 1.*0.5"),
        ({"max_logit_scale": math.nan}, "max_logit_scale must be a number of at least 1.*nan"),
        (
            {"logit_scale_learning_rate": -1e-3},
            "logit_scale_learning_rate must be a finite number of at least 0, got -0.001",
        ),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True.*rows of evaluations"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics=True.*whole set"),
        ({"eval_do_concat_batches": False}, "eval_do_concat_batches=False is not supported.*whole set.*Omit it"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*no labels"),
        ({"freeze": "vision"}, "freeze must be one of None, 'image', 'text', got 'vision'"),
        ({"retain_graphs": "all"}, "retain_graphs must be 'auto' or an integer of at least 0, got 'all'"),
        ({"retain_graphs": -1}, "retain_graphs must be 'auto' or an integer of at least 0, got '-1'"),
        (
            {"auto_find_batch_size": True},
            "auto_find_batch_size=True is not supported: it changes the contrastive batch",
        ),
        ({"ddp_static_graph": True, "gradient_accumulation_steps": 2}, "ddp_static_graph=True .*steps=2"),
        ({"train_sampling_strategy": "group_by_length"}, "'random', 'sequential', got 'group_by_length'"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches=False"),
    ],
)
def test_arguments_that_contradict_exact_windows(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


@pytest.mark.parametrize("place", ["trained", "evaluated", "in a dictionary", "wrapped"])
def test_images_and_captions_need_a_processor(tmp_path, place):
    from PIL import Image

    rows = datasets.Dataset.from_dict({"image": [Image.new("RGB", (4, 4))], "caption": ["black"]})
    pairs = ImageTextDataset(rows)
    passed = {
        "trained": {"train_dataset": pairs},
        "evaluated": {"eval_dataset": pairs},
        "in a dictionary": {"eval_dataset": {"some": Subset(pairs, [0])}},
        "wrapped": {"train_dataset": ConcatDataset([pairs])},
    }
    with pytest.raises(ValueError, match="processing_class=AutoProcessor"):
        InfCLTrainer(models.clip(), arguments(tmp_path), **passed[place])


def test_weights_of_half_precision_are_warned_of(tmp_path, caplog):
    trainer_for(tmp_path)
    assert "rounding" not in caplog.text
    trainer_for(tmp_path, models.clip().bfloat16())
    assert "trained parameters are in torch.bfloat16" in caplog.text
    caplog.clear()
    halved = models.clip()
    halved.vision_model.half().requires_grad_(False)
    trainer_for(tmp_path, halved)
    assert "rounding" not in caplog.text, "what is frozen loses nothing"


def rank_timeout(rank: int, world_size: int, folder: str) -> str:
    store = dist.distributed_c10d._get_default_store()  # torch gives it out in no other way
    forget()
    # The store already exists, as under torchrun.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {rank} is here" for rank in range(world_size)])
    arguments(folder, ddp_timeout=2)
    if rank == 1:
        store.wait(["heard"])
        return "it never came to the agreement"
    try:
        Processes().agree([])
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("heard", "")
    return "went on"


def test_ddp_timeout_holds_on_cpus(ranks, tmp_path):
    waited, _ = ranks.run(rank_timeout, 2, str(tmp_path))
    assert "Timed out waiting 2000ms" in waited


@on_ranks(2)
def test_processes_that_would_train_apart_are_refused(rank, world_size, tmp_path):
    # torch.distributed is initialised and TrainingArguments ignore it, as on CPUs without use_cpu.
    with (
        mock.patch.object(InfCLTrainingArguments, "world_size", 1),
        pytest.raises(ValueError, match="2 processes were"),
    ):
        trainer_for(tmp_path)


@pytest.mark.parametrize("options", [{}, {"ddp_find_unused_parameters": True}, {"ddp_static_graph": True}], ids=str)
@on_ranks(2, always_ring=True)
def test_parameters_that_ddp_would_wait_for_are_named(rank, world_size, tmp_path, options):
    model = models.clip()
    model.forgotten = torch.nn.Parameter(torch.ones(2))
    trainer = trainer_for(tmp_path, model, gradient_accumulation_steps=1, **options)
    before = parameters(trainer)
    if options:
        trainer.train()
    else:
        with pytest.raises(ValueError, match=r"No embedding depends on forgotten, but .*ddp_find_unused_parameters"):
            trainer.train()
    assert torch.equal(parameters(trainer), before) != bool(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_kwargs": {"cycles": 2}}, "lr_scheduler_type='linear' with lr_scheduler_kwargs={'cycles': 2}"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type='cosine_with_min_lr' with lr_scheduler_kwarg"),
        ({"optim": "rmsprop", "optim_args": "alpha"}, "optim='rmsprop' with optim_args='alpha'"),
        ({"optim": "rmsprop", "optim_args": "alpha=much"}, "optim='rmsprop' with optim_args='alpha=much'"),
        ({"optim": "rmsprop", "optim_args": "alpha=0.9, momentun=0.5"}, "optim='rmsprop' does not take momentun from "),
        ({"optim": "adamw_torch", "optim_args": "eps=1e-6,beta1=0.8"}, "optim='adamw_torch' does not take eps, beta1 "),
        ({"optim": "sgd", "adam_beta2": 0.5, "adam_epsilon": 1e-6}, "adam_beta2=0.5 and adam_epsilon=1e-06 would have"),
    ],
)
def test_wrong_options_of_schedule_or_optimizer_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer_for(tmp_path, max_steps=1, **options).train()


def test_options_of_an_optimizer_are_taken_also_where_they_are_its_defaults(tmp_path):
    for optim, optim_args in (
        ("rmsprop", "alpha=0.99, centered=false"),
        ("sgd", "momentum=0.9,dampening=0,nesterov=true"),
    ):
        optimizer = trainer_for(tmp_path, max_steps=1, optim=optim, optim_args=optim_args).create_optimizer()
        assert type(optimizer).__name__.lower() == optim


def test_fsdp_version_1_and_an_accelerate_that_is_too_old_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="FSDP version 2, not 1"):
        sharding.check_wrapper(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False))
    monkeypatch.setattr(sharding, "FSDP_SINCE", "99.0")
    with pytest.raises(ValueError, match=r"needs accelerate 99\.0 or newer under FSDP, but 1\."):
        sharding.check_wrapper(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True))


def test_a_config_of_deepspeed_is_refused(tmp_path, monkeypatch):
    for options, variable in (({"deepspeed": "config.json"}, "false"), ({}, "true")):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", variable)
        with pytest.raises(ValueError, match=r"does not train under DeepSpeed\. .* use FSDP2 \(--fsdp"):
            arguments(tmp_path, **options)


@pytest.mark.parametrize("dimension", ["tp_size", "cp_size", "sp_size"])
def test_processes_that_share_their_pairs_are_refused(dimension):
    sizes = {"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 1, "sp_size": 1, dimension: 2}
    of_accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP, is_fsdp2=True, parallelism_config=ParallelismConfig(**sizes)
    )
    with pytest.raises(ValueError, match=rf"{dimension}=2.* give 2 processes the same pairs"):
        sharding.check_wrapper(of_accelerator)
    of_accelerator.parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    sharding.check_wrapper(of_accelerator)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_of_the_compiler_are_refused_for_several_micro_batches(tmp_path, monkeypatch, mode):
    with pytest.raises(ValueError, match=f"'{mode}' with .* replays CUDA graphs.*all 2 micro-batches"):
        arguments(tmp_path, torch_compile_mode=mode)
    for backend, others in (("inductor", mode), ("cudagraphs", "default")):
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", others)
        with pytest.raises(ValueError, match=f"'{backend}' replays CUDA graphs"):
            arguments(tmp_path)
        arguments(tmp_path, gradient_accumulation_steps=1)


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({"logging_steps": 500, "max_steps": 21}, [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21]),
        ({"logging_steps": 10, "max_steps": 4}, [1, 2, 3, 4]),
        ({"logging_steps": 2, "max_steps": 5}, [2, 4]),
        ({"logging_steps": 2, "max_steps": 5, "logging_first_step": True}, [1, 2, 4, 5]),
        ({"logging_steps": 4, "max_steps": 9, "logging_first_step": True, "callbacks": [StopAt(3)]}, [1, 3]),
        ({"logging_steps": 500, "max_steps": 21, "logging_strategy": "no"}, []),
    ],
)
def test_the_ends_and_ten_steps_are_logged_unless_an_interval_was_chosen(tmp_path, options, logged):
    trainer = trained(trainer_for(tmp_path, **options))
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == logged


def test_the_step_whose_evaluation_ends_a_training_is_logged(tmp_path):
    class Enough(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    evaluation = {"eval_dataset": {"pairs": models.Pairs(8)}, "eval_strategy": "steps", "eval_steps": 3}
    trainer = trained(trainer_for(tmp_path, logging_steps=500, max_steps=100, callbacks=[Enough()], **evaluation))
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 3]
