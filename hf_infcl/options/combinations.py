"""Options that contradict each other, that would have no effect, or that InfCLTrainer does not support."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin, parse_flag_from_env

from .declaring import spelled
from .theirs import CHECKPOINTING

SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # whose learning rate depends on an evaluation's metric
WITHOUT_WARM_UP = ("constant", *SCHEDULES_BY_METRIC)  # schedules that ignore warmup_steps
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # torch.compile's


def check_combinations(args: Any) -> None:
    """Raises a ValueError for options that contradict each other, or of which one would have no effect."""
    if args.max_steps == 0:
        raise ValueError("max_steps must be more than 0, or -1 to train num_train_epochs, got 0.")
    if args.max_steps <= 0 and not 0 < args.num_train_epochs < math.inf:
        raise ValueError(
            "num_train_epochs or max_steps must be more than 0, otherwise nothing is trained, got "
            f"{args.num_train_epochs} and {args.max_steps}."
        )
    for kind in ("save", "eval", "logging"):
        strategy, steps = f"{kind}_strategy", f"{kind}_steps"
        interval = getattr(args, steps)
        if getattr(args, strategy) == "steps" and interval is not None and not interval > 0:
            raise ValueError(f"{steps} must be more than 0 with {strategy}='steps', got {interval}.")
    _check_best_checkpoint(args)
    _check_cache_folder(args)
    steps = args.gradient_accumulation_steps
    if args.ddp_static_graph and steps > 1:
        raise ValueError(
            f"ddp_static_graph=True does not work with gradient_accumulation_steps={steps}: DDP fails in the second "
            "micro-batch of a step. Leave it off."
        )
    # accelerate completes the plugin from the variables that `accelerate launch` sets.
    compiler = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    replays = compiler.backend == DynamoBackend.CUDAGRAPHS or compiler.mode in _CUDA_GRAPH_MODES
    if replays and steps > 1:
        raise ValueError(
            f"torch_compile_mode={compiler.mode!r} with the backend {compiler.backend.value.lower()!r} replays "
            "CUDA graphs, and a replay overwrites the outputs of the one before, but the loss needs those of all "
            f"{steps} micro-batches of a step. Choose 'default' or "
            "'max-autotune-no-cudagraphs', or one micro-batch per step (gradient_accumulation_steps=1)."
        )
    _check_effects(args)
    _check_parts(args)
    _check_optimizer(args)


def _check_best_checkpoint(args: Any) -> None:
    """Raises a ValueError if the best checkpoint cannot be loaded, because not every checkpoint is evaluated."""
    saved, evaluated = spelled(args.save_strategy), spelled(args.eval_strategy)
    if not args.load_best_model_at_end or saved == "best":
        return
    if saved != evaluated:
        raise ValueError(
            f"load_best_model_at_end needs an evaluation for each checkpoint, but save_strategy is {saved!r} and "
            f"eval_strategy {evaluated!r}. Choose the same, or save_strategy='best'."
        )
    saves, evaluations = args.save_steps, args.eval_steps or args.logging_steps
    shares = (saves < 1) + (evaluations < 1)
    if saved == "steps" and (shares == 1 or round(saves * 1e6) % max(1, round(evaluations * 1e6))):
        raise ValueError(
            f"load_best_model_at_end needs an evaluation for each checkpoint, but save_steps={saves} is no multiple of "
            f"eval_steps={evaluations}."
        )


def _check_parts(args: Any) -> None:
    """Checks the options that apply to parts of the model."""
    names = [name for name in ("image_learning_rate", "text_learning_rate") if getattr(args, name) is not None]
    for name in names:
        if name.startswith(str(args.freeze)):
            raise ValueError(
                f"{name} would have no effect, because freeze={args.freeze!r} freezes that tower. Omit one of both."
            )
    if names and args.learning_rate == 0:
        raise ValueError(
            f"{' and '.join(names)} cannot be set beside learning_rate=0, to which they are relative. Set that to more "
            "than 0; freeze leaves a tower as it is."
        )
    if names and args.optim_target_modules is not None:
        raise ValueError(
            f"{' and '.join(names)} cannot be combined with optim_target_modules, which divides the parameters in "
            "its own way. Leave one of them out."
        )
    for name in CHECKPOINTING if args.freeze_layers is not None else ():
        if getattr(args, name, False):
            settings = {"use_reentrant": False} | (getattr(args, f"{name}_kwargs") or {})
            if settings["use_reentrant"]:
                raise ValueError(
                    f"{name}_kwargs with use_reentrant=True loses the gradient of the layers above those that "
                    f"freeze_layers={args.freeze_layers} freezes. Set use_reentrant to False."
                )
            setattr(args, f"{name}_kwargs", settings)  # the default of some releases of transformers is True


def _check_effects(args: Any) -> None:
    """Raises a ValueError for options that would have no effect, because of another option."""
    if args.texts_together > 1 and args.gradient_accumulation_steps == 1:
        raise ValueError(
            f"texts_at_once={args.texts_at_once} has no effect with gradient_accumulation_steps=1: a step has one "
            "micro-batch. Omit it, or choose smaller micro-batches and more of them."
        )
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise ValueError(
            "save_strategy='best' saves after evaluations, of which eval_strategy='no' makes none: nothing would "
            "be saved. Choose eval_strategy='epoch' or 'steps'."
        )
    schedule = spelled(args.lr_scheduler_type)
    if args.warmup_steps and schedule in WITHOUT_WARM_UP:
        instead = " Choose 'constant_with_warmup'." if schedule == "constant" else " Leave it out."
        raise ValueError(
            f"warmup_steps={args.warmup_steps} has no effect with lr_scheduler_type={schedule!r}, which has no "
            f"warm-up.{instead}"
        )
    if args.lr_scheduler_kwargs and schedule in ("constant", "constant_with_warmup"):
        raise ValueError(
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} have no effect with lr_scheduler_type={schedule!r}, "
            "which takes none. Leave them out, or choose another schedule."
        )
    optimizer = spelled(args.optim)
    if args.optim_target_modules is not None and not optimizer.startswith(("galore", "apollo")):
        raise ValueError(
            f"optim_target_modules has no effect with optim={optimizer!r}: only GaLore and APOLLO project the "
            "gradients of some modules. Leave it out; requires_grad_(False) freezes parameters."
        )


def _check_optimizer(args: Any) -> None:
    """Checks the options that ``optimizer="muon"`` excludes."""
    if args.optimizer is None:
        return
    name = spelled(args.optim)
    if name not in ("adamw_torch", "adamw_torch_fused"):
        raise ValueError(
            f"optimizer='muon' updates the parameters that are no matrices with 'adamw_torch_fused' or 'adamw_torch', "
            f"not with optim={name!r}. Leave optim or optimizer out."
        )


def check_texts_at_once(args: Any) -> None:
    """Raises a ValueError if ``texts_at_once`` would have no effect among several processes.

    To be called when the processes are set up, since their number is not known before.
    """
    if args.texts_together > 1 and args.gradient_accumulation_steps == 2 and args.world_size > 1:
        raise ValueError(
            f"texts_at_once={args.texts_at_once} has no effect with gradient_accumulation_steps=2 and "
            f"{args.world_size} processes: the last micro-batch of a process keeps its own texts, and there is only "
            "one other. Omit it, or choose smaller micro-batches and more of them."
        )


def _check_cache_folder(args: Any) -> None:
    """Raises a ValueError if a push of ``output_dir`` would upload the cached features."""
    if args.cache_features is None or args.output_dir is None:
        return
    place, cache = Path(args.output_dir).resolve(), Path(args.cache_features).resolve()
    # A push leaves out what begins with an underscore.
    if cache == place or (place in cache.parents and not cache.relative_to(place).parts[0].startswith("_")):
        raise ValueError(
            f"cache_features {args.cache_features} is inside output_dir {args.output_dir}, so a push to the Hub "
            f"would upload the features. Choose a folder outside, or {Path(args.output_dir, '_features')}."
        )


def check_command(data: Any, args: Any) -> None:
    """Raises a ValueError for options of `infcl train` that contradict each other."""
    if data.overwrite_output_dir and args.resume_from_checkpoint:
        raise ValueError(
            "--overwrite_output_dir deletes the run in --output_dir, and --resume_from_checkpoint "
            f"{args.resume_from_checkpoint} continues one. Omit one of them."
        )
    if len(data.dataset or ()) > 1 and not data.streaming:
        raise ValueError("Only shards that are read with --streaming can have several --dataset.")
    check_replay(data, args)
    if args.cache_features is not None:
        _check_cached(data, args)


def check_replay(data: Any, args: Any) -> None:
    """Raises a ValueError for a share of old pairs without old pairs."""
    if args.replay_share and not data.replay_dataset:
        raise ValueError("--replay_share had no effect without --replay_dataset. Pass it as well.")


def _check_cached(data: Any, args: Any) -> None:
    """Checks the options by which there is nothing to cache, or no two epochs have the same."""
    keeps, freezes = bool(args.keep_features), args.freeze == "image"
    if not keeps and not freezes:
        raise ValueError(
            "cache_features computes what is frozen once, but the image tower trains. Pass --freeze image, or keep the "
            "start's with --keep_features."
        )
    for changes, name in (
        (data.streaming, "streaming"),
        (data.augmentation != "none", "augmentation"),
        (data.on_bad_sample == "skip", "on_bad_sample"),
        (args.fsdp, "fsdp"),
        (args.torch_compile and freezes, "torch_compile"),
        (data.negative_caption_column and keeps, "negative_caption_column"),
    ):
        if changes:
            raise ValueError(
                f"cache_features computes what is frozen once for all epochs, which --{name} does not allow. Omit one "
                "of both."
            )


def check_support(args: Any) -> None:
    """Raises a ValueError for options of TrainingArguments that InfCLTrainer does not support."""
    # The variable is set by `accelerate launch` with a config of DeepSpeed.
    if args.deepspeed is not None or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "InfCLTrainer does not train under DeepSpeed. To shard the parameters, use FSDP2 (--fsdp, or accelerate "
            "launch --config_file scripts/configs/fsdp2.yaml) instead of its config."
        )
    for name, default, reason in (
        ("dataloader_drop_last", False, "it would drop rows of evaluations; training has full batches anyway"),
        ("batch_eval_metrics", False, "metrics are those of the whole set, not of batches"),
        ("eval_do_concat_batches", True, "metrics are those of the whole set, not of batches"),
        ("enable_jit_checkpoint", False, "it saves a checkpoint at SIGTERM and SIGUSR1 by itself"),
        ("label_smoothing_factor", 0.0, "the contrastive loss has no labels"),
        ("neftune_noise_alpha", None, "it adds noise to the embeddings of language models"),
        ("dataloader_in_order", True, "evaluations would lose rows, and chance would order the training set"),
        ("prediction_loss_only", False, "the loss of a whole set needs its embeddings, and thus gives its recalls"),
        ("eval_use_gather_object", False, "evaluations gather tensors"),
        ("bf16_full_eval", False, "it leaves the model's weights in bf16; bf16=True evaluates in bf16 as well"),
        ("fp16_full_eval", False, "it leaves the model's weights in fp16; fp16=True evaluates in fp16 as well"),
        ("ignore_data_skip", False, "it would train rows of an epoch again; a resume reads none of those before it"),
        ("use_liger_kernel", False, "Liger has no kernels for dual encoders and would change nothing"),
    ):
        # transformers before 5.15 has no dataloader_in_order.
        if (value := getattr(args, name, default)) != default:
            raise ValueError(f"InfCLTrainer does not support {name}={value}: {reason}. Leave it at {default}.")
    if unknown := set(args.include_for_metrics) - {"inputs"}:
        raise ValueError(
            f"include_for_metrics may have 'inputs' only, got {', '.join(map(repr, sorted(unknown)))}: batches "
            "have no losses, and metrics of the whole set include its loss anyway."
        )
    optimizer = spelled(args.optim)
    if optimizer in ("lomo", "adalomo") or optimizer.endswith("_layerwise"):
        raise ValueError(
            f"optim={optimizer!r} changes the weights in every backward, that is between the micro-batches of a "
            "step, whose gradients would then not add up to the gradient of the global batch. Use another "
            "optimizer, such as 'adamw_torch_fused'."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size would change the contrastive batch and thus the objective. Instead, pass "
            "global_batch_size without per_device_train_batch_size: the micro-batches that fit are found, and the "
            "result stays the same."
        )


def check_accelerator(args: Any) -> None:
    """Raises a ValueError for an ``accelerator_config`` that would change the batches."""
    if getattr(args.accelerator_config, "split_batches", False):
        raise ValueError(
            "accelerator_config's split_batches=True would divide per_device_train_batch_size by the number of "
            "processes. Leave it off."
        )
    if getattr(args.accelerator_config, "dispatch_batches", False):
        raise ValueError(
            "accelerator_config's dispatch_batches=True would let the main process read all rows. Omit it: every "
            "process reads its own rows."
        )
    if not getattr(args.accelerator_config, "even_batches", True):
        raise ValueError(
            "accelerator_config's even_batches=False would give the processes unequal numbers of batches in "
            "evaluations, where they wait for each other. Leave it at True: rows that only pad a batch are not "
            "counted."
        )
