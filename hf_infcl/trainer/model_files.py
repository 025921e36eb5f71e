"""Models as files: what is saved, what a training starts from, its average with the start, and pushes to the Hub."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import ProcessorMixin
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils import logging

from ..data import ContrastiveCollator
from ..files.whole import give_usual_modes
from ..models.adapters import add_beside_adapters, has_adapters, merge_adapters, resize_images, with_adapters
from ..models.dual_encoder import DualEncoder
from ..models.open_clip import Loaded, load, save_open_clip, write_sentence_files
from ..models.open_clip_names import open_clip_config
from ..models.pretrained import base_of_adapters
from ..models.sharding import reshard, stock_shapes
from ..options.arguments import InfCLTrainingArguments
from ..options.commands import LoraOptions, TrainedModelOptions
from ..processes.collectives import Processes
from ..quality.averages import ALPHAS, Averaged, Measured, chosen, interpolated, measured_at, with_halves
from .checkpoints import Checkpoint, CheckpointStore, cause

STATES_NAME = "infcl_extensions.pt"  # in a checkpoint: the states of the step's extensions
LAST_CHECKPOINT = "last-checkpoint"  # where hub_strategy="checkpoint" puts the newest checkpoint
NOT_PUSHED = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*")  # of an output_dir

logger = logging.get_logger(__name__)


# ---- Saving ----


def save_weights(
    trainer: Any, output_dir: str | None, state_dict: Mapping[str, Tensor] | None, save: Callable[..., None]
) -> None:
    """Saves weights in the shapes of transformers, on each machine if asked for, and what Trainer does not save.

    That is what trains beside adapters, the other formats of ``save_formats`` and, for a `ContrastiveCollator`, which
    knows how captions are padded, the files by which sentence-transformers loads the folder.

    Args:
        output_dir: the folder; None for that of ``args``.
        state_dict: the weights; None for those of the model.
        save: as Trainer does.
    """
    encoder, args, collator = trainer.dual_encoder, trainer.args, trainer.data_collator
    model = encoder.model
    # At the begin of a training, Trainer replaces the token at which the text tower takes its output in the config by
    # the tokenizer's, after the tower was built. A tower loaded with that one would take it at another position.
    if encoder.pooling is not None and hasattr(getattr(encoder.base, "config", None), "text_config"):
        encoder.base.config.text_config.eos_token_id = encoder.pooling.stated
    if state_dict is not None:
        state_dict = stock_shapes(encoder, state_dict)
    # transformers' own method lets only process 0 write, but each machine needs a copy.
    on_each = patch.object(model, "should_save_on_this_rank", lambda is_main_process: is_main_process, create=True)
    with on_each if args.save_on_each_node else nullcontext():
        save(output_dir, None if state_dict is None else dict(state_dict))  # transformers empties it
    if args.should_save:
        folder = str(args.output_dir if output_dir is None else output_dir)
        add_beside_adapters(folder, model, model.state_dict() if state_dict is None else state_dict)
        if "open_clip" in args.save_formats:
            repository = (trainer.hub_model_id if args.push_to_hub else None) or "."
            processor = trainer.processing_class
            save_open_clip(folder, encoder.base, processor, repository=repository, state_dict=state_dict)
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


def write_checkpoint(trainer: Any, save: Callable[[], None], checkpoint: Checkpoint) -> None:
    """Writes Trainer's checkpoint and the states of the extensions of the step, equal on all processes.

    Meanwhile Trainer does not look for the best checkpoint: it would wait for the other processes, and look in the
    partial folder. Its folder is noted afterwards.
    """
    state, args, states = trainer.state, trainer.args, trainer.window_step.state_dict()
    with patch.object(state, "best_global_step", None):
        save()
    if (best_step := state.best_global_step) and args.save_strategy != SaveStrategy.NO:
        best = checkpoint.folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{best_step}")
        if best == checkpoint.folder or best.is_dir():
            state.best_model_checkpoint = str(best)
        if args.should_save:
            state.save_to_json(str(checkpoint.partial / TRAINER_STATE_NAME))
    if states and args.should_save:
        torch.save(dict(states), checkpoint.partial / STATES_NAME)


def read_states(checkpoint: str | None) -> dict[str, Any]:
    """The states of the step's extensions in a checkpoint, by their names; empty if it has none."""
    path = None if checkpoint is None else Path(checkpoint, STATES_NAME)
    return torch.load(path, map_location="cpu", weights_only=True) if path is not None and path.is_file() else {}


