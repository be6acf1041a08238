"""TRL's GRPOTrainer on problems of reasoning-gym, its policy and its reference model compiled by dualkv. Offline, on a small Qwen3.

    python examples/trl_grpo.py [--steps 6] [--plain]
"""

import argparse
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is looked up: before the imports below

import reasoning_gym
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import dualkv_compile
from dualkv_compile.integrations.trl import SharedPrompts


class Trainer(SharedPrompts, GRPOTrainer):
    """All that is added to a program that uses GRPOTrainer."""


def byte_tokenizer():
    """One token a byte."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def small_policy(directory, vocabulary, hidden=64, layers=2):
    """A saved Qwen3 of random weights: TRL loads its reference model from where the policy came from."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def problems(count, seed=0):
    """(data set for TRL, reward function): reasoning-gym's score, and a little for digits, so that rewards of a group differ."""
    task = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, min_terms=2, max_terms=4)
    rows = Dataset.from_list([{"prompt": entry["question"] + " ", "index": i} for i, entry in enumerate(task)])

    def reward(completions, index, **_):
        digits = [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
        return [task.score_answer(text.strip(), task[i]) + d for text, i, d in zip(completions, index, digits, strict=True)]

    return rows, reward


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="leave the models uncompiled")
    arguments = parser.parse_args()
    if arguments.plain:
        Trainer.dualkv_backend = None
    tokenizer = byte_tokenizer()
    rows, reward = problems(16)
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory, max_steps=arguments.steps, learning_rate=1e-3, per_device_train_batch_size=8, num_generations=4,
            steps_per_generation=2, num_iterations=2, beta=0.04, max_completion_length=16, report_to="none", save_strategy="no",
            logging_steps=1, bf16=False, use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        model = small_policy(directory, len(tokenizer))
        trainer = Trainer(model=model, args=config, reward_funcs=reward, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
    for report in dualkv_compile.reports():
        if report.calls:
            print(report)


if __name__ == "__main__":
    main()
