"""Operators and layers times torch's transformations: the table, what each cell does, and the page about them.

A cell has the same value and gradient as the plain call, or raises one of `REFUSALS`, which name the way out.
``python -m tests.transformations`` runs all cells and writes the page; `tests/nn/test_transformations.py` compares.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from latent_calls import macchiato, window_attention
from levattn.attention import (
    Selection,
    TokenForm,
    Window,
    causal_conv,
    causal_pruned_attention,
    latte,
    pruned_attention,
    rates,
    repeated_mass,
    rg_lru,
    rotate_values,
)
from levattn.nn import RGLRU, CausalConv, Latte, LevAttention, Macchiato, TokenStatistics, set_dense
from token_calls import memberships, tssa

PAGE = Path(__file__).parents[1] / "docs" / "torch_transformations.md"
T = -1  # the axis of positions in a shape
C, RANKS = 12, 2
LENGTHS = (19, 20, 21, 22, 23, 24, 25, 26, 27, 29, 30, 40)  # beyond windows and budgets
WORKS, NOTHING = "works", "–"
REFUSALS: dict[str, tuple[type[Exception], str, str]] = {
    "reads": (
        NotImplementedError,
        r"was called under .*expected a call without it, on tensors that hold numbers",
        "The call reads numbers, to select keys or to check them. Call it without the transformation. Its leading "
        "axes are a batch, in place of vmap.",
    ),
    "graph": (
        RuntimeError,
        r"compile without fullgraph=True",
        "Compile without `fullgraph=True`. Python runs this part between two graphs.",
    ),
    "scores": (
        NotImplementedError,
        r"membership is 'leverage' under",
        "Give your own scores as membership, or another membership.",
    ),
    "once": (
        RuntimeError,
        r"first derivatives only|once_differentiable|derivative for .*attention.*is not implemented",
        "There are first derivatives only. Leave out `create_graph=True`. Without a softcap, windows have second "
        "derivatives inside `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.",
    ),
    "tied": (
        ValueError,
        r"expected both together: fully_shard\(layer\)",
        "A tied output reads the weight of `project` again. Shard the layer as a whole, `fully_shard(layer)`, and not "
        "its parts.",
    ),
    "cache": (
        ValueError,
        r"cache was given within a backward pass",
        "A checkpoint calls the layer again, which would advance the cache twice. Call it with its cache outside.",
    ),
}


@dataclass(frozen=True)
class Row:
    """An operator or a layer: how it is made as a module, and the shapes of one item of its inputs."""

    make: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...] = ((T, C),)
    has_mask: bool = True
    has_gradient: bool = True
    has_cache: bool = False
    own: bool = False  # a layer, not an operator
    has_rows: bool = True  # positions may be absent
    has_constants: bool = False  # gradients leave out weights that depend on the inputs

    def module(self, dtype: Any = torch.float64) -> Any:
        torch.manual_seed(0)
        return self.make().to(dtype)

    def inputs(self, length: int, batch: int = 2, *, seed: int = 0, dtype: Any = torch.float64) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        sizes = [[batch, *(length if size == T else size for size in shape)] for shape in self.shapes]
        return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]

    def places(self, length: Any) -> tuple[dict[int, Any], ...]:
        """The axes of the inputs that are positions."""
        return tuple({shape.index(T) + 1: length} for shape in self.shapes)


class Applied(torch.nn.Module):
    """An operator as a module: arrays without positions are parameters, and a factor of the first input is one."""

    def __init__(self, run: Callable[..., Any], weights: tuple[tuple[int, ...], ...] = (), *, heads: bool = False):
        super().__init__()
        self.run, self.heads = run, heads
        self.factor = torch.nn.Parameter(torch.full((1,), 0.75))
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in weights])

    def forward(self, x: Any, *others: Any, mask: Any = None) -> Any:
        given = {} if mask is None else {"mask": mask[..., None, :] if self.heads else mask}
        return self.run(self.factor * x, *others, *self.weights, **given)


class First(torch.nn.Module):
    """A memory without its state."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Any, mask: Any = None) -> Any:
        return self.memory(x, mask=mask)[0]


def _rotated(V: Any) -> Any:
    return rotate_values(V, torch.arange(V.shape[-2], device=V.device))


