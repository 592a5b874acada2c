"""Two real processes over gloo, in interpreters of their own."""

from __future__ import annotations

import datetime
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from free_port import free_port

DEADLINE_S = 90.0
Body = Callable[[int, int], Any]


def run_pair(body: Body) -> list[Any]:
    """Returns what ``body(rank, port)`` did as rank 0 and as rank 1."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=_report, args=(body, rank, port, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        answers = []
        for receive, _ in pipes:
            assert receive.poll(DEADLINE_S)
            answers.append(receive.recv())
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE_S)


def _report(body: Body, rank: int, port: int, answer: Connection) -> None:
    answer.send(body(rank, port))
    os._exit(0)  # a process that a test lets die does not tidy up


def join_job(rank: int, port: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
