"""The fields that travel beside a rollout's text or a target's tokens, one float32 value per token, each declared once.

    of servers:    request → Completion → Rollout → recording and replay
    of objectives: Target → Segment → batch, in which every value stays with its token

Nothing is asked for, recorded or collated that no part needs. A part says so by name: ``Task.columns``, or a user by
``telemetry.log_probs``. A column that servers give is a field of ``Completion`` and ``Rollout`` of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """One field: its name on every record, in the recording and in a batch."""

    name: str
    filler: float = 0.0  # of tokens that have no value, such as a prompt's
    option: str = (
        ""  # of ms-swift's RequestConfig, by which servers are asked for it; none if they do not give it
    )

    def beside(self, values: Sequence[float], num_before: int, num_after: int) -> list[float]:
        """The values of a target's tokens with fillers for the tokens around them."""
        return [self.filler] * num_before + list(values) + [self.filler] * num_after


LOG_PROBS = Column("log_probs", option="logprobs")
"""Log-probability of every sampled token, the one that ended the answer included, under the distribution that it was
drawn from: the log-softmax, in float32, of the logits after repetition penalty, temperature, top-k and top-p; greedy
decoding divides by no temperature. Without penalty, top-k and top-p that is ``log_softmax(logits / temperature)``."""
ADVANTAGES = Column("advantages", filler=1.0)
"""Of tokens that are trained by a reward: the factor of their loss. 1 leaves the loss of all others as it is."""
BEHAVIOUR = Column("behaviour", filler=math.nan)
"""``LOG_PROBS`` in a batch: of the tokens that the model sampled itself; no other token has a value."""

COLUMNS = {column.name: column for column in (LOG_PROBS, ADVANTAGES, BEHAVIOUR)}
SERVED = {name: column for name, column in COLUMNS.items() if column.option}


def request_options(columns: Iterable[Column]) -> dict[str, Any]:
    """The options of a request by which a server gives ``columns``."""
    return {column.option: True for column in columns}


def asked_by(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of the columns that a request with these options asks for."""
    return frozenset(name for name, column in SERVED.items() if config.get(column.option))


def given_by(record: object) -> dict[str, Any]:
    """The columns that an answer or a rollout brings, as fields of either."""
    found = {name: getattr(record, name) for name in SERVED}
    return {name: values for name, values in found.items() if values is not None}


def stand_ins(num_tokens: int) -> dict[str, Any]:
    """The same of a rollout that no server gave, to try a task on."""
    return {name: (column.filler,) * num_tokens for name, column in SERVED.items()}
