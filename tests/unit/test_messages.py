"""Pickling and sending of messages: the receiver reads what was sent, and equal messages are not pickled again."""

import copy
import pickle

import pytest
from test_shipping import call as call_on_shares

from synkhronos._memory.channels import FdChannel, Mailbox
from synkhronos._memory.segments import ArrayRef, SegmentRef
from synkhronos._rank.commands import Bind, Call, Connect, Get, Shapes, Source
from synkhronos._rank.messages import Arrays, Decoder, Encoder, Envelope, Placed, Release, Sent
from synkhronos._utils.rows import Rows


def call(stop=4, all_compute=False):
    inputs = Source(ArrayRef("a", 64, (8, 2), "<f4"), Rows(0, stop)), Source(ArrayRef("b", 0, (), "<i8"), None)
    options = {"function": 3, "all_compute": all_compute, "output_modes": ("avg", None)}
    return call_on_shares(inputs[0], (Rows(0, 2), Rows(2, stop)), inputs=inputs, **options)


def envelope(command):
    return Envelope((SegmentRef("s", 4096),), Release(("old",), (1,), ()), command)


ARRAYS = Arrays([None, Placed(1, 64, (2,), "<f4"), Sent(b"12345678", (2,), "<f4")])


@pytest.mark.parametrize("message", [*map(envelope, (call(), Get((1, 2), (0,)), None)), ARRAYS, [(1, 2), ()], None])
def test_a_decoder_reads_what_an_encoder_writes(message):
    read = Decoder().loads(Encoder().dumps(message))
    assert read == message and type(read) is type(message)
    if isinstance(message, Envelope):
        assert type(read.command) is type(message.command) and type(read.release) is Release
    if isinstance(getattr(message, "command", None), Call):
        assert type(read.command.inputs[0].rows) is Rows and len(read.command.shares[1]) == 2


def test_an_equal_message_is_neither_pickled_nor_read_again():
    encoder, decoder = Encoder(), Decoder()
    first = encoder.dumps(envelope(call()))
    read = decoder.loads(first)
    assert encoder.dumps(envelope(call())) is first
    assert decoder.loads(bytes(bytearray(first))) is read


def test_a_large_message_is_not_kept():
    encoder, decoder = Encoder(), Decoder()
    message = Arrays([Sent(bytes(1 << 20), (1 << 20,), "uint8")])
    first, second = encoder.dumps(message), encoder.dumps(message)
    assert first == second and first is not second
    assert decoder.loads(first) == message and decoder.loads(first) is not decoder.loads(first)


def test_messages_that_differ_are_distinguished():
    encoder, decoder = Encoder(), Decoder()
    calls = [call(), call(stop=5), call(stop=5, all_compute=True), call()]
    messages = map(envelope, [*calls, Shapes(()), Bind(()), Get(()), None, Connect(b"x")])
    for message in [*messages, Envelope((), Release(), None), None]:
        pickled = encoder.dumps(message)
        assert pickle.loads(pickled) == message
        read = decoder.loads(pickled)
        assert read == message
        assert type(getattr(read, "command", None)) is type(getattr(message, "command", None))


def test_a_mailbox_returns_the_message_put_into_it():
    """A reader receives short, long and repeated messages, also after an interrupted `put`."""
    here, there = FdChannel.pair()
    writer = Mailbox()
    reader = copy.copy(writer)
    short, other, long = b"short", b"another", bytes(range(256)) * 1000

    def interrupted(segment):
        raise KeyboardInterrupt

    for message in (short, short, other, short, long, long, short, other, long, short):
        writer.put(message, here.give)
        assert reader.get(there) == message
        assert reader.get(there) == message
    with pytest.raises(KeyboardInterrupt):
        writer.put(long, interrupted)
    writer.put(short, here.give)
    assert reader.get(there) == short
    here.close()
    there.close()


def test_a_message_that_is_the_one_before_is_not_read_again():
    here, there = FdChannel.pair()
    box = Mailbox()
    message = b"message"
    box.put(message, here.give)
    first = box.get(there)
    box.put(message, here.give)
    assert box.get(there) is first
    here.close()
    there.close()
