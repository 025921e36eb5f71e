"""One step of the real trainer, compared with plain autograd in one process that holds the whole batch."""

import functools
import operator
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import TrainerCallback

from hf_infcl import InfCLTrainer, InfCLTrainingArguments
from hf_infcl.loss import OBJECTIVES, reference
from hf_infcl.models.dual_encoder import DualEncoder, drop_patches
from hf_infcl.models.model_types import TOWERS

from . import models

GLOBAL_BATCH = 48  # divisible by 1, 2, 3, 4 ranks times 1, 2, 4 steps
OLD = 12  # old pairs of a global batch, with replay: divisible by 1, 2, 3, 4 ranks
MODELS = {name: models.siglip if name == "sigmoid" else models.clip for name in OBJECTIVES}
VARIANTS = ("plain", "pair_ids", "frozen image", "frozen text", "dropout")

# The rounding of a forward and backward in fp32 with other shapes. Some gradients are zero in exact arithmetic (a key
# bias shifts all attention logits equally), so errors below 1e-7 of the whole gradient are ignored.
TOLERANCE, FLOOR = 1e-5, 1e-7


class Gradients(TrainerCallback):
    """Keeps the gradients that the first optimizer step sees."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen = {n: _whole(p.grad) for n, p in _unwrap(model).named_parameters() if p.grad is not None}


class EachGradient(TrainerCallback):
    """The weights before each step, and the gradients that it sees."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.gradients: list[list[Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append([_whole(p.grad) for p in model.parameters()])


def check_each_gradient(
    of_ranks: list[tuple[list[Tensor], list[list[Tensor]]]], plain: Callable[[list[Tensor]], list[list[Tensor]]]
) -> None:
    """Compares what `EachGradient` has kept on every rank with the gradients by plain autograd at the same weights."""
    for rank, (weights, gradients) in enumerate(of_ranks):
        for step, (seen, whole) in enumerate(zip(gradients, plain(weights), strict=True)):
            floor = FLOOR * nn.utils.get_total_norm(whole)
            for gradient, one in zip(seen, whole, strict=True):
                error = (gradient.reshape(one.shape) - one).norm()
                assert error <= TOLERANCE * one.norm() + floor, f"step {step} of rank {rank}"
        assert not torch.equal(weights[0], weights[-1])


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


class Draws(TrainerCallback):
    """The random state with which each micro-batch was encoded.

    Fails if the second pass starts from a different state or computes different embeddings. Forwards before
    `on_train_begin`, if this is a callback of a training, are trials of windows of equal rows, and left alone.
    """

    def __init__(self, model: nn.Module, *, of_training: bool = False) -> None:
        self._watches = not of_training
        self.states: dict[bytes, list[Tensor]] = {}
        self._embeds: dict[bytes, tuple[Tensor, Tensor]] = {}
        before, after = map(torch.compiler.disable, (self._before, self._after))  # of a compiled model as well
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True)

    @staticmethod
    def _key(kwargs: dict[str, Any]) -> bytes:
        texts, images = kwargs["input_ids"], kwargs["pixel_values"]
        return key_of(texts if len(texts) == len(images) else images)  # with texts_at_once

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._watches = True

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._watches:
            return
        first = self.states.setdefault(self._key(kwargs), random_state(kwargs["input_ids"].device))
        for seen, now in zip(first, random_state(kwargs["input_ids"].device), strict=True):
            assert torch.equal(seen, now), "the passes drew different dropout masks"

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if not self._watches:
            return
        embeds = outputs.image_embeds.detach(), outputs.text_embeds.detach()
        first = self._embeds.setdefault(self._key(kwargs), embeds)
        for seen, now in zip(first, embeds, strict=True):
            if now.is_cuda:  # attention may use another kernel with autograd; a different mask still shows
                same = torch.allclose(seen.float(), now.float(), atol=0.02 if torch.is_autocast_enabled() else 1e-5)
            else:
                same = torch.equal(seen, now)
            assert same, f"the passes encoded different features: {(seen - now).abs().max()}"


def random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def key_of(values: Tensor) -> bytes:
    return values.cpu().numpy().tobytes()


