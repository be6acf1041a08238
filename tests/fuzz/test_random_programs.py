"""Random decoders over random batches, compiled, against eager mode: outputs and every gradient, in float64."""

from __future__ import annotations

import operator

import pytest
import torch
from compare import Wrong, check
from finds import PROGRAMS
from hypothesis import given
from hypothesis import strategies as st
from programs import Program, Register
from scale import examples
from strategies import batches, programs

import dualkv_compile
from dualkv_compile import inner

several = st.lists(batches(), min_size=1, max_size=2)
inner_backends = st.sampled_from(["eager", "eager", "aot_eager"])


@pytest.mark.parametrize("padded", [True, False])
def test_whatever_the_program(padded):
    """Unsound operations are barriers, or the batch runs dense: never other numbers."""

    @examples(12)
    @given(programs(padded=padded), several, inner_backends)
    def right(program, drawn, inner_backend):
        check(program, drawn, inner_backend)

    right()


@examples(20)
@given(programs(sound=True), several, inner_backends)
def test_sound_programs(program, drawn, inner_backend):
    """Token-wise operations and causal attention alone."""
    check(program, drawn, inner_backend)


@examples(15)
@given(programs(sound=True, padded=True), batches())
def test_a_token_output_is_unpacked_once(program, batch):
    """Where everything runs packed, there is one unpack for each output and none in between."""
    counted = []
    original = inner.compile_graph

    def counting(gm, *args):
        graphs = [m.graph for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
        counted.append(sum(n.target is torch.ops.dualkv.unpack.default for g in graphs for n in g.nodes))
        return original(gm, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "compile_graph", counting)
        reports = [r for r in check(program, [batch], "eager") if r.calls and r.variant.startswith("packed")]
    if len(reports) == 1 and not reports[0].barriers and len(counted) == 1:
        assert reports[0].attention_rewritten == reports[0].attention_sites
        assert counted[0] <= len(program.outputs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_finds(name):
    """What the fuzzer found, shrunk."""
    program, drawn = PROGRAMS[name]
    check(program, drawn, "eager")


def test_a_wrong_number_is_seen(monkeypatch):
    """The comparison itself: a rewrite that takes another row's response, and one that forgets it in the backward."""
    tokens = (("b",), ("s",), (8,))
    lines = ("v0 = self.tokens[input_ids]", "v1 = torch.tanh(v0)", "v2 = v1 * v1.mean(1, keepdim=True)")
    program = Program(lines, ("input_ids",), (), (Register("v2", tokens),))
    batch = [{"groups": [(3, [2, 2])], "left_pads": None, "seed": 0, "order": None}]
    check(program, batch, "eager")
    original = inner.compile_graph

    def wrong(change):
        def compile_graph(gm, *args):
            for node in gm.graph.nodes:
                if node.target is torch.ops.aten.tanh.default:
                    with gm.graph.inserting_after(node):
                        new = gm.graph.call_function(change, (node,))
                    node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
            gm.recompile()
            return original(gm, *args)

        return compile_graph

    for change in (lambda x: x.roll(1, 1), lambda x: operator.add(x.detach() * 0.5, x * 0.5)):
        monkeypatch.setattr(inner, "compile_graph", wrong(change))
        with pytest.raises(Wrong):
            check(program, batch, "eager")
    assert dualkv_compile.reports()
