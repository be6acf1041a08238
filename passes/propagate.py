"""Walks a recorded graph once and builds the graph that runs each distinct token once.

For every operation, in order:
 1. a rule of `dualkv_compile.passes.rules` says what each dimension of the result indexes, or raises Barrier;
 2. token values that are equal in all copies of a packed token run packed: `[B, S, H]` becomes `[1, T', H]`, the rank is kept and
    only arguments that mean B or S change;
 3. attention (`dualkv_compile.passes.sites`) becomes one `dualkv::shared_prompt_attention` if its mask is proved to be causal;
 4. everything else runs dense, on unpacked operands, and is reported as a barrier with the user's line;
 5. outputs are unpacked to the user's shape.

    hidden [4, 96, 64] -- view --> [384, 64] -- mm --> [384, 96]        becomes
    hidden [1, 150, 64] -- reshape --> [150, 64] -- mm --> [150, 96]
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from dualkv_compile.passes import at_padding, flex, functions, masks, routing, sites, tokenwise
from dualkv_compile.passes.convert import Converter
from dualkv_compile.passes.errors import Barrier, CannotDeduplicate, ReadsPadding
from dualkv_compile.passes.graph import Emitter, Request, Window
from dualkv_compile.passes.layout import Atom, Kind, Layout, Size, over_tokens, product
from dualkv_compile.passes.regions import outline
from dualkv_compile.passes.rules import RULES, Op, Result
from dualkv_compile.passes.simplify import draws, grad_enabled, is_pointwise, writes
from dualkv_compile.passes.trace import Region
from dualkv_compile.passes.values import Undescribed, Value

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class TokenInput:
    """A placeholder that carries a mark: where its rows and columns are (one dimension, if they are flattened), and whether its shared
    prompt columns are equal in each group."""

    row_dim: int = 0
    column_dim: int = 1
    shared: bool = True
    is_padding_mask: bool = False
    blank: bool = False  # its padding positions hold zeros, not what the unmarked batch has there
    reach: int = 0  # how many of the prompt columns that each row owns are equal in all rows of a group as well


@dataclasses.dataclass(frozen=True)
class TokenOutput:
    """An output that is equal in all copies of a token: which of its dimensions are the rows and the columns."""

    index: int
    row_dim: int
    column_dim: int
    blank: bool
    reach: int


@dataclasses.dataclass(frozen=True)
class BarrierNote:
    op: str
    reason: str
    source: str | None


@dataclasses.dataclass
class PackingChoice:
    """How this graph packs the batch, decided before the walk. `padding` is that of the plan: "none", "right" or "left"; padding in gaps
    between real columns, which `has_gaps` speaks of, is never left out."""

    num_rows: Size
    num_columns: Size
    padding: str
    keep_padding: bool
    window_has_padding: Callable[[Window], bool]
    num_tables: int
    has_gaps: bool = False
    is_row: bool = False  # one row of many sequences
    attention_impl: str = "auto"

    @property
    def drops_padding(self) -> bool:
        return self.padding != "none" and not self.keep_padding

    @property
    def holds_padding(self) -> bool:
        """Whether some tokens are padding."""
        return self.has_gaps or (self.padding != "none" and self.keep_padding)


@dataclasses.dataclass
class Flops:
    """Matmul FLOPs of the forward, symbolic in the batch's sizes; attention is counted per (query, key) pair that is seen."""

    dense: Size = 0
    packed: Size = 0
    dense_per_pair: int = 0
    packed_per_pair: int = 0


@dataclasses.dataclass
class Rewrite:
    """The rewritten graph: its placeholders are the recorded graph's followed by one per request."""

    gm: fx.GraphModule
    requests: list[Request]
    facts: fx.GraphModule | None  # same inputs -> one Boolean: what must hold on the actual tensors
    unpadded_windows: list[Window]  # windows that must hold no padding
    barriers: list[BarrierNote]
    sites_found: int
    sites_rewritten: int
    flops: Flops
    token_outputs: list[TokenOutput]


def propagate(
    recorded: fx.GraphModule,
    token_inputs: dict[str, TokenInput],
    choice: PackingChoice,
    fake_request: Callable[[Request], torch.Tensor],
) -> Rewrite:
    """Rewrites a recorded graph for a marked batch.

    `token_inputs` names the placeholders that are marked; `fake_request` makes the fake tensor of an extra input.
    Raises CannotDeduplicate (ReadsPadding, where another packing may do) if the graph cannot be proved right as a whole.
    """
    walk = Propagation(recorded, token_inputs, choice, fake_request)
    try:
        return walk.run()
    except CannotDeduplicate as error:
        error.sites_found = walk.sites_found
        raise


