"""Whatever is typed or written into a config file ends as a run or as one line of refusal, never as a traceback.

Each example is the real command in a process of its own, forked from one that has imported everything (train_server).
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import ROOT, Finished, Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONF = ROOT / "conf"
LIMIT_S = 60
TINY = ["debug=tiny", "device=cpu", "steps=1", "plan=off"]

QUICK = settings(
    max_examples=8, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
N_MANY = int(os.environ.get("FUZZ_EXAMPLES", "120"))
"""Of the slow tests together, the same every time; FUZZ_EXAMPLES=2010 takes a quarter of an hour."""
MANY = settings(QUICK, max_examples=N_MANY // 3)

# --- what is typed ------------------------------------------------------------------------------------------------


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """`{"a": 1, "b": {"c": 2}}` -> {"a": 1, "b.c": 2}"""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found


BASE = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
DEFAULTS = leaves({key: BASE[key] for key in BASE if key not in ("defaults", "hydra")})
CHOICES = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in ("model", "local")
)
GROUPS = sorted({choice.split("=")[0] for choice in CHOICES} | {"model"})
# Would write elsewhere or take minutes, which is right but not what is tried here.
SPARED = ("data.cache_dir", "hydra.", "plan", "compile", "task")
TAKES_LONG = {"accum", "steps", "n_layers", "micro_batch", "eval_sequences", "tokens"}
LIMITED = {"ffn_dim", "dim", "n_heads", "n_kv_heads", "vocab_size", "seq_len", "max_seq_len", "prefetch"}  # fmt: skip
SMALL = ("-1", "0", "1", "2", "3", "4", "7", "16", "33")
HUGE = ("100000000000", "9007199254740993", "9223372036854775807", "9223372036854775808", "1" + 60 * "0",
        "-1" + 60 * "0")  # fmt: skip
ODD = (
    "null", "true", "false", "on", "off", "nan", "inf", "-inf", "1e400", "1e-400", "1.5", "-0.0", "1_0", "0x10", "007",
    "", "''", '""', "' '", "'", '"', "'a", "\\", "=", "a=b", "a,b", "1,2", ",", "[]", "[1]", "[1,2]", "[a,b]", "[null]",
    "[[1]]", "[0.9,0.95]", "[0.9,1e9]", "{}", "{a:1}", "{a:{b:c}}", "{a:1", "[1", "]", "(", "choice(1,2)", "range(3)",
    "glob(*)", "glob(*", "interval(0,1)", "str(1)", "int(a)", "float(2)", "json_str(1)", "shuffle([1,2])",
    "extend_list(1)",
    "${seed}", "${absent}", "${", "}", "${name}", "${model.dim}", "${hydra:job.num}", "${oc.env:ABSENT_VARIABLE}",
    "${oc.env:HOME}", "${oc.decode:'['}", "${absent:1}", "${project_root:}", "${.}", "${..a}", "$", "$$",
    "???", "_", "~",
    "é", "世界", "😀", "\u202e", "\udcff", "\t", "\n", "a\nb", " ", "a b", "#", "a#b", "%s", "{}%",
    "!!python/none x", "../x",
    "/", "/proc", "/dev/null", "absent/absent", ".", "..", "all", "every 2", "every 0", "last 1", "0-1", "3-1",
    "blocks.*",
    "[", "fit", "latest", "recompute", "[keep,keep,keep,keep]", "[keep]", "x" * 300,
)  # fmt: skip


def value_of(key: str) -> st.SearchStrategy[str]:
    own = key.rpartition(".")[2]
    numbers = (*SMALL, *(HUGE[1:] if own in TAKES_LONG else HUGE))
    if own not in TAKES_LONG | LIMITED:
        numbers = (*numbers, "1000", "65536", "1e-9", "0.5", "0.999", "1e30")
    words = st.text(st.characters(exclude_characters="\0"), max_size=6)
    return st.sampled_from(numbers) | st.sampled_from(ODD) | words


def is_tried(key: str) -> bool:
    return not key.startswith(SPARED)


@st.composite
def overrides(draw: Callable[..., Any]) -> str:
    known = st.sampled_from(sorted(filter(is_tried, DEFAULTS)))
    key = draw(known | known | known | st.sampled_from(GROUPS) | st.text(max_size=5).map(cleaned))
    forms = {
        "set": f"{key}={draw(value_of(key))}",
        "choice": draw(st.sampled_from(CHOICES)),
        "add": f"{draw(st.sampled_from(['+', '++', '+++']))}{key}={draw(value_of(key))}",
        "remove": f"~{key}{draw(st.sampled_from(['', '=1', '=', '=null']))}",
        "inside": f"{key}.{draw(st.sampled_from(['a', '0', '', 'b.c']))}={draw(value_of(key))}",
        "package": f"{key}@{draw(st.sampled_from(['model', '', 'x.y', '_global_']))}={draw(value_of(key))}",
        "bare": draw(st.sampled_from([key, f"{key}=", f"={key}", "=", "", "+", "~", "--", "-"])),
        "task": draw(st.sampled_from(["task=generate", "task=numerics", "task=fly"])),
    }
    often = ["set"] * 5 + ["choice"] * 3
    return forms[draw(st.sampled_from([*often, *forms]))]


def cleaned(key: str) -> str:
    """A word of a command line: has no NUL, and is no flag of Hydra's."""
    return key.replace("\0", "").lstrip("-")


