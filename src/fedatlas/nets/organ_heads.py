"""One sigmoid head per organ on a shared net, read out as a softmax over exclusive classes.

Kim, Park, Kang, Jin, Adeli, Pohl, Park. Federated learning with knowledge distillation for multi-organ segmentation
with partially labeled datasets. Med. Image Anal. 95, 2024.

Every organ has a head on the shared features: a channel for the organ with its lesions, and one for each lesion. The
head is a convolution of size 1, so the heads of all organs are the rows of the backbone's last convolution, which has
one row less than there are classes: the background has none.

Shapes: B batch, C classes with the background, *S spatial.
"""

from typing import Any

from torch import Tensor, nn

from fedatlas.core.errors import FederationError
from fedatlas.core.options import from_dict, option, options
from fedatlas.core.organs import Groups, check_groups, complete, merge_heads
from fedatlas.nets.module import Net, Outputs


class OrganHeadsNet(Net):
    """A backbone with one head per organ; gives the logits of their merge (`merge_heads`)."""

    by_organ = True

    def __init__(self, backbone: Net, classes: int, groups: Groups) -> None:
        super().__init__(backbone.in_channels, classes, backbone.divisor)
        self.backbone, self.groups = backbone, groups

    def forward(self, x: Tensor) -> Outputs:
        """[B, in_channels, *S] -> [B, C, *S]; a list where the backbone gives one."""
        h = self.backbone(x)
        if isinstance(h, Tensor):
            return merge_heads(h, self.groups)
        return [merge_heads(each, self.groups) for each in h]

    def parts(self) -> dict[str, nn.Module | list[nn.Module]]:
        """Those of the backbone."""
        return self.backbone.parts()


@options
class OrganHeads:
    """A backbone with one sigmoid head per organ, for exclusive classes (Kim 2024)."""

    backbone: dict[str, Any] = option(
        {"name": "unet"}, "The shared net: its registered name and its options."
    )
    groups: tuple[tuple[int, ...], ...] | None = option(
        None,
        "Organs with lesions, as class indices, the organ first; any other class is an organ without. Null: "
        "those of labels.groups.",
    )

    def build(self, *, in_channels: int, classes: int, spatial_dims: int) -> OrganHeadsNet:
        """The net, with weights from torch's global generator. Raises FederationError for an unknown backbone, one
        that is not for voxels or is by organ itself, or groups that do not fit the classes."""
        of_backbone = self._options()
        check_groups(self.groups or (), classes, what="net organ_heads")
        backbone: Net = of_backbone.build(
            in_channels=in_channels, classes=classes - 1, spatial_dims=spatial_dims
        )
        return OrganHeadsNet(backbone, classes, complete(self.groups or (), classes))

    def initialise(self, net: Net) -> None:
        """As the backbone's own options, where they have it."""
        assert isinstance(net, OrganHeadsNet)
        of_backbone = self._options()
        if hasattr(of_backbone, "initialise"):
            of_backbone.initialise(net.backbone)

    def _options(self) -> Any:
        from fedatlas import nets

        name = self.backbone.get("name")
        allowed = [other for other in nets.FOR_LEVEL["voxel"] if not nets.net_of(other).by_organ]
        if name not in allowed:
            raise FederationError(
                f"net organ_heads: backbone.name is {name!r}; allowed: {', '.join(allowed)}"
            )
        chosen = {key: value for key, value in self.backbone.items() if key != "name"}
        return from_dict(nets.get(name), chosen, what=f"net {name}")
