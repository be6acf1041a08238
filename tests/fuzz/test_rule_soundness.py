"""Every rule's claim, by computing both: the operation on packed operands is the packed form of its dense result; the layout is true."""

from __future__ import annotations

import operator

import pytest
import torch
from bench import Bench
from hypothesis import assume, given
from hypothesis import strategies as st
from rule_cases import CASES, Drawing
from scale import examples
from strategies import batches

from dualkv_compile.passes.errors import CannotDeduplicate
from dualkv_compile.passes.rules import RULES


def test_every_rule_has_a_case():
    assert {str(t) for t in RULES} - {str(t) for t in CASES} == set(), "write a case for the new rule in rule_cases.py"


@pytest.mark.parametrize("is_row", [False, True], ids=["rows", "row"])
@pytest.mark.parametrize("target", list(CASES), ids=str)
def test_rule(target, is_row):
    packed = 0

    @examples(25)
    @given(st.data(), batches(max_rows=4, max_prompt=4, max_response=3), st.booleans())
    def soundness(data, batch, keep):
        nonlocal packed
        bench = Bench(batch, is_row=is_row)
        assume((bench.rows > 1 or is_row) and bench.columns > 1)  # others are not packed
        drawing = Drawing(data.draw, bench)
        try:
            CASES[target](drawing, target)
        except (RuntimeError, IndexError, TypeError):
            return  # not an operation that torch performs
        try:
            found = bench.check(keep)
        except CannotDeduplicate:
            return
        packed += any(value.is_packed for node, value in found if target in (node.target, _one_of(node), "pointwise"))

    torch.manual_seed(0)
    soundness()
    exempt = is_row or "full" in str(target) or target in NEVER_PACKED
    assert packed or exempt, "no example ran packed: the case draws nothing that the rule accepts"


def _one_of(node):
    """The operation that a node is one of the results of."""
    return node.args[0].target if node.target is operator.getitem else None


# what is made from nothing, what reduces over tokens, and what runs along columns
NEVER_PACKED = {t for t in CASES if any(name in str(t) for name in ("zeros", "ones", "empty", "scalar_tensor", "nll_loss"))} | {
    getattr(torch.ops.aten, name).default for name in ("sum", "mean", "any", "all", "max", "min", "prod", "baddbmm", "convolution")
}
