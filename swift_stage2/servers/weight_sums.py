"""The answer of a stock server with our plugin about the last push, and how sums of tensors are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_stage2.servers.wire_record import WireRecord


@dataclass(frozen=True, slots=True)
class WeightSums(WireRecord):
    """Answer of a stock server with our plugin about the last push: all its workers, in all its engines, agree on it.

    ``resident`` lacks tensors of which no whole copy into the model was seen. ``left_out`` are the model's parameters
    that nothing was copied into. Of an ``adapter`` only what arrived is known.
    """

    incarnation: str
    arrived: Mapping[str, str]
    resident: Mapping[str, str]
    left_out: tuple[str, ...]
    adapter: Mapping[str, str]
    errors: tuple[str, ...]  # of its workers; ms-swift itself only logs them

    def problems(self, sent: Mapping[str, str]) -> list[str]:
        """Why the server does not hold the weights whose checksums are ``sent``; empty if it does."""
        problems = [*self.errors, *sum_differences("arrived", sent, self.arrived)]
        if not problems:
            problems += sum_differences(
                "resident", {name: sent[name] for name in self.resident}, self.resident
            )
        untraced = sorted(sent.keys() - self.resident.keys())
        if untraced and not problems:
            problems.append(
                f"{_first_of(untraced)} arrived and was not seen whole in the model: it was dropped, or this model's "
                "loader leaves no trace"
            )
        if self.left_out and not problems:
            problems.append(f"nothing was loaded into the server's parameter {_first_of(self.left_out)}")
        return problems

    def adapter_problems(self, sent: Mapping[str, str]) -> list[str]:
        """Why the last adapter did not arrive as ``sent``. Whether it is resident the server cannot tell."""
        return [*self.errors, *sum_differences("arrived", sent, self.adapter)]


def sum_differences(what: str, sent: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    """One line that names the first tensor whose checksum is not as sent; none if all are."""
    names = [name for name in sorted(sent.keys() | got.keys()) if sent.get(name) != got.get(name)]
    return [f"{what} checksum of {names[0]} differs ({len(names)} in all)"] if names else []


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} ({len(names)} in all)"
