"""What this package has to know of the options of transformers.TrainingArguments. Nothing here imports torch."""

from __future__ import annotations

from numbers import Real

from .declaring import FINITE, FROM_0, FROM_1, NUMBER, SHARE, Facts, HelpPlace, Range

# Options that say where or how fast something is computed, which machines may set for themselves.
_OF_A_MACHINE = tuple(
    """
    dataloader_ debug deepspeed disable_tqdm fsdp_config hub_ local_rank log_level log_on_ logging_dir project run_name
    tf32 trackio_
    """.split()
)
# Options that do not decide what is trained, but have to be the same on all machines.
_UNDECISIVE = tuple(
    """
    _ accelerator_config auto_find_batch_size average_tokens_ batch_eval_metrics ddp_ deepspeed do_ enable_jit_ eval_
    fsdp full_determinism gradient_accumulation_ greater_is_better ignore_data_skip include_ label_names
    length_column_name liger_ load_best_model_ log_ logging_ no_cuda overwrite_output_dir parallelism_config
    prediction_loss_only restore_callback_ resume_ save_ skip_memory_ torch_compile_ torch_empty_ use_cache use_liger
    """.split()
)

# By the beginnings of their names: the longest one counts. Options that a later release may add, or that are not named
# here, decide what is trained. torch's optimizers check some of the numbers as well, but only after the data are open,
# and without the option's name. The words replace the help of transformers where that means something else in a
# contrastive training.
_FACTS = {
    "": Facts(decides=True),
    **dict.fromkeys(_OF_A_MACHINE, Facts(decides=False, one_machine=True)),
    **dict.fromkeys(_UNDECISIVE, Facts(decides=False)),
    # ---- Those that the short help lists, in its order ----
    "activation_checkpointing": Facts(
        decides=False,
        short_help=HelpPlace("Batch", 40),
        help_in_command="Recompute activations in the backward: less memory, and a step takes longer.",
    ),
    "gradient_checkpointing": Facts(decides=False, short_help=HelpPlace("Batch", 50)),
    "num_train_epochs": Facts(
        decides=True,
        within=NUMBER,
        short_help=HelpPlace("Length", 10),
        help_in_command="Passes over the training data.",
    ),
    "max_steps": Facts(
        decides=True,
        within=NUMBER,
        short_help=HelpPlace("Length", 20),
        help_in_command="Steps of the optimizer; by default, --num_train_epochs decides.",
    ),
    "learning_rate": Facts(
        decides=True,
        within=FINITE,
        short_help=HelpPlace("Rates", 10),
        help_in_command="Learning rate: about 1e-5 to fine-tune, 5e-4 from random weights. It is the highest of the "
        "schedule.",
    ),
    "lr_scheduler_type": Facts(
        decides=True,
        short_help=HelpPlace("Rates", 20),
        help_in_command="Schedule of the learning rate, such as cosine.",
    ),
    "warmup_steps": Facts(
        decides=True,
        within=FINITE,
        short_help=HelpPlace("Rates", 30),
        help_in_command="Steps in which the learning rate rises from 0. A number below 1 is their share of all steps.",
    ),
    "weight_decay": Facts(
        decides=True,
        within=FINITE,
        short_help=HelpPlace("Rates", 40),
        help_in_command="Weight decay of the optimizer; biases and norms have none.",
    ),
    "bf16": Facts(
        decides=True,
        excludes={"fp16": "at most one of them can be True"},
        short_help=HelpPlace("Precision and speed", 10),
        help_in_command="Compute in bfloat16; the weights stay fp32.",
    ),
    "bf16_": Facts(decides=True),
    "torch_compile": Facts(
        decides=False,
        short_help=HelpPlace("Precision and speed", 20),
        help_in_command="Compile the model: the first step takes longer, the others less.",
    ),
    "dataloader_num_workers": Facts(
        decides=False,
        one_machine=True,
        within=FROM_0,
        short_help=HelpPlace("Precision and speed", 30),
        help_in_command="Processes that decode the data of each GPU; with 0 the training does it.",
    ),
    "use_cpu": Facts(
        decides=False,
        short_help=HelpPlace("Precision and speed", 40),
        help_in_command="Compute on the CPU although there is a GPU.",
    ),
    "eval_strategy": Facts(
        decides=False,
        short_help=HelpPlace("Evaluation", 70),
        help_in_command="When to evaluate: no, steps or epoch, the default if there is a set to evaluate on. With "
        "--max_steps it is steps.",
    ),
    "eval_steps": Facts(
        decides=False,
        short_help=HelpPlace("Evaluation", 80),
        help_in_command="Steps between two evaluations, by default a tenth of --max_steps. A number below 1 is their "
        "share of all steps.",
    ),
    "output_dir": Facts(
        decides=False,
        one_machine=True,
        short_help=HelpPlace("Logging and saving", 10),
        help_in_command="Folder for everything that the command writes.",
    ),
    "logging_steps": Facts(
        decides=False,
        within=NUMBER,
        short_help=HelpPlace("Logging and saving", 30),
        help_in_command="Steps between two lines of the log, by default a hundredth of the run. A number below 1 is "
        "their share of all steps.",
    ),
    "report_to": Facts(
        decides=False,
        one_machine=True,
        short_help=HelpPlace("Logging and saving", 40),
        help_in_command="Trackers that get the log, such as wandb or tensorboard; none by default.",
    ),
    "save_steps": Facts(
        decides=False,
        within=NUMBER,
        short_help=HelpPlace("Logging and saving", 50),
        help_in_command="Steps between two checkpoints, by default those between two evaluations. A number below 1 is "
        "their share of all steps.",
    ),
    "push_to_hub": Facts(
        decides=False,
        one_machine=True,
        short_help=HelpPlace("Logging and saving", 90),
        help_in_command="Push the model and its card to the Hub whenever it is saved.",
    ),
    # ---- Others ----
    "activation_checkpointing_kwargs": Facts(decides=False, needs="activation_checkpointing"),
    "gradient_checkpointing_kwargs": Facts(decides=False, needs="gradient_checkpointing"),
    "adam_beta": Facts(decides=True, within=SHARE),
    "adam_epsilon": Facts(decides=True, within=FINITE),
    "dataloader_prefetch_factor": Facts(decides=False, one_machine=True, within=FROM_1, needs="dataloader_num_workers"),
    "ddp_timeout": Facts(decides=False, within=Range(Real, "a number of at least 1", lambda value: value >= 1)),
    "hub_model_id": Facts(
        decides=False,
        one_machine=True,
        help_in_command="With --push_to_hub: the repository. By default it has the name of --output_dir.",
    ),
    "load_best_model_at_end": Facts(
        decides=False, help_in_command="Save the weights of the best checkpoint, by --metric_for_best_model."
    ),
    "max_grad_norm": Facts(
        decides=True, within=Range(Real, "a number of at least 0 (0 disables clipping)", lambda value: value >= 0)
    ),
    "per_device_": Facts(decides=False, within=FROM_1),
    "per_device_eval_batch_size": Facts(
        decides=False, within=FROM_1, help_in_command="Images or texts that a process embeds at once in an evaluation."
    ),
    "save_total_limit": Facts(decides=False, within=FROM_1),
    "seed": Facts(decides=True, help_in_command="Seed of the order of the data, of dropout and of new weights."),
}


def facts_of_theirs(name: str) -> Facts:
    """The facts of an option of transformers.TrainingArguments."""
    return _FACTS[max(filter(name.startswith, _FACTS), key=len)]
