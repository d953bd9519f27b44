"""Ports for servers that have to be given a number, where another process could otherwise come first."""

import itertools
import os
import socket
from pathlib import Path

GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
SPAN = 8192
_tries = itertools.count()


def free_port():
    """A free port below those that the system gives out.

    A port that was bound to 0 and closed again may be given to any process that asks for one in between. These are
    given to nobody, and two processes of a test run begin their search at different ones.
    """
    first_given_out = int(GIVEN_OUT.read_text().split()[0]) if GIVEN_OUT.exists() else 32768
    lowest = max(first_given_out - SPAN, 1024)
    for _ in range(SPAN):
        port = lowest + (61 * os.getpid() + next(_tries)) % SPAN
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port from {lowest} on")