def _tssa(W: Any, bias: Any, temperature: Any, **options: Any) -> Any:
    return tssa(W, temperature, bias=bias, **options)


def _pruned(Q: Any, K: Any, V: Any, selection: Any, **options: Any) -> Any:
    return pruned_attention(Q, K, V, selection, **options)


def _pruned_causal(Q: Any, K: Any, V: Any, **options: Any) -> Any:
    return causal_pruned_attention(Q, K, V, Selection(4, renew_every=2), **options)


def _dense() -> Any:
    layer = LevAttention(C, 8, heads=3)
    set_dense(layer)
    return layer


def _of_groups(function: Any, Z: Any, P: Any, *others: Any, **options: Any) -> Any:
    return function(Z, torch.softmax(P.double(), -1), *others, 0.5, **options)


def _repeated(Q: Any, K: Any, gate: Any, **options: Any) -> Any:
    return repeated_mass(Q, K, gate, window=4, **options)


def _coded(Z: Any, **options: Any) -> Any:
    return rates.coding_rate(Z, 0.5, **options)


def _largest(U: Any) -> Any:
    return rates.largest_step(U, 0.5)


def _operators() -> dict[str, Row]:
    latent, window = ((T, 3), (T, 3), (T, 2)), ((2, T, 4), (1, T, 4), (1, T, 2))
    mixture = ((2, T, 4), (1, T, 4), (1, T, 3), (2, T, 4), (2, T, 4), (2, T))
    tokens, pruned, groups = ((3, T, 2), (3, T)), ((4, T, 5), (2, T, 5), (2, T, 3)), ((T, 3), (T, 2))

    def of(run: Any, shapes: Any, *weights: Any, heads: bool = False, **more: Any) -> Row:
        return Row(partial(Applied, run, weights, heads=heads), shapes, **more)

    by_leverage = Selection(8, scores="leverage")
    return {
        "latte": of(latte, latent),
        "latte(causal=False)": of(partial(latte, causal=False), latent),
        "window_attention": of(partial(window_attention, window=6), window, heads=True),
        "window_attention(Window(6, softcap=…))": of(
            partial(window_attention, window=6, softcap=1.5), window, heads=True
        ),
        "macchiato": of(partial(macchiato, window=6), mixture, heads=True),
        "macchiato(window=Window(6, overlap='exclusive'))": of(
            partial(macchiato, window=6, overlap="exclusive"), mixture, heads=True
        ),
        "rg_lru": of(rg_lru, ((T, 4),) * 3, (4,)),
        "causal_conv": of(causal_conv, ((T, 4),), (4, 3), (4,)),
        "rotate_values": of(_rotated, ((T, 4),), has_mask=False),
        "tssa": of(_tssa, tokens, (3,)),
        "tssa(causal=False)": of(partial(_tssa, causal=False), tokens, (3,)),
        "tssa(form='leverage')": of(partial(_tssa, causal=False, membership="leverage"), tokens, (3,)),
        "memberships": of(memberships, ((3, T, 2),), has_gradient=False),
        "repeated_mass": of(_repeated, ((T, 3), (T, 3), (T,)), has_gradient=False),
        "pruned_attention": of(partial(_pruned, selection=8), pruned, heads=True, has_constants=True),
        "pruned_attention(Selection(scores='leverage'))": of(
            partial(_pruned, selection=by_leverage), pruned, heads=True, has_constants=True
        ),
        "causal_pruned_attention": of(_pruned_causal, pruned, heads=True, has_constants=True),
        "rates.coding_rate": of(_coded, groups[:1]),
        "rates.compression_rate": of(partial(_of_groups, rates.compression_rate), groups),
        "rates.variational_rate": of(partial(_of_groups, rates.variational_rate), groups, (2, 3, 2)),
        "rates.rate_reduction": of(partial(_of_groups, rates.rate_reduction), groups),
        "rates.head_rate": of(rates.head_rate, ((2, T, 3),)),
        "rates.descent_step": of(partial(_of_groups, partial(rates.descent_step, step=0.01)), groups, (2, 3, 2)),
        "rates.largest_step": of(_largest, ((2, 3, T),), has_mask=False, has_rows=False),
    }


