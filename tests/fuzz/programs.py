"""Random decoders, drawn as source text: what fails is printed as a program that runs on its own.

A program is a `forward` over registers. Each register knows what its dimensions are, as tuples of factors: "b" rows, "s" columns, "t"
columns of the attended-to token, numbers for features. So an operation can be applied to whatever dimension it is drawn for, and outputs
can be compared where they are no padding.
"""

from __future__ import annotations

import dataclasses
import linecache
import math

import torch
from torch import nn

WIDTH, HEADS, VOCAB, LENGTH = 8, 2, 16, 64
Dims = tuple[tuple, ...]
TOKENS: Dims = (("b",), ("s",), (WIDTH,))


@dataclasses.dataclass(frozen=True)
class Register:
    name: str
    dims: Dims

    def size(self, d: int) -> str:
        return size_of(self.dims[d])


def size_of(dim: tuple) -> str:
    return " * ".join(_SAME.get(f, str(f)) for f in dim) or "1"


# "b_" and "s_": of that size, but a reshape has mixed them up with others
_SAME = {"t": "s", "s_": "s", "b_": "b"}


def same_size(a: tuple, b: tuple) -> bool:
    return sorted(_SAME.get(f, str(f)) for f in a if f != 1) == sorted(_SAME.get(f, str(f)) for f in b if f != 1)


@dataclasses.dataclass(frozen=True)
class Program:
    """Source lines of `forward(self, {inputs})`, the shapes of the parameters, and the outputs' dimensions."""

    lines: tuple[str, ...]
    inputs: tuple[str, ...]
    parameters: tuple[tuple[int, ...], ...]
    outputs: tuple[Register, ...]
    features_require_grad: bool = False
    sound: bool = False  # token-wise operations and causal attention alone: all of it must run packed

    @property
    def source(self) -> str:
        body = "\n".join("        " + line for line in self.lines)
        names = ", ".join(o.name for o in self.outputs)
        return (
            "class Drawn(Base):\n"
            f"    shapes = {self.parameters}\n\n"
            f"    def forward(self, {', '.join(self.inputs)}):\n"
            "        b, s = input_ids.shape\n"
            f"{body}\n"
            f"        return ({names},)\n"
        )

    def build(self, seed: int = 0) -> nn.Module:
        source = self.source
        name = f"<drawn {abs(hash(source))}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope = dict(NAMES)
        exec(compile(source, name, "exec"), scope)
        return scope["Drawn"](seed)


class Base(nn.Module):
    """Parameters p0, p1, … of the given shapes and an embedding; float64."""

    shapes: tuple = ()

    def __init__(self, seed: int = 0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def parameter(*shape):
            fan = math.sqrt(shape[-1]) if len(shape) > 1 else 1.0
            return nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64) / fan)

        self.tokens, self.columns, self.head = parameter(VOCAB, WIDTH), parameter(LENGTH, WIDTH), parameter(VOCAB, WIDTH)
        for i, shape in enumerate(self.shapes):
            setattr(self, f"p{i}", parameter(*shape))
        self.register_buffer("tril", torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH))


def rotate(x, position):
    """Rotary embedding of [.., s, d] at positions that broadcast against [.., s]."""
    half = x.shape[-1] // 2
    angle = position[..., None] / 10 ** torch.arange(half, dtype=x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


NAMES = {
    "torch": torch,
    "F": nn.functional,
    "nn": nn,
    "math": math,
    "Base": Base,
    "rotate": rotate,
    "checkpoint": torch.utils.checkpoint.checkpoint,
}
