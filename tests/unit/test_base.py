"""images/base.py with a fake mmdebstrap: drift, the cache of bases, and every way in which the bootstrap fails."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from images import base
from qualify.errors import CannotRun, Rejected, exit_code

ROOT = Path(__file__).resolve().parents[2]
SHA = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "c", "new")}
LOCKED = f"{base.LOCK_HEADER}alpha 1.0-1 amd64 {SHA['a']}\nbeta 2:2.0+deb12u1 all {SHA['b']}\n"


def stanza(name: str, version: str, architecture: str, sha256: str) -> str:
    """As `apt-cache show` prints it: fields in its order, folded ones, a description with paragraphs."""
    return (
        f"Package: {name}\nVersion: {version}\nArchitecture: {architecture}\nMaintainer: A: B <a@example.org>\n"
        "Depends: libc6 (>= 2.36),\n other (= 1): x\nDescription: one line\n Version: 9.9\n .\n SHA256: not this one\n"
        "Tag: role::program,\n SHA256: nor this\n"
        f"Size: 123\nSHA256: {sha256}\n"
    )


SAME = stanza("alpha", "1.0-1", "amd64", SHA["a"]) + "\n" + stanza("beta", "2:2.0+deb12u1", "all", SHA["b"])
MOVED = stanza("alpha", "1.0-2", "amd64", SHA["new"]) + "\n" + stanza("beta", "2:2.0+deb12u1", "all", SHA["b"])


# The lock and the drift from it


def test_parse_apt_cache_reads_folded_fields():
    assert base.parse_apt_cache(SAME + "\n\n") == {
        "alpha": f"1.0-1 amd64 {SHA['a']}",
        "beta": f"2:2.0+deb12u1 all {SHA['b']}",
    }


def test_parse_apt_cache_skips_what_no_mirror_holds():
    # apt shows an installed package that the mirror has dropped from dpkg's status file, without a digest.
    assert base.parse_apt_cache("Package: gone\nStatus: install ok installed\nVersion: 1\nArchitecture: all\n") == {}


def test_read_packages_is_what_parse_apt_cache_gives():
    assert base.read_packages(LOCKED + "\n") == base.parse_apt_cache(SAME)


@pytest.mark.parametrize(
    ("installed", "lines"),
    [
        ({}, []),
        ({"alpha": f"1.0-2 amd64 {SHA['new']}"}, ["alpha: 1.0-1 -> 1.0-2"]),
        (
            {"alpha": f"1.0-1 amd64 {SHA['new']}"},
            [f"alpha: 1.0-1 has other bytes than base.lock says ({SHA['new']})"],
        ),
        ({"alpha": None}, [f"alpha: not installed (1.0-1 amd64 {SHA['a']})"]),
        ({"gamma": f"3 all {SHA['c']}"}, [f"gamma: not in base.lock (3 all {SHA['c']})"]),
        (
            {"gamma": f"3 all {SHA['c']}", "beta": f"3 all {SHA['new']}", "alpha": None},
            [
                f"alpha: not installed (1.0-1 amd64 {SHA['a']})",
                "beta: 2:2.0+deb12u1 -> 3",
                f"gamma: not in base.lock (3 all {SHA['c']})",
            ],
        ),
    ],
    ids=["equal", "moved", "other-bytes", "missing", "new", "sorted"],
)
def test_drift_is_one_line_a_package(installed, lines):
    locked = base.read_packages(LOCKED)
    today = {name: value for name, value in {**locked, **installed}.items() if value}
    assert base.drift(locked, today) == lines


def test_the_lock_of_the_repository():
    locked = base.read_packages((ROOT / "images/base.lock").read_text())
    wanted, _ = base.settings()
    assert set(wanted["packages"]) <= locked.keys()
    for name, rest in locked.items():
        version, architecture, sha256 = rest.split()
        assert architecture in ("amd64", "all"), name
        assert len(bytes.fromhex(sha256)) == 32, name
        assert version[0].isdigit(), name
    assert locked["python3.11-minimal"].startswith("3.11.")


# The bootstrap


def held(folder: Path) -> str:
    """What the root file system below ``folder`` is, by its one file; its /dev must be there with the epoch."""
    with tarfile.open(folder / "rootfs.tar") as tar:
        device_folder = tar.getmember("./dev")
        assert (device_folder.isdir(), device_folder.mode, device_folder.mtime) == (True, 0o755, base.settings()[1])
        return tar.extractfile("what").read().decode()


@pytest.fixture
def bootstrap(tmp_path, monkeypatch, commands):
    """base.build with a fake mmdebstrap, its lock and settings in ``tmp_path``."""
    fakes = commands()
    monkeypatch.setenv("PATH", f"{fakes.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(base, "HERE", tmp_path)
    monkeypatch.setattr(base, "LOCK", tmp_path / "base.lock")
    (tmp_path / "base.lock").write_text(LOCKED)
    write_settings(tmp_path)

    def mirror(packages: str = SAME, rootfs: str = "a root file system", before: str = "") -> None:
        """What the mirrors hold: the fake does the work of the last arguments and of the listing hook."""
        (tmp_path / "packages").write_text(packages)
        fakes.add(
            "mmdebstrap",
            f"{before}\n"
            'for a; do case $a in *"> \'"*packages.txt*) list=${a##*"> \'"};; */rootfs.tar) tar=$a;; esac; done\n'
            f'cp "{tmp_path}/packages" "${{list%\\\'}}"\n'
            f'printf "%s" "{rootfs}" >"{tmp_path}/what"; tar -C "{tmp_path}" -cf "$tar" what\n'
            f'printf "%s" "$SOURCE_DATE_EPOCH $LC_ALL" >"{tmp_path}/environment"',
        )

    mirror()
    return SimpleNamespace(
        mirror=mirror,
        fakes=fakes,
        cache=tmp_path / "cache",
        build=lambda strict=False: base.build(tmp_path / "cache", strict),
        runs=lambda: len(fakes.calls("mmdebstrap")),
    )


def write_settings(folder: Path, epoch: int = 1_700_000_000, **changes) -> None:
    settings = {
        "suite": "bookworm",
        "mirrors": ["deb http://mirror.invalid/debian bookworm main"],
        "packages": ["alpha", "beta"],
        "exclude": ["/usr/share/man/*"],
        "include": ["/usr/share/doc/*/copyright"],
        **changes,
    }
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (folder / "image.toml").write_text(f"source_date_epoch = {epoch}\n[base]\n{lines}")


def leavings(cache: Path) -> list[str]:
    """What lies in the cache of bases that is not a base under its key."""
    return [path.name for path in (cache / "base").glob("*") if path.name.startswith("new.")]


def test_build_makes_a_base_once(bootstrap, tmp_path):
    folder = bootstrap.build()
    assert held(folder) == "a root file system"
    data = (folder / "rootfs.tar").read_bytes()
    assert (folder / "rootfs.sha256").read_text().strip() == hashlib.sha256(data).hexdigest()
    assert (folder / "drift.txt").read_text() == ""
    assert sorted(path.name for path in folder.iterdir()) == ["drift.txt", "rootfs.sha256", "rootfs.tar"]
    assert (tmp_path / "environment").read_text() == "1700000000 C.UTF-8"
    assert leavings(bootstrap.cache) == []
    assert bootstrap.build() == folder
    assert bootstrap.runs() == 1


def test_the_bootstrap_gets_the_settings(bootstrap):
    bootstrap.build()
    call = bootstrap.fakes.calls("mmdebstrap")[0]
    assert "--include=alpha,beta bookworm " in call
    assert call.endswith("/rootfs.tar deb http://mirror.invalid/debian bookworm main")
    assert "--dpkgopt=path-exclude=/usr/share/man/*" in call
    assert "--dpkgopt=path-include=/usr/share/doc/*/copyright" in call


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: write_settings(folder, epoch=1_700_000_001),
        lambda folder: write_settings(folder, packages=["alpha"]),
        lambda folder: write_settings(folder, mirrors=["deb http://other.invalid/debian bookworm main"]),
        lambda folder: write_settings(folder, exclude=[]),
        lambda folder: (folder / "base.lock").write_text(LOCKED.replace("1.0-1", "1.0-2")),
    ],
    ids=["epoch", "packages", "mirrors", "exclude", "lock"],
)
def test_other_settings_or_another_lock_make_another_base(bootstrap, tmp_path, change):
    first = bootstrap.build()
    change(tmp_path)
    assert bootstrap.build() != first
    assert bootstrap.runs() == 2
    assert first.exists()


def test_drift_is_reported_each_time_and_recorded(bootstrap, capsys):
    bootstrap.mirror(MOVED)
    folder = bootstrap.build()
    assert (folder / "drift.txt").read_text() == "alpha: 1.0-1 -> 1.0-2\n"
    assert "base drift: alpha: 1.0-1 -> 1.0-2\n" in capsys.readouterr().err
    assert bootstrap.build() == folder
    assert capsys.readouterr().err == "base drift: alpha: 1.0-1 -> 1.0-2\n"


def test_strict_refuses_drift_cached_or_not(bootstrap, capsys):
    bootstrap.mirror(MOVED)
    for _ in range(2):
        assert exit_code(lambda: bootstrap.build(strict=True) and 0) == 1
        listed, said = capsys.readouterr().err.splitlines()[-2:]
        assert listed == "base drift: alpha: 1.0-1 -> 1.0-2"
        assert said.startswith("rejected: STRICT=1 and 1 base packages differ from images/base.lock (listed above)")
    assert bootstrap.runs() == 1


def test_strict_takes_a_base_that_is_the_locked_one(bootstrap):
    assert bootstrap.build(strict=True).exists()


def test_a_flipped_byte_in_a_cached_base_is_named(bootstrap):
    folder = bootstrap.build()
    spoilt = b"x" + (folder / "rootfs.tar").read_bytes()[1:]
    (folder / "rootfs.tar").write_bytes(spoilt)
    with pytest.raises(Rejected) as refusal:
        bootstrap.build()
    assert str(folder / "rootfs.tar") in str(refusal.value)
    assert str(refusal.value).endswith("delete the folder and run again")
    assert (folder / "rootfs.tar").read_bytes() == spoilt


def test_a_failing_mmdebstrap_says_why(bootstrap):
    bootstrap.fakes.add("mmdebstrap", 'echo "I: starting" >&2\necho "E: no network for you" >&2\nexit 1')
    with pytest.raises(CannotRun, match=r"^mmdebstrap failed: no network for you \(network to the Debian mirrors\?"):
        bootstrap.build()
    assert list((bootstrap.cache / "base").iterdir()) == []


def test_a_failing_mmdebstrap_without_an_error_line_shows_its_end(bootstrap):
    bootstrap.fakes.add("mmdebstrap", 'echo "tar: No space left on device"\nexit 2')
    with pytest.raises(CannotRun, match="mmdebstrap failed: tar: No space left on device"):
        bootstrap.build()
    assert list((bootstrap.cache / "base").iterdir()) == []


def test_no_mmdebstrap(bootstrap, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert exit_code(lambda: bootstrap.build() and 0) == 2
    said = "cannot run: mmdebstrap is missing: install it (Debian, Ubuntu: apt-get install mmdebstrap)\n"
    assert capsys.readouterr().err == said


def test_a_disk_too_small(bootstrap, monkeypatch):
    monkeypatch.setattr(base.shutil, "disk_usage", lambda path: SimpleNamespace(free=1.9e9))
    with pytest.raises(CannotRun, match=r"^disk full: the base needs 2 GB in .*, 1.9 GB are free"):
        bootstrap.build()
    assert bootstrap.runs() == 0


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_killed_half_way_it_leaves_no_base(bootstrap, tmp_path, signal):
    """mmdebstrap has written half of its output when its parent, the build, is killed."""
    bootstrap.mirror(
        before=f'for a; do case $a in */rootfs.tar) echo half >"$a";; esac; done\nkill -{signal} $PPID; exit'
    )
    code = (
        "import sys; from pathlib import Path; from images import base; "
        f"base.HERE, base.LOCK = Path({str(tmp_path)!r}), Path({str(tmp_path / 'base.lock')!r}); "
        f"base.build(Path({str(bootstrap.cache)!r}), False)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode < 0
    assert [path.name for path in (bootstrap.cache / "base").iterdir()] == leavings(bootstrap.cache) != []
    bootstrap.mirror()
    folder = bootstrap.build()
    assert held(folder) == "a root file system"


def test_a_killed_mmdebstrap_leaves_no_base(bootstrap):
    bootstrap.mirror(before="kill -KILL $$")
    with pytest.raises(CannotRun, match=r"^mmdebstrap failed"):
        bootstrap.build()
    assert list((bootstrap.cache / "base").iterdir()) == []


# lock


def test_lock_writes_what_the_mirrors_hold(bootstrap, tmp_path):
    bootstrap.mirror(MOVED)
    base.lock(tmp_path / "cache")
    assert (tmp_path / "base.lock").read_text() == (
        f"{base.LOCK_HEADER}alpha 1.0-2 amd64 {SHA['new']}\nbeta 2:2.0+deb12u1 all {SHA['b']}\n"
    )
    assert list((tmp_path / "cache").iterdir()) == []
    assert bootstrap.build(strict=True).exists()  # with the new lock there is no drift


def test_a_failing_lock_keeps_the_old_one(bootstrap, tmp_path):
    bootstrap.fakes.add("mmdebstrap", 'echo "E: broken"; exit 1')
    with pytest.raises(CannotRun):
        base.lock(tmp_path / "cache")
    assert (tmp_path / "base.lock").read_text() == LOCKED
    assert list((tmp_path / "cache").iterdir()) == []


# The hooks


def test_the_listing_hook_survives_two_shells(bootstrap, tmp_path, monkeypatch):
    """mmdebstrap hands a hook to `sh -c` with the root as $1; dpkg-query must get its own ${...} unexpanded."""
    calls = bootstrap.fakes
    calls.add("chroot", 'shift; exec "$@"')
    calls.add("dpkg-query", 'printf "%s" "$3" >"$LISTED"; printf "alpha=1\\n"')
    calls.add("apt-cache", 'printf "%s\\n" "$*"')
    calls.add(
        "mmdebstrap",
        "for a; do case $a in --customize-hook=chroot*) hook=${a#--customize-hook=};;"
        ' */rootfs.tar) tar -cf "$a" -T /dev/null;; esac; done\n'
        'sh -c "$hook" hook /nowhere; list=${hook##*"> \'"}; cp "${list%\\\'}" "$SHOWN"',
    )
    shown, listed = tmp_path / "shown", tmp_path / "listed"
    monkeypatch.setenv("SHOWN", str(shown))
    monkeypatch.setenv("LISTED", str(listed))
    bootstrap.build()
    assert listed.read_text() == "${Package}=${Version}\\n"
    assert shown.read_text() == "show --no-all-versions alpha=1\n"


def test_the_cleaning_hooks_take_away_what_the_host_left(tmp_path):
    root = tmp_path / "root"
    gone = [
        "etc/.pwd.lock", "etc/passwd-", "run/x/pid", "tmp/x", "var/log/dpkg.log", "var/cache/apt/pkgcache.bin",
        "var/cache/apt/archives/a.deb", "var/cache/debconf/config.dat-old", "var/cache/ldconfig/aux-cache",
        "var/lib/apt/lists/deb.debian.org_InRelease", "var/lib/dpkg/status-old",
    ]  # fmt: skip
    kept = ["etc/passwd", "var/lib/dpkg/status", "var/cache/debconf/config.dat"]
    for name in [*gone, *kept, "etc/hostname", "etc/resolv.conf", "etc/hosts"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("of the host")
    for hook in base.CLEAN:
        subprocess.run(["sh", "-c", hook, "hook", str(root)], check=True)
    assert [name for name in gone if (root / name).exists()] == []
    assert [name for name in kept if not (root / name).exists()] == []
    assert [(root / name).read_text() for name in ("etc/hostname", "etc/resolv.conf")] == ["", ""]
    assert (root / "etc/hosts").read_text() == "127.0.0.1 localhost\n"
