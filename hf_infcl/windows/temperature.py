"""The temperature of the model while it trains: logit_scale stays between 1 and a largest value."""

from __future__ import annotations

import math

from transformers.utils import logging

from ..encoders.dual_encoder import DualEncoder
from ..loss import OBJECTIVES
from .setup import Setup

logger = logging.get_logger(__name__)


class Temperature:
    """Keeps logit_scale between 1 and ``max_logit_scale``, and tells its value.

    It ``warns`` if the default of ``max_logit_scale`` lowers the scale of the model in the first step.
    """

    def __init__(self, setup: Setup, *, warns: bool) -> None:
        self._encoder: DualEncoder = setup.encoder
        self._largest = setup.args.max_logit_scale
        if self._largest is None:
            self._largest = OBJECTIVES[setup.objective].largest_scale
            if warns:
                self._warn_of_lower_scale()

    def _warn_of_lower_scale(self) -> None:
        scale, limit = self._encoder.scale_and_bias()[0].item(), self._largest
        trains = self._encoder.temperature_parameters[0].requires_grad
        if trains and limit is not None and scale > 1.001 * limit:  # CLIP's checkpoints are at 100, but for rounding
            logger.warning(
                f"The logit_scale of the model is {scale:.4g}, and the first step lowers it to {limit:g}, the default "
                f"of max_logit_scale. To keep it, pass max_logit_scale={math.ceil(scale)}."
            )

    def clamp(self) -> None:
        """Clamps the scale after an optimizer step."""
        scale = self._encoder.temperature_parameters[0]
        if self._largest is not None and scale.requires_grad:
            self._encoder.clamp_temperature(self._largest)

    def logs(self) -> dict[str, float]:
        """``logit_scale``, the multiplier, and ``logit_bias``, if there is one."""
        scale, bias = self._encoder.scale_and_bias()
        return {"logit_scale": scale.item()} | ({} if bias is None else {"logit_bias": bias.item()})
