"""What a transport moves: exactly the bytes that were sent, lent for as long as the contract says."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import ClassVar

import torch

from weightsync.chunk import WeightChunk, as_bytes
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.interfaces import ReceiverTransport, Transfer
from weightsync.manifest import Manifest
from weightsync.registry import transport_classes
from weightsync.testing.link import (
    SENDER,
    Pairs,
    Tensors,
    TransportCase,
    items,
    model,
    receive_all,
    rows,
    transfer,
)
from weightsync.testing.peer_process import Ends, Peer
from weightsync.weightset import SetDigests, WeightSet


class MovesExactBytes(TransportCase):
    num_tiny_tensors: ClassVar[int] = 20_000
    """How many tensors of one value make a version of many."""

    def test_both_ends_have_one_name(self) -> None:
        sender, receiver = transport_classes(self.transport)
        assert sender.name == receiver.name, f"{sender.name!r} sends to {receiver.name!r}"

    def test_bytes_are_exact_over_versions(self) -> None:
        with self.link(model(0)) as link:
            for version in range(1, 4):
                link.move(version, model(version))

    def test_bytes_are_exact_without_digests(self) -> None:
        with self.link(model(0), digest=False) as link:
            for version in range(1, 4):
                link.move(version, model(version))

    def test_bytes_are_exact_in_other_processes(self) -> None:
        kind = transport_classes(self.transport)[1]
        with self.open(model(0)) as link, Peer(kind) as one, Peer(kind) as other:
            connecting = [
                self.start(partial(peer.ask, Ends.connect_receiver, link.context, i, link.address))
                for i, peer in enumerate((one, other))
            ]
            self.end_all(self.start(link.sender.connect), *connecting)
            for version in range(1, 4):
                of = transfer(version, model(version))
                receiving = [self.start(partial(peer.ask, Ends.receive, of)) for peer in (one, other)]
                link.settle(link.send(of, model(version)), receiving, model(version))
            for peer in (one, other):
                self.soon(partial(peer.ask, Ends.close_receiver))

    def test_many_tiny_tensors_arrive(self) -> None:
        values = torch.randn(self.num_tiny_tensors)
        tensors = {f"t{i}": values[i : i + 1].clone() for i in range(self.num_tiny_tensors)}
        with self.link(tensors, num_receivers=1) as link:
            link.move(1, tensors)

    def test_a_sender_may_send_a_part_of_the_manifest_or_nothing(self) -> None:
        with self.link(model(0)) as link:
            for version, part in enumerate((["strided", "fp32", "empty"], [], list(model(0))), start=1):
                of = transfer(version, model(version), part)
                tensors = {name: model(version)[name] for name in part}
                works = [self.start(partial(receive_all, receiver, of)) for receiver in link.receivers]
                link.settle(link.send_pairs(of, items(tensors, of.manifest)), works, tensors)

    def test_a_tensor_may_be_overwritten_when_the_next_is_asked_for(self) -> None:
        reused, of = torch.empty(5000), transfer(1, rows())

        def one_after_the_other() -> Pairs:
            for meta, tensor in items(rows()):
                yield meta, reused.copy_(tensor)
            reused.fill_(float("nan"))

        with self.link(rows()) as link:
            works = [self.start(partial(receive_all, receiver, of)) for receiver in link.receivers]
            link.settle(link.send_pairs(of, one_after_the_other()), works, rows())

    def test_tensors_travel_in_their_wire_dtype(self) -> None:
        held = {"w": torch.randn(500, 1000), "v": torch.randn(3, 4).t(), "s": torch.randn(())}
        wire = {name: tensor.to(torch.bfloat16) for name, tensor in held.items()}
        of = transfer(1, wire)
        with self.link(wire) as link:
            works = [self.start(partial(receive_all, receiver, of)) for receiver in link.receivers]
            link.settle(link.send_pairs(of, items(held, of.manifest)), works, wire)

    def test_a_lent_chunk_stays_as_it_is_until_it_is_released(self) -> None:
        of = transfer(1, rows())

        def slowly(receiver: ReceiverTransport, pause_s: float) -> int:
            seen = 0
            for chunk in receiver.receive(of):
                before = _parts(chunk)
                time.sleep(pause_s)
                assert _parts(chunk) == before, "a chunk changed before it was released"
                seen += sum(map(len, before))
                chunk.release()
            return seen

        with self.link(rows()) as link:
            works = [
                self.start(partial(slowly, r, pause_s)) for r, pause_s in zip(link.receivers, (0, 0.01), strict=True)
            ]
            _, *seen = self.end_all(link.send(of, rows()), *works)
            assert seen == [of.manifest.nbytes] * 2, f"{of.manifest.nbytes} bytes were sent, {seen} received"

    def test_a_stable_chunk_stays_as_it_is_until_the_version_is_finished(self) -> None:
        def keep(
            receiver: ReceiverTransport, of: Transfer
        ) -> list[tuple[WeightChunk | WeightSet | SetDigests, list[bytes]]]:
            kept = []
            for chunk in receiver.receive(of):
                if chunk.stable:
                    kept.append((chunk, _parts(chunk)))
                else:
                    chunk.release()
            return kept

        with self.link(rows()) as link:
            for version in (1, 2):
                of = transfer(version, rows())
                works = [self.start(partial(keep, receiver, of)) for receiver in link.receivers]
                self.end_all(link.send(of, rows()), *works)
                for kept in (work.result() for work in works):
                    if link.sender.stable():
                        nbytes = sum(len(part) for _, parts in kept for part in parts)
                        assert nbytes == of.manifest.nbytes, "stable() is True, but not every chunk is stable"
                    for chunk, before in kept:
                        assert _parts(chunk) == before, "a stable chunk changed before finish"
                    for chunk, _ in kept:
                        self.soon(chunk.release)  # on another thread, as an engine does
                link.sender.finish()
            link.move(3, rows())

    def test_a_chunk_says_of_which_version_and_manifest_it_is(self) -> None:
        sent = transfer(1, model(1))
        other = Manifest.from_tensors({**model(1), "one_more": torch.zeros(1)})
        asked = Transfer(version=2, manifest=other, names=sent.names)
        with self.link(model(1), num_receivers=1, timeout_s=5) as link:
            sending = link.send(sent, model(1))
            with contextlib.suppress(TransportError, UpdateTimeoutError):  # to be refused is as good
                for chunk in link.receivers[0].receive(asked):
                    found = (chunk.version, chunk.manifest_digest, chunk.sender)
                    assert found == (1, sent.manifest.digest, SENDER), f"what was sent came as {found}"
                    chunk.release()
            link.sender.abort()
            with contextlib.suppress(TransportError, UpdateTimeoutError):
                self.end(sending)

    def test_changed_values_are_counted_exactly_or_not_at_all(self) -> None:
        first = {"a": torch.zeros(1000), "b": torch.zeros(50, 50, dtype=torch.bfloat16)}
        second: Tensors = {name: tensor.clone() for name, tensor in first.items()}
        second["a"][10:17] = 1
        second["b"][3, :5] = -1
        with self.link(first, num_receivers=1, count_changed_values=True) as link:
            link.move(1, first)
            for version, tensors, changed in ((2, second, 12), (3, second, 0), (4, first, 12)):
                counted = link.move(version, tensors).changed_values
                assert counted in (None, changed), f"{counted} values were counted as changed, {changed} have"


def _parts(chunk: WeightChunk | WeightSet | SetDigests) -> list[bytes]:
    """A chunk's pieces, or a set's tensors, as they are now."""
    if isinstance(chunk, SetDigests):
        return []
    if isinstance(chunk, WeightSet):
        return [as_bytes(tensor.cpu()).numpy().tobytes() for tensor in chunk.layout.tensors.values()]
    assert chunk.payload.dtype == torch.uint8 and chunk.payload.dim() == 1, "a payload is 1-D uint8"
    data = chunk.payload.cpu().numpy().data
    return [bytes(data[piece.offset : piece.offset + piece.nbytes]) for piece in chunk.pieces]
