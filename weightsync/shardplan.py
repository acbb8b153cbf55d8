"""The plan of a sharded transfer: which box of which tensor every engine rank pulls from which trainer rank.

Made by `weightsync.shardplanner`. What is alike is kept once:

    class     receivers whose needs are equal (replicas)
    entry     tensors of one module group that are of one shape, held alike and needed alike (equal experts)
    cut       what a class needs of such tensors, in pieces, and for each piece the ranks that hold it
    choice    which of them serves: per cut and receiver, how many of the alike tensors come from whom

and the pulls of one rank are expanded from there, a module group at a time. No data, no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from weightsync.boxes import Box
from weightsync.cuts import Ints
from weightsync.digest import digest_text
from weightsync.manifest import TensorMeta
from weightsync.needs import Needs
from weightsync.pulls import Entry, Pulls, Rows, row_type


class StagingLayout(msgspec.Struct, frozen=True):
    """A receiver's staging: its needed boxes one after the other, each contiguous and aligned, group by group."""

    boxes: dict[str, tuple[Box, ...]]
    offsets: dict[str, tuple[int, ...]]
    """Per name, the first byte of each box."""
    groups: tuple[tuple[int, int], ...]
    """Per module group, its first byte and its end."""
    nbytes: int


@dataclass(eq=False, slots=True)
class Alike:
    """A class of receivers: equal needs, equal staging, and per module group the entries."""

    needs: Needs
    members: tuple[int, ...]
    layout: StagingLayout
    groups: tuple[tuple[Entry, ...], ...]


class ShardPlan:
    """Who pulls what from whom: every needed element once, from a rank that holds it.

    Ranks are numbers: senders as in the holdings, receivers as in the needs that it was made from. Equal on every process
    that makes it from equal inputs; compare `digest`.
    """

    def __init__(
        self,
        metas: tuple[TensorMeta, ...],
        groups: tuple[str, ...],
        classes: Sequence[Alike],
        sender_bytes: Sequence[int],
        content: Sequence[object],
    ) -> None:
        self.metas = metas
        """The tensors in the plan's order, group by group."""
        self.groups = groups
        """Keys of the module groups."""
        self.sender_bytes = tuple(sender_bytes)
        self._classes = tuple(classes)
        self._content = content
        self._num_dims = max((len(meta.shape) for meta in metas), default=0) or 1
        self._of = {j: (alike, number) for alike in classes for number, j in enumerate(alike.members)}

    @property
    def num_senders(self) -> int:
        return len(self.sender_bytes)

    @property
    def num_receivers(self) -> int:
        return len(self._of)

    @cached_property
    def receiver_bytes(self) -> tuple[int, ...]:
        nbytes = {id(alike): sum(e.nbytes for entries in alike.groups for e in entries) for alike in self._classes}
        return tuple(nbytes[id(self._of[j][0])] for j in range(self.num_receivers))

    @cached_property
    def digest(self) -> str:
        """128-bit hex over all that decides who sends what; equal plans have equal digests."""
        return digest_text(["shardplan-1", *self._content])

    def num_pulls(self, receiver: int) -> int:
        return sum(entry.num_pulls for entries in self._of[receiver][0].groups for entry in entries)

    def layout(self, receiver: int) -> StagingLayout:
        """Where the receiver's needed boxes lie in its staging."""
        return self._of[receiver][0].layout

    def order(self, receiver: int) -> tuple[int, ...]:
        """The module groups that the receiver needs, in the order in which it best takes them.

        Receivers start at different groups, so that they do not all ask the ranks of one pipeline stage at a time.
        """
        groups = self._of[receiver][0].groups
        first = receiver * len(groups) // self.num_receivers
        return tuple(g for g in (*range(first, len(groups)), *range(first)) if groups[g])

    def of_receiver(self, receiver: int) -> Iterator[Pulls]:
        """All that one receiver pulls: a module group at a time, in its `order`."""
        for group in self.order(receiver):
            yield self.receiver_group(receiver, group)

    def of_sender(self, sender: int) -> Iterator[Pulls]:
        """All that is pulled from one sender: a module group at a time, those without pulls left out."""
        for group in range(len(self.groups)):
            pulls = self.sender_group(sender, group)
            if len(pulls):
                yield pulls

    def receiver_group(self, receiver: int, group: int) -> Pulls:
        """The receiver's pulls of one module group, by sender, beginning with another one for each receiver."""
        alike, number = self._of[receiver]
        found = []
        for entry in alike.groups[group]:
            candidates = entry.cut.chosen(number, entry.ordinals)
            tensor = np.repeat(np.arange(candidates.shape[0]), candidates.shape[1])
            found.append(entry.rows(group, tensor, candidates.ravel(), receiver, self._num_dims))
        return self._sorted(found, "sender", receiver * self.num_senders // self.num_receivers, self.num_senders)

    def sender_group(self, sender: int, group: int) -> Pulls:
        """The pulls of one module group from the sender, by receiver, beginning with another one for each sender."""
        found = []
        for alike in self._classes:
            members = np.array(alike.members)
            for entry in alike.groups[group]:
                own = entry.cut.candidates_of(sender)
                if len(own):
                    number, tensor, which = self._chosen(entry, own, len(members))
                    found.append(entry.rows(group, tensor, own[which], members[number], self._num_dims))
        return self._sorted(found, "receiver", sender * self.num_receivers // self.num_senders, self.num_receivers)

    def traffic(self, group: int) -> Ints:
        """[receiver, sender]: bytes of one module group."""
        found = np.zeros((self.num_receivers, self.num_senders), dtype=np.int64)
        for alike in self._classes:
            for entry in alike.groups[group]:
                nbytes = entry.cut.numel[entry.cut.piece_of] * entry.itemsize
                for number, j in enumerate(alike.members):
                    chosen = entry.cut.chosen(number, entry.ordinals)
                    times = np.bincount(chosen.ravel(), minlength=len(nbytes))
                    np.add.at(found[j], entry.cut.rank, times * nbytes)
        return found

    @staticmethod
    def _chosen(entry: Entry, own: Ints, num_members: int) -> tuple[Ints, Ints, Ints]:
        """(receiver, tensor, number in *own*) of each candidate that serves, where *own* are those of one rank."""
        cut, shape = entry.cut, (num_members, len(entry.ordinals), len(own))
        if cut.is_forced:
            every = np.indices(shape).reshape(3, -1)
            return every[0], every[1], every[2]
        pieces = cut.piece_of[own]
        owner = own - cut.first[pieces]
        served = np.empty(shape, dtype=bool)
        strands, at = np.unique(cut.strand[pieces], return_inverse=True)
        for number in range(num_members):
            served[number] = (cut.choices(number, entry.ordinals, strands)[at] == owner[:, None]).T
        found = np.nonzero(served)
        return found[0], found[1], found[2]

    def _sorted(self, found: Sequence[Rows], peer: str, first: int, num_peers: int) -> Pulls:
        rows = np.concatenate(found) if found else np.empty(0, dtype=row_type(self._num_dims))
        # Stable, so that a tensor's pieces stay in the cut's order on both sides.
        order = np.lexsort((rows["name"], (rows[peer] - first) % num_peers))
        return Pulls(rows[order], self.metas)
