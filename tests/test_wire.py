"""Control messages as bytes: what is damaged, cut, foreign or too large is refused with one kind of error."""

from __future__ import annotations

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightsync import messages as m
from weightsync import wire
from weightsync.config import SyncConfig
from weightsync.errors import ErrorInfo, IncompleteUpdateError, TransportError
from weightsync.manifest import Manifest, TensorMeta

MANIFEST = Manifest((TensorMeta("w", "float32", (2, 3)),), {"tied": "w"})
PLAN = m.LinkPlan(id=1, transport="broadcast", sender=0, num_receivers=2, host="127.0.0.1", token="t" * 32)
LINK = m.ReceiverLink(plan=PLAN, address=b"\x00\xff", names=("w",), stable=True, receiver={0: 1})
REQUESTS: list[m.Request] = [
    m.Describe(config=SyncConfig()),
    m.OpenReceiver(config=SyncConfig(), manifest=MANIFEST, engine=3, decided=4),
    m.OpenSender(manifest=MANIFEST, names=("w",), links=(PLAN,)),
    m.Connect(links=(LINK,)),
    m.Prepare(version=5, staged=True),
    m.Transfer(version=5, links=(1,)),
    m.Poll(wait_s=0.5),
    m.Apply(version=5),
    m.Commit(version=5),
    m.Abort(hold=True),
    m.Close(),
]
VOTE = m.Vote(nbytes=8, content_digests={1: 2**64 - 1}, peak_staging_bytes=0, seconds=0.1)
REPLIES: list[m.Reply] = [
    m.SenderOpened(addresses=(b"x",), stable=(False,)),
    m.Prepared(version=1, epoch=2, manifest_digest="a", plan_digest="b"),
    m.Pending(progress=7, doing="sends w"),
    m.Sent(nbytes=8, content_digests={1: 0}, changed_values=None, seconds=0.1),
    VOTE,
    m.Applied(vote=VOTE, seconds=0.2, reloads=1),
    m.Ok(pause_s=0.3),
    m.Failed(error=ErrorInfo.of(IncompleteUpdateError("missing: w", missing=["w"])), poisoned=True),
]


def encoded(request: m.Request) -> bytes:
    return m.encode(m.Call(session="s", epoch=1, number=2, request=request))


def checked(body: bytes) -> bytes:
    """*body* with a checksum that fits."""
    return xxhash.xxh3_64_digest(body) + body


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_call_arrives_as_it_was_sent(request_: m.Request) -> None:
    assert m.decode_call(encoded(request_)).request == request_


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_arrives_as_it_was_sent(reply: m.Reply) -> None:
    assert m.decode_reply(m.encode(reply)) == reply


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_call_with_any_byte_flipped_is_refused(request_: m.Request) -> None:
    payload = encoded(request_)
    for i in range(len(payload)):
        for mask in (0x01, 0x80, 0xFF):
            flipped = payload[:i] + bytes([payload[i] ^ mask]) + payload[i + 1 :]
            with pytest.raises(TransportError, match="checksum"):
                m.decode_call(flipped)


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_cut_at_any_length_or_with_bytes_added_is_refused(reply: m.Reply) -> None:
    payload = m.encode(reply)
    for size in range(len(payload)):
        with pytest.raises(TransportError, match=f"a message of {size} bytes came damaged"):
            m.decode_reply(payload[:size])
    with pytest.raises(TransportError):
        m.decode_reply(payload + b"\x00")


def test_a_message_that_is_too_large_is_refused_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encoded(m.Poll())
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(payload))
    assert m.decode_call(payload).request == m.Poll()
    with pytest.raises(TransportError, match=f"a message of {len(payload) + 1} bytes came, at most {len(payload)}"):
        m.decode_call(payload + b"\x00")


def test_a_call_is_no_reply_and_a_reply_no_call() -> None:
    with pytest.raises(TransportError, match="malformed"):
        m.decode_reply(encoded(m.Poll()))
    with pytest.raises(TransportError, match="malformed"):
        m.decode_call(m.encode(m.Ok()))


@given(st.binary(max_size=200))
def test_whatever_bytes_come_there_is_one_kind_of_error(body: bytes) -> None:
    for payload in (body, checked(body)):
        for decode in (m.decode_call, m.decode_reply):
            with pytest.raises(TransportError):
                decode(payload)


Json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from(REQUESTS), st.data())
def test_a_field_of_another_type_is_refused_or_is_a_whole_message(request_: m.Request, data: st.DataObject) -> None:
    """With a checksum that fits, as a program of another version may send."""
    fields = msgspec.to_builtins(request_)
    name = data.draw(st.sampled_from([*fields, "new"]))
    fields[name] = data.draw(Json)
    call = {"session": "s", "epoch": 1, "number": 2, "request": fields}
    try:
        decoded = m.decode_call(checked(msgspec.msgpack.encode(call)))
    except TransportError:
        return
    assert isinstance(decoded.request, m.Request)
    assert m.decode_call(m.encode(decoded)) == decoded or "nan" in repr(decoded)


@pytest.mark.parametrize("opens", [b"\x91", b"\x81\xa1x"])
def test_a_message_nested_without_end_is_refused(opens: bytes) -> None:
    start = b"\x81\xa3new"  # a map of one field that no message has
    with pytest.raises(TransportError):
        m.decode_call(checked(start + opens * 100_000 + b"\xc0"))


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_a_message_that_claims_to_hold_billions_of_items_allocates_nothing_for_them(claim: bytes) -> None:
    whole = msgspec.msgpack.encode(
        {"session": "s", "epoch": 1, "number": 2, "request": {"type": "Connect", "links": []}}
    )
    assert m.decode_call(checked(whole)).request == m.Connect()
    with pytest.raises(TransportError):
        m.decode_call(checked(whole[:-1] + claim))


def test_a_rank_answers_a_damaged_call_with_a_failure() -> None:
    payload = encoded(m.Poll())
    reply = m.decode_reply(m.answer(lambda call: m.Ok(), payload[:-1]))
    assert isinstance(reply, m.Failed)
    assert isinstance(reply.error.to_error(), TransportError)
    assert m.decode_reply(m.answer(lambda call: m.Ok(), payload)) == m.Ok()
