"""Marks: what is marked, what is refused and in which words, and what a mark survives."""

import collections
import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv_compile.errors import DualKVError, InvalidMark, PromptMismatch
from dualkv_compile.marks import mark_of, mark_shared_prompt, plan_of, unmark

P, A, B = [7, 8, 9], [1, 2], [3, 4]


def ids(*rows):
    return torch.tensor([[token for part in row for token in part] for row in rows])


def batch_of_two(**more):
    return {"input_ids": ids([P, A], [P, B]), "attention_mask": torch.ones(2, 5, dtype=torch.long), **more}


def groups_of(batch, *args, **kwargs):
    mark_shared_prompt(batch, *args, **kwargs)
    return plan_of(batch if isinstance(batch, torch.Tensor) else batch["input_ids"]).groups


# ------------------------------------------------------------------------------------------------- what is marked


def test_one_tensor():
    tensor = ids([P, A], [P, B])
    assert mark_shared_prompt(tensor, 3) is tensor
    mark = mark_of(tensor)
    assert (mark.role, mark.shared, mark.reason, mark.row_dim) == (None, True, None, 0)
    assert plan_of(tensor).num_packed_tokens == 2 + 2 * 3


def test_embeddings_as_the_batch():
    hidden = torch.randn(4, 6, 3)
    hidden[2, :4] = hidden[0, :4]
    assert groups_of(hidden, 4) == [[0, 2], [1], [3]]


def test_a_mapping_keeps_its_objects_and_shares_one_plan():
    batch = batch_of_two(labels=ids([P, A], [P, B]), temperature=0.7, advantages=torch.ones(2))
    tensors = dict(batch)
    assert mark_shared_prompt(batch, 3, group_size=2) is batch
    assert all(batch[key] is value for key, value in tensors.items())
    plans = {key: mark_of(batch[key]).plan for key in ("input_ids", "attention_mask", "labels")}
    assert len({id(plan) for plan in plans.values()}) == 1
    assert mark_of(batch["labels"]).role == "labels"
    assert mark_of(batch["advantages"]) is None


def test_any_mapping():
    batch = collections.UserDict(batch_of_two())  # as transformers' BatchEncoding
    assert mark_shared_prompt(batch, 3) is batch
    assert plan_of(batch["input_ids"]).groups == [[0, 1]]


def test_position_ids_in_three_parts():
    batch = batch_of_two(position_ids=torch.arange(5).expand(3, 2, 5).contiguous())
    mark_shared_prompt(batch, 3)
    assert (mark_of(batch["position_ids"]).row_dim, mark_of(batch["position_ids"]).shared) == (1, True)
    batch["position_ids"][2, 1, 1] = 9
    assert mark_of(batch["position_ids"]).reason == "position_ids different in rows 0 and 1 at column 1"


def test_three_rows_and_columns_of_position_ids_are_still_in_three_parts():
    batch = {"input_ids": torch.ones(3, 3, dtype=torch.long), "position_ids": torch.zeros(3, 3, 3)}
    mark_shared_prompt(batch, 1)
    assert mark_of(batch["position_ids"]).row_dim == 1


def test_masks_of_four_dimensions_pass_through():
    batch = {"input_ids": ids([P, A], [P, B]), "attention_mask": torch.ones(2, 5, 5, 5)}
    mark_shared_prompt(batch, 3)
    assert mark_of(batch["attention_mask"]) is None


def test_labels_that_are_the_ids():
    batch = batch_of_two()
    batch = {"labels": batch["input_ids"], **batch}
    mark_shared_prompt(batch, 3)
    assert mark_of(batch["labels"]).role == "input_ids" and mark_of(batch["labels"]).defining


def test_data_that_differs_in_the_prompt_is_row_owned():
    logp = torch.zeros(2, 5)
    logp[1, 1] = 1
    batch = mark_shared_prompt(batch_of_two(old_logp=logp), 3)
    mark = mark_of(logp)
    assert not mark.shared and mark.reason == "old_logp different in rows 0 and 1 at column 1"
    assert mark_of(batch["input_ids"]).shared


