"""Finds the average of the weights before and after a training, and gives a model its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..models.sharding import reshard
from ..processes.collectives import Processes
from ..quality.averages import ALPHAS, Averaged, Measured, chosen, interpolated, measured_at, with_halves
from .trainer import InfCLTrainer


def find_average(
    trainer: InfCLTrainer,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    gains: Mapping[str, object],
    guards: Sequence[Mapping[str, object]],
    *,
    alpha: float | None,
    tolerance: float = 0.01,
) -> Averaged:
    """Measures averages, and gives a trainer's model the weights at ``alpha`` or at the α that it chooses; collective.

    Args:
        start, end: the whole weights, as `main_weights`; those of other processes than the main one are not read.
        gains: the sets that the training is for, by name.
        guards: the sets on which the model should not get worse, by name: first one half of each, then the other, see
            `hf_infcl.quality.averages.halves`.
        alpha: of the average, from 0, the start, to 1, the end, which is measured beside both; None to measure `ALPHAS`
            and choose.
        tolerance: what a guard may lose if the average is chosen, as a fraction.
    """
    model, sets = trainer.dual_encoder.model, {**gains, **with_halves(*guards)}

    def move(at: float) -> None:
        reshard(model)
        state: dict[str, Any] = dict(interpolated(start, end, at)) if Processes().rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=Processes().world_size > 1)
        with torch.no_grad():
            set_model_state_dict(model, state, options=options)

    def measured(at: float) -> Measured:
        move(at)
        metrics: dict[str, float] = {}
        for name, dataset in sets.items():
            # predict logs nothing: an average was not measured at a step of the training.
            metrics |= trainer.predict(dataset, metric_key_prefix=f"eval_{name}").metrics or {}
        return measured_at(at, metrics, list(gains), list(guards[0]))

    found = [measured(at) for at in (ALPHAS if alpha is None else sorted({0.0, alpha, 1.0}))] if sets else []
    best = chosen(found, tolerance).alpha if alpha is None else alpha
    move(best)
    norms = sum(name.endswith(".running_mean") for name, _ in model.named_buffers())
    return Averaged(best, tolerance if alpha is None else None, found, norms)


def average_with_start(trainer: InfCLTrainer, start: Mapping[str, Tensor], *sets: Any, **options: Any) -> Averaged:
    """`find_average` of the ``start`` of a training and its end, once it has ended; collective.

    The main process keeps both in host memory, and no process a second model on its device.

    Raises:
        ValueError: no checkpoint keeps the weights of the end, for example because the disk was full.
    """
    kept = checkpoint_of_end(trainer) is not None
    if not Processes().agree([kept])[0][0]:
        raise ValueError("No checkpoint keeps the weights at the end of the training: use `infcl average` instead.")
    return find_average(trainer, start, main_weights(trainer), *sets, **options)


def main_weights(trainer: InfCLTrainer) -> dict[str, Tensor]:
    """Copies of the whole weights of a trainer's model in host memory; empty on other processes; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(trainer.dual_encoder.model, options=options)
    # For a model on the CPU, torch returns the parameters themselves, which the training changes in place.
    return {name: tensor.clone() for name, tensor in state.items()} if Processes().rank == 0 else {}


def checkpoint_of_end(trainer: InfCLTrainer) -> Path | None:
    """The checkpoint with the weights that the model has at the end of its training; None if there is none."""
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        return Path(trainer.state.best_model_checkpoint)
    resumed = trainer.resumption.checkpoint if trainer.steps_trained == 0 else None
    last = Path(resumed or Path(str(trainer.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"))
    return last if last.is_dir() else None