def _layers() -> dict[str, Row]:
    def of(make: Any, *, cached: bool = True, **options: Any) -> Row:
        few = make is LevAttention
        return Row(partial(make, C, heads=3, **options), has_cache=cached, own=True, has_constants=few)

    return {
        "nn.Latte": of(Latte, latents=5),
        "nn.Latte(causal=False)": of(Latte, cached=False, latents=5, causal=False),
        "nn.Latte(feature='conv')": of(Latte, latents=5, feature="conv"),
        "nn.Latte(feature='rg_lru', vapor=True)": of(Latte, latents=5, feature="rg_lru", vapor=True),
        "nn.Macchiato": of(Macchiato, latents=5, window=6, kv_heads=1),
        "nn.Macchiato(window=Window(6, overlap='exclusive'))": of(
            Macchiato, latents=5, window=Window(6, overlap="exclusive"), vapor=True
        ),
        "nn.TokenStatistics": of(TokenStatistics, cached=False),
        "nn.TokenStatistics(causal=True)": of(TokenStatistics, causal=True, form=TokenForm(normalize="mean")),
        "nn.TokenStatistics(positions=…)": of(TokenStatistics, causal=True, positions=5000),
        "nn.TokenStatistics(output='tied')": of(TokenStatistics, causal=True, output="tied"),
        "nn.TokenStatistics('leverage')": of(TokenStatistics, cached=False, form="leverage"),
        "nn.LevAttention": of(LevAttention, cached=False, selection=8),
        "nn.LevAttention(causal=True)": of(LevAttention, causal=True, selection=Selection(4, renew_every=2)),
        "set_dense(nn.LevAttention)": Row(_dense, own=True),
        "nn.CausalConv": Row(lambda: First(CausalConv(C)), own=True),
        "nn.RGLRU": Row(lambda: First(RGLRU(C)), own=True),
    }


ROWS: dict[str, Row] = _operators() | _layers()


# -- what the plain call gives ------------------------------------------------------------------


def close(found: Any, expected: Any, atol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-7, equal_nan=False)


def loss_of(Y: Any) -> Any:
    """A number whose gradient differs from entry to entry."""
    weights = torch.linspace(0.5, 1.5, Y.numel(), dtype=Y.dtype, device=Y.device)
    return (Y.square().flatten() * weights).sum() + Y.sum()


def gradients(row: Row, module: Any, call: Callable[..., Any], inputs: list[Any]) -> tuple[Any, list[Any]]:
    """The output of a call of a module, and the gradients of its inputs and parameters."""
    if not row.has_gradient:
        return call(*inputs).detach(), []
    leaves = [x.clone().requires_grad_() for x in inputs]
    module.zero_grad()
    Y = call(*leaves)
    loss_of(Y).backward()
    learned = [*leaves, *module.parameters()]
    return Y.detach(), [torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in learned]


def compare(row: Row, module: Any, call: Callable[..., Any], inputs: list[Any], atol: float = 1e-9) -> None:
    """Compare a call with the plain one, in value and gradient."""
    (Y, found), (expected, true) = (gradients(row, module, f, inputs) for f in (call, module))
    close(Y, expected, atol)
    close(found, true, atol)


# -- columns ------------------------------------------------------------------------------------


def _compiled(row: Row, lengths: tuple[int, ...], **options: Any) -> int:
    """Compile, compare over some lengths, and return the number of graphs."""
    torch._dynamo.reset()
    module, count = row.module(), [0]

    def backend(graph: Any, _: Any) -> Any:
        count[0] += 1
        return graph

    fast = torch.compile(module, backend=backend, **options)
    try:
        for length in lengths[:-1]:
            inputs = [x.requires_grad_(row.has_gradient) for x in row.inputs(length)]
            close(fast(*inputs), module(*inputs))
        compare(row, module, fast, row.inputs(lengths[-1]))
    finally:
        torch._dynamo.reset()
    return count[0]


def compiled(row: Row) -> None:
    try:
        count = _compiled(row, LENGTHS, fullgraph=True)
    except RuntimeError as error:
        if re.search(REFUSALS["graph"][1], str(error)):
            _compiled(row, LENGTHS[:3])  # the way out works
        raise
    assert count <= 2, f"{count} graphs for {len(LENGTHS)} lengths"


def compiled_dynamic(row: Row) -> None:
    assert _compiled(row, LENGTHS[1:6], fullgraph=True, dynamic=True) == 1


