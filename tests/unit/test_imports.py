"""Dependencies point one way, in both languages, and the engine core never prints, exits or reads the environment.

Each room below names the rooms it may use; itself and the shared base always. A file in a room that is not listed
fails too: a new room states its place here first.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# C++: a room is a folder under engine/. `include` (engine/include) is the public face, `front` the files of engine/
# itself: main, the protocol, the serve loop.
ENGINE = {
    "include": set[str](),
    "util": set[str](),
    "quant": {"util"},
    "kernels": {"quant", "util"},
    "io": {"util"},
    "experts": {"io", "util"},
    "vault": {"experts", "io", "quant", "util"},
    "blocks": {"kernels", "experts", "quant", "util"},
    "core": {"blocks", "kernels", "experts", "vault", "quant", "io", "util"},
    "front": {"core", "util"},
    "bindings": {"core", "blocks", "kernels", "experts", "vault", "quant", "io", "util", "front"},
}
ENGINE_BASE = {"include"}
ENGINE_CORE = ("core", "blocks", "experts", "vault", "quant", "io", "kernels", "util")

# Python: a room is a folder or a module of smoe_cli.
PACKAGE = {
    "errors": set[str](),
    "settings": set[str](),
    "sizes": set[str](),
    "tables": set[str](),
    "console": {"sizes"},
    "families": set[str](),
    "engine": set[str](),
    "registry": {"_core"},
    "convert": {"families", "registry", "_core"},
    "profile": {"engine"},
    "chat": {"engine", "registry", "console", "profile"},
    "bench": {"chat", "engine", "registry", "_core"},
    "serve": {"chat", "engine", "registry"},
    "commands": {"serve", "chat", "bench", "profile", "convert", "families", "engine", "registry", "console", "_core"},
    "main": {"commands", "console"},
    "__main__": {"main"},
    "__init__": set[str](),
}
PACKAGE_BASE = {"errors", "settings", "sizes", "tables", "__init__"}

FORBIDDEN = re.compile(
    r"\b(?:std::)?(?:printf|fprintf|vprintf|vfprintf|puts|fputs|putchar|perror|syslog|cout|cerr|clog|exit|_exit|_Exit|"
    r"quick_exit|abort|terminate|getenv|secure_getenv|setenv|environ)\b(?=\s*[(<;])"
)


# -- C++ --------------------------------------------------------------------------------------------------------------


def engine_room(file: Path, engine: Path) -> str:
    parts = file.relative_to(engine).parts
    if len(parts) > 1:
        return parts[0]
    return "bindings" if parts[0] == "bindings.cpp" else "front"


def included(file: Path, engine: Path) -> Iterator[tuple[int, Path]]:
    """(line number, file under engine/) of each quoted include that is ours."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match:
            continue
        for base in (engine, engine / "include", file.parent):
            target = (base / match[1]).resolve()
            if target.is_file() and target.is_relative_to(engine.resolve()):
                yield number, target
                break


def engine_files(engine: Path) -> list[Path]:
    return sorted(path for path in engine.rglob("*") if path.suffix in (".h", ".cpp"))


def engine_faults(engine: Path) -> list[str]:
    faults = []
    for file in engine_files(engine):
        room = engine_room(file, engine)
        if room not in ENGINE:
            faults.append(f"{file.relative_to(engine)}: no such room is listed here")
            continue
        for number, target in included(file, engine):
            other = engine_room(target, engine.resolve())
            if other not in ENGINE[room] | ENGINE_BASE | {room}:
                faults.append(f"{file.relative_to(engine)}:{number}: {room} -> {other} ({target.name})")
    return faults


