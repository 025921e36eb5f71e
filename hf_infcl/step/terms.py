"""Parts of the step that options select: the loss of a window, its terms, dropped patches, logs; their context."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import get_mixed_precision_context_manager
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..loss import contrastive_loss
from ..models.adapters import weight_fingerprint
from ..models.dual_encoder import DualEncoder, drop_patches
from ..options.arguments import InfCLTrainingArguments
from ..processes.collectives import Processes
from .extensions import Extension, LossTerm, StepChange, StepObserver
from .grad_cache import Features
from .window import Window, on_device

SIDES = ("image", "text")
OF_TEACHER = "teacher_"  # what the names of a batch's tensors for the teacher begin with


# ---- Terms of the loss ----


class TeacherDistance(LossTerm):
    """β times the mean over the global batch of ‖v − v_T‖² + ‖t − t_T‖², the squared distances to a teacher's.

    The batches have the teacher's embeddings, ``teacher_images`` and ``teacher_texts`` [rows, width], and with
    ``partial`` which images and texts it knows, ``teacher_known_images`` and ``teacher_known_texts`` bool, an image
    with its captions or neither: the others are left out of the mean. Several captions of an image add up, and so do
    negative captions: the batch is its images. A teacher of another width is compared with a linear map of the
    student's embeddings (without bias, then normalised), which is trained with the model and not saved with it. CLIP-KD
    (arXiv 2307.12732) found this the best single term.

    Args:
        teacher: has ``sides``, those of `SIDES` that it teaches; ``partial``, whether it may not know all pairs, equal
            on all processes; ``width``, the dimensions of its embeddings (None for those of the student's);
            ``options``, which a resumed training has to share; and ``words`` for the model card.
        width: that of the student's embeddings, where that of the teacher may differ.
        seed: of the maps' first weights.
    """

    name = "teacher"
    in_order = True

    def __init__(
        self, teacher: Any, weight: float, width: int | None = None, seed: int = 0, device: torch.device | None = None
    ) -> None:
        self.teacher, self._weight, self._sides, self._partial = teacher, weight, list(teacher.sides), teacher.partial
        generator = torch.Generator().manual_seed(seed)
        self._maps: dict[str, nn.Parameter] = {}
        if teacher.width is not None and width is not None and teacher.width != width:
            for side in self._sides:  # as nn.Linear begins
                drawn = torch.empty(teacher.width, width).uniform_(-(width**-0.5), width**-0.5, generator=generator)
                self._maps[side] = nn.Parameter(drawn.to(device))

    @property
    def options(self) -> dict[str, Any]:
        return {f"teacher: {name}": value for name, value in self.teacher.options.items()}

    @property
    def card(self) -> Mapping[str, str]:
        taught = "image and text" if len(self._sides) == 2 else self._sides[0]
        through = ", through a linear map that was trained and is not saved" if self._maps else ""
        what = f"squared distance of the {taught} embeddings to the teacher's, weight {self._weight:g}{through}"
        return {"teacher": self.teacher.words, "taught by": what}

    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self._maps.values())

    def reference(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, object]) -> Features:
        known = [inputs[f"{OF_TEACHER}known_{kind}"] for kind in ("images", "texts") if self._partial]
        return (*(F.normalize(inputs[f"{OF_TEACHER}{side}s"].float(), dim=-1) for side in self._sides), *known)

    def value(self, features: Features, references: Features) -> Tensor:
        wanted, known = (references[:-2], references[-2:]) if self._partial else (references, ())
        parts = []
        for side, of_teacher in zip(self._sides, wanted, strict=True):
            tower = SIDES.index(side)
            student = features[tower].float()
            if (weight := self._maps.get(side)) is not None:
                student = F.normalize(F.linear(student, weight), dim=-1)
            squares = (student - of_teacher.float()).square()
            parts.append(torch.where(known[tower], squares.sum(-1), 0.0).sum() if known else squares.sum())
        if not known:
            # With equal numbers of images on all processes, the mean over processes is that of the global batch.
            return self._weight * (torch.stack(parts).sum() / len(features[0]))
        processes = Processes()
        taught = processes.sum(known[0].sum().float()).clamp(min=1)
        return self._weight * torch.stack(parts).sum() * processes.world_size / taught

    def state_dict(self) -> dict[str, Any]:
        return {side: weight.detach().cpu() for side, weight in self._maps.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for side, weight in self._maps.items():
            weight.copy_(state[side])


class Start:
    """The model from which a training began: its fingerprint and, with ``keeps``, a frozen copy of it.

    Without ``keeps`` the fingerprint is that of the frozen weights. What is frozen is not copied, unless FSDP2 shards
    the model. Under FSDP2 every process has the whole copy. The model is unwrapped, and has not been trained yet.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, *, keeps: bool) -> None:
        self.fingerprint = weight_fingerprint(model, frozen=not keeps)
        self.encoder: DualEncoder | None = None
        if keeps:
            alike = not accelerator.is_fsdp2
            shared = {id(p): p for p in model.parameters() if alike and not p.requires_grad}
            copied = copy.deepcopy(model, shared).requires_grad_(False).eval()
            self.encoder = DualEncoder(copied.to(accelerator.device))


