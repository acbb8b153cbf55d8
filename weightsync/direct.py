"""Load an engine rank by the load map's own copies where that is proven to equal a reload; by one reload where not.

    first update        one reload, watched (`weightsync.qualify`): groups qualify
    further updates     groups that qualified by copies, the others by one reload, in one update
    layout changed      as a first update
    a verification      one reload of everything, which must change nothing

On `audit` every so many updates do both, and every parameter must come out the same.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from enum import StrEnum

import torch

from weightsync.coalescer import Coalescer
from weightsync.errors import EnginePoisonedError, EngineStateError
from weightsync.held import Held
from weightsync.identity import cupy_version
from weightsync.interfaces import DirectAdapter, EngineAdapter
from weightsync.landing import Landing, landings, views
from weightsync.loadmap import Copy, LoadMap
from weightsync.manifest import Manifest
from weightsync.placement import GroupCopies, Live, Place, SetCopies, compile_set, digests_of, run_copies
from weightsync.qualify import (
    LEARNING,
    NOT_SEEN,
    OPEN,
    Bystanders,
    Observation,
    addresses_of,
    contested,
    layout_of,
    unfit,
)
from weightsync.weightset import SetLayout

Pairs = list[tuple[str, torch.Tensor]]

_MAX_PATIENCE = 63


class Way(StrEnum):
    """How one update is loaded."""

    RELOAD = "one reload of everything"
    OBSERVE = "one reload of everything, watched"
    AUDIT = "copies and a reload, compared"
    VERIFY = "one reload of everything, compared with what was there"
    GROUPS = "groups as they come: copies, or the reload"
    IN_PLACE = "bytes as they come, into place; the other groups as they become whole"
    SETS = "everything in one launch, and a reload of the rest"


class DirectApply:
    """One engine rank's, for one load map."""

    def __init__(
        self, adapter: EngineAdapter, load_map: LoadMap, manifest: Manifest, *, mode: str, audit_every: int
    ) -> None:
        """*manifest*: which the load map is of. An update may bring a part of it."""
        self._adapter = adapter
        self._direct = adapter if isinstance(adapter, DirectAdapter) and adapter.copies_load else None
        self._mode, self._audit_every = mode, audit_every
        self._load_map = load_map
        self._key_of = {name: group.key for group in load_map.groups for name in group.names}
        self._groups: Mapping[str, GroupCopies] = {}
        self._never: dict[str, str] = {}
        """Groups that cannot qualify while the layout stays, with the reason."""
        self._shown: set[Copy] = set()
        """Copies that a reload was seen to be."""
        self._displaced: Mapping[str, frozenset[Place]] = {}
        """Groups of which the next watched reload is to show how the rows of these parameters are kept."""
        self._tried: set[str] = set()
        """Groups of which that was or is asked."""
        self._manifest, self._aliases = manifest, manifest.aliases
        self._is_contest_known = False
        """It was looked up whether several tensors fill the same memory."""
        self.reasons: dict[str, str] = {}
        """Groups that are loaded by a reload, with the reason. All others by copies."""
        self.reloaded: dict[str, str] = {}
        """Groups that the last update loaded by a reload, with the reason."""
        self._layout: object = None
        self._addresses: list[int] = []
        """Of the live tensors, when the update was planned."""
        self._looked = False
        self._begun: Live | None = None
        """The live tensors, where the update has begun already."""
        self._room: Mapping[str, torch.Tensor] | None = None
        """By canonical name: where the next update may be written as it arrives; None: not looked up yet."""
        self._since_audit = 0
        self._pending_for = 0
        """Updates since the last that was watched for groups that have shown nothing yet."""
        self._patience = 0
        self._sets = False
        """All that the planned update brings stays where it lies."""
        self._compiled: dict[SetLayout, SetCopies] = {}
        self._landings: dict[str, dict[str, Landing]] = {}
        """By group: where its tensors may be written as they arrive, as long as the live tensors lie as they do."""
        if self._direct is None:
            self._give_up("the engine's adapter does not show its live tensors")
        elif mode == "off" and not self._direct.laid_out_as_loaded:
            self._give_up("direct_apply is off")
        elif self._direct.device.type == "cuda" and not self._direct.laid_out_as_loaded and not cupy_version():
            self._give_up("a reload cannot be watched: cupy is not installed")
        else:
            self._start_anew(self._direct, self._direct.live())

    def _give_up(self, reason: str) -> None:
        self._direct, self._compiled = None, {}
        self.reasons = {group.key: reason for group in self._load_map.groups}

    def _start_anew(self, adapter: DirectAdapter, live: Live) -> None:
        self._layout, self._compiled, self._landings = layout_of(live), {}, {}
        self._groups, self._never = unfit(self._load_map, live)
        self._shown, self._displaced, self._tried, self._is_contest_known = set(), {}, set(), False
        self._pending_for = self._patience = 0
        unproven = [] if adapter.laid_out_as_loaded else [key for key in self._groups if key not in self._never]
        self.reasons = self._never | dict.fromkeys(unproven, NOT_SEEN)

    @property
    def num_groups(self) -> int:
        return len(self._load_map.groups)

    def forget_links(self) -> None:
        """The links are gone, and with them what was compiled for them."""
        self._compiled = {}

    def look(self, *, in_place: bool = False) -> None:
        """Whether the live tensors lie as they did; ahead of `plan`, where nothing can move them until then.

        *in_place*: the next update is likely to go `Way.IN_PLACE`.
        """
        if self._direct is not None:
            live = self._direct.live()
            if layout_of(live) != self._layout:
                self._start_anew(self._direct, live)
            self._addresses = addresses_of(live)
            self._looked, self._room = True, self._room_in(live) if in_place else None

    def look_again(self) -> None:
        """They may be moved before `plan`."""
        self._looked, self._room, self._begun = False, None, None

    def plan(self, *, sets: bool, staged: bool) -> Way:
        """How the next update will be loaded.

        Args:
            sets: all that comes stays where it lies, in weight sets as far as may be.
            staged: it is loaded when all of it is here, not as it comes.
        """
        way = self._way(sets=sets, staged=staged)
        if way is not Way.IN_PLACE:
            self._room = None
        elif self._room is None:
            assert self._direct is not None
            self._room = self._room_in(self._direct.live())
        return way

    def plan_to_verify(self) -> Way:
        """Instead of `plan`: the next update brings the weights that the engine should hold already.

        Raises:
            EngineStateError: the engine's adapter does not show what there is to compare.
        """
        if not isinstance(self._adapter, DirectAdapter):
            raise EngineStateError(
                "the engine's adapter does not show its live tensors (weightsync.interfaces.DirectAdapter), so that what it "
                "holds cannot be verified"
            )
        if self._direct is not None and not self._looked:
            self.look()
        self.look_again()
        return Way.VERIFY

    def _way(self, *, sets: bool, staged: bool) -> Way:
        if self._direct is None:
            return Way.RELOAD
        if not self._looked:
            self.look()
        self._looked, self._sets = False, sets
        self._since_audit += 1
        if not OPEN.isdisjoint(self.reasons.values()):
            # Frozen or constant weights may never show anything; watching costs the others their speed.
            self._pending_for += 1
            if self._pending_for > self._patience:
                return Way.OBSERVE
        if len(self.reasons) == len(self._load_map.groups):
            return Way.RELOAD
        if self._direct.laid_out_as_loaded and not sets:
            return Way.RELOAD if staged else Way.IN_PLACE
        if self._mode == "audit" and self._since_audit >= self._audit_every:
            return Way.AUDIT
        if sets:
            return Way.SETS
        return Way.GROUPS if staged else Way.IN_PLACE

    def begin(self, coalescer: Coalescer) -> None:
        """Ahead of `apply`, before the first byte comes: wait for what still reads the old weights, and let bytes land.

        Later that would wait for what brings the new ones, too; and what has come until then would be staged.

        Raises:
            EngineStateError: the engine's parameters have moved since the plan.
        """
        if self._direct is not None:
            self._begun = self._begin(self._direct, coalescer)

    def _begin(self, adapter: DirectAdapter, coalescer: Coalescer) -> Live:
        live = adapter.live()
        if addresses_of(live) != self._addresses:
            raise EngineStateError("the engine's parameters were moved during the update; update again")
        adapter.synchronize()
        room, self._room = self._room, None
        if room is not None:
            coalescer.land(room)
        return live

    def apply(self, way: Way, coalescer: Coalescer, *, verify: bool) -> int:
        """Load everything in the *way* that was planned; returns how often the engine's loader ran.

        Args:
            verify: digest what is copied from sets, and compare.

        Raises:
            EngineStateError: as `begin`, where that was not called.
            EnginePoisonedError: an audit found that copies and a reload differ, or a verification that the engine held other
                weights; copies are off from then on.
            As `Coalescer.groups`.

        On a GPU what copies did is done when the current stream has come so far.
        """
        live, self._begun = self._begun, None
        come = dict.fromkeys(coalescer.keys, way.value)
        self.reloaded = {**come, **self._reasons(come)}
        if not come:
            return 0
        if way is Way.VERIFY:
            return self._verify(coalescer)
        if self._direct is None or way is Way.RELOAD:
            return self._adapter.apply(coalescer.groups(private=self.reasons))
        if live is None:
            live = self._begin(self._direct, coalescer)
        self._refuse_contested(live)
        reasons = self._reasons(come)
        if way is Way.OBSERVE:
            if not OPEN.isdisjoint(reasons.values()):
                return self._observe(self._direct, live, coalescer)
            way = Way.SETS if self._sets else Way.GROUPS  # what was to be watched has been left out
        self.reloaded = reasons
        match way:
            case Way.AUDIT:
                return self._audit(self._direct, live, coalescer)
            case Way.SETS:
                rest = self._copy_sets(live, coalescer, verify=verify)
            case _:
                rest = self._copy_groups(live, coalescer)
        return self._load_rest(self._direct, rest, any_left=bool(reasons))

    def _reasons(self, come: Container[str]) -> dict[str, str]:
        return {key: reason for key, reason in self.reasons.items() if key in come}

    def _refuse_contested(self, live: Live) -> None:
        """Groups of which several tensors fill the same memory."""
        if not self._is_contest_known:
            self._is_contest_known = True
            self._refuse(contested(self._groups, live, self._aliases))

    def _refuse(self, reasons: Mapping[str, str]) -> None:
        self._never = {**reasons, **self._never}
        self.reasons = {**self.reasons, **self._never}
        self._compiled = {}

    def _observe(self, adapter: DirectAdapter, live: Live, coalescer: Coalescer) -> int:
        """One reload of all that comes, watched. What was seen to be no mere copy stays with the reload."""
        watched = Observation(self._groups, self._never, live, adapter.reachable, self._shown, self._displaced)
        reloads = adapter.apply(watched.watch(coalescer.groups(private=self._key_of.values())))
        adapter.synchronize()
        self._pending_for, self._patience = 0, min(2 * self._patience + 1, _MAX_PATIENCE)
        if layout_of(adapter.live()) == self._layout:
            reasons = watched.reasons()
            self._learn_from(watched, reasons)
            self.reasons = {key: reason for key, reason in reasons.items() if reason in OPEN}
            self._refuse({key: reason for key, reason in reasons.items() if reason not in OPEN})
        return reloads

    def _learn_from(self, watched: Observation, reasons: dict[str, str]) -> None:
        """Give groups that are kept otherwise than loaded two more reloads: one that shows how, and one that proves it."""
        asked = {key: places for key, places in watched.displaced.items() if key not in self._tried}
        waiting = {
            key: places
            for key, places in self._displaced.items()
            if key not in watched.displaced and reasons.get(key, NOT_SEEN) is NOT_SEEN
        }
        reasons.update(dict.fromkeys([*asked, *waiting], LEARNING))
        reasons.update(dict.fromkeys(watched.learned, NOT_SEEN))
        self._tried |= asked.keys()
        self._displaced = asked | waiting
        self._groups = {**self._groups, **watched.learned}
        self._landings = {}
        if asked or watched.learned:
            self._patience, self._is_contest_known = 0, False

    def _audit(self, adapter: DirectAdapter, live: Live, coalescer: Coalescer) -> int:
        """Copy, then reload everything, and compare what came out."""
        copied: dict[str, list[int]] = {}
        bystanders = Bystanders(self._groups, live, adapter.reachable)

        def both() -> Iterator[Pairs]:
            for pairs in coalescer.groups(private=self._key_of.values()):
                key = self._key_of[pairs[0][0]]
                if key not in self.reasons:
                    run_copies(self._groups[key].copies, dict(pairs), live)
                    copied[key] = self._digest(key, live)
                bystanders.enter(key)
                yield pairs
                bystanders.leave(key)

        reloads = adapter.apply(both())
        adapter.synchronize()
        self._since_audit = 0
        now, blamed = adapter.live(), bystanders.blamed()
        for key, digests in copied.items():
            if self._digest(key, now) != digests or key in blamed:
                self._give_up("an audit found that copies and a reload differ")
                why = f" ({blamed[key]})" if key in blamed else ""
                raise EnginePoisonedError(
                    f"direct apply differs from a reload in module group {key}{why}; it is off for this weight sync now. "
                    "Update again"
                )
        return reloads

    def _verify(self, coalescer: Coalescer) -> int:
        """Reload everything; nothing may come out other than it was."""
        assert isinstance(self._adapter, DirectAdapter)
        held = Held(self._adapter, self._load_map)
        reloads = self._adapter.apply(coalescer.groups(private=self._key_of.values()))
        if changed := held.changed():
            self._give_up("a verification found that the engine did not hold the weights it should")
            raise EnginePoisonedError(
                f"it held other values in {', '.join(changed[:5])}{', ...' if len(changed) > 5 else ''} ({len(changed)} of its "
                f"parameters) than its loader makes of version {coalescer.version}; direct apply is off for this weight sync "
                "now. Update again"
            )
        return reloads

    def _digest(self, key: str, live: Live) -> list[int]:
        return digests_of([live[place] for place in self._groups[key].places])

    def _copy_groups(self, live: Live, coalescer: Coalescer) -> Iterator[Pairs]:
        """Copy groups as they come; yields those that did not qualify."""
        for pairs in coalescer.groups(private=self.reasons):
            key = self._key_of[pairs[0][0]]
            if key in self.reasons:
                yield pairs
            else:
                copies = self._groups[key].copies
                left = (c for c in copies if not coalescer.has_landed(self._aliases.get(c.name, c.name)))
                run_copies(left, dict(pairs), live)

    def _room_in(self, live: Live) -> Mapping[str, torch.Tensor]:
        """For all groups that are copied."""
        self._refuse_contested(live)
        keys = [key for key in self._groups if key not in self.reasons]
        for key in keys:
            if key not in self._landings:
                self._landings[key] = landings(self._groups[key], live, self._manifest)
        return views((self._landings[key] for key in keys), live)

    def _copy_sets(self, live: Live, coalescer: Coalescer, *, verify: bool) -> Iterator[Pairs]:
        """Copy everything at once; yields the groups that did not qualify."""
        aliases = self._aliases
        sets, others = coalescer.take_all()
        layouts = [chunk.layout for chunk in sets]
        direct: list[Copy] = []
        if others or layouts != list(self._compiled):
            direct = [copy for key, group in self._groups.items() if key not in self.reasons for copy in group.copies]
        if layouts != list(self._compiled):
            self._compiled = {
                layout: self._compiled.get(layout) or compile_set(layout, direct, live, aliases) for layout in layouts
            }
        for chunk in sets:
            compiled = self._compiled[chunk.layout]
            compiled.moves.start(digest=verify)
            found = compiled.moves.result()
            if verify:
                coalescer.check_set(chunk, found)
            with torch.no_grad():
                for source, target in compiled.casts:
                    target.copy_(source)
        if others:
            run_copies([c for c in direct if aliases.get(c.name, c.name) in others], others, live, aliases)
        tensors = others | {name: tensor for chunk in sets for name, tensor in chunk.layout.tensors.items()}
        come = set(coalescer.keys)
        for group in self._load_map.groups:
            if group.key in self.reasons and group.key in come:
                yield [(name, tensors[aliases.get(name, name)].clone()) for name in group.names]

    def _load_rest(self, adapter: DirectAdapter, rest: Iterator[Pairs], *, any_left: bool) -> int:
        """What did not qualify, by one reload; none where there is nothing."""
        if any_left:
            reloads = adapter.apply(rest)
            adapter.synchronize()
            return reloads
        for _ in rest:
            raise AssertionError("every group has qualified")
        return int(adapter.laid_out_as_loaded)  # copying is how such an engine loads
