"""Writes what the passes did: graphs before and after, reports, a drawing; log lines and TORCH_TRACE artifacts."""

from __future__ import annotations

import collections
import logging
import os
import shutil
import subprocess
from collections.abc import Callable

import torch
import torch.fx as fx

from dualkv_compile.drawing import drawing
from dualkv_compile.telling import warn

log = logging.getLogger("dualkv_compile.passes")

# Called with (name, captured, recorded, rewritten) for every variant that is made.
observers: list[Callable[[str, fx.GraphModule, fx.GraphModule, fx.GraphModule], None]] = []


class Dumper:
    """Files of one compiled variant: `{graph}.{step:02d}.{pass}.{before|after}.py`, `.report.txt`, `.report.json`, `.dot`, `.svg`.

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
        """captured: Dynamo's graph; recorded: what `trace` made of it; rewritten: what `propagate` made of that."""
        for observer in observers:
            observer(self.graph, captured, recorded, rewritten)
        for step, (name, before, after) in enumerate([("trace", captured, recorded), ("propagate", recorded, rewritten)]):
            if log.isEnabledFor(logging.INFO):
                log.info("%s: %s: %s", self.graph, name, delta(operations(before), operations(after)))
            for when, gm in (("before", before), ("after", after)):
                self._write(f"{self.graph}.{step:02d}.{name}.{when}.py", lambda gm=gm: _readable(gm))
            torch._logging.trace_structured(
                "artifact",
                metadata_fn=lambda name=name: {"name": f"dualkv_{self.graph}_{name}", "encoding": "string"},
                payload_fn=lambda gm=after: _readable(gm),
            )
        self._draw(rewritten)

    def report(self, report) -> None:
        """The report as a table and as JSON; written anew at every call, since its counts are those of the latest one."""
        self._write(f"{self.graph}.report.txt", lambda: f"{report}\n")
        self._write(f"{self.graph}.report.json", report.to_json)

    def _draw(self, gm: fx.GraphModule) -> None:
        if not self._write(f"{self.graph}.dot", lambda: drawing(gm)):
            return
        dot = shutil.which("dot")
        if dot is None:
            log.warning("graphviz's dot is not on PATH: %s.dot was written, and no SVG", self.graph)
            return
        path = os.path.join(self.directory, self.graph)
        try:
            subprocess.run([dot, "-Tsvg", f"{path}.dot", "-o", f"{path}.svg"], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("graphviz's dot did not draw %s.dot: %s", self.graph, error)

    def _write(self, name: str, text: Callable[[], str]) -> bool:
        if self.directory is None:
            return False
        try:
            with open(os.path.join(self.directory, name), "w", encoding="utf-8") as file:
                file.write(text())
        except OSError as error:
            self._give_up(error)
        return self.directory is not None

    def _give_up(self, error: OSError) -> None:
        warn(f"dualkv: expected a writable dump directory, got {self.directory!r} ({error}); nothing more is dumped")
        self.directory = None


def _readable(gm: fx.GraphModule) -> str:
    return gm.print_readable(print_output=False)


def operations(gm: fx.GraphModule) -> collections.Counter:
    """How often each operation stands in a graph, those inside checkpointed regions included."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return collections.Counter(_name(n) for g in graphs for n in g.nodes if n.op in ("call_function", "call_method"))


def _name(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else node._pretty_print_target(node.target)
    return name.removeprefix("torch.ops.")


def delta(before: collections.Counter, after: collections.Counter, shown: int = 8) -> str:
    """'812 -> 640 operations; aten.expand.default -56, …': the total, and the largest changes first."""
    changes = {name: after[name] - before[name] for name in before | after if after[name] != before[name]}
    largest = sorted(changes.items(), key=lambda item: (-abs(item[1]), item[0]))
    listed = ", ".join(f"{name} {change:+d}" for name, change in largest[:shown]) + (", …" if len(largest) > shown else "")
    return f"{before.total()} -> {after.total()} operations" + (f"; {listed}" if listed else "")
