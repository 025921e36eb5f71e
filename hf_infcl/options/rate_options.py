"""Learning rates and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .declaring import FINITE, option

# Those that an optimizer from elsewhere does not know.
RATES = (
    "logit_scale_learning_rate",
    "image_learning_rate",
    "text_learning_rate",
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
