"""Real images that come with the package: CT of OpenKBP, four sites, and chest X-rays of ChestX-ray14, three sites.
See ATTRIBUTION.md and LICENSE there."""

from pathlib import Path


def path() -> Path:
    """The folder that holds site-a to site-d, and chest-xray/site-a to site-c."""
    return Path(__file__).parent
