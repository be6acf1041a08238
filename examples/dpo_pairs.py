"""DPO log-probabilities of a chosen and a rejected response to each prompt, rows (i, i + B/2), compared with the unmarked batch.

    python examples/dpo_pairs.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dualkv_compile

VOCAB, PROMPT, RESPONSE, PAIRS = 128, 20, 6, 3


def log_probs(model, input_ids, attention_mask):
    """Sum over each row's response, [rows]."""
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, input_ids[:, PROMPT:, None])[..., 0].sum(1)


def main():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
    prompts = torch.randint(VOCAB, (PAIRS, PROMPT))
    ids = torch.cat([prompts.repeat(2, 1), torch.randint(VOCAB, (2 * PAIRS, RESPONSE))], 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = log_probs(model, **batch).detach()

    # rows with equal ids are a group, in any order; the function that holds the loss may be compiled as a whole
    dualkv_compile.mark_shared_prompt(batch, PROMPT, group_ids=torch.arange(PAIRS).repeat(2))
    chosen, rejected = torch.compile(log_probs, backend="dualkv")(model, **batch).chunk(2)
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()

    print(dualkv_compile.reports()[-1])
    print(f"largest difference of a log-probability: {(torch.cat([chosen, rejected]) - expected).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