def exported(row: Row) -> None:
    module = row.module().eval()
    length = torch.export.Dim("T", min=LENGTHS[0] - 1, max=4096)
    # expressions of the numbers of blocks become assertions of the exported program
    options = {"strict": False, "prefer_deferred_runtime_asserts_over_guards": True}
    shapes = row.places(length)
    shapes = {"x": shapes[0], "others": shapes[1:]} if len(shapes) > 1 else {"x": shapes[0]}
    program = torch.export.export(module, tuple(row.inputs(LENGTHS[0])), dynamic_shapes=shapes, **options)
    for size in (LENGTHS[1], 32, LENGTHS[-1]):
        inputs = row.inputs(size)
        close(program.module()(*inputs), module(*inputs))


def traced(row: Row) -> None:
    module = row.module()
    inputs = row.inputs(9)
    program = torch.jit.trace(module, tuple(inputs), check_trace=False)
    compare(row, module, program, row.inputs(9, seed=1))


def mapped(row: Row) -> None:
    module = row.module()
    inputs = [x.unflatten(0, (3, 1)) for x in row.inputs(11, 3)]
    close(torch.func.vmap(module)(*inputs), torch.stack([module(*each) for each in zip(*inputs, strict=True)]))
    if row.has_mask:
        mask = torch.arange(11) < torch.tensor([11, 7, 4])[:, None, None]
        found = torch.func.vmap(lambda m, *x: module(*x, mask=m))(mask, *inputs)
        each = [module(*x, mask=m) for m, *x in zip(mask, *inputs, strict=True)]
        close(found, torch.stack(each))
        found = torch.func.vmap(lambda *x: module(*x, mask=mask[1]))(*inputs)
        close(found, torch.stack([module(*x, mask=mask[1]) for x in zip(*inputs, strict=True)]))


def functional_gradient(row: Row) -> None:
    module, inputs = row.module(), row.inputs(11)
    parameters = dict(module.named_parameters())

    def loss(parameters: Any, inputs: Any) -> Any:
        return loss_of(torch.func.functional_call(module, parameters, tuple(inputs)))

    of_parameters, of_inputs = torch.func.grad(loss, argnums=(0, 1))(parameters, inputs)
    close([*of_inputs, *of_parameters.values()], gradients(row, module, module, inputs)[1])
    if not row.has_mask:
        return
    mask = torch.arange(11) < torch.tensor([11, 7])[:, None]
    true = gradients(row, module, partial(module, mask=mask), inputs)[1][0]

    def masked(x: Any, mask: Any, *, follows: bool = True) -> Any:
        """With a mask that torch.func has wrapped as an argument, or that comes from a wrapped tensor."""
        there = mask & (x.flatten(1)[:, :1] > -torch.inf)
        given = x if follows else inputs[0]
        return loss_of(module(given, *inputs[1:], mask=mask)) + loss_of(module(given, *inputs[1:], mask=there))

    close(torch.func.grad(masked)(inputs[0], mask), 2 * true)
    assert not torch.func.grad(partial(masked, follows=False))(inputs[0], mask).any()


def forward_mode(row: Row) -> None:
    module, inputs = row.module(), row.inputs(11)
    along = row.inputs(11, seed=5)
    _, found = torch.func.jvp(lambda *x: loss_of(module(*x)), tuple(inputs), tuple(along))
    true = gradients(row, module, module, inputs)[1]
    close(found, sum((one * other).sum() for one, other in zip(true, along, strict=False)))


def twice(row: Row) -> None:
    module = row.module()
    inputs = [x.requires_grad_() for x in row.inputs(9)]

    def first() -> Any:
        return torch.autograd.grad(loss_of(module(*inputs)), inputs[0], create_graph=True)[0]

    along = row.inputs(9, seed=3)[0]
    (second,) = torch.autograd.grad((first() * along).sum(), inputs[0])
    if row.has_constants:
        assert second.isfinite().all()
        return
    ends = []
    for step in (1e-5, -1e-5):
        inputs[0] = (inputs[0].detach() + step * along).requires_grad_()
        ends.append(torch.autograd.grad(loss_of(module(*inputs)), inputs[0])[0])
        inputs[0] = (inputs[0].detach() - step * along).requires_grad_()
    close((second * along).sum(), ((ends[0] - ends[1]) * along).sum() / 2e-5, 1e-4 * (1 + float(second.abs().max())))


