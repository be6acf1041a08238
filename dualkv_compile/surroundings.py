"""What happens to the outputs of a graph of Dynamo's: a rewritten graph may blank padding positions only where nobody reads them."""

import contextlib
import enum
import sys

import torch
from torch._dynamo import convert_frame, eval_frame, external_utils
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX


class After(enum.Enum):
    """RETURNED: to the caller of what was compiled, who is promised zeros at padding positions.
    CONTINUED: a graph break follows, or the frame returns into the program, compiled or not: the rest of it reads them. So it does where
    a wrapper (DistributedDataParallel's optimizer) cut one graph into several: no piece shows what the others read.
    """

    RETURNED = "returned"
    CONTINUED = "continued"


def what_follows(gm):
    """Called while Dynamo compiles `gm`."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or reason.graph_break:  # only whole graphs have one; the pieces of a cut graph count as followed by a break
        return After.CONTINUED
    return After.RETURNED if _is_called_from_outside() else After.CONTINUED


def placeholders_of_whole(gm):
    """The placeholders of the graph that Dynamo captured, of which `gm` may be a piece. Called while Dynamo compiles `gm`."""
    for frame in _frames():
        if frame.f_code is DDPOptimizer.compile_fn.__code__:
            return frame.f_locals["gm"].graph.find_nodes(op="placeholder")
    return gm.graph.find_nodes(op="placeholder")


def _frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


#: Files whose frames between a compiled function and its caller only hand on what they are given.
_PLUMBING = {
    module.__file__
    for module in (contextlib, convert_frame, eval_frame, external_utils, torch.nn.modules.module, torch.nn.parallel.distributed)
} | {torch.utils._contextlib.__file__}


def _is_called_from_outside():
    """Whether the frame that is being compiled returns to the caller of what was compiled. The rest of a frame after a break (a resume
    function) is called last by the frame itself, and what it returns is returned."""
    name = None
    for frame in _frames():
        code = frame.f_code
        if name is None:
            if code.co_name == "_compile" and code.co_filename == convert_frame.__file__:
                name = frame.f_locals["code"].co_name
        elif code.co_filename == external_utils.__file__:
            continue  # Dynamo's own wrapper of what it is given, compiled or not, returns what that returns
        elif code in convert_frame.output_codes:
            if not name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
                return False
            name = code.co_name
        elif code.co_filename == eval_frame.__file__:
            return True
        elif code.co_filename not in _PLUMBING:
            return False  # a frame that Dynamo gave up on: it runs as Python
    return True
