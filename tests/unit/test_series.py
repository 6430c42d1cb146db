"""patches/series.py against small synthetic packages: each kind of fault with its message."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[2] / "patches"
sys.path.insert(0, str(PATCHES))

import series  # noqa: E402
import series_diff as diffs  # noqa: E402
import series_files  # noqa: E402
import series_tree  # noqa: E402

# Twelve functions with distinct bodies, so that every hunk has lines of its own.
ENGINE = "".join(f"def f{n}():\n    a = {n}\n    b = a + {n}\n    return b\n\n\n" for n in range(12))
FILES = {
    "mini/__init__.py": b"",
    "mini/engine.py": ENGINE.encode(),
    "mini/model.py": b'"""A model."""\n\nLAYERS = 4\nHEADS = 8\nNORM = 1\n\n\ndef f():\n    return LAYERS\n',
    "mini/crlf.py": b"ONE = 1\r\nTWO = 2\r\nTHREE = 3\r\nFOUR = 4\r\n",
    "mini/tail.py": b"ONE = 1\nTWO = 2\nTHREE = 3",
    "mini/data.txt": b"first\nsecond\nthird\n",
}
HEADER = b"""Open the gate

The engine refuses what the module admits.

Reason: the gate is closed
Upstream: https://example.org/pull/1
Drop-when: the pull request is in the engine

"""


def make_wheel(path: Path, files: dict[str, bytes], version: str = "1.0", name: str = "mini") -> Path:
    """A wheel of ``files`` with METADATA and RECORD."""
    info = f"{name}-{version}.dist-info"
    everything = dict(files)
    everything[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    record = "".join(series_tree.record_row(p, d) for p, d in everything.items()) + f"{info}/RECORD,,\n"
    everything[f"{info}/RECORD"] = record.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in everything.items():
            archive.writestr(zipfile.ZipInfo(member), data)
    return path


def install(wheel: Path, root: Path) -> Path:
    """Unpack a wheel as an installer does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    return root


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below ``root``."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def edit(data: bytes, *changes: tuple[str, str]) -> bytes:
    """Replace each text, which must stand exactly once."""
    for old, new in changes:
        assert data.count(old.encode()) == 1, old
        data = data.replace(old.encode(), new.encode())
    return data


