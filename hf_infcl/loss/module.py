"""`contrastive_loss` as an `nn.Module`, with the call of OpenCLIP's losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .contrastive import contrastive_loss


class ContrastiveLoss(nn.Module):
    """The exact loss of the global batch, in place of OpenCLIP's ``ClipLoss`` and ``SigLipLoss``.

    OpenCLIP's training script takes it for ``loss = create_loss(args)`` in ``open_clip_train/main.py``:

        loss = ContrastiveLoss("sigmoid" if args.siglip else "softmax")

    The processes are those of torch.distributed's default group, so that neither rank nor world_size is passed. Every
    process returns the loss of the global batch, and DDP's average of the gradients is its gradient. The guide
    ``hf_infcl/loss/README.md`` says which of OpenCLIP's flags give that gradient with its own losses.

    Args:
        objective: ``"softmax"``, as ClipLoss, or ``"sigmoid"``, as SigLipLoss.
        **options: further keyword arguments of every call of `hf_infcl.contrastive_loss`, such as ``strategy``.

    Raises:
        ValueError: in a call, as `hf_infcl.contrastive_loss`.
    """

    def __init__(self, objective: str = "softmax", **options: Any) -> None:
        super().__init__()
        self.objective, self.options = objective, options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of the global batch, a scalar, or with ``output_dict`` ``{"contrastive_loss": loss}``.

        Args:
            image_features: [b, D], normalised, of this process's pairs; b is equal on all processes.
            text_features: [b, D].
            logit_scale: one element, the multiplier of the cosines (already exponentiated).
            logit_bias: one element; None is 0.
            output_dict: whether to return a dictionary, as OpenCLIP's loop asks for.
        """
        loss = contrastive_loss(
            image_features, text_features, logit_scale, logit_bias, objective=self.objective, **self.options
        )
        return {"contrastive_loss": loss} if output_dict else loss