class KeptFeatures(LossTerm):
    """Holds the embeddings near those of the start (``keep_features``), which reads the texts as they are encoded."""

    name = "keep_features"

    def __init__(self, start: Start, accelerator: Accelerator, weight: float) -> None:
        assert start.encoder is not None
        self._start, self._accelerator, self._weight = start.encoder, accelerator, weight

    def reference(self, inputs: Mapping[str, Tensor], frozen_outputs: Mapping[str, Any]) -> Features:
        """The embeddings of the start, which may be in the inputs (``cache_features``).

        The copies of frozen towers do not run: they return ``frozen_outputs``, as the model's own have.
        """
        if "start_images" in inputs:
            return inputs["start_images"], inputs["start_texts"]
        with torch.no_grad(), autocast(self._accelerator):
            return self._start.embed(self._start.model, inputs, dict(frozen_outputs))

    def value(self, features: Features, references: Features) -> Tensor:
        pairs = zip(features, references, strict=True)
        squares = [(now.float() - before.float()).square().sum() for now, before in pairs]
        return self._weight * (torch.stack(squares).sum() / len(features[0]))


# ---- Observers and changes ----


class TowerNorms(StepObserver):
    """The norms of the gradients of the image tower and of the text tower, with their projections.

    It reads every gradient once and does not wait for the device; `logs` fetches the values. FSDP2 has to have
    replaced the parameters before.
    """

    name = "tower_norms"

    def __init__(self, encoder: DualEncoder) -> None:
        self._parameters = {
            tower: [p for module in parts for p in module.parameters() if p.requires_grad]
            for tower, parts in encoder.parts().items()
        }
        self._norms: dict[str, Callable[[], Tensor]] = {}

    def end_window(self, window: Window, scale: float) -> None:
        for tower, parameters in self._parameters.items():
            if gradients := [p.grad for p in parameters if p.grad is not None]:
                # Those of single parameters, where the step has read them, are joined only when they are logged.
                if (norms := window.gradient_norms) is not None:
                    self._norms[tower] = partial(norms.of, parameters)
                else:
                    self._norms[tower] = partial(torch.div, nn.utils.get_total_norm(gradients), scale)

    def logs(self) -> dict[str, float]:
        """``grad_norm_image`` and ``grad_norm_text`` of the last trained window, unclipped; collective under FSDP2."""
        norms = {tower: norm_of() for tower, norm_of in self._norms.items()}
        whole = {t: norm.full_tensor() if isinstance(norm, DTensor) else norm for t, norm in norms.items()}
        return {f"grad_norm_{tower}": norm.item() for tower, norm in whole.items()}


class PositiveCosines(StepObserver):
    """The mean cosine of all pairs of the global batch, also of those that are left out."""

    name = "positive_cosines"

    def __init__(self) -> None:
        # The sums over this process's images, and their numbers, [2, 1] fp32; with replay of all, new and old, [2, 3].
        self._of_trained: Tensor | None = None

    def after_first_pass(self, window: Window, features: Features) -> None:
        images, texts = (rows.float() for rows in features)  # a model of one's own may return both dtypes
        caption_image, replayed = window.caption_image(), window.replayed()
        if caption_image is None:
            cosines = torch.linalg.vecdot(images, texts)
        else:  # of each image the mean over its captions
            captions = (caption_image >= 0).nonzero().flatten()
            image_of_each = caption_image[captions]
            shares = 1 / torch.bincount(image_of_each, minlength=len(images))[image_of_each]
            of_images, of_texts, shares = (on_device(one, images.device) for one in (image_of_each, captions, shares))
            cosines_of_captions = torch.linalg.vecdot(images[of_images], texts[of_texts]) * shares
            cosines = images.new_zeros(len(images)).index_add_(0, of_images, cosines_of_captions)
        parts = torch.ones(1, len(images))
        if replayed is not None:
            parts = torch.stack((parts[0], ~replayed, replayed))
        parts = on_device(parts, images.device)
        self._of_window = torch.stack(((parts * cosines).sum(1), parts.sum(1)))

    def end_window(self, window: Window, scale: float) -> None:
        self._of_trained = self._of_window

    def logs(self) -> dict[str, float]:
        """``positive_cosine`` of the last window; with replay also that of its new and of its old pairs; collective."""
        if self._of_trained is None:
            return {}
        sums, counts = Processes().sum(self._of_trained)
        names = ("positive_cosine", "new_positive_cosine", "replay_positive_cosine")
        return dict(zip(names, (sums / counts).tolist(), strict=False))


