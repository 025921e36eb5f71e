"""What this package has to know of the options of transformers.TrainingArguments. Nothing here imports torch."""

from __future__ import annotations

from numbers import Real

from .declaring import FINITE, FROM_0, FROM_1, NUMBER, SHARE, Facts, Range


def _machine() -> Facts:
    """Facts of options that say where or how fast something is computed, and that machines may set for themselves."""
    return Facts(decides=False, one_machine=True)


def _undecisive(*, plans: bool = False, within: Range | None = None) -> Facts:
    """Facts of options that do not decide what is trained, but have to be the same on all machines."""
    return Facts(decides=False, plans=plans, within=within)


# By the beginnings of their names: the longest one counts. Options that a later release may add, or that are not named
# here, decide what is trained. torch's optimizers check some of the numbers as well, but only after the data are open,
# and without the option's name.
_FACTS = {
    "": Facts(decides=True),
    "_": _undecisive(),
    "accelerator_config": _undecisive(),
    "activation_checkpointing": _undecisive(plans=True),
    "activation_checkpointing_kwargs": _undecisive(),
    "adam_beta": Facts(decides=True, within=SHARE),
    "adam_epsilon": Facts(decides=True, within=FINITE),
    "auto_find_batch_size": _undecisive(),
    "average_tokens_": _undecisive(),
    "batch_eval_metrics": _undecisive(),
    "dataloader_": _machine(),
    "dataloader_num_workers": Facts(decides=False, one_machine=True, within=FROM_0),
    "dataloader_prefetch_factor": Facts(decides=False, one_machine=True, within=FROM_1),
    "ddp_": _undecisive(),
    "ddp_timeout": _undecisive(within=Range(Real, "a number of at least 1", lambda value: value >= 1)),
    "debug": _machine(),
    "deepspeed": _machine(),
    "disable_tqdm": _machine(),
    "do_": _undecisive(),
    "enable_jit_": _undecisive(),
    "eval_": _undecisive(),
    "fsdp": _undecisive(),
    "fsdp_config": _machine(),
    "full_determinism": _undecisive(),
    "gradient_accumulation_": _undecisive(),
    "gradient_checkpointing": _undecisive(plans=True),
    "gradient_checkpointing_kwargs": _undecisive(),
    "greater_is_better": _undecisive(),
    "hub_": _machine(),
    "ignore_data_skip": _undecisive(),
    "include_": _undecisive(),
    "label_names": _undecisive(),
    "learning_rate": Facts(decides=True, within=FINITE),
    "length_column_name": _undecisive(),
    "liger_": _undecisive(),
    "load_best_model_": _undecisive(),
    "local_rank": _machine(),
    "log_": _undecisive(),
    "log_level": _machine(),
    "log_on_": _machine(),
    "logging_": _undecisive(),
    "logging_dir": _machine(),
    "logging_steps": _undecisive(within=NUMBER),
    "max_grad_norm": Facts(
        decides=True,
        within=Range(Real, "a number of at least 0 (0 disables clipping)", lambda value: value >= 0),
    ),
    "max_steps": Facts(decides=True, plans=True, within=NUMBER),
    "no_cuda": _undecisive(),
    "num_train_epochs": Facts(decides=True, plans=True, within=NUMBER),
    "output_dir": _machine(),
    "overwrite_output_dir": _undecisive(),
    "parallelism_config": _undecisive(),
    "per_device_": _undecisive(within=FROM_1),
    "prediction_loss_only": _undecisive(),
    "project": _machine(),
    "push_to_hub": _machine(),
    "report_to": _machine(),
    "restore_callback_": _undecisive(),
    "resume_": _undecisive(),
    "run_name": _machine(),
    "save_": _undecisive(),
    "save_steps": _undecisive(within=NUMBER),
    "save_total_limit": _undecisive(within=FROM_1),
    "skip_memory_": _undecisive(),
    "tf32": _machine(),
    "torch_compile": _undecisive(plans=True),
    "torch_compile_": _undecisive(),
    "torch_empty_": _undecisive(),
    "trackio_": _machine(),
    "use_cache": _undecisive(),
    "use_cpu": _undecisive(),
    "use_liger": _undecisive(),
    "warmup_steps": Facts(decides=True, within=FINITE),
    "weight_decay": Facts(decides=True, within=FINITE),
}


def facts_of_theirs(name: str) -> Facts:
    """The facts of an option of transformers.TrainingArguments."""
    return _FACTS[max(filter(name.startswith, _FACTS), key=len)]
