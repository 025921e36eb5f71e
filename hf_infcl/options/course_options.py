"""The course of a training: resumes, errors, its end, and what it saves."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from .declaring import FROM_0, FROM_1, Range, option


@dataclass
class CourseOptions:
    save_formats: list[str] = option(
        "Formats of the saved models: transformers, or transformers and open_clip. OpenCLIP's files are then beside "
        "those of transformers, in checkpoints too.",
        default=["transformers"],
        decides=False,
    )
    skip_nonfinite: int = option(
        "Skip up to this many steps in a row if their embeddings, loss or gradient are not finite. One more ends the "
        "training.",
        default=0,
        decides=False,
        within=FROM_0,
    )
    divergence_factor: float | None = option(
        "The loss has exploded when it exceeds the mean of the previous 20 steps by this factor, such as 3. By default "
        "the loss is not checked.",
        decides=False,
        within=Range(Real, "a number of more than 1", lambda value: value > 1),
    )
    on_divergence: str = option(
        "When the loss has exploded: 'stop' or 'roll_back'. The first ends the training with an error; the second goes "
        "back to the last checkpoint and continues with the next data. If the loss explodes again before the next "
        "checkpoint, the training ends.",
        default="stop",
        decides=False,
        choices=("stop", "roll_back"),
        needs="divergence_factor",
    )
    resume_from_checkpoint: str | None = option(
        "The folder of a checkpoint, or 'auto' for the newest complete one in output_dir and a new start if there is "
        "none. 'true' is the same but without a new start; 'last-checkpoint' is one pushed with --hub_strategy "
        "checkpoint.",
        decides=False,
        one_machine=True,
    )
    metric_for_best_model: str | None = option(
        "Metric by which the best checkpoint is chosen, for example pairs_loss. It also ends the training "
        "(early_stopping_patience) or lowers the learning rate. It may be a weighted sum, with spaces around its signs "
        "and a minus before losses: '0.5*pairs_image_retrieval_recall@1 - guard1_old_loss'.",
        decides=False,
    )
    early_stopping_patience: int | None = option(
        "End the training when so many evaluations in a row have not improved metric_for_best_model. By default, the "
        "training runs to its end.",
        decides=False,
        within=FROM_1,
        excludes={"eval_strategy=no": "there would be no evaluations to count"},
    )
    # A loss that is not finite stops the training, so the log must show it unfiltered.
    logging_nan_inf_filter: bool = option(
        "Log the average of earlier losses instead of one that is not finite.", default=False, decides=False
    )
    # The collator needs the raw columns of images and captions.
    remove_unused_columns: bool = option(
        "Drop columns that neither the model's forward nor the loss uses.", default=False, decides=True
    )
