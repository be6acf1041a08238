"""One compiled model, called with whatever a program may do to its batches, weights and modes in between: each result is the eager one, or
an error that says what no longer fits."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import threading
import warnings

import torch
import torch.nn.functional as F
from batches import batch_of
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule
from scale import examples
from strategies import batches
from torch import nn

import dualkv_compile
from dualkv_compile.errors import InternalErrorWarning

WIDTH, HEADS, VOCAB = 8, 2, 16


class Decoder(nn.Module):
    """A layer of a decoder that looks at its mode, at optional arguments and at its parameters."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.qkv = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, input_ids, attention_mask=None, labels=None):
        b, s = input_ids.shape
        x = self.embed(input_ids) * self.scale
        x = x * 1.5 if self.training else x
        q, k, v = (y.view(b, s, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        keep = torch.arange(s)[None, :] <= torch.arange(s)[:, None]
        if attention_mask is not None:
            keep = keep & attention_mask[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + y.transpose(1, 2).flatten(2)
        logits = self.head(x + self.down(F.silu(self.up(x))))
        if labels is None:
            return logits, None
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


COPIES = ("clone", "detach", "view", "alias", "copy", "deepcopy", "pickle", "save", "to", "contiguous", "transposed", "int32", "same")


@dataclasses.dataclass
class Batch:
    tensors: dict
    prompt_length: torch.Tensor
    group_ids: torch.Tensor
    may_refuse: bool = False  # what was done to it may be an error


def plain(tensors: dict) -> dict:
    return {k: v.detach().clone() for k, v in tensors.items()}


def outcome(call, model, tensors, modes, backward: bool):
    """(logits at real positions, loss, gradients)"""
    model.zero_grad(set_to_none=True)
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        logits, loss = call(**tensors)
    mask = tensors.get("attention_mask")
    real = torch.ones(logits.shape[:2], dtype=torch.bool) if mask is None else mask.bool().clone()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.dtype)
    found = [logits.detach()[real]] + ([] if loss is None else [loss.detach()])
    if backward and logits.requires_grad:
        total = (logits.masked_fill(~real[..., None], 0.0) * weights).sum() + (0.0 if loss is None else loss)
        total.backward()
    return found, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, logits.requires_grad


def agree(actual, expected, tolerance):
    (found, gradients, tracked), (wanted, expected_gradients, expected_tracked) = actual, expected
    assert tracked == expected_tracked, "requires_grad of the output"
    assert gradients.keys() == expected_gradients.keys(), gradients.keys() ^ expected_gradients.keys()
    for a, e in zip(found + [gradients[n] for n in gradients], wanted + [expected_gradients[n] for n in gradients], strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if not a.numel() or not e.isfinite().all():
            continue
        off = (a.double() - e.double()).abs().max().item()
        assert off <= tolerance * (1.0 + e.double().abs().max().item()), off


class Reuse(RuleBasedStateMachine):
    inner_backend = "eager"

    kept = Bundle("kept")

    @initialize(dynamic=st.sampled_from([None, None, True, False]))
    def start(self, dynamic):
        torch._dynamo.reset()
        self.model = Decoder().double()
        self.call = torch.compile(self.model, backend="dualkv", dynamic=dynamic, options={"inner_backend": self.inner_backend})
        self.modes, self.backward, self.tolerance = [], True, 1e-9

    # -- batches -----------------------------------------------------------------------------------------------------------

    @rule(target=kept, drawn=batches(), marked=st.booleans(), keys=st.sampled_from(["i", "im", "iml", "il"]), integers=st.booleans())
    def new(self, drawn, marked, keys, integers):
        case = batch_of(vocab=VOCAB, **drawn)
        names = {"i": "input_ids", "m": "attention_mask", "l": "labels"}
        tensors = {names[k]: case["batch"][names[k]] for k in keys}
        if "attention_mask" in tensors and not integers:
            tensors["attention_mask"] = tensors["attention_mask"].bool()
        batch = Batch(tensors, case["prompt_length"], case["group_ids"])
        if marked:
            self._mark(batch)
        self._compare(batch)
        return batch

    def _mark(self, batch):
        dualkv_compile.mark_shared_prompt(batch.tensors, batch.prompt_length, group_ids=batch.group_ids)
        batch.may_refuse = False

    @rule(batch=kept)
    def mark_again(self, batch):
        try:
            self._mark(batch)
        except dualkv_compile.DualKVError:
            dualkv_compile.unmark(batch.tensors)
        self._compare(batch)

    @rule(batch=kept, less=st.integers(1, 2))
    def mark_a_shorter_prompt(self, batch, less):
        mask = batch.tensors.get("attention_mask")
        starts = 0 if mask is None else mask.long().argmax(1)
        batch.prompt_length = (batch.prompt_length - less).clamp(min=0).maximum(torch.as_tensor(starts))
        self.mark_again(batch)

    @rule(batch=kept)
    def mark_without_sharing(self, batch):
        batch.group_ids = torch.arange(len(batch.group_ids))
        self.mark_again(batch)

    @rule(batch=kept)
    def unmark(self, batch):
        dualkv_compile.unmark(batch.tensors)
        batch.may_refuse = False

    @rule(batch=kept, key=st.sampled_from(["input_ids", "attention_mask", "labels"]))
    def unmark_one(self, batch, key):
        if key in batch.tensors:
            dualkv_compile.unmark(batch.tensors[key])
            self._compare(batch)

    @rule(
        target=kept,
        batch=kept,
        how=st.sampled_from(COPIES),
    )
    def copied(self, batch, how):
        def save(x):
            file = io.BytesIO()
            torch.save(x, file)
            file.seek(0)
            return torch.load(file)

        def shallow(x):
            # the copy would share memory but no version counter with x, and a write to one go unseen by the other: give it its own
            new = copy.copy(x)
            new.data = new.data.clone()
            return new

        copies = {
            "clone": torch.clone,
            "detach": torch.detach,
            "view": lambda x: x.view(x.shape),
            "alias": lambda x: x[:],
            "copy": shallow,
            "deepcopy": copy.deepcopy,
            "pickle": lambda x: pickle.loads(pickle.dumps(x)),
            "save": save,
            "to": lambda x: x.to(torch.int32).to(x.dtype),
            "contiguous": torch.Tensor.contiguous,
            "transposed": lambda x: x.t().contiguous().t(),
            "int32": lambda x: x.int(),
            "same": lambda x: x,
        }
        # labels stay int64; a copy all the same: marking one batch again would change the other's mark
        tensors = {k: v.clone() if how == "int32" and k == "labels" else copies[how](v) for k, v in batch.tensors.items()}
        new = dataclasses.replace(batch, tensors=tensors)
        self._compare(new)
        return new

    @rule(target=kept, batch=kept, columns=st.booleans(), from_end=st.booleans())
    def sliced(self, batch, columns, from_end):
        b, s = batch.tensors["input_ids"].shape
        if (s if columns else b) < 2:
            return multiple()
        cut = slice(1, None) if from_end else slice(None, -1)
        tensors = {k: v[:, cut] if columns else v[cut] for k, v in batch.tensors.items()}
        if "attention_mask" in tensors and not tensors["attention_mask"].any(1).all():
            return multiple()
        lengths = (batch.prompt_length - int(columns and from_end)).clamp(0, s - int(columns))
        new = Batch(tensors, lengths, batch.group_ids) if columns else Batch(tensors, lengths[cut], batch.group_ids[cut])
        self._compare(new)
        return new

    @rule(target=kept, one=kept, other=kept, key=st.sampled_from(["input_ids", "attention_mask", "labels"]))
    def mixed(self, one, other, key):
        """Two batches of one shape, one tensor exchanged."""
        if key not in one.tensors or key not in other.tensors or one.tensors[key].shape != other.tensors[key].shape:
            return multiple()
        new = dataclasses.replace(one, tensors={**one.tensors, key: other.tensors[key]}, may_refuse=True)
        self._compare(new)
        return new

    @rule(
        batch=kept,
        key=st.sampled_from(["input_ids", "attention_mask", "labels"]),
        how=st.sampled_from(["last", "first", "fill", "swap", "data", "set", "rotate"]),
    )
    def edited(self, batch, key, how):
        """Written to in place."""
        if key not in batch.tensors:
            return
        x = batch.tensors[key]
        before = x.clone()
        if how in ("last", "first"):
            at = -1 if how == "last" else 0
            x[0, at] = (1 - x[0, at].int()).to(x.dtype) if key == "attention_mask" else (x[0, at] + 1).clamp(min=0) % VOCAB
        elif how == "fill":
            x.fill_(1)
        elif how == "swap":
            x.copy_(x.flip(0).clone())
        elif how == "data":
            x.data = x.flip(0).contiguous()
        elif how == "set":
            x.set_(x.flip(0).contiguous())
        else:
            x.copy_(x.roll(1, 1).clone())
        if key == "attention_mask" and not x.any(1).all():
            x.copy_(before)
        batch.may_refuse = True
        self._compare(batch)

    # -- weights and modes -------------------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(["add", "data", "assign", "load", "new", "buffer"]))
    def change_weights(self, how):
        weight = self.model.up.weight
        with torch.no_grad():
            if how == "add":
                weight.add_(0.1)
            elif how == "data":
                weight.data = weight.data.flip(0).contiguous()
            elif how == "assign":
                self.model.load_state_dict({k: v * 0.9 for k, v in self.model.state_dict().items()}, assign=True)
            elif how == "load":
                self.model.load_state_dict({k: v * 1.1 for k, v in self.model.state_dict().items()})
            elif how == "new":
                self.model.head.bias = nn.Parameter(self.model.head.bias * 1.1)
            else:
                self.model.scale.mul_(0.9)

    @rule(name=st.sampled_from(["embed", "qkv", "head", ""]), on=st.booleans())
    def freeze(self, name, on):
        self.model.get_submodule(name).requires_grad_(on)

    @rule(
        training=st.booleans(),
        mode=st.sampled_from(["", "", "no_grad", "autocast", "no_grad autocast", "inference_mode"]),
        dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
        backward=st.booleans(),
    )
    def configure(self, training, mode, dtype, backward):
        self.model.train(training)
        self.model.to(dtype)
        autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "autocast": autocast}
        self.modes = [modes[m] for m in mode.split()]
        self.backward = backward
        self.tolerance = 0.1 if "autocast" in mode or dtype is torch.bfloat16 else {torch.float64: 1e-9, torch.float32: 1e-3}[dtype]

    # -- calls -------------------------------------------------------------------------------------------------------------

    def _compare(self, batch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", InternalErrorWarning)
            expected = outcome(self.model, self.model, plain(batch.tensors), self.modes, self.backward)
            try:
                actual = outcome(self.call, self.model, batch.tensors, self.modes, self.backward)
            except dualkv_compile.DualKVError:
                assert batch.may_refuse, "refused though nothing is wrong with the batch"
                return
        agree(actual, expected, self.tolerance)

    @rule(batch=kept)
    def run(self, batch):
        self._compare(batch)

    @rule(batch=kept)
    def run_again(self, batch):
        self._compare(batch)
        self._compare(batch)

    @rule(batch=kept)
    def run_unmarked(self, batch):
        self._compare(Batch(plain(batch.tensors), batch.prompt_length, batch.group_ids))

    @rule(one=kept, other=kept)
    def run_in_threads(self, one, other):
        """Two at once; without gradients, which would meet in the parameters."""
        expected, found = {}, {}

        def work(name, batch):
            try:
                with torch.no_grad():
                    found[name] = self.call(**batch.tensors)[0]
            except Exception as error:
                found[name] = error

        pairs = {"one": one, "other": other}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", InternalErrorWarning)
            for name, batch in pairs.items():
                expected[name] = self.model(**plain(batch.tensors))[0]
            threads = [threading.Thread(target=work, args=item) for item in pairs.items()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for name, batch in pairs.items():
            if isinstance(found[name], Exception):
                if isinstance(found[name], dualkv_compile.DualKVError) and batch.may_refuse:
                    continue
                raise found[name]
            mask = batch.tensors.get("attention_mask")
            real = torch.ones(expected[name].shape[:2], dtype=torch.bool) if mask is None else mask.bool()
            if expected[name][real].isfinite().all():
                off = (found[name][real].double() - expected[name][real].double()).abs().max().item()
                assert off <= max(self.tolerance, 1e-9) * (1 + expected[name][real].double().abs().max().item()), off


TestReuse = Reuse.TestCase
TestReuse.settings = examples(16, stateful_step_count=15)
