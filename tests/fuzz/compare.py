"""A program through the backend and in eager mode: outputs where they are no padding, and every gradient."""

from __future__ import annotations

import copy
import warnings

import torch
from batches import batch_of
from programs import Program, Register
from torch import nn

import dualkv_compile
from dualkv_compile.errors import InternalErrorWarning

TOLERANCE = 1e-9
PER_TOKEN = ("input_ids", "attention_mask", "token_data", "own_data", "late_data", "labels", "features")


def arguments(program_inputs, batch: dict) -> tuple[dict, dict]:
    """(the batch's tensors by name, the case); `token_data` is equal in the rows of a group, `late_data` up to the last
    token of the prompt, `own_data` and `row_data` nowhere."""
    case = batch_of(vocab=16, **batch)
    ids = case["batch"]["input_ids"]
    g = torch.Generator().manual_seed(batch.get("seed", 0))
    given = {
        "input_ids": ids,
        "attention_mask": case["batch"]["attention_mask"],
        "token_data": (ids * 0.1 + torch.arange(ids.shape[1]) * 0.01).double(),
        "own_data": torch.randn(ids.shape, generator=g, dtype=torch.float64),
        "features": torch.cos(ids[..., None] * torch.arange(1, 9) + torch.arange(ids.shape[1])[:, None]).double(),
        "row_data": torch.randn(ids.shape[0], generator=g, dtype=torch.float64),
    }
    late = torch.arange(ids.shape[1]) >= case["prompt_length"][:, None] - 1
    given["late_data"] = given["token_data"] + late * given["own_data"]
    given["labels"] = case["batch"]["labels"]
    return {name: given[name] for name in program_inputs}, case


def real_positions(register: Register, mask: torch.Tensor, shape) -> torch.Tensor:
    """What of an output is compared: all of it, but for padding positions where it still has rows and columns (or queries)."""
    flat = [f for dim in register.dims for f in dim]
    if flat == ["b", "s-"]:
        return (mask[:, 1:] & mask[:, :-1]).bool()
    if flat.count("b") != 1 or flat.count("s") != 1:
        return torch.ones(shape, dtype=torch.bool)
    b, s = mask.shape
    sizes = [{"b": b, "s": s, "t": s, "b_": b, "s_": s}.get(f, f) for f in flat]
    real = mask.bool() if flat.index("b") < flat.index("s") else mask.bool().t()
    view = [n if f in ("b", "s") else 1 for f, n in zip(flat, sizes, strict=True)]
    return real.reshape(view).expand(sizes).reshape(shape)


def run(call, model: nn.Module, batch: dict, program: Program, mask: torch.Tensor, seed: int = 0):
    """Outputs, masked, and gradients of a random projection of them."""
    model.zero_grad(set_to_none=True)
    outputs = call(**batch)
    g = torch.Generator().manual_seed(seed)
    loss, kept = 0.0, []
    for register, out in zip(program.outputs, outputs, strict=True):
        real = real_positions(register, mask, out.shape)
        weights = torch.randn(out.shape, generator=g, dtype=torch.float64)
        kept.append(out.detach()[real])
        loss = loss + (out.masked_fill(~real, 0.0) * weights).sum()
    if loss.requires_grad:
        loss.backward()
    leaves = [*model.named_parameters(), *((n, x) for n, x in batch.items() if x.is_leaf and x.requires_grad)]
    return kept, {n: p.grad for n, p in leaves if p.grad is not None}


class Wrong(AssertionError):
    """Another number than the unmarked eager model's."""


def reproduction(program: Program, batches: list[dict], inner_backend: str) -> str:
    """A script that fails alike, to be run in tests/fuzz."""
    lines = "".join(f"    {line!r},\n" for line in program.lines)
    return (
        f"{program.source}\n# ---- cd tests/fuzz; PYTHONPATH=.. python this_file ----\n"
        "from compare import check\nfrom programs import Program, Register\n\n"
        f"lines = (\n{lines})\n"
        f"program = Program(lines, {program.inputs}, {program.parameters}, {program.outputs}, {program.features_require_grad})\n"
        f"check(program, {batches}, {inner_backend!r})\n"
    )


def check(program: Program, batches: list[dict], inner_backend: str = "aot_eager", strict: bool = False) -> list:
    """Compiles once, calls with every batch, compares with eager mode. Returns the reports."""
    try:
        return _check(program, batches, inner_backend, strict)
    except Exception as error:
        error.add_note(reproduction(program, batches, inner_backend))
        raise


def _check(program: Program, batches: list[dict], inner_backend: str, strict: bool) -> list:
    torch._dynamo.reset()
    model = program.build()
    reference = copy.deepcopy(model)
    call = torch.compile(model, backend="dualkv", options={"inner_backend": inner_backend, "strict": strict})
    for number, batch in enumerate(batches):
        given, case = arguments(program.inputs, batch)
        if "features" in given and program.features_require_grad:
            given["features"].requires_grad_()
        # padding that no mask tells of is made of tokens like any other
        mask = case["batch"]["attention_mask"]
        if "attention_mask" not in given:
            mask = torch.ones_like(mask)
        try:
            expected, expected_gradients = run(reference, reference, given, program, mask)
        except (RuntimeError, IndexError, ValueError):
            continue  # the program does not run on this batch: sizes of one, mostly
        everything = [x for x in [*expected, *expected_gradients.values()] if x.numel()]
        if not all(x.abs().max() < 1e5 for x in everything):
            continue  # NaN, or numbers that rounding alone moves by more than what is looked for
        marked = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in given.items()}
        dualkv_compile.mark_shared_prompt(
            {k: v for k, v in marked.items() if k in PER_TOKEN}, case["prompt_length"], group_ids=case["group_ids"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", InternalErrorWarning)
            try:
                actual, gradients = run(call, model, marked, program, mask)
            except dualkv_compile.NotRewritten:
                assert "graph_break" in program.source, "refused a batch that could have run dense"
                continue
        told = f"batch {number}: {batch}"
        for register, a, e in zip(program.outputs, actual, expected, strict=True):
            _close(a, e, f"output {register.name} of {told}")
        if gradients.keys() != expected_gradients.keys():
            raise Wrong(f"gradients of {gradients.keys() ^ expected_gradients.keys()} exist on one side only, {told}")
        for name in gradients:
            _close(gradients[name], expected_gradients[name], f"gradient of {name}, {told}")
    return dualkv_compile.reports()


def _close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.shape != expected.shape:
        raise Wrong(f"{what}: shape {list(actual.shape)} instead of {list(expected.shape)}")
    off = (actual - expected).abs().max().item() if actual.numel() else 0.0
    if not off <= TOLERANCE * (1.0 + expected.abs().max().item() if expected.numel() else 1.0):
        raise Wrong(f"{what}: off by {off:.3g} of {expected.abs().max().item():.3g}")
