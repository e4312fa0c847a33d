"""The examples of token statistics transformers: they compute what they say, and each runs to its end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import naive_attention as naive

torch = pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

FOLDER = Path(__file__).parents[2] / "examples" / "tost"


@pytest.fixture
def vit(example):
    """Give the module of models, and a generator's fixed seed."""
    torch.manual_seed(0)
    return example("_vit")


@pytest.mark.thorough
def test_all_mixers_learn_digits_far_beyond_chance_with_equally_many_parameters(quick, vit):
    written = quick("digits")[0]
    results = {result["mixer"]: result for result in written["results"]}
    assert tuple(results) == vit.MIXERS
    sizes = [result["parameters"] for result in results.values()]
    assert max(sizes) - min(sizes) < 0.01 * max(sizes)
    for name, result in results.items():
        assert 0.3 < result["accuracy"] <= 1, name
    assert all(time > 0 for times in written["layer"]["milliseconds"].values() for time in times)


@pytest.mark.thorough
def test_dilution_has_the_figures_that_theory_gives(quick):
    written = quick("dilution")[0]
    channels, places = written["channels"], np.array(written["places"])
    assert (channels, written["heads"], places.tolist()) == (64, 12, [16, 256, 1024, 4095])
    logits = {name: np.array(numbers) for name, numbers in written["mean logit"].items()}
    np.testing.assert_allclose(logits["released"], channels / (places + 1), rtol=0.1)
    np.testing.assert_allclose(written["t + 1 times the released logit"], channels, rtol=0.005)
    np.testing.assert_allclose(logits["mean, θ = 1"], channels, rtol=0.1)
    np.testing.assert_allclose(logits["mean, θ = 1/√d"], channels**0.5, rtol=0.1)
    np.testing.assert_allclose(logits["decay 0.99"][-1], 0.01 * channels, rtol=0.1)
    # Logits of tokens are about normal with deviation √(2d)/(t + 1); the largest of 12 is about 2 of these away.
    expected = 2.04 * (2 * channels) ** 0.5 / (places[1:] + 1)
    np.testing.assert_allclose(written["uneven"]["released"][1:], expected, rtol=0.35)
    assert min(written["uneven"]["mean, θ = 1/√d"]) > 1
    assert 0.8 < written["all of 196 tokens"]["least"] < 0.92
    assert 1.12 < written["all of 196 tokens"]["largest"] < 1.3


@pytest.mark.thorough
def test_pictures_show_layers_whose_tied_steps_lower_the_rate(quick):
    written = quick("maps", pictures=("maps", "left", "descent"))[0]["results"]
    assert tuple(written) == ("tssa", "tssa tied")
    for result in written.values():
        assert len(result["layers"]) == 2
        for layer in result["layers"]:
            assert 0 <= layer["least h·Π"] < 1 < layer["largest h·Π"] <= 4
    for layer in written["tssa tied"]["layers"]:
        assert layer["largest norm"] > 0
        assert layer["rate after"] < layer["rate before"]


def test_logits_of_dilution_are_those_of_the_definition(example):
    dilution = example("dilution")
    W = np.random.default_rng(0).standard_normal((3, 7, 5))
    X = W**2
    for temperature, normalize, decay in ((1.0, "sum", 1.0), (0.3, "mean", 1.0), (2.0, "sum", 0.7)):
        found = dilution.logits(W, temperature, normalize, decay)
        for t in range(7):
            ages = decay ** np.arange(t, -1, -1.0)
            seen = np.einsum("s,hsd->hd", ages, X[:, : t + 1])
            score = (X[:, t] / seen).sum(-1) * (ages.sum() if normalize == "mean" else 1.0)
            np.testing.assert_allclose(found[:, t], temperature * score, rtol=1e-12)


def test_thirds_of_the_images_are_judged_once_and_never_learned(example):
    recipe = example("_recipe")
    parts = [recipe.digits(seed) for seed in range(3)]
    assert sum(len(judged.labels) for _, judged in parts) == 1797
    for learned, judged in parts:
        assert len(learned.labels) + len(judged.labels) == 1797
        assert learned.images.shape[1:] == (8, 8)
        assert learned.images.min() == -1
        assert learned.images.max() == 1
        assert np.bincount(judged.labels.numpy(), minlength=10).min() > 40
    everything = torch.cat([judged.images for _, judged in parts]).flatten(1)
    assert torch.equal(everything.sum(0), torch.cat([part.images for part in parts[1]]).flatten(1).sum(0))


