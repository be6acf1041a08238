"""How users are told: warnings that point at their own line, inputs by the names that they have in their code."""

from __future__ import annotations

import os
import re
import sys
import warnings

import torch
import torch.fx as fx

_INTERNAL = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning whose location is the innermost frame that is neither this package's nor PyTorch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_internal(file: str) -> bool:
    return file.startswith((*_INTERNAL, "<"))  # "<": generated code


def label(placeholder: fx.Node) -> str:
    """What Dynamo was given for an input, as code: `kwargs['input_ids']` rather than the node's name."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    name = name() if callable(name) else name  # a method before torch 2.11
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name) if name else placeholder.name
