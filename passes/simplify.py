"""Undoes what functionalisation writes around in-place operations on parts of a tensor.

    part = aten.slice(x, 1, 0, -1)                              part = aten.slice(x, 1, 0, -1)
    new = aten.div(part, 0.7)                                   new = aten.div(part, 0.7)
    whole = aten.slice_scatter(x, new, 1, 0, -1)     becomes
    again = aten.slice(whole, 1, 0, -1)
    y = aten.log_softmax(again, -1)                             y = aten.log_softmax(new, -1)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.layout import same

aten = torch.ops.aten

_READS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}


def simplify(gm: fx.GraphModule) -> fx.GraphModule:
    """Simplifies a recorded graph in place: views that change nothing, and parts read back where they were written, disappear."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _VIEWS and _same_shape(node, node.args[0]):
            _replace(node, node.args[0], [node])
        elif node.target in _READS:
            source = node.args[0]
            if source.target is _READS[node.target] and _place(node, 1) == _place(source, 2):
                _replace(node, source.args[1], [node, source])
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.users and not writes(node):
            gm.graph.erase_node(node)
    return gm


def _replace(node: fx.Node, by: fx.Node, through: list[fx.Node]) -> None:
    """Unless what is between them, under no_grad, is what keeps a gradient from passing."""
    if all(grad_enabled(n) for n in through) or not grad_enabled(by):
        node.replace_all_uses_with(by)


def grad_enabled(node: fx.Node) -> bool:
    """Whether a node's result may have a gradient: inputs may."""
    return node.op != "call_function" or node.meta["region"].grad_enabled


def writes(node: fx.Node) -> bool:
    """Whether a node does something besides giving a result: it writes into an input, or it asserts."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.is_mutable or schema.name.startswith("aten::_assert"))


def draws(target: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_pointwise(target: Any) -> bool:
    """Whether an operation makes each element of its result of those at the same place, and of nothing else."""
    return torch.Tag.pointwise in getattr(target, "tags", ()) and not draws(target)


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.dim() == y.dim() and all(same(m, n) for m, n in zip(x.shape, y.shape, strict=True))


def _place(node: fx.Node, first: int) -> list:
    """Dimension, start, end and step (or dimension and index) of a part, with their defaults."""
    defaults = [0, None, None, 1]
    given = [*node.args[first:], *defaults[len(node.args) - first :]] if "slice" in str(node.target) else list(node.args[first:])
    names = ("dim", "start", "end", "step")
    given = [node.kwargs.get(n, g) for n, g in zip(names, given, strict=False)]
    rank = node.args[0].meta["val"].dim()
    given[0] = given[0] % rank
    if "slice" in str(node.target):
        given[1] = 0 if given[1] is None else given[1]
        given[2] = 2**63 - 1 if given[2] is None else given[2]
    return [g.node.expr if isinstance(g, torch.SymInt) else g for g in given]
