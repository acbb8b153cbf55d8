"""The made-up transports of sets, for direct apply's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.direct.sets import BucketsBesideReceiver, BucketsBesideSender, SetReceiver, SetSender
from weightsync.registry import register_transport, unregister_transport


@pytest.fixture(autouse=True)
def sets() -> Iterator[None]:
    ends = {"sets": (SetSender, SetReceiver), "sets_and_buckets": (BucketsBesideSender, BucketsBesideReceiver)}
    for name, (sender, receiver) in ends.items():
        register_transport(name, sender, receiver)
    yield
    for name in ends:
        unregister_transport(name)
