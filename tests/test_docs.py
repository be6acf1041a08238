"""Documentation that is run: Python blocks of README.md and docs/, examples, command-line transcripts; and names that must exist.

A block runs in a namespace that holds torch, dualkv_compile, a small `model`, a `batch` for it and its `P` and `N`. A block preceded by
`<!-- not run -->` is not.
"""

import ast
import contextlib
import dataclasses
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import dualkv_compile
from dualkv_compile import cli
from dualkv_compile.options import Options

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}

FENCE = re.compile(r"(?P<skip><!-- not run -->\s*)?^```python\n(?P<code>.*?)^```", re.M | re.S)
BLOCKS = [
    pytest.param(match["code"], id=f"{page}:{text[: match.start('code')].count(chr(10)) + 1}")
    for page, text in TEXT.items()
    for match in FENCE.finditer(text)
    if not match["skip"]
]
TRANSCRIPTS = [
    pytest.param(match[1], match[2], id=f"{page}: {match[1]}")
    for page, text in TEXT.items()
    for match in re.finditer(r"^    \$ python -m dualkv_compile (.+)\n((?:    .*\n)+)", text, re.M)
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("code", BLOCKS)
def test_block(code):
    torch.manual_seed(0)
    model = cli.build("qwen3", 24, {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1})
    ids = torch.randint(64, (4, 24))
    ids[:, :16] = ids[:1, :16]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names = {"torch": torch, "dualkv_compile": dualkv_compile, "model": model, "batch": batch, "P": 16, "N": 4}
    exec(compile(code, "block", "exec"), names)


def test_the_readme_has_blocks_and_a_transcript():
    assert BLOCKS and TRANSCRIPTS


@pytest.mark.parametrize("command, output", TRANSCRIPTS)
def test_transcript(command, output):
    """Graph numbers differ from process to process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(command.split()) == 0
    expected = "".join(line[4:] for line in output.splitlines(keepends=True))
    assert re.sub(r"graph_\d+", "graph_0", printed.getvalue()) == expected


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example(path):
    env = {**os.environ, "DUALKV_INNER_BACKEND": "aot_eager", "DUALKV_STRICT": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert re.search(r"attention sites +(\d+) of \1 rewritten", done.stdout), done.stdout


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT[page]):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", TEXT)
def test_names_exist(page):
    """Options, environment variables and make targets that a page names."""
    text = TEXT[page]
    own = {field.name for field in dataclasses.fields(Options)}
    for name in re.findall(r'options=\{"(\w+)"', text):
        assert name in own, name
    sources = "".join(p.read_text() for folder in ("dualkv_compile", "passes", "kernels") for p in (ROOT / folder).glob("*.py"))
    for name in set(re.findall(r"\bDUALKV_[A-Z_]+", text)):
        assert name in sources, name
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"`make (\w+)", text)):
        assert re.search(rf"^{name}:", makefile, re.M), name
    for name in set(re.findall(r"\bdualkv_compile\.(\w+)\(", text)):
        assert hasattr(dualkv_compile, name), name


# ---------------------------------------------------------------------------------------------------- troubleshooting


def literal(node):
    """The constant parts of a message, in order; what it fills in is left out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"%s|\{\w*\}", node.value)
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in literal(value)]
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return []


def messages(path):
    """(what is raised or called, constant parts) of each warning and error of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield ast.unparse(node.exc.func), literal(node.exc.args[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "log.warning", "Barrier", "CannotDeduplicate"):
            yield ast.unparse(node.func), literal(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("expected "):
            yield "text", literal(node)


#: Of the command line, which prints what to do; and of the inside, caught there or impossible.
NOT_SHOWN = ("argparse.ArgumentTypeError", "Unknown", "Refused", "self.reads_padding", "engine.reads_padding")
INSIDE = ("cli.py", "demo.py", "masks.py", "symbolic.py", "trace.py")
REASONS = ("Barrier", "CannotDeduplicate")


def test_every_warning_and_error_is_explained():
    text = " ".join(TEXT["docs/troubleshooting.md"].split())
    families = re.findall(r"\*\*([^*]+)\*\*", text.split("## Reasons of barriers")[1])
    missing, count = [], 0
    for path in [p for folder in ("dualkv_compile", "passes", "kernels") for p in sorted((ROOT / folder).glob("*.py"))]:
        for kind, parts in messages(path):
            parts = [part.strip(" ,.:;()[]'\"") for part in parts]
            longest = max(parts, key=len, default="")
            if kind in NOT_SHOWN or len(longest) < 12 or (path.name in INSIDE and kind not in REASONS):
                continue
            count += 1
            if kind in REASONS:
                covered = any(family in part for family in families for part in parts)
            else:
                # a whole constant part, or the beginning of a long one
                covered = any(len(part) >= 12 and (part in text or part[:40] in text) for part in parts)
            if not covered:
                missing.append(f"{path.name}: {kind}: {' … '.join(parts)}")
    assert count > 60 and not missing, "\n".join(missing)