def code_of(text: str) -> str:
    """C++ source with comments and literals blanked, line numbers kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
    return pattern.sub(lambda match: "\n" * match[0].count("\n") or " ", text)


def core_faults(engine: Path) -> list[str]:
    faults = []
    for file in engine_files(engine):
        if engine_room(file, engine) not in ENGINE_CORE:
            continue
        for number, line in enumerate(code_of(file.read_text(encoding="utf-8")).splitlines(), 1):
            if match := FORBIDDEN.search(line):
                faults.append(f"{file.relative_to(engine)}:{number}: {match[0]}")
    return faults


# -- Python -----------------------------------------------------------------------------------------------------------


def package_room(module: str) -> str:
    """The room of a dotted module name below smoe_cli: ``smoe_cli.chat.session`` -> ``chat``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(file: Path, package: Path) -> str:
    parts = list(file.relative_to(package.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imported(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line number, dotted name below smoe_cli) of each import, wherever in the file it stands."""
    module = module_of(file, package).split(".")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                depth = node.level - (1 if file.name == "__init__.py" else 0)
                base = module[: len(module) - depth] + base
            # `from smoe_cli import x`: x may be a room, or a name of the package itself
            names = [".".join([*base, alias.name]) if base == ["smoe_cli"] else ".".join(base) for alias in node.names]
        for name in names:
            if name.split(".")[0] == "smoe_cli":
                is_name = name.count(".") == 1 and name.split(".")[1].startswith("__")
                yield node.lineno, "smoe_cli" if is_name else name


def package_faults(package: Path) -> list[str]:
    faults = []
    for file in sorted(package.rglob("*.py")):
        room = package_room(module_of(file, package))
        where = file.relative_to(package.parent)
        if room not in PACKAGE:
            faults.append(f"{where}: no such room is listed here")
            continue
        for number, name in imported(file, package):
            other = package_room(name)
            if other not in PACKAGE[room] | PACKAGE_BASE | {room}:
                faults.append(f"{where}:{number}: {room} -> {other}")
    return faults


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Rooms that reach themselves; empty when the edges point one way."""

    def reach(room: str, seen: set[str]) -> set[str]:
        for other in edges.get(room, set()) - seen:
            seen.add(other)
            reach(other, seen)
        return seen

    return [room for room in edges if room in reach(room, set())]


# -- the tests --------------------------------------------------------------------------------------------------------


def test_the_allowed_edges_have_no_cycle() -> None:
    assert cycle(ENGINE) == []
    assert cycle(PACKAGE) == []
    assert cycle({"a": {"b"}, "b": {"a"}, "c": set()}) == ["a", "b"]


def test_includes_point_one_way() -> None:
    assert engine_faults(ROOT / "engine") == []


def test_imports_point_one_way() -> None:
    assert package_faults(ROOT / "smoe_cli") == []


def test_the_engine_core_is_silent() -> None:
    assert core_faults(ROOT / "engine") == []


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_reverse_include_is_found(tmp_path: Path) -> None:
    engine = write(
        tmp_path,
        {
            "include/smoe/model.h": "",
            "core/engine.h": '#include "smoe/model.h"\n#include "blocks/moe.h"\n',
            "blocks/moe.h": '#include <vector>\n\n  # include "core/engine.h"\n',
            "attic/x.h": "",
        },
    )
    assert engine_faults(engine) == [
        "attic/x.h: no such room is listed here",
        "blocks/moe.h:3: blocks -> core (engine.h)",
    ]


@pytest.mark.parametrize(
    "line",
    [
        'std::cerr << "x";',
        'fprintf(stderr, "x");',
        "exit(1);",
        'const char* p = std::getenv("HOME");',
        "std::abort ();",
    ],
)
def test_a_talking_core_is_found(tmp_path: Path, line: str) -> None:
    engine = write(
        tmp_path, {"core/a.cpp": f'// exit(0) in a comment\nauto s = "getenv(";\n{line}\n', "main.cpp": line}
    )
    assert [fault.split(": ")[0] for fault in core_faults(engine)] == ["core/a.cpp:3"]


@pytest.mark.parametrize("line", ["snprintf(buf, 9, x);", "int exit_code = 0;", "on_exit_of(x);", "x.abort_count();"])
def test_a_silent_core_is_left_alone(tmp_path: Path, line: str) -> None:
    assert core_faults(write(tmp_path, {"core/a.cpp": line})) == []


def test_a_reverse_import_is_found(tmp_path: Path) -> None:
    package = write(
        tmp_path / "smoe_cli",
        {
            "__init__.py": "",
            "engine/__init__.py": "from . import process\n",
            "engine/process.py": "import json\nfrom smoe_cli.errors import X\ndef f():\n    from ..chat import x\n",
            "chat/session.py": "from smoe_cli import __version__, serve\nimport smoe_cli.engine.process\n",
            "odd.py": "",
        },
    )
    assert package_faults(package) == [
        "smoe_cli/chat/session.py:1: chat -> serve",
        "smoe_cli/engine/process.py:4: engine -> chat",
        "smoe_cli/odd.py: no such room is listed here",
    ]
