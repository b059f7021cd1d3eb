"""Surfaces in millimetres, and pictures of them without a screen."""

import io

import numpy as np
import pytest
from PIL import Image

from fedatlas.core.errors import DataError
from fedatlas.report.meshes import (
    CELLS,
    SIDE,
    TRANSPARENT,
    Mesh,
    Solid,
    coarse,
    factors,
    inline,
    limits,
    render,
    surface,
)

SPACING = (1.5, 1.5, 3.0)


def ball(centre: tuple[float, ...], radius: float, shape: tuple[int, ...] = (64, 64, 32)) -> np.ndarray:
    places = np.meshgrid(
        *[(np.arange(n) + 0.5) * s for n, s in zip(shape, SPACING, strict=True)], indexing="ij"
    )
    return sum((p - c) ** 2 for p, c in zip(places, centre, strict=True)) < radius**2  # type: ignore[return-value]


def mesh(mask: np.ndarray, spacing: tuple[float, ...] = SPACING) -> Mesh:
    found = surface(mask, spacing)
    assert found is not None
    return found


@pytest.mark.parametrize("by", [(1, 1, 1), (2, 2, 1)])
def test_a_ball_has_the_area_and_the_extent_of_a_ball(by: tuple[int, ...]) -> None:
    centre, radius = (51.0, 45.0, 48.0), 36.0
    share = coarse(ball(centre, radius), by)
    found = mesh(share, tuple(s * n for s, n in zip(SPACING, by, strict=True)))
    assert found.area == pytest.approx(4 * np.pi * radius**2, rel=0.03)
    low, high = limits([found])
    np.testing.assert_allclose(low, np.array(centre) - radius, atol=1.0)
    np.testing.assert_allclose(high, np.array(centre) + radius, atol=1.0)
    outward = ((found.vertices[found.faces].mean(1) - centre) * found.normals).sum(1)
    assert (outward > 0).all()


def test_what_touches_the_edge_is_closed_and_the_smallest_is_not_lost() -> None:
    edge = np.zeros((8, 8, 8), bool)
    edge[:, :, :4] = True
    low, high = limits([mesh(edge)])
    np.testing.assert_allclose(low, 0, atol=0.2)
    np.testing.assert_allclose(high, [12, 12, 12], atol=0.2)
    one = np.zeros((8, 8, 8), bool)
    one[2, 3, 4] = True
    low, high = limits([mesh(one)])
    np.testing.assert_allclose((low + high) / 2, [3.75, 5.25, 13.5])
    assert surface(np.zeros((3, 3, 3), bool), SPACING) is None
    with pytest.raises(DataError, match="three positive lengths"):
        surface(one, (1.0, 0.0, 1.0))


def test_a_large_volume_is_made_coarser_to_cubes() -> None:
    by = factors((512, 512, 100), (0.8, 0.8, 4.0))
    assert by == (6, 6, 1) and 512 / by[0] <= CELLS * 1.1
    assert factors((20, 20, 20), (4, 4, 4)) == (1, 1, 1)
    mask = np.zeros((5, 4, 2), bool)
    mask[:3, :2, :1] = True
    share = coarse(mask, (2, 2, 2))
    assert share.shape == (3, 2, 1)
    assert share[..., 0].tolist() == [[128, 0], [64, 0], [0, 0]], (
        "shares of blocks, the rest of a block empty"
    )


def picture(*solids: Solid) -> np.ndarray:
    box = limits([mesh(ball((48, 48, 48), 46))])
    pixels = np.asarray(Image.open(io.BytesIO(render(solids, box)))).astype(int)
    assert pixels.shape == (SIDE, SIDE, 4)
    return pixels


def test_the_transparent_lets_what_is_behind_through() -> None:
    near = mesh(ball((48, 76, 48), 12))  # in front: nearer to a viewer at the front
    far = mesh(ball((48, 40, 48), 30))
    alone = picture(Solid(near, "#0000ff", transparent=True))
    inside = alone[..., 3] > 0.9 * alone[..., 3].max()
    assert inside.sum() > 500
    np.testing.assert_allclose(alone[inside][:, 3], 255 * TRANSPARENT, atol=2)
    both = picture(Solid(near, "#0000ff", transparent=True), Solid(far, "#ff0000"))
    hidden = picture(Solid(near, "#0000ff"), Solid(far, "#ff0000"))
    assert (both[inside][:, 3] == 255).all()
    assert (both[inside][:, 0] > 60).mean() > 0.95 and (both[inside][:, 2] > 20).mean() > 0.95
    assert (hidden[inside][:, 0] < 20).mean() > 0.95, "the opaque one hides the red"
    turned = picture(Solid(far, "#0000ff", transparent=True), Solid(near, "#ff0000"))
    assert (turned[inside][:, 2] < 20).mean() > 0.95, "what is behind an opaque one does not show"


def test_the_patients_right_is_on_the_left_and_the_head_above() -> None:
    def middle(centre: tuple[float, ...]) -> np.ndarray:
        return np.argwhere(picture(Solid(mesh(ball(centre, 10)), "#00ff00"))[..., 3] > 128).mean(0)

    plain = middle((48, 48, 48))
    assert middle((76, 48, 48))[1] < plain[1] - 20, "x points to the patient's right"
    assert middle((48, 48, 76))[0] < plain[0] - 20, "z points up"


def test_light_comes_from_above() -> None:
    drawn = picture(Solid(mesh(ball((48, 48, 48), 40)), "#ffffff"))
    rows = np.flatnonzero(drawn[..., 3].max(1) == 255)
    column = drawn[rows, SIDE // 2, 0]
    assert column[len(rows) // 5] > column[-len(rows) // 5] + 30


def test_the_same_solids_give_the_same_bytes() -> None:
    solids = [Solid(mesh(ball((48, 48, 48), 20)), "#123456")]
    box = limits([solids[0].mesh])
    first = render(solids, box)
    assert render(solids, box) == first and len(first) < 100_000
    assert inline(first).startswith("data:image/png;base64,")