class Bench:
    """A series, its wheel and an installed tree, with the commands bound to them."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]):
        self.root, self.capsys = root, capsys
        self.dir = root / "series"
        (self.dir / "files").mkdir(parents=True)
        (self.dir / "series").write_text("# order\n")
        self.wheel = make_wheel(root / "wheels/mini-1.0-py3-none-any.whl", FILES)
        self.tree = install(self.wheel, root / "site-packages")

    def run(self, command: str, *args: object) -> tuple[int, str]:
        """(exit code, all that was printed) of one command."""
        code = series.main([command, "--series", str(self.dir), *map(str, args)])
        out = self.capsys.readouterr()
        assert "Traceback" not in out.err
        return code, out.out + out.err

    def json(self, command: str, *args: object) -> dict:
        """The facts of one command for a machine."""
        code = series.main([command, "--json", "--series", str(self.dir), *map(str, args)])
        facts = json.loads(self.capsys.readouterr().out)
        assert facts["exit"] == code
        return facts

    def patch(self, name: str, *changes: tuple[str, bytes, bytes], header: bytes = HEADER) -> None:
        """Write and list a patch made of (path, before, after)."""
        made = [diffs.make(path, before, after) for path, before, after in changes]
        self.raw_patch(name, diffs.render(header, tuple(diff for diff in made if diff)))

    def raw_patch(self, name: str, text: bytes) -> None:
        """Write and list a patch with exactly this text."""
        (self.dir / name).write_bytes(text)
        lines = (self.dir / "series").read_text()
        if name not in lines.split():
            (self.dir / "series").write_text(lines + name + "\n")

    def pin(self) -> None:
        """Write upstream.toml."""
        code, out = self.run("export", "--wheel", self.wheel)
        assert code == 0, out

    def other(self, changes: dict[str, bytes | None], version: str = "1.1") -> Path:
        """A wheel of another version with some files changed or, for None, gone."""
        files = {path: data for path, data in {**FILES, **changes}.items() if data is not None}
        return make_wheel(self.root / f"wheels/mini-{version}-py3-none-any.whl", files, version)


ONE = edit(FILES["mini/engine.py"], ("    a = 2\n", "    a = 2\n    hook = 1\n"))
TWO = edit(ONE, ("    a = 9\n", "    a = 9\n    hook = 2\n"))
MODEL = edit(FILES["mini/model.py"], ("HEADS = 8\n", "HEADS = 16\n"))


@pytest.fixture
def empty(tmp_path, capsys):
    """A bench without patches."""
    return Bench(tmp_path, capsys)


@pytest.fixture
def bench(empty):
    """Two patches on one file, the second also on another, and a new module; pinned."""
    empty.patch("0001-first.patch", ("mini/engine.py", FILES["mini/engine.py"], ONE))
    empty.patch(
        "0002-second.patch",
        ("mini/engine.py", ONE, TWO),
        ("mini/model.py", FILES["mini/model.py"], MODEL),
    )
    new = empty.dir / "files/mini/extra/hook.py"
    new.parent.mkdir(parents=True)
    new.write_text("X = 1\n")
    empty.pin()
    return empty


# -- apply ---------------------------------------------------------------------------------------------------


def test_apply_writes_post_images_new_files_and_record(bench):
    before = snapshot(bench.tree)
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 0, out
    assert "0001-first.patch: applied" in out
    assert "2 files changed, 1 added" in out
    after = snapshot(bench.tree)
    assert after["mini/engine.py"] == TWO
    assert after["mini/model.py"] == MODEL
    assert after["mini/extra/hook.py"] == b"X = 1\n"
    record = after.pop("mini-1.0.dist-info/RECORD").decode().splitlines(keepends=True)
    rows = {line.split(",")[0]: line for line in record}
    assert len(rows) == len(record) == len(after) + 1
    for path, data in after.items():
        assert rows[path] == series_tree.record_row(path, data)
    untouched = set(before) - {"mini/engine.py", "mini/model.py", "mini-1.0.dist-info/RECORD"}
    assert {path: before[path] for path in untouched} == {path: after[path] for path in untouched}


def test_record_row_is_what_pip_writes():
    digest = "LCa0a2j_xo_5m0U8HTBBNBNCLXBkg7-g-YpeiGJm564"  # of b"foo"
    assert series_tree.record_row("a/b.py", b"foo") == f"a/b.py,sha256={digest},3\n"


def test_apply_twice_changes_nothing(bench):
    bench.run("apply", "--tree", bench.tree)
    before = snapshot(bench.tree)
    times = {p: p.stat().st_mtime_ns for p in bench.tree.rglob("*")}
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 0
    assert "applied already, nothing to do" in out
    assert snapshot(bench.tree) == before
    assert {p: p.stat().st_mtime_ns for p in bench.tree.rglob("*")} == times


def test_apply_keeps_mode_and_spares_hard_links(bench, tmp_path):
    target = bench.tree / "mini/engine.py"
    target.chmod(0o755)
    cache = tmp_path / "cache.py"
    cache.hardlink_to(target)
    assert bench.run("apply", "--tree", bench.tree)[0] == 0
    assert target.stat().st_mode & 0o777 == 0o755
    assert cache.read_bytes() == FILES["mini/engine.py"], "the installer's cache was written through"


def test_apply_removes_stale_bytecode_and_its_record_rows(bench):
    cache = bench.tree / "mini/__pycache__"
    cache.mkdir()
    names = ["engine.cpython-311.pyc", "engine.cpython-311.opt-1.pyc", "engine2.cpython-311.pyc"]
    record = bench.tree / "mini-1.0.dist-info/RECORD"
    for name in names:
        (cache / name).write_bytes(b"old")
        record.write_text(record.read_text() + f"mini/__pycache__/{name},,\n")
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 0
    assert "2 stale bytecode files removed" in out
    assert [p.name for p in cache.iterdir()] == ["engine2.cpython-311.pyc"]
    assert "mini/__pycache__/engine2.cpython-311.pyc,,\n" in record.read_text()
    assert "engine.cpython" not in record.read_text()


def test_record_keeps_other_rows_byte_for_byte():
    record = b'"a,b.py",sha256=x,1\r\nmini/engine.py,sha256=old,9\r\nz\xc2\x85z,,'
    rows = series_tree.update_record(record, {"mini/engine.py": b"foo"}, []).split(b"\n")
    assert rows[0] == b'"a,b.py",sha256=x,1\r'
    assert rows[1].endswith(b",3\r")
    assert rows[2] == b"z\xc2\x85z,,"


def test_half_applied_patch_is_named(bench):
    (bench.tree / "mini/engine.py").write_bytes(TWO)
    before = snapshot(bench.tree)
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "half-applied: present 0001-first.patch (mini/engine.py), 0002-second.patch (mini/engine.py); " in out
    assert "missing 0002-second.patch (mini/model.py), mini/extra/hook.py: reinstall mini 1.0" in out
    assert snapshot(bench.tree) == before


def test_half_applied_stack_on_one_file_is_named(bench):
    (bench.tree / "mini/engine.py").write_bytes(ONE)
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "half-applied: present 0001-first.patch (mini/engine.py); missing 0002-second.patch" in out


def test_half_applied_record_is_named(bench):
    bench.run("apply", "--tree", bench.tree)
    record = bench.tree / "mini-1.0.dist-info/RECORD"
    record.write_bytes(series_tree.update_record(record.read_bytes(), {"mini/model.py": b"old"}, []))
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "the files are patched but RECORD does not say so for mini/model.py" in out


def test_half_applied_new_file_is_named(bench):
    target = bench.tree / "mini/extra/hook.py"
    target.parent.mkdir()
    target.write_text("X = 1\n")
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "half-applied: present mini/extra/hook.py" in out


def test_already_upstream_says_drop(bench):
    merged = b"# a newer release\n" + FILES["mini/engine.py"].replace(b"    a = 2\n", b"    a = 2\n    hook = 1\n")
    (bench.tree / "mini/engine.py").write_bytes(merged)
    before = snapshot(bench.tree)
    facts = bench.json("apply", "--tree", bench.tree)
    assert facts["exit"] == 1
    assert [patch["state"] for patch in facts["patches"]] == ["already-upstream", "conflict"]
    assert "0001-first.patch: mini/engine.py: already upstream, drop the patch" in facts["errors"]
    assert snapshot(bench.tree) == before


def test_conflict_names_file_hunk_line_expected_and_found(bench):
    target = bench.tree / "mini/model.py"
    target.write_bytes(edit(FILES["mini/model.py"], ("NORM = 1", "NORM = 2")))
    before = snapshot(bench.tree)
    facts = bench.json("apply", "--tree", bench.tree)
    assert facts["exit"] == 1
    assert (
        "0002-second.patch: mini/model.py: hunk 1, line 5: expected 'NORM = 1', found 'NORM = 2'; "
        "the most similar place is line 1" in facts["errors"]
    )
    conflict = facts["patches"][1]["files"][1]["conflicts"][0]
    assert (conflict["hunk"], conflict["line"]) == (1, 5)
    assert (conflict["expected"], conflict["found"]) == ("NORM = 1\n", "NORM = 2\n")
    assert snapshot(bench.tree) == before


def test_moved_anchor_is_a_conflict_that_names_its_new_line(bench):
    target = bench.tree / "mini/model.py"
    target.write_bytes(b"# new\n" + FILES["mini/model.py"])
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert 'hunk 1, line 1: expected \'"""A model."""\', found \'# new\'' in out
    assert "the hunk's lines stand at line 2: it moved, run refresh" in out


def test_wrong_line_number_in_a_patch_is_a_conflict(bench):
    path = bench.dir / "0001-first.patch"
    path.write_bytes(edit(path.read_bytes(), ("@@ -12,6 +12,7 @@", "@@ -14,6 +14,7 @@")))
    for command, args in (("check", ("--wheel", bench.wheel)), ("apply", ("--tree", bench.tree))):
        code, out = bench.run(command, *args)
        assert code == 1
        assert "0001-first.patch: mini/engine.py: hunk 1, line 14: expected" in out
        assert "stand at line 12: it moved" in out


def test_a_line_past_the_end_is_a_conflict(bench):
    (bench.tree / "mini/model.py").write_bytes(b'"""A model."""\n\nLAYERS = 4\n')
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "line 4: expected 'HEADS = 8', found the end of the file" in out


def test_fitting_but_unpinned_file_is_refused(bench):
    target = bench.tree / "mini/model.py"
    target.write_bytes(FILES["mini/model.py"] + b"# local change\n")
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "mini/model.py: every hunk fits, but the file is not the one pinned in upstream.toml" in out


def test_missing_file_is_named(bench):
    (bench.tree / "mini/model.py").unlink()
    facts = bench.json("apply", "--tree", bench.tree)
    assert facts["patches"][1]["state"] == "file-gone"
    assert facts["errors"] == ["0002-second.patch: mini/model.py: there is no such file"]


def test_another_file_where_a_new_one_goes_is_refused(bench):
    (bench.tree / "mini/extra").mkdir()
    (bench.tree / "mini/extra/hook.py").write_text("Y = 2\n")
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "files/mini/extra/hook.py: the package already has a file there" in out


def test_wrong_version_in_one_sentence(bench, tmp_path):
    other = install(bench.other({}), tmp_path / "other")
    code, out = bench.run("apply", "--tree", other)
    assert code == 1
    assert out.count("\n") == 1
    assert "holds mini 1.1, the series is for 1.0" in out


@pytest.mark.parametrize("command", ["apply", "check"])
def test_no_tree_no_package_no_wheel_cannot_run(bench, tmp_path, command):
    code, out = bench.run(command, "--tree", tmp_path / "nowhere")
    assert (code, "cannot run: there is no directory" in out) == (2, True)
    (tmp_path / "bare").mkdir()
    code, out = bench.run(command, "--tree", tmp_path / "bare")
    assert (code, "no mini is installed in" in out) == (2, True)
    code, out = bench.run("check", "--wheel", tmp_path / "none.whl")
    assert (code, "cannot read the wheel" in out) == (2, True)


def test_two_installed_versions_cannot_run(bench):
    install(bench.other({}), bench.tree)
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 2
    assert "mini is installed twice" in out


def test_tree_without_record_is_refused(bench):
    (bench.tree / "mini-1.0.dist-info/RECORD").unlink()
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "has no RECORD" in out


@pytest.mark.parametrize("link", ["mini/engine.py", "mini"])
def test_never_writes_through_symlinks(bench, tmp_path, link):
    place = bench.tree / link
    away = tmp_path / "away"
    place.rename(away)
    place.symlink_to(away)
    before = snapshot(tmp_path)
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 1
    assert "is a symbolic link; the series never writes through links" in out
    assert snapshot(tmp_path) == before


def test_second_writer_is_kept_out(bench):
    with series_tree.Tree(bench.tree).lock():
        code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 2
    assert "another run is writing" in out


@pytest.mark.parametrize("step", range(5))
def test_failure_at_any_rename_leaves_the_tree_as_it_was(bench, monkeypatch, step):
    """Renames here: 2 hooks, 1 new file, RECORD; stale bytecode is removed between them."""
    cache = bench.tree / "mini/__pycache__"
    cache.mkdir()
    (cache / "engine.cpython-311.pyc").write_bytes(b"old")
    before = snapshot(bench.tree)
    count = 0
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        nonlocal count
        if self.name.endswith(".series-new"):
            count += 1
            if count == step + 1:
                raise OSError(5, "Input/output error", str(self))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    code, out = bench.run("apply", "--tree", bench.tree)
    if step >= 4:  # three files and RECORD are renamed
        assert (code, count) == (0, 4)
        return
    assert code == 2
    assert "Input/output error" in out
    assert "the tree is unchanged" in out
    assert snapshot(bench.tree) == before
    assert not (bench.tree / "mini/extra").exists()


def test_file_size_limit_leaves_the_tree_as_it_was(bench):
    """A real write error, as a full disk gives, from the kernel: the second file is over the limit."""
    before = snapshot(bench.tree)
    limit = len(MODEL) + 10
    assert len(TWO) > limit
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        f"sys.path.insert(0, {str(PATCHES)!r}); import series; sys.exit(series.main(sys.argv[1:]))"
    )
    args = ["apply", "--series", str(bench.dir), "--tree", str(bench.tree)]
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "File too large while writing" in done.stderr
    assert "mini/engine.py: the tree is unchanged" in done.stderr
    assert snapshot(bench.tree) == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_tree_that_takes_no_backup_cannot_run(bench, monkeypatch, number):
    """The errors of a read-only or full file system, raised where it meets us first (root passes modes)."""
    before = snapshot(bench.tree)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(target))

    monkeypatch.setattr(series_tree.shutil, "copy2", refuse)
    code, out = bench.run("apply", "--tree", bench.tree)
    assert code == 2
    assert f"{os.strerror(number)} while writing {bench.tree / 'mini/engine.py'}: the tree is unchanged" in out
    assert snapshot(bench.tree) == before


def test_termination_in_the_middle_cleans_up(bench):
    before = snapshot(bench.tree)
    program = (
        f"import sys, time; sys.path.insert(0, {str(PATCHES)!r}); import pathlib, series, signal\n"
        "replace = pathlib.Path.replace\n"
        "def slow(self, target):\n"
        "    out = replace(self, target)\n"
        "    if self.name.endswith('.series-new'):\n"
        "        print('renamed', flush=True); time.sleep(60)\n"
        "    return out\n"
        "pathlib.Path.replace = slow\n"
        "series.handle_signals()\n"
        "sys.exit(series.main(sys.argv[1:]))\n"
    )
    args = ["apply", "--series", str(bench.dir), "--tree", str(bench.tree)]
    with subprocess.Popen([sys.executable, "-c", program, *args], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "renamed\n"
        assert snapshot(bench.tree) != before
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 128 + signal.SIGTERM
    assert snapshot(bench.tree) == before


def test_leftovers_of_a_killed_run_do_not_stay(bench):
    for name in (".engine.py.series-new", ".engine.py.series-old"):
        (bench.tree / "mini" / name).write_bytes(b"junk")
    assert bench.run("apply", "--tree", bench.tree)[0] == 0
    assert (bench.tree / "mini/engine.py").read_bytes() == TWO
    assert not list(bench.tree.rglob("*.series-*"))


# -- check ---------------------------------------------------------------------------------------------------


def test_check_passes_on_wheel_and_tree_before_and_after(bench):
    facts = bench.json("check", "--wheel", bench.wheel)
    assert (facts["exit"], facts["state"]) == (0, "clean")
    assert facts["changed_lines"] == {"mini/engine.py": 2, "mini/model.py": 2}
    assert facts["warnings"] == []
    before = snapshot(bench.tree)
    assert bench.json("check", "--tree", bench.tree)["state"] == "pending"
    assert snapshot(bench.tree) == before
    bench.run("apply", "--tree", bench.tree)
    assert bench.json("check", "--tree", bench.tree)["state"] == "applied"


def test_check_without_a_wheel_says_that_it_only_lints(bench):
    code, out = bench.run("check")
    assert code == 0
    assert "linted only" in out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Reason: the gate is closed\n", "", "the trailer Reason: is missing in the last paragraph"),
        ("Reason: the gate is closed\n", "Reason:\n", "the trailer Reason: is empty"),
        ("Reason: ", "Reason: x\nReason: ", "the trailer Reason: stands twice"),
        (
            "https://example.org/pull/1",
            "PR 1",
            "the trailer Upstream: must be an https URL or none, not 'PR 1'",
        ),
        ("Drop-when: the", "Drop-when: FIXME the", "the header still says FIXME"),
        ("Open the gate", "[PATCH 1/2] Open the gate", "the subject is numbered"),
        ("Open the gate", "Subject: [2/3] Open the gate", "the subject is numbered"),
        (
            "Open the gate\n\nThe engine refuses what the module admits.\n\n",
            "",
            "the header has no subject line",
        ),
        ("admits.\n\n", "admits.\n", "the trailer Reason: is missing in the last paragraph"),
    ],
)
def test_check_lints_headers(empty, old, new, message):
    header = edit(HEADER, (old, new))
    if new == "admits.\n":  # the trailers, then another paragraph
        header = HEADER + b"An afterthought.\n\n"
    empty.patch("0001-first.patch", ("mini/model.py", FILES["mini/model.py"], MODEL), header=header)
    empty.pin()
    code, out = empty.run("check", "--wheel", empty.wheel)
    assert code == 1
    assert f"rejected: 0001-first.patch: {message}" in out


@pytest.mark.parametrize("value", ["none", "https://example.org/pull/9"])
def test_check_accepts_upstream_values_and_continued_trailers(empty, value):
    header = edit(HEADER, ("https://example.org/pull/1", value), ("gate is closed", "gate\n is closed"))
    empty.patch("0001-first.patch", ("mini/model.py", FILES["mini/model.py"], MODEL), header=header)
    empty.pin()
    assert empty.run("check", "--wheel", empty.wheel)[0] == 0


def test_check_warns_above_fifteen_lines(empty):
    grown = FILES["mini/model.py"] + b"".join(b"V%d = 1\n" % n for n in range(16))
    empty.patch("0001-first.patch", ("mini/model.py", FILES["mini/model.py"], grown))
    empty.pin()
    code, out = empty.run("check", "--wheel", empty.wheel)
    assert code == 0
    assert "warning: mini/model.py: 16 changed lines, over 15" in out


def test_check_names_unlisted_stray_and_missing_patches(bench):
    (bench.dir / "0003-more.patch").write_bytes(b"")
    (bench.dir / "0001-first.patch.orig").write_bytes(b"")
    code, out = bench.run("check", "--wheel", bench.wheel)
    assert code == 1
    assert "0003-more.patch is not listed in series" in out
    assert "0001-first.patch.orig is no part of a series" in out
    (bench.dir / "0003-more.patch").unlink()
    with (bench.dir / "series").open("a") as stream:
        stream.write("0003-more.patch\n")
    code, out = bench.run("check")
    assert code == 1
    assert "0003-more.patch is listed but there is no such file" in out


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("0001-first.patch\n0001-first.patch\n0002-second.patch\n", "0001-first.patch is listed twice"),
        ("0002-second.patch\n0001-first.patch\n", "0001-first.patch stands after 0002-second.patch"),
        ("0001-first.patch\n02-second.patch\n", "'02-second.patch' is not a patch name of the form"),
        ("../0001-first.patch\n", "is not a patch name"),
    ],
)
def test_check_names_faults_of_the_order(bench, order, message):
    (bench.dir / "series").write_text(order)
    code, out = bench.run("check")
    assert code == 1
    assert message in out


def test_series_missing_or_without_order(bench, tmp_path):
    assert series.main(["check", "--series", str(tmp_path / "none")]) == 2
    assert "there is no series directory" in bench.capsys.readouterr().err
    (bench.dir / "series").unlink()
    code, out = bench.run("check")
    assert code == 1
    assert "it lists the patches" in out


def test_check_wheel_with_one_flipped_byte(bench):
    data = bytearray(bench.wheel.read_bytes())
    data[len(data) // 2] ^= 1
    bench.wheel.write_bytes(data)
    code, out = bench.run("check", "--wheel", bench.wheel)
    assert code == 1
    assert f"upstream.toml pins {series_files.load_pin(bench.dir).wheel_sha256}" in out
    assert "download it again" in out


def test_truncated_wheel_is_refused(bench):
    bench.wheel.write_bytes(bench.wheel.read_bytes()[:500])
    code, out = bench.run("export", "--wheel", bench.wheel)
    assert code == 1
    assert "is not a whole wheel" in out


def test_damaged_member_is_refused(bench):
    data = bench.wheel.read_bytes()
    at = data.index(b"HEADS = 8")
    bench.wheel.write_bytes(data[:at] + b"HEADS = 9" + data[at + 9 :])
    code, out = bench.run("export", "--wheel", bench.wheel)
    assert code == 1
    assert "is damaged at mini/model.py" in out


def test_upstream_toml_must_be_there_complete_and_not_stale(bench):
    pin = bench.dir / "upstream.toml"
    text = pin.read_text()
    pin.write_text(text.replace("mini/model.py", "mini/gone.py"))
    code, out = bench.run("check")
    assert code == 1
    assert "upstream.toml has no entry for mini/model.py" in out
    assert "upstream.toml has a stale entry for mini/gone.py" in out
    pin.write_text(text.replace("wheel_sha256", "wheel_md5"))
    code, out = bench.run("check")
    assert (code, "upstream.toml is damaged" in out) == (1, True)
    pin.unlink()
    code, out = bench.run("check")
    assert (code, "upstream.toml is missing: run export --wheel" in out) == (1, True)


def test_changed_patch_no_longer_has_the_pinned_post_image(bench):
    path = bench.dir / "0002-second.patch"
    path.write_bytes(edit(path.read_bytes(), ("+HEADS = 16", "+HEADS = 32")))
    for command, args in (("check", ("--wheel", bench.wheel)), ("apply", ("--tree", bench.tree))):
        code, out = bench.run(command, *args)
        assert code == 1
        assert "mini/model.py: the patched file has SHA-256" in out


def test_patched_tree_against_a_patch_changed_since(bench):
    """The tree still is what upstream.toml says, but no longer what the patches make of the wheel."""
    bench.run("apply", "--tree", bench.tree)
    path = bench.dir / "0002-second.patch"
    path.write_bytes(edit(path.read_bytes(), ("+HEADS = 16", "+HEADS = 32")))
    for command in ("check", "apply"):
        code, out = bench.run(command, "--tree", bench.tree)
        assert code == 1
        assert "mini/model.py: the patches and upstream.toml disagree about the patched file" in out


def test_post_image_that_does_not_compile(bench):
    path = bench.dir / "0002-second.patch"
    text = edit(path.read_bytes(), ("+HEADS = 16", "+HEADS = = 16"))
    path.write_bytes(text)
    code, out = bench.run("export", "--wheel", bench.wheel)
    assert code == 1
    assert "mini/model.py does not compile: invalid syntax" in out
    code, out = bench.run("check", "--wheel", bench.wheel)
    assert code == 1
    assert "mini/model.py does not compile" in out


def test_new_module_that_does_not_parse(bench):
    (bench.dir / "files/mini/extra/hook.py").write_text("def (:\n")
    code, out = bench.run("check")
    assert code == 1
    assert "files/mini/extra/hook.py does not compile" in out


def test_new_file_that_upstream_has_too(bench):
    (bench.dir / "files/mini/data.txt").write_text("mine\n")
    code, out = bench.run("check", "--wheel", bench.wheel)
    assert code == 1
    assert "files/mini/data.txt: the package already has a file there" in out
    code, out = bench.run("export", "--wheel", bench.wheel)
    assert code == 1
    assert "files/mini/data.txt: mini 1.0 has another file there: rename ours" in out


def test_hook_in_a_file_of_files(bench):
    (bench.dir / "files/mini/model.py").write_text("X = 1\n")
    code, out = bench.run("check")
    assert code == 1
    assert "0002-second.patch: changes mini/model.py, which is in files/: edit it there" in out


def test_links_and_merge_leftovers_in_files(bench):
    (bench.dir / "files/mini/link.py").symlink_to("extra/hook.py")
    (bench.dir / "files/mini/hook.py.rej").write_text("")
    (bench.dir / "files/mini-1.0.dist-info").mkdir()
    (bench.dir / "files/mini-1.0.dist-info/METADATA").write_text("")
    code, out = bench.run("check")
    assert code == 1
    assert "files/mini/link.py is a symbolic link" in out
    assert "files/mini/hook.py.rej was left behind by a failed merge" in out
    assert "is package metadata, which a series never changes" in out


def test_ambiguous_anchor_warns(empty):
    twice = b"".join(b"def g%d():\n    x = 1\n    y = 2\n    z = 3\n    return 1\n\n\n" % n for n in range(2))
    wheel = empty.other({"mini/twice.py": twice}, "1.0")
    lines = [
        (b" ", b"    x = 1\n"),
        (b" ", b"    y = 2\n"),
        (b"+", b"    hook = 1\n"),
        (b" ", b"    z = 3\n"),
    ]
    diff = diffs.FileDiff("mini/twice.py", (diffs.Hunk(2, 2, tuple(lines)),))
    empty.raw_patch("0001-first.patch", diffs.render(HEADER, (diff,)))
    assert empty.run("export", "--wheel", wheel)[0] == 0
    code, out = empty.run("check", "--wheel", wheel)
    assert code == 0
    assert "warning: 0001-first.patch: mini/twice.py: the lines of hunk 1 stand more than once" in out


def test_wrong_flag_is_rejected_in_one_sentence(bench):
    code, out = bench.run("check", "--fuzz", 2)
    assert code == 1
    assert "unrecognized arguments: --fuzz 2" in out
    assert out.count("\n") == 1


# -- what a patch may hold -----------------------------------------------------------------------------------

GOOD = b"""--- a/mini/model.py
+++ b/mini/model.py
@@ -3,3 +3,3 @@
 LAYERS = 4
