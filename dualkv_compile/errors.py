"""What a user can do wrong, and what the backend may refuse.

Every message says what was expected, what was got (rows and columns named) and what to do.
"""


class DualKVError(Exception):
    """Base of all errors of this package."""


class InvalidMark(DualKVError, ValueError):
    """The description of a batch (prompt lengths, groups, padding) is malformed or does not fit the batch."""


class PromptMismatch(InvalidMark):
    """Rows that were said to share a prompt do not."""


class NotRewritten(DualKVError):
    """A marked batch met an attention site that could not be rewritten, under ``strict=True``."""


class SharedGradient(DualKVError):
    """A gradient was asked for of which only the sum over the rows of a group is known, after what is packed was called."""


class InternalErrorWarning(RuntimeWarning):
    """A fault of this package while it rewrote or compiled a graph; the batch ran as if it were unmarked."""
