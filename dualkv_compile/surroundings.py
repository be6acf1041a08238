"""What happens to the outputs of a graph of Dynamo's: a rewritten graph may blank padding positions only where nobody reads them."""

import enum
import sys

from torch._dynamo import convert_frame
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX


class After(enum.Enum):
    """RETURNED: to the caller of what was compiled, who is promised zeros at padding positions.
    CONTINUED: a graph break follows, or the graph's frame returns into one that is compiled too: the rest of the program reads them.
    SPLIT: a wrapper (DistributedDataParallel's optimizer) cut one graph into several, and this is not the last. The next one is told by
    marks where padding is blank.
    """

    RETURNED = "returned"
    CONTINUED = "continued"
    SPLIT = "split"


def what_follows(gm):
    """Called while Dynamo compiles `gm`."""
    reason, is_part = getattr(gm, "compile_subgraph_reason", None), False
    if reason is None:  # only whole graphs have one
        reason, is_part = _reason_of_whole(), True
    if reason is None or reason.graph_break or _is_called_by_compiled_code():
        return After.CONTINUED
    return After.SPLIT if is_part else After.RETURNED


def _frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _reason_of_whole():
    for frame in _frames():
        reason = getattr(frame.f_locals.get("gm"), "compile_subgraph_reason", None)
        if reason is not None:
            return reason
    return None


def _is_called_by_compiled_code():
    """Whether the frame that is being compiled returns into one that was compiled before, to go on there. The rest of a frame after a
    break (a resume function) is called last by the frame itself, and what it returns is returned."""
    name = None
    for frame in _frames():
        code = frame.f_code
        if code.co_name == "_compile" and code.co_filename == convert_frame.__file__ and name is None:
            name = frame.f_locals["code"].co_name
        elif code in convert_frame.output_codes:
            if name is None or not name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
                return True
            name = code.co_name
    return False
