import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrain.data.corpus import fingerprint, read_pieces, split, stdlib_files, text_files
from memtrain.errors import UserError


def write(path: Path, content: str | bytes = "text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def names(files: list[Path], base: Path) -> list[str]:
    return [path.relative_to(base).as_posix() for path in files]


def test_stdlib_is_large_and_readable() -> None:
    files = stdlib_files()
    assert len(files) > 300
    assert not {"test", "site-packages", "idlelib"} & {part for f in files for part in f.parts[4:]}
    assert sum(len(piece) for path in files for piece in read_pieces(path)) > 5_000_000


def test_text_files_takes_files_folders_and_globs_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "dir/z.txt", "dir/a.md", "dir/.git/x.txt", "dir/.hidden", "other/c.txt"):
        write(tmp_path / name)
    found = text_files(
        ["dir", "b.txt", "other/*.txt", "**/*.txt", str(tmp_path / "b.txt")], tmp_path
    )
    assert names(found, tmp_path) == ["b.txt", "dir/a.md", "dir/z.txt", "other/c.txt"]


def test_of_folders_only_files_with_the_suffix_are_taken(tmp_path: Path) -> None:
    for name in ("dir/a.jsonl", "dir/readme.md", "b.txt", "other/c.txt"):
        write(tmp_path / name)
    found = text_files(["dir", "b.txt"], tmp_path, ".jsonl")
    assert names(found, tmp_path) == ["b.txt", "dir/a.jsonl"]
    with pytest.raises(UserError, match=r"'other' matches no \.jsonl file"):
        text_files(["other"], tmp_path, ".jsonl")


def test_hidden_files_are_taken_when_named(tmp_path: Path) -> None:
    write(tmp_path / ".hidden")
    write(tmp_path / ".cache/a.txt")
    found = text_files([".hidden", ".cache/*.txt"], tmp_path)
    assert names(found, tmp_path) == [".cache/a.txt", ".hidden"]


def test_a_name_with_pattern_characters_is_a_name_first(tmp_path: Path) -> None:
    base = tmp_path / "run[1]"
    write(base / "a[0].txt")
    write(base / "b.txt")
    assert names(text_files(["a[0].txt"], base), base) == ["a[0].txt"]
    assert names(text_files(["b*"], base), base) == ["b.txt"]


def test_symlink_loops_end_and_links_count_once(tmp_path: Path) -> None:
    write(tmp_path / "dir/a.txt")
    (tmp_path / "dir/loop").symlink_to(tmp_path / "dir")
    (tmp_path / "dir/again").symlink_to(tmp_path)
    (tmp_path / "dir/b.txt").symlink_to(tmp_path / "dir/a.txt")
    (tmp_path / "dir/broken").symlink_to(tmp_path / "nothing")
    assert names(text_files(["dir"], tmp_path), tmp_path) == ["dir/a.txt"]
    assert names(text_files(["**/*.txt"], tmp_path), tmp_path) == ["dir/a.txt"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["nothing.txt"], "nothing.txt: no such file"),
        (["*.nothing"], r"'\*.nothing' matches no file"),
        (["empty"], "'empty' matches no file"),
        ([""], "empty name"),
        (["a**b/*"], "'a..b/.' (is no valid pattern|matches no file)"),
        (["~nobody-of-this-name/a"], "no home folder"),
        (["x" * 300], "cannot be read: File name too long"),
        ([], "no text files named"),
    ],
)
def test_what_matches_nothing_is_named(tmp_path: Path, paths: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message) as raised:
        text_files(paths, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_and_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path / "secret.txt").chmod(0)
    with pytest.raises(UserError, match=r"secret\.txt: no permission"):
        text_files(["secret.txt"], tmp_path)
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(UserError, match="closed: cannot be read"):
        text_files(["closed"], tmp_path)


