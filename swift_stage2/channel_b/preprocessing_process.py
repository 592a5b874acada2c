"""The process beside a rank that preprocesses, so that its Python does not hold the learner's interpreter lock.

Encodings stay in that process until they are packed. A pack's tensors come back in a memory file (memfd_create(2)),
which ``torch.load`` maps: nobody copies them, no name outlives the two processes, and the memory goes with the last
tensor in it. A process that ends, or does not answer in time, is replaced: what it was asked is asked again, row by
row, and a row that ends two processes by itself is refused. The segments that it held cannot be packed any more.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.resource_tracker import ensure_running
from typing import Any

import torch

from swift_stage2.channel_b.encoding import Encoder
from swift_stage2.channel_b.preprocessing import EncodedRollout, Preprocessor, Refusal, ScoredRollout
from swift_stage2.channel_b.task import Task
from swift_stage2.compat import declare_operators
from swift_stage2.config.swift_arguments import PLUGIN_PREFIX
from swift_stage2.errors import ConfigError, PreprocessorLost, SampleError
from swift_stage2.records import Pack, Rollout, Segment
from swift_stage2.runtime.worker import begin_worker, describe_end, heed_no_stop

logger = logging.getLogger(__name__)

# It imports ms-swift, for which a cold network file system takes minutes, and a message is seldom more than a second's
# work. Its death is seen at once; this is for one that neither works nor dies.
_ANSWER_S = 300
_END_S = 10.0
_MOST_LOST = 4  # processes in a row without an answer of any; a bad row alone costs three


class ProcessPreprocessor(Preprocessor):
    """Has its work done in a process that starts here; ``await_ready`` waits until it has loaded the template.

    What asks it raises ``PreprocessorLost`` once it was interrupted, or lost several processes in a row.
    """

    def __init__(self, encoder: Encoder, task: Task) -> None:
        """Raises ConfigError: the template or the task cannot be sent to another process."""
        self._parts = _pickled((encoder, task))
        self._held = {}  # segments whose encodings are there
        self._num_lost = 0
        self._is_over = False
        self._changing = threading.Lock()
        self._start()
        # Before concurrent.futures, which would wait for a process that hangs.
        threading._register_atexit(self.interrupt)  # type: ignore[attr-defined]

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def await_ready(self) -> None:
        """Raises PreprocessorLost: the process could not load the template, or ended."""
        self._result("load the template", self._ready)

    def encode(self, rollouts: Sequence[Rollout]) -> list[EncodedRollout | Refusal]:
        return self._ask_for_each("encode", rollouts)

    def score(
        self, rollouts: Sequence[Rollout], *, in_group: bool = False, with_target: bool = False
    ) -> list[ScoredRollout | Refusal]:
        return self._ask_for_each("score", rollouts, in_group=in_group, with_target=with_target)

    def pack(self, pack_id: str, segments: Sequence[Segment]) -> Pack | None:
        if not all(map(self.holds, segments)):
            return None
        super().forget(segments)
        try:
            pack, path = self._ask(f"pack {len(segments)} segments", "pack", pack_id, tuple(segments))
            # Of this rank's own process: a user's collator may put any object beside the tensors.
            whole: Pack = replace(pack, batch=torch.load(path, mmap=True, weights_only=False))
        except (PreprocessorLost, FileNotFoundError):  # the file goes with its process
            if self._is_over:
                raise
            return None
        return whole

    def forget(self, segments: Sequence[Segment]) -> None:
        super().forget(segments)
        with suppress(BrokenProcessPool, RuntimeError):  # it has gone, and they with it
            self._pool.submit(_work, _pickled(("forget", (tuple(segments),), {})))

    def interrupt(self) -> None:
        with self._changing:
            self._is_over = True
            self._process.kill()  # it holds nothing that could be lost

    def close(self) -> None:
        self.interrupt()
        self._end()

    def _start(self) -> None:
        ensure_running()  # the first process of its kind starts this one, too, which lifts the mask
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=begin_worker, initargs=(os.getpid(),)
        )
        with heed_no_stop():
            self._ready = self._pool.submit(_set_up, self._parts, _plugins())
        (self._process,) = self._pool._processes.values()

    def _end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._process.join(_END_S)
        if self._process.is_alive():
            logger.warning(
                "the preprocessing process pid=%d was killed and lives after %g s", self.pid, _END_S
            )

    def _ask_for_each(self, name: str, rollouts: Sequence[Rollout], **settings: Any) -> list[Any]:
        what = (
            f"{name} rollouts of data set rows {', '.join(str(each.sample.key.index) for each in rollouts)}"
        )
        lost: PreprocessorLost | None = None
        for _ in range(2):
            try:
                return self._ask(what, name, tuple(rollouts), **settings)  # type: ignore[no-any-return]
            except PreprocessorLost as error:
                if self._is_over:
                    raise
                logger.warning("%s; another one goes on", error)
                lost = error
            if len(rollouts) > 1:
                return [found for each in rollouts for found in self._ask_for_each(name, [each], **settings)]
        return [SampleError(f"a row must not end the process that preprocesses it: {lost}")]

    def _ask(self, what: str, name: str, *arguments: Any, **settings: Any) -> Any:
        """``what`` says the same for people: one of the rows may be what the process dies of."""
        message = _pickled((name, arguments, settings))
        self._result("load the template", self._ready)
        try:
            future = self._pool.submit(_work, message)
        except (BrokenProcessPool, RuntimeError) as error:  # RuntimeError: after its end
            raise self._lost(what, error) from error
        found = self._result(what, future)
        self._num_lost = 0
        if name == "encode":
            segments = [each.segment for each in found if isinstance(each, EncodedRollout)]
            self._held |= {segment.key: segment for segment in segments}
        return found

    def _result(self, what: str, future: Future[Any]) -> Any:
        try:
            return future.result(_ANSWER_S)
        except (TimeoutError, CancelledError, BrokenProcessPool) as error:
            raise self._lost(what, error) from error
        except Exception as error:  # raised again, or told as what the start failed of
            if future is not self._ready:
                raise
            self.interrupt()  # another process would load no better, and no row is to blame
            raise PreprocessorLost(
                f"the preprocessing process must be able to {what}, got {type(error).__name__}: {error}; if it is well "
                "with stage2_ab.channel_b.preprocessing: thread, something that the learner loads does not reach it: "
                "make that importable by name"
            ) from error

    def _lost(self, what: str, error: BaseException) -> PreprocessorLost:
        """Ends the process and starts another, unless it is of no use any more."""
        why = f"did not answer within {_ANSWER_S} s: the machine or its file system is too slow for it"
        if not isinstance(error, TimeoutError):
            self._process.join(_END_S)
            status = self._process.exitcode
            why = "lives on but cannot be talked to" if status is None else describe_end(status)
            if status == -signal.SIGKILL:
                why += ", mostly for lack of main memory: give the machine more, lower prefetch.queue_limit"
        pid = self.pid
        self._process.kill()
        self._end()
        self._held.clear()
        self._num_lost += 1
        with self._changing:
            self._is_over |= self._num_lost >= _MOST_LOST
            if not self._is_over:
                self._start()
        return PreprocessorLost(
            f"the preprocessing process must live as long as its rank, but pid={pid} {why}, or write "
            f"stage2_ab.channel_b.preprocessing: thread (it was to {what}; {type(error).__name__})"
        )


def _pickled(message: Any) -> bytes:
    try:
        return pickle.dumps(message)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            "what goes to the preprocessing process must be picklable",
            got=f"{type(error).__name__}: {error}",
            remedy="write stage2_ab.channel_b.preprocessing: thread, or define the classes of rows and template in a "
            "module, not in __main__ or a function",
        ) from error


def _plugins() -> dict[str, str]:
    """Files that ms-swift has imported as ``external_plugins``, by the names that it gives them."""
    loaded = list(sys.modules.items())  # at once: other threads import
    plugins = {name: module for name, module in loaded if name.startswith(PLUGIN_PREFIX)}
    return {name: file for name, module in plugins.items() if (file := getattr(module, "__file__", None))}


# --- in the process --------------------------------------------------------------------------------------------------


_preprocessor: Preprocessor
_file = -1  # of the latest pack; its reader has opened it when something else is asked


def _set_up(parts: bytes, plugins: Mapping[str, str]) -> None:
    global _preprocessor
    declare_operators()  # before the template imports torchvision
    torch.serialization.set_crc32_options(False)
    encoder, task = _PartsUnpickler(parts, plugins).load()
    encoder.attach_model()
    _preprocessor = Preprocessor(encoder, task)


def _work(message: bytes) -> Any:
    """Calls a method of the preprocessor. A pack comes without its batch, and with the memory file of it."""
    global _file
    name, arguments, settings = pickle.loads(message)
    if _file >= 0:
        os.close(_file)
        _file = -1
    found = getattr(_preprocessor, name)(*arguments, **settings)
    if name == "pack":
        _file = os.memfd_create("swift_stage2-batch", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(_file), "wb") as file:
            torch.save(found.batch, file)
        found = replace(found, batch={}), f"/proc/{os.getpid()}/fd/{_file}"
    return found


class _PartsUnpickler(pickle.Unpickler):
    """Imports a user's file as the rank did, once something in it is needed; other plugins stay unloaded."""

    def __init__(self, parts: bytes, plugins: Mapping[str, str]) -> None:
        super().__init__(io.BytesIO(parts))
        self._plugins = plugins

    def find_class(self, module: str, name: str) -> Any:
        if module in self._plugins and module not in sys.modules:
            spec = importlib.util.spec_from_file_location(module, self._plugins[module])
            assert spec is not None, self._plugins[module]
            assert spec.loader is not None, self._plugins[module]
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
        return super().find_class(module, name)
