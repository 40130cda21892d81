"""Files from elsewhere are data: nothing in them is run, and no name leads out of the folder it is meant for."""

import ast
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command import ROOT, TINY_TEXT, Finished, Run

from memtrain.config.rules import folder_name
from memtrain.data.tokenizer import bytes_tokenizer, load_tokenizer
from memtrain.errors import UserError

SOURCES = [ROOT / "train.py", *sorted((ROOT / "memtrain").rglob("*.py"))]

# --- what the source may not say ----------------------------------------------------------------------------------

UNSAFE = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "marshal.loads", "shelve.open", "joblib.load",
    "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter",
}  # fmt: skip


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """("module.function", call) of every call in a file, as it is written."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def given(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(word.value) for word in call.keywords if word.arg == name), None)


def is_unsafe(name: str, call: ast.Call) -> bool:
    if name == "torch.load":
        return given(call, "weights_only") != "True"
    if name in ("np.load", "numpy.load", "np.memmap.load"):
        return given(call, "allow_pickle") not in (None, "False")
    if given(call, "shell") == "True" or given(call, "trust_remote_code") == "True":
        return True
    return name in UNSAFE


def test_no_source_runs_what_it_reads() -> None:
    assert len(SOURCES) > 40
    found = [
        (path.name, name) for path in SOURCES for name, call in calls(path) if is_unsafe(name, call)
    ]
    assert found == []


@pytest.mark.parametrize("module", ["pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"])
def test_no_source_imports_what_would(module: str) -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [
                name.name for name in getattr(node, "names", []) if isinstance(name, ast.alias)
            ]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert module not in {name.split(".")[0] for name in names}, path


def test_the_search_finds_what_it_looks_for() -> None:
    wrong = ("torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "eval(x)",
             "yaml.load(t, L)", "run(x, shell=True)")  # fmt: skip
    for text in wrong:
        call = ast.parse(text).body[0].value  # type: ignore[attr-defined]
        assert is_unsafe(ast.unparse(call.func), call), text


# --- what a file may not do ---------------------------------------------------------------------------------------


class Malicious:
    """Unpickled, it makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.trace),)


TRAINING = ["debug=tiny", "save_every=2", "steps=2", "name=old", "schedule=constant"]


