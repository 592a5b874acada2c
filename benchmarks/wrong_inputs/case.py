"""One kind of wrong input, what a command that met it must have said, and the small job that it spoils."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob, config_of
from swift_stage2.demo.grounding_dataset import ROWS_FILE, write_dataset
from swift_stage2.demo.scenes import SceneKind, Split

CONFIG_FILE = "run.yaml"
RUN_DIR = "run"
_LONGEST_LAST_LINE = 900
_TELLS_BY_ROWS = ("doctor", "data", "report")
_NO_SUCH_COMMAND = "argument COMMAND: invalid choice"
_NUM_ROWS = 6
_IMAGES = "images"


@dataclass(slots=True)
class Setup:
    """A job that is right in every part. ``save`` writes it into ``folder``, ``files`` last: they replace others."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    foreign_port: int
    """Where a web server listens that is no rollout server."""
    free_port: int
    """Where nobody listens."""
    files: dict[str, str | bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def save(self) -> None:
        self._write(CONFIG_FILE, write_yaml(self.config))
        self._write(ROWS_FILE, "".join(json.dumps(row) + "\n" for row in self.rows))
        for name, content in self.files.items():
            self._write(name, content)

    def _write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)


class SetupMaker:
    """Makes scenes from one data set that is written once."""

    def __init__(self, directory: Path, foreign_port: int, free_port: int) -> None:
        self._images = directory / "template"
        self._ports = foreign_port, free_port
        file = write_dataset(self._images, SceneKind.SHAPES, _NUM_ROWS, Split.TRAIN, 1)
        self._lines = file.read_text(encoding="utf-8").splitlines()
        file.unlink()

    def make(self, folder: Path) -> Setup:
        """A scene in ``folder``, which this call creates. Images are named relative to it."""
        shutil.copytree(self._images, folder / _IMAGES)
        rows = [json.loads(line) for line in self._lines]
        for row in rows:
            row["images"] = [f"{_IMAGES}/{Path(row['images'][0]).name}"]
        foreign_port, free_port = self._ports
        job = DemoJob(directory=folder, rows=Path(ROWS_FILE), num_steps=2, b_ratio=0.5, num_ranks=1)
        config = config_of(job, (free_port, free_port + 1))
        config["swift"] |= {"output_dir": RUN_DIR, "dataset": [ROWS_FILE]}
        environment = {**CHILD_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
        return Setup(folder, config, rows, foreign_port, free_port, environment=environment)


def section_of(tree: Any, place: str) -> tuple[Any, Any]:
    """The section that holds a dotted place, made on the way, and its key there.

    A number is the entry of a list, ``+`` a new one behind its last.
    """
    *path, key = place.split(".")
    for name in path:
        tree = tree[int(name)] if isinstance(tree, list) else tree.setdefault(name, {})
    if key == "+":
        tree.append(None)
        key = "-1"
    return tree, int(key) if isinstance(tree, list) else key


def put(tree: Any, place: str, value: Any) -> None:
    section, key = section_of(tree, place)
    section[key] = value


def remove(tree: Any, place: str) -> None:
    section, key = section_of(tree, place)
    del section[key]


@dataclass(frozen=True, slots=True)
class Case:
    """``spoil`` changes a scene; then ``command`` runs in its folder."""

    area: str
    wrong: str
    """The mistake, in a few words of a user's."""
    told: str
    """Words that must be said."""
    command: str
    """As it is typed, without the program's name."""
    spoil: Callable[[Setup], object]
    """Changes a scene before it is written."""
    statuses: tuple[int, ...]
    never: str
    """Words that must not be said: a claim about what was not checked, or a secret."""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.command))

    def problems(self, status: int | None, output: str) -> tuple[str, ...]:
        """Names all that must not be; empty if the command did as it should. No ``status``: it did not end in time."""
        flat = " ".join(output.split())
        lines = [line for line in output.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        first = self.words[0] if self.words else ""
        unknown = _NO_SUCH_COMMAND in output and first not in ("trian", "nothing", "Launch", "data")
        found = {
            "did not end in time": status is None,
            f"exit status {status}, not {self.statuses}": status not in (None, *self.statuses),
            "traceback": "Traceback (most recent call last)" in output,
            "no such command": unknown,
            f"does not say {self.told!r}": bool(self.told) and " ".join(self.told.split()) not in flat,
            f"says {self.never!r}": bool(self.never) and self.never in flat,
            "the last line is not one clear line": not self._is_clear(first, last),
        }
        return tuple(problem for problem, holds in found.items() if holds)

    def _is_clear(self, first: str, last: str) -> bool:
        if first in _TELLS_BY_ROWS or 0 in self.statuses:
            return bool(last)
        return last.startswith("swift-stage2") and "error: " in last and len(last) <= _LONGEST_LAST_LINE
