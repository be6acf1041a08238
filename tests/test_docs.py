"""Documentation that is run: Python blocks of README.md and docs/, examples, command-line transcripts; and names that must exist.

A block runs in a namespace that holds torch, dualkv_compile, a small `model`, a `batch` for it and its `P` and `N`. A block preceded by
`<!-- not run -->` is not.
"""

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
