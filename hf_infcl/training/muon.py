"""The optimizer of ``optimizer="muon"``."""

from __future__ import annotations

from collections.abc import Collection

from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers.utils import logging

from ..encoders.dual_encoder import DualEncoder
from ..optimizers import MuonAdamW, parameter_groups
from ..options.arguments import InfCLTrainingArguments
from ..options.declaring import spelled
from ..options.rate_options import muon_settings
from ..processes.collectives import Processes

RATE = 4.0  # of Muon's rate to AdamW's; see the guide to the trainer for what was measured
HIGHEST_RATE = 0.1  # that is probably meant

logger = logging.get_logger(__name__)


def create_muon(
    encoder: DualEncoder, args: InfCLTrainingArguments, decaying: Collection[str], accelerator: Accelerator
) -> MuonAdamW:
    """The optimizer of ``optimizer="muon"``, with rates that are not yet scaled with the batch.

    Processes that hold equal parameters share the matrices among themselves. ``decaying`` are names of parameters.

    Raises:
        ValueError: no parameter is left to Muon, or the patterns do not fit the model; see `parameter_groups`.
    """
    rate = RATE * args.learning_rate if args.muon_learning_rate is None else args.muon_learning_rate
    if (scaled := rate * args.learning_rate_factor) > HIGHEST_RATE:
        logger.warning(
            f"Muon's learning rate of {scaled:g} changes every matrix by a large part of itself in each step. Rates "
            "from 0.001 to 0.01 are usual; muon_learning_rate sets it."
        )
    groups = parameter_groups(
        encoder.model,
        learning_rate=args.learning_rate,
        muon_learning_rate=rate,
        weight_decay=args.weight_decay,
        decaying=decaying,
        to_muon=args.muon_parameters or (),
        to_adamw=args.adamw_parameters or (),
    )
    start = getattr(getattr(encoder.model, "config", None), "_name_or_path", "")
    if start and not encoder.has_first_temperature():  # Muon is meant for random weights
        logger.warning(
            f"The model was loaded from {start} and was trained. If AdamW did that, as for most on the Hub, compare "
            "the result with that of AdamW, which others found better (arXiv 2605.10468)."
        )
    return MuonAdamW(
        groups,
        args.learning_rate,
        args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=spelled(args.optim) == "adamw_torch_fused",
        processes=None if accelerator.distributed_type == DistributedType.FSDP else Processes(),
        **muon_settings(args.optim_args),
    )
