"""Which pairs of a window are trained."""

from __future__ import annotations

from dataclasses import dataclass

from .declaring import HelpPlace, option

NOISY = "noisy"


@dataclass
class SelectionOptions:
    leave_out: str | None = option(
        "Leave out pairs that do not seem to belong together: 'noisy' finds how many, or a share such as 0.1. They "
        "are neither positives nor negatives, but teachers and keep_features still draw them. 'noisy' leaves out none "
        "while too few pairs look wrong; epochs of a shuffled table pass over what it leaves out. Both begin when the "
        "pairs have been seen three times, so they need several epochs.",
        decides=True,
        short_help=HelpPlace("Data", 110),
        excludes={
            "contrastive_weight=0": "it switches off the loss from which pairs would be left out",
        },
    )


def check_selection(args: SelectionOptions) -> None:
    """Raises a ValueError for a selection of pairs that is unknown."""
    if args.leave_out is None:
        return
    args.leave_out = str(args.leave_out)
    try:
        known = args.leave_out == NOISY or 0 < float(args.leave_out) < 1
    except ValueError:
        known = False
    if not known:
        raise ValueError(
            f"leave_out must be {NOISY!r}, or the share of the pairs to leave out, more than 0 and less than 1, got "
            f"{args.leave_out!r}."
        )
