"""One kind of wrong input, and what a command that met it must have said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.wrong_inputs.scene import CONFIG_FILE, Scene

LAUNCH = ("launch", CONFIG_FILE)
DOCTOR = ("doctor", CONFIG_FILE, "--json")
TRAIN = ("train", CONFIG_FILE)
DATA = ("data", "check", "rows.jsonl")
_LONGEST_LAST_LINE = 900
_TELLS_BY_ROWS = ("doctor", "data", "report")
_NO_SUCH_COMMAND = "argument COMMAND: invalid choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``spoil`` changes a scene before it is written; then ``words`` run in its folder."""

    area: str
    wrong: str
    """What is wrong, in a few words of a user's."""
    words: tuple[str, ...] = LAUNCH
    spoil: Callable[[Scene], object] = lambda scene: None
    told: str = ""
    """What must be said."""
    never: str = ""
    """What must not be said: a claim about what was not checked, or a secret."""
    statuses: tuple[int, ...] = (2,)

    def problems(self, status: int | None, output: str) -> tuple[str, ...]:
        """What must not be; empty if the command did as it should. No ``status``: it did not end in time."""
        flat = " ".join(output.split())
        lines = [line for line in output.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        found = [
            (status is None, "did not end in time"),
            (
                status is not None and status not in self.statuses,
                f"exit status {status}, not {self.statuses}",
            ),
            ("Traceback (most recent call last)" in output, "traceback"),
            (
                _NO_SUCH_COMMAND in output and self.words[0] not in ("trian", "nothing", "Launch", "data"),
                "no such command",
            ),
            (bool(self.told) and " ".join(self.told.split()) not in flat, f"does not say {self.told!r}"),
            (bool(self.never) and self.never in flat, f"says {self.never!r}"),
            (not self._is_clear(last), "the last line is not one clear line"),
        ]
        return tuple(problem for holds, problem in found if holds)

    def _is_clear(self, last: str) -> bool:
        if (self.words and self.words[0] in _TELLS_BY_ROWS) or 0 in self.statuses:
            return bool(last)
        return last.startswith("swift-stage2") and "error: " in last and len(last) <= _LONGEST_LAST_LINE


def setting(area: str, wrong: str, place: str, value: object, told: str, **more: object) -> Case:
    """A value at a dotted place of the configuration."""
    return Case(area=area, wrong=wrong, spoil=placed(place, value), told=told, **more)  # type: ignore[arg-type]


def placed(place: str, value: object) -> Callable[[Scene], object]:
    """Writes one setting."""
    return lambda scene: scene.set(place, value)


def text(area: str, wrong: str, name: str, content: str | bytes, told: str, **more: object) -> Case:
    """A file with other content."""
    return Case(
        area=area,
        wrong=wrong,
        spoil=lambda scene: scene.files.update({name: content}),
        told=told,
        **more,  # type: ignore[arg-type]
    )


def command(area: str, wrong: str, words: Sequence[str], told: str, **more: object) -> Case:
    """A command line that is wrong by itself."""
    return Case(area=area, wrong=wrong, words=tuple(words), told=told, **more)  # type: ignore[arg-type]
