"""The one internal bail-out of the passes."""


class CannotDeduplicate(Exception):
    """This graph (or this way of packing it) cannot be proved right; the message says why. Caught once, in the backend.

    `sites_found`: the attention sites that were seen until then.
    """

    sites_found = 0


class ReadsPadding(CannotDeduplicate):
    """Something reads the values at padding positions, so padding may not be left out of the packed order."""


class Barrier(Exception):
    """Raised by a rule: this operation cannot run packed, because …"""
