"""A store of its own, as torchrun's agent has it: PORT, or 0 for any. Prints the port and serves until it is killed."""

import signal
import sys

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()
