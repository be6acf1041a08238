"""The page of `explain --html`: self-contained, and it says what the report says."""

import html.parser
import re

import pytest
import torch

from dualkv_compile import cli, dump


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Balanced(html.parser.HTMLParser):
    """Tags that are open, and the text of the page."""

    def __init__(self):
        super().__init__()
        self.open, self.words = [], []

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        assert not {name for name, _ in attributes} & {"src", "href", "onclick"}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def explained(tmp_path, *arguments):
    path = tmp_path / "page.html"
    assert cli.main(["explain", "--override", "num_hidden_layers=2", "--html", str(path), *arguments]) == 0
    assert not dump.observers
    text, parser = path.read_text(), Balanced()
    parser.feed(text)
    assert parser.open == [] and "<script" not in text and not re.search(r"https?:|@import|url\(", text)
    return text, " ".join(parser.words)


def test_a_page_of_groups_of_unequal_size(tmp_path, capsys):
    text, words = explained(tmp_path, "--arch", "llama", "--layout", "3x20x6,2x9x4,1x5x3")
    tokens = sum(p - 1 + n * (r + 1) for n, p, r in ((3, 20, 6), (2, 9, 4), (1, 5, 3)))
    assert f"tokens {' ' * 11}{6 * 26} -> {tokens}  " in capsys.readouterr().out
    assert f"{6 * 26} dense -> {tokens} packed" in words and "Attention: 2 of 2 sites rewritten" in words
    assert "sdpa_attention.py:" in words and "Barriers: none" in words
    assert text.count("<rect") == 4 * 6 + 4  # rows of the batch, savings
    # the graph before and after: a position of each
    assert "dualkv.attention_site" in words and "dualkv.shared_prompt_attention" in words
    # every line of the decoder layer runs packed
    row = next(line for line in re.findall(r"<tr>.*?</tr>", text) if "self.o_proj(attn_output)" in line)
    assert re.search(r'class="packed">\d+<', row) and 'class="dense"></span>' in row


def test_a_page_with_barriers(tmp_path):
    dropout = ("--override", "resid_pdrop=0.1", "--override", "embd_pdrop=0.0", "--override", "attn_pdrop=0.0")
    _, words = explained(tmp_path, "--arch", "gpt2", "--rows", "3", "--prompt", "8", "--response", "4", *dropout)
    assert re.search(r"Barriers: [1-9]", words) and "random numbers" in words and "modeling_gpt2.py" in words


def test_layouts_are_read():
    assert cli.layout("4x256x64,2x100x30") == [(4, 256, 64), (2, 100, 30)]
    for wrong in ("4x256", "4x0x3", "axbxc", ""):
        with pytest.raises(cli.argparse.ArgumentTypeError, match="expected NxPxR"):
            cli.layout(wrong)
