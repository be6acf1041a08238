"""Functions in the graph: activation checkpoints (in one another, reentrant, selective), autograd.Function, and operators on functions."""

import functools

import pytest
import torch
import torch.nn.functional as F
from batches import packed_tokens
from test_traps import FULL, LEFT, RIGHT, Decoder, run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dualkv_compile  # noqa: F401  registers the backend
from dualkv_compile.passes.errors import CannotDeduplicate
from dualkv_compile.passes.functions import AUTOGRAD_FUNCTION
from dualkv_compile.passes.trace import trace


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def packed(reports, batch, sites=1):
    found = [(r.attention_sites, r.attention_rewritten, r.packed_tokens) for r in reports]
    assert found == [(sites, sites, packed_tokens(batch["groups"]))]


# -- checkpoints ------------------------------------------------------------------------------------------------------------


def block(module, x):
    """Attention and MLP, once more."""
    b, s, _ = x.shape
    q, k, v = (y.view(b, s, module.heads, -1).transpose(1, 2) for y in module.qkv(module.norm1(x)).chunk(3, -1))
    return x + module.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1))


def nested(module, x, ids):
    def mlp(y):
        return checkpoint(lambda z: F.gelu(module.mlp(z)), module.norm2(y), use_reentrant=False)

    def layer(y):
        y = checkpoint(block, module, y.sin(), use_reentrant=False)
        return y + mlp(y) + checkpoint(torch.tanh, y, use_reentrant=False)

    return checkpoint(layer, x, use_reentrant=False)


def deep(module, x, ids):
    def wrap(function, depth):
        return function if not depth else lambda y: checkpoint(wrap(function, depth - 1), y * 1.5, use_reentrant=False) + y

    return wrap(lambda y: F.gelu(module.mlp(y)), 3)(x)


def without_gradient(module, x, ids):
    """Gradient mode changes in a checkpoint in a checkpoint."""

    def inner(y):
        with torch.no_grad():
            scale = module.mlp(y).norm(dim=-1, keepdim=True)
        return y / (1 + scale)

    return checkpoint(lambda y: checkpoint(inner, y.sin(), use_reentrant=False) * 2, x, use_reentrant=False)


@pytest.mark.parametrize("middle", [nested, deep, without_gradient])
def test_checkpoints_in_checkpoints(middle):
    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-12
    packed(reports, FULL, sites=2 if middle is nested else 1)
    assert not reports[0].barriers


@pytest.mark.parametrize("batch", [RIGHT, LEFT], ids=["right", "left"])
def test_checkpoints_in_checkpoints_with_padding(batch):
    worst, reports = run(Decoder(middle=deep), batch)
    assert worst < 1e-12
    packed(reports, batch)


def test_reentrant_checkpoint():
    """Compiled, it is the same operator; its input requires gradients here, so that the eager one gives the parameters theirs."""
    worst, reports = run(Decoder(middle=lambda m, x, ids: checkpoint(block, m, x, use_reentrant=True)), FULL)
    assert worst < 1e-12
    packed(reports, FULL, sites=2)


def test_nested_checkpoints_are_kept_in_the_graph(monkeypatch):
    """Each of the user's regions is a region of the graph that is compiled, in the same nesting."""
    import dualkv_compile.inner

    seen = []

    def depths(gm, depth=0):
        for node in gm.graph.nodes:
            if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                seen.append(depth)
                depths(getattr(gm, node.args[0].target), depth + 1)

    compile_graph = dualkv_compile.inner.compile_graph
    monkeypatch.setattr(dualkv_compile.inner, "compile_graph", lambda gm, *rest: (depths(gm), compile_graph(gm, *rest))[1])
    worst, _ = run(Decoder(middle=nested), FULL)
    assert worst < 1e-12 and sorted(seen) == [0, 1, 1, 1]