FLAGS = ("--cfg=job", "--cfg=all", "--cfg=x", "--resolve", "--help", "--info", "--info=defaults", "--absent", "-x",
         "--hydra-help", "--version", "-c", "--config-name=absent", "--config-dir=absent",
         "--config-path=absent")  # fmt: skip


FITTING = [
    *CHOICES, "accum=2", "micro_batch=3", "seq_len=8", "seq_len=1", "checkpoint_every=2", "clip=0",
    "clip=1e-30", "seed=7",
    "model.dropout=0.5", "model.n_kv_heads=1", "model.norm=rmsnorm", "model.activation=swiglu", "model.positions=rope",
    "model.tied=false", "model.bias=false", "model.mlp_chunks=3", "model.train_only=last 1", "model.vocab_size=1000",
    "model.dim=2", "model.ffn_dim=1", "data.prefetch=0", "data.shuffle=false", "data.val_fraction=0", "steps=3",
    "optimizer.lr=1e30", "optimizer.lr=1e-30", "optimizer.in_backward=true", "optimizer.weight_decay=1e30",
    "optimizer.eps=1e-300", "optimizer.eps=1e30", "optimizer.betas=[0,0]", "optimizer.max_skipped=1",
    "optimizer.momentum=1",
    "precision.loss_scale=1e30", "precision.loss_scale=1e300", "precision.scale_growth_every=1",
    "precision.gradients=bf16",
    "precision.master_weights=false", "precision.tf32=true", "offload.gradients=true", "offload.optimizer_fraction=0.5",
    "offload.min_tensor_bytes=0", "offload.nvme_dir=.", "offload.blocks=0", "offload.activations_fraction=0.3",
    "save_every=1", "keep=-1", "keep=0", "eval_every=1", "eval_sequences=1", "log_every=1000", "deterministic=true",
    "schedule.warmup=0", "schedule.min_ratio=0", "loss.chunk_mib=1", "loss.label_smoothing=1", "loss.z_loss=1e30",
    "checkpointing.keep=[]", "checkpointing.matmul_fraction=0", "checkpointing.blocks=first 2",
    "resume=latest", "name=x",
    "task=numerics", "numerics.steps=0", "sweep.metric=final_loss", "tokenizer.path=absent", "data.path=absent",
    "model.ffn_dim=1000000000", "model.max_seq_len=1000000000", "data.vocab_size=60", "steps=1000000000000",
    "device=auto", "gpu.auto=true", "gpu.name=", "gpu.memory_mib=0", "generate.tokens=4", "hydra.job.chdir=true",
]  # fmt: skip


@st.composite
def command_lines(draw: Callable[..., Any]) -> list[str]:
    """All of it possible, or some of it odd."""
    words = draw(st.lists(st.sampled_from(FITTING), max_size=4))
    if not words or draw(st.booleans()):
        words += draw(st.lists(overrides(), min_size=1, max_size=3))
    if draw(st.integers(0, 9)) == 0:
        words += words[:1]
    if draw(st.integers(0, 19)) == 0:
        words.append(draw(st.sampled_from(FLAGS)))
    if draw(st.integers(0, 19)) == 0:  # a sweep whose jobs cannot even be listed
        words += [
            "-m",
            draw(
                st.sampled_from(["steeps=1,2", "optimizer=adam,sgd", "seed=choice(", "seed=range("])
            ),
        ]
    return words  # fmt: skip


# --- what is written ----------------------------------------------------------------------------------------------

BITS = (
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\t", b"\n", b":", b": ", b"- ", b"{", b"}", b"[", b"]", b"'", b'"',
    b"#", b"&a ",
    b"*a", b"!!python/object/apply:os.system ['true']", b"!!int x", b"!x y", b"%TAG", b"---\n", b"...\n", b"? ", b"| ",
    b"> ", b"<<: 1\n", b"null", b"${", b"${seed}", b"${absent}", b"@", b"`", b"1e999", b"0o7", b".inf", b"2001-01-01",
    b"\xe2\x80\xa8", "é".encode(), b"steps: 2\n", b"model: 1\n", b"model: null\n", b"model:\n  dim: x\n", b"1: 2\n",
    b"null: 1\n", b"true: 1\n", b"seed: [1]\n", b"seed: {a: 1}\n", b"seed: 1.5\n", b"defaults: 1\n",
    b"defaults: []\n", b"defaults:\n  - absent\n", b"defaults:\n  - override /model: absent\n",
    b"defaults:\n  - _self_\n",
    b"defaults:\n  - override /precision: bf16\n", b"# @package x.y\n", b"# @package _global_\n", b"hydra: 1\n",
    b"data:\n  path: [1, null]\n", b"optimizer: {betas: [0.9, null]}\n", b"[1, 2]", b"text", b"name: 2001-01-01\n",
    b"name: !!binary aGFsbG8=\n", b"seed: !!set {a}\n",
)  # fmt: skip


