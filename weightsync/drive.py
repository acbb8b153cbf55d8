"""Carry out what an `UpdateMachine` asks for, until it has finished."""

from __future__ import annotations

import time
from collections.abc import Callable

from weightsync.calls import Calls
from weightsync.errors import WeightSyncError
from weightsync.flight import Flight
from weightsync.update import Command, UpdateMachine

_TICK_S = 0.05


def drive(machine: UpdateMachine, calls: Calls, note_decision: Callable[[], None], flight: Flight) -> None:
    """Returns when the machine has finished, well or not.

    Args:
        note_decision: called once, when the version is decided on and before anybody hears of it; where it raises, nothing
            was decided and the update is given up.
        flight: notes what is sent and answered when.
    """
    commands = machine.start(time.monotonic())
    noted, next_tick = False, 0.0
    while True:
        if machine.decided and not noted:
            noted = True
            try:
                note_decision()
            except WeightSyncError as error:
                commands = machine.give_up(error, time.monotonic())
        for command in commands:
            flight.sent(command.party, command.request)
            calls.send(command.party, command.request)
        if machine.finished:
            return
        commands = _listen(machine, calls, flight)
        if (now := time.monotonic()) >= next_tick:
            commands += machine.on_tick(now)
            # For thousands of parties looking at each takes time: at most a tenth of it all.
            next_tick = time.monotonic() + max(_TICK_S, 9 * (time.monotonic() - now))


def _listen(machine: UpdateMachine, calls: Calls, flight: Flight) -> list[Command]:
    commands: list[Command] = []
    told: set[str] = set()
    for party, replies in calls.replies(_TICK_S):
        if party in told:  # superseded, though not sent yet
            continue
        flight.answered(party, replies)
        if isinstance(replies, WeightSyncError):
            more = machine.on_error(party, replies, time.monotonic())
        else:
            more = machine.on_reply(party, replies, time.monotonic())
        commands += more
        told.update(command.party for command in more)
    return commands
