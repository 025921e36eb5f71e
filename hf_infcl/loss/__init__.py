"""The contrastive loss of a batch that is spread over processes."""

from .contrastive import contrastive_loss, local_contrastive_loss
from .strategies import OBJECTIVES, STRATEGIES

__all__ = ["OBJECTIVES", "STRATEGIES", "contrastive_loss", "local_contrastive_loss"]
