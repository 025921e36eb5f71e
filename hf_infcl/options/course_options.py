"""The course of a training: resumes, errors, its end, and what it saves."""

from __future__ import annotations

from dataclasses import dataclass

from .declaring import FROM_0, FROM_1, option


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
    resume_from_checkpoint: str | None = option(
        "The folder of a checkpoint, or 'auto' for the newest complete one in output_dir and a new start if there is "
        "none. 'true' is the same but without a new start; 'last-checkpoint' is one pushed with --hub_strategy "
        "checkpoint.",
        decides=False,
        one_machine=True,
    )
    metric_for_best_model: str | None = option(
        "Metric by which the best checkpoint is chosen, for example pairs_loss. It also ends the training "
        "(early_stopping_patience) or lowers the learning rate.",
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
