"""The rewritten graph in graphviz's language: what matters as coloured boxes, the operations between them as one grey box.

    index_select (pack)  green      tokens are taken out of the dense batch
    unpack               red        packed tokens are laid out as the dense batch again
    shared attention     yellow
    products             blue
    outputs, inputs      white

Parameters, sizes and the plan's tensors are left out.
"""

from __future__ import annotations

import collections

import torch
import torch.fx as fx

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "scaled_dot_product_attention", "einsum", "matmul")


def drawing(gm: fx.GraphModule) -> str:
    """A digraph; one box for each node of `gm` that is of a coloured kind, one for each connected lot of others between them."""
    boxes = _boxes(gm.graph)
    lines = ["digraph packed {", '  node [shape=box, style="filled,rounded", fontname="monospace", fontsize=9];']
    members = collections.defaultdict(list)
    for node, box in boxes.items():
        members[box].append(node)
    for box, nodes in members.items():
        lines.append(f'  "{box.name}" [label="{_label(gm, nodes)}", fillcolor={_colour(gm, box) or "gray92"}];')
    edges = {(boxes[a].name, box.name): None for node, box in boxes.items() for a in node.all_input_nodes if a in boxes}
    lines += [f'  "{a}" -> "{b}";' for a, b in edges if a != b]
    return "\n".join([*lines, "}"]) + "\n"


def _boxes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each drawn node -> the node that its box is named after.

    Two others share a box if one reads the other and the longest path of coloured nodes that leads to them is equally long, so that no
    box reads itself through another.
    """
    depth: dict[fx.Node, int] = {}
    box: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while box[node] is not node:
            node = box[node]
        return node

    for node in graph.nodes:
        if not _is_drawn(node):
            continue
        inputs = [a for a in node.all_input_nodes if a in box]
        if node.all_input_nodes and not inputs and node.op != "output":
            continue  # computed from parameters alone
        alone = _colour(graph.owning_module, node) is not None
        depth[node] = max((depth[a] for a in inputs), default=0) + alone
        box[node] = node
        if not alone:
            for a in inputs:
                if _colour(graph.owning_module, a) is None and depth[a] == depth[node]:
                    box[find(a)] = node
    return {node: find(node) for node in box}


def _is_drawn(node: fx.Node) -> bool:
    if node.op == "placeholder":
        value = node.meta.get("val")
        is_input = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.dim() >= 2
        return is_input and "request" not in node.meta
    if node.op == "get_attr":
        return False
    return node.op == "output" or (bool(node.users) and not isinstance(node.meta.get("val"), (torch.SymInt, int)))


def _operation(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return node.name
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target)).split(".")[0]


def _regions(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The bodies of a checkpointed region."""
    found = [getattr(gm, a.target, None) for a in node.all_input_nodes if a.op == "get_attr"]
    return [body for body in found if isinstance(body, fx.GraphModule)]


def _colour(gm: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op in ("placeholder", "output"):
        return "white"
    name = _operation(node)
    if "shared_prompt_attention" in name:
        return "gold"
    if name == "unpack":
        return "salmon"
    if any(getattr(a.meta.get("request"), "kind", "") == "pack_index" for a in node.all_input_nodes):
        return "palegreen"
    if name in PRODUCTS:
        return "lightblue"
    return "khaki" if _regions(gm, node) else None


def _label(gm: fx.GraphModule, nodes: list[fx.Node]) -> str:
    last = nodes[-1]
    if len(nodes) == 1:
        text = _operation(last)
        inside = [_operation(n) for body in _regions(gm, last) for n in body.graph.nodes if n.op == "call_function"]
        if inside:
            attention = sum("shared_prompt_attention" in name for name in inside)
            text += f"\\n{len(inside)} operations, {attention} of shared attention"
    else:
        names = [name for name, _ in collections.Counter(map(_operation, nodes)).most_common(4)]
        text = f"{len(nodes)} operations\\n{', '.join(names)}"
    value = last.meta.get("val")
    return text + (f"\\n{list(value.shape)}" if isinstance(value, torch.Tensor) else "")
