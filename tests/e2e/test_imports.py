"""A refusal does not wait for what it does not need."""

import subprocess
import sys
from pathlib import Path

from command import ENVIRONMENT, ROOT

PROGRAM = """
import sys
from memtrain.__main__ import main

HEAVY = {"torch", "numpy", "matplotlib", "tensorboard", "tokenizers", "transformers", "optuna"}
for words in sys.argv[1:]:
    sys.argv[1:] = words.split()
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    print("imported", code, *sorted(HEAVY & sys.modules.keys()), flush=True)
"""


def test_what_is_refused_needs_no_torch(tmp_path: Path) -> None:
    """Foreign words, what Hydra cannot compose, rules between fields; a run, a plan, a sweep; and help."""
    commands = {
        "--learning_rate 1e-4": 2,
        "--help": 0,
        "steeps=3": 2,
        "optimizer=foo": 2,
        "optimizer.betas=[0.9": 2,
        "debug=tiny model.n_heads=3 outputs=out": 2,
        "task=plan checkpointing=sqrt checkpoint_every=2 outputs=out": 2,
        "-m debug=tiny model.n_heads=3,5 name=aa,bb outputs=out": 1,
    }
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *commands],
        cwd=tmp_path,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("imported")]
    assert lines == [f"imported {code}" for code in commands.values()], finished.stderr
