"""A communicator of one rank on NCCL's own library: torch offers no abort that returns, and vLLM may not be there."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from swift_stage2.errors import CheckFailed

_UINT8 = 1  # ncclUint8


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class LoneNccl:
    """On ``device``; ``broadcast`` and ``destroy`` are called as vLLM's communicator's are."""

    rank = 0

    def __init__(self, device: torch.device) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._communicator = ctypes.c_void_p()
        number = ctypes.c_int()
        self._check(self._nccl.ncclGetVersion(ctypes.byref(number)))
        self.version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
        unique = _UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        with torch.cuda.device(device):
            self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._communicator), 1, unique, 0))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        """Queues a broadcast of a contiguous uint8 tensor on ``stream``."""
        memory = ctypes.c_void_p(tensor.data_ptr())
        self._check(
            self._nccl.ncclBroadcast(
                memory, memory, ctypes.c_size_t(tensor.numel()), _UINT8, src, self._communicator,
                ctypes.c_void_p(stream.cuda_stream),
            )
        )  # fmt: skip

    def destroy(self) -> None:
        """NCCL's abort."""
        self._check(self._nccl.ncclCommAbort(self._communicator))

    def _check(self, status: int) -> None:
        if status != 0:
            raise CheckFailed(f"NCCL failed: {self._nccl.ncclGetErrorString(status).decode()}")
