"""Refuse what comes late, twice, or from a coordinator that was replaced."""

from __future__ import annotations

import time

from weightsync import messages as m
from weightsync.errors import AgreementError, RestartedError


class Fence:
    """What one party has heard last; each call must be newer.

    A weight sync begins with an opening request (`Describe`, `OpenReceiver`), which retires the one before for good.
    `Examine` is none of any: whoever looks leaves no trace.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.updating = False
        """Between the first and the last message of an update."""
        self.heard = 0.0
        """When the last call came, by `time.monotonic`."""
        self._session = ""
        self._number = 0
        self._retired: set[str] = set()

    @property
    def number(self) -> int:
        """Of the newest call."""
        return self._number

    def admit(self, call: m.Call) -> None:
        """Note *call*.

        Raises:
            AgreementError: it is stale. RestartedError: nobody has opened this rank since its process began.
        """
        if isinstance(call.request, m.Examine):
            return
        opening = isinstance(call.request, m.Describe | m.OpenReceiver)
        if not self._session and not opening:
            raise RestartedError("this rank takes part in no weight sync: its process was restarted")
        if call.session in self._retired or (call.session != self._session and not opening):
            raise AgreementError(
                "another weight sync has taken this rank over; use that one, or connect again", field="session"
            )
        if call.session != self._session:
            self._retired.add(self._session)
            self._session, self._number = call.session, 0
        if call.epoch < self.epoch and not opening:
            raise AgreementError(
                f"{type(call.request).__name__} of epoch {call.epoch} came, this rank is in epoch {self.epoch}; refused",
                field="epoch",
            )
        if call.number <= self._number:
            raise AgreementError(
                f"{type(call.request).__name__} (call {call.number}) came after call {self._number}: late, or twice; refused",
                field="number",
            )
        self.epoch, self._number = max(self.epoch, call.epoch), call.number
        self.heard = time.monotonic()
        if isinstance(call.request, m.Prepare | m.Transfer | m.Apply):
            self.updating = True
        elif not isinstance(call.request, m.Poll):
            self.updating = False
