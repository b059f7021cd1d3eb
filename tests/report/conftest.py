import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from fedatlas.report.figures import chart

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not drawn, for tests of a page's words and tables: drawing is nearly all of a page's time."""

    def made(draw: Callable[[], Figure], name: str, description: str) -> Markup:
        with matplotlib.rc_context(chart.RC):  # type: ignore[arg-type]
            draw()
        return Markup(f'<svg class="plot" role="img" aria-label="{escape(description)}"></svg>')

    monkeypatch.setattr(chart, "_svg", made)
