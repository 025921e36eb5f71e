"""What can be plugged into the step of a training: terms of the loss, changes, observers and a selection of pairs.

`InfCLTrainer(..., extensions=[...])` takes objects of these classes; the package's own options are some, too. A method
that is not overridden does nothing. All of them are called on every process, in the same order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..files.text import describe_cause
from .grad_cache import Features
from .window import Window

NO_ROWS = torch.empty(0, dtype=torch.bool)


class Extension:
    """A part of the step."""

    name = ""  # under which checkpoints keep its state; no two extensions of a training have the same

    @property
    def options(self) -> Mapping[str, Any]:
        """What a resumed training has to share, as JSON values."""
        return {}

    @property
    def card(self) -> Mapping[str, str]:
        """Rows of the model card."""
        return {}

    def begin_window(self, window: Window, step: int) -> None:
        """Called before the first forward of the window after so many optimizer steps, also of one that is repeated."""

    def logs(self) -> dict[str, float]:
        """Numbers about the last trained windows for Trainer's logs; collective."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training goes on from, the same on every process: tensors, numbers and texts; collective."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes on from a state that `state_dict` has returned."""

    def close(self) -> None:
        """Called at the end of the training; the model has to be as it was before, but for its weights."""


class LossTerm(Extension):
    """A scalar that is added to the contrastive loss of a window, and logged apart as ``{name}_loss``.

    The loss that Trainer logs does not contain it.

    Attributes:
        in_order: whether `value` gets the features in the order in which the data loader has returned the texts, which
            `reference` then has to follow. Otherwise it is that in which the texts are encoded (see `deal_texts`).
    """

    in_order = False

    def parameters(self) -> Sequence[nn.Parameter]:
        """What trains beside the model: equal on all processes, and the same objects for a whole training.

        The optimizer has a group of its own for it, at the base rate. Its gradient is averaged over the processes, and
        clipped together with the model's: ``max_grad_norm`` limits the norm of both.
        """
        return ()

    def reference(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> Features:
        """What the features of a micro-batch are compared with, such as a teacher's embeddings, without a graph.

        It is called once for each micro-batch, in the first pass.

        Args:
            inputs: of the micro-batch, on the device.
            frozen_outputs: what the model's frozen towers have returned for it, by ``"image"`` and ``"text"``.

        Returns:
            Tensors [rows, ...], those of the window's micro-batches get concatenated.
        """
        return ()

    def value(self, features: Features, references: Features) -> Tensor:
        """The term, a scalar in fp32, of which the mean over the processes is minimised.

        Args:
            features: normalised image and text embeddings of this process, [images, D] and [texts, D].
            references: what `reference` has returned for the same rows.
        """
        raise NotImplementedError


class StepChange(Extension):
    """A change of the inputs or of the towers, the same in both passes."""

    def inputs(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """The inputs of a micro-batch, on the device, as they are to be encoded."""
        return inputs


class StepObserver(Extension):
    """Looks at features and gradients for the logs, and changes nothing."""

    def after_first_pass(self, window: Window, features: Features) -> None:
        """Sees the features of the window, [images, D] and [texts, D] without a graph, in the order of its rows."""

    def after_backward(self, index: int, scale: float) -> None:
        """Called after the backward of each micro-batch; the gradients are multiplied by ``scale`` (that of fp16).

        It is called in every window, also in one that is then skipped or refused because it is not finite.
        """

    def end_window(self, window: Window, scale: float) -> None:
        """Called when the gradient of a window that is not skipped is complete, before it is clipped."""


class PairSelection(Extension):
    """Decides between the first pass and the loss which pairs of a window are trained."""

    def select(
        self, window: Window, features: Features, logit_scale: Tensor, logit_bias: Tensor | None
    ) -> Tensor | None:
        """Of which images of this process, with their captions, the contrastive loss is computed; collective.

        The others are neither positives nor negatives. Terms see all of them.

        Args:
            features: image and text embeddings of this process, [images, D] and [texts, D] without a graph.
            logit_scale, logit_bias: as for `hf_infcl.contrastive_loss`, without a graph.

        Returns:
            [images] bool on the CPU, True for one at least; None for all of them, on every process.
        """
        raise NotImplementedError

    def skipped_rows(self, epoch: int) -> Tensor:
        """The rows of a shuffled table that an epoch does without, [rows] bool on the CPU; `NO_ROWS` if it has all.

        Asked when the epoch begins, or goes on after a resume; other pairs of the epoch come again instead. The rows
        have to be the same ones in both cases, on every process.
        """
        return NO_ROWS


Kind = TypeVar("Kind", bound=Extension)


def of_kind(extensions: Iterable[Extension], kind: type[Kind]) -> list[Kind]:
    """The extensions that are instances of ``kind``."""
    return [extension for extension in extensions if isinstance(extension, kind)]


def term_parameters(extensions: Iterable[Extension]) -> list[nn.Parameter]:
    """What trains beside the model, of all terms."""
    return [one for term in of_kind(extensions, LossTerm) for one in term.parameters() if one.requires_grad]


# ---- Extensions that others have written are checked where a mistake would train something else, or end late ----


def check_extensions(extensions: object) -> None:
    """Raises a ValueError unless it is given a list of extensions."""
    wrong = [extensions]
    if isinstance(extensions, (list, tuple)):
        wrong = [one for one in extensions if not isinstance(one, Extension)]
    if wrong:
        first = wrong[0]
        what = f"the class {first.__name__}" if isinstance(first, type) else f"{type(first).__name__} {first!r}"
        raise ValueError(
            f"extensions must be a list of objects of the classes of hf_infcl.step.extensions, got {what}."
        )


def check_names(extensions: Sequence[Extension]) -> None:
    """Raises a ValueError if two have one name: a checkpoint would keep the state of one of them."""
    names = [extension.name for extension in extensions]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"Several extensions of the step have the name {', '.join(map(repr, double))}: {', '.join(names)}. Give "
            "each one of its own, under which checkpoints keep its state."
        )


def check_mask(extension: Extension, method: str, mask: object, rows: int) -> None:
    """Raises a ValueError unless what a method has returned is [rows] bool on the CPU."""
    found = f"{list(mask.shape)} {mask.dtype} on {mask.device}" if isinstance(mask, Tensor) else type(mask).__name__
    if found != f"[{rows}] torch.bool on cpu":
        raise ValueError(
            f"{method} of the extension {extension.name!r} must return a tensor [{rows}] of torch.bool on the CPU, got "
            f"{found}."
        )


def checked_state(extension: Extension) -> dict[str, Any]:
    """The state of an extension; a ValueError if it could be written, but not be read again."""
    state = extension.state_dict()
    if not _is_readable(state):
        raise ValueError(
            f"state_dict of the extension {extension.name!r} must return a dict of tensors, numbers and texts, in "
            f"dicts and lists, which alone are read from a checkpoint, got {state!r}."
        )
    return state


def _is_readable(value: object) -> bool:
    if isinstance(value, dict):
        value = (*value.keys(), *value.values())
    if isinstance(value, (list, tuple)):
        return all(map(_is_readable, value))
    return value is None or isinstance(value, (Tensor, int, float, str))


def value_of_term(term: LossTerm, features: Features, references: Sequence[Features]) -> Tensor:
    """The value of a term, whose ``references`` are those of all micro-batches.

    Raises:
        ValueError: it is no scalar, or the references cannot be concatenated.
    """
    try:
        if any(isinstance(one, Tensor) for one in references):  # whose rows would pass for the tensors of a tuple
            raise TypeError("it is a tensor")
        joined = tuple(map(torch.cat, zip(*references, strict=True)))
    except torch.OutOfMemoryError:  # after which the step is repeated
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"reference of the term {term.name!r} must return a tuple of tensors [rows, ...], as many for each "
            f"micro-batch: {describe_cause(error)}."
        ) from error
    value: object = term.value(features, joined)
    if not (isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()):
        found = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"value of the term {term.name!r} must return a scalar tensor of floats, got {found}.")
    return value
