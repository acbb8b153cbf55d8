"""The trainer's side, inside the trainer's actor."""

from __future__ import annotations

from typing import Any

import ray

from weightsync.fence import Fence
from weightsync.messages import answer
from weightsync.ray_actors.side import Locator, Side, locate
from weightsync.sender import SenderRank


class TrainerSide:
    """One trainer rank. The weights are looked up anew for each update, so the attribute may be replaced."""

    def __init__(self, actor: Any, source: Locator, index: int, previous: Side | None) -> None:
        self._rank = SenderRank(
            index,
            lambda: locate(actor, source, key="source"),
            address=ray.util.get_node_ip_address(),
            node=ray.get_runtime_context().get_node_id(),
        )
        if isinstance(previous, TrainerSide):
            self._rank.take_over(previous._rank)

    @property
    def fence(self) -> Fence:
        return self._rank.fence

    def call(self, payload: bytes) -> list[bytes] | None:
        return [answer(self._rank.handle, payload)]

    def get_ready(self) -> None:
        self._rank.get_ready()

    def stand_down(self) -> None:
        self._rank.stand_down()

    def result(self, number: int) -> list[bytes] | None:
        raise AssertionError("a trainer answers at once")
