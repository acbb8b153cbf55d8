"""That nothing is gathered where slices travel."""

from __future__ import annotations


def refuse_gathers() -> None:
    """In this process, from now on: a DTensor that is made whole is an error."""
    from torch.distributed.tensor import DTensor

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a whole tensor was gathered")

    DTensor.full_tensor = refuse  # type: ignore[assignment, method-assign]
