"""A small job that is right in every part, in a folder where one command will run, for a case to spoil."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift_stage2.config.yaml_text import write_yaml
from swift_stage2.demo.demo_config import CHILD_ENVIRONMENT, DemoJob, config_of
from swift_stage2.demo.grounding_dataset import ROWS_FILE, write_dataset
from swift_stage2.demo.scenes import SceneKind, Split

CONFIG_FILE = "run.yaml"
RUN_DIR = "run"
_NUM_ROWS = 6
_IMAGES = "images"


@dataclass(slots=True)
class Scene:
    """What ``save`` writes into ``folder``; ``files`` last, so that they may replace the others."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    foreign_port: int
    """Where a web server listens that is no rollout server."""
    free_port: int
    """Where nobody listens."""
    files: dict[str, str | bytes] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def set(self, place: str, value: Any) -> None:
        """Writes one setting at a dotted place; a number is the entry of a list."""
        section: Any = self.config
        *path, key = place.split(".")
        for name in path:
            section = section[int(name)] if isinstance(section, list) else section.setdefault(name, {})
        section[int(key) if isinstance(section, list) else key] = value

    def image(self, index: int = 0) -> Path:
        """The file of a row's image."""
        return self.folder / str(self.rows[index]["images"][0])

    def save(self) -> None:
        """Configuration, rows, and the files that a case has put in."""
        self._write(CONFIG_FILE, write_yaml(self.config))
        self._write(ROWS_FILE, "".join(json.dumps(row) + "\n" for row in self.rows))
        for name, content in self.files.items():
            self._write(name, content)

    def _write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)


class SceneMaker:
    """Makes scenes from one data set that is written once."""

    def __init__(self, directory: Path, foreign_port: int, free_port: int) -> None:
        self._images = directory / "template"
        self._ports = foreign_port, free_port
        file = write_dataset(self._images, SceneKind.SHAPES, _NUM_ROWS, Split.TRAIN, 1)
        self._lines = file.read_text(encoding="utf-8").splitlines()
        file.unlink()

    def make(self, folder: Path) -> Scene:
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
        return Scene(folder, config, rows, foreign_port, free_port, environment=environment)
