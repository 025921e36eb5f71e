"""Files and messages that this package adds to those of Trainer when a model is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import ProcessorMixin, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..conversion import open_clip_config, save_open_clip
from ..conversion.sentence_transformers import write_sentence_files
from ..data import ContrastiveCollator
from ..encoders.adapters import add_beside_adapters, has_adapters
from ..encoders.dual_encoder import DualEncoder
from ..encoders.sharding import is_sharded, stock_shapes
from ..options.arguments import InfCLTrainingArguments
from ..readable import give_usual_modes
from .files import Checkpoint, Checkpoints

STATES_NAME = "infcl_extensions.pt"  # in a checkpoint: the states of the step's extensions
_SINCE_LOG = "loss_since_log"


def save_weights(
    encoder: DualEncoder,
    args: InfCLTrainingArguments,
    output_dir: str | None,
    state_dict: dict[str, Tensor] | None,
    save: Callable[[str | None, dict[str, Tensor] | None], None],
    processor: object,
    repository: str | None,
    collator: object,
) -> None:
    """Saves weights in the shapes of transformers, on each machine if asked for, and what Trainer does not save.

    That is what trains beside adapters, the other formats of ``save_formats`` and, for a `ContrastiveCollator`, which
    knows how captions are padded, the files by which sentence-transformers loads the folder.

    Args:
        output_dir: the folder; None for that of ``args``.
        state_dict: the weights; None for those of the model.
        processor: the processor that it saves as well, or None.
        repository: the repository of the Hub that the model is pushed to, or None.
    """
    model = encoder.model
    # At the begin of a training, Trainer replaces the token at which the text tower takes its output in the config by
    # the tokenizer's, after the tower was built. A tower loaded with that one would take it at another position.
    trained = getattr(getattr(encoder.base, "text_model", None), "eos_token_id", None)
    if trained is not None and hasattr(encoder.base, "config"):
        encoder.base.config.text_config.eos_token_id = trained
    if state_dict is not None:
        state_dict = stock_shapes(encoder, state_dict)
    if args.save_on_each_node:
        # transformers' own method lets only process 0 write, but each machine needs a copy.
        model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        save(output_dir, None if state_dict is None else dict(state_dict))  # transformers empties it
    finally:
        vars(model).pop("should_save_on_this_rank", None)
    if args.should_save:
        folder = str(args.output_dir if output_dir is None else output_dir)
        add_beside_adapters(folder, model, model.state_dict() if state_dict is None else state_dict)
        if "open_clip" in args.save_formats:
            save_open_clip(folder, encoder.base, processor, repository=repository or ".", state_dict=state_dict)
        give_usual_modes(folder)
        if isinstance(collator, ContrastiveCollator) and hasattr(model, "config"):
            more = collator.text_options | {"matryoshka_dims": args.matryoshka_dims}
            write_sentence_files(folder, model.config.model_type, collator.processor, **more)


def check_formats(model: nn.Module | None, args: InfCLTrainingArguments, processor: ProcessorMixin | None) -> None:
    """Raises a ValueError if OpenCLIP has no such model, or would prepare its inputs otherwise.

    ``model`` is None if ``model_init`` creates it. ``processor`` is saved beside the model.
    """
    if "open_clip" not in args.save_formats:
        return
    if model is None or processor is None:
        raise ValueError(
            f"save_formats has open_clip, which needs the {'model, not model_init' if model is None else 'processor'}"
            ": OpenCLIP's config holds sizes of the model, and how its images and captions are prepared."
        )
    if has_adapters(model):
        raise ValueError(
            "save_formats has open_clip, and OpenCLIP loads no adapters. Train with the format transformers, merge the "
            "adapters (--lora_merge), and write the other format with `infcl convert FOLDER FOLDER --to open_clip`."
        )
    open_clip_config(model.config, processor)


def make_checkpoints(args: InfCLTrainingArguments, accelerator: Accelerator) -> Checkpoints:
    """The checkpoints that a training writes."""
    return Checkpoints(
        completes=args.should_save,
        flushes=args.local_process_index == 0,
        ends_on_failure=is_sharded(accelerator),
    )


def write_checkpoint(
    save: Callable[[], None],
    state: TrainerState,
    args: InfCLTrainingArguments,
    states: Mapping[str, object],
    checkpoint: Checkpoint,
) -> None:
    """Writes Trainer's checkpoint and the ``states`` of the extensions of the step, equal on all processes.

    Meanwhile Trainer does not look for the best checkpoint: it would wait for the other processes, and look in the
    partial folder. Its folder is noted afterwards.
    """
    best_step, state.best_global_step = state.best_global_step, None
    try:
        save()
    finally:
        state.best_global_step = best_step
    if best_step and args.save_strategy != SaveStrategy.NO:
        best = checkpoint.folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{best_step}")
        if best == checkpoint.folder or best.is_dir():
            state.best_model_checkpoint = str(best)
        if args.should_save:
            state.save_to_json(str(checkpoint.partial / TRAINER_STATE_NAME))
    if states and args.should_save:
        torch.save(dict(states), checkpoint.partial / STATES_NAME)


def read_states(checkpoint: str | None) -> dict[str, Any]:
    """The states of the step's extensions in a checkpoint, by their names; empty if it has none."""
    path = Path(checkpoint or "", STATES_NAME)
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}


def keep_losses_since_log(trainer: Any) -> None:
    """Puts the sum of the losses since the last log, and the step of that, into what checkpoints keep of a state."""
    trainer.state.stateful_callbacks[_SINCE_LOG] = [trainer._tr_loss.item(), trainer._globalstep_last_logged]


def go_on_with_losses(trainer: Any) -> None:
    """Lets the first log of a resumed training have the mean loss of all steps since the last log before it."""
    if _SINCE_LOG in trainer.state.stateful_callbacks:
        loss, trainer._globalstep_last_logged = trainer.state.stateful_callbacks.pop(_SINCE_LOG)
        trainer._tr_loss += loss
        trainer._total_loss_scalar -= loss  # of which the mean of this training's own steps is made at its end


def saves_shards(accelerator: Accelerator) -> bool:
    """Whether FSDP2 writes checkpoints in shards, without weights that ``from_pretrained`` could load."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and "SHARDED" in str(plugin.state_dict_type)
