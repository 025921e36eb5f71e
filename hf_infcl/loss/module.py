"""`contrastive_loss` as an `nn.Module`, with the call of OpenCLIP's losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .contrastive import contrastive_loss


class ContrastiveLoss(nn.Module):
    """The exact loss of the global batch, in place of OpenCLIP's ``ClipLoss`` and ``SigLipLoss``.

    In OpenCLIP's training script ``open_clip_train/main.py``, it replaces the line ``loss = create_loss(args)``:

        loss = ContrastiveLoss("sigmoid" if args.siglip else "softmax")

    The batch is shared by torch.distributed's default group, so neither rank nor world_size has to be passed. Every
    process returns the loss of the global batch, and DDP's average of the gradients is the gradient of that loss. The
    guide ``hf_infcl/loss/README.md`` says which of OpenCLIP's flags give this gradient with OpenCLIP's own losses.

    Args:
        objective: ``"softmax"``, like ClipLoss, or ``"sigmoid"``, like SigLipLoss.
        **options: keyword arguments for every call of `hf_infcl.contrastive_loss`, such as ``strategy``.

    Raises:
        ValueError: when called, in the same cases as `hf_infcl.contrastive_loss`.
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
        """Returns the loss of the global batch, a scalar; with ``output_dict``, ``{"contrastive_loss": loss}``.

        Args:
            image_features: [b, D], the normalised images of this process; b may differ between processes.
            text_features: [b, D], their texts, also normalised.
            logit_scale: one element, the multiplier of the cosines (already exponentiated).
            logit_bias: one element; None means 0.
            output_dict: whether to return a dictionary, which OpenCLIP's training loop requests.
        """
        loss = contrastive_loss(
            image_features, text_features, logit_scale, logit_bias, objective=self.objective, **self.options
        )
        return {"contrastive_loss": loss} if output_dict else loss
