"""Shared-prompt attention in plain PyTorch: the specification of the kernels, and the implementation on a CPU.

Every segment attends to its prefix and to itself, so the cost is P*P + N*R*(P + R) score elements, not (P + N*R)^2.
Half precision is computed in float32 and float64 in float64. Sums have a fixed order. The backward is written out:
autograd is off inside a custom op.

    S = scale * q k^T                 S' = softcap * tanh(S / softcap), or S
    P = exp(S' - lse)                 lse over the visible keys and the sink
    dS' = P * (dout v^T - delta)      delta = sum(out * dout) - dlse
"""

import torch

from dualkv_compile.kernels.tables import COLUMN, END, SEGMENTS

_QUERIES_AT_ONCE = 1024


def forward(q, k, v, tables, scale, window, softcap, sinks):
    """``q`` [1, H, T, Dqk], ``k`` [1, HK, T, Dqk], ``v`` [1, HK, T, Dv] -> out [1, H, T, Dv], lse [1, H, T].

    ``out`` has the dtype of ``q`` and the memory order of [1, T, H, Dv]; ``lse`` is float32, or float64 for float64.
    A query that sees no key has out = 0, and lse = -inf (with sinks: its head's sink).
    """
    work = _work_dtype(q)
    heads, tokens, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    out = q.new_zeros((1, tokens, heads, v.shape[3])).transpose(1, 2)
    lse = q.new_full((1, heads, tokens), -torch.inf, dtype=work)
    sink = None if sinks is None else sinks.to(work).view(kv_heads, -1, 1, 1)
    for queries, keys in _blocks(tables):
        qs, ks, vs = (_take(x, index, kv_heads, work) for x, index in ((q, queries), (k, keys), (v, keys)))
        scores = _scores(qs, ks, scale, softcap).masked_fill(~_visible(queries, keys, tables, window), -torch.inf)
        top = scores.amax(-1, keepdim=True) if sink is None else torch.maximum(scores.amax(-1, keepdim=True), sink)
        top = torch.where(top == -torch.inf, 0.0, top)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        block = torch.matmul(weights, vs) / torch.where(total == 0, 1.0, total)
        span = slice(queries[0].item(), queries[-1].item() + 1)
        out[0, :, span] = block.flatten(0, 1).to(out.dtype)
        lse[0, :, span] = (top + torch.log(total)).flatten(0, 1).squeeze(-1)
    return out, lse


def backward(dout, dlse, q, k, v, out, lse, tables, scale, window, softcap, sinks):
    """Gradients (dq, dk, dv, dsinks) in the dtypes of what they belong to; ``dsinks`` is empty without sinks."""
    work = _work_dtype(q)
    kv_heads = k.shape[1]
    delta = (out.to(work) * dout.to(work)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(work)
    dq, dk, dv = (torch.zeros_like(x, dtype=work, memory_format=torch.contiguous_format) for x in (q, k, v))
    for queries, keys in _blocks(tables):
        qs, ks, vs, dos = (
            _take(x, index, kv_heads, work) for x, index in ((q, queries), (k, keys), (v, keys), (dout, queries))
        )
        statistics, deltas = (_take(x.unsqueeze(-1), queries, kv_heads, work) for x in (lse, delta))
        visible = _visible(queries, keys, tables, window)
        scores = _scores(qs, ks, scale, softcap)
        weights = torch.where(visible, torch.exp(scores - statistics), 0.0)
        dscores = weights * (torch.matmul(dos, vs.transpose(-1, -2)) - deltas)
        if softcap:
            dscores = dscores * (1 - (scores / softcap) ** 2)
        dscores = dscores * scale
        dq[0, :, queries] += torch.matmul(dscores, ks).flatten(0, 1)
        dk[0].index_add_(1, keys, torch.matmul(dscores.transpose(-1, -2), qs).sum(1))
        dv[0].index_add_(1, keys, torch.matmul(weights.transpose(-1, -2), dos).sum(1))
    if sinks is None:
        dsinks = q.new_zeros(0)
    else:
        dsinks = -(torch.exp(sinks.to(work).view(-1, 1) - lse[0]) * delta[0]).sum(-1).to(sinks.dtype)
    return (*(_token_major(grad, x.dtype) for grad, x in ((dq, q), (dk, k), (dv, v))), dsinks)


def _work_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _blocks(tables):
    """Pairs of packed indices (queries, keys): each segment's queries, some at a time, and all that they may see."""
    device = tables[SEGMENTS].device
    for start, stop, prefix_start, prefix_stop, _ in tables[SEGMENTS].tolist():
        prefix = torch.arange(prefix_start, prefix_stop, device=device)
        for first in range(start, stop, _QUERIES_AT_ONCE):
            last = min(first + _QUERIES_AT_ONCE, stop)
            own = torch.arange(start, last, device=device)
            yield torch.arange(first, last, device=device), torch.cat([prefix, own])


def _visible(queries, keys, tables, window):
    queries = queries.unsqueeze(1)
    visible = (keys <= queries) & (queries < tables[END][keys])
    if window is not None:
        visible &= tables[COLUMN][queries] - tables[COLUMN][keys] < window
    return visible


def _take(x, index, kv_heads, dtype):
    """Rows ``index`` of ``x`` [1, heads, T, D] as [kv_heads, heads // kv_heads, n, D]."""
    return x[0, :, index].to(dtype).unflatten(0, (kv_heads, -1))


def _scores(qs, ks, scale, softcap):
    scores = torch.matmul(qs, ks.transpose(-1, -2)) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _token_major(grad, dtype):
    return grad.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
