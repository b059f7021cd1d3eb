"""What the summaries of sites, as they stand in run.json, tell of pictures: images of a plane, as radiographs are."""

from collections.abc import Mapping, Sequence
from typing import Any


def of_pictures(sites: Mapping[str, Mapping[str, Any]]) -> bool:
    """Are all training images of all sites pictures? sites: name -> what it sent when it joined."""
    inputs = [site.get("inputs") or {} for site in sites.values() if site.get("role") != "test"]
    return bool(inputs) and all(one.get("kinds") == ["picture"] for one in inputs)


def in_pixels(spacing: Sequence[Sequence[float]]) -> bool:
    """Are the lengths of pictures those of pixels? So they are where a pixel is 1 mm wide, as it counts where nobody says how
    wide it is."""
    return all(step == 1 for steps in spacing for step in steps)


def lengths_in_pixels(sites: Mapping[str, Mapping[str, Any]]) -> bool:
    """Are lengths those of pixels, at any site? sites: as in `of_pictures`."""
    return of_pictures(sites) and any(in_pixels(site.get("spacing") or ()) for site in sites.values())
