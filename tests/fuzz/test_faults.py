"""Whatever breaks, and wherever: a clear message, no wrong number, and the next call works."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from batches import batch_of, mark
from hypothesis import given
from hypothesis import strategies as st
from scale import examples
from strategies import batches
from test_reuse import Decoder, agree, outcome, plain

import dualkv_compile
from dualkv_compile.errors import InternalErrorWarning

KEYS = ("input_ids", "attention_mask")
CASE = {"groups": [(4, [3, 2]), (3, [1, 4])], "left_pads": [0, 1]}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def a_batch(seed: int = 0, **changes) -> dict:
    return mark(batch_of(vocab=16, seed=seed, **{**CASE, **changes}), KEYS)


def right(model, call, batch, tolerance: float = 1e-9) -> None:
    agree(outcome(call, model, batch, [], True), outcome(model, model, plain(batch), [], True), tolerance)


def compiled(model, **options):
    return torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager", **options})


# -- something raises while a variant is made ---------------------------------------------------------------------------------

# where a compilation passes through, in order
PLACES = [
    "dualkv_compile.variant.trace",
    "dualkv_compile.variant.simplify",
    "dualkv_compile.variant.propagate",
    "dualkv_compile.inner.compile_graph",
    "dualkv_compile.passes.propagate.outline",
    "dualkv_compile.passes.propagate.eliminate_dead_code",
    "dualkv_compile.passes.convert.Converter.unpack",
    "dualkv_compile.passes.graph.Emitter.call",
    "dualkv_compile.plan.Plan.packing",
    "dualkv_compile.plan.Plan.attention_tables",
]


def break_once(monkeypatch, place: str, error: BaseException, after: int = 0) -> list:
    """Makes the function at `place` raise at one call of it, the one after `after` others."""
    module, _, name = place.rpartition(".")
    owner = sys.modules.get(module)
    if owner is None:
        module, _, cls = module.rpartition(".")
        owner = getattr(sys.modules[module], cls)
    original, calls, raised = getattr(owner, name), itertools.count(), []

    def breaking(*args, **kwargs):
        if next(calls) == after:
            raised.append(error)
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, breaking)
    return raised


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_raising_while_compiling(place, error, monkeypatch):
    """An interruption arrives; anything else is one warning and the dense result. After it the same call is right."""
    model = Decoder().double()
    call = compiled(model)
    batch = a_batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised = break_once(monkeypatch, place, error("planted"), after=0 if "Emitter" not in place else 7)
        try:
            right(model, call, batch)
            came_through = False
        except (KeyboardInterrupt, MemoryError, RuntimeError) as seen:
            assert "planted" in str(seen)
            came_through = True
    assert raised
    if error is KeyboardInterrupt:
        assert came_through
    elif not came_through:
        assert sum(issubclass(w.category, InternalErrorWarning) for w in caught) == 1
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right(model, call, batch)
        right(model, call, a_batch(seed=1))
        right(model, call, plain(batch))


def test_strict_raises_what_the_inner_compiler_raises(monkeypatch):
    model = Decoder().double()
    break_once(monkeypatch, "dualkv_compile.inner.compile_graph", RuntimeError("planted"))
    with pytest.raises(Exception, match="planted"):
        compiled(model, strict=True)(**a_batch())
    monkeypatch.undo()
    right(model, compiled(model, strict=True), a_batch())


def test_an_inner_compiler_that_always_fails(monkeypatch):
    """Falls back to the dense graph with one warning, not one a call."""
    model = Decoder().double()
    call = compiled(model)
    call(**plain(a_batch()))

    def fails(*args, **kwargs):
        raise RuntimeError("planted")

    monkeypatch.setattr("dualkv_compile.inner.compile_graph", fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            right(model, call, a_batch(seed))
    assert len([w for w in caught if issubclass(w.category, InternalErrorWarning)]) <= 2  # one for each way of packing
    assert any("planted" in str(w.message) for w in caught)


@examples(8)
@given(st.integers(0, 120), st.sampled_from([KeyboardInterrupt, RuntimeError]))
def test_raising_at_any_operation(at, error):
    """Interrupted after a drawn number of emitted operations: nothing half-made is left behind."""
    torch._dynamo.reset()
    model = Decoder().double()
    call = compiled(model, inner_backend="eager")
    batch = a_batch()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        break_once(patch, "dualkv_compile.passes.graph.Emitter.call", error("planted"), after=at)
        try:
            call(**batch)
        except error as seen:
            assert "planted" in str(seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right(model, call, batch)


# -- places that cannot be written to ---------------------------------------------------------------------------------------


def test_a_dump_directory_that_disappears(tmp_path):
    model = Decoder().double()
    directory = tmp_path / "dump"
    call = compiled(model, dump=str(directory))
    right(model, call, a_batch())
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    (tmp_path / "dump").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right(model, call, a_batch())


def test_a_home_that_cannot_be_written_to(tmp_path):
    """A home, a working directory and a dump directory that are files: still the right answer, through Inductor."""
    home = tmp_path / "home"
    home.write_text("")
    code = (
        "import sys, torch; sys.path[:0] = sys.argv[1:]\n"
        "from test_faults import *\n"
        "model = Decoder().double()\n"
        "right(model, compiled(model, inner_backend='aot_eager', dump='/proc/nowhere'), a_batch())\n"
        "assert any(r.attention_rewritten for r in dualkv_compile.reports())\n"
    )
    here = os.path.dirname(__file__)
    env = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TRITON_CACHE_DIR": str(home / "triton")}
    done = subprocess.run(
        [sys.executable, "-c", code, here, os.path.dirname(here)], env=env, cwd="/proc", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


# -- batches that are no longer what was marked -------------------------------------------------------------------------------


def _write(key, row, column, value):
    def change(batch):
        x = batch[key]
        if not x.numel():
            return batch
        x[row % x.shape[0], column % x.shape[1]] = value
        return batch

    return change


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "copy": lambda batch: {k: copy.copy(v) for k, v in batch.items()},
    "clone": lambda batch: {k: v.clone() for k, v in batch.items()},
    "rows": lambda batch: {k: v[:-1] for k, v in batch.items()},
    "columns": lambda batch: {k: v[:, :-1] for k, v in batch.items()},
    "one row": lambda batch: {k: v[:1] for k, v in batch.items()},
    "permuted": lambda batch: {k: v.flip(0) for k, v in batch.items()},
    "nothing": lambda batch: batch,
}

_compiled: dict = {}


@examples(25)
@given(
    batches(),
    st.lists(
        st.one_of(
            st.sampled_from(sorted(COPIES)),
            st.tuples(st.sampled_from(KEYS), st.integers(0, 5), st.integers(0, 8), st.integers(0, 1)),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_changed_after_marking(drawn, changes):
    """Right, or an error that names what changed."""
    if not _compiled:
        _compiled["model"] = Decoder().double()
        _compiled["call"] = compiled(_compiled["model"], inner_backend="eager")
    model, call = _compiled["model"], _compiled["call"]
    batch = mark(batch_of(vocab=16, **drawn), KEYS)
    for change in changes:
        batch = COPIES[change](batch) if isinstance(change, str) else _write(*change)(batch)
    if not batch["input_ids"].numel() or not batch["attention_mask"].any(1).all():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", InternalErrorWarning)
        try:
            right(model, call, batch)
        except dualkv_compile.DualKVError as refused:
            assert any(word in str(refused) for word in ("row", "different batches")), refused
            dualkv_compile.unmark(batch)
            right(model, call, batch)


def test_a_step_that_runs_out_of_memory():
    """In the middle of a backward: the next step is right."""
    model = Decoder().double()
    call = compiled(model)
    batch = a_batch()
    right(model, call, batch)
    logits, _ = call(**batch)
    handle = model.up.weight.register_hook(lambda g: (_ for _ in ()).throw(torch.OutOfMemoryError("planted")))
    with pytest.raises(torch.OutOfMemoryError):
        logits.sum().backward()
    handle.remove()
    right(model, call, batch)
    assert dualkv_compile.reports()[-1].attention_rewritten == 1
