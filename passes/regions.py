"""Turns the tags that recording left on nodes back into calls: gradient mode and activation checkpointing.

    a = aten.mm(x, w)      [checkpoint 1]                 a = tag_activation_checkpoint(body_0, x, w)
    b = aten.silu(a)       [checkpoint 1]      becomes    ...
    c = aten.mul(b, y)     [no_grad]                      _set_grad_enabled(False); c = aten.mul(a, y); _set_grad_enabled(True)

A checkpoint in a checkpoint becomes a call in the body of a call.
"""

from __future__ import annotations

import itertools
import operator

import torch
import torch.fx as fx

from dualkv_compile.passes.trace import Region


def outline(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph with the same meaning in which regions are calls. `gm` itself where no node has a region."""
    if all(_region(n) == Region() for n in gm.graph.nodes):
        return gm
    root, graph = torch.nn.Module(), fx.Graph()
    _write(gm, list(gm.graph.nodes), 0, root, graph, {})
    return fx.GraphModule(root, graph, class_name="Packed")


def _region(node: fx.Node) -> Region:
    """Sizes, inputs and functions have none and stand outside."""
    return node.meta.get("region", Region()) if node.op == "call_function" else Region()


def _write(gm: fx.GraphModule, nodes: list[fx.Node], depth: int, root: torch.nn.Module, graph: fx.Graph, env: dict) -> None:
    """Writes nodes that lie in the same `depth` checkpoints into a graph; those that lie in one more become a call."""

    def next_checkpoint(node: fx.Node):
        return (*_region(node).checkpoints[depth : depth + 1], None)[0]

    for checkpoint, group in itertools.groupby(nodes, next_checkpoint):
        if checkpoint is None:
            _copy(gm, list(group), root, graph, env)
            continue
        inside = list(group)
        operands = list(dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in set(inside) and a.op != "get_attr"))
        results = [n for n in inside if any(u not in set(inside) for u in n.users)]
        name = f"checkpointed_{sum(1 for child, _ in root.named_children() if child.startswith('checkpointed_'))}"
        body = _body(gm, inside, depth + 1, operands, results)
        body.meta.update(checkpoint.meta)
        setattr(root, name, body)
        call = graph.call_function(
            torch.ops.higher_order.tag_activation_checkpoint,
            (graph.get_attr(name), *(env[a] for a in operands)),
            dict(checkpoint.kwargs),
        )
        for i, n in enumerate(results):
            env[n] = graph.call_function(operator.getitem, (call, i))
            env[n].meta.update(n.meta)


def _copy(gm: fx.GraphModule, nodes: list[fx.Node], root: torch.nn.Module, graph: fx.Graph, env: dict) -> None:
    """Copies nodes, switching gradient mode where their regions ask for it; it is on before and after them."""
    enabled = True
    for node in nodes:
        if node.op == "get_attr":
            continue
        wanted = _region(node).grad_enabled
        if wanted != enabled and node.op != "placeholder":
            graph.call_function(torch._C._set_grad_enabled, (wanted,))
            enabled = wanted
        for function in (a for a in node.all_input_nodes if a.op == "get_attr" and a not in env):
            setattr(root, function.target, getattr(gm, function.target))
            env[function] = graph.get_attr(function.target)
        env[node] = graph.node_copy(node, env.__getitem__)
    if not enabled:
        graph.call_function(torch._C._set_grad_enabled, (True,))


def _body(gm: fx.GraphModule, nodes: list[fx.Node], depth: int, operands: list[fx.Node], results: list[fx.Node]) -> fx.GraphModule:
    root, graph = torch.nn.Module(), fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for a in operands:
        env[a] = graph.placeholder(a.name)
        env[a].meta.update(a.meta)
    _write(gm, nodes, depth, root, graph, env)
    graph.output(tuple(env[n] for n in results))
    return fx.GraphModule(root, graph, class_name="Checkpointed")
