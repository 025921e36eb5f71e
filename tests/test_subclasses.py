"""`InfCLTrainer` is one class over Trainer, which people extend as they extend Trainer, and its parts know neither."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from helpers import models
from helpers.trainers import arguments, parameters, trained, trainer_for
from torch.utils.data import default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.processes.signals import Phases
from hf_infcl.step.checks import NumberChecks
from hf_infcl.step.step import WindowStep
from hf_infcl.step.window import Window
from hf_infcl.trainer import evaluating
from hf_infcl.trainer.loaders import TrainingData
from hf_infcl.trainer.loop_events import LoopEvents, Progress
from hf_infcl.trainer.model_files import Pushes
from hf_infcl.trainer.resuming import Resumption


class Own(InfCLTrainer):
    """Overrides what people override, and calls Trainer's method from each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "micro_batches": len(self.losses)}, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        self.loader = super().get_train_dataloader()
        return self.loader


class Notes(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)


def test_trainer_is_the_only_base():
    assert InfCLTrainer.__bases__ == (Trainer,)


def test_a_subclass_with_its_own_steps_logs_and_callbacks_trains_the_same(tmp_path):
    plain = trainer_for(tmp_path / "plain")
    passed, added = Notes(), Notes()
    torch.manual_seed(0)
    start = plain.model.state_dict()
    own = Own(
        type(plain.model)(plain.model.config),
        arguments(tmp_path / "own"),
        plain.data_collator,
        train_dataset=plain.train_dataset,
        callbacks=[passed],
    )
    own.model.load_state_dict(start)
    own.add_callback(added)
    plain.train()
    own.train()

    torch.testing.assert_close(parameters(own), parameters(plain), rtol=0, atol=0)
    logged = [entry for entry in own.state.log_history if "loss" in entry]
    assert [entry["micro_batches"] for entry in logged] == [2, 4]
    assert all("logit_scale" in entry and "samples_seen" in entry for entry in logged)
    assert own.losses[::2] == [0, 0]
    torch.testing.assert_close([entry["loss"] for entry in logged], own.losses[1::2], rtol=1e-5, atol=0)
    assert passed.steps == added.steps == [1, 2]
    assert passed.logs == added.logs
    assert [entry["micro_batches"] for entry in passed.logs if "loss" in entry] == [2, 4]
    assert own.callback_handler.train_dataloader is own.loader


