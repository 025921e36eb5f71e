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

    Args:
        global_batch_size: pairs of one optimizer step.
        objective: ``"softmax"`` or ``"sigmoid"``.
        model: class and number of parameters.
        data: class of the training set, its number of rows and captions per image, the column of its negative captions,
            and how rows are drawn.
        content: a fingerprint of the training set; empty, and then not compared, if it has none.
        equal_ids: ``"exclude"`` or ``"positive"``.
        optimizer: its name and the number of trained parameters; empty, and then not compared, if unknown.
        options: all other options that decide about the training (see `run_options`), as JSON values. Only those that
            both runs have are compared.
    """

    global_batch_size: int
    objective: str
    model: str
    data: str
    content: str = ""
    equal_ids: str = "exclude"
    optimizer: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A part of a run that was resumed with changes.

    Args:
        step: the optimizer steps trained before it.
        samples_seen: the pairs trained before it.
        changes: phrases about what differs from the part before, with both values.
    """

    step: int
    samples_seen: int
    changes: list[str]


@dataclass(frozen=True)
class RunRecord:
    """The content of a file in every checkpoint: the run that wrote it, and its progress.

    Args:
        run: the run that wrote the checkpoint.
        epoch: the number of completed passes over the data.
        windows: the number of windows trained in the current epoch.
        skipped_samples: the number of bad samples that the data has skipped; None if the data does not count them.
        processes: the number of processes that wrote the checkpoint, each with its random state.
        only_model: whether the checkpoint was written with ``save_only_model``, so that no run can resume from it.
        stream: the position in an `ImageTextStream`, or in new and old pairs, that each process has reached; None for
            other data.
        skipped_windows: the number of windows not trained because their numbers were not finite or their loss exploded.
        skipped_in_a_row: the number of windows skipped just before the checkpoint because of numbers not finite.
        losses: the losses of the last trained windows, with which `SkippedWindows` compares the next ones.
        optimizer: `OptimizerOptions.record` of the optimizer and its schedule; empty if unknown.
        samples_seen: the number of pairs trained on, in global batches that may have had several sizes.
        step: the number of optimizer steps; None in checkpoints of earlier versions, like the next one.
        rows: the number of pairs trained in the current epoch.
        stages: the parts of the run after the first, each of which began with a resume with changes.
        micro_batches: how the global batch was divided, and on which devices; None in checkpoints of earlier versions.
    """

    run: Run
    epoch: int
    windows: int
    skipped_samples: int | None = None
    processes: int = 1
    only_model: bool = False
    stream: list[dict[str, Any]] | None = None
    skipped_windows: int = 0
    skipped_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    samples_seen: int = 0
    step: int | None = None
    rows: int | None = None
    stages: list[Stage] = field(default_factory=list)
    micro_batches: dict[str, Any] | None = None

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
