"""What is written for people: files, drawing, log lines, artifacts, and that a directory that cannot be written to breaks nothing."""

import collections
import json
import logging
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from batches import batch_of, mark
from nanogpt import NanoGPT

import dualkv_compile
from dualkv_compile import dump
from dualkv_compile.drawing import drawing
from dualkv_compile.report import Barrier, Report

CASE = batch_of([(6, [3, 2]), (4, [2, 2, 5])])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(**options):
    """(output, reports) of one marked batch through a small model."""
    model = torch.compile(NanoGPT(), backend="dualkv", options={"inner_backend": "eager", **options})
    out = model(mark(CASE, ("input_ids",))["input_ids"])
    return out, dualkv_compile.reports()


def files(directory):
    return sorted(re.sub(r"^graph_\d+\.", "", name) for name in os.listdir(directory))


def test_the_option_writes_graphs_report_and_drawing(tmp_path, monkeypatch):
    monkeypatch.setattr(dump.shutil, "which", lambda name: None)
    _, reports = run(dump=str(tmp_path / "new" / "folder"))
    found = files(tmp_path / "new" / "folder")
    expected = [f"packed.{step}.{when}.py" for step in ("00.trace", "01.propagate") for when in ("before", "after")]
    assert set(expected) <= set(found)
    assert {"packed.report.txt", "packed.report.json", "packed.dot"} <= set(found)
    (after,) = (tmp_path / "new" / "folder").glob("*.01.propagate.after.py")
    assert "shared_prompt_attention" in after.read_text()
    compile(after.read_text(), str(after), "exec")
    (report,) = (tmp_path / "new" / "folder").glob("*.json")
    written = json.loads(report.read_text())
    packed = next(r for r in reports if r.attention_rewritten)
    assert (written["attention_sites"], written["packed_tokens"]) == (packed.attention_sites, packed.packed_tokens)


def test_the_environment_variable_does_what_the_option_does(tmp_path, monkeypatch):
    monkeypatch.setenv("DUALKV_DUMP", str(tmp_path))
    run()
    assert "packed.report.json" in files(tmp_path)


def test_without_graphviz_a_line_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dump.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING, "dualkv_compile.passes"):
        run(dump=str(tmp_path))
    assert any("not on PATH" in r.message and ".dot was written" in r.message for r in caplog.records)
    assert not list(tmp_path.glob("*.svg"))


def test_a_graphviz_that_fails_is_logged_and_breaks_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dump.shutil, "which", lambda name: "/bin/false")
    with caplog.at_level(logging.WARNING, "dualkv_compile.passes"):
        run(dump=str(tmp_path))
    assert any("did not draw" in r.message for r in caplog.records)


def test_a_directory_that_cannot_be_written_gives_one_warning(tmp_path):
    blocker = tmp_path / "a file"
    blocker.write_text("")
    plain, _ = run()
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, _ = run(dump=str(blocker))
    assert len([w for w in caught if "writable dump directory" in str(w.message)]) == 1
    assert blocker.read_text() == ""
    assert out.shape == plain.shape


def test_one_log_line_a_pass_with_what_changed(caplog):
    with caplog.at_level(logging.INFO, "dualkv_compile.passes"):
        run()
    lines = [r.message for r in caplog.records if " operations" in r.message]
    assert [re.search(r": (\w+):", line).group(1) for line in lines] == ["trace", "propagate"]
    assert "shared_prompt_attention" in lines[1] or "…" in lines[1]


def test_artifacts_reach_torch_trace(tmp_path):
    code = (
        "import torch, dualkv_compile\nfrom batches import batch_of, mark\nfrom nanogpt import NanoGPT\n"
        "model = torch.compile(NanoGPT(), backend='dualkv', options={'inner_backend': 'eager'})\n"
        "model(mark(batch_of([(6, [3, 2])]), ('input_ids',))['input_ids'])\n"
    )
    env = {**os.environ, "TORCH_TRACE": str(tmp_path), "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=200)
    text = "".join(f.read_text() for f in tmp_path.rglob("*") if f.is_file())
    for name in ("trace", "propagate"):
        assert re.search(rf'"name": ?"dualkv_graph_0\.packed_{name}"', text)
    assert "shared_prompt_attention" in text


def test_delta_names_the_largest_changes_first():
    before, after = collections.Counter(a=5, b=2, c=1), collections.Counter(a=1, b=3, c=1)
    assert dump.delta(before, after) == "8 -> 5 operations; a -4, b +1"
    assert dump.delta(before, before) == "8 -> 8 operations"
    assert dump.delta(before, after, shown=1).endswith("a -4, …")


def test_a_drawing_collapses_others_and_never_makes_a_cycle():
    graph = torch.fx.Graph()
    ids = graph.placeholder("ids")
    ids.meta["val"] = torch.zeros(2, 3, dtype=torch.long)
    first = graph.call_function(torch.ops.aten.relu.default, (ids,))
    product = graph.call_function(torch.ops.aten.mm.default, (first, first))
    second = graph.call_function(torch.ops.aten.add.Tensor, (product, first))  # reads `first` directly, and through the product
    graph.output(graph.call_function(torch.ops.aten.relu.default, (second,)))
    text = drawing(torch.fx.GraphModule({}, graph))
    edges = re.findall(r'"(\w+)" -> "(\w+)"', text)
    assert "2 operations" in text and "lightblue" in text
    order = [name for name in re.findall(r'^  "(\w+)" \[', text, re.M)]
    successors = collections.defaultdict(set)
    for a, b in edges:
        successors[a].add(b)
    done = set()

    def visit(name, path):
        assert name not in path, f"a cycle through {name}"
        if name not in done:
            for other in successors[name]:
                visit(other, path | {name})
            done.add(name)

    for name in order:
        visit(name, frozenset())


def test_a_report_reads_as_a_table_and_as_json():
    barrier = Barrier("aten.cumsum.default", "runs along the columns", '  File "m.py", line 3, in forward\n    x.cumsum(1)\n')
    report = Report("graph_7", "packed", 4, 3, 100, 40, 1000, 400, [barrier], 2, 1, ["a note"])
    text = str(report)
    for words in ("graph_7 (packed)", "3 of 4 rewritten", "100 -> 40", "2.50x", "1,000 -> 400", "aten.cumsum.default", "x.cumsum(1)"):
        assert words in text
    assert text.endswith("a note")
    loaded = json.loads(report.to_json())
    assert loaded["barriers"] == [{"op": barrier.op, "reason": barrier.reason, "source": barrier.source}]
    assert loaded["dense_flops"] == 1000


def test_reports_are_forgotten_at_reset():
    run()
    assert dualkv_compile.reports()
    torch._dynamo.reset()
    assert not dualkv_compile.reports()