@pytest.mark.parametrize("policy_of", ["outer", "inner"])
def test_selective_checkpoint_with_another(policy_of):
    """A policy saves products; the other region saves nothing."""

    def policy(context, target, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if target is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    outer, inner = (contexts if policy_of == which else {} for which in ("outer", "inner"))

    def middle(module, x, ids):
        def layer(y):
            return module.mlp(checkpoint(lambda z: F.gelu(module.mlp(z)), y.sin(), use_reentrant=False, **inner))

        return checkpoint(layer, x, use_reentrant=False, **outer)

    worst, reports = run(Decoder(middle=middle), FULL)
    assert worst < 1e-12
    packed(reports, FULL)


# -- autograd.Function ------------------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rms = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rms)
        return x * rms * weight

    @staticmethod
    def backward(ctx, g):
        x, weight, rms = ctx.saved_tensors
        n = x * rms
        gw = g * weight
        return rms * (gw - n * (gw * n).mean(-1, keepdim=True)), (g * n).sum((0, 1)), None


class Clipped(torch.autograd.Function):
    """Its backward is not linear: clipping a sum is no sum of what is clipped."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.3, 0.3)


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.sign()


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm(dim=-1, keepdim=True) + 1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, g):
        return g


class RowMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0, keepdim=True)


class MixedGradient(torch.autograd.Function):
    """Token-wise forwards, not backwards."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g.cumsum(1)


class BothResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y + h, g * x + h.sum(-1, keepdim=True).expand_as(x)


class Centred(torch.autograd.Function):
    """Its backward hands every copy of a token a part of a sum over all tokens."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g - g.sum((0, 1)) * x


class Averaged(torch.autograd.Function):
    """The gradient of its weight is divided by the number of tokens."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).mean((0, 1))


class Counted(torch.autograd.Function):
    """It knows how many rows there are."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x / x.shape[0]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.rows


class Shifted(torch.autograd.Function):
    """A gradient that is not zero where nothing asks for one."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g + 0.01


class PerToken(torch.autograd.Function):
    """The gradient of a gate per token, and of a number."""

    @staticmethod
    def forward(ctx, x, gate, scale):
        ctx.save_for_backward(x, gate, scale)
        return x * gate.sigmoid() * scale

    @staticmethod
    def backward(ctx, g):
        x, gate, scale = ctx.saved_tensors
        open_ = gate.sigmoid()
        return g * open_ * scale, (g * x * scale).sum(-1, keepdim=True) * open_ * (1 - open_), (g * x * open_).sum()


class Reshaped(torch.autograd.Function):
    """Written for a number of tokens."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.reshape(-1, x.shape[-1]).sin().view(x.shape)

    @staticmethod
    def backward(ctx, g):
        return g.view(ctx.shape)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin().mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g.clone().neg_()


class GeLU(torch.autograd.Function):
    """As Bloom writes it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return (0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)) * g


