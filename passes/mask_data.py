"""The data that a mask's verdict depends on: which inputs it reads, and the operations that compute it at the call.

not attention_mask[i0, i3] == 0        becomes        logical_not(eq(attention_mask, 0))        [B, S]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
from sympy.logic.boolalg import Boolean

from dualkv_compile.passes.symbolic import AXES, AXIS_NAMES, BATCH, Data, Equals, sizes_of

aten = torch.ops.aten


def verdict_data_atoms(verdict: Any) -> list[tuple[fx.Node, tuple[sympy.Expr, ...]]]:
    """Each input that a verdict's conditions and facts read, with the indices at which they read it."""
    conditions = [c for c in (verdict.key_data, verdict.query_data, *verdict.facts) if c is not None]
    found = {data for condition in conditions for data in condition.atoms(Data)}
    return [(data.node, data.indices) for data in sorted(found, key=str)]


def padding_source(condition: Boolean, axis: str = "kv") -> fx.Node | None:
    """The input whose element at (b, axis) a condition requires not to be zero, if that is all that it requires."""
    if not (isinstance(condition, sympy.Not) and isinstance(condition.args[0], Equals)):
        return None
    data, other = condition.args[0].args
    at = AXES[AXIS_NAMES.index(axis)]
    if not isinstance(data, Data) or other != 0:
        return None
    of_one_row = data.indices == (0, at) and sizes_of(data.node.meta["val"])[0] == 1
    return data.node if data.indices == (BATCH, at) or of_one_row else None


def emit_condition(
    call: Callable[..., fx.Node],
    condition: Boolean,
    axis: str,
    batch_size: Any,
    length: Any,
    lookup: Callable[[fx.Node], fx.Node],
) -> fx.Node:
    """Emits a condition over (b, axis), axis "kv" or "q", as a Boolean tensor [batch_size, length].

    `call(target, *args, **kwargs)` adds an operation to the graph; `lookup` gives the node that holds an input there.
    """
    emission = _Emission(call, (BATCH, AXES[AXIS_NAMES.index(axis)]), (batch_size, length), lookup, condition)
    return call(aten.expand.default, emission.condition(condition), [batch_size, length])


def emit_fact(
    call: Callable[..., fx.Node], fact: Boolean, sizes: Sequence[Any], lookup: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """Emits whether a condition over (b, h, q, kv) holds at every index below `sizes`, as a Boolean scalar tensor."""
    used = [i for i, axis in enumerate(AXES) if axis in fact.free_symbols]
    emission = _Emission(call, [AXES[i] for i in used], [sizes[i] for i in used], lookup, fact)
    return call(aten.all.default, emission.condition(fact))


class _Emission:
    """Tensors over the axes of one condition; each broadcasts against all of them."""

    def __init__(self, call, axes: Sequence[sympy.Symbol], sizes: Sequence[Any], lookup, condition: Boolean):
        self.call, self.axes, self.sizes, self.lookup = call, list(axes), list(sizes), lookup
        source = min(condition.atoms(Data), key=str, default=None)
        self.device = source.node.meta["val"].device if source is not None else torch.device("cpu")
        self._aranges: dict[sympy.Symbol, fx.Node] = {}

    def condition(self, condition: Boolean) -> fx.Node:
        if condition in (sympy.true, sympy.false):
            return self.call(
                aten.full.default, [1] * len(self.axes), bool(condition), dtype=torch.bool, device=self.device
            )
        if isinstance(condition, sympy.Not):
            return self.call(aten.logical_not.default, self.condition(condition.args[0]))
        if isinstance(condition, (sympy.And, sympy.Or)):
            target = aten.logical_and.default if isinstance(condition, sympy.And) else aten.logical_or.default
            parts = sorted(condition.args, key=str)
            result = self.condition(parts[0])
            for part in parts[1:]:
                result = self.call(target, result, self.condition(part))
            return result
        return self.atom(condition)

    def atom(self, atom: Boolean) -> fx.Node:
        a, b = (self.term(side) for side in atom.args)
        packet, mirrored = (aten.eq, aten.eq) if isinstance(atom, Equals) else (aten.ge, aten.le)
        if not isinstance(a, fx.Node):
            a, b, packet = b, a, mirrored
        return self.call(packet.Tensor if isinstance(b, fx.Node) else packet.Scalar, a, b)

    def term(self, expression: sympy.Expr) -> Any:
        """A number, or a tensor over the axes."""
        if isinstance(expression, Data):
            return self.data(expression)
        if expression.is_number:
            return int(expression) if expression.is_Integer else float(expression)
        result = None
        for part, factor in expression.as_coefficients_dict().items():
            if part == 1:
                continue
            scaled = self.arange(part) if factor == 1 else self.call(aten.mul.Tensor, self.arange(part), int(factor))
            result = scaled if result is None else self.call(aten.add.Tensor, result, scaled)
        offset = int(expression.as_coefficients_dict()[sympy.S.One])
        return self.call(aten.add.Tensor, result, offset) if offset else result

    def arange(self, axis: sympy.Symbol) -> fx.Node:
        if axis not in self._aranges:
            at = self.axes.index(axis)
            line = self.call(aten.arange.default, self.sizes[at], dtype=torch.int64, device=self.device)
            self._aranges[axis] = self.call(
                aten.view.default, line, [-1 if i == at else 1 for i in range(len(self.axes))]
            )
        return self._aranges[axis]

    def data(self, data: Data) -> fx.Node:
        """An input at indices that are expressions over the axes."""
        tensor, whole = self.lookup(data.node), sizes_of(data.node.meta["val"])
        if not data.indices:
            return tensor
        sizes = [n.node.expr if isinstance(n, torch.SymInt) else n for n in self.sizes]
        as_it_is = len(whole) == len(self.axes) and all(
            (at == axis and n == size) or (at == 0 and n == 1)
            for at, axis, n, size in zip(data.indices, self.axes, whole, sizes, strict=True)
        )
        if as_it_is:
            return tensor
        indices = [self.term(at) for at in data.indices]
        for dim in reversed([d for d, at in enumerate(indices) if not isinstance(at, fx.Node)]):
            tensor = self.call(aten.select.int, tensor, dim, indices[dim])
        indices = [at for at in indices if isinstance(at, fx.Node)]
        return self.call(aten.index.Tensor, tensor, indices) if indices else tensor
