"""The contrastive loss of a batch that is spread over processes."""

from .contrastive import ContrastiveLoss, contrastive_loss, local_contrastive_loss
from .objectives import OBJECTIVES
from .strategies import STRATEGIES

__all__ = ["OBJECTIVES", "STRATEGIES", "ContrastiveLoss", "contrastive_loss", "local_contrastive_loss"]
