"""The ranges of the options that are numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple


class _Range(NamedTuple):
    kind: type
    words: str
    holds: Callable[[Any], bool]


_FROM_1 = _Range(Integral, "a whole number of at least 1", lambda value: value >= 1)
_FROM_0 = _Range(Integral, "a whole number of at least 0", lambda value: value >= 0)
_FINITE = _Range(Real, "a finite number of at least 0", lambda value: 0 <= value < math.inf)
_SHARE = _Range(Real, "a number of at least 0 and less than 1", lambda value: 0 <= value < 1)
_NUMBER = _Range(Real, "a number", lambda value: True)
# torch's optimizers check some of these as well, but only after the data are open, and without the option's name.
RANGES = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _FROM_1),
    **dict.fromkeys(("gradient_accumulation_steps", "dataloader_prefetch_factor", "save_total_limit"), _FROM_1),
    **dict.fromkeys(("dataloader_num_workers", "skip_nonfinite", "freeze_layers"), _FROM_0),
    **dict.fromkeys(("learning_rate", "logit_scale_learning_rate", "muon_learning_rate"), _FINITE),
    **dict.fromkeys(("keep_features", "keep_weights"), _FINITE),
    **dict.fromkeys(("image_learning_rate", "text_learning_rate"), _FINITE),
    "layer_decay": _Range(Real, "a number of more than 0 and at most 1", lambda value: 0 < value <= 1),
    **dict.fromkeys(("weight_decay", "adam_epsilon", "warmup_steps"), _FINITE),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "ema_decay"), _SHARE),
    **dict.fromkeys(("num_train_epochs", "max_steps", "logging_steps", "save_steps"), _NUMBER),
    "replay_share": _Range(Real, "a number of more than 0 and less than 1", lambda value: 0 < value < 1),
    "ddp_timeout": _Range(Real, "a number of at least 1", lambda value: value >= 1),
    **dict.fromkeys(("early_stopping_patience", "gradient_noise_steps", "image_size", "max_text_tokens"), _FROM_1),
    "texts_at_once": _FROM_1,
    "patch_dropout": _Range(Real, "a number of at least 0 and less than 1", lambda value: 0 <= value < 1),
    "full_tokens_last": _Range(Real, "a number from 0 to 1", lambda value: 0 <= value <= 1),
    "divergence_factor": _Range(Real, "a number of more than 1", lambda value: value > 1),
    "learning_rate_batch_size": _Range(Real, "a number of pairs of at least 1", lambda value: value >= 1),
    "max_grad_norm": _Range(Real, "a number of at least 0 (0 disables clipping)", lambda value: value >= 0),
    "max_logit_scale": _Range(
        Real,
        f"a number of at least 1 ({math.inf} for no limit; it limits the multiplier, not its logarithm)",
        lambda value: value >= 1,
    ),
}


def check_number(name: str, value: Any) -> None:
    """Raises a ValueError if the value of an option, which has to be a number, is out of its range."""
    kind, words, holds = RANGES[name]
    if not (isinstance(value, kind) and holds(value)):
        raise ValueError(f"{name} must be {words}, got {value!r}.")