-HEADS = 8
+HEADS = 16
 NORM = 1
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no diff"),
        (
            GOOD.replace(b"--- a/mini/model.py", b"--- /dev/null"),
            "creates a file; new files belong in files/",
        ),
        (GOOD.replace(b"+++ b/mini/model.py", b"+++ /dev/null"), "deletes a file"),
        (b"diff --git a/mini/x.py b/mini/x.py\nnew file mode 100644\n" + GOOD, "line 10: creates a file"),
        (b"diff --git a/mini/x.py b/mini/x.py\ndeleted file mode 100644\n" + GOOD, "line 10: deletes a file"),
        (b"diff --git a/mini/x.py b/mini/y.py\nrename from mini/x.py\n" + GOOD, "renames a file"),
        (b"diff --git a/mini/x.py b/mini/x.py\nold mode 100644\nnew mode 100755\n", "changes a file mode"),
        (b"diff --git a/mini/x b/mini/x\nGIT binary patch\n", "is a binary patch; put the file under files/"),
        (b"diff --git a/x/y b/x/y\nBinary files a/x/y and b/x/y differ\n", "is a binary patch"),
        (GOOD.replace(b"/mini/", b"/../"), "path '../model.py' is not a plain path inside the package"),
        (GOOD.replace(b"/mini/", b"//etc/"), "path '/etc/model.py' is not a plain path"),
        (GOOD.replace(b"/mini/", b"/mini/./"), "is not a plain path"),
        (GOOD.replace(b"mini/model.py", b"model.py"), "is not a plain path inside the package"),
        (GOOD.replace(b"/mini/", b"/mini-1.0.dist-info/"), "is package metadata"),
        (GOOD.replace(b"--- a/mini/model.py", b"--- mini/model.py"), "the path must start with a/"),
        (GOOD.replace(b"+++ b/mini/model", b"+++ b/mini/other"), "mini/model.py and mini/other.py differ"),
        (GOOD.replace(b"+++ b/mini/model.py\n", b""), "holds no diff"),
        (GOOD + GOOD, "mini/model.py has two diffs in one patch"),
        (GOOD.replace(b"\n", b"\r\n"), "the patch file has CRLF line endings"),
        (GOOD[:-1], "is cut in the middle of a line"),
        (GOOD.replace(b" NORM = 1\n", b""), "the hunk of line 11 is cut short"),
        (
            GOOD.replace(b" NORM = 1\n", b"NORM = 1\n"),
            "line 15: a line of the hunk of line 11 starts with neither",
        ),
        (GOOD.replace(b"+3,3", b"+3,4"), "the hunk of line 11 is cut short"),
        (GOOD + b"+EXTRA = 1\n", "line 16: '+EXTRA = 1' is neither a diff header nor part of a hunk"),
        (GOOD.replace(b"+3,3", b"+4,3"), "the new start line must be 3, not 4"),
        (GOOD.replace(b"@@ -3,3 +3,3 @@", b"@@ -x @@"), "is not a hunk header"),
        (GOOD.replace(b"-3,3 +3,3", b"-0,3 +0,3"), "line numbers start at 1"),
        (GOOD.replace(b"+HEADS = 16", b"+HEADS = 8"), "the hunk changes nothing"),
        (GOOD + GOOD.split(b"\n", 2)[2], "the hunk overlaps the one before it"),
        (GOOD.split(b"@@")[0], "mini/model.py has no hunk"),
        (GOOD.split(b"@@")[0] + b"@@ -3,0 +4 @@\n+X = 1\n", "the hunk has no context that could pin it"),
        (
            GOOD.split(b"@@")[0] + b"@@ -3,2 +3,2 @@\n LAYERS = 4\n\\ No newline at end of file\n-a\n+b\n",
            "only the last line of a file may lack its newline",
        ),
    ],
)
def test_patch_text_that_is_refused(empty, text, message):
    empty.raw_patch("0001-first.patch", HEADER + text)
    code, out = empty.run("check")
    assert code == 1
    assert out.startswith("rejected: 0001-first.patch: ")
    assert message in out


