"""A store of its own, as torchrun's agent has it."""

import signal

from torch.distributed import TCPStore


def serve(port, pipe):
    """Serve on this port, or on any for 0, until killed; sends the port."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()
