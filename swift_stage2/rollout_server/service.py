"""The server without HTTP: one engine, its weight rounds, and what the process says of itself."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from swift_stage2.rollout_server.engine import Engine, EngineState
from swift_stage2.rollout_server.weight_rounds import WeightRounds
from swift_stage2.servers.protocol import ServerInfo


class RolloutService:
    """What the routes talk to. ``incarnation`` is new at every start of the process."""

    def __init__(self, engine: Engine, host: str = "127.0.0.1") -> None:
        """``host``: the address to listen on for weights, too."""
        self.engine = engine
        self.incarnation = uuid.uuid4().hex
        self.rounds = WeightRounds(engine, self.incarnation, host=host)

    def end_work(self) -> None:
        """Ends the open round and what is being generated, because the server is asked to end."""
        self.rounds.close()
        self.engine.abort()

    def state(self) -> str:
        """The engine's state unless it is ready; then the state of the weight rounds."""
        engine_state = self.engine.status().state
        return str(engine_state if engine_state is not EngineState.READY else self.rounds.state)

    def info(self) -> ServerInfo:
        stamp = self.engine.stamp
        return ServerInfo(
            stock=False,
            incarnation=self.incarnation,
            engine=self.engine.name,
            model=_absolute(self.engine.model),
            weight_version=stamp.version,
            run_id=stamp.run_id,
            state=self.state(),
            can_abort=self.engine.can_abort,
            manifest=self.engine.manifest(),
        )

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the engine can answer, and what it does; never waits for it."""
        status = self.engine.status()
        ready = status.state is EngineState.READY
        return ready, {
            "status": "ok" if ready else str(status.state),
            "state": self.state(),
            "detail": status.detail,
            "num_waiting": status.num_waiting,
            "num_running": status.num_running,
            "batches_run": status.batches_run,
            "completions_made": status.completions_made,
        }


def _absolute(model: str) -> str:
    """A directory so that others on this machine find it, too; a hub id as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model
