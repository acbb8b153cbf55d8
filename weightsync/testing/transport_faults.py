"""What a transport does when the other end is slow, silent, foreign or gone: a bounded wait, a named culprit, nothing left."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from weightsync.background import Background
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.interfaces import ReceiverTransport, SenderTransport
from weightsync.registry import transport_classes
from weightsync.testing.link import (
    SENDER,
    Footprint,
    Link,
    Pairs,
    TransportCase,
    endless,
    items,
    model,
    transfer,
)
from weightsync.testing.peer_process import Ends, Peer
from weightsync.testing.suite import at_most, raises

A_SENDER = f"sender {SENDER}"


def release_all(receiver: ReceiverTransport) -> None:
    for chunk in receiver.receive(transfer(1, model(1))):
        chunk.release()


def take_one(receiver: ReceiverTransport) -> None:
    next(iter(receiver.receive(transfer(1, model(1)))))


def connect_and_take_one(receiver: ReceiverTransport, address: bytes) -> None:
    receiver.connect(address)  # may return at once: some need no answer from the sender
    take_one(receiver)


class EndsInABoundedError(TransportCase):
    # ---- who does not come, and who should not ----------------------------------------------------------------

    def test_a_receiver_that_never_connects_is_named_within_the_bound(self) -> None:
        with self.open(model(0), timeout_s=0.5) as link:
            work = self.start(lambda: link.receivers[0].connect(link.address))
            with at_most(5), raises(TransportError, match=r"receivers? \[?1"):
                self.soon(link.sender.connect)
            with contextlib.suppress(TransportError):
                self.end(work)

    def test_a_sender_that_is_gone_cannot_be_connected_to(self) -> None:
        with self.open(model(0), timeout_s=1) as link:
            self.soon(link.sender.close)
            with at_most(10), raises(TransportError):
                self.soon(lambda: link.receivers[0].connect(link.address))

    def test_a_stranger_is_refused_and_whoever_was_meant_is_served(self) -> None:
        with self.open(model(0), num_receivers=1) as link, self._stranger(link) as calling:
            connecting = self.start(link.sender.connect)
            time.sleep(0.1)
            self.end_all(self.start(lambda: link.receivers[0].connect(link.address)), connecting)
            link.move(1, model(1))
            with raises(TransportError, UpdateTimeoutError):
                self.end(calling)

    def test_a_sender_whose_only_caller_is_a_stranger_ends_within_its_bound(self) -> None:
        with self.open(model(0), num_receivers=1, timeout_s=0.3) as link, self._stranger(link) as calling:
            with at_most(5), raises(TransportError, match=r"receivers? \[?0"):
                self.soon(link.sender.connect)
            with raises(TransportError, UpdateTimeoutError):
                self.end(calling)

    @contextlib.contextmanager
    def _stranger(self, link: Link) -> Iterator[Background[None]]:
        """The attempt to receive of one who was not given the link's token."""
        stranger = transport_classes(self.transport)[1](self.context(num_receivers=1, timeout_s=0.5), receiver=0)
        try:
            yield self.start(partial(connect_and_take_one, stranger, link.address))
        finally:
            self.soon(stranger.close)

    # ---- who leaves half way ----------------------------------------------------------------------------------

    def test_a_receiver_that_closes_half_way_ends_the_transfer_with_an_error(self) -> None:
        with self.link(model(1), timeout_s=3) as link:
            work = link.send_without_end(model(1))
            self.start(lambda: release_all(link.receivers[1]))
            self.soon(lambda: take_one(link.receivers[0]))
            self.soon(link.receivers[0].close)
            with at_most(15), raises(TransportError, UpdateTimeoutError, match=f"receiver|{A_SENDER}"):
                self.end(work)

    def test_a_sender_that_closes_half_way_ends_receive_with_an_error(self) -> None:
        with self.link(model(1), timeout_s=2) as link:

            def first_half() -> Pairs:
                yield from items(model(1))
                time.sleep(0.2)
                link.sender.abort()
                yield from items(model(1))

            works = [self.start(partial(release_all, receiver)) for receiver in link.receivers]
            with raises(TransportError):
                self.end(link.send_pairs(transfer(1, model(1)), first_half()))
            self.soon(link.sender.close)
            for work in works:
                with at_most(15), raises(TransportError, UpdateTimeoutError, match=A_SENDER):
                    self.end(work)

    def test_what_the_source_raises_comes_out_of_send(self) -> None:
        def broken() -> Pairs:
            yield from items(model(1))
            raise LookupError("planted")

        with self.link(model(1), timeout_s=2) as link:
            works = [self.start(partial(release_all, receiver)) for receiver in link.receivers]
            with at_most(15), raises(LookupError, match="planted"):
                self.end(link.send_pairs(transfer(1, model(1)), broken()))
            self.soon(link.sender.close)
            for work in works:
                with raises(TransportError, UpdateTimeoutError, match=A_SENDER):
                    self.end(work)

    def test_a_receiver_process_that_is_killed_ends_the_transfer_with_an_error(self) -> None:
        self._lose_a_receiver(signal.SIGKILL, timeout_s=5)

    def test_a_sender_process_that_is_killed_ends_receive_with_an_error(self) -> None:
        self._lose_a_sender(signal.SIGKILL, timeout_s=5)

    def test_a_sender_process_that_is_stopped_before_it_connects_is_an_error_for_its_receiver(self) -> None:
        with self._foreign_sender(timeout_s=1) as (peer, address, receiver):
            peer.signal(signal.SIGSTOP)
            with at_most(10), raises(TransportError, UpdateTimeoutError, match=A_SENDER):
                self.soon(partial(connect_and_take_one, receiver, address))

    def test_a_process_that_is_stopped_is_an_error_for_whoever_waits_for_it(self) -> None:
        losses = (self._lose_a_receiver, self._lose_a_sender)
        self.end_all(*(self.start(partial(lose, signal.SIGSTOP, timeout_s=1)) for lose in losses))

    def _lose_a_receiver(self, number: signal.Signals, *, timeout_s: float) -> None:
        kind = transport_classes(self.transport)[1]
        with self.open(model(1), timeout_s=timeout_s, num_receivers=1) as link, Peer(kind) as peer:
            connecting = self.start(lambda: peer.ask(Ends.connect_receiver, link.context, 0, link.address))
            self.end_all(self.start(link.sender.connect), connecting)
            sending = link.send_without_end(model(1))
            self.soon(partial(peer.ask, Ends.take_one_chunk, transfer(1, model(1))))
            peer.signal(number)
            with at_most(10 + timeout_s), raises(TransportError, UpdateTimeoutError, match=f"receiver 0|{A_SENDER}"):
                self.end(sending)

    def _lose_a_sender(self, number: signal.Signals, *, timeout_s: float) -> None:
        with self._foreign_sender(timeout_s) as (peer, address, receiver):
            connecting = self.start(lambda: peer.ask(Ends.connect_sender))
            self.end_all(self.start(lambda: receiver.connect(address)), connecting)
            peer.ask(Ends.send_without_end)
            half = threading.Event()

            def receive() -> None:
                for chunk in receiver.receive(transfer(1, model(1))):
                    chunk.release()
                    half.set()

            work = self.start(receive)
            assert half.wait(self.patience_s), "nothing came"
            peer.signal(number)
            with at_most(10 + timeout_s), raises(TransportError, UpdateTimeoutError, match=A_SENDER):
                self.end(work)

    @contextlib.contextmanager
    def _foreign_sender(self, timeout_s: float) -> Iterator[tuple[Peer, bytes, ReceiverTransport]]:
        """A process with a sender that is open, the sender's address, and the receiver that is to connect."""
        context = self.context(num_receivers=1, timeout_s=timeout_s)
        sender, kind = transport_classes(self.transport)
        with contextlib.closing(kind(context, receiver=0)) as receiver, Peer(sender) as peer:
            yield peer, self.soon(lambda: peer.ask(Ends.open_sender, context)), receiver

    # ---- who is silent ----------------------------------------------------------------------------------------

    def test_a_receiver_waits_at_most_its_bound(self) -> None:
        with self.link(model(1), timeout_s=0.5) as link, at_most(5), raises(UpdateTimeoutError, match=A_SENDER):
            self.soon(lambda: take_one(link.receivers[0]))

    def test_a_chunk_of_a_broken_link_can_be_released(self) -> None:
        with self.link(model(1), num_receivers=1, timeout_s=2) as link:
            sending = link.send_without_end(model(1))
            chunk = self.soon(lambda: next(iter(link.receivers[0].receive(transfer(1, model(1))))))
            link.sender.abort()
            with raises(TransportError, UpdateTimeoutError):
                self.end(sending)
            self.soon(link.sender.close)
            self.soon(chunk.release)

    # ---- abort and close --------------------------------------------------------------------------------------

    def test_abort_wakes_a_sender_that_connects(self) -> None:
        with self.open(model(0)) as link:
            self._abort(link.sender, link.sender.connect)

    def test_abort_wakes_a_sender_that_sends(self) -> None:
        with self.link(model(1)) as link:
            self._abort(link.sender, lambda: self.end(link.send_without_end(model(1))))

    def test_abort_wakes_a_receiver_that_connects(self) -> None:
        with self.open(model(0)) as link:
            self._abort(link.receivers[0], partial(connect_and_take_one, link.receivers[0], link.address))

    def test_abort_wakes_a_receiver_that_receives(self) -> None:
        with self.link(model(1)) as link:
            self._abort(link.receivers[0], lambda: take_one(link.receivers[0]))

    def test_an_abort_of_a_sender_that_is_about_to_connect_is_not_lost(self) -> None:
        with self.open(model(0)) as link:
            self._abort_first(link.sender, link.sender.connect)

    def test_an_abort_of_a_sender_that_is_about_to_send_is_not_lost(self) -> None:
        with self.link(model(1)) as link:
            self._abort_first(link.sender, lambda: self.end(link.send_without_end(model(1))))

    def test_an_abort_of_a_receiver_that_is_about_to_connect_is_not_lost(self) -> None:
        with self.open(model(0)) as link:
            self._abort_first(link.receivers[0], partial(connect_and_take_one, link.receivers[0], link.address))

    def test_an_abort_of_a_receiver_that_is_about_to_receive_is_not_lost(self) -> None:
        with self.link(model(1)) as link:
            self._abort_first(link.receivers[0], lambda: take_one(link.receivers[0]))

    def _abort(self, end: SenderTransport | ReceiverTransport, work: Callable[[], object]) -> None:
        """Abort *end* while it does *work*."""
        working = self.start(work)
        time.sleep(0.1)
        with at_most(5), raises(TransportError):
            self.soon(end.abort)
            self.end(working)

    def _abort_first(self, end: SenderTransport | ReceiverTransport, work: Callable[[], object]) -> None:
        """Abort *end* just before it does *work*, as another thread may."""
        self.soon(end.abort)
        with at_most(5), raises(TransportError):
            self.soon(work)

    def test_a_source_that_comes_back_after_abort_and_close_finds_an_error(self) -> None:
        """A trainer's source may be stuck for longer than anybody waits for it."""
        stuck, free = threading.Event(), threading.Event()

        def source() -> Pairs:
            yield from items(model(1))
            stuck.set()
            free.wait(self.patience_s)
            yield from endless(model(1))

        with self.link(model(1), timeout_s=4) as link:
            for receiver in link.receivers:
                self.start(partial(release_all, receiver))
            sending = link.send_pairs(transfer(1, model(1)), source())
            assert stuck.wait(self.patience_s), "the sender did not ask for all tensors"
            self.soon(link.sender.abort)
            self.soon(link.sender.close)
            free.set()
            with at_most(5), raises(TransportError, UpdateTimeoutError):
                self.end(sending)

    def test_close_may_come_at_any_time_and_again(self) -> None:
        sender, receiver = transport_classes(self.transport)
        with self.open(model(1)) as opened, self.link(model(1)) as link:
            link.move(1, model(1))
            unused = (sender(self.context()), receiver(self.context(), receiver=0))
            ends: list[SenderTransport | ReceiverTransport] = [
                *unused, opened.sender, *opened.receivers, link.sender, *link.receivers
            ]  # fmt: skip
            for end in ends:
                for call in (end.abort, end.close, end.close):
                    self.soon(call)

    def test_a_fresh_link_after_a_broken_one_is_exact(self) -> None:
        with self.link(model(1), timeout_s=2, num_receivers=1) as link:
            sending = link.send_without_end(model(1))
            self.soon(lambda: take_one(link.receivers[0]))
            self.soon(link.receivers[0].abort)
            with raises(TransportError, UpdateTimeoutError):
                self.end(sending)
        with self.link(model(1)) as link:
            for version in (1, 2):
                link.move(version, model(version))

    # ---- what is left -----------------------------------------------------------------------------------------

    def test_thirty_versions_and_a_close_leave_nothing_behind(self) -> None:
        self._warm_up()
        before, used = Footprint.at_rest(), []
        for _ in range(3):
            with self.link(model(0)) as link:
                for version in range(1, 4):
                    link.move(version, model(version % 3))
                early = Footprint.at_rest()
                for version in range(4, 11):
                    link.move(version, model(version % 3))
                early.check_returns(self.settle_s)
                used += [early, Footprint.now()]
            del link
        before.check_returns(self.settle_s, since=used)

    def test_aborted_transfers_leave_nothing_behind(self) -> None:
        self._warm_up()
        before, used = Footprint.at_rest(), []
        for _ in range(2):
            with self.link(model(1), timeout_s=2) as link:
                sending = link.send_without_end(model(1))
                time.sleep(0.05)
                used.append(Footprint.now())
                self.soon(link.sender.abort)
                with raises(TransportError):
                    self.end(sending)
            del link, sending
        before.check_returns(self.settle_s, since=used)

    def _warm_up(self) -> None:
        """Let the process open what it opens once."""
        with self.link(model(0)) as link:
            link.move(1, model(1))
