"""FSDP2 and DeepSpeed: where they can be tested, and the options of a training with them on a CPU."""

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
from accelerate.utils import compare_versions

from hf_infcl.encoders.sharding import FSDP_SINCE

needs_fsdp = pytest.mark.skipif(
    compare_versions("transformers", "<", "5.10") or compare_versions("accelerate", "<", FSDP_SINCE),
    reason="--fsdp is FSDP version 1 before transformers 5.10, and FSDP needs a newer accelerate than the oldest",
)
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")

FSDP: dict[str, Any] = {"use_cpu": False, "fsdp": True}
FSDP_SHARDS = {**FSDP, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
# The settings that DeepSpeed takes from TrainingArguments.
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")


def zero(stage: int = 2, **more: Any) -> dict[str, Any]:
    config = {**dict.fromkeys(AUTO, "auto"), "zero_optimization": {"stage": stage}, **more}
    return {"use_cpu": False, "deepspeed": config}


def wrapped(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; those that begin with fsdp or zero are skipped where these cannot run."""
    marks = {"fsdp": needs_fsdp, "zero": needs_deepspeed}
    return [pytest.param(name, marks=marks.get(name.split()[0], ())) for name in names]
