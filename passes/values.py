"""What the propagation knows of one value of the recorded graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.graph import Window
from dualkv_compile.passes.layout import Layout


@dataclasses.dataclass(frozen=True)
class AtPadding:
    """Where `facts` (Boolean nodes) hold, a value is this number at all padding positions, in the unmarked batch too: whatever stands at
    the padding of what it was computed from."""

    number: bool | int | float
    facts: tuple[fx.Node, ...]


@dataclasses.dataclass
class Value:
    """One tensor of the recorded graph and the node of the new graph that holds it.

    A *packed* value exists once per packed token (`packed`); a *dense* one as the user's program has it (`dense`). Inputs and what is
    computed from them alone (positions, labels, masks) stay dense and are packed where a packed value meets them. An attention
    score or probability has neither: `score` says what it means, and it is computed only if something other than attention asks.
    """

    node: fx.Node
    layout: Layout
    packed: fx.Node | None = None
    dense: fx.Node | None = None
    score: Any = None
    # packed, in an order of its own that only `dualkv_compile.passes.routing` understands; dense, it is computed anew
    routed: Any = None
    # token values: equal in all copies of a packed token. False: each row has its own, so the value is dense
    shared: bool = True
    # dense token values: how many columns after a shared token its value is equal in all rows still
    reach: int = 0
    # dense, and computed without parameters: small enough to be kept dense until a packed value meets it
    light: bool = False
    # dense, and computed from the graph's inputs alone, none of which is learned, nothing packed before it: usable in a fact
    pure: bool = False
    # dense, behind an unpack that left padding out: padding positions lack the numbers that the unmarked batch has there
    tainted: bool = False
    # what it is at padding positions, if that depends on no padding
    at_padding: AtPadding | None = None
    # the symbolic element (`dualkv_compile.passes.masks`), if known
    element: Any = None

    @property
    def is_token(self) -> bool:
        return self.layout.is_token

    @property
    def is_packed(self) -> bool:
        return self.packed is not None

    @property
    def fake(self) -> torch.Tensor:
        return self.node.meta["val"]

    @property
    def window(self) -> Window:
        column = self.layout.column
        return Window.of(column.offset, column.size)


@dataclasses.dataclass(frozen=True)
class Undescribed:
    """Stands for a value that says what an operator on functions computes, and that no rule understands."""

    reason: str
