"""TRL's own trainers, plain and with the mixin: same rollouts, same seed; log-probabilities, gradients and parameters are compared."""

import collections
import importlib.util
import os
import pathlib

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

import trl.trainer.utils  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import Qwen3ForCausalLM, TrainerCallback  # noqa: E402
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402

import dualkv_compile  # noqa: E402
from dualkv_compile.integrations.trl import SharedPrompts, _together  # noqa: E402

PATH = pathlib.Path(__file__).parent.parent / "examples" / "trl_grpo.py"
GROUP = 4


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("trl_grpo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def saved(example, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("policy"))
    return example.small_policy(directory, len(example.byte_tokenizer()), hidden=32, layers=1)


@pytest.fixture(scope="module")
def deeper(example, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("policy"))
    return example.small_policy(directory, len(example.byte_tokenizer()), hidden=32, layers=2)


@pytest.fixture
def exact_head(monkeypatch):
    """TRL's fused LM head, which computes in float32 whatever the model's type, in the model's: both trainers use it."""

    class Head:
        @staticmethod
        def apply(hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs):
            logp = ((hidden @ weight.T) / temperature).log_softmax(-1)
            logged = torch.zeros_like(targets)
            return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logged, logged, logged

    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Head)


class Steps(TrainerCallback):
    """Gradients before each optimizer step, parameters after it."""

    def __init__(self):
        self.gradients, self.parameters = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    def on_optimizer_step(self, args, state, control, model=None, **_):
        self.parameters.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())


class Recorded:
    """Keeps log-probabilities and what was packed for them; `rollouts` are generated once and replayed to who comes later."""

    def __init__(self, *args, rollouts=None, **kwargs):
        self.steps, self.logps, self.rollouts, self.spread = Steps(), [], rollouts, []
        self.packed = collections.Counter()
        super().__init__(*args, **kwargs)
        self.add_callback(self.steps)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.rollouts is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        known = self.rollouts.setdefault(self.state.global_step, [])
        if not known:
            known.append((prompt_ids, super()._generate_single_turn(prompt_ids, *args, **kwargs)))
        assert known[0][0] == prompt_ids
        return known[0][1]

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.spread.append(output["advantages"].view(-1, GROUP).std(1).max().item())
        torch.manual_seed(self.state.global_step)  # what shuffles the rows next, whether they were generated or replayed
        return output

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs):
        before = {id(r): r.calls for r in dualkv_compile.reports()}
        result = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs
        )
        real = attention_mask[:, -logits_to_keep:]
        self.logps.append((result[0] * real).detach())
        kind = "update" if torch.is_grad_enabled() else "old" if model is self.model else "reference"
        ran = [r for r in dualkv_compile.reports() if r.calls > before.get(id(r), 0)]
        if ran:
            layers = model.config.num_hidden_layers
            size = batch_size or len(input_ids)
            last = slice((len(input_ids) - 1) // size * size, None)
            expected = packed_tokens(input_ids[last], attention_mask[last], input_ids.shape[1] - logits_to_keep)
            assert all(r.attention_sites == r.attention_rewritten == layers for r in ran), ran
            assert any(r.packed_tokens == expected for r in ran) and all(r.packed_tokens < r.dense_tokens for r in ran)
            self.packed[kind] += 1
        return result


def packed_tokens(ids, mask, prompt):
    """Distinct prompts but for their last token, which every row owns."""
    prompts = {(tuple(i[:prompt].tolist()), int(m[:prompt].sum())) for i, m in zip(ids, mask, strict=True)}
    return sum(length - 1 for _, length in prompts) + int(mask[:, prompt:].sum()) + len(ids)


class PlainGRPO(Recorded, GRPOTrainer):
    pass


class GroupedGRPO(Recorded, SharedPrompts, GRPOTrainer):
    dualkv_backend = None


class SharedGRPO(Recorded, SharedPrompts, GRPOTrainer):
    dualkv_options = {"inner_backend": "aot_eager", "strict": True}


class SharedRLOO(Recorded, SharedPrompts, RLOOTrainer):
    dualkv_options = {"inner_backend": "aot_eager", "strict": True}


class PlainRLOO(Recorded, RLOOTrainer):
    pass


def train(trainer, example, saved, directory, rollouts, dtype=torch.float64, config=GRPOConfig, **settings):
    torch._dynamo.reset()
    rows, reward = example.problems(8)
    settings = {"max_steps": 6, "per_device_train_batch_size": 8, "num_iterations": 2, "beta": 0.04, **settings}
    arguments = config(
        output_dir=str(directory), learning_rate=1e-3, num_generations=GROUP, max_completion_length=8, report_to="none",
        save_strategy="no", logging_strategy="no", bf16=False, use_cpu=True, disable_tqdm=True, seed=3, **settings,
    )  # fmt: skip
    model = Qwen3ForCausalLM.from_pretrained(saved, dtype=dtype)
    made = trainer(
        model=model, args=arguments, reward_funcs=reward, train_dataset=rows, processing_class=example.byte_tokenizer(), rollouts=rollouts
    )
    made.train()
    assert len(made.steps.parameters) == settings["max_steps"] and min(made.spread) > 0.01
    start = Qwen3ForCausalLM.from_pretrained(saved, dtype=dtype)
    start = torch.cat([p.detach().flatten() for p in start.parameters()])
    assert relative(start, made.steps.parameters[-1]) > 1e-3  # it did train
    return made


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def differences(a, b):
    """Largest relative differences of gradients and of parameters, over all steps."""
    assert len(a.steps.gradients) == len(b.steps.gradients)
    return [
        max(relative(x, y) for x, y in zip(of_a, of_b, strict=True))
        for of_a, of_b in ((a.steps.gradients, b.steps.gradients), (a.steps.parameters, b.steps.parameters))
    ]


def compare_grpo(example, saved, tmp_path, dtype, bound):
    """Two micro-batches a rollout, each an optimizer step, each rollout used twice: plain rows in the same order."""
    rollouts, settings = {}, {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "dtype": dtype}
    plain = train(GroupedGRPO, example, saved, tmp_path / "plain", rollouts, **settings)
    assert not plain.packed and not dualkv_compile.reports()
    shared = train(SharedGRPO, example, saved, tmp_path / "shared", rollouts, **settings)
    worst = max((a - b).abs().max().item() for a, b in zip(shared.logps, plain.logps, strict=True))
    print(f"{dtype}: log-probabilities {worst:.1e}, gradients and parameters", *differences(shared, plain))
    assert max(worst, *differences(shared, plain)) < bound
    # two rollouts: old and reference log-probabilities once each, without gradients
    assert shared.packed == {"update": 6, "old": 2, "reference": 2}
    # other lengths, and checkpointing switched off and on for every rollout, compile nothing anew
    assert len({r.graph for r in dualkv_compile.reports()}) == 3


def test_grpo_updates_equal_the_plain_trainers(exact_head, example, deeper, tmp_path):
    compare_grpo(example, deeper, tmp_path, torch.float64, 1e-6)


def test_grpo_updates_in_float32(example, saved, tmp_path):
    compare_grpo(example, saved, tmp_path, torch.float32, 1e-4)


def test_keeping_groups_together_changes_no_update(exact_head, example, saved, tmp_path):
    """TRL's own trainer shuffles rows over the micro-batches of one optimizer step; checkpointing off."""
    rollouts = {}
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "max_steps": 5}
    settings |= {"gradient_checkpointing": False, "beta": 0.0}
    plain = train(PlainGRPO, example, saved, tmp_path / "plain", rollouts, **settings)
    shared = train(SharedGRPO, example, saved, tmp_path / "shared", rollouts, **settings)
    print("gradients and parameters", *differences(shared, plain))
    assert max(differences(shared, plain)) < 1e-6
    assert shared.packed["update"] == 20


