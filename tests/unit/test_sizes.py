"""No room grows out of hand: files of at most 400 lines, functions of at most 60. `make check` runs this, too."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "memtrain"


def test_files_and_functions_are_short() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    sizes = {str(path): len(text.splitlines()) for path, text in files.items()}
    assert len(sizes) > 90
    assert {path: lines for path, lines in sizes.items() if lines > 400} == {}
    nodes = ((path, node) for path, text in files.items() for node in ast.walk(ast.parse(text)))
    functions = [n for n in nodes if isinstance(n[1], ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [(str(p), f.name) for p, f in functions if f.end_lineno - f.lineno >= 60]
    assert long == []
