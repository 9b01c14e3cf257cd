"""Every error that a user of Tracklayer can meet, and the HTTP status that each becomes."""

from collections.abc import Iterator
from contextlib import contextmanager


class TracklayerError(Exception):
    """Base of all errors raised on purpose."""

    status = 500


class UserError(TracklayerError):
    """The request or the configuration can never succeed; the message names the value and the remedy."""

    status = 400


class CheckpointError(UserError):
    """A checkpoint directory or a tensor in it is not what the model needs."""


class CapacityError(TracklayerError):
    """The server is full now; the same request may succeed later."""

    status = 503


class IncompleteRoutes(TracklayerError):
    """Rows of a request were never written. Never returned as data: a missing row is an error.

    Attributes: `positions` (token positions), `layers` (decoder layer indices), parallel lists.
    """

    def __init__(self, positions: list[int], layers: list[int]) -> None:
        self.positions = positions
        self.layers = layers
        pairs = ", ".join(f"token {p} layer {i}" for p, i in list(zip(positions, layers, strict=True))[:8])
        more = "" if len(positions) <= 8 else f" and {len(positions) - 8} more"
        super().__init__(f"{len(positions)} route rows were never recorded: {pairs}{more}")


class SelfTestError(TracklayerError):
    """The start-up route self-test failed: recorded routes differ from the reference router's choice."""


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Whatever Python says when it trips over outside data of a wrong form inside the block is a UserError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{what} is malformed: {type(error).__name__}: {error}") from error
