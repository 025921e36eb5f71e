"""Options that exclude each other, that would have no effect, or that InfCLTrainer does not support.

Options that would make batches or metrics inexact are refused.
"""

import math
from pathlib import Path
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin, parse_flag_from_env

from .declaring import refuse
from .facts import CHECKPOINTING, table_of_package

SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # whose learning rate depends on an evaluation's metric
WITHOUT_WARM_UP = ("constant", *SCHEDULES_BY_METRIC)  # schedules that ignore warmup_steps

# Of each kind, the conditions that must not hold together, and why.
REFUSALS: dict[str, dict[str, str]] = table_of_package("refusals")


def check_combinations(args: Any, *, divided: bool) -> None:
    """Raises a ValueError for options that exclude each other, or of which one would have no effect.

    ``divided`` says whether ``global_batch_size`` has been divided into micro-batches.
    """
    _check_support(args)
    if args.max_steps <= 0 and not 0 < args.num_train_epochs < math.inf:
        raise ValueError(
            "num_train_epochs or max_steps must be more than 0, otherwise nothing is trained, got "
            f"{args.num_train_epochs} and {args.max_steps}."
        )
    for kind in ("save", "eval", "logging"):
        interval = getattr(args, f"{kind}_steps")
        if getattr(args, f"{kind}_strategy") == "steps" and interval is not None and not interval > 0:
            raise ValueError(f"{kind}_steps must be more than 0 with {kind}_strategy='steps', got {interval}.")
    refuse(REFUSALS["exclusive"], args)
    _check_cache_folder(args)
    for name in CHECKPOINTING:
        if getattr(args, name, False):
            settings = {"use_reentrant": False} | (getattr(args, f"{name}_kwargs") or {})
            if settings["use_reentrant"] and args.freeze_layers is not None:
                raise ValueError(
                    f"{name}_kwargs with use_reentrant=True loses the gradient of the layers above those that "
                    f"freeze_layers={args.freeze_layers} freezes. Set use_reentrant to False."
                )
            setattr(args, f"{name}_kwargs", settings)  # the default of some releases of transformers is True
    if divided:
        refuse(REFUSALS["exclusive_in_steps"], args)
        _check_graphs(args)


def check_processes(args: Any) -> None:
    """As `check_combinations`, when the processes are set up and the config of accelerate has been read."""
    refuse(REFUSALS["unsupported_of_accelerate"], args.accelerator_config)
    if args.world_size > 1:
        refuse(REFUSALS["exclusive_among_processes"], args)


def check_command(command: str, options: Any) -> None:
    """As `check_combinations`, for all options of a command of `infcl`."""
    refuse(REFUSALS.get(f"of_{command}", {}), options)
    if command not in ("check", "train"):
        return
    if len(options.dataset or ()) > 1 and not options.streaming:
        raise ValueError("Only shards that are read with --streaming can have several --dataset.")
    if command == "train" and options.streaming and options.max_steps <= 0 and options.samples_per_epoch is None:
        raise ValueError("A stream has no length. Pass --max_steps or --samples_per_epoch.")
    if options.replay_share and not options.replay_dataset:
        raise ValueError("--replay_share has no effect without --replay_dataset: add it or drop --replay_share.")
    refuse(REFUSALS["exclusive_in_trainings"], options)


def _check_support(args: Any) -> None:
    """Raises a ValueError for options of TrainingArguments that InfCLTrainer does not support."""
    # The variable is set by `accelerate launch` with a config of DeepSpeed.
    if args.deepspeed is not None or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "InfCLTrainer does not train under DeepSpeed. To shard the parameters, use FSDP2 (--fsdp, or accelerate "
            "launch --config_file scripts/configs/fsdp2.yaml) instead of its config."
        )
    refuse(REFUSALS["unsupported"], args)
    if "transformers" not in args.save_formats or set(args.save_formats) - {"transformers", "open_clip"}:
        raise ValueError(
            "save_formats must be transformers, or transformers and open_clip, got "
            f"{' '.join(args.save_formats) or 'nothing'}: a training resumes from transformers' files."
        )
    if unknown := set(args.include_for_metrics) - {"inputs"}:
        raise ValueError(
            f"include_for_metrics may have 'inputs' only, got {', '.join(map(repr, sorted(unknown)))}: batches "
            "have no losses, and metrics of the whole set include its loss anyway."
        )
    if args.leave_out not in (None, "noisy"):
        raise ValueError(
            f"leave_out must be 'noisy', got {str(args.leave_out)!r}. To train without a share of the pairs, score "
            "them with `infcl score`, and pass its ledger as `--exclude _ledger.parquet:5%`."
        )


def _check_cache_folder(args: Any) -> None:
    """Raises a ValueError if a push of ``output_dir`` would upload the cached features."""
    if args.cache_features is None or args.output_dir is None:
        return
    output, cache = Path(args.output_dir).resolve(), Path(args.cache_features).resolve()
    # A push leaves out what begins with an underscore.
    if cache == output or (output in cache.parents and not cache.relative_to(output).parts[0].startswith("_")):
        raise ValueError(
            f"cache_features {args.cache_features} is inside output_dir {args.output_dir}, so a push to the Hub "
            f"would upload the features. Choose a folder outside, or {Path(args.output_dir, '_features')}."
        )


def _check_graphs(args: Any) -> None:
    """Raises a ValueError if CUDA graphs would be replayed among the micro-batches of a step."""
    # accelerate completes the plugin from the variables that `accelerate launch` sets.
    compiler = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    replays = compiler.backend == DynamoBackend.CUDAGRAPHS or compiler.mode in ("reduce-overhead", "max-autotune")
    if replays and args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"torch_compile_mode={compiler.mode!r} with the backend {compiler.backend.value.lower()!r} replays "
            "CUDA graphs, and a replay overwrites the outputs of the one before, but the loss needs those of all "
            f"{args.gradient_accumulation_steps} micro-batches of a step. Choose 'default' or "
            "'max-autotune-no-cudagraphs', or one micro-batch per step (gradient_accumulation_steps=1)."
        )