class DroppedPatches(StepChange):
    """Drops a share of the patches of each image (``patch_dropout``), from the first window of a training on."""

    name = "patch_dropout"

    def __init__(self, encoder: DualEncoder, share: float) -> None:
        self._encoder, self._share = encoder, share
        self._hook: Any = None

    def begin_window(self, window: Window, step: int) -> None:
        self._hook = self._hook or drop_patches(self._encoder, self._share)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None


# ---- What the parts have in common ----


@dataclass(frozen=True)
class Context:
    """The model of a training or of an evaluation, its arguments, where it computes, its loss and its data."""

    encoder: DualEncoder  # unwrapped
    accelerator: Accelerator
    args: InfCLTrainingArguments
    equal_ids: str  # "exclude" or "positive"; see `InfCLTrainingArguments`
    prepare_inputs: Callable[[dict[str, Any]], dict[str, Any]]  # moves a batch to the device and normalises its images
    # The weights that the model had before the training, if it is to stay near them; of adapters those that they adapt.
    start: Start | None = None
    data: Any = None  # the training set
    collator: Any = None  # the data collator
    extensions: Sequence[Extension] = ()  # of the step, beside those that the arguments ask for
    rows: int | None = None  # of the training set, without old pairs; None for a stream

    @property
    def objective(self) -> str:
        """``"softmax"`` or ``"sigmoid"``: the argument, or else the objective that the model was designed for."""
        return self.args.objective or self.encoder.kind.objective


def autocast(accelerator: Accelerator) -> Any:
    """The context of a forward in the precision of a training, which also ends if memory runs out within it.

    `Accelerator.autocast` would leave autocast on then, before accelerate 1.11.
    """
    return get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)


# ---- The contrastive loss ----


def loss_of_window(
    context: Context, window: Window, features: Features, logit_scale: Tensor, logit_bias: Tensor | None
) -> Tensor:
    """The contrastive loss of the selected pairs of all windows, the same on every process; collective.

    With ``matryoshka_dims`` it is the mean of those of the first so many dimensions, normalised, and of all dimensions
    (Matryoshka, arXiv 2205.13147). ``features`` are image and text embeddings of this process, [images, D] and
    [texts, D].
    """
    args, positive, device = context.args, context.equal_ids == "positive", features[1].device
    of_images: Tensor | None = None  # the rows of the images, and of the texts, that the loss gets; None for all
    of_texts: Tensor | None = None
    caption_image, ids = window.caption_image(), window.pair_ids()
    if ids is None and positive:  # all of them, also of pairs that are left out
        ids = torch.arange(len(features[0])) + args.process_index * len(features[0])
    # ---- The selected images, with their captions and all negative ones ----
    if (chosen := window.selected) is not None:
        of_images = of_texts = chosen.nonzero().flatten()
        if caption_image is not None:
            of_texts = (chosen[caption_image] | (caption_image < 0)).nonzero().flatten()
            caption_image = caption_image[of_texts]
            caption_image = torch.where(caption_image < 0, -1, (chosen.cumsum(0) - 1)[caption_image])
        ids = None if ids is None else ids[on_device(of_images, ids.device)]
    # ---- Captions in the order of their images, after negative ones ----
    negatives = 0
    if caption_image is not None:
        order = caption_image.argsort(stable=True)
        of_texts = order if of_texts is None else of_texts[order]
        negatives = int((caption_image < 0).sum())
        caption_image = caption_image[order[negatives:]]
    ids = None if ids is None else on_device(ids, device)
    how: Any = {"objective": context.objective, "strategy": args.strategy, "backend": args.backend, "pair_ids": ids}
    if positive:
        assert ids is not None
        text_ids = ids if caption_image is None else ids[on_device(caption_image, device)]
        how |= {"pair_ids": None, "image_ids": ids, "text_ids": text_ids}
    # ---- The loss of all dimensions, and of the first ones ----
    rows = [None if one is None else on_device(one, device) for one in (of_images, of_texts)]
    # In fp16 the loss must not multiply: divided by the global batch, gradients of features would underflow where no
    # loss scale helps. accelerate returns fp32 from an autocast forward.
    in_bf16 = context.accelerator.mixed_precision == "bf16"
    cut = [[F.normalize(f[:, :n].float(), dim=-1).to(f.dtype) for f in features] for n in args.matryoshka_dims or ()]
    losses = []
    for one in (*cut, features):
        given = (feature.bfloat16() if in_bf16 else feature for feature in one)
        images, texts = (f if places is None else f[places] for f, places in zip(given, rows, strict=True))
        apart = texts[:0]  # also if this process has no negative caption, because another process may have some
        if negatives:
            apart, texts = texts.tensor_split([negatives])
        losses.append(contrastive_loss(images, texts, logit_scale, logit_bias, negative_texts=apart, **how))
    return torch.stack(losses).mean() if cut else losses[0]
