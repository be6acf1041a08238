"""Functions in the graph: activation checkpoints (in one another, reentrant, selective), autograd.Function, and operators on functions."""

import functools

import pytest
import torch
import torch.nn.functional as F
from batches import packed_tokens
from test_traps import FULL, LEFT, RIGHT, Decoder, run, sdpa
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dualkv_compile


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def packed(reports, batch, sites=1):
    assert [(r.attention_sites, r.attention_rewritten, r.packed_tokens) for r in reports] == [(sites, sites, packed_tokens(batch["groups"]))]


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


FUNCTIONS = {
    "norm": lambda m, x, ids: Scaled.apply(x, m.norm1.weight, 1e-6),
    "clipped": lambda m, x, ids: Clipped.apply(x),
    "sign": lambda m, x, ids: Signed.apply(x),
    "normalised": lambda m, x, ids: Normalised.apply(x),
    "reversed": lambda m, x, ids: Reversed.apply(x),
    "straight through": lambda m, x, ids: Straight.apply(x) + x,
    "mean of rows": lambda m, x, ids: RowMean.apply(x),
    "mixed gradient": lambda m, x, ids: MixedGradient.apply(x),
    "two results": lambda m, x, ids: sum(BothResults.apply(x, m.norm2(x))),
    "in a checkpoint": lambda m, x, ids: checkpoint(lambda y: Scaled.apply(y.sin(), m.norm1.weight, 1e-6), x, use_reentrant=False),
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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("batch", [FULL, RIGHT, LEFT], ids=["full", "right", "left"])
def test_functions(name, batch, dynamic, monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(compile_, dynamic=dynamic or None))
    torch.manual_seed(0)
    worst, reports = run(TwoLayers(FUNCTIONS[name]), batch)
    assert worst < 1e-12
    (report,) = reports
    assert (report.attention_sites, report.attention_rewritten) == (2, 2)
