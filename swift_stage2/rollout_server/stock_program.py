"""Stock ``swift rollout`` whose bearer token comes from the environment, as ``launch`` starts it.

ms-swift takes the token as an argument only, where every user of the machine reads it in the list of processes (an
argument file of its command line ends there as well), and logs its arguments. The server itself is ms-swift's own.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    """``VARIABLE ARGUMENT…``: the variable that holds the token, and what ``swift rollout`` takes."""
    variable, *arguments = argv
    key = os.environ[variable]

    def without_key(record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().replace(key, "***"), ()
        return True

    from swift.pipelines import rollout_main
    from swift.utils import get_logger

    get_logger().addFilter(without_key)
    rollout_main([*arguments, "--api_key", key])


if __name__ == "__main__":  # the engines' processes import this module again
    main(sys.argv[1:])
