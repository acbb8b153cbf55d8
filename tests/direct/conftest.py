"""The made-up transport of sets, for direct apply's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.direct.sets import SetReceiver, SetSender
from weightsync.registry import register_transport, unregister_transport


@pytest.fixture(autouse=True)
def sets() -> Iterator[None]:
    register_transport("sets", SetSender, SetReceiver)
    yield
    unregister_transport("sets")
