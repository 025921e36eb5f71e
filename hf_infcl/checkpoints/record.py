"""The run that wrote a checkpoint, and its progress: a file in every checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RECORD_NAME = "infcl_run.json"


@dataclass(frozen=True)
class RunRecord:
    """The content of a file in every checkpoint: the run that wrote it, and its progress."""

    # What stays the same from the first step of a run to its last, as JSON values (see `resuming.make_run`). The number
    # of processes, the micro-batch and the strategy change neither the windows nor, but for rounding, the weights.
    run: dict[str, Any]
    # The global batches of the data before the one that is trained next: the steps, and those that epochs have left out
    # because they were ended early. None for streams of other classes than `ImageTextStream`.
    position: int | None = None
    skipped_samples: int | None = None  # bad samples that the data has skipped; None if it does not count them
    processes: int = 1  # that wrote the checkpoint, each with its random state
    only_model: bool = False  # whether it was written with ``save_only_model``, so that no run can resume from it
    # The position in an `ImageTextStream`, or in new and old pairs, that each process has reached; None for other data.
    stream: list[dict[str, Any]] | None = None
    skipped_windows: int = 0  # not trained because their numbers were not finite
    skipped_in_a_row: int = 0  # windows skipped just before the checkpoint because of numbers not finite
    last_loss: float = 0.0  # of the last window that was trained
    optimizer: dict[str, Any] = field(default_factory=dict)  # its options and those of its schedule
    micro_batches: dict[str, Any] | None = None  # how the global batch was divided, and on which devices

    def write(self, checkpoint: str | Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        Path(checkpoint, RECORD_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, checkpoint: str | Path) -> RunRecord | None:
        """The record of a checkpoint; None if it has none because another Trainer wrote it.

        Raises:
            ValueError: the file is damaged, or another version of this package wrote it; the message names it.
        """
        path = Path(checkpoint, RECORD_NAME)
        if not path.is_file():
            return None
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Resume from another checkpoint.") from error
        try:
            return cls(**content)
        except TypeError as error:
            raise ValueError(
                f"{path} is of another version of hf_infcl, whose checkpoints cannot be resumed. Start anew from its "
                f"weights: --model {checkpoint}"
            ) from error


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A phrase about each value that differs between two mappings, of the names that both have; empty if none does."""
    different = (name for name, value in now.items() if before.get(name, value) != value)
    return ", ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in different)
