"""Numbered calls from one coordinator to its parties: the newest to each party counts, older answers are dropped."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping

from weightsync import messages as m
from weightsync.errors import TransportError, UpdateTimeoutError, WeightSyncError
from weightsync.identity import Identity
from weightsync.interfaces import Fleet
from weightsync.update import POLL_S

_AFTER_FAILURE_S = 10.0


class Calls:
    """One coordinator's calls. Not thread-safe."""

    def __init__(self, fleet: Fleet, *, timeout_s: float) -> None:
        self.session = secrets.token_hex(8)
        self.epoch = 0
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._number = 0
        self._current: dict[str, int] = {}

    def send(self, party: str, request: m.Request) -> None:
        """Start a call; an answer that still comes to an earlier one is dropped."""
        self._number += 1
        self._current[party] = self._number
        call = m.Call(session=self.session, epoch=self.epoch, number=self._number, request=request)
        self._fleet.send(party, self._number, m.encode(call))

    def replies(self, wait_s: float) -> Iterator[tuple[str, tuple[m.Reply, ...] | WeightSyncError]]:
        """(party, its ranks' replies, or why there are none) for the calls that ended; each call's end comes once."""
        for party, number, answer in self._fleet.replies(wait_s):
            if self._current.get(party) != number:
                continue
            del self._current[party]
            if isinstance(answer, WeightSyncError):
                yield party, answer
                continue
            try:
                yield party, tuple(m.decode_reply(payload) for payload in answer)
            except TransportError as error:
                error.rank = party
                error.args = (f"answer of {party}: {error}",)
                yield party, error

    def helpers(self, ranks: Mapping[str, Identity]) -> Mapping[str, str]:
        """Rank -> address of the helper process beside it; see `Fleet.helpers`."""
        return self._fleet.helpers(ranks)

    def ask(self, requests: Mapping[str, m.Request]) -> dict[str, tuple[m.Reply, ...]]:
        """Send all requests at once, poll those whose answer is Pending, and collect the answers.

        Raises:
            WeightSyncError: the first that any rank answered. UpdateTimeoutError: naming who was silent.
        """
        answers: dict[str, tuple[m.Reply, ...]] = {}
        for party, outcome in self.outcomes(requests):
            if isinstance(outcome, WeightSyncError):
                raise outcome
            answers[party] = outcome
        return answers

    def outcomes(
        self, requests: Mapping[str, m.Request]
    ) -> Iterator[tuple[str, tuple[m.Reply, ...] | WeightSyncError]]:
        """`ask`, with each party's answer or error as it comes; once one has failed the others are waited for a little.

        An error that names several parties (those that were silent) comes once for each.
        """
        pending = set(requests)
        doing: dict[str, str] = {}
        for party, request in requests.items():
            self.send(party, request)
        # A little more than the ranks' own bounds, so that their errors, which know more, come first.
        deadline = time.monotonic() + 1.25 * self._timeout_s + 1
        while pending:
            for party, replies in self.replies(0.1):
                if party not in pending:  # a late answer to an earlier question
                    continue
                outcome = _outcome(party, replies)
                if isinstance(outcome, WeightSyncError):
                    pending.discard(party)
                    # Whoever waits for the one that failed, in a collective of its own for instance, may never answer.
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
                    yield party, outcome
                elif waiting := [reply.doing for reply in outcome if isinstance(reply, m.Pending)]:
                    doing[party] = ", ".join(filter(None, waiting))
                    self.send(party, m.Poll(wait_s=POLL_S))
                else:
                    pending.discard(party)
                    yield party, outcome
            if time.monotonic() > deadline and pending:
                silent = [party for party in requests if party in pending]
                what = type(next(iter(requests.values()))).__name__
                last = "".join(f"; when last heard, {party} {doing[party]}" for party in silent if doing.get(party))
                late = UpdateTimeoutError(
                    f"{', '.join(silent)} did not answer {what} within {self._timeout_s:g} s: busy in a long call, still "
                    f"starting, or stuck{last}",
                    rank=silent[0],
                )
                for party in silent:
                    yield party, late
                return

    def goodbye(self, parties: Iterable[str], *, within_s: float) -> None:
        """Have *parties* break all links; those that do not answer are not waited for."""
        pending = set(parties)
        for party in pending:
            self.send(party, m.Close())
        deadline = time.monotonic() + within_s
        while pending and time.monotonic() < deadline:
            pending -= {party for party, _ in self.replies(0.1)}


def _outcome(party: str, replies: tuple[m.Reply, ...] | WeightSyncError) -> tuple[m.Reply, ...] | WeightSyncError:
    """The first error among the ranks' replies, where there is one."""
    failed = [] if isinstance(replies, WeightSyncError) else [r for r in replies if isinstance(r, m.Failed)]
    if not failed:
        return replies
    error = failed[0].error.to_error()
    error.rank = error.rank or party
    return error