def test_data_that_differs_where_each_row_owns_its_token_is_shared():
    labels = ids([P, A], [P, B])
    labels[:, 2] = torch.tensor([1, 3])  # shifted labels: the last prompt token predicts the response
    assert mark_of(mark_shared_prompt(batch_of_two(labels=labels), 3)["labels"]).shared


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64])
def test_comparison_of_every_dtype(dtype):
    other = torch.zeros(2, 5, 2, dtype=dtype)
    mark_shared_prompt(batch_of_two(other=other), 3)
    assert mark_of(other).shared
    other[1, 0, 1] = 1
    assert not mark_of(other).shared


def test_values_are_compared_by_their_bits():
    values = torch.zeros(2, 5)
    values[1, 0] = -0.0
    mark_shared_prompt(batch_of_two(values=values), 3)
    assert not mark_of(values).shared
    nan = torch.full((2, 5), float("nan"))
    assert mark_of(mark_shared_prompt(batch_of_two(nan=nan), 3)["nan"]).shared


def test_comparison_in_pieces(monkeypatch):
    monkeypatch.setattr("dualkv_compile.facts._CHUNK_ELEMENTS", 7)
    batch = batch_of_two(hidden=torch.zeros(2, 5, 3))
    batch["hidden"][1, 1, 2] = 1
    assert groups_of(batch, 3) == [[0, 1]]
    assert mark_of(batch["hidden"]).reason == "hidden different in rows 0 and 1 at column 1"


# --------------------------------------------------------------------------------------------------------- groups


def test_group_size():
    assert groups_of(ids([P, A], [P, B], [A, P], [A, B, [0]]), 2, group_size=2) == [[0, 1], [2, 3]]


def test_group_ids_in_any_order():
    tensor = ids([P, A], [A, P], [P, B], [A, P])
    assert groups_of(tensor, 2, group_ids=torch.tensor([9, -5, 9, -5])) == [[0, 2], [1, 3]]


def test_pairs_for_preference_training():
    tensor = ids([P, A], [A, P], [P, B], [A, B, [5]])
    assert groups_of(tensor, 2, group_ids=torch.arange(4) % 2) == [[0, 2], [1, 3]]


def test_rows_with_equal_prompts_are_found():
    tensor = ids([P, A], [A, P], [P, B], [P, P[:2]], [A, B, [5]])
    assert groups_of(tensor, 3) == [[0, 2, 3], [1], [4]]
    assert groups_of(tensor, 2) == [[0, 2, 3], [1, 4]]
    assert groups_of(tensor, 0) == [[0, 1, 2, 3, 4]]
    # Equal ids with another length, or behind other padding, are another prompt.
    assert groups_of(tensor, torch.tensor([3, 2, 3, 2, 2])) == [[0, 2], [1, 4], [3]]
    mask = torch.ones(5, 5)
    mask[2, 0] = 0
    assert groups_of({"input_ids": tensor, "attention_mask": mask.long()}, 3) == [[0, 3], [1], [2], [4]]


def test_a_hash_collision_only_parts_rows(monkeypatch):
    monkeypatch.setattr("dualkv_compile.facts._scrambled", torch.zeros_like)
    tensor = ids([P, A], [A, P], [P, B], [A, P])
    assert groups_of(tensor, 3) == [[0, 2], [1], [3]]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=1, max_size=7), st.integers(0, 4))
def test_automatic_groups_are_the_equal_prompts(rows, length):
    want = {}
    for b, row in enumerate(rows):
        want.setdefault(tuple(row[:length]), []).append(b)
    assert groups_of(torch.tensor(rows), length) == list(want.values())


# -------------------------------------------------------------------------------------------------------- padding


def test_unequal_left_and_right_padding():
    tensor = torch.arange(24).view(4, 6)
    tensor[1], tensor[3] = tensor[0], tensor[2]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    batch = mark_shared_prompt({"input_ids": tensor, "attention_mask": mask}, 3, group_size=2)
    plan = plan_of(tensor)
    assert (plan.starts.tolist(), plan.stops.tolist()) == ([2, 2, 0, 0], [6, 5, 6, 3])
    assert plan.padding == "left" and plan.num_real_tokens == 16
    # Row 3 has a response of length zero and still owns its last prompt token.
    assert plan.num_packed_tokens == (0 + 4 + 3) + (2 + 4 + 1)
    assert torch.equal(plan.packing().valid, mask.bool())
    assert groups_of({**batch, "attention_mask": mask.bool()}, 3) == [[0, 1], [2, 3]]


