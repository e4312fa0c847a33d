"""Vision transformers of timm with attention to few patches: what is computed, what is put back, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
timm = pytest.importorskip("timm")

from timm.layers import Attention  # noqa: E402

from levattn.attention import Selection, causal_pruned_attention, pruned_attention  # noqa: E402
from levattn.integrations.timm import LevAttention, Pruning, kept_patches, prune  # noqa: E402
from levattn.nn import set_dense  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **options}).eval()


def images(B: int = 2, side: int = 32) -> Any:
    return torch.randn(B, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True}, {"scale_norm": True}, {"reg_tokens": 2}, {"class_token": False}], ids=str
)
def test_all_keys_are_what_timm_computes(options: Any) -> None:
    if "class_token" in options:
        options = options | {"global_pool": "avg"}
    model = vit(**{name: value for name, value in options.items() if name != "scale_norm"})
    if "scale_norm" in options:
        for block in model.blocks:
            block.attn = Attention(24, 2, scale_norm=True, norm_layer=torch.nn.LayerNorm).eval()
    X = images()
    expected = model(X)
    pruning = prune(model, 1.0)
    np.testing.assert_allclose(model(X).detach(), expected.detach(), atol=1e-5)
    set_dense(model)
    np.testing.assert_allclose(model(X).detach(), expected.detach(), atol=1e-5)
    assert pruning.layers == ("blocks.0.attn", "blocks.1.attn")


def test_a_layer_is_pruned_attention_of_its_projections() -> None:
    model = vit()
    prune(model, Selection(size=4, summaries=3, sinks=0, scores="expected"))
    layer, X = model.blocks[0].attn, torch.randn(2, 65, 24)
    Q, K, V = layer.qkv(X).reshape(2, 65, 3, 2, 12).permute(2, 0, 3, 1, 4)
    Y = pruned_attention(Q, K, V, Selection(size=4, summaries=3, scores="expected"))
    torch.testing.assert_close(layer(X), layer.proj(Y.transpose(1, 2).reshape(2, 65, 24)))
    causal = causal_pruned_attention(Q, K, V, Selection(size=4, summaries=3, scores="expected"))
    torch.testing.assert_close(layer(X, is_causal=True), layer.proj(causal.transpose(1, 2).reshape(2, 65, 24)))


def test_pruning_is_put_back_to_the_bit() -> None:
    model, X = vit(), images()
    names, dense = list(model.state_dict()), model(X)
    with prune(model, 0.25, layers=[1]) as pruning:
        assert isinstance(pruning, Pruning)
        assert pruning.layers == ("blocks.1.attn",)
        assert type(model.blocks[0].attn) is Attention
        few = model(X)
        assert list(model.state_dict()) == names
        other = copy.deepcopy(model)
        torch.testing.assert_close(other(X), few)
    assert not torch.equal(few, dense)
    assert torch.equal(model(X), dense)
    assert pruning.layers == ()
    pruning.remove()
    assert [type(block.attn) for block in model.blocks] == [Attention] * 2
    assert not {"options", "dense"} & vars(model.blocks[1].attn).keys()


def test_models_are_made_and_trained_with_few_keys() -> None:
    few = LevAttention.of(Selection(size=6, sinks=1, scores="leverage"))
    model = vit(attn_layer=few).train()
    dense = vit()
    model.load_state_dict(dense.state_dict())
    dense.load_state_dict(model.state_dict())
    assert {type(block.attn) for block in model.blocks} == {few}
    X, labels = images(8), torch.arange(8) % 5
    set_dense(model)
    np.testing.assert_allclose(model(X).detach(), dense(X).detach(), atol=1e-5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(12):
        set_dense(model, step < 2)
        loss = torch.nn.functional.cross_entropy(model(X), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_kept_patches_lie_on_the_grid() -> None:
    model = vit(reg_tokens=2, dynamic_img_size=True)
    prune(model, Selection(size=7, scores="leverage"), layers=[1])
    for side, grid in ((32, (8, 8)), (48, (12, 12))):
        X = images(3, side)
        kept = kept_patches(model, X)
        assert kept.shape == (1, 3, 2, *grid)
        assert kept.dtype == np.bool_
        np.testing.assert_array_equal(kept.sum(axis=(3, 4)), 7)  # beside the class token and the registers
        tokens: list[Any] = []
        hook = model.blocks[1].attn.qkv.register_forward_hook(lambda _, __, Y, tokens=tokens: tokens.append(Y))
        model(X)
        hook.remove()
        K = tokens[0].detach().reshape(3, -1, 3, 2, 12)[:, :, 1].transpose(1, 2)
        K = K - K.mean(2, keepdim=True)
        scores = (K @ torch.linalg.pinv(K.mT @ K) * K).sum(-1)[..., 3:]
        best = scores.topk(7, dim=-1).indices.sort().values
        np.testing.assert_array_equal(kept.reshape(3, 2, -1).nonzero()[2].reshape(3, 2, 7), best)
    set_dense(model)
    assert kept_patches(model, images()).all()


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "beit_base_patch16_224", "swin_tiny_patch4_window7_224"])
def test_other_attention_is_refused_by_name(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=r"layers of timm\.models\.\w+\.\w*Attention; expected timm.layers.Attention"):
        prune(model, 0.5)


def test_what_cannot_be_honored_is_refused() -> None:
    model = vit()
    for selection, layers, error, message in (
        (Selection(), None, ValueError, "budget=None, size=None"),
        (2.0, None, ValueError, "budget is 2.0"),
        (Selection(size=3, renew_every=2), None, ValueError, "renew_every is 2, and the attention is not causal"),
        (Selection(size=3, scores=np.ones(3)), None, TypeError, "selection has an array of scores"),
        (Selection(size=3), [2], ValueError, r"layers is \[2\]; expected numbers of attention layers, from 0"),
    ):
        with pytest.raises(error, match=message):
            prune(model, selection, layers=layers)
        assert {type(block.attn) for block in model.blocks} == {Attention}
    with pytest.raises(TypeError, match="model is of type int"):
        prune(3, 0.5)
    with pytest.raises(ValueError, match="the model is a Linear with no attention layer"):
        prune(torch.nn.Linear(2, 2), 0.5)
    with pytest.raises(TypeError, match="LevAttention has no selection"):
        LevAttention(24)
    with pytest.raises(ValueError, match="without a pruned layer"):
        kept_patches(model, images())
    prune(model, 0.5)
    with pytest.raises(ValueError, match=r"blocks.0.attn of the model is pruned already"):
        prune(model, 0.5)
    layer = model.blocks[0].attn
    with pytest.raises(ValueError, match="attn_mask was given"):
        layer(torch.randn(1, 65, 24), torch.ones(65, 65, dtype=torch.bool))
    layer.attn_drop.p = 0.1
    layer(torch.randn(1, 65, 24))
    with pytest.raises(ValueError, match=r"attn_drop is 0\.1; expected 0 in training"):
        layer.train()(torch.randn(1, 65, 24))
