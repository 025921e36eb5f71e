"""What this package has to know of the options of transformers.TrainingArguments. Nothing here imports torch."""

from __future__ import annotations

from numbers import Real

from .declaring import FINITE, FROM_0, FROM_1, NUMBER, SHARE, Facts, HelpPlace, Listing, Range

# Options that say where or how fast something is computed, which machines may set for themselves.
_OF_A_MACHINE = (
    *("dataloader_", "debug", "deepspeed", "disable_tqdm", "fsdp_config", "hub_", "local_rank", "log_level"),
    *("log_on_", "logging_dir", "output_dir", "project", "push_to_hub", "report_to", "run_name", "tf32"),
    "trackio_",
)
# Options that do not decide what is trained, but have to be the same on all machines.
_UNDECISIVE = (
    *("_", "accelerator_config", "activation_checkpointing_kwargs", "auto_find_batch_size", "average_tokens_"),
    *("batch_eval_metrics", "ddp_", "do_", "enable_jit_", "eval_", "fsdp", "full_determinism"),
    *("gradient_accumulation_", "gradient_checkpointing_kwargs", "greater_is_better", "ignore_data_skip"),
    *("include_", "label_names", "length_column_name", "liger_", "load_best_model_", "log_", "logging_", "no_cuda"),
    *("overwrite_output_dir", "parallelism_config", "prediction_loss_only", "restore_callback_", "resume_"),
    *("save_", "skip_memory_", "torch_compile_", "torch_empty_", "use_cache", "use_cpu", "use_liger"),
)

# By the beginnings of their names: the longest one counts. Options that a later release may add, or that are not named
# here, decide what is trained. torch's optimizers check some of the numbers as well, but only after the data are open,
# and without the option's name.
_FACTS = {
    "": Facts(decides=True),
    **dict.fromkeys(_OF_A_MACHINE, Facts(decides=False, one_machine=True)),
    **dict.fromkeys(_UNDECISIVE, Facts(decides=False)),
    **dict.fromkeys(
        ("activation_checkpointing", "gradient_checkpointing", "torch_compile"), Facts(decides=False, plans=True)
    ),
    "adam_beta": Facts(decides=True, within=SHARE),
    "adam_epsilon": Facts(decides=True, within=FINITE),
    "dataloader_num_workers": Facts(decides=False, one_machine=True, within=FROM_0),
    "dataloader_prefetch_factor": Facts(decides=False, one_machine=True, within=FROM_1),
    "ddp_timeout": Facts(decides=False, within=Range(Real, "a number of at least 1", lambda value: value >= 1)),
    "learning_rate": Facts(decides=True, within=FINITE),
    "logging_steps": Facts(decides=False, within=NUMBER),
    "max_grad_norm": Facts(
        decides=True,
        within=Range(Real, "a number of at least 0 (0 disables clipping)", lambda value: value >= 0),
    ),
    "max_steps": Facts(decides=True, plans=True, within=NUMBER),
    "num_train_epochs": Facts(decides=True, plans=True, within=NUMBER),
    "per_device_": Facts(decides=False, within=FROM_1),
    "save_steps": Facts(decides=False, within=NUMBER),
    "save_total_limit": Facts(decides=False, within=FROM_1),
    "warmup_steps": Facts(decides=True, within=FINITE),
    "weight_decay": Facts(decides=True, within=FINITE),
}


def facts_of_theirs(name: str) -> Facts:
    """The facts of an option of transformers.TrainingArguments."""
    return _FACTS[max(filter(name.startswith, _FACTS), key=len)]


# The options that the short help of a training lists, or that mean something else in a contrastive training than their
# help in transformers says.
_LISTINGS = {
    "activation_checkpointing": Listing(
        "Recompute activations in the backward: less memory, and a step takes longer.", HelpPlace("Batch", 40)
    ),
    "gradient_checkpointing": Listing(short_help=HelpPlace("Batch", 50)),
    "num_train_epochs": Listing("Passes over the training data.", HelpPlace("Length", 10)),
    "max_steps": Listing("Steps of the optimizer; by default, --num_train_epochs decides.", HelpPlace("Length", 20)),
    "learning_rate": Listing(
        "Learning rate: about 1e-5 to fine-tune, 1e-3 from random weights. It is the highest of the schedule.",
        HelpPlace("Rates", 10),
    ),
    "lr_scheduler_type": Listing("Schedule of the learning rate, such as cosine.", HelpPlace("Rates", 20)),
    "warmup_steps": Listing(
        "Steps in which the learning rate rises from 0. A number below 1 is their share of all steps.",
        HelpPlace("Rates", 30),
    ),
    "weight_decay": Listing("Weight decay of the optimizer; biases and norms have none.", HelpPlace("Rates", 40)),
    "bf16": Listing("Compute in bfloat16; the weights stay fp32.", HelpPlace("Precision and speed", 10)),
    "torch_compile": Listing(
        "Compile the model: the first step takes longer, the others less.",
        HelpPlace("Precision and speed", 20),
    ),
    "dataloader_num_workers": Listing(
        "Processes that decode the data of each GPU; with 0 the training does it.",
        HelpPlace("Precision and speed", 30),
    ),
    "use_cpu": Listing("Compute on the CPU although there is a GPU.", HelpPlace("Precision and speed", 40)),
    "eval_strategy": Listing(
        "When to evaluate: no, steps or epoch, the default if there is a set to evaluate on. With --max_steps it is "
        "steps.",
        HelpPlace("Evaluation", 70),
    ),
    "eval_steps": Listing(
        "Steps between two evaluations, by default a tenth of --max_steps. A number below 1 is their share of all "
        "steps.",
        HelpPlace("Evaluation", 80),
    ),
    "output_dir": Listing("Folder for everything that the command writes.", HelpPlace("Logging and saving", 10)),
    "logging_steps": Listing(
        "Steps between two lines of the log, by default a hundredth of the run. A number below 1 is their share of all"
        " steps.",
        HelpPlace("Logging and saving", 30),
    ),
    "report_to": Listing(
        "Trackers that get the log, such as wandb or tensorboard; none by default.",
        HelpPlace("Logging and saving", 40),
    ),
    "save_steps": Listing(
        "Steps between two checkpoints, by default those between two evaluations. A number below 1 is their share of "
        "all steps.",
        HelpPlace("Logging and saving", 50),
    ),
    "push_to_hub": Listing(
        "Push the model and its card to the Hub whenever it is saved.",
        HelpPlace("Logging and saving", 90),
    ),
    "per_device_eval_batch_size": Listing("Images or texts that a process embeds at once in an evaluation."),
    "load_best_model_at_end": Listing("Save the weights of the best checkpoint, by --metric_for_best_model."),
    "hub_model_id": Listing("With --push_to_hub: the repository. By default it has the name of --output_dir."),
    "seed": Listing("Seed of the order of the data, of dropout and of new weights."),
}


def listing_of_theirs(name: str) -> Listing:
    """How the help lists an option of transformers.TrainingArguments."""
    return _LISTINGS.get(name, Listing())
