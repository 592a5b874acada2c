"""What a replay came to: a sentence, an exit status, and a file for whoever started the ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_EQUAL = 0
EXIT_DIFFERS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``num_compared`` steps from ``first_step`` on had the recorded losses on every rank."""

    first_step: int
    last_step: int
    num_b_steps: int
    num_compared: int
    unfinished_step: int | None
    """Taken as well, with nothing to compare it to."""
    difference: str | None

    @property
    def status(self) -> int:
        """0 iff every recorded step was taken and had the recorded losses."""
        return EXIT_EQUAL if self._is_equal else EXIT_DIFFERS

    @property
    def sentence(self) -> str:
        """One line for a person."""
        if self.difference is not None:
            return f"differs: {self.difference}; steps before it, all bit-equal: {self.num_compared}"
        if not self._is_equal:
            return (
                f"not finished: steps from step {self.first_step} on, all bit-equal: {self.num_compared}; the record "
                f"goes to step {self.last_step}"
            )
        more = (
            ""
            if self.unfinished_step is None
            else f"; step {self.unfinished_step}, which the run did not end, ended here"
        )
        return (
            f"equal: every loss of steps {self.first_step} to {self.last_step}, {self.num_b_steps} of them on channel "
            f"B, is bit-equal on every rank{more}"
        )

    @property
    def _is_equal(self) -> bool:
        return self.difference is None and self.num_compared == self.last_step - self.first_step + 1

    def write(self, output: Path) -> None:
        """Leaves it in ``output``."""
        verdict_path(output).write_text(json.dumps(asdict(self)), encoding="utf-8")


def verdict_path(output: Path) -> Path:
    """Where rank 0 leaves it."""
    return output / "verdict.json"


def read_verdict(output: Path) -> Verdict | None:
    """What rank 0 left; None if it ended before it could."""
    path = verdict_path(output)
    return Verdict(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
