"""Rules of the source that import-linter cannot express, checked on the syntax tree of every file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "swift_stage2"
FILES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])

# Methods that wait, and how many positional arguments come before their timeout.
WAITING_METHODS = {
    "get": 1,
    "put": 2,
    "join": 0,
    "wait": 0,
    "wait_for": 1,
    "acquire": 1,
    "recv": 0,
    "result": 0,
    "communicate": 1,
}
# Modules of under 40 lines with a single importer, and why each is a file of its own.
SHORT_MODULES: dict[str, str] = {}
KNOWS_SWIFT = {
    "training/best_model.py",
    "training/sft.py",
    "training/stage2_trainer.py",
    "checks/swift_parsing.py",
    "channel_b/encoding.py",
    "checks/preparation.py",
}
KNOWS_SWIFT_FOLDERS = ("rollout_server/", "stock_proof/", "demo/", "benchmarks/")


@cache
def source_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Every node of its syntax tree."""
    return tuple(ast.walk(ast.parse(source_of(file))))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE if file.is_relative_to(PACKAGE) else ROOT).as_posix()


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def waits_for_ever(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Lines that call a waiting method without any bound."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        method = node.func.attr
        bounded = any(
            keyword.arg in ("timeout", "timeout_s", "blocking", "block") for keyword in node.keywords
        )
        if method in WAITING_METHODS and not node.args and not bounded:
            yield node.lineno, method


def test_the_rule_about_waits_finds_what_it_looks_for() -> None:
    code = "q.get()\nt.join()\nd.get('key')\n','.join(words)\ne.wait(timeout=1)\nlock.acquire(timeout=2)\nf.result()\n"
    assert list(waits_for_ever(ast.walk(ast.parse(code)))) == [(1, "get"), (2, "join"), (7, "result")]


def test_no_wait_is_without_a_deadline() -> None:
    """A comment on the line says what else bounds it."""
    assert [
        (name_of(file), line, method)
        for file in FILES
        for line, method in waits_for_ever(nodes_of(file))
        if "# deadline:" not in source_of(file).splitlines()[line - 1]
    ] == []


def test_only_collectives_imports_torch_distributed() -> None:
    users = {
        name_of(file)
        for file in FILES
        if any(name.startswith("torch.distributed") for name in imported(nodes_of(file)))
    }
    assert users == {"collectives.py"}


def test_only_a_few_places_know_ms_swift() -> None:
    users = {
        name_of(file)
        for file in FILES
        if any(name.split(".")[0] == "swift" for name in imported(nodes_of(file)))
    }
    assert {user for user in users - KNOWS_SWIFT if not user.startswith(KNOWS_SWIFT_FOLDERS)} == set()


# Readers of the kernel's files, of the package's own, and of what processes that they started themselves wrote.
OPENS_ITSELF = {
    "runtime/memory.py",
    "runtime/run_directory.py",
    "launch/launcher.py",
    "launch/rank.py",
    "launch/job.py",
    "report/content.py",
    "whole_file.py",
}


def opens_to_read(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines that read a file by its path, a pipe or device, too."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        mode = "".join(
            arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        )
        opens = name == "open" or (
            name.endswith(".open")
            and (mode.startswith("r") or any(keyword.arg == "encoding" for keyword in node.keywords))
        )
        if name.endswith((".read_text", ".read_bytes")) or (opens and not set(mode) & set("wxa+")):
            yield node.lineno


def test_the_rule_about_reading_finds_what_it_looks_for() -> None:
    code = "p.read_text()\np.read_bytes()\nopen(p)\np.open('rb')\np.open(encoding='u')\nopen(p, 'w')\np.open('x')"
    assert list(opens_to_read(ast.walk(ast.parse(code)))) == [1, 2, 3, 4, 5]


def test_files_are_opened_in_one_way() -> None:
    """By ``whole_file``: no pipe is waited for, no device is read without end."""
    assert [
        (name_of(file), line)
        for file in sorted(PACKAGE.rglob("*.py"))
        if name_of(file) not in OPENS_ITSELF and not name_of(file).startswith("demo/")
        for line in opens_to_read(nodes_of(file))
    ] == []


TELLS_OF_FILES = ("data", "checks", "evaluate", "report")


def test_text_is_printed_in_one_way() -> None:
    """By ``runtime.output``, where a command tells of files and servers: no control character of theirs is obeyed."""
    assert [
        (name_of(file), node.lineno)
        for file in sorted(PACKAGE.rglob("*.py"))
        if name_of(file) != "runtime/output.py"
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "Console" or (node.func.id == "print" and name_of(file).startswith(TELLS_OF_FILES))
    ] == []


def swallows_everything(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of handlers that catch every exception and do not raise it again."""
    for node in nodes:
        if isinstance(node, ast.ExceptHandler):
            catches_all = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if catches_all and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield node.lineno


def test_only_the_top_of_a_thread_swallows_everything() -> None:
    """A comment on the line says which top it is."""
    assert [
        (name_of(file), line)
        for file in FILES
        for line in swallows_everything(nodes_of(file))
        if "#" not in source_of(file).splitlines()[line - 1]
    ] == []


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {name_of(file): len(source_of(file).splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_two_classes_of_the_package_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def short_modules_with_one_importer() -> set[str]:
    """Modules of the package with under 40 lines, blank ones and comments left out, that one other module imports.

    A program that is started by its name and a folder's ``__init__`` have no importer of that kind.
    """
    modules = {
        file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): file
        for file in PACKAGE.rglob("*.py")
    }
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for found in imported(nodes_of(file)):
            if found in importers and found != name:
                importers[found].add(name)
    return {
        name_of(file)
        for name, file in modules.items()
        if len(importers[name]) == 1 and file.name != "__init__.py" and num_code_lines(file) < 40
    }


def num_code_lines(file: Path) -> int:
    lines = (line.strip() for line in source_of(file).splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def test_a_short_module_with_one_importer_has_a_reason() -> None:
    """An entry of SHORT_MODULES that is no longer needed must go."""
    assert short_modules_with_one_importer() == set(SHORT_MODULES)


def test_no_module_has_a_name_that_says_nothing() -> None:
    empty = {"utils", "common", "helpers", "types", "misc", "manager"}
    assert [name_of(file) for file in FILES if file.stem in empty or file.parent.name in empty] == []


def test_the_root_of_the_package_shows_the_system() -> None:
    """At most 16 modules beside the folders; every one of both stands in the layers and on the map."""
    modules = {file.stem for file in PACKAGE.glob("*.py")}
    assert len(modules) <= 16
    parts = modules - {"__init__"} | {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    layers = (
        (ROOT / "setup.cfg").read_text(encoding="utf-8").split("[importlinter:contract:rollout_server]")[0]
    )
    pages = (ROOT / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    assert {part for part in parts if f"swift_stage2.{part}" not in layers} == set()
    assert {
        part for part in parts - {"__main__"} if f"{part}/" not in pages and f"{part}.py" not in pages
    } == set()


def test_no_record_shows_the_key() -> None:
    """A dataclass that holds it leaves it out of its ``repr``, or has none."""
    holders = [
        (
            f"{name_of(file)}:{line.lineno}",
            ast.unparse(line),
            [ast.unparse(each) for each in node.decorator_list],
        )
        for file in FILES
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target).endswith("api_key")
    ]
    assert holders
    hidden = "repr=False"
    assert [
        where
        for where, field, decorators in holders
        if hidden not in field and not any(hidden in each for each in decorators)
    ] == []