def test_rloo_micro_batches_that_cut_groups(exact_head, example, saved, tmp_path):
    rollouts = {}
    settings = {"config": RLOOConfig, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    settings |= {"max_steps": 1, "num_iterations": 1}
    plain = train(PlainRLOO, example, saved, tmp_path / "plain", rollouts, **settings)
    shared = train(SharedRLOO, example, saved, tmp_path / "shared", rollouts, **settings)
    assert max(differences(shared, plain)) < 1e-6
    assert shared.packed["update"] == 4


class PlainDPO(DPOTrainer):
    pass


class SharedDPO(SharedPrompts, DPOTrainer):
    pass


@pytest.mark.parametrize("truncation", [{}, {"max_length": 40, "truncation_mode": "keep_end"}], ids=["whole", "keep_end"])
def test_dpo_updates_equal_the_plain_trainers(truncation, exact_head, example, saved, tmp_path):
    """Pairs (i, i + B/2). Pairs that `keep_end` truncates to unequal prompts share nothing, and are right all the same."""
    options = {"strict": True, "inner_backend": "aot_eager" if truncation else "inductor"}
    task, _ = example.problems(12)
    pairs = [{"prompt": p, "chosen": f"{i} and more" * (i % 3), "rejected": f"no {i}"} for i, p in enumerate(task["prompt"])]

    def run(kind):
        torch._dynamo.reset()
        kind.dualkv_options = options
        arguments = DPOConfig(
            output_dir=str(tmp_path / kind.__name__), max_steps=5, per_device_train_batch_size=3, learning_rate=1e-3, report_to="none",
            save_strategy="no", logging_strategy="no", bf16=False, use_cpu=True, disable_tqdm=True, **truncation,
        )  # fmt: skip
        steps = Steps()
        model = Qwen3ForCausalLM.from_pretrained(saved, dtype=torch.float64)
        tokenizer = example.byte_tokenizer()
        kind(model=model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer, callbacks=[steps]).train()
        return steps

    plain, shared = run(PlainDPO), run(SharedDPO)
    reports = [r for r in dualkv_compile.reports() if r.calls]
    worst = [max(map(relative, getattr(shared, k), getattr(plain, k))) for k in ("gradients", "parameters")]
    print("gradients and parameters", *worst)
    assert max(worst) < 1e-6 and len(shared.parameters) == 5
    assert sum(r.calls for r in reports) == 10  # policy and reference
    assert all(r.attention_sites == r.attention_rewritten == 1 for r in reports)
    if not truncation:
        assert all(r.packed_tokens < r.dense_tokens for r in reports)


def test_rows_of_a_group_are_put_together():
    def batch(groups, rows, names):
        return {"dualkv_group": torch.tensor(groups), "x": torch.tensor(rows), "names": names, "all": torch.tensor(7), "none": None}

    first, second = _together([batch([1, 0, 2], [10, 0, 20], list("abc")), batch([0, 2, 1], [1, 21, 11], list("def"))])
    assert first["x"].tolist() == [10, 11, 0] and second["x"].tolist() == [1, 20, 21]
    assert first["names"] == ["a", "f", "b"] and second["names"] == ["d", "c", "e"]
    assert first["all"] == second["all"] == 7 and first["none"] is None
