"""The fields that travel beside a rollout's text or a target's tokens, each declared once as a ``Column``.

    of servers:  request → Completion → Rollout → recording and replay
    of a task:   Target → Segment → batch, in which every value stays with its token

Nothing is asked for, recorded or collated that no part needs. A part says so by name: ``Task.columns``, or a user by
``telemetry.log_probs``. A column that servers give is a field of ``Completion`` and ``Rollout`` of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from swift_stage2.config.rules import register
from swift_stage2.errors import ProtocolError

_LARGEST = 3.4028234663852886e38  # of float32


class Per(StrEnum):
    """The thing that one value belongs to."""

    TOKEN = "token"
    SAMPLE = "sample"
    GROUP = "group"  # of rollouts of one sample: each of them carries its group's value


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One field: its name on every record, in the recording and in a batch, and the kind of its values."""

    name: str
    per: Per = Per.TOKEN
    dtype: str = "float32"  # of the batch's tensor, as torch calls it
    filler: float = 0.0  # of tokens that have no value, such as a prompt's
    option: str = (
        ""  # of ms-swift's RequestConfig, by which servers are asked for it; none if they do not give it
    )
    most: float = math.inf

    def num_values(self, num_tokens: int) -> int:
        """Of a rollout or target with so many tokens."""
        return num_tokens if self.per is Per.TOKEN else 1

    def check(
        self, values: tuple[float, ...] | None, num_tokens: int, *, asked: bool
    ) -> tuple[float, ...] | None:
        """The values of an answer of so many tokens, as a server gave them; none of its own if there are no tokens.

        Raises:
            ProtocolError: asked for and not given, another number of them, not finite in float32, or too large.
        """
        if values is None and not (asked and num_tokens):
            return () if asked else None
        given = () if values is None else values
        if len(given) != self.num_values(num_tokens):
            raise ProtocolError(
                f"{self.name} must have one value per {self.per}, got num_values={len(given)} num_tokens={num_tokens}"
            )
        for place, value in enumerate(given):
            if not -_LARGEST <= value <= min(_LARGEST, self.most):  # what float32 has as a number
                raise ProtocolError(
                    f"{self.name} must be finite in float32 and at most {self.most:g}, got "
                    f"{self.name}[{place}]={value!r}"
                )
        return given

    def beside(self, values: Sequence[float], num_before: int, num_after: int) -> list[float]:
        """The values of a target's tokens with fillers for the tokens around them; of a sample or group as they are."""
        if self.per is not Per.TOKEN:
            return list(values)
        return [self.filler] * num_before + list(values) + [self.filler] * num_after


COLUMNS: dict[str, Column] = {}


def register_column(column: Column) -> Column:
    """Lets a task name it. Raises ConfigError: the name is taken."""
    return register(COLUMNS, "column", column.name)(column)


LOG_PROBS = register_column(Column(name="log_probs", option="logprobs", most=0.0))
"""Log-probability of every sampled token, the one that ended the answer included, under the distribution that it was
drawn from: the log-softmax, in float32, of the logits after repetition penalty, temperature, top-k and top-p; greedy
decoding divides by no temperature. Without penalty, top-k and top-p that is ``log_softmax(logits / temperature)``."""

ADVANTAGES = register_column(Column(name="advantages", filler=1.0))
"""Of tokens that are trained by a reward: the factor of their loss. 1 leaves the loss of all others as it is."""
BEHAVIOUR = register_column(Column(name="behaviour", filler=math.nan))
"""``LOG_PROBS`` in a batch: of the tokens that the model sampled itself; no other token has a value."""


def served() -> tuple[Column, ...]:
    return tuple(column for column in COLUMNS.values() if column.option)


def request_options(columns: Iterable[Column]) -> dict[str, Any]:
    """The options of a request by which a server gives ``columns``."""
    return {column.option: True for column in columns if column.option}


def asked_by(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of the columns that a request with these options asks for."""
    return frozenset(column.name for column in served() if config.get(column.option))


def given_by(record: object) -> dict[str, Any]:
    """The columns that an answer or a rollout brings, as fields of either."""
    found = {column.name: getattr(record, column.name) for column in served()}
    return {name: values for name, values in found.items() if values is not None}


def stand_ins(num_tokens: int) -> dict[str, Any]:
    """The same of a rollout that no server gave, to try a task on."""
    return {column.name: (column.filler,) * column.num_values(num_tokens) for column in served()}
