"""A small decoder in the style of nanoGPT: hand-written attention, a causal buffer, float64 throughout."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, length, form):
        super().__init__()
        self.heads, self.form = heads, form
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        if self.form == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.form == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
            keep = torch.arange(t, device=x.device)[:, None] >= torch.arange(t, device=x.device)
            scores = scores + torch.where(keep, 0.0, -1e30)
            y = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        elif self.form == "baddbmm":
            d = q.shape[-1]
            keep = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            flat = [z.reshape(b * self.heads, t, d) for z in (q, k, v)]
            empty = torch.empty(b * self.heads, t, t, dtype=x.dtype, device=x.device)
            scores = torch.baddbmm(empty, flat[0], flat[1].transpose(1, 2), beta=0, alpha=d**-0.5)
            scores = scores.view(b, self.heads, t, t).masked_fill(~keep, -1e9)
            y = torch.bmm(scores.softmax(-1).view(b * self.heads, t, t), flat[2]).view(b, self.heads, t, d)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class NanoGPT(nn.Module):
    """forward(input_ids [B, S]) -> logits [B, S, vocab]; no padding mask: every column is a token to it."""

    def __init__(self, form="buffer", vocab=64, width=32, layers=2, heads=4, length=64, between=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attention": Attention(width, heads, length, form),
                    "norm_2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.between = between

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for i, layer in enumerate(self.layers):
            x = x + layer["attention"](layer["norm"](x))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm_2"](x))))
            if self.between is not None and i == 0:
                x = self.between(x)
        return self.head(self.norm(x))
