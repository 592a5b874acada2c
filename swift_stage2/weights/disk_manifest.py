"""Describes a round's directory, which the learner writes and servers read: its shards, and whose weights they hold.

It is called like the round. ``manifest.json`` says whose weights lie in it and what their checksums are; the shards and
their index are those of a Hugging Face checkpoint. Only a directory with the mark of its proof is a version of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_stage2.errors import ProtocolError
from swift_stage2.whole_file import read_regular, write_whole
from swift_stage2.wire import Message as WireRecord
from swift_stage2.wire import TensorSpec, parse_json

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
_PROVEN = "proven.json"


@dataclass(frozen=True, slots=True)
class DiskManifest(WireRecord):
    """The identity of the weights in a directory, and for every tensor its place and its checksum (``tensors.py``)."""

    run_id: str
    round_id: str
    version: int  # that the run calls them once they are proven
    step: int | None
    tensors: tuple[TensorSpec, ...]
    shards: Mapping[str, str]  # file's name, by tensor
    checksums: Mapping[str, str]  # by tensor

    @classmethod
    def parse(cls, data: bytes) -> DiskManifest:
        """Raises ProtocolError: it is none, or does not say of every tensor where it lies."""
        manifest = cls.from_json(parse_json(data, MANIFEST))
        names = [spec.name for spec in manifest.tensors]
        if not set(names) == manifest.shards.keys() == manifest.checksums.keys():
            raise ProtocolError(f"{MANIFEST} must hold a shard and a checksum for each of its tensors")
        return manifest

    def write(self, directory: Path, num_bytes: int) -> None:
        """Puts it there, with the index by which Hugging Face and vLLM find tensors. Raises OSError."""
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(self.shards)}
        write_whole(directory / INDEX, json.dumps(index))
        write_whole(directory / MANIFEST, json.dumps(self.to_json()))


@dataclass(frozen=True, slots=True)
class ProvenWeights:
    """A version of a run that at least one server has proven, of which all ranks have heard."""

    directory: Path
    manifest: DiskManifest


def is_proven(directory: Path) -> bool:
    """Whether it bears the mark."""
    return (directory / _PROVEN).is_file()


def mark_proven(directory: Path, version: int) -> None:
    """Marks it, so that it counts from now on. Raises OSError."""
    write_whole(directory / _PROVEN, json.dumps({"version": version}))


def rounds_of(directory: Path, run_id: str, *, hidden: bool = False) -> list[Path]:
    """That run's directories; the ``hidden`` ones are half written or half removed. Raises OSError."""
    pattern = re.compile(rf"{re.escape(run_id)}-[^-]+")
    return [
        path
        for path in directory.iterdir()
        if pattern.fullmatch(path.name.removeprefix(".")) and path.name.startswith(".") is hidden
    ]


def proven_versions(directory: Path, run_id: str) -> Sequence[ProvenWeights]:
    """The run's proven versions, newest first. One that is removed meanwhile is left out. Raises OSError."""
    found = []
    for path in filter(is_proven, rounds_of(directory, run_id)):
        try:
            manifest = DiskManifest.parse(read_regular(path / MANIFEST))
        except (FileNotFoundError, ProtocolError):
            continue
        if (manifest.run_id, manifest.round_id) == (run_id, path.name):
            found.append(ProvenWeights(path, manifest))
    return sorted(found, key=_age, reverse=True)


def _age(weights: ProvenWeights) -> tuple[int, int, str]:
    """A version that no rank took, because its server was doubted, comes again in a later round."""
    number = weights.directory.name.rpartition("-")[2]
    return weights.manifest.version, int(number) if number.isdecimal() else -1, number
