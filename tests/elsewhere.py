"""Takes from the package what other systems lack, on Linux: from its own modules only, before they are imported.

What Windows has is that of Python's documentation ("Availability"), and of typeshed: `mypy --platform win32` lists what
else is asked for. Paths, and files that are open, stay as they are on Linux.
"""

import builtins
import io
import multiprocessing
import os
import re
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGE = "lightning_forge_profiling"

_LINUX_ALONE = {
    "os": r"memfd_create|sched_.*|SCHED_.*|posix_fadvise|pidfd_open|eventfd.*|O_PATH|POSIX_FADV.*",
    "signal": r"SIGRTM\w+|sigtimedwait|sigwaitinfo|SIGPWR|SIGPOLL|SIGSTKFLT",
    "time": r"CLOCK_BOOTTIME|CLOCK_TAI|pthread_getcpuclockid",
    "select": r"e?poll|EPOLL\w+",
    "socket": r"SO_PASSCRED|SCM_CREDENTIALS|MSG_CMSG_CLOEXEC",
    "resource": r"RUSAGE_THREAD|prlimit",
}
_UNIX_ALONE = {
    "os": r"fork\w*|register_at_fork|get(e?[ug]id|pg\w+|sid|loadavg|groups|priority)|set\w*id|killpg|nice|sysconf\w*"
    r"|p(read|write)v?|f?chown|fchmod|fchdir|f?statvfs|uname|mkfifo|mknod|sendfile|wait\w*|W[A-Z]+|posix_\w+|ctermid"
    r"|O_(NOFOLLOW|CLOEXEC|NONBLOCK|NOCTTY|DIRECTORY|SYNC|DSYNC|ASYNC|NOATIME|DIRECT)|RTLD_\w+|[gs]et_blocking",
    "signal": r"SIG(?!ABRT|FPE|ILL|INT|SEGV|TERM|_DFL|_IGN)\w+|pthread_\w+|[gs]etitimer|siginterrupt|sigwait|sigpending"
    r"|pause|alarm|ITIMER\w+",
    "time": r"clock_\w+|CLOCK_\w+|tzset",
    "socket": r"AF_UNIX|SCM_\w+|CMSG_\w+|MSG_(DONTWAIT|NOSIGNAL)|socketpair",
    "faulthandler": r"(un)?register",
    "multiprocessing.reduction": r"DupFd|sendfds|recvfds",
}
_UNIX_MODULES = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty"}

SYSTEMS = {
    "macos": ("darwin", [_LINUX_ALONE], set()),
    "windows": ("win32", [_LINUX_ALONE, _UNIX_ALONE], _UNIX_MODULES),
}


class _Lacking(ModuleType):
    """A module as it is, but for some names."""

    def __init__(self, real: ModuleType, lacks: str, **others: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _lacks=re.compile(lacks), **others)

    def __getattr__(self, name: str) -> Any:
        if self._lacks.fullmatch(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def become(system: str) -> None:
    """Have the package run as on "macos" or "windows", in this process; `multiprocessing` starts others by `PYTHON`."""
    platform, lacks, absent = SYSTEMS[system]
    names = {name for each in lacks for name in each}
    modules: dict[str, ModuleType] = {"sys": _Lacking(sys, "", platform=platform)}
    for name in names - absent:
        patterns = "|".join(each[name] for each in lacks if name in each)
        modules[name] = _Lacking(import_module(name), patterns)
    known = builtins.__import__

    def import_(name: str, scope: Any = None, *args: Any, **kwargs: Any) -> Any:
        ours = scope is not None and str(scope.get("__name__", "")).partition(".")[0] == PACKAGE
        if ours and name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return modules[name] if ours and name in modules else known(name, scope, *args, **kwargs)

    builtins.__import__ = import_  # type: ignore[assignment]
    _hide_proc()
    multiprocessing.set_start_method("spawn", force=True)


def _hide_proc() -> None:
    """There is neither /proc nor a control group, for anybody."""

    def refuses(function: Any) -> Any:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith(("/proc", "/sys/fs/cgroup")):
                raise FileNotFoundError(2, "No such file or directory", path)
            return function(path, *args, **kwargs)

        return call

    builtins.open = io.open = refuses(builtins.open)
    for name in ("open", "listdir", "scandir", "stat"):
        setattr(os, name, refuses(getattr(os, name)))


PYTHON = """#!{python}
import sys
sys.path.insert(0, {here!r})
from tests.elsewhere import become
become({system!r})
while sys.argv[1] != "-c":
    del sys.argv[1]
code = sys.argv[2]
sys.argv[:3] = ["-c"]
exec(compile(code, "<string>", "exec"))
"""
"""Stands in for Python where code is given with `-c`: to a spawned process, and to the one that finishes a trace."""
