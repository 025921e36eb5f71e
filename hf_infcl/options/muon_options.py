"""The settings of ``optimizer="muon"`` in ``optim_args``."""

from __future__ import annotations

from typing import Any

OPTIM_ARGS = {"momentum": float, "ns_steps": int}


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