def test_git_format_patch_output_is_read():
    text = HEADER + b"---\n mini/model.py | 2 +-\n\ndiff --git a/mini/model.py b/mini/model.py\n"
    text += b"index 1234567..89abcde 100644\n" + GOOD + b"-- \n2.39.0\n\n"
    header, (diff,) = diffs.parse(text)
    assert header.endswith(b"2 +-\n\n")
    assert diffs.apply_strict(diff, FILES["mini/model.py"]) == MODEL


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("mini/crlf.py", "TWO = 2\r\n", "TWO = 22\r\n"),
        ("mini/crlf.py", "TWO = 2\r\n", "TWO = 2\n"),
        ("mini/tail.py", "THREE = 3", "THREE = 3\n"),
        ("mini/tail.py", "THREE = 3", "THREE = 33"),
        ("mini/tail.py", "TWO = 2\n", ""),
        ("mini/model.py", "    return LAYERS\n", "    return LAYERS"),
        ("mini/data.txt", "first\n", "-- first\n++ first\n@@ first\n"),
    ],
)
def test_crlf_and_missing_final_newline_go_through(empty, path, old, new):
    after = edit(FILES[path], (old, new))
    empty.patch("0001-first.patch", (path, FILES[path], after))
    empty.pin()
    assert empty.run("check", "--wheel", empty.wheel)[0] == 0
    assert empty.run("apply", "--tree", empty.tree)[0] == 0
    assert (empty.tree / path).read_bytes() == after


