"""What only shared memory does: the trainer's own parameters are mapped once and read where they lie."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Self

import pytest
import torch

from weightsync.background import Background
from weightsync.chunk import WeightChunk, as_bytes, from_bytes
from weightsync.errors import TransportError, UpdateTimeoutError
from weightsync.interfaces import LinkContext, Transfer
from weightsync.manifest import Manifest
from weightsync.transports.channel import Channel, dial
from weightsync.transports.handles import Forget, Hello
from weightsync.transports.shared_memory import (
    Message,
    Segment,
    SharedMemoryReceiver,
    SharedMemorySender,
    share_parameters,
)

BIG = 1 << 19  # float32 values: 2 MiB, enough to be lent in place

Tensors = dict[str, torch.Tensor]


def context(*, token: str = "token", timeout_s: float = 20, num_receivers: int = 1, digest: bool = True) -> LinkContext:
    return LinkContext(
        sender=0,
        num_receivers=num_receivers,
        host="127.0.0.1",
        token=token,
        timeout_s=timeout_s,
        bucket_bytes=1 << 20,
        staging_limit_bytes=1 << 30,
        digest=digest,
    )


class Link:
    def __init__(self, tensors: Tensors, *, digest: bool = True) -> None:
        self.manifest = Manifest.from_tensors(tensors)
        settings = replace(context(), digest=digest)
        self.sender, self.receiver = SharedMemorySender(settings), SharedMemoryReceiver(settings, receiver=0)
        address = self.sender.open(self.manifest.tensors)
        self.receiver.connect(address)
        self.sender.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.receiver.close()

    def move(
        self, version: int, tensors: Tensors | Iterator[tuple[str, torch.Tensor]]
    ) -> tuple[Tensors, list[WeightChunk]]:
        """The tensors where the receiver sees them, and the chunks that carried them."""
        transfer = Transfer(version=version, manifest=self.manifest, names=())
        pairs = iter(tensors.items()) if isinstance(tensors, dict) else tensors
        chunks: list[WeightChunk] = []
        work = Background(lambda: chunks.extend(self.receiver.receive(transfer)), name="test")
        self.sender.send(transfer, ((self.manifest.by_name[name], tensor) for name, tensor in pairs))
        assert work.join(20)
        work.result()
        found = {}
        for chunk in chunks:
            for piece in chunk.pieces:
                meta = self.manifest.by_name[piece.name]
                data = chunk.payload[piece.offset : piece.offset + piece.nbytes]
                found[piece.name] = from_bytes(data, meta.torch_dtype, meta.shape)
        return found, chunks


def shared(*shape: int) -> torch.Tensor:
    tensor = torch.randn(*shape)
    tensor.share_memory_()
    return tensor


def segments(link: Link) -> int:
    return len(link.receiver._segments)


def test_share_parameters_keeps_values_dtypes_ties_and_identity() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Linear(3, 5)
    module.b = torch.nn.Linear(3, 5, bias=False)
    module.b.weight = module.a.weight
    module.h = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    module.register_buffer("mask", torch.rand(7) > 0.5)
    module.register_buffer("scalar", torch.tensor(2.5, dtype=torch.float64))
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("strided", torch.randn(3, 4).t())
    module.register_buffer("alias", module.a.bias.detach())
    module.a.bias.requires_grad_(False)
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    share_parameters(module)
    after = module.state_dict()
    assert all(after[name].dtype == t.dtype and torch.equal(after[name], t) for name, t in before.items())
    assert all(tensor.is_shared() for tensor in after.values() if tensor.numel())
    assert len({tensor.untyped_storage().data_ptr() for tensor in after.values() if tensor.numel()}) == 1
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
    assert module.b.weight is module.a.weight
    assert after["alias"].data_ptr() == after["a.bias"].data_ptr()
    assert [p.requires_grad for name, p in module.named_parameters() if name.startswith("a.")] == [True, False]


def test_who_holds_the_parameters_since_before_moves_the_shared_values() -> None:
    module = torch.nn.Linear(3, 3)
    held = list(module.parameters())  # as an optimizer does
    share_parameters(module)
    before = module.weight.detach().clone()
    module(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():
        for parameter in held:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    assert torch.equal(module.weight, before - 1)
    assert module.weight.is_shared()


def test_share_parameters_refuses_what_is_not_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="CPU tensors only, found one on meta"):
        share_parameters(torch.nn.Linear(2, 2, device="meta"))


def test_shared_tensors_are_mapped_once_and_seen_where_they_lie() -> None:
    tensors = {"a": shared(BIG), "b": shared(BIG)}
    tensors["view"] = tensors["a"][10:20]
    with Link(tensors) as link:
        for version in range(1, 4):
            for tensor in (tensors["a"], tensors["b"]):
                tensor.normal_()
            found, chunks = link.move(version, tensors)
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
            assert all(chunk.stable for chunk in chunks)
            assert segments(link) == 2
        assert link.sender._stage is None


def test_what_does_not_lie_as_it_must_travel_is_copied() -> None:
    tensors = {
        "strided": shared(BIG // 512, 512).t(),
        "small": shared(4),
        "private": torch.randn(BIG),
        "lent": shared(BIG),
    }
    with Link(tensors) as link:
        found, _ = link.move(1, tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert segments(link) == 2


def test_a_mapped_file_is_shared_without_a_descriptor_and_copied() -> None:
    with tempfile.NamedTemporaryFile() as file:
        mapped = torch.from_file(file.name, shared=True, size=BIG).normal_()
        assert mapped.is_shared()
        with Link({"w": mapped}) as link:
            found, _ = link.move(1, {"w": mapped})
            assert torch.equal(found["w"], mapped)


def test_a_loader_that_writes_into_lent_memory_changes_nothing_for_the_trainer_or_the_next_version() -> None:
    tensors = {"lent": shared(BIG), "staged": torch.randn(BIG)}
    with Link(tensors) as link:
        for version in range(1, 4):
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            found, _ = link.move(version, tensors)
            assert all(torch.equal(found[name], before[name]) for name in tensors)
            for tensor in found.values():
                tensor.zero_()
            assert all(torch.equal(tensors[name], before[name]) for name in tensors)
            for tensor in tensors.values():
                tensor.add_(1)


@pytest.mark.parametrize("digest", [True, False])
def test_even_a_write_that_torch_does_not_count_is_gone_in_the_next_version(digest: bool) -> None:
    tensors = {"lent": shared(BIG)}
    with Link(tensors, digest=digest) as link:
        for version in (1, 2):
            found, _ = link.move(version, tensors)
            assert torch.equal(found["lent"], tensors["lent"])
            found["lent"].data.zero_()
            tensors["lent"].add_(1)


def test_receivers_forget_storages_that_died_and_files_stay_flat() -> None:
    tensors = {"w": shared(BIG)}
    with Link(tensors) as link:
        for version in range(1, 8):
            del tensors["w"]
            gc.collect()
            tensors["w"] = shared(BIG)
            found, _ = link.move(version, tensors)
            assert torch.equal(found["w"], tensors["w"])
            assert segments(link) <= 2
            if version == 3:
                early = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) <= early
        assert len(link.sender._segments) <= 2


def test_shared_temporaries_at_one_address_are_not_taken_for_one_another() -> None:
    values = {f"w{i}": torch.randn(BIG) for i in range(5)}
    addresses = []

    def temporaries() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in values.items():
            tensor = value.clone().share_memory_()
            addresses.append(tensor.data_ptr())
            yield name, tensor
            del tensor

    with Link(values) as link:
        for version in (1, 2):
            found, chunks = link.move(version, temporaries())
            assert all(torch.equal(found[name], values[name]) for name in values)
            del found, chunks
        assert len(set(addresses)) < len(addresses), "this test needs an address that is used again"


def connecting(token: str, timeout_s: float = 1.0) -> tuple[SharedMemorySender, bytes, Background[None]]:
    sender = SharedMemorySender(context(token=token, timeout_s=timeout_s))
    return sender, sender.open(()), Background(sender.connect, name="test")


def test_a_foreign_token_is_refused_and_the_right_one_still_connects() -> None:
    sender, address, work = connecting("right", timeout_s=20)
    stranger = SharedMemoryReceiver(context(token="wrong", timeout_s=5), receiver=0)
    stranger.connect(address)
    transfer = Transfer(version=1, manifest=Manifest(()), names=())
    with pytest.raises(TransportError):
        next(iter(stranger.receive(transfer)))
    receiver = SharedMemoryReceiver(context(token="right"), receiver=0)
    receiver.connect(address)
    assert work.join(10)
    work.result()
    for end in (sender, stranger, receiver):
        end.close()


def test_a_sender_whose_only_caller_is_a_stranger_ends_within_its_bound() -> None:
    sender, address, work = connecting("right")
    stranger = SharedMemoryReceiver(context(token="wrong"), receiver=0)
    stranger.connect(address)
    assert work.join(10)
    with pytest.raises(TransportError, match=r"receivers \[0\] did not connect to sender 0"):
        work.result()
    sender.close()
    stranger.close()


@pytest.mark.parametrize(
    ("misbehave", "match"),
    [
        (lambda channel, fd: channel.send(Segment(0, 1 << 20), fd=fd, timeout_s=5), "the descriptor has 4096"),
        (lambda channel, fd: channel.send(Segment(0, 4096), timeout_s=5), "expected a chunk"),
        (lambda channel, fd: channel.send(Hello("x", 0), timeout_s=5), "expected a chunk"),
        (lambda channel, fd: channel.send(Forget(7), timeout_s=5), "expected a chunk"),
    ],
)
def test_a_sender_that_breaks_the_protocol_is_a_named_error(misbehave: Callable[..., None], match: str) -> None:
    sender = SharedMemorySender(context())
    address = sender.open(())
    receiver = SharedMemoryReceiver(context(), receiver=0)
    receiver.connect(address)
    sender.connect()
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    before = len(os.listdir("/proc/self/fd"))
    misbehave(sender._channels[0], fd)
    with pytest.raises(TransportError, match=match):
        next(iter(receiver.receive(Transfer(version=1, manifest=Manifest(()), names=()))))
    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(fd)
    sender.close()
    receiver.close()


def test_a_receiver_that_releases_something_else_is_a_named_error() -> None:
    tensors = {"w": torch.randn(BIG)}
    manifest = Manifest.from_tensors(tensors)
    sender = SharedMemorySender(
        LinkContext(
            sender=0, num_receivers=1, host="", token="t", timeout_s=5, bucket_bytes=1 << 16,
            staging_limit_bytes=1 << 18, digest=True,
        )
    )  # fmt: skip
    address = sender.open(manifest.tensors)
    channel: Channel[Message] = dial(address.decode(), Message, peer="sender", timeout_s=5)  # type: ignore[arg-type]
    channel.send(Hello("t", 0), timeout_s=5)
    sender.connect()
    channel.send(Hello("nonsense", 0), timeout_s=5)
    with pytest.raises(TransportError, match=r"receiver 0 answered .* expected the release of bucket"):
        sender.send(Transfer(version=1, manifest=manifest, names=("w",)), [(manifest.by_name["w"], tensors["w"])])
    sender.close()
    channel.close()


def test_a_receiver_that_keeps_a_bucket_too_long_is_a_timeout_that_names_it() -> None:
    tensors = {"w": torch.randn(BIG)}
    manifest = Manifest.from_tensors(tensors)
    settings = LinkContext(
        sender=0, num_receivers=1, host="", token="t", timeout_s=1.5, bucket_bytes=1 << 16,
        staging_limit_bytes=1 << 18, digest=True,
    )  # fmt: skip
    sender, receiver = SharedMemorySender(settings), SharedMemoryReceiver(settings, receiver=0)
    receiver.connect(sender.open(manifest.tensors))
    sender.connect()
    transfer = Transfer(version=1, manifest=manifest, names=("w",))
    kept: list[WeightChunk] = []
    thread = threading.Thread(target=lambda: kept.append(next(iter(receiver.receive(transfer)))))
    thread.start()
    with pytest.raises(UpdateTimeoutError, match=r"receiver 0 \(pid \d+\) did not send"):
        sender.send(transfer, [(manifest.by_name["w"], tensors["w"])])
    thread.join()
    assert torch.equal(kept[0].payload, as_bytes(tensors["w"])[: 1 << 16])
    sender.close()
    receiver.close()
