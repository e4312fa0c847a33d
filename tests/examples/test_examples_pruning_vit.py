"""The example that trains and prunes a small vision transformer: it computes what it says, and runs to its end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

FOLDER = Path(__file__).parents[2] / "examples" / "pruning"


@pytest.fixture(scope="module")
def modules(example):
    """Give the module of the example, and that of its models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER.parent / "tost")
        yield example("vit_digits"), example("_vit")


@pytest.mark.thorough
def test_it_trains_and_prunes_in_all_ways(quick):
    written, _ = quick("vit_digits")
    assert len(written["parameters"]) == 1
    assert (written["slots"], written["keys"]) == (8, 64)
    names = ["leverage", "leverage, half of the slots summaries", "residual, half of the slots summaries"]
    names += ["row norm", "random"]
    for kind in ("trained with", "at inference alone"):
        assert list(written[kind]) == names
        assert all(0 <= accuracy <= 1 for accuracies in written[kind].values() for accuracy in accuracies)


def test_layers_take_the_weights_of_softmax_attention(modules):
    vit_digits, vit = modules
    torch.manual_seed(0)
    shape = vit.Shape(dim=16, depth=2, heads=2, hidden=8)
    model, images = vit.Transformer("softmax", shape), torch.randn(3, 8, 8)
    expected = model(images)
    for name, options in vit_digits.ways_of(8).items():
        pruned = vit_digits.with_other_layers(model, options)
        few = pruned(images)
        assert (few - expected).abs().max() > 1e-4, name
        vit_digits.set_dense(pruned)
        np.testing.assert_allclose(pruned(images).detach(), expected.detach(), atol=1e-5)
        assert vit.parameters(pruned) == vit.parameters(model)


def test_rows_are_read_by_what_they_are_chosen_by(modules):
    vit_digits, _ = modules
    torch.manual_seed(1)
    ways = vit_digits.ways_of(5)
    layer = vit_digits.LevAttention(16, ways["row norm"], heads=2).double()
    X = torch.randn(1, 30, 16, dtype=torch.float64)
    Q, K, V = layer.qkv(X).reshape(1, 30, 3, 2, 8).permute(2, 0, 3, 1, 4)
    best = K.norm(dim=-1).topk(5, dim=-1).indices[..., None].expand(-1, -1, -1, 8)
    Y = torch.softmax(Q @ K.gather(2, best).mT / 8**0.5, -1) @ V.gather(2, best)
    np.testing.assert_allclose(
        layer(X).detach(), layer.proj(Y.transpose(1, 2).reshape(1, 30, 16)).detach(), atol=1e-12
    )
    layer.selection = ways["random"]
    assert not torch.equal(layer(X), layer(X))
