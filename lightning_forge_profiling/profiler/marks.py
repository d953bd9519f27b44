"""`Marks`: names steps and regions in a recording, also while its operators are left out."""

from threading import get_ident

from torch._C._autograd import _enable_record_function
from torch.profiler import record_function


class Marks:
    """Begins named ranges of a recording, and leaves operators out of it or takes them in again.

    Operators and ranges are both calls of PyTorch's `RecordFunction`, which a thread can switch off; autograd's threads
    take that over with each backward pass. A range is switched on for the moment in which it begins.
    """

    def __init__(self) -> None:
        self._without_operators_on: int | None = None  # the thread

    def leave_operators_out(self) -> None:
        """Record no operators of this thread, and of backward passes that it begins."""
        if self._without_operators_on is None:
            self._without_operators_on = get_ident()
            _enable_record_function(False)  # noqa: FBT003

    def take_operators_in(self) -> None:
        """Record operators again; on the thread that left them out."""
        if self._without_operators_on == get_ident():
            self._without_operators_on = None
            _enable_record_function(True)  # noqa: FBT003

    def begin(self, name: str) -> record_function:
        """Begin a range. Leaving it as a context ends it."""
        mark = record_function(name.replace('"', "'"))  # PyTorch (2.13) does not escape it, and the trace is no JSON
        off = self._without_operators_on == get_ident()
        if off:
            _enable_record_function(True)  # noqa: FBT003
        try:
            mark.__enter__()  # type: ignore[no-untyped-call]
        finally:
            if off:
                _enable_record_function(False)  # noqa: FBT003
        return mark
