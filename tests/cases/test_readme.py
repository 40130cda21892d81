"""The table of cases has each once, and names tests that exist; each test here is in it."""

import re
from pathlib import Path

from command import ROOT

HERE = Path(__file__).parent
ROW = re.compile(r"\| (B\d\d) \| [^|]+ \| ([^|]+) \|")


def test_the_table_and_the_files_agree() -> None:
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [match.groups() for line in lines if (match := ROW.fullmatch(line))]
    numbers = [number for number, _ in rows]
    assert len(numbers) == 53 and numbers == sorted(set(numbers))
    named: dict[str, list[str]] = {}
    for number, test in rows:
        named[number] = re.findall(r"`(\S+)`", test)
        assert named[number] or test.startswith("waits for "), number
        for path in named[number]:
            assert ((ROOT if "/" in path else HERE) / path).is_file(), path
    files = {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}
    own = [path for paths in named.values() for path in paths if "/" not in path]
    assert set(own) == files and len(own) == len(files)
