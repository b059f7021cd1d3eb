"""The official MENU-Net's tensors by the names that ours have."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VECTORS = Path(__file__).parent / "vectors"


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def under(v: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of a vector file whose names begin with a prefix, by our names."""
    return {ours(key.removeprefix(prefix)): value for key, value in v.items() if key.startswith(prefix)}


def ours(name: str) -> str:
    """Our name of a tensor of the official net with four levels."""
    top, _, rest = name.removeprefix("module.").partition(".")
    block, *middle, kind = rest.split(".")
    if top == "sub_encoders":
        level, *_, place = middle
        return f"encoders.{block}.levels.{int(level[-1]) - 1}.convs.{int(place) // 3}.{kind}"
    if top == "aux_decoder":
        level = int(block[-1]) - 1
        return f"agd.{level}." + (
            f"1.{kind}" if middle == ["1"] else f"0.convs.{int(middle[-1]) // 3}.{kind}"
        )
    if block == "outconv":
        return f"head.{kind}"
    if block.startswith("clssifier"):
        return f"heads.{4 - int(block[-1])}.{kind}"
    level = 0 if block == "lastconv" else 5 - int(block[-1])
    if middle == ["up"]:
        return f"decoder.ups.{level - 1}.{kind}"
    return f"decoder.blocks.{level}.convs.{int(middle[-1]) // 3}.{kind}"