class SquareRoot(torch.autograd.Function):
    """As RecurrentGemma writes it: its derivative is bounded, its gradient is not."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g / torch.sqrt(torch.clip(4.0 * x, min=1 / 1000.0**2))


PACKED = {
    "norm": lambda m, x, ids: Scaled.apply(x, m.norm1.weight, 1e-6),
    "norm of heads": lambda m, x, ids: Scaled.apply(x.unflatten(-1, (2, 8)).flatten(0, 1), m.norm1.weight[:8], 1e-6).reshape(x.shape),
    "gelu": lambda m, x, ids: GeLU.apply(x),
    "square root": lambda m, x, ids: SquareRoot.apply(x * x),
    "gate": lambda m, x, ids: PerToken.apply(x, m.mlp(x)[..., :1], m.norm1.bias.sum() + 1),
    "gate that is data": lambda m, x, ids: PerToken.apply(x, ids[..., None].double() / 32, m.norm1.bias.sum() + 1),
    "reversed": lambda m, x, ids: Reversed.apply(x),
    "straight through": lambda m, x, ids: Straight.apply(x) + x,
    "two results": lambda m, x, ids: sum(BothResults.apply(x, m.norm2(x))),
    "in a checkpoint": lambda m, x, ids: checkpoint(lambda y: Scaled.apply(y.sin(), m.norm1.weight, 1e-6), x, use_reentrant=False),
    "twice": lambda m, x, ids: Scaled.apply(Scaled.apply(x, m.norm1.weight, 1e-6), m.norm2.weight, 1e-6),
}
DENSE = {
    "clipped": lambda m, x, ids: Clipped.apply(x),
    "sign": lambda m, x, ids: Signed.apply(x),
    "normalised": lambda m, x, ids: Normalised.apply(x),
    "mean of rows": lambda m, x, ids: RowMean.apply(x),
    "mixed gradient": lambda m, x, ids: MixedGradient.apply(x),
    "centred": lambda m, x, ids: Centred.apply(x),
    "averaged": lambda m, x, ids: Averaged.apply(x, m.norm1.weight),
    "shifted": lambda m, x, ids: Shifted.apply(x),
    "reshaped": lambda m, x, ids: Reshaped.apply(x),
    "in place": lambda m, x, ids: InPlace.apply(x),
    "rows that differ": lambda m, x, ids: BothResults.apply(x, x + torch.arange(ids.shape[0])[:, None, None])[0],
    "cond": lambda m, x, ids: torch.cond(ids.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)),
}


class TwoLayers(nn.Module):
    """What a function is in the middle of the second layer: the first is before it."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.second = Decoder(head=lambda logits, *rest: logits), Decoder(middle=middle)
        self.first.logits = nn.Linear(16, 16).double()

    def forward(self, input_ids, attention_mask, labels):
        return self.second(input_ids, attention_mask, inputs_embeds=self.first(input_ids, attention_mask))


def check(middle, batch, dynamic, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, dynamic=dynamic or None))
    torch.manual_seed(0)
    worst, reports = run(TwoLayers(middle), batch)
    assert worst < 1e-12
    (report,) = reports
    assert (report.attention_sites, report.attention_rewritten) == (2, 2)
    return report


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("batch", "dynamic"), [(FULL, False), (RIGHT, True), (LEFT, False)], ids=["full", "right, dynamic", "left"])
def test_functions_of_one_token(name, batch, dynamic, monkeypatch):
    report = check(PACKED[name], batch, dynamic, monkeypatch)
    assert not report.barriers and report.packed_tokens == packed_tokens(batch["groups"])


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("batch", "dynamic"), [(FULL, False), (LEFT, True)], ids=["full", "left, dynamic"])
def test_functions_that_see_every_copy(name, batch, dynamic, monkeypatch):
    """What is before them is packed."""
    report = check(DENSE[name], batch, dynamic, monkeypatch)
    assert any("function" in b.reason or "differ" in b.reason for b in report.barriers), report.barriers


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_number_of_rows_is_that_of_the_batch(dynamic, monkeypatch):
    report = check(lambda m, x, ids: Counted.apply(x), FULL, dynamic, monkeypatch)
    # torch 2.11 makes a size that is kept for the backward a result of the function
    assert dynamic or not report.barriers


def test_views_that_are_written_to():
    """What a function returned may be a view of what is written to afterwards. Eager code may not do it; a graph could."""
    captured = []

    def program(x):
        y = x.sin()
        return x + Reversed.apply(y) + y

    torch.compile(program, backend=lambda gm, _: captured.append(gm) or gm.forward)(torch.ones(2, 3, requires_grad=True))
    (gm,) = captured
    call = next(n for n in gm.graph.nodes if n.target is AUTOGRAD_FUNCTION)
    with gm.graph.inserting_after(call):
        gm.graph.call_method("add_", (call.args[2], 1))
    with FakeTensorMode() as fake_mode:
        inputs = [torch.ones(2, 3)]
    with pytest.raises(CannotDeduplicate, match="view that a function returns"):
        trace(gm, fake_mode, inputs)


def test_functions_through_inductor():
    worst, reports = run(Decoder(middle=lambda m, x, ids: Scaled.apply(nested(m, x, ids), m.norm1.weight, 1e-6)), RIGHT, backend="inductor")
    assert worst < 1e-10 and reports[0].attention_rewritten and not reports[0].barriers