def checkpointed(row: Row) -> None:
    module = row.module()
    for reentrant in (True, False):
        compare(row, module, partial(checkpoint, module, use_reentrant=reentrant), row.inputs(11))


def checkpointed_with_cache(row: Row) -> None:
    for reentrant in (False, True):
        module, x = row.module(), row.inputs(11)[0].requires_grad_()
        cache = module.new_cache()
        Y = checkpoint(lambda x, m=module, c=cache: m(x, cache=c), x, use_reentrant=reentrant)
        Y.sum().backward()


def without_numbers(row: Row) -> None:
    shape = row.module()(*row.inputs(11)).shape
    with torch.device("meta"):
        module = row.make()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    inputs = [x.to("meta") for x in row.inputs(11, dtype=torch.float32)]
    assert module(*inputs).shape == shape


def fake(row: Row) -> None:
    shape = row.module()(*row.inputs(11)).shape
    with FakeTensorMode():
        module = row.make()
        inputs = [torch.empty(x.shape) for x in row.inputs(11)]
        assert module(*inputs).shape == shape


def half_by_autocast(row: Row) -> None:
    module = row.module(torch.float32)
    inputs = row.inputs(11, dtype=torch.float32)
    expected = module(*inputs)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        Y = module(*leaves)
    close(Y.double(), expected.double(), 0.1 * float(expected.detach().abs().max()) + 0.02)
    if row.has_gradient:
        Y.float().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


def after_inference(row: Row) -> None:
    module = row.module()
    cache = module.new_cache() if row.has_cache else None
    with torch.inference_mode():
        inputs = row.inputs(11)
        first = module(*inputs) if cache is None else module(*inputs, cache=cache)
    close(first.clone(), module(*row.inputs(11)))
    if cache is None:
        compare(row, module, module, row.inputs(11, seed=2))
        return
    beside = module.new_cache()
    module(*row.inputs(11), cache=beside)
    caches = iter([cache, beside])
    (Y, found), (expected, true) = (
        gradients(row, module, lambda *x: module(*x, cache=next(caches)), row.inputs(5, seed=2)) for _ in range(2)
    )
    close(Y, expected)
    close(found, true)


def copied(row: Row) -> None:
    module = row.module()
    inputs = row.inputs(11)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        close(other(*inputs), module(*inputs))
    if row.has_cache:
        cache = module.new_cache()
        module(*inputs, cache=cache)
        others = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        expected = module(*inputs, cache=cache)
        for other in others:
            close(module(*inputs, cache=other), expected)


def saved(row: Row) -> None:
    """Weights go through `torch.save` and a module that was made on the device meta."""
    module, file = row.module(), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        other = row.make()
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    inputs = row.inputs(11)
    close(other(*inputs), module(*inputs))


def quantized(row: Row) -> None:
    module = row.module(torch.float32)
    inputs = row.inputs(11, dtype=torch.float32)
    expected = module(*inputs).detach()
    other = torch.ao.quantization.quantize_dynamic(module, {torch.nn.Linear})
    close(other(*inputs).double(), expected.double(), 0.2 * float(expected.abs().max()))


def released(row: Row) -> None:
    """Frameworks free the memory of parameters and inputs between uses."""
    module, inputs = row.module(), row.inputs(11)
    if row.has_gradient:
        loss_of(module(*(x.requires_grad_() for x in inputs))).backward()
    with torch.no_grad():
        module(*inputs, **({"mask": (mask := torch.ones(2, 11, dtype=torch.bool))} if row.has_mask else {}))
    held = [*module.parameters(), *inputs, *([mask] if row.has_mask else [])]
    for tensor in held:
        tensor.untyped_storage().resize_(0)


def without_rows(row: Row) -> None:
    module = row.module()
    for length, batch in ((0, 2), (5, 0)):
        module.zero_grad()
        Y = module(*(x.requires_grad_() for x in row.inputs(length, batch)))
        Y.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


# -- processes ----------------------------------------------------------------------------------