def test_padding_is_never_read_from_ids():
    tensor = torch.zeros(2, 4, dtype=torch.long)  # pad_token == eos_token == 0 everywhere
    mark_shared_prompt(tensor, 2)
    assert plan_of(tensor).padding == "none"


def test_prompts_of_every_length():
    for length in range(6):
        batch = mark_shared_prompt({"input_ids": torch.ones(2, 5, dtype=torch.long)}, length)
        assert plan_of(batch["input_ids"]).num_packed_tokens == 10 - max(0, length - 1)


# --------------------------------------------------------------------------------------------------------- errors


def refused(error, batch, *args, **kwargs):
    with pytest.raises(error) as caught:
        mark_shared_prompt(batch, *args, **kwargs)
    assert type(caught.value) is error and isinstance(caught.value, (DualKVError, ValueError))
    tensors = [batch] if isinstance(batch, torch.Tensor) else getattr(batch, "values", list)()
    assert not any(hasattr(tensor, "_dualkv_mark") for tensor in tensors)
    return str(caught.value)


@pytest.mark.parametrize(
    "length, words",
    [
        (-1, "0 <= prompt_length <= 5.*got -1"),
        (6, "0 <= prompt_length <= 5.*got 6"),
        (torch.tensor([3, 6]), "0 <= prompt_length <= 5.*got 6 for row 1"),
        (torch.tensor([-2, 3]), "got -2 for row 0"),
        (True, "prompt_length to be an int.*True"),
        (3.0, "prompt_length to be an int.*3.0"),
        (None, "prompt_length to be an int.*None"),
        ([3, 3], "prompt_length to be an int or an integer tensor.*list"),
        (torch.tensor([3.0, 3.0]), r"prompt_length.*integer tensor \[2\].*float32"),
        (torch.tensor([True, True]), r"prompt_length.*integer tensor \[2\].*bool"),
        (torch.tensor([3]), r"prompt_length.*\[2\].*got torch.int64 \[1\]"),
        (torch.tensor(3), r"prompt_length.*\[2\].*got torch.int64 \[\]"),
        (torch.tensor([[3, 3]]), r"prompt_length.*\[2\].*got torch.int64 \[1, 2\]"),
    ],
)
def test_prompt_length_is_refused(length, words):
    with pytest.raises(InvalidMark, match=words):
        mark_shared_prompt(batch_of_two(), length)


@pytest.mark.parametrize(
    "groups, words",
    [
        ({"group_size": 3}, "divides the 2 rows.*got 3"),
        ({"group_size": 0}, "divides the 2 rows.*got 0"),
        ({"group_size": 1.0}, "group_size to be a positive int.*1.0"),
        ({"group_size": 2, "group_ids": torch.tensor([0, 0])}, "got both"),
        ({"group_ids": torch.tensor([0])}, r"group_ids.*\[2\].*got torch.int64 \[1\]"),
        ({"group_ids": torch.tensor([0.0, 0.0])}, r"group_ids.*integer tensor \[2\].*float32"),
        ({"group_ids": torch.tensor([True, True])}, "group_ids.*bool"),
        ({"group_ids": [0, 0]}, "group_ids.*list.*torch.tensor"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "one packed row .*of 2 rows"),
    ],
)
def test_groups_are_refused(groups, words):
    with pytest.raises(InvalidMark, match=words):
        mark_shared_prompt(batch_of_two(), 3, **groups)


def masked(*rows):
    tensor = torch.ones(len(rows), len(rows[0]), dtype=torch.long)
    return {"input_ids": tensor, "attention_mask": torch.tensor(rows)}


def test_rows_of_only_padding_share_nothing():
    """Whatever group they are said to be in, and whatever stands in them; a group's first row may be one."""
    batch = masked([0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0])
    batch["input_ids"][0] = 7
    for groups in ({"group_size": 4}, {}):
        plan = plan_of(mark_shared_prompt(batch, 2, **groups)["input_ids"])
        assert plan.groups == [[0], [1, 2], [3]] and plan.padding == "left"
        assert (plan.num_real_tokens, plan.num_packed_tokens) == (7, 1 + 2 + 3)
    plan = plan_of(mark_shared_prompt(masked([0, 0], [0, 0]), 1)["input_ids"])
    assert (plan.num_real_tokens, plan.num_packed_tokens) == (0, 0)