def saves_shards(accelerator: Accelerator) -> bool:
    """Whether FSDP2 writes checkpoints in shards, without weights that ``from_pretrained`` could load."""
    return accelerator.is_fsdp2 and "SHARDED" in str(accelerator.state.fsdp_plugin.state_dict_type)


# ---- The model that a training starts from, and the one that it leaves ----


def model_to_train(options: TrainedModelOptions, lora: LoraOptions, args: InfCLTrainingArguments) -> Loaded:
    """Loads the model of a training with its adapters, or with new ones if they are asked for.

    New weights are drawn from ``args.seed``, alike on all processes. Raises a ValueError if the model cannot be
    loaded, or its adapters and the options do not go together.
    """
    new: Any = {"new_weights": options.new_weights or (), "seed": args.seed}
    loaded = load(options.model, options.open_clip_model, merges=False, tokenizer=options.tokenizer, **new)
    has_own, rank = has_adapters(loaded.model), lora.lora_rank
    if lora.lora_merge and rank is None and not has_own:
        raise ValueError(
            "--lora_merge merges the adapters of --lora_rank, which is not given, or those of the model, which has "
            "none. Pass --lora_rank as well, or omit --lora_merge."
        )
    if has_own and rank is not None:
        raise ValueError(
            f"{options.model} holds adapters, and --lora_rank {rank} would add new ones. To train those that it holds, "
            "omit --lora_rank, or the recipe that sets it. To train new ones, merge the others into their model first: "
            f"infcl convert {options.model} MERGED, and then --model MERGED."
        )
    if options.new_weights and (has_own or rank is not None):
        raise ValueError(
            f"--new_weights {' '.join(options.new_weights)} would stay as they are drawn, because only adapters train, "
            "and the adapter's file would not hold them. Train the whole model first, without adapters."
        )
    if loaded.conversion and rank is not None and not lora.lora_merge:
        raise ValueError(
            f"--lora_rank would save an adapter of {options.model}, which peft cannot load, since it is in OpenCLIP's "
            "format. Write it in the other format first with `infcl convert`, or pass --lora_merge."
        )
    if lora.lora_merge:  # otherwise a training refuses to change it
        resize_images(DualEncoder(DualEncoder(loaded.model).base), args.image_size)
    if rank is None:
        return loaded
    adapted = with_adapters(loaded.model, rank, lora.lora_targets, args.seed)
    if lora.lora_logit_scale:
        for parameter in DualEncoder(adapted).temperature_parameters:
            parameter.requires_grad_(True)
    return loaded._replace(model=adapted)


def merge_into_start(options: TrainedModelOptions, args: InfCLTrainingArguments) -> None:
    """Replaces the adapters in ``output_dir`` by the whole model."""
    start = options.model if options.open_clip_model else base_of_adapters(options.model) or options.model
    whole = load(start, options.open_clip_model, tokenizer=options.tokenizer)
    resize_images(DualEncoder(whole.model), args.image_size)
    merge_adapters(Path(str(args.output_dir)), whole.model)


# ---- The average of the weights before and after a training ----

Weights = Mapping[str, Tensor]
Sets = Mapping[str, object]


def find_average(
    trainer: Any, start: Weights, gains: Sets, guards: Sequence[Sets], alpha: float | None, tolerance: float
) -> Averaged:
    """Measures averages of a start's weights with those of a trainer's model, and gives the model one; collective.

    The model gets the average at ``alpha``, or at the α that is chosen. The main process keeps both weights in host
    memory, and no process has a second model on its device.

    Args:
        start: the whole weights, as `main_weights`; those of other processes than the main one are not read.
        gains: the sets that the training is for, by name.
        guards: the sets on which the model should not get worse, by name: first one half of each, then the other, see
            `hf_infcl.quality.averages.halves`.
        alpha: of the average, from 0, the start, to 1, the end, which is measured beside both; None to measure `ALPHAS`
            and choose.
        tolerance: what a guard may lose if the average is chosen, as a fraction.
    """
    model, end, sets = trainer.dual_encoder.model, main_weights(trainer), {**gains, **with_halves(*guards)}

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


