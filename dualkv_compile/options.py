"""The backend's options, from torch.compile(options=…) and the environment."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Options:
    """
    dump: directory for graphs and reports (DUALKV_DUMP).
    strict: an attention site that is not rewritten in a marked batch is an error, NotRewritten (DUALKV_STRICT).
    attention: "auto", "triton" or "reference": the attention op's implementation (DUALKV_ATTENTION).
    detect: an unmarked batch is examined at each call, and treated as marked where rows begin alike (DUALKV_DETECT).
    detect_min_tokens: fewer tokens are not worth sharing (DUALKV_DETECT_MIN_TOKENS).
    inner_backend: "inductor", "aot_eager" or "eager": what compiles the rewritten graph (DUALKV_INNER_BACKEND).
    inductor: everything else, handed to Inductor.
    """

    dump: str | None = None
    strict: bool = False
    attention: str = "auto"
    detect: bool = False
    detect_min_tokens: int = 64
    inner_backend: str = "inductor"
    inductor: dict[str, Any] = dataclasses.field(default_factory=dict)


_CHOICES = {"attention": ("auto", "triton", "reference"), "inner_backend": ("inductor", "aot_eager", "eager")}


def parse(mode: str | None, options: dict[str, Any] | None) -> Options:
    """Raises ValueError for an unknown option or value."""
    env = os.environ
    found: dict[str, Any] = {
        "dump": env.get("DUALKV_DUMP") or None,
        "strict": env.get("DUALKV_STRICT", "0") not in ("", "0", "false", "False"),
        "attention": env.get("DUALKV_ATTENTION", "auto"),
        "detect": env.get("DUALKV_DETECT", "0") not in ("", "0", "false", "False"),
        "detect_min_tokens": _number(env.get("DUALKV_DETECT_MIN_TOKENS", "64")),
        "inner_backend": env.get("DUALKV_INNER_BACKEND", "inductor"),
    }
    inductor = dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
    known = torch._inductor.list_options()
    for name, value in (options or {}).items():
        if name in found:
            found[name] = value
        elif name.replace("-", "_") in known:
            inductor[name.replace("-", "_")] = value
        else:
            raise ValueError(f"unknown option {name!r} of backend 'dualkv'; its own are {sorted(found)}, all others must be Inductor's")
    for name, choices in _CHOICES.items():
        if found[name] not in choices:
            raise ValueError(f"option {name!r} of backend 'dualkv' must be one of {choices}, got {found[name]!r}")
    for name in ("strict", "detect"):
        if not isinstance(found[name], bool):
            raise ValueError(f"option {name!r} of backend 'dualkv' must be True or False, got {found[name]!r}")
    if type(found["detect_min_tokens"]) is not int or found["detect_min_tokens"] < 1:
        raise ValueError(f"option 'detect_min_tokens' of backend 'dualkv' must be a positive int, got {found['detect_min_tokens']!r}")
    return Options(**found, inductor=inductor)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
