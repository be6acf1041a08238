"""One GRPO update of an unmodified Hugging Face model: two prompts, four responses each, padding on both sides.

    python examples/grpo_step.py
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import dualkv_compile

VOCAB, PROMPT, RESPONSE, GROUP = 128, 24, 8, 4


def batch_of_responses():
    """What a sampler returns: left-padded prompts, each repeated GROUP times, and right-padded responses."""
    prompts = torch.randint(1, VOCAB, (2, PROMPT)).repeat_interleave(GROUP, 0)
    ids = torch.cat([prompts, torch.randint(1, VOCAB, (2 * GROUP, RESPONSE))], 1)
    mask = torch.ones_like(ids)
    mask[:GROUP, :5] = 0  # the first prompt is shorter
    mask[1, -3:] = 0  # and so is one response
    return {"input_ids": ids, "attention_mask": mask}


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, head_dim=16, **sizes))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    compiled = torch.compile(policy, backend="dualkv")

    batch = batch_of_responses()
    rewards = torch.rand(2, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)).flatten()

    # the only line that a trainer adds: mark the tensors that the model is called with, after the last copy of them
    dualkv_compile.mark_shared_prompt(batch, prompt_length=PROMPT, group_size=GROUP)

    logits = compiled(**batch, logits_to_keep=RESPONSE + 1, use_cache=False).logits[:, :-1]
    targets, real = batch["input_ids"][:, PROMPT:], batch["attention_mask"][:, PROMPT:]
    log_probs = logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    ratio = (log_probs - log_probs.detach()).exp()  # on policy: the old log-probabilities are these
    loss = -(ratio * advantages[:, None] * real).sum() / real.sum()
    loss.backward()
    optimizer.step()

    for report in dualkv_compile.reports():
        print(report)


if __name__ == "__main__":
    main()