def test_gaps():
    """One a row, in the prompt, the response or over both; equal where prompts are shared."""
    batch = masked([0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1])
    plan = plan_of(mark_shared_prompt(batch, 5)["input_ids"])
    assert plan.groups == [[0, 1], [2]] and plan.has_gaps and plan.padding == "left"
    assert plan.num_real_tokens == 4 + 4 + 6
    assert plan.num_packed_tokens == 3 + 3 + 4 + 7  # what is shared, up to the column before the prompt's last, and what rows own
    assert torch.equal(plan.packing().real, batch["attention_mask"].bool())
    assert torch.equal(plan.packing().valid, torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], *[[0, 1, 1, 1, 1, 1, 1, 1]] * 2]).bool())
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan and pickle.loads(pickle.dumps(plan)).has_gaps
    batch["attention_mask"][0, 3] = 1
    with pytest.raises(InvalidMark, match="another padding at row 0, column 3"):
        plan_of(batch["attention_mask"])
    assert "one first column of a gap in the prompt in a group, got 3 in row 0 and 2 in row 1" in refused(
        PromptMismatch, masked([1, 1, 1, 0, 1], [1, 1, 0, 0, 1]), 4, group_size=2
    )


def test_padding_is_refused():
    assert "inside row 1 at column 3 (its real columns span [0, 5), its gap is [1, 2))" in refused(
        InvalidMark, masked([1, 1, 1, 1, 1], [1, 0, 1, 0, 1]), 2, group_size=1
    )
    assert "row 0, column 2" in refused(InvalidMark, masked([1, 1, 2], [1, 1, 1]), 2)
    assert "row 1, column 0" in refused(InvalidMark, masked([1, 1, 1], [-1, 1, 1]), 2)
    assert "2 padding columns in row 0 and prompt_length 1" in refused(InvalidMark, masked([0, 0, 1, 1]), 1)
    assert "prompt_length 3 for row 1, whose real columns are [0, 2)" in refused(
        InvalidMark, masked([1, 1, 1, 1], [1, 1, 0, 0]), 3, group_size=1
    )


def test_attention_mask_is_refused():
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3)}
    assert "bool or integer" in refused(InvalidMark, batch, 2)
    batch["attention_mask"] = torch.ones(2, 4, dtype=torch.long)
    assert "attention_mask of shape [2, 3], got [2, 4]" in refused(InvalidMark, batch, 2)


def test_unequal_prompts_are_refused():
    tensor = ids([P, A], [P, B], [A, P], [A, B, [5]])
    assert "input_ids different in rows 2 and 3 at column 2" in refused(
        PromptMismatch, {"input_ids": tensor}, 3, group_size=2
    )
    assert "the batch different in rows 0 and 2 at column 0" in refused(
        PromptMismatch, tensor, 3, group_ids=torch.tensor([0, 1, 0, 1])
    )
    assert "one prompt_length in a group, got 2 in row 0 and 3 in row 1" in refused(
        PromptMismatch, ids([P, A], [P, B]), torch.tensor([2, 3]), group_size=2
    )
    assert "one first real column in a group, got 0 in row 0 and 1 in row 1" in refused(
        PromptMismatch, masked([1, 1, 1], [0, 1, 1]), 2, group_size=2
    )


def test_prompts_truncated_at_the_wrong_end_are_refused():
    # keep_end truncation leaves the longer row of a pair with another beginning of the prompt.
    assert "rows 0 and 1 at column 0" in refused(PromptMismatch, ids([P, A], [P[1:], A, B[:1]]), 3, group_size=2)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty_batch_is_refused(shape):
    assert "at least one row and one column" in refused(InvalidMark, torch.ones(shape, dtype=torch.long), 0)