def mutated(text: bytes) -> st.SearchStrategy[bytes]:
    """`text` with pieces put in, cut out or doubled."""
    place = st.integers(0, len(text))
    edit = st.tuples(place, st.integers(0, 30), st.sampled_from(BITS) | st.binary(max_size=3))

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        found = text
        for start, cut, piece in edits:
            found = found[:start] + piece + found[start + cut * (cut % 3 == 0) :]
        return found

    return st.lists(edit, min_size=1, max_size=3).map(apply)


OWN = b"# @package _global_\nsteps: 1\nseed: 3\nmodel:\n  dropout: 0.1\n"


@st.composite
def own_files(draw: Callable[..., Any]) -> tuple[str, bytes]:
    """A path in a folder of one's own, chosen by it, and the text."""
    path = draw(
        st.sampled_from(["local/default", "experiment/mine", "schedule/mine", "optimizer/mine"])
    )
    text = draw(mutated(OWN) | st.lists(st.sampled_from(BITS), max_size=3).map(b"".join))
    return path, text  # fmt: skip


# --- how it may end -----------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Where the commands run, and what runs them."""

    folder: Path
    server: Server

    def run(self, argv: list[str]) -> Finished:
        out, outputs = self.folder / "out", self.folder / "outputs"
        places = [f"hydra.run.dir={out}", f"hydra.sweep.dir={out}"]
        argv = [*argv, *places, f"outputs={outputs}", f"data.cache_dir={self.folder}/cache"]
        found = self.server.start(argv, self.folder / "cwd", out).finish(LIMIT_S)
        shutil.rmtree(out, ignore_errors=True)
        return found


@pytest.fixture(scope="module")
def place(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Without os.chdir: what a run leaves outside its folder would be found in `cwd`."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "cwd").mkdir()
    return Place(folder, server)


def check_end(argv: list[str], found: Finished) -> None:
    """Done, out of memory, not finite, or refused: with exactly one line that says why."""
    code, stderr = found.returncode, found.stderr
    assert "Traceback" not in found.stdout + stderr, (argv, stderr)
    assert code in (0, 2, 3, 4), (argv, code, stderr)
    if code:
        lines = stderr.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert errors == lines[-1:] and len(errors[0]) > len("error: "), (argv, stderr)


def try_command(place: Place, words: list[str]) -> None:
    argv = [*TINY, *words]
    check_end(argv, place.run(argv))


def try_own_file(place: Place, path: str, text: bytes) -> None:
    folder = place.folder / "own"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / path).parent.mkdir(parents=True)
    (folder / f"{path}.yaml").write_bytes(text)
    chosen = [] if path.startswith("local") else [path.replace("/", "=")]
    argv = [*TINY, f"--config-dir={folder}", *chosen]
    found = place.run(argv)
    check_end([*argv, repr(text)], found)


def try_config_file(place: Place, text: bytes) -> None:
    folder = place.folder / "conf"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for group in CONF.iterdir():
        if group.is_dir():
            (folder / group.name).symlink_to(group)
    (folder / "config.yaml").write_bytes(text)
    argv = [*TINY, f"--config-path={folder}"]
    found = place.run(argv)
    check_end([*argv, changed(text)], found)


def changed(text: bytes) -> str:
    before = (CONF / "config.yaml").read_bytes().splitlines()
    return repr([line for line in text.splitlines() if line not in before])


CONFIG_TEXT = (CONF / "config.yaml").read_bytes()


def test_flags_may_stand_anywhere(place: Place) -> None:
    found = place.run(["--cfg", "job", *TINY, "--resolve", "seed=1"])
    assert (found.returncode, found.stderr) == (0, "")
    assert yaml.safe_load(found.stdout)["seed"] == 1
    among = place.run([*TINY, "--cfg", "job", "seed=1", "--resolve"])
    assert among.stdout.splitlines()[:40] == found.stdout.splitlines()[:40]
    wrong = place.run([*TINY, "--absent", "seed=1"])
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: --absent: unknown flag;")


@pytest.mark.parametrize("size", ["model.ffn_dim=1000000000", "model.dim=1000000000"])
def test_a_host_without_room(place: Place, size: str) -> None:
    found = place.run([*TINY, size])
    assert found.returncode == 3
    assert "Traceback" not in found.stderr
    assert found.stderr.splitlines()[-1].startswith("error: ")


@given(command_lines())
@QUICK
def test_command_lines(place: Place, words: list[str]) -> None:
    try_command(place, words)


@pytest.mark.slow
@given(command_lines())
@MANY
def test_many_command_lines(place: Place, words: list[str]) -> None:
    try_command(place, words)


@pytest.mark.slow
@given(own_files())
@MANY
def test_many_files_of_ones_own(place: Place, own: tuple[str, bytes]) -> None:
    try_own_file(place, *own)


@pytest.mark.slow
@given(mutated(CONFIG_TEXT))
@MANY
def test_many_edits_of_the_config_file(place: Place, text: bytes) -> None:
    try_config_file(place, text)