def with_fsdp(row: Row) -> None:
    from torch.distributed.fsdp import fully_shard

    plain, module = row.module(), row.module()
    if row.own:  # gathers again for each part, as users do
        for part in module.children():
            if any(True for _ in part.parameters()):
                fully_shard(part)
    fully_shard(module)
    for seed in (0, 1):  # the second step reads what was freed in the first
        inputs = row.inputs(11, seed=seed)
        for each in (plain, module):
            each.zero_grad()
            loss_of(each(*inputs)).backward()
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            close(one.grad.full_tensor(), other.grad)


def with_empty_rank(row: Row) -> None:
    from torch.distributed import get_rank
    from torch.nn.parallel import DistributedDataParallel

    plain, module = row.module(), DistributedDataParallel(row.module())
    length = 0 if get_rank() else 11
    loss_of(plain(*row.inputs(11))).backward()
    loss_of(module(*row.inputs(length))).backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        close(one.grad, other.grad / RANKS)


@dataclass(frozen=True)
class Column:
    """A transformation: what it runs, the title of its cells, and the rows that it is for."""

    run: Callable[[Row], None]
    table: str
    text: str
    needs: Callable[[Row], bool] = lambda _: True
    slow: bool = False
    ranks: bool = False


def _followed(row: Row) -> bool:
    return row.has_gradient


_COMPILER, _GRADIENTS = "Compilers and tensors without numbers", "Derivatives"
_TRAINING, _MODULES = "Training", "Copies and memory"
COLUMNS: dict[str, Column] = {
    "compile": Column(
        compiled, _COMPILER, "`torch.compile(fullgraph=True)`, at most two graphs for twelve lengths", slow=True
    ),
    "dynamic": Column(compiled_dynamic, _COMPILER, "the same with `dynamic=True`, one graph", slow=True),
    "export": Column(
        exported,
        _COMPILER,
        "`torch.export` with a dynamic length, with `prefer_deferred_runtime_asserts_over_guards=True` and, for a "
        "window, lengths above it",
        slow=True,
    ),
    "jit.trace": Column(traced, _COMPILER, "`torch.jit.trace`, for one length"),
    "meta": Column(without_numbers, _COMPILER, "made and called under `torch.device('meta')`"),
    "fake": Column(fake, _COMPILER, "made and called under `FakeTensorMode`"),
    "vmap": Column(mapped, _GRADIENTS, "`torch.func.vmap`, also of a mask, or beside one"),
    "func.grad": Column(
        functional_gradient,
        _GRADIENTS,
        "`torch.func.grad` of inputs and parameters, also with a mask that is made within",
        _followed,
    ),
    "func.jvp": Column(forward_mode, _GRADIENTS, "`torch.func.jvp` of inputs", _followed),
    "twice": Column(
        twice,
        _GRADIENTS,
        "`create_graph=True`, and a second derivative, in which selections stay constants",
        _followed,
    ),
    "checkpoint": Column(checkpointed, _TRAINING, "`torch.utils.checkpoint`, reentrant and not", _followed),
    "with a cache": Column(
        checkpointed_with_cache, _TRAINING, "the same around a call with a cache", lambda row: row.has_cache
    ),
    "FSDP2": Column(with_fsdp, _TRAINING, "`fully_shard` on two processes", _followed, ranks=True),
    "DDP": Column(
        with_empty_rank,
        _TRAINING,
        "`DistributedDataParallel` on two processes, one of them with no positions",
        lambda row: row.has_gradient and row.has_rows,
        ranks=True,
    ),
    "autocast": Column(half_by_autocast, _TRAINING, "`torch.autocast` to bfloat16"),
    "inference": Column(
        after_inference, _TRAINING, "a call, or a filled cache, under `torch.inference_mode`, then a gradient"
    ),
    "no rows": Column(
        without_rows,
        _TRAINING,
        "no positions, and no sequences: zero gradients",
        lambda row: row.has_gradient and row.has_rows,
    ),
    "copies": Column(copied, _MODULES, "`copy.deepcopy` and `pickle`, also of caches", lambda row: row.own),
    "saved": Column(saved, _MODULES, "`torch.save`, then loaded into a layer made on meta", lambda row: row.own),
    "quantized": Column(quantized, _MODULES, "`quantize_dynamic` of linear maps", lambda row: row.own),
    "released": Column(released, _MODULES, "storages of parameters and inputs can be freed after the call"),
}


# -- running cells, and the page ----------------------------------------------------------------


