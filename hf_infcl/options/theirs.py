"""What this package has to know of the options of transformers.TrainingArguments. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from numbers import Real

from .declaring import FINITE, FROM_0, FROM_1, NUMBER, SHARE, Facts, HelpPlace, Range

# Options that say where or how fast something is computed, which machines may set for themselves.
_OF_A_MACHINE = (
    *("dataloader_", "debug", "deepspeed", "disable_tqdm", "fsdp_config", "hub_", "local_rank", "log_level"),
    *("log_on_", "logging_dir", "output_dir", "project", "push_to_hub", "report_to", "run_name", "tf32", "trackio_"),
)
# Options that do not decide what is trained, but have to be the same on all machines.
_UNDECISIVE = (
    *("_", "accelerator_config", "activation_checkpointing", "auto_find_batch_size", "average_tokens_"),
    *("batch_eval_metrics", "ddp_", "do_", "enable_jit_", "eval_", "fsdp", "full_determinism"),
    *("gradient_accumulation_", "gradient_checkpointing", "greater_is_better", "ignore_data_skip"),
    *("include_", "label_names", "length_column_name", "liger_", "load_best_model_", "log_", "logging_", "no_cuda"),
    *("overwrite_output_dir", "parallelism_config", "prediction_loss_only", "restore_callback_", "resume_"),
    *("save_", "skip_memory_", "torch_compile", "torch_empty_", "use_cache", "use_cpu", "use_liger"),
)

# By the beginnings of their names: the longest one counts. Options that a later release may add, or that are not named
# here, decide what is trained. torch's optimizers check some of the numbers as well, but only after the data are open,
# and without the option's name.
_FACTS = {
    "": Facts(decides=True),
    **dict.fromkeys(_OF_A_MACHINE, Facts(decides=False, one_machine=True)),
    **dict.fromkeys(_UNDECISIVE, Facts(decides=False)),
    "activation_checkpointing_kwargs": Facts(decides=False, needs="activation_checkpointing"),
    "gradient_checkpointing_kwargs": Facts(decides=False, needs="gradient_checkpointing"),
    "num_train_epochs": Facts(decides=True, within=NUMBER),
    "max_steps": Facts(decides=True, within=NUMBER),
    "learning_rate": Facts(decides=True, within=FINITE),
    "warmup_steps": Facts(decides=True, within=FINITE),
    "weight_decay": Facts(decides=True, within=FINITE),
    "adam_beta": Facts(decides=True, within=SHARE),
    "adam_epsilon": Facts(decides=True, within=FINITE),
    "max_grad_norm": Facts(
        decides=True, within=Range(Real, "a number of at least 0 (0 disables clipping)", lambda value: value >= 0)
    ),
    "bf16": Facts(decides=True, excludes={"fp16": "at most one of them can be True"}),
    "bf16_": Facts(decides=True),
    "dataloader_num_workers": Facts(decides=False, one_machine=True, within=FROM_0),
    "dataloader_prefetch_factor": Facts(decides=False, one_machine=True, within=FROM_1, needs="dataloader_num_workers"),
    "ddp_timeout": Facts(decides=False, within=Range(Real, "a number of at least 1", lambda value: value >= 1)),
    "logging_steps": Facts(decides=False, within=NUMBER),
    "per_device_": Facts(decides=False, within=FROM_1),
    "save_steps": Facts(decides=False, within=NUMBER),
    "save_total_limit": Facts(decides=False, within=FROM_1),
}

# The numbers of `HelpPlace`, by heading and name.
_PLACES = {
    "Batch": {"activation_checkpointing": 40, "gradient_checkpointing": 50},
    "Length": {"num_train_epochs": 10, "max_steps": 20},
    "Rates": {"learning_rate": 10, "lr_scheduler_type": 20, "warmup_steps": 30, "weight_decay": 40},
    "Precision and speed": {"bf16": 10, "torch_compile": 20, "dataloader_num_workers": 30, "use_cpu": 40},
    "Evaluation": {"eval_strategy": 70, "eval_steps": 80},
    "Logging and saving": {"output_dir": 10, "logging_steps": 30, "report_to": 40, "save_steps": 50, "push_to_hub": 90},
}

# In place of the help of transformers, where that means something else in a contrastive training.
_WORDS = {
    "activation_checkpointing": "Recompute activations in the backward: less memory, and a step takes longer.",
    "num_train_epochs": "Passes over the training data.",
    "max_steps": "Steps of the optimizer; by default, --num_train_epochs decides.",
    "learning_rate": "Learning rate: about 1e-5 to fine-tune, 5e-4 from random weights. It is the highest of the "
    "schedule.",
    "lr_scheduler_type": "Schedule of the learning rate, such as cosine.",
    "warmup_steps": "Steps in which the learning rate rises from 0. A number below 1 is their share of all steps.",
    "weight_decay": "Weight decay of the optimizer; biases and norms have none.",
    "bf16": "Compute in bfloat16; the weights stay fp32.",
    "torch_compile": "Compile the model: the first step takes longer, the others less.",
    "dataloader_num_workers": "Processes that decode the data of each GPU; with 0 the training does it.",
    "use_cpu": "Compute on the CPU although there is a GPU.",
    "eval_strategy": "When to evaluate: no, steps or epoch, the default if there is a set to evaluate on. With "
    "--max_steps it is steps.",
    "eval_steps": "Steps between two evaluations, by default a tenth of --max_steps. A number below 1 is their share "
    "of all steps.",
    "per_device_eval_batch_size": "Images or texts that a process embeds at once in an evaluation.",
    "output_dir": "Folder for everything that the command writes.",
    "logging_steps": "Steps between two lines of the log, by default a hundredth of the run. A number below 1 is their "
    "share of all steps.",
    "report_to": "Trackers that get the log, such as wandb or tensorboard; none by default.",
    "save_steps": "Steps between two checkpoints, by default those between two evaluations. A number below 1 is their "
    "share of all steps.",
    "load_best_model_at_end": "Save the weights of the best checkpoint, by --metric_for_best_model.",
    "push_to_hub": "Push the model and its card to the Hub whenever it is saved.",
    "hub_model_id": "With --push_to_hub: the repository. By default it has the name of --output_dir.",
    "seed": "Seed of the order of the data, of dropout and of new weights.",
}


@cache
def facts_of_theirs(name: str) -> Facts:
    """The facts of an option of transformers.TrainingArguments."""
    facts = _FACTS[max(filter(name.startswith, _FACTS), key=len)]
    place = next((HelpPlace(heading, of[name]) for heading, of in _PLACES.items() if name in of), None)
    return replace(facts, short_help=place, help_in_command=_WORDS.get(name, ""))