def test_lf_context_does_not_match_a_crlf_file(empty):
    lf = FILES["mini/crlf.py"].replace(b"\r", b"")
    empty.patch("0001-first.patch", ("mini/crlf.py", lf, edit(lf, ("TWO = 2", "TWO = 22"))))
    code, out = empty.run("export", "--wheel", empty.wheel)
    assert code == 1
    assert r"hunk 1, line 1: expected 'ONE = 1', found 'ONE = 1\r'" in out


# -- digest --------------------------------------------------------------------------------------------------


def test_digest_depends_on_content_alone(bench, tmp_path):
    _, first = bench.run("digest")
    assert len(first.strip()) == 64
    cache = bench.dir / "files/mini/extra/__pycache__"
    cache.mkdir()
    (cache / "hook.cpython-311.pyc").write_bytes(b"x")
    (bench.dir / "files/mini/.DS_Store").write_bytes(b"x")
    (bench.dir / "series").write_text("# other words\n0001-first.patch\n\n  0002-second.patch\n")
    for path in bench.dir.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    bench.dir = bench.dir.rename(tmp_path / "elsewhere")
    assert bench.run("digest") == (0, first)


@pytest.mark.parametrize("change", ["patch", "order", "module", "name"])
def test_digest_changes_with_every_part(bench, change):
    _, first = bench.run("digest")
    if change == "patch":
        path = bench.dir / "0001-first.patch"
        path.write_bytes(edit(path.read_bytes(), ("gate is", "gates are")))
    elif change == "order":
        (bench.dir / "series").write_text("0001-first.patch\n")
    elif change == "module":
        (bench.dir / "files/mini/extra/hook.py").write_text("X = 2\n")
    else:
        (bench.dir / "files/mini/extra/hook.py").rename(bench.dir / "files/mini/extra/hook2.py")
    code, second = bench.run("digest")
    assert (code, second == first) == (0, False)


