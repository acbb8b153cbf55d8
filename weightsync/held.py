"""Whether an engine rank held what it should: a reload of the same weights must leave every parameter as it was."""

from __future__ import annotations

from weightsync.errors import EngineStateError
from weightsync.interfaces import DirectAdapter
from weightsync.loadmap import LoadMap
from weightsync.placement import Place, marks_of


class Held:
    """The parameters and buffers that tensors feed, as they are before a reload.

    Left out are those that are loaded in part (`LoadMap.partial`): a reload leaves the rest of them undefined.
    """

    def __init__(self, adapter: DirectAdapter, load_map: LoadMap) -> None:
        """Raises EngineStateError where the engine shows none of them."""
        partial = set(load_map.partial)
        self._adapter = adapter
        self._paths = {(t.module, t.parameter): t.path for t in load_map.targets if t.path not in partial}
        self._before = self._marks()
        if not self._before:
            raise EngineStateError(
                "the engine shows none of the weights that it computes with: there is nothing to compare"
            )

    def _marks(self) -> dict[Place, tuple[object, ...]]:
        self._adapter.synchronize()
        return marks_of({place: tensor for place, tensor in self._adapter.live().items() if place in self._paths})

    def changed(self) -> list[str]:
        """Paths of those that are not as they were."""
        now = self._marks()
        return [self._paths[place] for place in {**self._before, **now} if now.get(place) != self._before.get(place)]
