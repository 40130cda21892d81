"""The tasks by name."""

import torch._dynamo  # noqa: F401  torch would import it in the midst of a run

from memtrain.tasks.export import export
from memtrain.tasks.generate import generate
from memtrain.tasks.numerics import numerics
from memtrain.tasks.plan import plan
from memtrain.tasks.run import Task
from memtrain.tasks.train import train

TASKS: dict[str, Task] = {
    "train": train,
    "plan": plan,
    "generate": generate,
    "numerics": numerics,
    "export": export,
}