@pytest.fixture(scope="module")
def old(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a run with a checkpoint."""
    outputs = tmp_path_factory.mktemp("old")
    finished = run(*TRAINING, outputs=outputs)
    assert finished.returncode == 0, finished.stderr
    return outputs


@pytest.fixture
def outputs(old: Path, tmp_path: Path) -> Path:
    shutil.copytree(old, tmp_path / "outputs")
    return tmp_path / "outputs"


def checkpoint_of(outputs: Path) -> Path:
    (found,) = outputs.glob("runs/old/*/checkpoints/step_*")
    return found


def replace_file(path: Path, content: bytes) -> None:
    """With another content, so that the checkpoint still looks whole."""
    path.write_bytes(content)
    meta = json.loads((path.parent / "meta.json").read_text())
    meta["sizes_bytes"][path.name] = len(content)
    (path.parent / "meta.json").write_text(json.dumps(meta))


def one_line_refusal(finished: Finished) -> str:
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "Traceback" not in finished.stdout + finished.stderr
    lines = finished.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_malicious_state_is_refused_and_not_run(
    run: Run, outputs: Path, tmp_path: Path, form: str
) -> None:
    trace, state = tmp_path / "was_run", checkpoint_of(outputs) / "state.pt"
    if form == "torch":
        torch.save({"progress": Malicious(trace)}, tmp_path / "evil")
    else:
        (tmp_path / "evil").write_bytes(pickle.dumps(Malicious(trace)))
    replace_file(state, (tmp_path / "evil").read_bytes())
    line = one_line_refusal(
        run(*TRAINING, "steps=4", f"resume={checkpoint_of(outputs)}", outputs=outputs)
    )
    assert "state.pt" in line
    assert not trace.exists()


WRONG_INSIDE = {
    "no part": lambda state: state.pop("progress"),
    "text for a number": lambda state: state["progress"].update(steps="2"),
    "an unknown counter": lambda state: state["progress"].update(more=1),
    "another generator": lambda state: state["random"].update(cpu=state["random"]["cpu"][:9]),
    "another part": lambda state: state.update(scaler=[1, 2]),
    "no position": lambda state: state["data"].pop("epoch"),
}


@pytest.mark.parametrize(
    "wrong",
    ["another generator", *(pytest.param(n, marks=pytest.mark.slow) for n in WRONG_INSIDE)],
)
def test_a_state_with_another_content_is_refused(run: Run, outputs: Path, wrong: str) -> None:
    path = checkpoint_of(outputs) / "state.pt"
    state = torch.load(path, weights_only=True)
    WRONG_INSIDE[wrong](state)
    changed = io.BytesIO()
    torch.save(state, changed)
    replace_file(path, changed.getvalue())
    resume = [*TRAINING, "steps=4", f"resume={checkpoint_of(outputs)}"]
    assert "not a checkpoint's file" in one_line_refusal(run(*resume, outputs=outputs))


def test_a_config_of_a_checkpoint_without_its_parts_is_refused(run: Run, outputs: Path) -> None:
    replace_file(checkpoint_of(outputs) / "config.yaml", b"seed: 0\nkeep: 3\n")
    resume = [*TRAINING, "steps=4", f"resume={checkpoint_of(outputs)}"]
    line = one_line_refusal(run(*resume, outputs=outputs))
    assert line.startswith("error: ")


def test_a_malicious_config_of_a_checkpoint_is_refused_and_not_run(
    run: Run, outputs: Path, tmp_path: Path
) -> None:
    trace, config = tmp_path / "was_run", checkpoint_of(outputs) / "config.yaml"
    replace_file(config, f"!!python/object/apply:os.mkdir ['{trace}']\n".encode())
    line = one_line_refusal(
        run(*TRAINING, "steps=4", f"resume={checkpoint_of(outputs)}", outputs=outputs)
    )
    assert "config.yaml" in line
    assert not trace.exists()


@pytest.mark.parametrize("name", ["experiment/mine", "data/mine", "local/default"])
def test_a_malicious_config_file_is_refused_and_not_run(
    run: Run, tmp_path: Path, name: str
) -> None:
    trace, path = tmp_path / "was_run", tmp_path / f"conf/{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"seed: !!python/object/apply:os.mkdir ['{trace}']\n", encoding="utf-8")
    chosen = [] if name.startswith("local") else [name.replace("/", "=")]
    line = one_line_refusal(run("debug=tiny", f"--config-dir={tmp_path}/conf", *chosen))
    assert "python/object" in line
    assert not trace.exists()


def test_a_malicious_tokenizer_is_refused_and_not_run(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "was_run"
    (tmp_path / "a.txt").write_text("text " * 100, encoding="utf-8")
    for number, content in enumerate(
        (f"!!python/object/apply:os.mkdir ['{trace}']".encode(), pickle.dumps(Malicious(trace)))
    ):
        path = tmp_path / f"{number}.json"
        path.write_bytes(content)
        line = one_line_refusal(
            run(
                *TINY_TEXT,
                "tokenizer=file",
                f"tokenizer.path={path}",
                "data.path=a.txt",
                cwd=tmp_path,
            )
        )
        assert path.name in line
        assert not trace.exists()


# --- where names may not lead -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../x", "..", ".", "a/b", "/tmp/x", "~", "", "a\nb", "a\0b", "-rf", ".hidden", "é", None],
)
def test_a_name_stays_in_its_folder(name: object) -> None:
    with pytest.raises(UserError, match="names a folder"):
        folder_name("" if name is None else name)


def test_no_folder_is_made_outside(run: Run, tmp_path: Path) -> None:
    outputs = tmp_path / "a/b/outputs"
    line = one_line_refusal(run("debug=tiny", "name=../../../x", outputs=outputs))
    assert "names a folder" in line
    assert not [path for path in tmp_path.rglob("*") if path.name == "x"]


def test_resume_outside_is_the_users_own_path(run: Run, outputs: Path, tmp_path: Path) -> None:
    """`latest` looks among the runs of that name alone; a run of elsewhere has to be named, and goes on there."""
    inside = tmp_path / "inside"
    line = one_line_refusal(run(*TRAINING, "steps=4", "resume=latest", outputs=inside))
    assert str(inside) in line
    checkpoint = checkpoint_of(outputs)
    finished = run(*TRAINING, "steps=4", f"resume={checkpoint}", outputs=inside)
    assert finished.returncode == 0, finished.stderr
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step_00000004"]
    assert not list(inside.rglob("step_*"))


def test_a_linked_tokenizer_is_read_and_never_written_through(tmp_path: Path) -> None:
    """A link in a run's folder may be the user's own way to save space: reading follows it, saving replaces it."""
    outside, folder = tmp_path / "outside.json", tmp_path / "run"
    folder.mkdir()
    outside.write_text(bytes_tokenizer().to_json(), encoding="utf-8")
    before = outside.read_bytes()
    (folder / "tokenizer.json").symlink_to(outside)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert tokenizer.fingerprint == bytes_tokenizer().fingerprint
    outside.write_bytes(before + b" ")
    tokenizer.save(folder / "tokenizer.json")
    assert outside.read_bytes() == before + b" "
    assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
