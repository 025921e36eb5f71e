"""The options of transformers.TrainingArguments without torch, whose import takes seconds.

Their names, types, defaults and helps are in a file, which ``python tests/helpers/theirs.py`` writes. A name that the
installed release has and the file lacks is accepted, see `hf_infcl.tools.cli.parser`.
"""

from __future__ import annotations

import functools
import json
import operator
from dataclasses import fields, make_dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from .contrastive import ContrastiveOptions
from .declaring import FINITE, FROM_0, FROM_1, SHARE, Facts, Range, field_of

FILE = Path(__file__).with_name("transformers_options.json")

# By the beginnings of their names. Other options, such as those that a later release may add, decide what is trained.
# Those of a machine say where or how fast something is computed, and machines of one training may differ in them.
_OF_A_MACHINE = tuple(
    """
    dataloader_ debug disable_tqdm fsdp_config hub_ local_rank log_level log_on_ logging_dir output_dir
    project push_to_hub report_to run_name tf32 trackio_
    """.split()
)
_UNDECISIVE = tuple(
    """
    _ accelerator_config activation_checkpointing auto_find_batch_size average_tokens_ batch_eval_metrics ddp_ deepspeed
    do_ enable_jit_ eval_ fsdp full_determinism gradient_ greater_is_better ignore_data_skip include_ label_names
    length_column_name liger_ load_best_model_at_end log_ logging_ no_cuda overwrite_output_dir parallelism_config
    per_device_ prediction_loss_only restore_callback_ resume_ save_ skip_memory_ torch_compile torch_empty_ use_cache
    use_cpu use_liger
    """.split()
)
# torch would refuse other numbers only after the data are open, and without the option's name, or not at all.
_WITHIN = {
    "adam_beta1": SHARE,
    "adam_beta2": SHARE,
    "dataloader_num_workers": FROM_0,
    "max_steps": Range(Real, "more than 0, or -1 to train num_train_epochs", lambda value: value != 0),
    "dataloader_prefetch_factor": FROM_1,
    "ddp_timeout": Range(Real, "a number of at least 1", lambda value: value >= 1),
    "max_grad_norm": Range(Real, "a number of at least 0 (0 disables clipping)", lambda value: value >= 0),
    **dict.fromkeys(("adam_epsilon", "learning_rate", "warmup_steps", "weight_decay"), FINITE),
    **dict.fromkeys(("per_device_eval_batch_size", "save_total_limit"), FROM_1),
}
_CHOICES = {"train_sampling_strategy": ("random", "sequential")}  # a batch must not be selected by length
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # transformers before 5.23 has only the second


def facts_of_theirs(name: str) -> Facts:
    """The facts of an option of transformers.TrainingArguments."""
    one_machine = name.startswith(_OF_A_MACHINE)
    needs = name.removesuffix("_kwargs") if name.startswith(CHECKPOINTING) and name.endswith("_kwargs") else ""
    decides = not one_machine and not name.startswith(_UNDECISIVE)
    return Facts(decides, one_machine, _CHOICES.get(name, ()), _WITHIN.get(name), needs)


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def release_of_file() -> str:
    """The release of transformers whose options the file has."""
    return str(_content()["release"])


def _type(words: str) -> Any:
    """The type that the file names, such as "str | None" or "Literal['no', 'steps'] | str"."""
    if words.startswith("Literal["):
        named, _, words = words.removeprefix("Literal[").partition("] | ")
        return Literal[tuple(json.loads(f"[{named}]".replace("'", '"')))] | _type(words)
    kinds: dict[str, Any] = {
        "str": str,
        "int": int,
        "float": float,
        "bool": bool,
        "dict": dict,
        "list[str]": list[str],
        "None": None,
    }
    kinds["Literal[False]"] = Literal[False]
    return functools.reduce(operator.or_, (kinds[word] for word in words.split(" | ")))


@cache
def of_transformers() -> type:
    """A dataclass with the fields of transformers.TrainingArguments that this package does not declare itself."""
    ours = {one.name for one in fields(ContrastiveOptions)}
    declared: list[tuple[str, Any, Any]] = []
    for name, one in _content()["options"].items():
        metadata = {key: fact for key, fact in one.items() if key not in ("type", "default")}
        kind = _type(one["type"])
        declared += [(name, kind, field_of(one["default"], metadata))] * (name not in ours)
    group = {"_argument_group_name": "The training (transformers.TrainingArguments)"}
    return make_dataclass("TheirOptions", declared, namespace=group)
