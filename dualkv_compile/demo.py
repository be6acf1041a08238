"""The demo: GRPO updates of a small Qwen3, each computed twice, by plain Inductor and by backend="dualkv", and compared.

The task is chain_sum of reasoning_gym. The policy starts from random weights, so it is first shown some worked solutions; rewards give
partial credit (see `reward_of`), which makes a group's rewards differ long before answers are right.

Needs transformers, reasoning-gym, matplotlib and tqdm.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import random
import re
import time

import torch
from tqdm import tqdm

import dualkv_compile

PAD, EOS, VOCAB = 256, 257, 258  # a token is a byte of UTF-8
PROMPTS, GROUP, NEW_TOKENS, SHOTS = 4, 8, 32, 2
TOLERANCE = 1e-4  # of a parameter's gradient, relative, float32


@dataclasses.dataclass
class Step:
    """What one update showed. Times are of forward, loss and backward, in seconds; those of the first update include compilation."""

    number: int
    reward: float
    spread: bool
    loss_difference: float
    gradient_difference: float
    dense_tokens: int
    padding: int
    packed_tokens: int
    rewritten: int
    plain_time: float
    dualkv_time: float


# ------------------------------------------------------------------------------------------------------------- the task


class Task:
    """Prompts (worked examples, then a question), worked solutions and rewards."""

    def __init__(self, seed: int, size: int):
        import reasoning_gym

        self.data = reasoning_gym.create_dataset("chain_sum", seed=seed, size=size, min_terms=3, max_terms=3, min_digits=1, max_digits=1)
        self.random = random.Random(seed)

    def prompt(self, entry: dict) -> str:
        shots = [self.data[self.random.randrange(len(self.data))] for _ in range(SHOTS)]
        return "".join(f"{e['question']} {solution(e)}\n" for e in shots) + f"{entry['question']} "

    def reward_of(self, response: str, entry: dict) -> float:
        """reasoning_gym's score (1 if right), plus partial credit: up to 0.5 for a near number, up to 0.1 for digits and signs."""
        numbers = re.findall(r"-?\d+", response)
        reward = 0.1 * sum(c in "0123456789 +-=;" for c in response) / max(len(response), 1)
        if numbers:
            reward += self.data.score_answer(numbers[-1], entry) + 0.5 / (1 + abs(int(numbers[-1][:9]) - int(entry["answer"])))
        return reward


def solution(entry: dict) -> str:
    """'4 - 1 = 3; 3 - 7 = -4' for '… 4 - 1 - 7 ='."""
    first, *rest = re.search(r"(-?\d+(?: [+-] \d+)*) =", entry["question"]).group(1).split(" ")
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total} {sign} {term} = {after}")
        total = after
    return "; ".join(steps)


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def pad_left(rows: list[list[int]], device: torch.device, width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), as wide as the longest row, or `width` if that is more."""
    width = max(width, *map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(r)) + r for r in rows], device=device)
    return ids, (ids != PAD).long()


# ----------------------------------------------------------------------------------------------------------- the policy


def make_policy(device: torch.device, layers: int = 4) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=1024, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device, torch.float32)


def warm_up(model: torch.nn.Module, task: Task, steps: int, device: torch.device, rows: int = 8) -> None:
    """Supervised steps on worked solutions."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    bar = tqdm(range(steps), "warm-up", unit="step", mininterval=1)
    for _ in bar:
        entries = [task.data[task.random.randrange(len(task.data))] for _ in range(rows)]
        ids, mask = pad_left([encode(task.prompt(e) + solution(e)) + [EOS] for e in entries], device)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)


