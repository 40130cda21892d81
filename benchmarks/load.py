"""Loading a Hugging Face folder of 1.1 B parameters: host peak and time, against safetensors' own load and copy.

    python benchmarks/load.py [--save]

A Llama of TinyLlama's sizes is written as bf16 shards into a temporary folder. Each way loads it in a process of its
own, in turn; files are in the page cache. Ours reads rows into the parameters; the other is `load_file` of each shard
and a copy into a model of the same type. Peaks are those of anonymous memory (RssAnon of proc(5)), less what the
process had before.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from measure import print_rows, save_result

from memtrain.model.pretrained.export import tensors_as, write_folder
from memtrain.model.pretrained.families import FAMILIES, find_family, shapes_of
from memtrain.model.pretrained.load import Source
from memtrain.model.transformer import make_transformer
from memtrain.units import GIB

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
}
SMALL = {"vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 8}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GOALS = {"peak": 1.10, "time": 1.2}
PAIRS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument(
        "--child", nargs=3, metavar=("WAY", "TYPE", "FOLDER"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.child:
        way, dtype, folder = arguments.child
        print(json.dumps(measured(way, TYPES[dtype], Path(folder))))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write(folder)
        results = {dtype: compare(dtype, folder) for dtype in TYPES}
    columns = ("type", "model GiB", "peak / model", "goal", "seconds", "against load_file", "goal")
    rows = [
        (dtype, f"{r['model_bytes'] / GIB:.2f}", f"{r['peak']:.3f}", f"{GOALS['peak']}",
         f"{r['seconds_s']:.2f}", f"{r['time']:.2f}", f"{GOALS['time']}")
        for dtype, r in results.items()
    ]  # fmt: skip
    print_rows("loading 1.1 B parameters", columns, rows)
    if arguments.save:
        print(save_result("load", ("torch", "safetensors"), results))


def write(folder: Path) -> None:
    dimensions = FAMILIES["llama"].dimensions(CONFIG)
    model = make_transformer(dimensions, CPU, torch.bfloat16)
    parameters = dict(model.named_parameters())
    rows = FAMILIES["llama"].rows(dimensions)
    tensors = tensors_as(rows, shapes_of(dimensions), torch.bfloat16, lambda n: parameters[n])
    write_folder(folder, CONFIG, tensors, shard_bytes=10**9)


def compare(dtype: str, folder: Path) -> dict[str, float]:
    """Medians over `PAIRS` turns, a first one thrown away."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for turn in range(PAIRS + 1):
        for way in sorted(found, reverse=bool(turn % 2)):
            command = [sys.executable, __file__, "--child", way, dtype, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way].append(json.loads(done.stdout))
    ours, theirs = (
        {key: statistics.median(one[key] for one in found[way][1:]) for key in found[way][0]}
        for way in ("ours", "theirs")
    )
    return {
        "model_bytes": ours["model_bytes"],
        "peak": ours["peak_bytes"] / ours["model_bytes"],
        "their_peak": theirs["peak_bytes"] / ours["model_bytes"],
        "seconds_s": ours["seconds_s"],
        "time": ours["seconds_s"] / theirs["seconds_s"],
    }


def measured(way: str, dtype: torch.dtype, folder: Path) -> dict[str, float]:
    make_transformer(FAMILIES["llama"].dimensions(CONFIG | SMALL), CPU)  # what torch imports for it
    before, watch = anonymous_bytes(), Watch()
    start_s = time.perf_counter()
    with watch:
        model = (load_ours if way == "ours" else load_theirs)(dtype, folder)
    seconds_s = time.perf_counter() - start_s
    size = sum(p.nbytes for p in model.parameters())
    return {"seconds_s": seconds_s, "peak_bytes": watch.peak - before, "model_bytes": size}


def load_ours(dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    source = Source(folder)
    family = find_family(source.config)
    dimensions = family.dimensions(source.config)
    rows = family.rows(dimensions)
    source.check(rows, shapes_of(dimensions))
    return make_transformer(dimensions, CPU, dtype, source.filler(rows))


def load_theirs(dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """Into parameters of the same shapes as in the files."""
    from safetensors.torch import load_file

    model = torch.nn.ParameterDict()
    for shard in sorted(folder.glob("*.safetensors")):
        for name, values in load_file(shard).items():
            made = torch.empty(values.shape, dtype=dtype).copy_(values)
            model[name.replace(".", "/")] = torch.nn.Parameter(made)
    return model


class Watch:
    """The peak of anonymous memory while it is entered, looked at a thousand times a second."""

    def __enter__(self) -> None:
        self.peak, self._done = anonymous_bytes(), False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._done:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.001)

    def __exit__(self, *error: object) -> None:
        self._done = True
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