def reached(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The objects that a part holds in its attributes, in containers or in further parts; not through functions."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    yield value
    if isinstance(value, Mapping):
        held = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        held = list(value)
    else:
        held = list(vars(value).values()) if type(value).__module__.startswith("hf_infcl.") else []
    for one in held:
        if not isinstance(value, Trainer):
            yield from reached(one, seen)


class ChangesGradient(InfCLTrainer):
    factor = 1.0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            if self.factor != 1 and parameter.grad is not None:
                parameter.grad *= self.factor
        return loss

    def _clip_grad_norm(self, model: Any, *args: Any) -> Any:
        before = [parameter.grad.clone() for parameter in self.model.parameters()]
        self.gradients = [weakref.ref(parameter.grad) for parameter in self.model.parameters()]
        self.expected = torch.nn.utils.get_total_norm(before)
        self.trained = self.training_data.window
        norm = super()._clip_grad_norm(model, *args)
        scale = (self.args.max_grad_norm / (self.expected + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(self.model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient * scale)
        return norm


def test_the_norm_of_the_step_clips_unless_an_override_changes_the_gradient(tmp_path, monkeypatch):
    for factor in (1.0, 2.0):
        monkeypatch.setattr(ChangesGradient, "factor", factor)
        for most in (0.1, 1e9):
            options = arguments(tmp_path, max_steps=1, max_grad_norm=most, logging_steps=1)
            trainer = ChangesGradient(models.clip(), options, default_collate, train_dataset=models.Pairs(16))
            trainer.train()
            (norm,) = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
            assert norm == trainer.expected.item()
            assert trainer.trained.gradient_norms is not None
            assert all(gradient() is None for gradient in trainer.gradients), "they take memory of evaluations"


def test_no_part_holds_the_trainer(tmp_path):
    """A part names what it needs in its constructor; what only the trainer can do, it gets as a function."""
    trainer = trained(trainer_for(tmp_path, save_strategy="steps", save_steps=1))
    ours = [value for value in vars(trainer).values() if type(value).__module__.startswith("hf_infcl.")]
    seen: dict[int, Any] = {}
    found = [value for part in [*ours, *trainer.callback_handler.callbacks] for value in reached(part, seen)]
    kinds = {type(value) for value in found}
    assert kinds >= {LoopEvents, NumberChecks, Phases, Progress, Pushes, Resumption}
    assert kinds >= {TrainingData, Window, WindowStep}
    assert not [value for value in found if isinstance(value, Trainer)]

    trainer.progress.trainer = trainer  # type: ignore[attr-defined]
    assert any(isinstance(value, Trainer) for value in reached(trainer.progress, {}))


class Regularised(transformers.CLIPModel):
    """A CLIP whose own forward adds to the loss, by default nothing."""

    weight = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + self.weight * output.text_embeds.abs().sum()
        return output


def add_to_loss(module: Any, args: Any, output: Any) -> None:
    if output.loss is not None:
        output.loss = output.loss + 1.0


def own_model(weight: float) -> Any:
    plain = models.clip(dropout=0.3)
    model = Regularised(plain.config)
    model.load_state_dict(plain.state_dict())
    model.weight = weight
    return model


@pytest.mark.parametrize("how", ["forward", "hook", "peft", "texts_at_once"])
def test_a_loss_that_the_forward_adds_to_is_refused(tmp_path, how):
    together = {"texts_at_once": 2, "gradient_accumulation_steps": 3} if how == "texts_at_once" else {}
    model = models.clip() if how == "hook" else own_model(0.1)
    if how == "hook":
        model.register_forward_hook(add_to_loss)
    elif how == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    words = r"CLIPModel|Regularised computes a loss of its own: .* for the first micro-batch, whose contrastive loss is"
    with pytest.raises(ValueError, match=words):
        trainer_for(tmp_path, model, max_steps=1, **together).train()


def test_a_forward_of_one_s_own_that_adds_nothing_trains_the_same(tmp_path):
    plain = trained(trainer_for(tmp_path, models.clip(dropout=0.3), max_steps=2))
    assert torch.equal(parameters(trained(trainer_for(tmp_path, own_model(0.0), max_steps=2))), parameters(plain))


# ---- Every argument and method of the installed Trainer ----

EQUAL, REFUSED = "equal", "refused"
# Others are different: what the guide's section on switching says about them.
_ARGUMENTS = {
    EQUAL: "model args data_collator train_dataset eval_dataset processing_class model_init callbacks optimizers "
    "optimizer_cls_and_kwargs",
    REFUSED: "compute_loss_func preprocess_logits_for_metrics",
    "`compute_metrics` and `predict()` get the embeddings": "compute_metrics",
}
_METHODS = {
    EQUAL: "get_learning_rates get_num_trainable_parameters get_optimizer_group log_metrics metrics_format "
    "save_metrics save_state get_eval_dataloader get_test_dataloader num_examples create_optimizer_and_scheduler "
    "create_optimizer create_scheduler get_optimizer_cls_and_kwargs get_total_train_batch_size get_sp_size get_cp_size "
    "get_tp_size end save_model log store_flos floating_point_ops init_hf_repo create_model_card push_to_hub "
    "hyperparameter_search call_model_init add_callback pop_callback remove_callback is_local_process_zero "
    "is_world_process_zero create_accelerator_and_postprocess set_initial_training_values _validate_args "
    "_build_accelerator_args _get_dataloader _get_eval_sampler _set_signature_columns_if_needed _remove_unused_columns "
    "_get_collator_with_removed_columns _get_learning_rate _inner_training_loop _init_training_state "
    "_prepare_for_training _run_epoch _finalize_training _maybe_log_save_evaluate _prepare_input _prepare_inputs "
    "_prepare_context_parallel_inputs _defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters _wrap_model "
    "_update_auto_batch_size _track_num_input_tokens _mixed_mesh_grad_norm _has_mixed_mesh_grads _clip_grad_norm "
    "_get_grad_norm _evaluate _get_output_dir _save_checkpoint _determine_best_metric _save_rng_state "
    "_save_optimizer_and_scheduler _save_scaler _load_from_checkpoint _load_best_model _load_rng_state "
    "_load_optimizer_and_scheduler _load_scaler _load_callback_state _issue_warnings_after_load _save "
    "_push_from_checkpoint _finish_current_push _hp_search_setup _report_to_hp_search _tune_save_checkpoint "
    "_move_model_to_device",
    REFUSED: "compute_loss compute_loss_context_manager autocast_smart_context_manager prediction_step "
    "loss_is_scaled_for_ga _get_train_sampler _get_num_items_in_batch",
    "A checkpoint of `Trainer` is not resumed": "train",
    "No batch is short": "get_train_dataloader",
    "`training_step` and `get_batch_samples` of your own": "training_step get_batch_samples",
    "only matrices decay": "get_decay_parameter_names",
    "`evaluate()` gives `eval_loss` of the whole set": "evaluate evaluation_loop",
    "`compute_metrics` and `predict()` get the embeddings": "predict",
}


def test_every_argument_and_method_of_trainer_is_classified():
    methods = {name for name in vars(Trainer) if not name.startswith("__")}
    arguments_of = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    guide = Path("hf_infcl/trainer/README.md").read_text().split("## Switching from transformers' `Trainer`")[1]
    for table, installed in ((_METHODS, methods), (_ARGUMENTS, arguments_of)):
        names = " ".join(table.values()).split()
        assert len(names) == len(set(names))
        assert not installed - set(names), "say what InfCLTrainer does with these"
        assert not [said for said in table if said not in (EQUAL, REFUSED) and said not in guide.split("\n## ")[0]]


@pytest.mark.parametrize("name", _METHODS[REFUSED].split())
def test_an_override_that_would_not_be_called_as_trainer_does_is_refused(tmp_path, name):
    kind = type("Mine", (InfCLTrainer,), {name: lambda self, *args, **kwargs: None})
    said = "would never call|would never look at|takes no loss and logits from"
    with pytest.raises(ValueError, match=rf"({said}) Mine\.{name}\. \w+"):
        kind(models.clip(), arguments(tmp_path), train_dataset=models.Pairs(8))


@pytest.mark.parametrize("name", _ARGUMENTS[REFUSED].split())
def test_an_argument_that_would_have_no_effect_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name}.* ((Omit|Leave) it)"):
        InfCLTrainer(models.clip(), arguments(tmp_path), **{name: lambda *args, **kwargs: None})


class ChangesInputs(InfCLTrainer):
    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        return super().training_step(model, {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}, *args)


class ChangesSamples(InfCLTrainer):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, number = super().get_batch_samples(*args)
        return [dict(batch) for batch in batches], number


@pytest.mark.parametrize("kind", [ChangesInputs, ChangesSamples])
def test_batches_that_an_override_changes_without_effect_are_refused(tmp_path, kind):
    trainer = kind(models.clip(), arguments(tmp_path), default_collate, train_dataset=models.Pairs(8))
    with pytest.raises(ValueError, match="would not see what training_step or get_batch_samples make of them"):
        trainer.train()


class ChangesInPlace(InfCLTrainer):
    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        inputs["input_ids"] = inputs["input_ids"].flip(0)
        return super().training_step(model, inputs, *args)


class ChangesTensors(InfCLTrainer):
    def get_batch_samples(self, *args: Any) -> Any:
        batches, number = super().get_batch_samples(*args)
        for batch in batches:
            batch["input_ids"].fill_(2)
        return batches, number


@pytest.mark.parametrize("largest", [None, 2], ids=["whole", "split"])
@pytest.mark.parametrize("kind", [ChangesInPlace, ChangesTensors])
def test_batches_that_an_override_changes_in_place_are_refused(tmp_path, kind, largest):
    """Where a step has run out of memory, the loop's batches are no longer those that are trained."""
    trainer = kind(models.clip(), arguments(tmp_path), default_collate, train_dataset=models.Pairs(8))
    trainer.args.largest_micro_batch = largest
    with pytest.raises(ValueError, match="would not see what training_step or get_batch_samples make of them"):
        trainer.train()


class Brightens(InfCLTrainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        prepared["pixel_values"].add_(1)
        return prepared


def test_a_preparation_in_place_which_the_second_pass_would_repeat_is_refused(tmp_path):
    trainer = Brightens(models.clip(), arguments(tmp_path), default_collate, train_dataset=models.Pairs(8))
    with pytest.raises(ValueError, match="_prepare_inputs or a StepChange has changed a batch in place"):
        trainer.train()


# ---- What is called equal is run under both trainers ----


def with_loss(items: list[Any]) -> dict[str, Any]:
    return {**default_collate(items), "return_loss": True}


def both_trained(folder: Path, make: Callable[[], dict[str, Any]], **options: Any) -> tuple[Any, Any]:
    """Trainer and InfCLTrainer after one training, each step of which is one micro-batch, in the order of the rows."""
    given = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", "max_steps": 4, "seed": 3}
    given |= {"learning_rate": 1e-2, "warmup_steps": 1, "use_cpu": True, "report_to": [], "logging_steps": 1, **options}
    given["adam_epsilon"] = 1e-3  # otherwise gradients that are rounding errors, as of key biases, decide
    runs: list[Any] = []
    for kind, of_options, collate in (
        (Trainer, TrainingArguments, with_loss),
        (InfCLTrainer, InfCLTrainingArguments, default_collate),
    ):
        torch.manual_seed(0)
        data: dict[str, Any] = {"train_dataset": models.Pairs(40), "eval_dataset": models.Pairs(16, seed=1)}
        args = of_options(str(folder / kind.__name__), disable_tqdm=True, **given)
        runs.append(kind(args=args, data_collator=collate, **{**data, **make()}))
        runs[-1].train()
    return runs[0], runs[1]


def sgd() -> dict[str, Any]:
    model = models.clip()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}


_MADE_FROM: dict[str, Callable[[], dict[str, Any]]] = {
    "model": lambda: {"model": models.clip()},
    "model_init": lambda: {"model_init": lambda: models.clip()},
    "optimizers": sgd,
    "optimizer_cls_and_kwargs": lambda: {
        "model": models.clip(),
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    },
}


@pytest.mark.parametrize("made_from", _MADE_FROM)
def test_arguments_that_are_called_equal_train_the_same(tmp_path, made_from):
    theirs, ours = both_trained(tmp_path, _MADE_FROM[made_from])
    torch.testing.assert_close(parameters(ours), parameters(theirs), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(parameters(ours), torch.nn.utils.parameters_to_vector(models.clip().parameters()))


# What both give after the same training, which has called most of the methods that are not inherited. Of the others,
# test_resume has the loading of an optimizer, test_hub the pushes and test_trainer_models the search.
_GIVEN: dict[str, Callable[[Any], Any]] = {
    "get_learning_rates": lambda trainer: trainer.get_learning_rates()[0],
    "get_num_trainable_parameters": lambda trainer: trainer.get_num_trainable_parameters(),
    "num_examples": lambda trainer: trainer.num_examples(trainer.get_eval_dataloader()),
    "get_test_dataloader": lambda trainer: [
        batch["pixel_values"] for batch in trainer.get_test_dataloader(models.Pairs(19))
    ],
    "get_total_train_batch_size": lambda trainer: trainer.get_total_train_batch_size(trainer.args),
    "create_scheduler": lambda trainer: trainer.create_scheduler(9).state_dict()["base_lrs"][0],
    "floating_point_ops": lambda trainer: trainer.floating_point_ops(models.Pairs(8).batch()),
    "state": lambda trainer: {
        name: getattr(trainer.state, name)
        for name in ("global_step", "epoch", "total_flos", "max_steps", "best_global_step", "is_world_process_zero")
    },
    "log": lambda trainer: {
        f"{name} of {entry['step']}": entry[name]
        for entry in trainer.state.log_history
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "total_flos", "epoch")
        if name in entry
    },
    "saved": lambda trainer: [
        safetensors.torch.load_file(path) for path in sorted(Path(trainer.args.output_dir).rglob("model.safetensors"))
    ],
}
_WORDS: dict[str, Callable[[Any], Any]] = {
    "get_optimizer_cls_and_kwargs": lambda trainer: trainer.get_optimizer_cls_and_kwargs(trainer.args),
    "files": lambda trainer: sorted(
        str(path.relative_to(trainer.args.output_dir))
        for path in Path(trainer.args.output_dir).rglob("*")
        if not path.name.startswith(("_", "infcl_"))
    ),
}


def test_methods_that_are_called_equal_give_the_same(tmp_path):
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    runs = both_trained(tmp_path, _MADE_FROM["model"], **options, save_total_limit=1, per_device_eval_batch_size=16)
    for trainer in runs:
        trainer.save_model()
        trainer.save_state()
        trainer.create_model_card()
    for name, give in _GIVEN.items():
        theirs, ours = map(give, runs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, of=name: f"{of}: {text}")
    for name, give in _WORDS.items():
        assert give(runs[1]) == give(runs[0]), name
    assert _GIVEN["state"](runs[1])["best_global_step"] == 2, "the greatest loss was asked for"


class MakesOptimizer(InfCLTrainer):
    calls = False

    def create_optimizer(self, *args: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return super().create_optimizer(*args) if self.calls else self.optimizer


def test_options_of_an_optimizer_that_an_override_makes_without_them_are_refused(tmp_path):
    def trainer(**options: Any) -> InfCLTrainer:
        chosen = arguments(tmp_path, **options)
        return MakesOptimizer(models.clip(), chosen, default_collate, train_dataset=models.Pairs(8))

    assert trained(trainer()).state.global_step == 2
    for MakesOptimizer.calls in (False, True):
        with pytest.raises(ValueError, match=r"image_learning_rate apply only .*, but an override has made another"):
            trainer(image_learning_rate=0.1).train()


def test_what_trainer_would_give_as_logits_is_told(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(evaluating.logger, "warning_once", said.append)
    trainer_for(tmp_path, eval_dataset=models.Pairs(8)).evaluate()
    assert not any("where Trainer gives logits" in line for line in said)
    trainer = trainer_for(tmp_path, eval_dataset=models.Pairs(8), compute_metrics=lambda prediction: {})
    trainer.evaluate()
    trainer.predict(models.Pairs(8))
    assert sum("get embeddings here, (image_embeds, text_embeds), where Trainer gives logits" in s for s in said) == 2
