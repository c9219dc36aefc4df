import sys

import numpy as np
import pytest

from buddyring import Placement
from buddyring.distributions import batch
from buddyring.draw import DrawingError, colour_of, draw_placement, segments

matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")


def placement(name="freelaw", tokens=65536, ranks=8):
    lengths = batch(name, tokens)
    sizes = [8 if x > 16384 else 4 if x > 8192 else 2 if x > 4096 else 1 for x in lengths]
    groups = [(i * size % ranks, size) for i, size in enumerate(sizes)]
    return Placement.from_groups(lengths, ranks, groups)


def pixels(path, colour):
    """``[height, width]`` bool: where the picture has exactly that colour."""
    import matplotlib.colors
    import matplotlib.image

    picture = matplotlib.image.imread(path)[:, :, :3]
    return np.abs(picture - matplotlib.colors.to_rgb(colour)).max(axis=2) < 0.004


def test_segments_add_up_to_the_loads():
    made = placement()
    pieces = segments(made)
    assert np.bincount(pieces.ranks, pieces.tokens, 8).tolist() == list(made.token_loads)
    assert np.bincount(pieces.ranks, pieces.pairs, 8).tolist() == list(made.attention_loads)
    assert len(pieces.ranks) == made.num_shards
    assert set(zip(pieces.sequences.tolist(), pieces.sizes.tolist(), strict=True)) == {
        (i, size) for i, (_, size) in enumerate(made.groups)
    }


def test_areas_in_the_picture_are_the_loads(tmp_path):
    # Rank 0 holds half of a split sequence and a whole one, rank 1 the other half.
    made = Placement.from_groups([40960, 20480], 2, [(0, 2), (0, 1)])
    path = draw_placement(made, tmp_path / "p.png", title="")
    split, whole = pixels(path, colour_of(2)), pixels(path, colour_of(1))
    middle = split.shape[1] // 2
    above_legend = slice(0, int(0.72 * split.shape[0]))
    for panel, share in ((slice(0, middle), 20480 / 40960), (slice(middle, None), 20480**2 / 40960**2)):
        ratio = whole[above_legend, panel].sum() / split[above_legend, panel].sum()
        assert ratio == pytest.approx(share, rel=0.1)
    # Both ranks hold the same of the split one: its bars end at the same place.
    edges = [int(np.flatnonzero(row)[-1]) for row in split[above_legend, :middle] if row.sum() > 100]
    assert max(edges) - min(edges) <= 1 and len(edges) > 50


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_formats(tmp_path, ending):
    path = draw_placement(placement(), tmp_path / f"p{ending}")
    head = path.read_bytes()[:200]
    assert {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[ending] in head


@pytest.mark.parametrize(
    "made",
    [
        Placement.from_groups([], 2, []),
        Placement.from_groups([1], 3, [(1, 1)]),
        Placement.from_groups([5000, 600], 4, [(1, 2), (3, 1)]),
        Placement.from_groups([64] * 1500, 64, [(i % 64, 1) for i in range(1500)]),
    ],
    ids=["none", "one token", "misaligned", "64 ranks"],
)
def test_odd_placements_are_drawn(tmp_path, made):
    path = draw_placement(made, tmp_path / "p.png")
    assert matplotlib.image.imread(path).shape[1] == 1650


def test_drawing_leaves_pyplot_and_its_backend_alone(tmp_path):
    draw_placement(placement(), tmp_path / "p.png")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_refusals_say_what_to_do(tmp_path, monkeypatch):
    made = placement()
    with pytest.raises(DrawingError, match=r"name must end in one of .*\.png"):
        draw_placement(made, tmp_path / "p.bmp2")
    with pytest.raises(DrawingError, match="the most is 1024"):
        draw_placement(Placement.from_groups([1], 1025, [(0, 1)]), tmp_path / "p.png")
    with pytest.raises(OSError, match="No such file"):
        draw_placement(made, tmp_path / "no" / "p.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DrawingError, match=r"pip install 'megaring\[plot\]'"):
        draw_placement(made, tmp_path / "q.png")
    assert not (tmp_path / "q.png").exists()
