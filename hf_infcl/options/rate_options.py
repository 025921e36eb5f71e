"""Learning rates, the optimizer and averages of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

from .declaring import FINITE, SHARE, HelpPlace, Range, option

# Those that an optimizer from elsewhere does not know.
RATES = (
    "logit_scale_learning_rate",
    "image_learning_rate",
    "text_learning_rate",
    "layer_decay",
)
OPTIM_ARGS = {"momentum": float, "ns_steps": int}  # the settings of ``optimizer="muon"`` in ``optim_args``


@dataclass
class RateOptions:
    logit_scale_learning_rate: float | None = option(
        "Learning rate of logit_scale and logit_bias, on the same schedule. Defaults to learning_rate.",
        decides=True,
        within=FINITE,
    )
    image_learning_rate: float | None = option(
        "Learning rate of the image tower and its projection, by default learning_rate. It has the same "
        "schedule. The rate of Muon's matrices changes in proportion.",
        decides=True,
        within=FINITE,
        card="learning rate of the image tower",
    )
    text_learning_rate: float | None = option(
        "The same for the text tower.",
        decides=True,
        within=FINITE,
        card="learning rate of the text tower",
    )
    layer_decay: float | None = option(
        "Factor of the learning rate from each layer of a tower to the one below it, such as 0.75. Heads, projections "
        "and logit_scale train at the full rate, the last of L layers at this factor, and the embeddings at its power "
        "L + 1.",
        decides=True,
        within=Range(Real, "a number of more than 0 and at most 1", lambda value: 0 < value <= 1),
        card="factor of the learning rate per layer",
    )
    no_decay_parameters: list[str] | None = option(
        "Regular expressions for names of parameters without weight decay. One is vision_model for a pretrained tower. "
        "Vectors and scalars never decay.",
        decides=True,
        card="no weight decay of",
    )
    optimizer: str | None = option(
        "'muon' trains the matrices of layers and projections by Muon (arXiv 2502.16982), and the rest by AdamW. It is "
        "for training from random weights. By default optim, which is AdamW, trains all parameters.",
        decides=True,
        short_help=HelpPlace("Rates", 50),
        choices=("muon",),
    )
    muon_learning_rate: float | None = option(
        "Learning rate of Muon's matrices, by default four times learning_rate. It has the same schedule.",
        decides=True,
        within=FINITE,
        needs="optimizer=muon",
    )
    muon_parameters: list[str] | None = option(
        "With optimizer=muon: regular expressions for names of further parameters that Muon trains.",
        decides=True,
        needs="optimizer=muon",
    )
    adamw_parameters: list[str] | None = option(
        "With optimizer=muon: regular expressions for names of matrices that AdamW trains.",
        decides=True,
        needs="optimizer=muon",
    )
    ema_decay: float | None = option(
        "Evaluate and save a moving average of the weights with this decay, such as 0.999. It takes the place of the "
        "last weights, and the memory of one more copy. In step n the decay is at most (1 + n) / (10 + n). Running "
        "statistics of batch norms are not averaged.",
        decides=True,
        short_help=HelpPlace("Rates", 60),
        within=SHARE,
        card="saved weights: exponential moving average of those that were trained, decay {}",
    )
    ema_device: str | None = option(
        "With ema_decay: 'cpu' keeps the average in host memory. This costs two copies of the weights per step. "
        "Defaults to the memory of the weights.",
        decides=False,
        needs="ema_decay",
        choices=("cpu",),
    )


def muon_settings(text: str | None) -> dict[str, Any]:
    """Muon's settings in ``optim_args``, "name=value,name=value".

    Raises:
        ValueError: there are other names, or values that are no numbers.
    """
    settings: dict[str, Any] = {}
    for pair in (text or "").replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        if not name:
            continue
        try:
            settings[name] = OPTIM_ARGS[name](value)
        except (KeyError, ValueError) as error:
            known = " and ".join(f"{name} ({kind.__name__})" for name, kind in OPTIM_ARGS.items())
            raise ValueError(
                f"optimizer='muon' takes {known} from optim_args, as in 'momentum=0.9,ns_steps=6', got {text!r}. "
                "Adam's options are the arguments adam_beta1, adam_beta2, adam_epsilon and weight_decay."
            ) from error
    return settings
