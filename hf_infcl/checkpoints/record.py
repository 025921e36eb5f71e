"""The run that wrote a checkpoint, and its progress: a file in every checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RECORD_NAME = "infcl_run.json"
# Options that earlier versions did not have or record, and what they were then.
_LEFT_OUT_BEFORE = {"text_dropout": 0.0, "bf16_activations": False}


@dataclass(frozen=True)
class Run:
    """The properties of a run that stay the same from its first step to its last.

    The number of processes, the micro-batch and the strategy are not part of it, because they do not change the windows
    and, within rounding, the weights.
    """

    global_batch_size: int  # pairs of one optimizer step
    objective: str  # "softmax" or "sigmoid"
    model: str  # class and number of parameters
    # Class of the training set, its number of rows and captions per image, the column of its negative captions, and how
    # rows are drawn.
    data: str
    content: str = ""  # a fingerprint of the training set; empty, and then not compared, if it has none
    equal_ids: str = "exclude"  # or "positive"
    optimizer: str = ""  # its name and the number of trained parameters; empty, and then not compared, if unknown
    # All other options that decide about the training (see `run_options`), as JSON values. Only those that both runs
    # have are compared.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> str:
        """The number of the model's parameters, as words."""
        return self.model.rpartition(" with ")[2]


@dataclass(frozen=True)
class Stage:
    """A part of a run that was resumed with changes."""

    step: int  # the optimizer steps trained before it
    samples_seen: int  # the pairs trained before it
    changes: list[str]  # phrases about what differs from the part before, with both values


@dataclass(frozen=True)
class RunRecord:
    """The content of a file in every checkpoint: the run that wrote it, and its progress.

    In checkpoints of earlier versions, ``step``, ``rows`` and ``micro_batches`` are None.
    """

    run: Run
    epoch: int  # the number of completed passes over the data
    windows: int  # the number of windows trained in the current epoch
    skipped_samples: int | None = None  # bad samples that the data has skipped; None if it does not count them
    processes: int = 1  # that wrote the checkpoint, each with its random state
    only_model: bool = False  # whether it was written with ``save_only_model``, so that no run can resume from it
    # The position in an `ImageTextStream`, or in new and old pairs, that each process has reached; None for other data.
    stream: list[dict[str, Any]] | None = None
    skipped_windows: int = 0  # not trained because their numbers were not finite or their loss exploded
    skipped_in_a_row: int = 0  # windows skipped just before the checkpoint because of numbers not finite
    losses: list[float] = field(default_factory=list)  # of the last windows; `SkippedWindows` compares the next ones
    optimizer: dict[str, Any] = field(default_factory=dict)  # `OptimizerOptions.record`; empty if unknown
    samples_seen: int = 0  # pairs trained on, in global batches that may have had several sizes
    step: int | None = None  # the number of optimizer steps
    rows: int | None = None  # the number of pairs trained in the current epoch
    stages: list[Stage] = field(default_factory=list)  # those after the first, each begun by a resume with changes
    micro_batches: dict[str, Any] | None = None  # how the global batch was divided, and on which devices

    @property
    def rows_of_epoch(self) -> int:
        """``rows``, also of a checkpoint of an earlier version, whose batch never changed within an epoch."""
        return self.windows * self.run.global_batch_size if self.rows is None else self.rows

    def write(self, checkpoint: str | Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        Path(checkpoint, RECORD_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, checkpoint: str | Path) -> RunRecord | None:
        """The record of a checkpoint; None if it has none because another Trainer or an older version wrote it.

        Raises:
            ValueError: the file is damaged; the message names it.
        """
        path = Path(checkpoint, RECORD_NAME)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            stages = [Stage(**stage) for stage in content.pop("stages", ())]
            return cls(Run(**content.pop("run")), stages=stages, **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}. Resume from another checkpoint.") from error


def differences(before: Run, now: Run) -> Iterator[str]:
    """Yields a phrase for a message about each property that differs between two runs."""
    for (name, old), new in zip(asdict(before).items(), asdict(now).values(), strict=True):
        if name != "options" and old != new and not (name in ("content", "optimizer") and "" in (old, new)):
            yield f"{name} was {old!r} and is {new!r}"
    for name, new in now.options.items():
        old = before.options.get(name, _LEFT_OUT_BEFORE.get(name.rpartition(": ")[2], new))
        if old != new:
            yield f"{name} was {old!r} and is {new!r}"