# -- export --------------------------------------------------------------------------------------------------


def test_export_pins_wheel_and_images(bench):
    pin = series_files.load_pin(bench.dir)
    assert (pin.package, pin.version, pin.wheel) == ("mini", "1.0", bench.wheel.name)
    assert pin.wheel_sha256 == hashlib.sha256(bench.wheel.read_bytes()).hexdigest()
    assert pin.files["mini/engine.py"] == (
        hashlib.sha256(FILES["mini/engine.py"]).hexdigest(),
        hashlib.sha256(TWO).hexdigest(),
    )
    before = snapshot(bench.dir)
    code, out = bench.run("export", "--wheel", bench.wheel)
    assert (code, "nothing changed" in out) == (0, True)
    assert snapshot(bench.dir) == before


def export(bench: Bench, name: str, *args: object) -> tuple[int, str]:
    return bench.run("export", "--tree", bench.tree, "--wheel", bench.wheel, "--patch", name, *args)


def test_export_new_patch_has_a_skeleton_that_check_refuses(bench):
    bench.run("apply", "--tree", bench.tree)
    for path, old, new in (
        ("mini/engine.py", "    a = 5\n", "    a = 55\n"),
        ("mini/data.txt", "second\n", "second\nmore\n"),
    ):
        (bench.tree / path).write_bytes(edit((bench.tree / path).read_bytes(), (old, new)))
    code, out = export(bench, "0003-third-hook.patch")
    assert code == 0, out
    header, made = diffs.parse((bench.dir / "0003-third-hook.patch").read_bytes())
    assert header.startswith(b"Third hook\n\n")
    assert [diff.path for diff in made] == ["mini/data.txt", "mini/engine.py"]
    assert (bench.dir / "series").read_text().split("\n")[-2] == "0003-third-hook.patch"
    code, out = bench.run("check", "--wheel", bench.wheel)
    assert code == 1
    assert "0003-third-hook.patch: the header still says FIXME" in out
    path = bench.dir / "0003-third-hook.patch"
    path.write_bytes(path.read_bytes().replace(b"FIXME", b"because"))
    assert bench.run("check", "--wheel", bench.wheel)[0] == 0
    fresh = install(bench.wheel, bench.root / "fresh")
    assert bench.run("apply", "--tree", fresh)[0] == 0
    for path in ("mini/engine.py", "mini/data.txt", "mini/model.py"):
        assert (fresh / path).read_bytes() == (bench.tree / path).read_bytes()


def test_export_changed_patch_below_another_on_the_same_file(bench):
    """A longer first patch keeps its header, and the second one gets new line numbers."""
    bench.run("apply", "--tree", bench.tree)
    target = bench.tree / "mini/engine.py"
    target.write_bytes(edit(target.read_bytes(), ("    hook = 1\n", "    hook = 1\n    hook += 1\n")))
    code, out = export(bench, "0001-first.patch")
    assert code == 0, out
    header, (diff,) = diffs.parse((bench.dir / "0001-first.patch").read_bytes())
    assert header == HEADER
    assert diff.changed_lines == 2
    assert b"hook = 2" not in (bench.dir / "0001-first.patch").read_bytes()
    second = (bench.dir / "0002-second.patch").read_bytes()
    assert b"@@ -56,6 +56,7 @@" in second
    assert bench.run("check", "--wheel", bench.wheel)[0] == 0
    fresh = install(bench.wheel, bench.root / "fresh")
    assert bench.run("apply", "--tree", fresh)[0] == 0
    assert (fresh / "mini/engine.py").read_bytes() == target.read_bytes()
    assert (fresh / "mini/model.py").read_bytes() == MODEL


def test_export_of_an_unchanged_tree_changes_nothing(bench):
    bench.run("apply", "--tree", bench.tree)
    before = snapshot(bench.dir)
    for name in ("0001-first.patch", "0002-second.patch"):
        assert export(bench, name)[0] == 0
    assert snapshot(bench.dir) == before


def test_export_between_two_patches(bench):
    path = bench.dir / "0002-second.patch"
    path.rename(bench.dir / "0004-second.patch")
    (bench.dir / "series").write_text("0001-first.patch\n0004-second.patch\n")
    bench.pin()
    bench.run("apply", "--tree", bench.tree)
    target = bench.tree / "mini/engine.py"
    target.write_bytes(edit(target.read_bytes(), ("    a = 5\n", "    a = 5\n    middle = 1\n")))
    code, out = export(bench, "0003-middle.patch")
    assert code == 0, out
    assert (bench.dir / "series").read_text().split() == [
        "0001-first.patch",
        "0003-middle.patch",
        "0004-second.patch",
    ]
    fresh = install(bench.wheel, bench.root / "fresh")
    assert bench.run("apply", "--tree", fresh)[0] == 0
    assert (fresh / "mini/engine.py").read_bytes() == target.read_bytes()


def test_export_takes_only_files_of_the_patch_and_names_the_rest(bench):
    bench.run("apply", "--tree", bench.tree)
    for path, old, new in (
        ("mini/engine.py", "    a = 5\n", "    a = 55\n"),
        ("mini/model.py", "NORM = 1\n", "NORM = 2\n"),
        ("mini/extra/hook.py", "X = 1\n", "X = 2\n"),
    ):
        (bench.tree / path).write_bytes(edit((bench.tree / path).read_bytes(), (old, new)))
    (bench.tree / "mini/novel.py").write_text("N = 1\n")
    code, out = export(bench, "0001-first.patch")
    assert code == 0, out
    assert b"mini/model.py" not in (bench.dir / "0001-first.patch").read_bytes()
    assert "mini/model.py differs too but is not part of 0001-first.patch: name it with --file" in out
    assert "mini/novel.py is new in the tree: copy it to files/" in out
    assert "mini/extra/hook.py differs from files/mini/extra/hook.py" in out
    code, out = export(bench, "0002-second.patch", "--file", "mini/model.py")
    assert code == 0, out
    _, made = diffs.parse((bench.dir / "0002-second.patch").read_bytes())
    assert [diff.path for diff in made] == ["mini/model.py"]


