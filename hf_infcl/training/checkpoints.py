"""What a checkpoint says about its run, so that only the same run goes on from it, and from the very place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD_NAME = "infcl_run.json"


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step of a run to the last.

    Another number of processes, another micro-batch or another strategy give the same windows and, within rounding,
    the same weights, so they are not part of it.

    Args:
        global_batch_size: pairs of one optimizer step.
        objective: ``"softmax"`` or ``"sigmoid"``.
        model: class and number of parameters.
        data: class of the training set, its number of rows and how they are drawn.
    """

    global_batch_size: int
    objective: str
    model: str
    data: str


@dataclass(frozen=True)
class RunRecord:
    """A file in every checkpoint: the run, and how far it was.

    Args:
        run: the run that wrote the checkpoint.
        epoch: passes over the data that were completed.
        windows: windows trained in the present one.
        skipped_samples: bad samples that the data has passed over; None if the data does not count them.
    """

    run: Run
    epoch: int
    windows: int
    skipped_samples: int | None = None

    def write(self, checkpoint: str | Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        Path(checkpoint, RECORD_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, checkpoint: str | Path) -> RunRecord | None:
        """The record of a checkpoint, or None if there is none: another Trainer or an older version has written it.

        Raises:
            ValueError: the file is damaged; the message names it.
        """
        path = Path(checkpoint, RECORD_NAME)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(Run(**content.pop("run")), **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Resume from another checkpoint.") from error


def differences(before: Run, now: Run) -> Iterator[str]:
    """A sentence's part for each thing that is not the same in two runs."""
    for (name, old), new in zip(asdict(before).items(), asdict(now).values(), strict=True):
        if old != new:
            yield f"{name} was {old!r} and is {new!r}"
