"""Likeness of features.

Shapes: B batch, d features.
"""

from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedatlas.losses.heads import full_precision


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Minus the cosine between p and z [B, d], the mean over the batch; z is a constant (stop-gradient).

    D of SimSiam (Chen & He, CVPR 2021, Eq. 1). A row of zeros has the cosine 0.
    """
    return -cosine_similarity(full_precision(p), full_precision(z).detach(), dim=1).mean()