def _unwrap(model: Any) -> nn.Module:
    return getattr(model, "module", model)


def draws_numbers(variant: str) -> bool:
    """Whether a forward draws random numbers: for dropout, and for the patches that it leaves out."""
    return variant == "dropout" or variant.endswith("patches")


def _model(objective: str, variant: str) -> nn.Module:
    model = MODELS[objective](dropout=0.3 if variant == "dropout" else 0.0)
    if variant.startswith("frozen"):
        tower = model.vision_model if variant == "frozen image" else model.text_model
        tower.requires_grad_(False)
        for projection in ("visual_projection", "text_projection"):
            if projection.startswith("visual") == (variant == "frozen image") and hasattr(model, projection):
                getattr(model, projection).requires_grad_(False)
    if variant.startswith("lora"):
        import peft

        targets = r".*(q_proj|v_proj|fc1)"
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model


def _data(variant: str, rows: int = GLOBAL_BATCH) -> models.Pairs:
    repeats, longest = 3 if variant == "pair_ids" else 0, 16 if variant == "lengths" else 0
    return models.Pairs(rows, repeats=repeats, longest=longest)


def _new_and_old() -> tuple[models.Pairs, models.Pairs]:
    return models.Pairs(GLOBAL_BATCH - OLD), models.Pairs(OLD, seed=1)


class PadsToLongest:
    """A collator whose texts a window deals out to its micro-batches by length."""

    text_padding: ClassVar = {"input_ids": models.TEXT["pad_token_id"], "attention_mask": 0}

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        batch = default_collate(items)
        longest = int(batch["attention_mask"].sum(1).max())
        return {name: value[:, :longest] if value.ndim == 2 else value for name, value in batch.items()}


def train(objective: str, variant: str, world_size: int, steps: int, **overrides: Any) -> InfCLTrainer:
    options = {"max_steps": 1, "max_grad_norm": 0.0, "use_cpu": True, **overrides}
    if variant.endswith("patches"):
        options["patch_dropout"] = 0.5
    sets = {"train_dataset": _data(variant, GLOBAL_BATCH * 2 if options["max_steps"] > 1 else GLOBAL_BATCH)}
    if variant.startswith("replay"):
        sets = dict(zip(("train_dataset", "replay_dataset"), _new_and_old(), strict=True))
        options["replay_share"] = OLD / GLOBAL_BATCH
    gradients = options.pop("gradients", Gradients)
    with tempfile.TemporaryDirectory() as folder:
        args = InfCLTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=GLOBAL_BATCH // world_size // steps,
            gradient_accumulation_steps=steps,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **options,
        )
        trainer = InfCLTrainer(
            _model(objective, variant),
            args,
            PadsToLongest() if variant == "lengths" else default_collate,
            **sets,
            callbacks=[gradients()],
        )
        trainer.draws = Draws(trainer.model, of_training=True)
        trainer.add_callback(trainer.draws)
        trainer.train()
    return trainer


def rank_gradients(rank: int, world_size: int, cells: list[tuple], overrides: dict[str, Any]) -> list[Any]:
    results = []
    for objective, variant, steps, *own in cells:
        trainer = train(objective, variant, world_size, steps, **overrides | dict(*own))
        callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Gradients))
        gradients = {name: gradient.cpu() for name, gradient in callback.seen.items()}
        results.append((trainer.state.log_history[0], gradients, trainer.draws.states))
    return results


