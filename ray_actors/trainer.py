"""The trainer's side, inside the trainer's actor."""

from __future__ import annotations

from typing import Any

import ray

from weightsync.messages import decode_request, encode
from weightsync.ray_actors.side import Locator, Side, locate
from weightsync.sender import SenderRank


class TrainerSide:
    """One trainer rank. The weights are looked up anew for each update, so the attribute may be replaced."""

    def __init__(self, actor: Any, source: Locator, index: int, previous: Side | None) -> None:
        self._rank = SenderRank(
            index, lambda: locate(actor, source, key="source"), address=ray.util.get_node_ip_address()
        )
        if isinstance(previous, TrainerSide):
            self._rank.take_over(previous._rank)

    def call(self, payload: bytes, number: int = 0) -> list[bytes] | None:
        return [encode(self._rank.handle(decode_request(payload)))]

    def result(self, number: int) -> list[bytes] | None:
        raise AssertionError("a trainer answers at once")