def test_images_lie_whole_at_all_places_of_a_canvas(example):
    recipe = example("_recipe")
    images = torch.arange(1.0, 7.0).view(1, 2, 3)[:, :, :2].expand(200, 2, 2)
    canvases = recipe.placed(images, 4, torch.Generator().manual_seed(0))
    assert canvases.shape == (200, 4, 4)
    found = set()
    for canvas in canvases.numpy():
        rows, columns = np.nonzero(canvas != -1)
        found.add((rows.min(), columns.min()))
        np.testing.assert_array_equal(canvas[rows.min() :, columns.min() :][:2, :2], images[0].numpy())
        assert len(rows) == 4
    assert found == {(i, j) for i in range(3) for j in range(3)}
    assert torch.equal(recipe.placed(images, 2, torch.Generator()), images)


def test_softmax_over_some_keys_is_softmax_with_the_others_masked(vit):
    mixer = vit.Softmax(12, heads=3, choose="leverage", share=0.5)
    x = torch.randn(2, 10, 12)
    Q, K, V = mixer.project(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4).detach().double()
    scores = torch.einsum("bhnd,bhdn->bhn", K, torch.linalg.pinv(K))  # the diagonal of the projection to the columns
    kept = scores >= scores.topk(5).values[..., -1:]
    weights = (Q @ K.mT / 2).masked_fill(~kept[:, :, None, :], -np.inf).softmax(-1)
    expected = mixer.out((weights @ V).transpose(1, 2).flatten(-2).float())
    torch.testing.assert_close(mixer(x), expected, rtol=1e-4, atol=1e-5)


def test_random_keys_are_as_many_and_others_each_time(vit):
    mixer = vit.Softmax(12, heads=3, choose="random", share=0.25)
    K = torch.randn(2, 3, 40, 4)
    one, other = mixer.chosen(K), mixer.chosen(K)
    assert one.shape == (2, 3, 10)
    assert not torch.equal(one, other)
    assert all(len(set(row.tolist())) == 10 for row in one.flatten(0, 1))


@pytest.mark.thorough
def test_transformers_of_one_shape_have_equally_many_parameters_and_all_learn(vit):
    shape = vit.Shape(dim=16, depth=2, heads=4, hidden=24)
    sizes = []
    for name in vit.MIXERS:
        model = vit.Transformer(name, shape)
        sizes.append(vit.parameters(model))
        model(torch.randn(3, 8, 8)).square().sum().backward()
        learned = [p for path, p in model.named_parameters() if name != "nothing" or "norms.0" not in path]
        assert all(p.grad is not None and p.grad.isfinite().all() for p in learned), name
    assert max(sizes) - min(sizes) < shape.depth * (2 * shape.dim + 1)


def test_only_without_a_mixer_does_a_token_see_nothing_of_the_others(vit):
    shape = vit.Shape(dim=16, depth=1, heads=4, hidden=24)
    x = torch.randn(1, 9, 16)
    changed = x.clone()
    changed[:, 0] *= 2
    for name in vit.MIXERS:
        if name != "random keys":
            mixer = vit.mixer_of(name, shape)
            with torch.no_grad():
                assert torch.equal(mixer(x)[:, 1:], mixer(changed)[:, 1:]) == (name == "nothing"), name


def test_layers_of_the_pictures_are_those_of_the_definition(example, vit):
    maps = example("maps")
    shape = vit.Shape(dim=16, depth=1, heads=4, hidden=24)
    model, images = vit.Transformer("tssa tied", shape), torch.randn(2, 8, 8)
    (layer,) = maps.layers(model, images)
    Z = model.blocks[0].norms[0](model.tokens(images)).detach().double()
    U = model.blocks[0].mixer.project.weight.detach().double()
    W = (Z @ U.mT).unflatten(-1, (4, -1)).transpose(1, 2).numpy()
    for i, w in enumerate(W):
        Y, P = naive.token_statistics(w, np.ones(4), causal=False)[:2]
        np.testing.assert_allclose(layer.members[i], P, rtol=1e-4)
        left = np.linalg.norm(w + Y, axis=(0, 2)) / np.linalg.norm(w, axis=(0, 2))
        np.testing.assert_allclose(layer.left[i], left, rtol=1e-4)
        for tokens, rate in ((w, layer.before[i]), (None, layer.after[i])):
            if tokens is None:
                Z_after = Z[i] + torch.from_numpy(Y.transpose(1, 0, 2).reshape(64, 16)) @ U
                tokens = (Z_after @ U.mT).unflatten(-1, (4, -1)).transpose(0, 1).numpy()
            moments = (P[..., None] * tokens**2).sum(1) / P.sum(1)[:, None]
            expected = (P.sum(1) / 128 * np.log1p(moments).sum(1)).sum()
            np.testing.assert_allclose(rate, expected, rtol=1e-4)