def truth(
    objective: str, variant: str, draws: dict[bytes, list[Tensor]], device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process that holds the whole batch. Forwards that draw use the recorded states."""
    model = _model(objective, variant).train().to(device)
    encoder = DualEncoder(model)
    encoder.initialise_sigmoid()
    if variant.endswith("patches"):
        drop_patches(encoder, 0.5)
    if variant.startswith("replay"):
        loss = _loss_of_replay(encoder, variant, objective, device)
        loss.backward()
        return loss.item(), {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    data = _data(variant)
    parts = [range(len(data))]
    if draws_numbers(variant):
        rows = {key_of(data.tokens[i : i + 1]): i for i in range(len(data))}
        width = len(key_of(data.tokens[:1]))
        parts = [[rows[key[i : i + width]] for i in range(0, len(key), width)] for key in draws]
        assert sorted(functools.reduce(operator.iadd, parts, [])) == list(range(len(data))), (
            "the micro-batches are not a partition of the batch"
        )
    states = draws.values() if draws_numbers(variant) else [random_state(device)]
    embeds = []
    for part, state in zip(parts, states, strict=True):
        set_random_state(state, device)
        batch = {name: value.to(device) for name, value in data.batch(list(part)).items()}
        embeds.append(encoder.embed(model, batch))
    images, texts = (torch.cat(column) for column in zip(*embeds, strict=True))
    ids = None if data.ids is None else data.ids[[i for part in parts for i in part]].to(device)
    scale, bias = encoder.scale_and_bias()
    loss = reference.contrastive_loss(images, texts, scale, bias, objective=objective, pair_ids=ids)
    loss.sum().backward()
    return loss.item(), {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


@functools.cache
def truth_without_draws(objective: str, variant: str, device: torch.device) -> tuple[float, dict[str, Tensor]]:
    return truth(objective, variant, {}, device)


def _loss_of_replay(encoder: DualEncoder, variant: str, objective: str, device: torch.device) -> Tensor:
    """All pairs in one loss, or new and old ones in two, which are weighted by their numbers."""
    batches = [{name: value.to(device) for name, value in data.batch().items()} for data in _new_and_old()]
    embeds = [encoder.embed(encoder.model, batch) for batch in batches]
    if variant == "replay":
        embeds = [tuple(torch.cat(column) for column in zip(*embeds, strict=True))]
    scalars = encoder.scale_and_bias()
    losses = [(len(one[0]), reference.contrastive_loss(*one, *scalars, objective=objective).sum()) for one in embeds]
    return torch.stack([count / GLOBAL_BATCH * loss for count, loss in losses]).sum()


def check_tower_norms(
    logs: dict[str, float], expected: dict[str, Tensor], tolerance: float, floor: float, where: str
) -> None:
    """Checks the norms of the towers' gradients in the logs."""
    for tower, parts in TOWERS.items():
        norms = [g.norm() for name, g in expected.items() if any(f"{part}." in name for part in parts)]
        seen = logs.get(f"grad_norm_{tower}")
        assert (seen is None) == (not norms), f"{where} {tower}"
        if seen is not None:
            norm = torch.stack(norms).norm()
            assert abs(seen - norm) <= tolerance * norm + floor * len(norms) ** 0.5, f"{where} {tower}"


def check(
    ranks: Any,
    world_size: int,
    cells: list[tuple],
    overrides: dict[str, Any],
    *,
    backend: str = "gloo",
    tolerance: float = TOLERANCE,
    floor: float = FLOOR,
) -> None:
    """Compares every rank's loss and gradients in every cell with those of one process.

    A cell is an objective, a variant, a number of micro-batches and, if it has some, options of its own.
    The error of a tensor may be ``tolerance`` times its norm plus ``floor`` times the norm of the whole gradient.
    """
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    by_rank = ranks.run(rank_gradients, world_size, cells, overrides, backend=backend, always_ring=True)
    for cell, results in zip(cells, zip(*by_rank, strict=True), strict=True):
        objective, variant, *_ = cell
        draws = {key: state for _, _, states in results for key, state in states.items()}
        if draws_numbers(variant):
            loss, expected = truth(objective, variant, draws, device)
        else:
            loss, expected = truth_without_draws(objective, variant, device)
        whole = torch.stack([g.norm() for g in expected.values()]).norm()
        for rank, (logs, gradients, _) in enumerate(results):
            where = f"{cell} rank {rank} of {world_size}"
            assert logs["loss"] == pytest.approx(loss, rel=tolerance), where
            check_tower_norms(logs, expected, tolerance, floor * whole, where)
            assert gradients.keys() == expected.keys(), where
            for name, gradient in expected.items():
                error = (gradients[name].reshape(gradient.shape) - gradient).norm()  # a scalar may now be a vector
                bound = tolerance * gradient.norm() + floor * whole
                assert error <= bound, f"{where} {name}: {error} of {gradient.norm()}, whole {whole}"
