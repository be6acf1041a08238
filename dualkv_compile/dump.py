"""Writes what the passes did: graphs before and after, reports, a drawing; log lines and TORCH_TRACE artifacts."""

from __future__ import annotations

import collections
import logging
import os
import shutil
import subprocess
import warnings

import torch
import torch.fx as fx

log = logging.getLogger("dualkv_compile.passes")


class Dumper:
    """Files of one compiled variant: `{graph}.{step:02d}.{pass}.{before|after}.py`, `.report.txt`, `.report.json`, `.svg` or `.dot`.

    directory: None writes nothing. One that cannot be written to gives one warning and no files.
    """

    def __init__(self, directory: str | None, graph: str):
        self.directory, self.graph = directory, graph
        if directory is not None:
            try:
                os.makedirs(directory, exist_ok=True)
            except OSError as error:
                self._give_up(error)

    def passes(self, captured: fx.GraphModule, recorded: fx.GraphModule, rewritten: fx.GraphModule) -> None:
        for step, (name, before, after) in enumerate([("trace", captured, recorded), ("propagate", recorded, rewritten)]):
            log.debug("%s: %s: %s", self.graph, name, _delta(_counts(before), _counts(after)))
            for when, gm in (("before", before), ("after", after)):
                self._write(f"{self.graph}.{step:02d}.{name}.{when}.py", lambda gm=gm: gm.print_readable(print_output=False))
        torch._logging.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"dualkv_{self.graph}", "encoding": "string"},
            payload_fn=lambda: rewritten.print_readable(print_output=False),
        )
        self._draw(rewritten)

    def report(self, report) -> None:
        if self.directory is not None:
            self._write(f"{self.graph}.report.txt", lambda: str(report) + "\n")
            self._write(f"{self.graph}.report.json", report.to_json)

    def _draw(self, gm: fx.GraphModule) -> None:
        if self.directory is None:
            return
        self._write(f"{self.graph}.dot", lambda: drawing(gm))
        dot = shutil.which("dot")
        if dot is None:
            log.warning("graphviz's dot is not installed: %s.dot was written, no SVG", self.graph)
            return
        path = os.path.join(self.directory, f"{self.graph}.dot")
        subprocess.run([dot, "-Tsvg", path, "-o", path[:-3] + "svg"], check=False, timeout=60)

    def _write(self, name: str, text) -> None:
        if self.directory is None:
            return
        try:
            with open(os.path.join(self.directory, name), "w") as file:
                file.write(text())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        warnings.warn(f"dualkv: expected a writable dump directory, got {self.directory!r} ({error}); nothing is dumped", stacklevel=3)
        self.directory = None


def _counts(gm: fx.GraphModule) -> collections.Counter:
    return collections.Counter(str(n.target) for n in gm.graph.nodes if n.op in ("call_function", "call_method"))


def _delta(before: collections.Counter, after: collections.Counter) -> str:
    changed = {k: after[k] - before[k] for k in before | after if after[k] != before[k]}
    largest = sorted(changed.items(), key=lambda item: -abs(item[1]))[:8]
    return f"{before.total()} -> {after.total()} operations; " + ", ".join(f"{k} {v:+d}" for k, v in largest)


_COLOURS = (("shared_prompt_attention", "gold"), ("unpack", "salmon"), ("index_select", "lightsalmon"), ("mm", "lightblue"))


def drawing(gm: fx.GraphModule) -> str:
    """The graph in graphviz's language: attention, conversions and products coloured; parameters left out."""
    lines = ["digraph packed {", ' node [shape=box, style=filled, fontname="monospace", fontsize=9];']
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") and "request" not in node.meta and "ids" not in node.name:
            continue
        colour = next((c for word, c in _COLOURS if word in str(node.target)), "white")
        value = node.meta.get("val")
        shape = f"\\n{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        lines.append(f' "{node.name}" [label="{node.name}{shape}", fillcolor={colour}];')
        lines += [f' "{a.name}" -> "{node.name}";' for a in node.all_input_nodes if a.op == "call_function" or "request" in a.meta]
    return "\n".join([*lines, "}"]) + "\n"