@contextmanager
def quiet() -> Any:
    """No warnings of torch about what it means to drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(row: str, column: str) -> str:
    """`WORKS`, `NOTHING` where the transformation does not apply, or a name of `REFUSALS`; raise for other errors."""
    if not COLUMNS[column].needs(ROWS[row]):
        return NOTHING
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with quiet():
            COLUMNS[column].run(ROWS[row])
    except Exception as error:
        for name, (kind, pattern, _) in REFUSALS.items():
            if isinstance(error, kind) and re.search(pattern, str(error), re.DOTALL):
                return name
        raise
    finally:
        torch.set_num_threads(threads)
    return WORKS


def _on_rank(rank: int, file: str, rows: list[str], names: list[str]) -> None:
    """Run the cells of some rows on a rank of a group, and leave what it found beside `file`."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    found = {}
    for row in rows:
        for name in names:
            try:
                found[f"{row}|{name}"] = outcome(row, name)
            except Exception as error:
                found[f"{row}|{name}"] = f"{type(error).__name__}: {error}"
    Path(f"{file}.{rank}").write_bytes(pickle.dumps(found))
    gc.collect()  # sharded modules are cycles that hold the group, whose threads must end before the process does
    dist.destroy_process_group()


def of_ranks(rows: list[str]) -> dict[str, str]:
    """What the cells of several processes are for some rows, by "row|column"; of all ranks if they differ."""
    import torch.multiprocessing as processes

    names = [name for name, column in COLUMNS.items() if column.ranks]
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/store"
        processes.spawn(_on_rank, (file, rows, names), RANKS)
        each = [pickle.loads(Path(f"{file}.{rank}").read_bytes()) for rank in range(RANKS)]
    return {cell: " | ".join(dict.fromkeys(found[cell] for found in each)) for cell in each[0]}


def cells() -> dict[str, str]:
    """All cells, by "row|column"."""
    found = of_ranks(list(ROWS))
    for row in ROWS:
        for name, column in COLUMNS.items():
            if not column.ranks:
                found[f"{row}|{name}"] = outcome(row, name)
    return found


_INTRODUCTION = """# torch's transformations

This page says for each operator and each layer whether it works under torch's transformations, on a CPU. "yes" stands
for the value and the gradient of the plain call. A letter stands for an error that names [the way out](#ways-out). A
dash stands for a transformation that does not apply.

`python -m tests.transformations` runs every cell and writes this page. The tests compare the page with the cells.
"""


def page(found: dict[str, str]) -> str:
    """The page of the documentation about some cells."""
    letters = dict(zip(REFUSALS, "abcdefgh", strict=False))
    shown = {WORKS: "yes", NOTHING: NOTHING} | letters
    parts = [_INTRODUCTION]
    for table in dict.fromkeys(column.table for column in COLUMNS.values()):
        names = [name for name, column in COLUMNS.items() if column.table == table]
        parts.append(f"## {table}\n")
        parts.append("\n".join(f"- **{name}**: {COLUMNS[name].text}." for name in names) + "\n")
        lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
        lines += [f"| `{row}` | " + " | ".join(shown[found[f"{row}|{name}"]] for name in names) + " |" for row in ROWS]
        parts.append("\n".join(lines) + "\n")
    parts.append("## Ways out\n")
    parts.append("\n".join(f"- **{letters[name]}**: {text}" for name, (_, _, text) in REFUSALS.items()) + "\n")
    parts.append(
        "`torch.jit.script` reads the source of a layer and knows too little of Python for it. Use `torch.export`.\n"
    )
    return "\n".join(parts)


def read_page(text: str) -> dict[str, str]:
    """The cells of a page, by "row|column"."""
    letters = dict(zip("abcdefgh", REFUSALS, strict=False))
    meant = {"yes": WORKS, NOTHING: NOTHING} | letters
    found, names = {}, []
    for line in text.splitlines():
        if not line.startswith("|"):
            names = []
        elif not names:
            names = [part.strip() for part in line.strip("|").split("|")][1:]
        elif not line.startswith("| ---"):
            row, *values = (part.strip() for part in line.strip("|").split("|"))
            found |= {f"{row.strip('`')}|{name}": meant[value] for name, value in zip(names, values, strict=True)}
    return found


if __name__ == "__main__":
    PAGE.write_text(page(cells()), encoding="utf-8")