def test_export_from_a_tree_without_the_earlier_patch(bench):
    target = bench.tree / "mini/engine.py"
    target.write_bytes(edit(target.read_bytes(), ("    a = 9\n", "    a = 99\n")))
    before = snapshot(bench.dir)
    code, out = export(bench, "0002-second.patch")
    assert code == 1
    assert "mini/engine.py: the tree lacks 0001-first.patch: apply the series to the tree" in out
    assert snapshot(bench.dir) == before


def test_export_of_lines_that_a_later_patch_changes(bench):
    bench.run("apply", "--tree", bench.tree)
    target = bench.tree / "mini/engine.py"
    target.write_bytes(edit(target.read_bytes(), ("    hook = 2\n", "    hook = 3\n")))
    before = snapshot(bench.dir)
    code, out = export(bench, "0001-first.patch")
    assert code == 1
    assert "mini/engine.py: the change cannot be told apart from 0002-second.patch" in out
    assert snapshot(bench.dir) == before


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("third.patch", (), "is not a patch name of the form NNNN-what.patch"),
        ("0002-other.patch", (), "the number 0002 is taken"),
        ("0003-none.patch", (), "the tree has no change for it"),
        (
            "0003-new.patch",
            ("--file", "mini/novel.py"),
            "mini/novel.py is not in mini 1.0: new files belong in",
        ),
        ("0003-new.patch", ("--file", "../x.py"), "../x.py is not in mini 1.0"),
    ],
)
def test_export_refusals(bench, name, args, message):
    bench.run("apply", "--tree", bench.tree)
    before = snapshot(bench.dir)
    code, out = export(bench, name, *args)
    assert code == 1
    assert message in out
    assert snapshot(bench.dir) == before


def test_export_does_not_delete_files(bench):
    bench.run("apply", "--tree", bench.tree)
    (bench.tree / "mini/model.py").unlink()
    code, out = export(bench, "0002-second.patch")
    assert code == 1
    assert "mini/model.py is gone from the tree: a hook does not delete files" in out


def test_export_needs_tree_and_patch_together(bench):
    assert bench.run("export", "--wheel", bench.wheel, "--patch", "0003-x.patch")[0] == 1
    assert bench.run("export", "--wheel", bench.wheel, "--tree", bench.tree)[0] == 1


def test_export_refuses_another_package(bench, tmp_path):
    other = make_wheel(tmp_path / "other-1.0-py3-none-any.whl", FILES, name="other")
    code, out = bench.run("export", "--wheel", other)
    assert code == 1
    assert "is other 1.0, but the series is for mini" in out


# -- refresh -------------------------------------------------------------------------------------------------


def states(facts: dict) -> dict[str, str]:
    return {patch["name"][:4]: patch["state"] for patch in facts["patches"]}


def test_refresh_clean(bench):
    wheel = bench.other({"mini/data.txt": b"other\n"})
    facts = bench.json("refresh", "--wheel", wheel)
    assert facts["exit"] == 0
    assert states(facts) == {"0001": "clean", "0002": "clean"}


def test_refresh_moved_says_by_how_much_and_writes(bench):
    wheel = bench.other({"mini/engine.py": b"# one\n# two\n" + FILES["mini/engine.py"]})
    before = snapshot(bench.dir)
    code, out = bench.run("refresh", "--wheel", wheel)
    assert code == 0
    assert "0001-first.patch: moved\n  mini/engine.py: hunk 1 moved by +2 lines" in out
    assert snapshot(bench.dir) == before
    code, out = bench.run("refresh", "--wheel", wheel, "--write")
    assert code == 0
    after = snapshot(bench.dir)
    changed = [path for path in after if after[path] != before[path]]
    assert changed == ["0001-first.patch", "0002-second.patch", "upstream.toml"]
    assert after["0001-first.patch"] == before["0001-first.patch"].replace(b"-12,6 +12,7", b"-14,6 +14,7")
    assert bench.run("check", "--wheel", wheel)[0] == 0
    tree = install(wheel, bench.root / "new")
    assert bench.run("apply", "--tree", tree)[0] == 0
    assert (tree / "mini/engine.py").read_bytes() == b"# one\n# two\n" + TWO


def test_refresh_one_of_two_hunks_moved(empty):
    after = edit(FILES["mini/engine.py"], ("    a = 1\n", "    a = 11\n"), ("    a = 8\n", "    a = 88\n"))
    empty.patch("0001-first.patch", ("mini/engine.py", FILES["mini/engine.py"], after))
    empty.pin()
    grown = edit(FILES["mini/engine.py"], ("def f5():\n", "# between\ndef f5():\n"))
    wheel = empty.other({"mini/engine.py": grown})
    facts = empty.json("refresh", "--wheel", wheel)
    assert facts["exit"] == 0
    assert facts["patches"][0]["files"][0]["offsets"] == [0, 1]
    tree = install(wheel, empty.root / "new")
    empty.json("refresh", "--wheel", wheel, "--write")
    assert empty.run("apply", "--tree", tree)[0] == 0
    expected = edit(grown, ("    a = 1\n", "    a = 11\n"), ("    a = 8\n", "    a = 88\n"))
    assert (tree / "mini/engine.py").read_bytes() == expected


def test_refresh_hunks_that_changed_places(empty):
    swapped = ENGINE.replace("f1()", "fx()").replace("a = 1\n", "a = @\n").replace("b = a + 1\n", "b = a + @\n")
    swapped = swapped.replace("f8()", "f1()").replace("a = 8\n", "a = 1\n").replace("b = a + 8\n", "b = a + 1\n")
    swapped = swapped.replace("fx()", "f8()").replace("@", "8")
    after = edit(FILES["mini/engine.py"], ("    b = a + 1\n", "    b = 11\n"), ("    b = a + 8\n", "    b = 88\n"))
    body = [
        (
            n,
            [
                (b" ", b"    a = %d\n" % n),
                (b"-", b"    b = a + %d\n" % n),
                (b"+", b"    b = %d\n" % (n * 11)),
            ],
        )
        for n in (1, 8)
    ]
    hunks = tuple(diffs.Hunk(6 * n + 2, 6 * n + 2, tuple(lines)) for n, lines in body)
    diff = diffs.FileDiff("mini/engine.py", hunks)
    assert diffs.apply_strict(diff, FILES["mini/engine.py"]) == after
    empty.raw_patch("0001-first.patch", diffs.render(HEADER, (diff,)))
    empty.pin()
    code, out = empty.run("refresh", "--wheel", empty.other({"mini/engine.py": swapped.encode()}))
    assert code == 1
    assert "hunk 2 fits only at line 8, above the end of the hunk before it" in out


def test_refresh_anchor_found_twice(bench):
    doubled = FILES["mini/engine.py"].replace(b"def f0", b"def g0") + FILES["mini/engine.py"]
    wheel = bench.other({"mini/engine.py": b"# moved\n" + doubled})
    code, out = bench.run("refresh", "--wheel", wheel)
    assert code == 1
    assert "0001-first.patch: conflict" in out
    assert "the hunk's lines stand at lines 13, 85: add context" in out


