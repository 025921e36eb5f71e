"""Averages the weights before and after a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoints.average_search import Averaged, Measured, find_average, measured_at, with_halves
from ..checkpoints.average_weights import (
    check_new_adapters,
    interpolated,
    running_statistics,
    scales_by_depth,
    with_factors_of_end,
)
from ..encoders.sharding import reshard
from ..processes.collectives import Processes
from .trainer import InfCLTrainer


class AverageWithStart:
    """Finds the average of the weights before and after a training, once it has ended.

    The main process keeps a copy of the start in host memory, and no process a second model on its device. A model may
    be on one process, under DDP, or sharded by FSDP2.

    Args:
        trainer: before its training, with the model as it was loaded.
        gains: the names of those sets of its ``eval_dataset`` that the training is for.
        guards: the sets on which the model should not get worse, by name: first one half of each, then the other, see
            `average_search.halves`.
        alpha: of the average, from 0, the start, to 1, the end; None to choose it.
        path: one of `average_weights.PATHS`.
        tolerance: what a guard may lose if the average is chosen, as a fraction.

    Raises:
        ValueError: the change cannot grow with the depth of this model; its adapters were trained before.
    """

    def __init__(
        self,
        trainer: InfCLTrainer,
        gains: Mapping[str, object],
        guards: Sequence[Mapping[str, object]],
        *,
        alpha: float | None = None,
        path: str = "line",
        tolerance: float = 0.01,
    ) -> None:
        self._trainer, self._alpha, self._path, self._tolerance = trainer, alpha, path, tolerance
        self._gains, self._guards = list(gains), list(guards[0])
        self._sets = {**gains, **with_halves(*guards)}
        self._end: dict[str, Tensor] | None = None
        names = self._model.state_dict()
        check_new_adapters(names)
        if path == "depth":
            scales_by_depth(names, 0.5)
        self._batch_norms = len(running_statistics(names)) // 2
        self._start = _on_main_process(self._model)

    @property
    def _model(self) -> nn.Module:
        """The unwrapped model, which FSDP2 replaces when the training begins."""
        return self._trainer.dual_encoder.model

    def find(self) -> Averaged:
        """Measures the averages and gives the model the weights of the one to be saved; collective.

        Raises:
            ValueError: no checkpoint keeps the weights of the end, for example because the disk was full.
        """
        kept = checkpoint_of_end(self._trainer) is not None
        if not Processes().agree([kept])[0][0]:
            raise ValueError(
                "No checkpoint keeps the weights at the end of the training, in whose place the average would be "
                "saved. Average them with `infcl average`."
            )
        return find_average(
            self._move,
            self._measure if self._sets else None,
            alpha=self._alpha,
            path=self._path,
            tolerance=self._tolerance,
            batch_norms=self._batch_norms,
        )

    def _move(self, alpha: float) -> None:
        """Gives the model the weights at ``alpha``; the first call keeps those that it has, the end's; collective."""
        if self._end is None:
            self._end = _on_main_process(self._model)
            self._start = with_factors_of_end(self._start, self._end)
        _set_from_main_process(self._model, interpolated(self._start, self._end, alpha, self._path))

    def _measure(self, alpha: float) -> Measured:
        metrics: dict[str, float] = {}
        for name, dataset in self._sets.items():
            # predict logs nothing: an average was not measured at a step of the training.
            metrics |= self._trainer.predict(dataset, metric_key_prefix=f"eval_{name}").metrics or {}
        return measured_at(alpha, metrics, self._gains, self._guards)


def checkpoint_of_end(trainer: InfCLTrainer) -> Path | None:
    """The checkpoint with the weights that the model has at the end of its training; None if there is none."""
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        return Path(trainer.state.best_model_checkpoint)
    resumed = trainer.resumption.checkpoint if trainer.steps_trained == 0 else None
    last = Path(resumed or Path(str(trainer.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"))
    return last if last.is_dir() else None


def _on_main_process(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole tensors of a model in host memory; empty on other processes; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(model, options=options)
    # For a model on the CPU, torch returns the parameters themselves, which the training changes in place.
    return {name: tensor.clone() for name, tensor in state.items()} if Processes().rank == 0 else {}


def _set_from_main_process(model: nn.Module, state: dict[str, Any]) -> None:
    reshard(model)
    several = Processes().world_size > 1
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    with torch.no_grad():
        set_model_state_dict(model, state, options=options)
