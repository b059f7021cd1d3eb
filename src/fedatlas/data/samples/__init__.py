"""Real CT that comes with the package: a part of OpenKBP, four sites. See ATTRIBUTION.md and LICENSE there."""

from pathlib import Path


def path() -> Path:
    """The folder that holds site-a, site-b, site-c and site-d."""
    return Path(__file__).parent
