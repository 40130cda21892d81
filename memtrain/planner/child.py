"""Planning in a process of its own: the phantom's device, once registered, would change what a run's torch reports.

One JSON object a line each way. The child imports and plans while the run imports torch and reads its data.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class PlannerProcess:
    """`ask` returns at once; `answer` waits. What goes wrong in the child comes back as PlanningFailed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memtrain.planner.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            cwd=ROOT,
        )

    def ask(self, kind: str, **question: Any) -> None:
        """`plan`, `suggest` for what would make it fit, or `budget` for a choice per block."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"kind": kind, **question}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says what happened

    def answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise PlanningFailed(f"the planner ended (exit code {self._process.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise PlanningFailed(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class PlanningFailed(RuntimeError):
    """The planner could not answer; a run goes on without."""


def main() -> None:
    from memtrain.planner import predict  # noqa: F401  while the run is busy elsewhere

    for line in sys.stdin:
        try:
            reply = {"result": respond(**json.loads(line))}
        except Exception as error:
            text = " ".join(str(error).split())
            reply = {
                "error": text
                if isinstance(error, ValueError)
                else f"{type(error).__name__}: {text}"
            }
        print(json.dumps(reply), flush=True)


def respond(
    kind: str,
    tree: dict[str, Any],
    vocab_size: int,
    card: dict[str, Any],
    host_bytes: int | None = None,
) -> Any:
    from dataclasses import asdict

    from memtrain.cards import Card
    from memtrain.config import parse
    from memtrain.engine.build import build_dimensions
    from memtrain.planner.budget import choose
    from memtrain.planner.fit import suggest
    from memtrain.planner.predict import make_plan

    config = parse(tree)
    dimensions, gpu = build_dimensions(config, vocab_size), Card(**card)
    if kind == "plan":
        return make_plan(config, dimensions, gpu)
    if kind == "budget":
        return asdict(choose(config, dimensions, gpu, host_bytes))
    return [asdict(found) for found in suggest(config, dimensions, gpu, host_bytes=host_bytes)]


if __name__ == "__main__":
    main()
