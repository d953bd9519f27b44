"""Events of a trace, decoded from JSON: the fields that the analysis uses, in every spelling since 2021."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import msgspec

_NONE: Final = msgspec.Raw(b"")
_EXACT_US: Final = 2**53 / 1e3
"""Up to here a float of microseconds is exact to the nanosecond."""

Number = int | float | str | None


class Arguments(msgspec.Struct, gc=False, frozen=True):
    """The `args` of an event."""

    external: Number = msgspec.field(default=-1, name="External id")
    external_2021: Number = msgspec.field(default=-1, name="external id")
    correlation: Number = -1
    device: Number = -1
    stream: Number = -1
    bytes: Number = 0
    sequence: Number = msgspec.field(default=-1, name="Sequence number")
    input_dims: msgspec.Raw = msgspec.field(default=_NONE, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=_NONE, name="Input type")
    concrete_inputs: msgspec.Raw = msgspec.field(default=_NONE, name="Concrete Inputs")
    input_strides: msgspec.Raw = msgspec.field(default=_NONE, name="Input Strides")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    group: Number = msgspec.field(default=None, name="Process Group Name")
    elements: Number = msgspec.field(default=0, name="In msg nelems")
    element_type: str | None = msgspec.field(default=None, name="dtype")
    allocation: Number = msgspec.field(default=0, name="Bytes")
    allocated: Number = msgspec.field(default=-1, name="Total Allocated")
    reserved: Number = msgspec.field(default=-1, name="Total Reserved")
    device_type: Number = msgspec.field(default=-1, name="Device Type")
    device_id: Number = msgspec.field(default=-1, name="Device Id")


_NO_ARGUMENTS: Final = Arguments()


class Event(msgspec.Struct, gc=False):
    """One event; times are microseconds."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: float | None = None
    dur: float | None = 0.0
    pid: Number = -1
    tid: Number = -1
    args: Arguments | None = _NO_ARGUMENTS


class ExactEvent(Event, gc=False):
    """An event with its time as written: a float cannot hold nanoseconds since 1970."""

    ts: Decimal | None = None  # type: ignore[assignment]


class BareEvent(Event, gc=False):
    """An event whose `args` are ignored, because they are of an unknown form."""

    args: Arguments | None = msgspec.field(default=_NO_ARGUMENTS, name="no such field")


class ExactBareEvent(ExactEvent, gc=False):
    """An exact event whose `args` are ignored."""

    args: Arguments | None = msgspec.field(default=_NO_ARGUMENTS, name="no such field")


_decode_texts = msgspec.json.Decoder(list[msgspec.Raw]).decode


class EventDecoder:
    """Decodes lists of events.

    Attributes:
        left_out: number of malformed events, which were left out.
        without_arguments: number of events decoded without their `args`, which are of an unknown form.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.without_arguments = 0
        self._set_type(Event, BareEvent)

    def __call__(self, text: bytes) -> list[Event]:
        """Decode a JSON list of events."""
        left_out = without_arguments = 0
        try:
            events = self._decode_list(text)
        except msgspec.ValidationError:
            events, left_out, without_arguments = self._decode_each(_decode_texts(text))
        if not self._exact and any(event.ts is not None and event.ts > _EXACT_US for event in events):
            self._set_type(ExactEvent, ExactBareEvent)
            return self(text)
        self.left_out += left_out
        self.without_arguments += without_arguments
        return events

    def _set_type(self, type_: type[Event], bare: type[Event]) -> None:
        self._exact = type_ is ExactEvent
        list_type: Any = list[type_]  # type: ignore[valid-type]
        self._decode_list: Callable[[bytes], list[Event]] = msgspec.json.Decoder(list_type).decode
        self._decode_one = msgspec.json.Decoder(type_, strict=False).decode  # accepts numbers in quotes
        self._decode_bare = msgspec.json.Decoder(bare, strict=False).decode

    def _decode_each(self, texts: list[msgspec.Raw]) -> tuple[list[Event], int, int]:
        events, left_out, without_arguments = [], 0, 0
        for text in texts:
            if not bytes(text).startswith(b"{"):  # faster than an exception for each
                left_out += 1
                continue
            try:
                events.append(self._decode_one(text))
            except msgspec.ValidationError:
                try:
                    events.append(self._decode_bare(text))
                    without_arguments += 1
                except msgspec.ValidationError:
                    left_out += 1
        return events, left_out, without_arguments