class Propagation:
    def __init__(self, recorded, token_inputs, choice, fake_request):
        self.recorded: fx.GraphModule = recorded
        self.token_inputs: dict[str, TokenInput] = token_inputs
        self.choice: PackingChoice = choice
        self.emitter = Emitter(recorded, fake_request)
        self.convert = Converter(self.emitter, choice.num_rows)
        self.values: dict[fx.Node, Any] = {}
        self.barriers: list[BarrierNote] = []
        self.facts: dict[fx.Node, None] = {}
        self.unpadded_windows: list[Window] = []
        self.sites_found = 0
        self.sites_rewritten = 0
        self.flops = Flops()
        self.token_outputs: list[TokenOutput] = []

    # -- the walk ----------------------------------------------------------------------------------------------------------

    def run(self) -> Rewrite:
        nodes = list(self.recorded.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = self.placeholder(node)
        self.emitter.bind_all_sizes()
        for node in nodes:
            self.emitter.region = node.meta.get("region", Region())
            self.emitter.source = node.meta.get("stack_trace")
            if node.op == "get_attr" and node.meta["val"] is None:
                self.values[node] = self.emitter.function(node.target)
            elif node.op == "get_attr":
                dense = self.emitter.request(Request("constant", name=node.target))
                value = Value(node, Layout.plain(node.meta["val"].shape), dense=dense, light=True, pure=True)
                constant = getattr(self.recorded, node.target)
                if constant.numel() == 1:
                    with _disable_current_modes():
                        value.element = masks.constant_element(node, constant.item())
                self.values[node] = value
            elif node.op == "call_function":
                self.values[node] = self.operation(node)
            elif node.op == "output":
                self.output(node)
        facts = self.facts_module()
        eliminate_dead_code(self.emitter.graph)
        return Rewrite(
            gm=outline(self.emitter.module()),
            requests=list(self.emitter.requests),
            facts=facts,
            unpadded_windows=self.unpadded_windows,
            barriers=self.barriers,
            sites_found=self.sites_found,
            sites_rewritten=self.sites_rewritten,
            flops=self.flops,
            token_outputs=self.token_outputs,
        )

    def placeholder(self, node: fx.Node) -> Any:
        new = self.emitter.placeholder(node)
        fake = node.meta["val"]
        if not isinstance(fake, torch.Tensor):
            return new
        mark = self.token_inputs.get(node.name)
        light = not fake.is_floating_point()
        layout = Layout.plain(fake.shape)
        if mark is not None:
            dims = list(layout.dims)
            rows, columns = Atom(Kind.ROW, self.choice.num_rows), Atom(Kind.COLUMN, self.choice.num_columns)
            if mark.row_dim == mark.column_dim:
                dims[mark.row_dim] = (rows, columns)
                light = light or (len(dims) == 2 and self.choice.is_row)
                if not fake.shape[mark.row_dim] == rows.size * columns.size:  # asked once, so that it is known from here on
                    raise CannotDeduplicate("an output of an earlier piece has another number of tokens")
            else:
                dims[mark.row_dim], dims[mark.column_dim] = (rows,), (columns,)
                light = light or len(dims) == 2
            layout = Layout(tuple(dims))
        # what a fact says of a learned value would take its gradient away
        value = Value(node, layout, dense=new, light=light, pure=not fake.requires_grad)
        if mark is not None:
            value.shared, value.tainted, value.reach = mark.shared, mark.blank, mark.reach
            value.pure = value.pure and not mark.blank  # nor must a fact be true because padding is blank
        if not fake.requires_grad:
            value.element = masks.input_element(node, "padding_mask" if mark is not None and mark.is_padding_mask else "data")
        return value

    def operation(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]
        undescribed = [v for v in map(self.values.get, node.all_input_nodes) if isinstance(v, Undescribed)]
        if undescribed and node.meta.get("describes"):
            return undescribed[0]
        op = Op(self, node)
        try:
            if node.target is functions.FLEX_ATTENTION:
                result = flex.attention(self, op)
            elif any(v.score is not None for v in op.values):
                result = sites.through_scores(self, op)
            elif any(v.routed is not None for v in op.values):
                result = routing.through_routing(self, op)
            elif node.target is torch.ops.dualkv.attention_site.default:
                self.sites_found += 1
                result = sites.attention_call(self, op)
            else:
                result = self.by_rule(op)
        except Barrier as barrier:
            if node.meta.get("describes") and any(v.is_packed or v.score is not None for v in op.values):
                return Undescribed(str(barrier))
            result = self.dense_operation(op, str(barrier))
        if isinstance(result, Value) and result.dense is not None and isinstance(node.meta["val"], torch.Tensor):
            result.element = masks.evaluate(node, self.element_of)
            if result.element is None and self.choice.is_row and result.pure and not result.fake.is_floating_point():
                result.element = masks.input_element(node, "data")  # numbers of sequences, say
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Value) and not self.emitter.region.grad_enabled:
                self.without_gradient(value)
            if self.choice.drops_padding and isinstance(value, Value) and value.is_token and value.score is None and value.routed is None:
                value.at_padding = value.at_padding or at_padding.of_result(self, op, value)
        return result

    def without_gradient(self, value: Value) -> None:
        """A result under no_grad may be an operand as it is, of a view that changes nothing, say: then it loses its gradient here."""
        for form in ("packed", "dense"):
            node = getattr(value, form)
            if node is not None and grad_enabled(node) and node.meta["val"].is_floating_point():
                setattr(value, form, self.emitter.call(aten.detach.default, node))

    def element_of(self, node: fx.Node) -> Any:
        value = self.values.get(node)
        return value.element if isinstance(value, Value) else None

    def by_rule(self, op: Op) -> Any:
        rule = RULES.get(op.target)
        if rule is None and is_pointwise(op.target) and not writes(op.node):
            rule = RULES["pointwise"]
        is_token = any(v.is_token for v in op.values)
        if op.target is functions.AUTOGRAD_FUNCTION and is_token and any(self.runs_packed(v) for v in op.values):
            return tokenwise.autograd_function(self, op)
        if rule is None:
            if is_token and isinstance(op.target, torch._ops.HigherOrderOperator):
                raise Barrier("calls functions that are not looked into")
            if is_token:
                random = "draws random numbers, which rows do not share (dropout: 0 or eval() avoids it)"
                raise Barrier(random if draws(op.target) else "has no rule for packed tokens")
            return self.dense_result(op, Result(None))
        result = rule(op)
        if not isinstance(result, Result):
            return result
        if not is_token:
            return self.dense_result(op, result)
        unshared = result.unshared
        for v in op.values:
            if v.is_token and not v.shared:
                unshared = unshared or f"reads values that differ from row to row ({v.node})"
        if unshared is None and any(self.runs_packed(v) for v in op.values):
            call = self.emitter.call
            packed = result.build() if result.build else call(op.target, *op.packed_args(), **op.packed_kwargs())
            return self.wrap(op, result, packed=packed)
        if unshared is not None:
            self.note_barrier(op, unshared)
        return self.dense_result(op, result, shared=unshared is None)

    def dense_result(self, op: Op, result: Result, shared: bool = True) -> Any:
        """The operation as the user wrote it, token-wise or on no tokens at all."""
        tainted = self.is_tainted(op)
        dense = self.emit_dense(op.node)
        light, pure = all(v.light for v in op.values), _is_pure(op)
        reach = min((v.reach for v in op.values if v.is_token), default=0)
        return self.wrap(op, result, dense=dense, shared=shared, light=light, pure=pure, tainted=tainted, reach=reach)

    def dense_operation(self, op: Op, reason: str) -> Any:
        """Mixes tokens in a way that no rule proves harmless: the operation sees exactly what the unmarked batch shows it."""
        self.note_barrier(op, reason)
        for v in op.values:
            if v.tainted or self.loses_padding(v):
                self.excuse_padding(v, op, reason)
        dense = self.emit_dense(op.node)
        return self.wrap(op, Result(None), dense=dense, light=all(v.light for v in op.values), pure=_is_pure(op))

    def note_barrier(self, op: Op, reason: str) -> None:
        is_site = op.target in (torch.ops.dualkv.attention_site.default, functions.FLEX_ATTENTION)
        if is_site or any(v.is_packed or v.score is not None or _is_first_unshared(v) for v in op.values):
            self.barriers.append(BarrierNote(str(op.target), reason, op.node.meta.get("stack_trace")))

    def wrap(self, op: Op, result: Result, **where: Any) -> Any:
        """Values for a node's result(s)."""
        fakes = op.node.meta["val"]
        many = isinstance(fakes, (tuple, list))
        values: list[Any] = []
        for i, fake in enumerate(fakes if many else [fakes]):
            if not isinstance(fake, torch.Tensor):
                values.append(next(iter(where.values())))
                continue
            layouts = result.layouts
            layout = (layouts[i] if isinstance(layouts, (tuple, list)) else layouts) or Layout.plain(fake.shape)
            here = {k: self.emitter.getitem(v, i) if many and isinstance(v, fx.Node) else v for k, v in where.items()}
            values.append(Value(self.result_node(op.node, i) if many else op.node, layout, **here))
        return values if many else values[0]

    @staticmethod
    def result_node(node: fx.Node, index: int) -> fx.Node:
        """The node of one of several results, if anything reads it."""
        return next((u for u in node.users if u.target is operator.getitem and u.args[1] == index), node)

    # -- padding -----------------------------------------------------------------------------------------------------------

    def loses_padding(self, value: Value) -> bool:
        """Whether the dense form of a value that has none yet will lack the unmarked batch's numbers at padding positions."""
        if value.dense is not None:
            return False
        if value.score is not None or value.routed is not None:
            return self.choice.drops_padding
        return self.window_is_padded(value.window)

    def window_is_padded(self, window: Window) -> bool:
        if not self.choice.drops_padding or self.choice.window_has_padding(window):
            return self.choice.drops_padding
        if window not in self.unpadded_windows:
            self.unpadded_windows.append(window)
        return False

    def is_tainted(self, op: Op) -> bool:
        return any(v.tainted or self.loses_padding(v) for v in op.values)

    def excuse_padding(self, value: Value, op: Op, reason: str) -> None:
        """From here on the value's dense form holds at padding what the unmarked batch has there; or it cannot, and padding is kept."""
        if value.at_padding is None:
            raise self.reads_padding(op, reason)
        self.facts.update(dict.fromkeys(value.at_padding.facts))
        if value.tainted or value.at_padding.number != 0:
            value.dense = self.convert.fill_padding(value, self.dense(value), value.at_padding.number)
            value.tainted = False

    @staticmethod
    def reads_padding(op: Op, reason: str) -> ReadsPadding:
        lines = [text.strip() for text in (op.node.meta.get("stack_trace") or "").splitlines()]
        line = next((text for text in reversed(lines) if text.strip("^~ ")), "")
        return ReadsPadding(f"{op.target} {reason}, which reads padding positions" + (f": {line}" if line else ""))

    def zero_fact(self, nonzero: fx.Node, layout: Layout, window: Window) -> fx.Node | None:
        """The fact "`nonzero`, which broadcasts against a token layout, is False wherever there is padding"."""
        if not self.choice.drops_padding or any(len({over_tokens((a,)) for a in dim}) > 1 for dim in layout.dims):
            return None
        e = self.emitter
        valid = self.convert.valid(layout, window)
        sizes = iter(valid.meta["val"].shape)
        shape = [product(next(sizes) for _ in dim) for dim in layout.dims]
        at_padding = e.call(aten.logical_and.default, nonzero, e.call(aten.logical_not.default, e.reshape(valid, shape)))
        return e.call(aten.logical_not.default, e.call(aten.any.default, at_padding))

    # -- what rules and sites call -----------------------------------------------------------------------------------------

    def read_dense(self, value: Value, op: Op, reason: str) -> fx.Node:
        """A packed value unpacked for an operation that reads all its positions."""
        if value.tainted or self.loses_padding(value):
            self.excuse_padding(value, op, reason)
        return self.dense(value)

    @staticmethod
    def runs_packed(value: Value) -> bool:
        """Whether what reads a value, if it is token-wise, runs packed: unlike what is computed from light values alone."""
        return value.is_packed or (value.shared and not value.light)

    def causal(self, op: Op, result: Result) -> Any:
        """Runs dense, yet depends on no later column, so that its result is a token value again."""
        x = op.args[0]
        if self.choice.padding == "left" and (x.tainted or (x.is_packed and self.choice.drops_padding)):
            self.excuse_padding(x, op, "runs along columns")
        if not x.shared or not x.is_packed:
            return self.dense_result(op, result, shared=x.shared)
        self.note_barrier(op, "runs along columns: unpacked for it, packed again after it")
        return self.wrap(op, result, dense=self.emit_dense(op.node), tainted=self.choice.drops_padding)

    def emit_dense(self, node: fx.Node) -> fx.Node:
        """The operation as the user's program has it, on dense operands."""
        if node.target is operator.getitem:
            return self.emitter.getitem(self.emit_dense(node.args[0]), node.args[1])
        kwargs = {k: v for k, v in node.kwargs.items() if k not in functions.DESCRIPTION}
        args, kwargs = pytree.tree_map_only(fx.Node, self.dense_argument, (node.args, kwargs))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.emitter.call_with_functions(node.target, args, kwargs, node.meta["val"])
        target = sites.dense_call if node.target is torch.ops.dualkv.attention_site.default else node.target
        if target in (aten.view.default, aten._unsafe_view.default):
            target = aten.reshape.default  # the operand's strides may be others than in the recorded graph
        return self.emitter.call(target, *args, **kwargs)

    def dense_argument(self, node: fx.Node) -> Any:
        value = self.values[node]
        return self.dense(value) if isinstance(value, Value) else value

    def dense(self, value: Value) -> fx.Node:
        if value.dense is not None:
            return value.dense
        if value.score is not None or value.routed is not None:
            region, self.emitter.region = self.emitter.region, value.node.meta["region"]
            value.dense = self.emit_dense(value.node)
            self.emitter.region = region
            return value.dense
        return self.convert.unpack(value)

    def count_product(self, a: Value, b: Value, out: Sequence[Size], contracted: Size) -> None:
        flops = 2 * contracted * product(out)
        self.flops.dense = self.flops.dense + flops
        layout = a.layout if a.is_token else b.layout
        if layout.is_token and all(self.runs_packed(v) for v in (a, b) if v.is_token):
            rows = self.choice.num_rows * layout.column.size
            flops = flops // rows * self.convert.num_tokens(Window.of(layout.column.offset, layout.column.size))
        self.flops.packed = self.flops.packed + flops

    def count_attention(self, heads: int, query_size: int, value_size: int) -> None:
        per_pair = 2 * heads * (query_size + value_size)
        self.flops.dense_per_pair += per_pair
        self.flops.packed_per_pair += per_pair

    # -- the end -----------------------------------------------------------------------------------------------------------

    def output(self, node: fx.Node) -> None:
        results, structure = pytree.tree_flatten(node.args[0])
        self.emitter.graph.output(pytree.tree_unflatten([self.result(i, n) for i, n in enumerate(results)], structure))

    def result(self, index: int, node: Any) -> Any:
        value = self.values[node] if isinstance(node, fx.Node) else node
        if isinstance(value, torch.SymInt):
            return self.emitter.size(value)
        if not isinstance(value, Value):
            return value
        if value.score is not None:
            op = Op(self, node)
            self.note_barrier(op, "attention scores leave the graph")
            if self.choice.drops_padding:
                raise self.reads_padding(op, "leaves the graph")
        blank = value.tainted or self.loses_padding(value)
        if value.is_token and value.shared:
            row_dim, column_dim = value.layout.dim_of(Kind.ROW), value.layout.dim_of(Kind.COLUMN)
            kinds = [[a.kind for a in value.layout.dims[d]] for d in (row_dim, column_dim)]
            apart = kinds == [[Kind.ROW], [Kind.COLUMN]] and row_dim < column_dim
            if (apart or kinds[0] == [Kind.ROW, Kind.COLUMN]) and value.window == Window.of(0, self.choice.num_columns):
                self.token_outputs.append(TokenOutput(index, row_dim, column_dim, blank, value.reach))
        return self.convert.fill_padding(value, value.dense, 0) if value.tainted and value.is_token else self.dense(value)

    def facts_module(self) -> fx.GraphModule | None:
        """The facts as a graph of their own: run at a call, before the variant is chosen, once per batch."""
        if not self.facts:
            return None
        needed = _ancestors(self.facts)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for n in self.emitter.graph.nodes:
            if n.op == "placeholder" or n in needed:
                copies[n] = graph.node_copy(n, copies.__getitem__)
        total = None
        for fact in self.facts:
            total = copies[fact] if total is None else graph.call_function(aten.logical_and.default, (total, copies[fact]))
        graph.output(total)
        return fx.GraphModule({}, graph, class_name="Facts")


def _is_pure(op: Op) -> bool:
    """Whether a fact may compute a result once more: facts are graphs without functions, and must draw no other random numbers."""
    return all(v.pure for v in op.values) and not draws(op.target) and not isinstance(op.target, torch._ops.HigherOrderOperator)


def _is_first_unshared(value: Value) -> bool:
    """A marked floating-point input whose rows are each their own: no value is packed after it, so it must be named here."""
    return value.is_token and not value.shared and not value.light and value.node.op == "placeholder"


def _ancestors(nodes) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Removes what nothing reads, except placeholders, writes into inputs and assertions."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not writes(node):
            graph.erase_node(node)
