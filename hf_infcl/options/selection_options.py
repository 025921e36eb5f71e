"""Which pairs of a window are trained."""

from __future__ import annotations

from dataclasses import dataclass

from .declaring import option


@dataclass
class SelectionOptions:
    leave_out: str | None = option(
        "Leave out pairs of a table that do not seem to belong together: 'noisy'. They are neither positives nor "
        "negatives, but teachers and keep_features still draw them, and epochs of a shuffled table pass over them. It "
        "leaves out none while too few pairs look wrong, and begins when the pairs have been seen three times, so it "
        "needs several epochs.",
        decides=True,
        excludes={
            "contrastive_weight=0": "it switches off the loss from which pairs would be left out",
        },
    )


def check_selection(args: SelectionOptions) -> None:
    """Raises a ValueError for a selection of pairs that is unknown."""
    if args.leave_out not in (None, "noisy"):
        raise ValueError(
            f"leave_out must be 'noisy', got {str(args.leave_out)!r}. To train without a share of the pairs, score "
            "them with `infcl score`, and pass its ledger as `--exclude _ledger.parquet:5%`."
        )
