"""The contrastive loss of a batch that is spread over processes."""

from .contrastive import contrastive_loss, local_contrastive_loss
from .inputs import OBJECTIVES
from .module import ContrastiveLoss
from .strategies import STRATEGIES

__all__ = ["OBJECTIVES", "STRATEGIES", "ContrastiveLoss", "contrastive_loss", "local_contrastive_loss"]
