"""The words of a command line before Hydra sees them: its flags, our keys, and what is neither. No torch, no Hydra."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from memtrain.cards import CHECKOUT, CONF_DIR, PROGRAM, load_yaml
from memtrain.config import elsewhere
from memtrain.config.read import all_keys, groups, similar_keys
from memtrain.errors import UserError

ALONE = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc"),
)
TAKES_A_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun"),
)
MAY_TAKE_ONE = ("--info", "-i")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Hydra's flags (hydra._internal.utils.get_args_parser) and what `--info` may be followed by."""
OTHER_KEYS = {
    *("--config-name", "-cn", "--config-path", "-cp"),
    *("--shell-completion", "-sc"),
}
"""With these, the keys are not ours."""
LONG = [flag for flag in (*ALONE, *TAKES_A_VALUE, *MAY_TAKE_ONE) if flag.startswith("--")]


def arrange(words: Sequence[str], typed_in: Path) -> list[str]:
    """Flags first: Hydra reads overrides only where no flag comes between them.

    Raises UserError with what every wrong word should have been.
    """
    flags, overrides, others = sort_words(words)
    wrong = [*explain_flags(others, overrides)]
    if not {whole_flag(flag.partition("=")[0]) for flag in flags} & OTHER_KEYS:
        wrong += explain_keys(overrides, others, own_groups(flags, typed_in))
    if wrong:
        raise UserError("; ".join(wrong))
    return [*with_whole_path(flags, typed_in), "--", *overrides]


Others = list[tuple[str, str, str]]
"""As typed, name, value."""


def sort_words(words: Sequence[str]) -> tuple[list[str], list[str], Others]:
    """Hydra's flags with their values, overrides, and flags that are not Hydra's."""
    flags: list[str] = []
    overrides: list[str] = []
    others: Others = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = whole_flag(name)
        if word == "--":
            continue
        if not word.startswith("-"):
            overrides.append(word)
        elif flag is None:
            if not equals and rest and is_value(rest[0]):
                value = rest.pop(0)
                word = f"{word} {value}"
            others.append((word, name.lstrip("-"), value))
        else:
            flags.append(word)
            takes = flag in TAKES_A_VALUE or (flag in MAY_TAKE_ONE and rest[:1] and rest[0] in INFO)
            if takes and not equals and rest:
                flags.append(rest.pop(0))
    return flags, overrides, others


def whole_flag(name: str) -> str | None:
    """Hydra's flag, which argparse lets one shorten or write in one with its value; None: not Hydra's."""
    if name in (*ALONE, *TAKES_A_VALUE, *MAY_TAKE_ONE):
        return name
    if name[:2] in ("-c", "-i") and name[2:] in ("job", "hydra", *INFO):
        return "-m"  # whole by itself, like those that stand alone
    if elsewhere.meaning(name.lstrip("-"), "", {}) is not None:
        return None
    return next((flag for flag in LONG if len(name) > 3 and flag.startswith(name)), None)


def is_value(word: str) -> bool:
    """Of the flag before it: neither a flag nor an override."""
    negative = word[:1] == "-" and word[1:2].isdigit()
    return negative or not (word.startswith("-") or "=" in word)


def help_text(words: Sequence[str], typed_in: Path) -> str | None:
    """What `--help` prints, at once; None: not asked for, or of a help that was chosen in Hydra's own way."""
    rest, apart = words[: words.index("--")], words[words.index("--") :]
    asked = any(whole_flag(word) in ("--help", "-h") for word in rest)
    if not asked or len(rest) > 1 or any(word.startswith("hydra") for word in apart):
        return None
    template: str = load_yaml(CONF_DIR / "config.yaml")["hydra"]["help"]["template"]
    folders = (CONF_DIR, typed_in / "conf")
    names = {name for folder in folders for name in groups(folder)}
    lines = []
    for name in sorted(names):
        choices = {path.stem for folder in folders for path in (folder / name).glob("*.yaml")}
        lines.append(f"{name}: {', '.join(sorted(choices))}")
    listed = "\n".join(lines)
    return template.replace("$APP_CONFIG_GROUPS", listed).replace("python train.py", PROGRAM)


def with_whole_path(flags: Sequence[str], typed_in: Path) -> list[str]:
    """`--config-path` from the top of the checkout, or from where it was typed: Hydra would look in the package."""
    found = list(flags)
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if whole_flag(name) not in ("--config-path", "-cp"):
            continue
        if not equals:
            value = (*flags, "")[place + 1]
        if not value.startswith("pkg://"):
            whole = str((CHECKOUT or typed_in) / value)
            found[place if equals else place + 1] = f"{name}={whole}" if equals else whole
    return found


def explain_flags(others: Others, overrides: Sequence[str]) -> Iterator[str]:
    """What each should have been, as in `--learning_rate 1e-4: use optimizer.lr=1e-4`."""
    typed = by_name(overrides, others)
    for word, name, value in others:
        key = name.replace("-", "_")
        meant = [key] if key in all_keys() or key in groups() else similar_keys(key)
        told = value or "true"
        if text := elsewhere.our_value(key, told) or elsewhere.meaning(key, told, typed):
            yield f"{word}: {text}"
        elif len(meant) == 1:
            yield f"{word}: use {meant[0]}={value}"
        else:
            yield f"{word}: unknown flag; keys are typed as key=value, `--help` and `--hydra-help` list both"


def explain_keys(overrides: Sequence[str], others: Others, own: set[str]) -> Iterator[str]:
    """What each that is not ours should have been; `own` are the typist's own groups."""
    typed, ours = by_name(overrides, others), (*all_keys(), *groups(), *own, "hydra")
    for word in overrides:
        name, equals, value = word.partition("=")
        key = name.lstrip("+~").partition("@")[0]
        if not equals or not key:
            continue
        if is_ours(key, ours):
            text = elsewhere.our_value(key, value)
        else:
            last = key.rpartition(".")[2]  # optimizer.learning_rate
            text = elsewhere.meaning(key, value, typed) or elsewhere.meaning(last, value, typed)
            if text is None and not name.startswith(("+", "~")):
                yield f"{key}: {unknown(key)}"
        if text:
            yield f"{word}: {text}"


def unknown(key: str) -> str:
    meant = similar_keys(key)
    hint = f"did you mean {' or '.join(meant)}?" if meant else "conf/config.yaml has them all"
    return f"unknown key or choice; {hint}"


def is_ours(key: str, ours: Sequence[str]) -> bool:
    """A key or group, what holds keys, or what is in a key that is a list."""
    path = key.replace("/", ".")
    return any(path == own or own.startswith(f"{path}.") or starts(path, own) for own in ours)


def starts(path: str, own: str) -> bool:
    """`hydra.run.dir` is Hydra's, `optimizer.betas.0` ours; `optimizer.foo` is not, for all that `optimizer` is."""
    rest = path.removeprefix(f"{own}.")
    return rest != path and (own == "hydra" or "." in own or rest.isdigit())


def by_name(overrides: Sequence[str], others: Others) -> dict[str, str]:
    words = [override.partition("=") for override in overrides]
    named = [(name.lstrip("+~"), value) for name, _, value in words]
    return {
        name.replace("-", "_"): value for name, value in [*named, *((n, v) for _, n, v in others)]
    }


def own_groups(flags: Sequence[str], typed_in: Path) -> set[str]:
    """Those of `conf/` in the folder where the command was typed, and of `--config-dir`."""
    folders = []
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if whole_flag(name) in ("--config-dir", "-cd"):
            folders.append(value if equals else (*flags, "")[place + 1])
    return {found for name in ("conf", *folders) for found in groups(typed_in / name)}
