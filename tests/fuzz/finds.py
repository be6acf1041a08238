"""Programs that once gave wrong numbers or broke, shrunk: name -> (program, batches)."""

from __future__ import annotations

from programs import Program, Register

TOKENS = (("b",), ("s",), (8,))
ONE = {"groups": [(3, [2, 1, 4])], "left_pads": None, "seed": 0, "order": None}
TWO = {"groups": [(3, [2, 2]), (2, [3, 3])], "left_pads": None, "seed": 0, "order": None}
LEFT = {"groups": [(3, [2, 1]), (2, [3, 1])], "left_pads": [1, 2], "seed": 0, "order": [2, 0, 3, 1]}
ALL = [ONE, TWO, LEFT]

HEADS = (
    "x = self.tokens[input_ids]",
    "q, k, v = (y.view(b, s, 2, 4).transpose(1, 2) for y in F.linear(x, self.p0).chunk(3, -1))",
)
MORE = "x + y.transpose(1, 2).flatten(2)"


def _program(*lines: str, inputs=("input_ids",), parameters=(), dims=(TOKENS,), **more) -> Program:
    """The last line is the tuple of outputs."""
    *body, last = lines
    names = tuple(f"out{i}" for i in range(len(dims)))
    return Program((*body, f"{', '.join(names)}, = {last}"), tuple(inputs), tuple(parameters), tuple(map(Register, names, dims)), **more)


def _attention(*lines: str, **more) -> Program:
    return _program(*HEADS, *lines, parameters=((24, 8),), **more)


PROBABILITIES = (("b",), (2,), ("s",), ("t",))

PROGRAMS = {
    "top score needed dense": (
        _attention(
            "scores = (q @ k.mT).masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -1e30)",
            "p = F.softmax(scores - scores.max(-1, keepdim=True).values, -1)",
            "y = p @ v",
            f"({MORE}, p)",
            dims=(TOKENS, PROBABILITIES),
        ),
        ALL,
    ),
    "top of transposed scores": (
        _attention(
            "scores = (k @ q.mT).transpose(-1, -2).masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -1e30)",
            "p = F.softmax(scores - scores.max(-1, keepdim=True).values, -1)",
            "y = p @ v",
            f"({MORE},)",
        ),
        ALL,
    ),
    "scores read before and after a view": (
        _attention(
            "scores = q @ k.mT",
            "total = scores.cos().sum()",
            "y = scores.transpose(-1, -2).sin() @ v",
            f"(total + {MORE},)",
        ),
        [TWO],
    ),
    "scores written through an alias": (
        _attention(
            "scores = (q @ k.mT) * 1.0",
            "alias = scores.unsqueeze(0)[0]",
            "scores.unsqueeze(0).mul_(0.8)",
            "alias.mul_(1.1)",
            "y = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -1e30).softmax(-1) @ v",
            f"({MORE},)",
        ),
        ALL,
    ),
    "view of other strides": (
        _program(
            "x = torch.tanh(self.tokens[input_ids].permute(2, 1, 0))",
            "y = torch.einsum('hsb,hz->zsb', x, self.p0)",
            "(self.tokens[input_ids] * y.reshape(8, b, s).mean(),)",
            parameters=((8, 8),),
        ),
        ALL,
    ),
    "refused baddbmm of symbolic sizes": (
        _attention(
            "q, k, v = (z.reshape(b * 2, s, 4) for z in (q, k, v))",
            "scores = torch.baddbmm(torch.zeros(1, 1, 1, dtype=x.dtype), q, k.transpose(1, 2), beta=0, alpha=0.5).view(b, 2, s, s)",
            "p = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(2), -1e30).softmax(-1)",
            "y = (p.view(b * 2, s, s) @ v).view(b, 2, s, 4)",
            f"({MORE},)",
        ),
        ALL,
    ),
    "columns of a float input": (
        _program("((features[:, 1:] + self.tokens[input_ids][:, 1:]).mean(1),)", inputs=("input_ids", "features"), dims=((("b",), (8,)),)),
        ALL,
    ),
    "a shifted float input": (
        _program("(self.tokens[input_ids] + F.pad(features, (0, 0, 1, 0))[:, :-1],)", inputs=("input_ids", "features")),
        ALL,
    ),
    "weights that differ at the last prompt token, read a column early": (
        _program(
            "logp = F.linear(self.tokens[input_ids].tanh(), self.head)[:, :-1].log_softmax(-1)",
            "logp = logp.gather(-1, input_ids[:, 1:, None]).squeeze(-1)",
            "(logp * late_data[:, 1:],)",
            inputs=("input_ids", "late_data"),
            dims=((("b",), ("s-",)),),
        ),
        ALL,
    ),
    "a product whose rows and heads are one dimension": (
        _program(
            "x = self.tokens[input_ids].tanh().view(b, s, 2, 4).transpose(1, 2).reshape(b * 2, s, 4)",
            "x = x * torch.arange(2, dtype=x.dtype).repeat(b)[:, None, None]",
            "(x.view(b, 2, s, 4).transpose(1, 2).reshape(b, s, 8),)",
            inputs=("input_ids", "attention_mask"),
        ),
        ALL,
    ),
    "a batch of matrices that is constant in one operand": (
        _program(
            "shared = self.p0.view(1, 2, 4, 8).expand(b, 2, 4, 8)",
            "own = shared @ (row_data[:, None] * self.p1).view(b, 2, 8, 4)",
            "(self.tokens[input_ids].tanh().view(b, s, 2, 4).transpose(1, 2) + own.mean(-2, keepdim=True),)",
            inputs=("input_ids", "row_data"),
            parameters=((8, 8), (64,)),
            dims=((("b",), (2,), ("s",), (4,)),),
        ),
        ALL,
    ),
    "sizes on both sides of a graph break": (
        _program(
            "x = features.tanh() + self.p1",
            "torch._dynamo.graph_break()",
            "q, k, v = (y.view(b, s, 2, 4).transpose(1, 2) for y in F.linear(x, self.p0).chunk(3, -1))",
            "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
            "(x + y.transpose(1, 2).reshape(b, s, -1),)",
            inputs=("input_ids", "features"),
            parameters=((24, 8), (8,)),
        ),
        ALL,
    ),
}
