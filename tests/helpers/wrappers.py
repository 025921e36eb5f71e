"""FSDP2: where it can be tested, and the options of a training with it on a CPU."""

from collections.abc import Iterable
from typing import Any

import pytest
from accelerate.utils import compare_versions

from hf_infcl.models.sharding import FSDP_SINCE

needs_fsdp = pytest.mark.skipif(
    compare_versions("transformers", "<", "5.10") or compare_versions("accelerate", "<", FSDP_SINCE),
    reason="--fsdp is FSDP version 1 before transformers 5.10, and FSDP needs a newer accelerate than the oldest",
)

FSDP: dict[str, Any] = {"use_cpu": False, "fsdp": True}
FSDP_SHARDS = {**FSDP, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def wrapped(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; those that begin with fsdp are skipped where it cannot run."""
    return [pytest.param(name, marks=needs_fsdp if name.startswith("fsdp") else ()) for name in names]
