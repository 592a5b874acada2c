"""The packages that a machine with nothing but torch and its neighbours lacks, as folders of wheels.

Collected where a package registry is, installed where none is: into a private directory, and only what is not there.
vLLM's own wheel is larger than what travels at once: repacked without what is not needed, it goes in pieces.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from swift_stage2.errors import UserError

MOST_BYTES = 48 << 20  # 64 MiB travel at once, the working tree with them
PYTHON_VERSION = "3.12"
# Learner and server import these beside torch, transformers, accelerate. Declared needs of ms-swift that they
# never import (oss2, nltk, openai, …) are left out.
PINNED = (
    "annotated-doc==0.0.7", "annotated-types==0.8.0", "cffi==2.1.1", "cryptography==50.0.2", "datasets==4.8.4",
    "dill==0.4.1", "einops==0.8.2", "fastapi==0.165.0", "hotcoco==1.3.0", "importlib-metadata==10.2.0",
    "json-repair==0.64.6",
    "modelscope==1.40.2", "modelscope-hub==0.5.1", "ms-swift==4.6.0", "multiprocess==0.70.19",
    "opentelemetry-api==1.45.2", "peft==0.20.0", "psutil==7.2.2", "pycparser==3.12", "pydantic==2.14.3",
    "pydantic-core==2.50.4", "pyyaml==6.0.3",
    "qwen-vl-utils==0.0.14", "simplejson==4.3.0", "sniffio==1.3.1", "starlette==1.10.0", "trl==0.29.1",
    "typing-inspection==0.4.5", "uvicorn==0.54.0", "xxhash==4.1.0", "zipp==4.1.2", "zstandard==0.25.0",
)  # fmt: skip
VLLM = "vllm==0.26.0"  # the newest that takes torch 2.11
# What vLLM and ms-swift's engine on it import until the first answer.
VLLM_NEEDS = (
    "apache-tvm-ffi==0.1.15.post2", "astor==0.8.1", "blake3==1.0.11", "cachetools==8.0.2", "cbor2==6.3.0",
    "compressed-tensors==0.17.0", "dacite==1.9.2", "depyf==0.20.0", "distro==1.9.0", "gguf==0.19.0",
    "httpcore2==2.16.2", "httpx2==2.16.2", "ijson==3.6.0", "interegular==0.3.3", "jiter==0.19.0",
    "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "lark==1.2.2", "llguidance==1.7.6",
    "lm-format-enforcer==0.11.3", "loguru==0.7.3", "msgspec==0.22.0", "openai==3.57.0", "openai-harmony==0.0.8",
    "outlines-core==0.2.14", "partial-json-parser==0.2.1.1.post7", "prometheus-fastapi-instrumentator==8.1.0",
    "pybase64==1.5.1", "python-json-logger==4.2.0", "python-multipart==0.0.34", "pyzmq==27.3.0",
    "referencing==0.37.0", "rpds-py==2026.9.1", "setproctitle==1.3.8", "truststore==0.10.5", "xgrammar==0.2.8",
)  # fmt: skip
# By patterns of the wheel's paths. vLLM asks for each before it uses it.
LEFT_OUT = {
    "*/_vllm_fa2_C.*": "flash attention for devices before Hopper",
    "*/_moe_C_stable_libtorch.*": "mixtures of experts",
    "*/_flashmla*.so": "attention of DeepSeek models",
    "*/_qutlass_C.*": "4-bit weights on Blackwell",
    "*/deep_gemm/*": "8-bit weights",
    "*/fmha_sm100/*": "attention on Blackwell",
    "*/vllm-rs": "a front end that is off unless asked for",
    "*/_rust_tool_parser.*": "tool calls",
    "*/instrumentator/static/*": "a page of vLLM's own server",
    "*.jpg": "a picture",
    "*/RECORD": "would name what is not there",
}
_NUM_PIECES = 2
_REPETITIVE = "*/_vllm_fa3_C.*"  # 153 MB, of which LZMA leaves 11 and Deflate 38
_PLATFORMS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
_DOWNLOAD_S = 600.0


def collect(directory: Path, python_version: str = PYTHON_VERSION) -> list[Path]:
    """Downloads ``PINNED`` for that Python on x86-64 Linux. Raises UserError as ``_download``."""
    _download(PINNED, directory, python_version)
    return [directory]


def collect_with_vllm(directory: Path, python_version: str = PYTHON_VERSION) -> list[Path]:
    """Makes folders that travel one after the other: ``PINNED`` and ``VLLM_NEEDS``, then vLLM in pieces.

    Raises UserError as ``_download``.
    """
    folders = [directory / f"part{n}" for n in range(1, 2 + _NUM_PIECES)]
    _download((*PINNED, *VLLM_NEEDS), folders[0], python_version)
    with tempfile.TemporaryDirectory() as scratch:
        _download((VLLM,), Path(scratch), python_version, most_bytes=None)
        (wheel,) = Path(scratch).glob("*.whl")
        write_pieces(wheel, folders[1:])
    return folders


def write_pieces(wheel: Path, folders: Sequence[Path]) -> list[Path]:
    """Repacks the wheel, cuts that in as many pieces, and returns them. Raises UserError: one is too large."""
    packed = _repacked(wheel)
    size = -(-len(packed) // len(folders))
    pieces = [
        folder / f"{wheel.stem}.zip.{number}of{len(folders)}" for number, folder in enumerate(folders, 1)
    ]
    for index, piece in enumerate(pieces):
        piece.parent.mkdir(exist_ok=True)
        piece.write_bytes(packed[index * size : (index + 1) * size])
        _require_small(piece.parent)
    return pieces


def _repacked(wheel: Path) -> bytes:
    """The archive without what is ``LEFT_OUT``; ``left_out.txt`` in it names each file and the reason."""
    archive, left_out = io.BytesIO(), []
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as kept:
        for entry in whole.infolist():
            reason = next(
                (why for name, why in LEFT_OUT.items() if fnmatch.fnmatch(entry.filename, name)), None
            )
            if reason is not None:
                left_out.append(f"{entry.filename} ({entry.compress_size} bytes): {reason}\n")
                continue
            dense = fnmatch.fnmatch(entry.filename, _REPETITIVE)
            kept.writestr(
                entry.filename, whole.read(entry), zipfile.ZIP_LZMA if dense else zipfile.ZIP_DEFLATED
            )
        kept.writestr(f"{wheel.stem}.left_out.txt", "".join(left_out))
    return archive.getvalue()


def install_missing(folders: Sequence[Path], private: Path) -> list[str]:
    """Unpacks those of the wheels in ``folders`` that this Python does not have into ``private``; returns their names.

    A package that the machine has is left alone, whatever its version: the check is of that machine.

    Raises:
        UserError: there is no wheel, or one cannot be unpacked, or a piece is missing.
    """
    archives: dict[str, list[Path]] = {}  # by package
    for file in sorted(file for folder in folders for file in folder.iterdir()):
        if file.suffix == ".whl" or ".zip." in file.name:
            archives.setdefault(file.name.partition("-")[0], []).append(file)
    if not archives:
        places = ", ".join(map(str, folders))
        raise UserError(
            f"--wheels must be a folder with wheels, got none in {places}; make it with --collect"
        )
    missing = [name for name in archives if installed_version(name) is None]
    for name in missing:
        _unpack(sorted(archives[name], key=lambda file: file.name), private)
    return missing


def installed_version(name: str) -> str | None:
    """None where there is no such package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unpack(files: Sequence[Path], private: Path) -> None:
    """One package's wheel, or all its pieces in order."""
    _, _, total = files[0].name.rpartition("of") if ".zip." in files[0].name else ("", "", "1")
    if len(files) != int(total):
        names = ", ".join(file.name for file in files)
        raise UserError(
            f"--wheels needs {total} pieces of one archive, got {names}; name every part's folder"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(b"".join(file.read_bytes() for file in files))) as archive:
            archive.extractall(private)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{files[0]} cannot be unpacked ({error}); collect it again") from error


def _download(
    pins: Sequence[str], directory: Path, python_version: str, most_bytes: int | None = MOST_BYTES
) -> None:
    """Raises UserError: the registry does not give them, or the folder is larger than ``most_bytes``."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--collect must be a folder that can be written, got {directory} ({error})"
        ) from error
    target = ["--python-version", python_version, "--implementation", "cp", "--only-binary=:all:"]
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    options = ["download", "--no-deps", "--quiet", "--dest", str(directory), *target, *platforms]
    _pip([*options, *pins], _DOWNLOAD_S, "wheels cannot be collected")
    if most_bytes is not None:
        _require_small(directory)


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def _require_small(folder: Path) -> None:
    if size_of(folder) > MOST_BYTES:
        raise UserError(
            f"wheels must fit in {MOST_BYTES >> 20} MiB, got {size_of(folder) >> 20} MiB in {folder}; "
            "use an empty folder"
        )


def _pip(arguments: list[str], timeout_s: float, failure: str) -> None:
    """Runs this interpreter's own pip; a process that is late is killed and reaped."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{failure}: pip did not end within {timeout_s:.0f} s; try again") from error
    if done.returncode != 0:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
        raise UserError(f"{failure}: {told[-1].strip()}")
