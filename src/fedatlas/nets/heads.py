"""Small nets on the features of a classifier, for methods that need them in training only.

Shapes: B batch, d features, p output features.
"""

from torch import Tensor, nn

from fedatlas.core.options import option, options
from fedatlas.nets.module import Net


class ProjectorPredictor(Net):
    """SimSiam's two heads: features [B, d] -> (p, z), both [B, dim]. z: the projector's output, p: the predictor's
    of z. Both normalise over the batch; in training B is at least 2."""

    level = "image"

    def __init__(self, n_features: int, dim: int, hidden: int, bottleneck: int) -> None:
        super().__init__(n_features, dim, (1, 1))
        self.projector = nn.Sequential(
            nn.Linear(n_features, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, dim, bias=False),
            nn.BatchNorm1d(dim, affine=False),
        )
        self.predictor = nn.Sequential(
            nn.Linear(dim, bottleneck, bias=False),
            nn.BatchNorm1d(bottleneck),
            nn.ReLU(),
            nn.Linear(bottleneck, dim),
        )

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(p, z), each [B, dim]."""
        z = self.projector(features)
        return self.predictor(z), z

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """projector and predictor."""
        return {"projector": self.projector, "predictor": self.predictor}


@options
class SimSiamHeads:
    """Projector and predictor of SimSiam (Chen & He, CVPR 2021), on the features of another net."""

    dim: int = option(2048, "Features that the projector gives.", gt=0)
    hidden: int | None = option(None, "Width of the projector's two inner layers; null: dim.", gt=0)
    bottleneck: int = option(512, "Width of the predictor's inner layer.", gt=0)

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> ProjectorPredictor:
        """The heads for `in_channels` features, with weights from torch's global generator."""
        return ProjectorPredictor(in_channels, self.dim, self.hidden or self.dim, self.bottleneck)