@torch.no_grad()
def sample(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Responses [rows, NEW_TOKENS], PAD after EOS, and the log-probability of each of their tokens."""
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    tokens, scores, cache, new = [], [], None, ids
    for _ in range(NEW_TOKENS):
        out = model(input_ids=new, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logp = out.logits[:, -1].log_softmax(-1)
        new = torch.multinomial(logp.exp(), 1)
        scores.append(logp.gather(1, new)[:, 0])
        new = new.masked_fill(done[:, None], PAD)
        tokens.append(new[:, 0])
        mask = torch.cat([mask, (~done[:, None]).long()], 1)
        done = done | (new[:, 0] == EOS)
    return torch.stack(tokens, 1), torch.stack(scores, 1)


# ----------------------------------------------------------------------------------------------------------- the update


def grpo_loss(logits: torch.Tensor, responses: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The clipped objective over response tokens. logits: [rows, NEW_TOKENS + 1, vocabulary]; a row's last ones predict nothing."""
    real = responses != PAD
    logp = logits[:, :-1].log_softmax(-1).gather(2, responses[..., None])[..., 0]
    ratio = (logp - old).masked_fill(~real, 0).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -(gain * real).sum() / real.sum()


def update(model: torch.nn.Module, compiled: torch.nn.Module, batch: dict, *loss_arguments) -> tuple[float, float]:
    """(loss, seconds) of one forward and backward; the gradients are left in `model`."""
    model.zero_grad()
    _synchronize(batch["input_ids"].device)
    begin = time.perf_counter()
    loss = grpo_loss(compiled(**batch, logits_to_keep=NEW_TOKENS + 1, use_cache=False).logits, *loss_arguments)
    loss.backward()
    _synchronize(batch["input_ids"].device)
    return loss.item(), time.perf_counter() - begin


def gradient_difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest relative difference, over parameters, of the gradients; infinite where one of them is missing or not finite."""
    worst = 0.0
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        if a.grad is None or b.grad is None:
            return float("inf")
        difference = ((a.grad - b.grad).norm() / b.grad.norm().clamp_min(1e-12)).item()
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_step(number: int, task: Task, prompts: list, width: int, policy, policy_compiled, plain, plain_compiled, optimizer) -> Step:
    """One update of `policy`, computed by both; the gradients applied are dualkv's."""
    device = next(policy.parameters()).device
    entries = [entry for entry, _ in prompts]
    prompt_ids, prompt_mask = pad_left([encode(p) for _, p in prompts for _ in range(GROUP)], device, width)
    responses, old = sample(policy, prompt_ids, prompt_mask)
    texts = [decode(r) for r in responses.tolist()]
    rewards = torch.tensor([task.reward_of(t, entries[i // GROUP]) for i, t in enumerate(texts)], device=device).view(PROMPTS, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    best = int(rewards.argmax())
    question = entries[best // GROUP]["question"].rsplit(": ", 1)[-1]
    tqdm.write(f"  step {number}: mean reward {rewards.mean():.3f}; best response {texts[best]!r} to {question!r}")

    ids = torch.cat([prompt_ids, responses], 1)
    mask = torch.cat([prompt_mask, (responses != PAD).long()], 1)
    plain.load_state_dict(policy.state_dict())
    plain_loss, plain_time = update(plain, plain_compiled, {"input_ids": ids, "attention_mask": mask}, responses, old, advantages)

    groups = torch.arange(PROMPTS, device=device).repeat_interleave(GROUP)
    batch = {"input_ids": ids.clone(), "attention_mask": mask.clone()}
    batch = dualkv_compile.mark_shared_prompt(batch, prompt_ids.shape[1], group_ids=groups)
    calls = {id(r): r.calls for r in dualkv_compile.reports()}
    loss, seconds = update(policy, policy_compiled, batch, responses, old, advantages)
    ran = [r for r in dualkv_compile.reports() if r.calls > calls.get(id(r), 0)]
    rewritten = [r for r in ran if r.attention_rewritten]
    step = Step(
        number,
        rewards.mean().item(),
        bool((rewards.std(1) > 1e-6).any()),
        abs(loss - plain_loss),
        gradient_difference(policy, plain),
        ids.numel(),
        int((mask == 0).sum()),
        rewritten[0].packed_tokens if rewritten else ids.numel(),
        sum(r.attention_rewritten for r in rewritten),
        plain_time,
        seconds,
    )
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    tqdm.write(
        f"  step {number}: loss differs by {step.loss_difference:.1e}, gradients by {step.gradient_difference:.1e} (relative); "
        f"{step.dense_tokens} tokens ({step.padding} of them padding), packed {step.packed_tokens}; "
        f"inductor {plain_time:.3f} s, dualkv {seconds:.3f} s"
        + (" (both with compilation)" if number == 1 else ""),
    )
    return step


# ----------------------------------------------------------------------------------------------------------- the report


def table(steps: list[Step]) -> str:
    header = "step, reward, loss diff., max rel. grad diff., tokens, padding, packed, fewer, inductor s, dualkv s, ratio"
    rows = [tuple(header.split(", "))]
    for s in steps:
        ratio = f"{s.plain_time / s.dualkv_time:.2f}x" if s.number > 1 else "(compiles)"
        exactness = (f"{s.reward:.3f}", f"{s.loss_difference:.1e}", f"{s.gradient_difference:.1e}")
        tokens = (f"{s.dense_tokens}", f"{s.padding}", f"{s.packed_tokens}", f"{s.dense_tokens / s.packed_tokens:.2f}x")
        rows.append((f"{s.number}", *exactness, *tokens, f"{s.plain_time:.3f}", f"{s.dualkv_time:.3f}", ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def plot(steps: list[Step], path: pathlib.Path, device: torch.device) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    warm = [s for s in steps if s.number > 1] or steps
    panels = [
        (left, warm, "seconds", [("Inductor", [s.plain_time for s in warm]), ("dualkv", [s.dualkv_time for s in warm])]),
        (right, steps, "tokens", [("dense", [s.dense_tokens for s in steps]), ("packed", [s.packed_tokens for s in steps])]),
    ]
    for axis, shown, label, series in panels:
        for k, (name, values) in enumerate(series):
            axis.bar([s.number + 0.4 * k - 0.2 for s in shown], values, 0.38, label=name, color=("#9aa0a6", "#1a73e8")[k])
        axis.set_xticks([s.number for s in shown])
        axis.set_xlabel("GRPO step")
        axis.set_ylabel(label)
        axis.set_ylim(top=1.25 * axis.get_ylim()[1])
        axis.legend(loc="upper right", ncols=2, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_title(f"Forward and backward, {device.type}" + (" (step 1 compiles: left out)" if warm is not steps else ""), fontsize=10)
    right.set_title(f"Tokens per step ({PROMPTS} prompts x {GROUP} responses)", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def problems(steps: list[Step]) -> list[str]:
    """What is wrong with a run; empty if nothing is."""
    found = []
    for s in steps:
        if not s.gradient_difference <= TOLERANCE:
            found.append(f"step {s.number}: gradients differ by {s.gradient_difference:.1e}, more than {TOLERANCE:.0e}")
        if not s.spread:
            found.append(f"step {s.number}: all rewards of each group are equal, so the update shows nothing")
        if not s.rewritten:
            found.append(f"step {s.number}: no attention site was rewritten")
    return found


def main(out: str = "out", steps: int = 5, warm_up_steps: int = 80, seed: int = 0, device: str | None = None) -> int:
    """Runs the demo; returns the exit status: 0, or 1 where something is wrong (see `problems`)."""
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    begin = time.perf_counter()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    directory = pathlib.Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    task = Task(seed, 2000)
    policy = make_policy(where)
    print(f"policy: Qwen3, {sum(p.numel() for p in policy.parameters()):,} parameters, float32, on {where}", flush=True)
    warm_up(policy, task, warm_up_steps, where)
    plain = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    compiled = torch.compile(policy, backend="dualkv"), torch.compile(plain)
    print("GRPO: the first step compiles the model twice, once for each backend", flush=True)
    # one width for all steps, as trainers with a maximum prompt length have: the longest prompt's
    entries = [[task.data[task.random.randrange(len(task.data))] for _ in range(PROMPTS)] for _ in range(steps)]
    prompts = [[(entry, task.prompt(entry)) for entry in of_step] for of_step in entries]
    width = max(len(encode(p)) for of_step in prompts for _, p in of_step)
    bar = tqdm(prompts, "GRPO", unit="step")
    done = [run_step(i, task, batch, width, policy, compiled[0], plain, compiled[1], optimizer) for i, batch in enumerate(bar, 1)]

    picture = directory / "demo.png"
    plot(done, picture, where)
    packed = [r for r in dualkv_compile.reports() if r.attention_rewritten]
    for r in packed or dualkv_compile.reports():
        print(f"\n{r}")
    print(f"\n{table(done)}\n\n{time.perf_counter() - begin:.0f} s in all; picture: {picture}")
    wrong = problems(done)
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0
