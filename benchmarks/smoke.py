"""Exactness on a GPU in bfloat16: unmodified models through backend="dualkv" against a float64 oracle, beside the plain model's own error.

    python benchmarks/smoke.py

Prints, per model, the relative error of logits and of the worst parameter gradient of both; exits non-zero where dualkv's is more than
twice the plain model's, or where an attention site was not rewritten.
"""

import copy
import sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

import dualkv_compile

GROUPS, PROMPT, RESPONSE = 2, 160, 48


def configurations():
    common = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    yield "Qwen3 D=128", Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=128, **common)
    yield "Llama D=64", LlamaConfig(num_attention_heads=8, num_key_value_heads=2, **common)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    yield "GPT-2 D=64", GPT2Config(vocab_size=512, n_embd=512, n_layer=2, n_head=8, **none)


def batch(device):
    g = torch.Generator().manual_seed(0)
    rows, lengths = [], [[RESPONSE, 7, 31, 1], [20, 48]]
    for responses in lengths:
        prompt = torch.randint(1, 512, (PROMPT,), generator=g)
        for r in responses:
            row = torch.zeros(PROMPT + RESPONSE, dtype=torch.long)
            row[:PROMPT], row[PROMPT : PROMPT + r] = prompt, torch.randint(1, 512, (r,), generator=g)
            rows.append((row, (torch.arange(PROMPT + RESPONSE) < PROMPT + r).long()))
    ids, mask = (torch.stack(x).to(device) for x in zip(*rows, strict=True))
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 0, 0, 0, 1, 1])


def run(model, call, inputs, weights):
    logits = call(**inputs, use_cache=False).logits
    model.zero_grad()
    (logits.double() * weights).sum().backward()
    return logits.detach().double(), {n: p.grad.double() for n, p in model.named_parameters()}


def error(result, oracle, real):
    def relative(a, b):
        return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()

    return relative(result[0][real], oracle[0][real]), max(relative(result[1][n], oracle[1][n]) for n in oracle[1])


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, bfloat16")
    failed = False
    for name, config in configurations():
        for attention in ("sdpa", "eager"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            config._attn_implementation = attention
            model = AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16).train()
            inputs, groups = batch(device)
            real = inputs["attention_mask"].bool()
            weights = torch.randn(*real.shape, 512, device=device, dtype=torch.float64) * real[..., None]
            config._attn_implementation = "sdpa"
            exact = copy.deepcopy(model).double()
            oracle = run(exact, exact, inputs, weights)
            plain = error(run(model, model, inputs, weights), oracle, real)
            marked = dualkv_compile.mark_shared_prompt({k: v.clone() for k, v in inputs.items()}, PROMPT, group_ids=groups)
            ours = error(run(model, torch.compile(model, backend="dualkv"), marked, weights), oracle, real)
            report = dualkv_compile.reports()[-1]
            rewritten = report.attention_sites == report.attention_rewritten == 2
            good = rewritten and all(a <= 2 * b + 1e-3 for a, b in zip(ours, plain, strict=True))
            failed |= not good
            print(
                f"{name:12} {attention:6} logits {ours[0]:.2e} (plain {plain[0]:.2e})  gradients {ours[1]:.2e} (plain {plain[1]:.2e})  "
                f"sites {report.attention_rewritten}/{report.attention_sites}  tokens {report.dense_tokens} -> {report.packed_tokens}  "
                f"{'ok' if good else 'WRONG'}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
