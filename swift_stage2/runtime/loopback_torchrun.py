"""torchrun for the ranks of one machine, whose one store listens on loopback alone; started by its module's name.

``torchrun --standalone`` opens two stores, and PyTorch binds a store to every address unless it is handed a socket.
"""

from __future__ import annotations

import socket
import sys
from uuid import uuid4

from torch.distributed import TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_NAME, _HOST = "loopback", "127.0.0.1"
_TIMEOUT_S = 900  # torchrun's own


class LoopbackRendezvous(StaticTCPRendezvous):
    """Of one agent, whose ranks are clients of its store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        super().__init__(_HOST, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=_TIMEOUT_S)
        self._store = TCPStore(
            _HOST, port, 1, is_master=True, timeout=self.timeout, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return _NAME


if __name__ == "__main__":
    rendezvous_handler_registry.register(_NAME, LoopbackRendezvous)
    nodes = [f"--rdzv-backend={_NAME}", f"--rdzv-endpoint={_HOST}", f"--rdzv-id={uuid4()}"]
    run.main([*nodes, *sys.argv[1:]])