def test_refresh_anchor_found_nowhere_names_the_nearest(bench):
    wheel = bench.other({"mini/model.py": b"# new\n" + edit(FILES["mini/model.py"], ("HEADS = 8", "HEADS = 9"))})
    before = snapshot(bench.dir)
    code, out = bench.run("refresh", "--wheel", wheel, "--write")
    assert code == 1
    assert "0002-second.patch: mini/model.py: hunk 1, line 5: expected 'HEADS = 8', found 'HEADS = 9'" in out
    assert "the most similar place is line 2" in out
    assert "upstream.toml still pins the old version" in out
    assert snapshot(bench.dir) == before


def test_refresh_already_upstream(bench):
    wheel = bench.other({"mini/engine.py": b"# new\n" + ONE})
    facts = bench.json("refresh", "--wheel", wheel)
    assert facts["exit"] == 1
    assert states(facts) == {"0001": "already-upstream", "0002": "moved"}
    assert facts["errors"] == ["0001-first.patch: mini/engine.py: already upstream, drop the patch"]


def test_refresh_partly_upstream_is_a_conflict(bench):
    wheel = bench.other({"mini/model.py": MODEL})
    facts = bench.json("refresh", "--wheel", wheel)
    assert states(facts) == {"0001": "clean", "0002": "conflict"}
    assert facts["errors"] == ["0002-second.patch: mini/model.py: already upstream, take this file out of the patch"]


def test_refresh_does_not_apply_a_hook_that_is_there_twice(empty):
    """The result stands in the file, the anchor elsewhere: moving there would patch the wrong place."""
    part = b"def g():\n    x = 1\n    y = 2\n    z = 3\n"
    hooked = b"def g():\n    x = 1\n    y = 22\n    z = 3\n"
    empty.wheel = empty.other({"mini/part.py": part}, "1.0")
    empty.patch("0001-first.patch", ("mini/part.py", part, hooked))
    empty.pin()
    facts = empty.json("refresh", "--wheel", empty.other({"mini/part.py": hooked + part}))
    assert states(facts) == {"0001": "conflict"}
    assert "its result already stands in the file: decide by hand" in facts["errors"][0]


def test_refresh_file_gone_and_new_file_upstream(bench):
    wheel = bench.other({"mini/model.py": None, "mini/extra/hook.py": b"X = 1\n"})
    facts = bench.json("refresh", "--wheel", wheel)
    assert facts["exit"] == 1
    assert states(facts) == {"0001": "clean", "0002": "file-gone"}
    assert "0002-second.patch: mini/model.py: there is no such file" in facts["errors"]
    assert "files/mini/extra/hook.py: mini 1.1 has the same file: drop it from files/" in facts["errors"]


def test_refresh_result_that_does_not_compile(bench):
    broken = FILES["mini/engine.py"] + b"def (:\n"
    code, out = bench.run("refresh", "--wheel", bench.other({"mini/engine.py": broken}))
    assert code == 1
    assert "mini/engine.py does not compile" in out


def test_refresh_conflict_leaves_later_patches_judged(bench):
    changed = edit(FILES["mini/engine.py"], ("    a = 2\n", "    a = 222\n"))
    facts = bench.json("refresh", "--wheel", bench.other({"mini/engine.py": changed}))
    assert states(facts) == {"0001": "conflict", "0002": "moved"}


def test_move_to_another_version_with_a_conflict(bench):
    """The README's way: set the patch aside, pin, apply the rest, make the hook again under the same name."""
    new_model = edit(FILES["mini/model.py"], ("HEADS = 8\n", "HEADS = 9\n"))
    new_engine = b"# new\n" + FILES["mini/engine.py"]
    wheel = bench.other({"mini/model.py": new_model, "mini/engine.py": new_engine})
    assert bench.run("refresh", "--wheel", wheel, "--write")[0] == 1
    (bench.dir / "series").write_text("# order\n0001-first.patch\n")
    code, out = bench.run("export", "--wheel", wheel)
    assert (code, "warning: 0002-second.patch is not listed in series" in out) == (0, True)
    tree = install(wheel, bench.root / "new")
    assert bench.run("apply", "--tree", tree)[0] == 0
    hooked = {
        "mini/model.py": edit(new_model, ("HEADS = 9\n", "HEADS = 16\n")),
        "mini/engine.py": b"# new\n" + TWO,
    }
    for path, data in hooked.items():
        (tree / path).write_bytes(data)
    code, out = bench.run("export", "--wheel", wheel, "--tree", tree, "--patch", "0002-second.patch")
    assert code == 0, out
    assert (bench.dir / "0002-second.patch").read_bytes().startswith(HEADER)
    assert bench.run("check", "--wheel", wheel)[0] == 0
    fresh = install(wheel, bench.root / "fresh")
    assert bench.run("apply", "--tree", fresh)[0] == 0
    assert {path: (fresh / path).read_bytes() for path in hooked} == hooked


def test_drop_a_patch_below_another(bench):
    (bench.dir / "0001-first.patch").unlink()
    (bench.dir / "series").write_text("0002-second.patch\n")
    assert bench.run("refresh", "--wheel", bench.wheel, "--write")[0] == 0
    assert bench.run("check", "--wheel", bench.wheel)[0] == 0
    assert bench.run("apply", "--tree", bench.tree)[0] == 0
    expected = edit(FILES["mini/engine.py"], ("    a = 9\n", "    a = 9\n    hook = 2\n"))
    assert (bench.tree / "mini/engine.py").read_bytes() == expected


# -- diffs ---------------------------------------------------------------------------------------------------


def test_made_diffs_render_parse_apply_and_reverse():
    """Pseudo-random edits of a text full of lines that look like diff syntax, from a fixed seed."""
    chance = random.Random(20260901)
    stock = [
        b"a",
        b"",
        b"c\r",
        b"\tx",
        b"--- q",
        b"+++ z",
        b"@@ -1 +1 @@",
        b"diff --git a/b b/b",
        b"\\ No",
        b"-- ",
    ]
    done = 0
    for _ in range(400):
        old = [chance.choice(stock) + b"\n" for _ in range(chance.randint(8, 40))]
        new = list(old)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(new))
            new[at : at + chance.randint(0, 2)] = [chance.choice(stock) + b"!\n"] * chance.randint(0, 2)
        before, after = b"x\n" + b"".join(old) + b"end", b"x\n" + b"".join(new) + b"end\n"
        diff = diffs.make("mini/x.txt", before, after)
        try:
            header, parsed = diffs.parse(diffs.render(b"Subject\n", (diff,)))
        except diffs.DiffError as error:
            assert "no context that could pin it" in str(error)
            continue
        assert (header, parsed) == (b"Subject\n\n", (diff,))
        assert diffs.apply_strict(diff, before) == after
        assert diffs.apply_strict(diff.reversed(), after) == before
        done += 1
    assert done > 350


def test_runs_without_patch_git_and_network_tools(bench, tmp_path):
    """As in the image build: an empty PATH, no site packages, any working directory."""
    command = [sys.executable, "-S", str(PATCHES / "series.py"), "check", "--series", str(bench.dir)]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--wheel", str(bench.wheel)],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 10
