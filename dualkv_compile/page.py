"""What was done to a model, as one HTML page without scripts and without anything outside of it: `explain --html FILE`.

The batch and what is shared of it; tokens and FLOPs; attention sites; the user's lines, and whether they ran packed; barriers; the graph
before and after, side by side.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import html
import re

import torch
import torch.fx as fx

from dualkv_compile.plan import Plan
from dualkv_compile.report import Report

STYLE = """
:root { --bg: #fff; --fg: #202124; --soft: #5f6368; --line: #dadce0; --packed: #1a73e8; --shared: #8ab4f8; --dense: #9aa0a6; --bad: #d93025;
  --new: #e6f4ea; --old: #fce8e6; }
@media (prefers-color-scheme: dark) { :root { --bg: #202124; --fg: #e8eaed; --soft: #9aa0a6; --line: #3c4043; --packed: #8ab4f8;
  --shared: #1967d2; --dense: #80868b; --bad: #f28b82; --new: #16351f; --old: #41201d; } }
body { background: var(--bg); color: var(--fg); font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px;
  padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } p { color: var(--soft); margin: .3rem 0 }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .6rem .2rem 0; text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 500 } code, .graph td { font: 12px/1.45 ui-monospace, monospace }
.graph { table-layout: fixed } .graph td { border: 0; overflow-wrap: anywhere; padding: 0 .6rem 0 0 } .new { background: var(--new) }
.old { background: var(--old) } .packed { color: var(--packed) } .dense, .bad { color: var(--bad) } .neither { color: var(--soft) }
svg { max-width: 100%; height: auto } text { fill: var(--fg); font: 12px system-ui, sans-serif } summary { cursor: pointer }
"""


@dataclasses.dataclass
class Rewriting:
    """One graph: as recorded, as rewritten, and its report."""

    recorded: fx.GraphModule
    rewritten: fx.GraphModule
    report: Report | None = None


def page(title: str, plan: Plan, rewritings: list[Rewriting]) -> str:
    """The HTML of the batch that `plan` packs and of the graphs that were rewritten for it; `title`: the model, in words."""
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>torch {html.escape(torch.__version__)}. {html.escape(repr(plan))}</p>"]
    parts += ["<h2>The batch</h2>", _batch(plan)]
    for rewriting in rewritings:
        parts += _graph(rewriting)
    if not rewritings:
        parts.append("<h2>Nothing was rewritten</h2><p>No graph could be deduplicated; `explain` without --html says why.</p>")
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">{head}\n{body}\n</html>\n'


# ----------------------------------------------------------------------------------------------------------- drawings


def _batch(plan: Plan, width: int = 720) -> str:
    """Rows as bars: a prompt that is computed once, what a row owns, prompts that are read from another row, padding."""
    shown = min(plan.num_rows, 40)
    scale, height = width / plan.num_columns, 11
    own = [max(int(s), int(p) - plan.owned) for s, p in zip(plan.starts, plan.prompt_ends, strict=True)]
    bars = []
    for row in range(shown):
        start, stop, first = int(plan.starts[row]), int(plan.stops[row]), int(plan.first_rows[row]) == row
        prompt = "fill:var(--packed)" if first else "fill:none;stroke:var(--shared);stroke-dasharray:2 2"
        for a, b, style in (
            (0, plan.num_columns, "fill:var(--line)"),
            (start, own[row], prompt if first else "fill:var(--bg)"),
            (start, own[row], prompt),
            (own[row], stop, "fill:var(--packed)"),
        ):
            place = f'x="{a * scale:.1f}" y="{row * height}" width="{max(b - a, 0) * scale:.1f}" height="{height - 3}"'
            bars.append(f'<rect {place} style="{style}"/>')
    picture = f'<svg viewBox="-1 -1 {width + 2} {shown * height + 1}" role="img" aria-label="rows of the batch">{"".join(bars)}</svg>'
    more = f"<p>… and {plan.num_rows - shown} rows more</p>" if plan.num_rows > shown else ""
    return f"{picture}{more}<p>Filled: computed. Dashed: the prompt of an earlier row, computed there. Grey: padding.</p>"


def _savings(report: Report, width: int = 420) -> str:
    rows, y = [], 0
    for name, dense, packed in (
        ("tokens", report.dense_tokens, report.packed_tokens),
        ("forward FLOPs", report.dense_flops, report.packed_flops),
    ):
        for k, (kind, value, colour) in enumerate((("dense", dense, "var(--dense)"), ("packed", packed, "var(--packed)"))):
            bar = width * value / max(dense, packed, 1)
            fewer = f"  ({dense / packed:.2f}x fewer)" if k and packed else ""
            place = f'x="200" y="{y + 2}" width="{bar:.1f}" height="14"'
            rows.append(f'<text x="0" y="{y + 13}">{name}, {kind}</text><rect {place} style="fill:{colour}"/>')
            rows.append(f'<text x="{205 + bar:.1f}" y="{y + 13}">{value:,}{fewer}</text>')
            y += 22
    return f'<svg viewBox="0 0 {width + 420} {y}" width="{width + 420}" role="img" aria-label="savings">{"".join(rows)}</svg>'


# -------------------------------------------------------------------------------------------------------- one graph


def _graph(rewriting: Rewriting) -> list[str]:
    report, gm = rewriting.report, rewriting.rewritten
    parts = []
    if report is not None:
        parts += [f"<h2>{html.escape(report.graph)} ({html.escape(report.variant)})</h2>", _savings(report)]
        parts.append(f"<h2>Attention: {report.attention_rewritten} of {report.attention_sites} sites rewritten</h2>")
    parts.append(_table(["site", "queries", "keys", "source"], _sites(gm)))
    parts += ["<h2>What runs packed</h2>", "<p>Operations of each line of the model. Neither: weights, sizes, columns, masks.</p>"]
    parts.append(_table(["line", "packed", "dense", "neither"], _lines(gm)))
    if report is not None:
        parts.append(f"<h2>Barriers: {len(report.barriers) or 'none'}</h2>")
        rows = [[_code(b.op), html.escape(b.reason), _code(b.line)] for b in report.barriers]
        parts += [_table(["operation", "reason", "source"], rows)] if rows else []
    parts += ["<h2>The graph, before and after</h2>", "<details><summary>Show</summary>"]
    return [*parts, _side_by_side(rewriting.recorded, gm), "</details>"]


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(f'<tr>{c}</tr>' for c in cells)}</table>"


def _nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """In order, those of checkpointed regions in the place of the region."""
    nodes = []
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(gm, str(node.target), None), fx.GraphModule):
            nodes += [n for n in _nodes(getattr(gm, node.target)) if n.op not in ("placeholder", "output")]
        elif node.op not in ("get_attr", "output"):
            nodes.append(node)
    return nodes


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("torch.ops.")


def _shape(node: fx.Node) -> list:
    value = node.meta.get("val")
    return list(value.shape) if isinstance(value, torch.Tensor) else []


def _source(node: fx.Node) -> str:
    """'modeling_x.py:12  the line' of the innermost line that is not torch's."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]+)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return f"{own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]}  {own[-1][2]}" if own else ""


def _sites(gm: fx.GraphModule) -> list[list[str]]:
    found = [n for n in _nodes(gm) if "shared_prompt_attention" in _name(n) and n.op == "call_function"]
    rows = []
    for i, node in enumerate(found):
        query, key = (a for a in node.all_input_nodes[:2])
        rows.append([str(i), str(_shape(query)), str(_shape(key)), _code(_source(node))])
    return rows


def _packed_sizes(gm: fx.GraphModule) -> set[str]:
    """The numbers of packed tokens, as symbols, of the whole batch and of windows of it."""
    kinds = ("pack_index", "window_columns", "columns", "rows", "subselect", "select")
    plans = [n for n in gm.graph.find_nodes(op="placeholder") if getattr(n.meta.get("request"), "kind", "") in kinds]
    return {str(n.meta["val"].shape[0]) for n in plans}


def _lines(gm: fx.GraphModule) -> list[list[str]]:
    packed = _packed_sizes(gm)
    ids = [n for n in gm.graph.find_nodes(op="placeholder") if "request" not in n.meta and n.meta["val"].__class__ is not int]
    tokens = next((_shape(n) for n in ids if len(_shape(n)) == 2 and not isinstance(n.meta["val"], torch.nn.Parameter)), [])
    dense = {str(size) for size in tokens} - {"1"}
    counts: dict[str, collections.Counter] = {}
    for node in _nodes(gm):
        if node.op == "placeholder" or not _source(node):
            continue
        sizes = {str(size) for size in _shape(node)}
        kind = "packed" if sizes & packed else "dense" if dense and dense <= sizes else "neither"
        counts.setdefault(_source(node), collections.Counter())[kind] += 1
    rows = []
    for line, count in counts.items():
        cells = [f'<span class="{kind}">{count[kind] or ""}</span>' for kind in ("packed", "dense", "neither")]
        rows.append([_code(line), *cells])
    return rows


def _written(node: fx.Node) -> str:
    arguments = ", ".join(a.name for a in node.all_input_nodes)
    shape = f" {_shape(node)}" if _shape(node) else ""
    return f"{node.name}{shape} = {_name(node)}({arguments})" if node.op != "placeholder" else f"input {node.name}{shape}"


def _side_by_side(before: fx.GraphModule, after: fx.GraphModule) -> str:
    nodes = [_nodes(gm) for gm in (before, after)]
    kinds = [[f"{n.op} {_name(n)}" if n.op != "placeholder" else n.name for n in of] for of in nodes]
    rows = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, *kinds, autojunk=False).get_opcodes():
        left, right = nodes[0][a:b], nodes[1][c:d]
        for i in range(max(len(left), len(right))):
            cells = [html.escape(_written(side[i])) if i < len(side) else "" for side in (left, right)]
            marks = ("", "") if tag == "equal" else ("old" if cells[0] else "", "new" if cells[1] else "")
            rows.append("<tr>" + "".join(f'<td class="{m}">{cell}</td>' for m, cell in zip(marks, cells, strict=True)) + "</tr>")
    return f'<table class="graph"><tr><th>before</th><th>after</th></tr>{"".join(rows)}</table>'
