"""Our rollout server whose load of weights can be spoilt while it runs.

``python -m benchmarks.faults.faulty_server`` takes the options of ``swift-stage2 rollout`` and is that server;
beside it a thread carries a switch's text to the engine's own ``install_fault``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.faults.commit import INSTALL, INSTALL_SEEN, Switches
from swift_stage2.rollout_server.command_line import parse_command, serve
from swift_stage2.rollout_server.engine import Engine, InstallFault

_POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM; exit status as ``swift-stage2 rollout``."""
    command = parse_command(argv)

    def start_engine() -> Engine:
        engine = command.start_engine()
        arguments = (engine, Switches.from_environment())
        threading.Thread(target=_follow, args=arguments, name="install-fault", daemon=True).start()
        return engine

    return serve(replace(command, start_engine=start_engine))


def _follow(engine: Engine, switches: Switches) -> None:
    while True:
        wanted = InstallFault(switches.read(INSTALL) or InstallFault.NONE)
        if wanted is not engine.install_fault:
            engine.install_fault = wanted
            switches.set(INSTALL_SEEN, wanted)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