def test_what_is_no_batch_is_refused():
    assert "mapping of tensors, got list" in refused(InvalidMark, [1, 2], 1)
    assert "got no tensor" in refused(InvalidMark, {"a": 1}, 1)
    assert "got a [4]" in refused(InvalidMark, {"a": torch.ones(4)}, 1)
    assert "input_ids of shape [B, S], got [4]" in refused(InvalidMark, {"input_ids": torch.ones(4)}, 1)


def test_prompts_are_not_looked_for_in_labels():
    labels = torch.full((2, 4), -100)
    assert "group_size or group_ids" in refused(InvalidMark, {"labels": labels}, 2)
    mark_shared_prompt({"labels": labels}, 2, group_size=2)
    assert plan_of(labels).groups == [[0, 1]]


def test_without_validation_prompts_are_not_compared_but_other_data_is():
    logp = torch.zeros(2, 5)
    logp[1, 1] = 1
    batch = {"input_ids": ids([P, A], [A, P]), "old_logp": logp}
    mark_shared_prompt(batch, 3, group_size=2, validate=False)
    assert mark_of(batch["input_ids"]).shared and not mark_of(logp).shared
    refused(PromptMismatch, masked([1, 1, 1], [1, 0, 1]), 2, group_size=2, validate=False)


# ------------------------------------------------------------------------------------------- what a mark survives


def test_unmark():
    batch = mark_shared_prompt(batch_of_two(), 3)
    assert unmark(batch) is batch
    assert mark_of(batch["input_ids"]) is None and not hasattr(batch["attention_mask"], "_dualkv_mark")
    with pytest.raises(InvalidMark, match="unmarked Tensor"):
        plan_of(batch["input_ids"])
    assert unmark(mark_shared_prompt(torch.ones(2, 3), 1)) is not None


def test_operations_make_unmarked_tensors():
    tensor = mark_shared_prompt(ids([P, A], [P, B]), 3)
    assert mark_of(tensor.clone()) is mark_of(tensor[:]) is mark_of(tensor.float()) is None


def test_fresh_marks_are_not_looked_at_again():
    tensor = mark_shared_prompt(ids([P, A], [P, B]), 3)
    assert mark_of(tensor) is mark_of(tensor)


def test_write_that_keeps_the_prompt_equal():
    tensor = mark_shared_prompt(ids([P, A], [P, B]), 3)
    before = mark_of(tensor)
    tensor[:, 3:] = 0
    assert mark_of(tensor) is not before and mark_of(tensor).plan is before.plan
    assert mark_of(tensor) is mark_of(tensor)


def test_write_that_parts_the_prompts():
    batch = mark_shared_prompt(batch_of_two(), 3)
    batch["input_ids"][1, 1] = 0
    for _ in range(2):
        with pytest.raises(PromptMismatch, match="input_ids different in rows 0 and 1 at column 1: it was written to"):
            mark_of(batch["input_ids"])
    mark_shared_prompt(batch, 3)
    assert plan_of(batch["input_ids"]).groups == [[0], [1]]


def test_write_to_the_attention_mask():
    batch = mark_shared_prompt(batch_of_two(), 3)
    batch["attention_mask"].mul_(1)
    assert mark_of(batch["attention_mask"]).shared
    batch["attention_mask"][1, 4] = 0
    with pytest.raises(InvalidMark, match="another padding at row 1, column 4"):
        mark_of(batch["attention_mask"])


def test_change_of_geometry():
    tensor = mark_shared_prompt(torch.tensor([[1, 2], [1, 3]]), 1)
    tensor.t_()  # no new version, storage or shape
    with pytest.raises(PromptMismatch, match="rows 0 and 1 at column 0"):
        mark_of(tensor)
    tensor = mark_shared_prompt(ids([P, A], [P, B]), 3)
    tensor.resize_(2, 4)
    with pytest.raises(InvalidMark, match=r"2 rows x 5 columns, as it was marked, got shape \[2, 4\]"):
        mark_of(tensor)


def saved_and_loaded(batch, tmp_path):
    torch.save(batch, tmp_path / "batch.pt")
    return torch.load(tmp_path / "batch.pt", weights_only=True)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copy", "save"])