def sized(folder: Path, sizes: list[int]) -> list[Path]:
    files = [folder / f"{i:03}" for i in range(len(sizes))]
    for path, size in zip(files, sizes, strict=True):
        with path.open("wb") as file:
            file.truncate(size)
    return files


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=100), st.floats(0, 1, exclude_max=True)
)
def test_split_keeps_the_share_of_bytes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], val_fraction: float
) -> None:
    files = sized(tmp_path_factory.getbasetemp(), sizes)
    train, val = split(files, val_fraction)
    assert sorted(train + val) == files
    assert train and (train, val) == split(files, val_fraction)
    wanted = val_fraction * sum(sizes)
    held = sum(path.stat().st_size for path in val)
    assert not val or abs(held - wanted) <= min(wanted, sum(sizes) - wanted) / 2


@pytest.mark.parametrize(
    ("sizes", "n_val", "share"),
    [
        ([1_000] * 200, 10, 0.05),
        ([200_000, *[600] * 19], 18, 0.0511),  # of one giant and many small ones the small
        ([*[600] * 10, 200_000, *[600] * 9], 18, 0.0511),
        ([size * size for size in range(1, 101)], 10, 0.05),
        ([200_000, 1_000], 0, 0),
        ([1_000] * 9, 0, 0),
    ],
)
def test_one_file_of_another_size_does_not_change_the_share(
    tmp_path: Path, sizes: list[int], n_val: int, share: float
) -> None:
    _, val = split(sized(tmp_path, sizes), 0.05)
    held = sum(path.stat().st_size for path in val)
    assert held / sum(sizes) == pytest.approx(share, abs=0.002)
    assert len(val) == pytest.approx(n_val, abs=5)


def test_split_is_evenly_spread(tmp_path: Path) -> None:
    _, val = split(sized(tmp_path, [10] * 40), 0.1)
    assert [path.name for path in val] == ["005", "015", "025", "035"]


def test_split_of_few_files_leaves_validation_to_the_tokens(tmp_path: Path) -> None:
    one, two = sized(tmp_path, [10, 10])
    assert split([one], 0.5) == ([one], [])
    assert split([one, two], 0.05) == ([one, two], [])
    with pytest.raises(UserError, match="val_fraction is 1"):
        split([one], 1.0)


@given(
    text=st.text(st.sampled_from("aé€😀\n\r\ufeff "), max_size=60),
    piece_bytes=st.integers(1, 20),
    mark=st.booleans(),
)
def test_pieces_add_up_to_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece_bytes: int, mark: bool
) -> None:
    # Without a mark, the text's own first character would be taken for one.
    text = text.lstrip("\ufeff")
    path = write(tmp_path_factory.getbasetemp() / "text", b"\xef\xbb\xbf" * mark + text.encode())
    pieces = list(read_pieces(path, piece_bytes))
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= 2 * piece_bytes + 3 for piece in pieces)


def test_pieces_are_cut_at_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\r\ntwo\r\nthree")
    assert list(read_pieces(path, 6)) == ["one\r\n", "two\r\n", "three"]


@pytest.mark.parametrize("piece_bytes", [1, 2, 1000])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc\xff\xfe", "byte 0xff at offset 3 is not UTF-8"),
        (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5 is not UTF-8"),
        (b"a\nb\nc\xe2\x82", "byte 0xe2 at offset 5 is not UTF-8"),
        ("añ".encode("latin-1"), "byte 0xf1 at offset 1 is not UTF-8"),
        (b"ab\ncd\x00ef", "NUL byte at offset 5"),
    ],
)
def test_what_is_not_text_is_named_with_its_offset(
    tmp_path: Path, content: bytes, message: str, piece_bytes: int
) -> None:
    path = write(tmp_path / "b.txt", content)
    with pytest.raises(UserError, match=rf"b\.txt: {message}"):
        list(read_pieces(path, piece_bytes))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read"):
        list(read_pieces(tmp_path / "gone.txt"))


def test_fingerprint_follows_name_size_and_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one")
    before = fingerprint([path])
    assert fingerprint([path]) == before
    os.utime(path, ns=(0, 12345))
    touched = fingerprint([path])
    path.rename(tmp_path / "b.txt")
    renamed = fingerprint([tmp_path / "b.txt"])
    assert len({before, touched, renamed}) == 3
