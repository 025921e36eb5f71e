"""Options that exclude each other, that would have no effect, or that InfCLTrainer does not support.

Options that would make batches or metrics inexact are refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin, parse_flag_from_env

from .declaring import refuse
from .facts import CHECKPOINTING

SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # whose learning rate depends on an evaluation's metric
WITHOUT_WARM_UP = ("constant", *SCHEDULES_BY_METRIC)  # schedules that ignore warmup_steps

_OF_SET = "metrics are those of the whole set, not of batches"
_IN_BF16 = "it leaves the model's weights in {0}; {0}=True evaluates in {0} as well"
_BETWEEN = (
    "it changes the weights in every backward, that is between the micro-batches of a step, whose gradients would then "
    "not add up to the gradient of the global batch; adamw_torch_fused does not"
)
# Conditions that must not hold, and why; see `refuse`.
_UNSUPPORTED = (
    ("dataloader_drop_last", "it would drop rows of evaluations; training has full batches anyway"),
    ("batch_eval_metrics", _OF_SET),
    ("eval_do_concat_batches=False", _OF_SET),
    ("enable_jit_checkpoint", "it saves a checkpoint at SIGTERM and SIGUSR1 by itself"),
    ("label_smoothing_factor", "the contrastive loss has no labels"),
    ("neftune_noise_alpha", "it adds noise to the embeddings of language models"),
    ("dataloader_in_order=False", "evaluations would lose rows, and chance would order the training set"),
    ("prediction_loss_only", "the loss of a whole set needs its embeddings, and thus gives its recalls"),
    ("eval_use_gather_object", "evaluations gather tensors"),
    ("bf16_full_eval", _IN_BF16.format("bf16")),
    ("fp16_full_eval", _IN_BF16.format("fp16")),
    ("ignore_data_skip", "it would train rows of an epoch again; a resume reads none of those before it"),
    ("use_liger_kernel", "Liger has no kernels for dual encoders and would change nothing"),
    ("auto_find_batch_size", "it changes the contrastive batch; global_batch_size alone finds what fits"),
    ("optim=lomo|adalomo|*_layerwise", _BETWEEN),
)
_UNSUPPORTED_OF_ACCELERATE = (
    ("split_batches", "it would divide per_device_train_batch_size by the number of processes"),
    ("dispatch_batches", "the main process would read all rows; every process reads its own rows"),
    ("even_batches=False", "processes with fewer batches would end evaluations early; rows that pad are not counted"),
)
_ONE_TOWER = "a frozen tower has no learning rate"
_RELATIVE = "it is relative to learning_rate; freeze leaves a tower as it is"
_DIVIDE = "each divides the parameters in its own way"
_NO_WARM_UP = "it has no warm-up, as constant_with_warmup has"
# Conditions that must not hold together, and why.
_EXCLUSIVE = (
    ("save_strategy=best eval_strategy=no", "it saves after evaluations, of which there are none"),
    (f"warmup_steps lr_scheduler_type={'|'.join(WITHOUT_WARM_UP)}", _NO_WARM_UP),
    ("lr_scheduler_kwargs lr_scheduler_type=constant|constant_with_warmup", "it takes none"),
    ("optim_target_modules optim!=galore*|apollo*", "only GaLore and APOLLO project the gradients of some modules"),
    ("optimizer=muon optim!=adamw_torch|adamw_torch_fused", "adamw_torch_fused or adamw_torch updates the rest"),
    *((f"{tower}_learning_rate freeze={tower}", _ONE_TOWER) for tower in ("image", "text")),
    *((f"{tower}_learning_rate learning_rate=0", _RELATIVE) for tower in ("image", "text")),
    *((f"{tower}_learning_rate optim_target_modules", _DIVIDE) for tower in ("image", "text")),
)
_EXCLUSIVE_IN_STEPS = (  # of several micro-batches
    ("ddp_static_graph gradient_accumulation_steps>1", "DDP fails in the second micro-batch of a step"),
    ("texts_at_once!=auto|1 gradient_accumulation_steps=1", "a step has no texts of another micro-batch"),
)
_EXCLUSIVE_AMONG_PROCESSES = (
    (
        "texts_at_once!=auto|1 gradient_accumulation_steps=2",
        "with several processes the last micro-batch of each keeps its own texts, and there is only one other",
    ),
)
_NOT_CACHED = """streaming, augmentation!=none, on_bad_sample=skip, fsdp, torch_compile freeze=image,
    negative_caption_column keep_features""".split(",")
_EXCLUSIVE_IN_COMMANDS = (
    ("overwrite_output_dir resume_from_checkpoint", "the one deletes the run in --output_dir, the other continues it"),
    *((f"cache_features {others}", "what is frozen is computed once for all epochs") for others in _NOT_CACHED),
)


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
    refuse(_EXCLUSIVE, args)
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
        refuse(_EXCLUSIVE_IN_STEPS, args)
        _check_graphs(args)


def check_processes(args: Any) -> None:
    """As `check_combinations`, when the processes are set up and the config of accelerate has been read."""
    refuse(_UNSUPPORTED_OF_ACCELERATE, args.accelerator_config)
    if args.world_size > 1:
        refuse(_EXCLUSIVE_AMONG_PROCESSES, args)


def check_command(data: Any, args: Any) -> None:
    """As `check_combinations`, for options of `infcl train`."""
    if len(data.dataset or ()) > 1 and not data.streaming:
        raise ValueError("Only shards that are read with --streaming can have several --dataset.")
    if args.replay_share and not data.replay_dataset:
        raise ValueError("--replay_share has no effect without --replay_dataset: add it or drop --replay_share.")
    if args.cache_features and not args.keep_features and args.freeze != "image":
        raise ValueError(
            "cache_features computes what is frozen once, but the image tower trains. Pass --freeze image, or keep the "
            "start's with --keep_features."
        )
    refuse(_EXCLUSIVE_IN_COMMANDS, SimpleNamespace(**{**vars(args), **vars(data)}))


def _check_support(args: Any) -> None:
    """Raises a ValueError for options of TrainingArguments that InfCLTrainer does not support."""
    # The variable is set by `accelerate launch` with a config of DeepSpeed.
    if args.deepspeed is not None or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "InfCLTrainer does not train under DeepSpeed. To shard the parameters, use FSDP2 (--fsdp, or accelerate "
            "launch --config_file scripts/configs/fsdp2.yaml) instead of its config."
        )
    refuse(_UNSUPPORTED, args)
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
