"""Turns the tags that recording left on nodes back into calls: gradient mode and activation checkpointing.

    a = aten.mm(x, w)      [checkpoint 1]                 a = tag_activation_checkpoint(body_0, x, w)
    b = aten.silu(a)       [checkpoint 1]      becomes    ...
    c = aten.mul(b, y)     [no_grad]                      _set_grad_enabled(False); c = aten.mul(a, y); _set_grad_enabled(True)
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from dualkv_compile.passes.trace import Region


def outline(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph with the same meaning in which regions are calls. `gm` itself where no node has a region."""
    spans = _spans(gm.graph)
    if not any(region.checkpoint is not None or not region.grad_enabled for region, _ in spans):
        return gm
    root = torch.nn.Module()
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    bodies: dict[str, fx.GraphModule] = {}
    enabled = True
    for checkpoint, nodes in _by_checkpoint(spans):
        if checkpoint is None:
            enabled = _copy(nodes, graph, env, enabled)
            continue
        inside = set(nodes)
        operands = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        results = [n for n in nodes if any(u not in inside for u in n.users)]
        name = f"checkpointed_{len(bodies)}"
        body = bodies[name] = _body(nodes, operands, results)
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
    return fx.GraphModule(root, graph, class_name="Packed")


def _spans(graph: fx.Graph) -> list[tuple[Region, fx.Node]]:
    """Each node with its region; sizes have none and stand outside."""
    return [(n.meta.get("region", Region()) if n.op == "call_function" else Region(), n) for n in graph.nodes]


def _by_checkpoint(spans):
    current, nodes = None, []
    for region, node in spans:
        if region.checkpoint is not current:
            if nodes:
                yield current, nodes
            current, nodes = region.checkpoint, []
        nodes.append(node)
    yield current, nodes


def _copy(nodes, graph: fx.Graph, env: dict[fx.Node, fx.Node], enabled: bool) -> bool:
    """Copies nodes, switching gradient mode where their regions ask for it; returns the mode at the end, which is always on."""
    for node in nodes:
        wanted = node.meta.get("region", Region()).grad_enabled if node.op == "call_function" else True
        if wanted != enabled and node.op != "placeholder":
            graph.call_function(torch._C._set_grad_enabled, (wanted,))
            enabled = wanted
        env[node] = graph.node_copy(node, env.__getitem__)
    if not enabled:
        graph.call_function(torch._C._set_grad_enabled, (True,))
    return True


def _body(nodes, operands, results) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for a in operands:
        env[a] = graph.placeholder(a.name)
        env[a].meta.update(a.meta)
    _copy(nodes, graph, env, True)
    graph.output(tuple(env[n] for n in results))
    return fx.GraphModule({}, graph, class_name="Checkpointed")
