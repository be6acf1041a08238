"""Which decoders of Hugging Face are deduplicated, and what stopped the others: the table of docs/models.md.

    python benchmarks/models.py [NAME ...] [--write docs/models.md]

Each family is built small with random weights, run marked through backend="dualkv" (inner_backend="aot_eager", float64) and compared with
the eager model on each row alone, without padding: logits and the gradient of every parameter, relative.
"""

import argparse
import copy
import sys
import warnings

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import dualkv_compile

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROPE = {"rope_theta": 10000.0}
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Llama": ("llama", {}),
    "Llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}}),
    "Llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}}),
    "Llama, yarn rope": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, **ROPE}},
    ),
    "Llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64, **ROPE,
            }
        },
    ),  # fmt: skip
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, window": ("mistral", {"sliding_window": 5}),
    "Gemma 2": ("gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "Gemma 3 text": ("gemma3_text", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "GPT-2": ("gpt2", GPT2),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}),
    "Phi": ("phi", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
    "GPT-J": ("gptj", GPT2 | {"rotary_dim": 8}),
    "Falcon": ("falcon", {"new_decoder_architecture": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "CodeGen": ("codegen", GPT2 | {"rotary_dim": 4}),
    "GPT-NeoX": ("gpt_neox", {"hidden_dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0}),
    "Qwen3-MoE": ("qwen3_moe", {"head_dim": 8, **MOE}),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),  # fmt: skip
    "DeepSeek-V2": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 16, "topk_method": "greedy",
        },
    ),  # fmt: skip
    "GPT-OSS": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "OLMo 2": ("olmo2", {}),
    "Granite": ("granite", {}),
    "Cohere": ("cohere", {}),
    "StableLM": ("stablelm", {}),
    "SmolLM3": ("smollm3", {}),
    "GLM-4": ("glm4", {"head_dim": 8}),
}

HEAD = """# Models

What `python benchmarks/models.py --write docs/models.md` printed: {versions}.

Small models with random weights; a batch of two groups (4 and 2 rows, prompts of 9 tokens, right-padded responses). "logits" and
"gradients" are the relative differences from the eager model run on each row alone, without padding (of the worst parameter, for
gradients); Hugging Face's norms, rotary tables and eager softmax run in float32 whatever the model's type, hence the 1e-8 to 1e-7.
"""


def batch():
    g = torch.Generator().manual_seed(0)
    rows = []
    for group, (prompt_length, responses) in enumerate([(9, [4, 6, 6, 2]), (9, [5, 1])]):
        prompt = torch.randint(1, 64, (prompt_length,), generator=g)
        for r in responses:
            ids = torch.zeros(15, dtype=torch.long)
            ids[:prompt_length], ids[prompt_length : prompt_length + r] = prompt, torch.randint(1, 64, (r,), generator=g)
            rows.append((ids, (torch.arange(15) < prompt_length + r).long(), group))
    ids, mask, groups = zip(*rows, strict=True)
    return torch.stack(ids), torch.stack(mask), torch.tensor(groups)


def relative(a, b, least=0.0):
    return ((a - b).norm() / b.norm().clamp_min(max(least, 1e-12))).item()


def measure(name, attention, experts="batched_mm"):
    """(report, difference of logits, of the worst gradient); raises what the model raises."""
    kind, overrides = FAMILIES[name]
    torch._dynamo.reset()
    config = AutoConfig.for_model(kind, **({} if overrides.get("n_embd") else COMMON) | overrides)
    config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    ids, mask, groups = batch()
    real = mask.bool()
    weights = torch.randn(*ids.shape, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * mask[..., None]

    def gradients_of(model):
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    reference, alone = copy.deepcopy(model), []
    for row, own, length in zip(ids, weights, mask.sum(1), strict=True):
        logits = reference(input_ids=row[None, :length], use_cache=False).logits[0]
        (logits * own[:length]).sum().backward()
        alone.append(logits.detach())
    expected = torch.cat(alone), gradients_of(reference)
    marked = dualkv_compile.mark_shared_prompt({"input_ids": ids.clone(), "attention_mask": mask.clone()}, 9, group_ids=groups)
    logits = torch.compile(model, backend="dualkv", options={"inner_backend": "aot_eager"})(**marked, use_cache=False).logits
    (logits * weights).sum().backward()
    actual = logits.detach()[real], gradients_of(model)
    report = max(dualkv_compile.reports(), key=lambda r: (r.attention_sites, r.attention_rewritten))
    if expected[1].keys() != actual[1].keys():
        raise RuntimeError(f"different parameters have gradients: {expected[1].keys() ^ actual[1].keys()}")
    # a gradient that is zero but for rounding (a key's bias) is measured against the largest one
    least = 1e-4 * max(g.norm().item() for g in expected[1].values())
    return report, relative(actual[0], expected[0]), max(relative(actual[1][n], g, least) for n, g in expected[1].items())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines = ["| family | attention | sites rewritten | tokens | FLOPs, packed / dense | logits | gradients | barriers |", "|---" * 8 + "|"]
    failed = False
    for name in arguments.names or FAMILIES:
        for attention in ("sdpa", "eager"):
            try:
                r, logits, gradients = measure(name, attention)
            except Exception as error:  # a table says what happened to each
                if "does not support an attention implementation" in str(error):
                    continue
                line = f"| {name} | {attention} | failed | | | | | {type(error).__name__}: {str(error).splitlines()[0][:160]} |"
                failed = True
            else:
                share = f"{r.packed_flops / r.dense_flops:.2f}" if r.dense_flops else "-"
                barriers = "; ".join(dict.fromkeys([f"{b.op}: {b.reason}" for b in r.barriers] + r.notes)) or "none"
                line = (
                    f"| {name} | {attention} | {r.attention_rewritten}/{r.attention_sites} "
                    f"| {r.dense_tokens} -> {r.packed_tokens} | {share} | {logits:.1e} | {gradients:.1e} | {barriers} |"
                )
                failed |= not (logits < 1e-6 and gradients < 1e-5)
            lines.append(line)
            print(line, flush=True)
    if arguments.write:
        with open(arguments.write, "w") as file:
            versions = f"transformers {transformers.__version__}, torch {torch.__version__}, float64, CPU"
            file.write("\n".join([HEAD.format(versions=versions), *lines, ""]))
    return failed


if __name__ == "__main__":
    sys.exit(main())
