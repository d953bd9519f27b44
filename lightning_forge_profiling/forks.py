"""What belongs to the process that made it: in one that is forked there, such as a loader's worker, it does nothing."""

import os
from typing import Any, Final
from weakref import WeakSet

# `leave()` of each is called in a forked process, which has no other thread, and where locks may be held for ever
OWNED: Final[WeakSet[Any]] = WeakSet()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [one.leave() for one in list(OWNED)])
