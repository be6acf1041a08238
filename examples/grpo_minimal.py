"""GRPO in one file: sample, reward, update. The policy is an unmodified Hugging Face model; the update runs through backend="dualkv".

    python examples/grpo_minimal.py [--steps 60] [--seed 0] [--backend dualkv|inductor|eager]

The task: a prompt is a line of digits, and a response should repeat its first digit. Three things make the update compute each prompt
once: the compiled function, the mark, and nothing else. Old and new log-probabilities go through the same compiled function; they are
computed inside of it, so that no logits ever exist for prompt tokens.
"""

import argparse

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import dualkv_compile

DIGITS, EOS, PAD, VOCABULARY = 10, 10, 11, 12
PROMPTS, GROUP = 8, 8  # prompts a step, responses to each
SHORTEST, LONGEST, RESPONSE = 24, 40, 6  # tokens of a prompt (left-padded) and, at most, of a response (right-padded)
EPOCHS, CLIP, LEARNING_RATE = 2, 0.2, 1e-3


def make_policy():
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.1,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def make_prompts():
    """Ids and mask [PROMPTS, LONGEST], left-padded."""
    ids = torch.randint(DIGITS, (PROMPTS, LONGEST))
    pads = torch.randint(LONGEST - SHORTEST + 1, (PROMPTS, 1))
    mask = (torch.arange(LONGEST) >= pads).long()
    return ids.masked_fill(mask == 0, PAD), mask


@torch.no_grad()
def sample(policy, prompts, prompt_mask):
    """Responses [rows, RESPONSE]; PAD after EOS."""
    tokens, cache, new, mask = [], None, prompts, prompt_mask
    done = torch.zeros(len(prompts), 1, dtype=torch.bool)
    for _ in range(RESPONSE):
        out = policy(input_ids=new, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, probabilities = out.past_key_values, out.logits[:, -1, : EOS + 1].softmax(-1)
        new = torch.multinomial(probabilities, 1).masked_fill(done, PAD)
        tokens.append(new)
        mask = torch.cat([mask, (~done).long()], 1)
        done = done | (new == EOS)
    return torch.cat(tokens, 1)


def rewards_of(prompts, prompt_mask, responses):
    """The share of a response's places that hold the prompt's first digit."""
    first = prompts.gather(1, prompt_mask.argmax(1, keepdim=True))
    return (responses == first).float().mean(1)


def log_probs(policy, input_ids, attention_mask):
    """Of the response tokens, [rows, RESPONSE]. This is what gets compiled."""
    out = policy(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=RESPONSE + 1, use_cache=False)
    return out.logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, -RESPONSE:, None])[..., 0]


def loss_of(new, old, advantages, real):
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    return -(gain * real).sum() / real.sum()


def train(steps=60, seed=0, backend="dualkv", options=None, say=None):
    """The mean reward of each step's responses."""
    torch.manual_seed(seed)
    policy = make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    score = torch.compile(log_probs, backend=backend, options=options)
    history = []
    for step in range(steps):
        prompts, prompt_mask = (x.repeat_interleave(GROUP, 0) for x in make_prompts())
        responses = sample(policy, prompts, prompt_mask)
        rewards = rewards_of(prompts, prompt_mask, responses).view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        real = (responses != PAD).long()

        batch = {"input_ids": torch.cat([prompts, responses], 1), "attention_mask": torch.cat([prompt_mask, real], 1)}
        if backend == "dualkv":
            dualkv_compile.mark_shared_prompt(batch, prompt_length=LONGEST, group_size=GROUP)

        with torch.no_grad():
            old = score(policy, **batch)
        for _ in range(EPOCHS):
            loss = loss_of(score(policy, **batch), old, advantages, real)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        history.append(rewards.mean().item())
        if say and (step + 1) % 20 == 0:
            say(f"steps {step - 18:3} to {step + 1:3}: mean reward {sum(history[-20:]) / 20:.3f}")
    return history


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="dualkv", choices=("dualkv", "inductor", "eager"))
    arguments = parser.parse_args()
    train(arguments.steps, arguments.seed, arguments.backend, say=print)
    for report in dualkv_compile.reports():
        print(report)


if __name__ == "__main__":
    main()