def test_copies_are_validated_when_looked_at(how, tmp_path):
    batch = mark_shared_prompt(batch_of_two(), 3)
    copies = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
        "copy": lambda batch: {key: copy.copy(value) for key, value in batch.items()},
        "save": lambda batch: saved_and_loaded(batch, tmp_path),
    }[how](batch)
    for key, tensor in copies.items():
        assert tensor is not batch[key]
        assert mark_of(tensor).plan == plan_of(batch[key]) and mark_of(tensor).role == key
    assert mark_of(copies["input_ids"]).plan is mark_of(copies["attention_mask"]).plan
    copies["input_ids"][0, 0] = 99
    with pytest.raises(PromptMismatch, match="rows 0 and 1 at column 0"):
        mark_of(copies["input_ids"])


def test_marking_again_replaces_marks():
    batch = batch_of_two(extra=torch.ones(2, 5))
    mark_shared_prompt(batch, 3)
    batch["input_ids"], batch["attention_mask"] = batch["input_ids"][:, :4], batch["attention_mask"][:, :4]
    mark_shared_prompt(batch, 2)
    assert plan_of(batch["input_ids"]).num_columns == 4
    assert mark_of(batch["extra"]) is None  # no longer per token


def test_inference_mode():
    with torch.inference_mode():
        tensor = mark_shared_prompt(ids([P, A], [P, B]), 3)
        assert plan_of(tensor).num_packed_tokens == 8
        tensor[1, 0] = 0  # inference tensors count no versions
        with pytest.raises(PromptMismatch, match="rows 0 and 1 at column 0"):
            mark_of(tensor)


# ------------------------------------------------------------------------------------------------ synchronisations


@pytest.fixture
def synchronisations(monkeypatch):
    """The calls that would make a host wait for its device, were the tensors on one."""
    calls = []
    for name in (
        "cpu",
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "nonzero",
        "unique",
    ):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, _name=name, _original=original, **kwargs):
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    return calls


@pytest.mark.parametrize("groups", [{}, {"group_size": 2}, {"group_ids": torch.tensor([4, 4])}])
@pytest.mark.parametrize("length", [3, torch.tensor([3, 3])])
def test_one_synchronisation(groups, length, synchronisations):
    batch = batch_of_two(labels=ids([P, A], [P, B]), hidden=torch.zeros(2, 5, 4), position_ids=torch.ones(3, 2, 5))
    mark_shared_prompt(batch, length, **groups)
    assert synchronisations == ["cpu", "numpy"]
    packing = plan_of(batch["labels"]).packing(offset=1)
    assert packing.pack_index.ndim == packing.unpack_index.ndim == packing.select.ndim == 1
    assert synchronisations == ["cpu", "numpy"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("groups", [{}, {"group_size": 2}, {"group_ids": torch.tensor([4, 4])}])
def test_one_synchronisation_on_the_device(groups, monkeypatch):
    batch = batch_of_two(labels=ids([P, A], [P, B]), position_ids=torch.ones(3, 2, 5))
    batch = {key: value.cuda() for key, value in batch.items()}
    groups = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in groups.items()}
    calls, to_host = [], torch.Tensor.cpu

    def allowed(tensor):
        calls.append(tensor.shape)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return to_host(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(torch.Tensor, "cpu", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mark_shared_prompt(batch, 3, **groups)
        packing = plan_of(batch["labels"]).packing(offset=1)
        tensors = [packing.pack_index, packing.unpack_index, packing.select, packing.valid, packing.columns]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == 1 and all(tensor.is_cuda for tensor in tensors)
    assert plan_of(batch["labels"]).groups == [[0, 1]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_tensors_on_two_devices():
    batch = batch_of_two(labels=ids([P, A], [P, B]).cuda())
    mark_shared_prompt(batch, 3)
    assert plan_of(batch["input_ids"]).device.type == "cpu" and plan_of(batch["labels"]).device.type == "cuda"
    assert plan_of(batch["labels"]).packing().pack_index.is_cuda


@pytest.mark.parametrize(("make", "got"), [(lambda x: x.to("meta"), "a meta tensor"), (torch.Tensor.to_sparse, "layout torch.sparse_coo")])
def test_tensors_without_values_are_refused(make, got):
    with pytest.raises(InvalidMark, match=f"input_ids to be a dense tensor that holds values, got {got}"):
        mark_shared_prompt({"input_ids": make(torch.ones(2, 4, dtype=torch.long))}, 2, group_size=2)