def average_with_start(trainer: Any, start: Weights, *sets: Any, **options: Any) -> Averaged:
    """`find_average` of the ``start`` of a training and its end, once it has ended; collective.

    Raises a ValueError if no checkpoint keeps the weights of the end, for example because the disk was full.
    """
    kept = checkpoint_of_end(trainer) is not None
    if not Processes().agree([kept])[0][0]:
        raise ValueError("No checkpoint keeps the weights at the end of the training: use `infcl average` instead.")
    return find_average(trainer, start, *sets, **options)


def main_weights(trainer: Any) -> dict[str, Tensor]:
    """Copies of the whole weights of a trainer's model in host memory; empty on other processes; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(trainer.dual_encoder.model, options=options)
    # For a model on the CPU, torch returns the parameters themselves, which the training changes in place.
    return {name: tensor.clone() for name, tensor in state.items()} if Processes().rank == 0 else {}


def checkpoint_of_end(trainer: Any) -> Path | None:
    """The checkpoint with the weights that the model has at the end of its training; None if there is none."""
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        return Path(trainer.state.best_model_checkpoint)
    resumed = trainer.resumption.checkpoint if trainer.steps_trained == 0 else None
    last = Path(resumed or Path(str(trainer.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"))
    return last if last.is_dir() else None


# ---- Pushes to the Hub, which Trainer starts in the background ----


class Pushes:
    """The pushes that Trainer starts while it trains; one that fails is logged, and does not end the training.

    Trainer uploads ``output_dir`` itself, into which the next push copies the model, and files must not change while
    they are uploaded. A save therefore starts no push while an earlier one runs or, with ``hub_always_push``, waits for
    that one.
    """

    def __init__(self, args: InfCLTrainingArguments) -> None:
        self._args = args
        self._jobs: dict[Future[Any], Path] = {}  # of the last push, with its checkpoint
        self._store = None if args.checkpoint_store is None else CheckpointStore(args.checkpoint_store)

    def uploading(self) -> dict[Future[Any], Path]:
        """The jobs that run, of a push and of copies into ``checkpoint_store``, with the checkpoints that they read."""
        jobs = self._jobs | ({} if self._store is None else self._store.jobs)
        return {job: checkpoint for job, checkpoint in jobs.items() if not job.done()}

    def copy_checkpoint(self, checkpoint: Path) -> None:
        """Begins to copy it into ``checkpoint_store``, if there is one."""
        if self._store is not None and self._args.process_index == 0:
            self._store.copy(checkpoint, limited=self._args.save_total_limit is not None)

    def fetch_checkpoint(self, resumes: str | bool | None) -> None:
        """Fetches the newest checkpoint of ``checkpoint_store`` if the newest of all is resumed from; collective.

        Raises a ValueError on every process if the store cannot be read.
        """
        problem = ""
        if self._store is not None and self._args.should_save and resumes in (True, "auto"):
            try:
                self._store.fetch(Path(str(self._args.output_dir)))
            except Exception as error:  # of the library of any protocol
                problem = f"The checkpoints in {self._args.checkpoint_store} could not be read: {cause(error)}."
        if problems := [text for text in Processes().gather_objects(problem) if text]:
            raise ValueError(problems[0])

    def finish(self) -> float:
        """Waits for the push that runs: a later training could replace the files that it reads.

        Returns the seconds of the wait, which are no part of the training's time.
        """
        begin = time.monotonic()
        if running := self.uploading():
            logger.info("Waiting for what is uploaded, which may take some minutes.")
            wait(running)
        return time.monotonic() - begin

    def push_checkpoint(self, trainer: Any, checkpoint: Path, push: Callable[[str], None]) -> None:
        """Pushes the model of a checkpoint and, if ``hub_strategy`` asks for it, the checkpoint.

        ``push`` is Trainer's method, which copies transformers' files of the model. A checkpoint in shards has no whole
        model, so that one is saved first; collective.
        """
        args, step = self._args, checkpoint.name.rpartition("-")[2]
        if args.hub_strategy == HubStrategy.END:
            return
        if args.hub_always_push:
            wait(self._jobs)
        starts = all(job.done() for job in self._jobs)  # a copy into checkpoint_store reads nothing that a push writes
        if saves_shards(trainer.accelerator):
            starts = bool(Processes().agree([starts])[0][0])  # only the main process knows
            if starts:
                trainer.save_model(_internal_call=True)
        if args.process_index > 0 or not starts:
            return
        try:
            for path in checkpoint.glob("open_clip_*"):
                shutil.copy(path, str(args.output_dir))
            push(str(checkpoint))
            self._jobs = dict.fromkeys(trainer.push_in_progress.jobs, checkpoint)
            for job in self._jobs:
                job.add_done_callback(partial(_report_failure, step))
        except Exception as error:  # a full disk is reported differently by files, torch.save and tokenizers
            logger.error(f"The push of step {step} could not start: {cause(error)}.")

    def push_output_dir(self, repository: str | None, message: str, delete: tuple[str, ...]) -> None:
        """Pushes the current ``output_dir`` without its checkpoints in one commit, after the push that runs.

        The commit removes files of the patterns ``delete`` from the repository. Raises an OSError with the reason on
        the main process if the push has failed.
        """
        args, folder = self._args, str(self._args.output_dir)
        if args.process_index > 0:
            return
        assert repository is not None
        self.finish()
        try:
            HfApi().upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=message,
                token=args.hub_token,
                revision=args.hub_revision,
                ignore_patterns=list(NOT_PUSHED),
                delete_patterns=list(delete) or None,
            )
        except Exception as error:  # of the Hub's client, of its HTTP library or of the file system
            options = [f"--exclude '{pattern}'" for pattern in NOT_PUSHED]
            if args.hub_revision is not None:
                options.append(f"--revision {args.hub_revision}")
            raise OSError(
                f"{folder} could not be pushed to {repository}: {cause(error)}. It is complete on this machine; push "
                f"it with `hf upload {repository} {folder} . {' '.join(options)}`."
            ) from error


def _report_failure(step: str, job: Future[Any]) -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        logger.error(f"The push of step {step} has failed: {cause(error)}. The next save pushes again.")


def make_repository(trainer: Any, create: Callable[[], None], token: str | None) -> None:
    """Creates the repository as Trainer does, and the branch ``hub_revision`` on the main process.

    The Hub may be unreachable, or reject the token or the name: an OSError then says what to do. Trainer's constructor
    creates the repository, so this is reported before the first step.
    """
    args, branch = trainer.args, trainer.args.hub_revision
    try:
        create()
        if branch is not None and not branch.startswith("refs/") and args.process_index == 0:
            HfApi().create_branch(trainer.hub_model_id, branch=branch, token=token or args.hub_token, exist_ok=True)
    except Exception as error:  # of the Hub's client or of its HTTP library
        name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
        cure = (
            "Name another one with hub_model_id."
            if isinstance(error, HFValidationError)
            else "Check the network and the token (hub_token, or that of `hf auth login`), or train without "
            f"push_to_hub and push later with `hf upload {name} {args.output_dir} .`."
        )
        raise OSError(
            f"The repository {name} of the Hub could not be created or found: {cause(error)}. {cure}"
        ) from error


def checkpoint_of_hub_if_named(
    resumes: str | bool | None, args: InfCLTrainingArguments, repository: str | None
) -> str | bool | None:
    """Returns ``resumes``, or for ``last-checkpoint`` its folder, which is downloaded once per machine; collective.

    Raises a ValueError on every process if no repository is named, it has no such folder, or it is unreachable.
    """
    if resumes != LAST_CHECKPOINT:
        return resumes
    processes, folder, problem = Processes(), "", ""
    # A folder of this name is taken if every process finds it, so that all go the same way.
    if all(here for (here,) in processes.agree([Path(LAST_CHECKPOINT).is_dir()])):
        return resumes
    repository = processes.gather_objects(repository or args.hub_model_id or "")[0]
    if not repository:
        raise ValueError(f"{LAST_CHECKPOINT} is in a repository on the Hub: name the repository with hub_model_id.")
    if args.local_process_index == 0:
        try:
            token, revision = args.hub_token, args.hub_revision
            # By its hash, because an older snapshot of the branch may lie in the cache.
            newest = HfApi().model_info(repository, revision=revision, token=token).sha
            folder = snapshot_download(repository, revision=newest, token=token, allow_patterns=f"{LAST_CHECKPOINT}/*")
            folder = str(Path(folder, LAST_CHECKPOINT))
            if not Path(folder).is_dir():
                problem = f'{repository} has no {LAST_CHECKPOINT}, which hub_strategy="checkpoint" pushes.'
        except Exception as error:  # as above
            problem = f"{LAST_CHECKPOINT} of {repository} could not be downloaded: {cause(error)}."
    if problems := [text for text in processes.gather_objects(problem) if text]:
        raise ValueError(problems[0])
    return processes.gather_objects(folder)[0]
