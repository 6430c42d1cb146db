"""images/wheels.py: the cache, the downloads and the lock, each kind of fault with its message and exit code."""

from __future__ import annotations

import hashlib
import http.server
import os
import socket
import subprocess
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from images import wheels
from qualify.errors import CannotRun, Rejected, exit_code

ROOT = Path(__file__).resolve().parents[2]


def content(name: str, size: int = 3000) -> bytes:
    return (hashlib.sha256(name.encode()).hexdigest() * (size // 64 + 1)).encode()[:size]


class Index:
    """A package index on the loopback interface that can be told to misbehave.

    ``files`` are what it serves; ``mood`` of a name is "cut" (half the bytes, then the connection closes) or "whole"
    (no ranges); ``asked`` are (name, Range header).
    """

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.mood: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                index.answer(self)

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name = request.path.rsplit("/", 1)[1]
        wanted = request.headers.get("Range")
        self.asked.append((name, wanted))
        if name not in self.files:
            request.send_error(404)
            return
        data, mood = self.files[name], self.mood.get(name)
        if wanted and mood != "whole":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            data = data[start:]
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2] if mood == "cut" else data)

    def wheel(self, name: str, size: int = 3000) -> wheels.Wheel:
        """Publish a wheel and return its line of the lock."""
        filename = f"{name}-1.0-py3-none-any.whl"
        data = self.files[filename] = content(name, size)
        digest = hashlib.sha256(data).hexdigest()
        return wheels.Wheel(name, "1.0", filename, f"{self.url}/packages/{filename}", size, digest)


@pytest.fixture
def index():
    server = Index()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No proxy before the loopback interface, and no half minute of retries."""
    monkeypatch.setenv("no_proxy", "*")
    command = list(wheels.CURL)
    command[command.index("--retry") + 1] = "0"
    monkeypatch.setattr(wheels, "CURL", command)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache/wheels"


def put(cache: Path, name: str, data: bytes) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / name
    path.write_bytes(data)
    return path


def outcome(capsys, locked: list[wheels.Wheel], cache: Path) -> tuple[int, str]:
    """Exit code and the one sentence of a fetch."""
    capsys.readouterr()
    code = exit_code(lambda: wheels.fetch(locked, cache) or 0)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("rejected: ", "cannot run: "))]
    assert len(said) == (code != 0)
    return code, said[0] if said else ""


# fetch


def test_fetch_brings_every_wheel_and_then_needs_no_network(index, cache, capsys):
    locked = [index.wheel(name) for name in ("one", "two", "three", "four", "five", "six")]
    assert outcome(capsys, locked, cache) == (0, "")
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == index.files
    index.asked.clear()
    assert outcome(capsys, locked, cache) == (0, "")
    assert index.asked == []


def test_a_flipped_byte_in_the_cache_is_named_and_nothing_is_deleted(index, cache, capsys):
    good, bad = index.wheel("good"), index.wheel("bad")
    data = bytearray(index.files[bad.filename])
    data[1234] ^= 1
    put(cache, good.filename, index.files[good.filename])
    path = put(cache, bad.filename, bytes(data))
    code, said = outcome(capsys, [good, bad], cache)
    assert code == 1
    assert str(path) in said
    assert bad.sha256 in said
    assert good.filename not in said
    assert said.endswith("delete the file and run again")
    assert path.read_bytes() == bytes(data)
    assert index.asked == []


def test_every_wrong_file_of_the_cache_is_named(index, cache, capsys):
    locked = [index.wheel(name) for name in ("one", "two", "three")]
    for wheel in locked[:2]:
        put(cache, wheel.filename, b"not a wheel")
    code, said = outcome(capsys, locked, cache)
    assert code == 1
    assert [wheel.filename in said for wheel in locked] == [True, True, False]
    assert index.asked == []  # a wrong cache is reported before anything is fetched


def test_an_interrupted_download_resumes(index, cache, capsys):
    wheel = index.wheel("half")
    put(cache, wheel.filename + ".part", index.files[wheel.filename][:1000])
    assert outcome(capsys, [wheel], cache)[0] == 0
    assert index.asked == [(wheel.filename, "bytes=1000-")]
    assert (cache / wheel.filename).read_bytes() == index.files[wheel.filename]
    assert not (cache / (wheel.filename + ".part")).exists()


def test_a_complete_part_is_verified_without_a_request(index, cache, capsys):
    wheel = index.wheel("whole")
    put(cache, wheel.filename + ".part", index.files[wheel.filename])
    assert outcome(capsys, [wheel], cache)[0] == 0
    assert index.asked == []


def test_a_part_longer_than_the_wheel_is_begun_again(index, cache, capsys):
    wheel = index.wheel("long")
    put(cache, wheel.filename + ".part", index.files[wheel.filename] + b"more")
    assert outcome(capsys, [wheel], cache)[0] == 0
    assert index.asked == [(wheel.filename, None)]


def test_a_server_without_ranges_gets_the_download_begun_again(index, cache, capsys):
    wheel = index.wheel("rangeless")
    index.mood[wheel.filename] = "whole"
    put(cache, wheel.filename + ".part", index.files[wheel.filename][:1000])
    assert outcome(capsys, [wheel], cache) == (0, "")
    assert (cache / wheel.filename).read_bytes() == index.files[wheel.filename]


@pytest.mark.parametrize("size", [3000, 2999])
def test_wrong_bytes_from_the_index_are_rejected_and_not_kept(index, cache, capsys, size):
    wheel = index.wheel("tampered")
    index.files[wheel.filename] = content("something else", size)
    code, said = outcome(capsys, [wheel], cache)
    assert code == 1
    assert wheel.filename in said
    assert wheel.sha256 in said
    assert hashlib.sha256(index.files[wheel.filename]).hexdigest() in said
    assert list(cache.iterdir()) == []


def test_a_wrong_part_is_thrown_away_and_fetched_from_the_beginning(index, cache, capsys):
    wheel = index.wheel("spoilt")
    put(cache, wheel.filename + ".part", b"x" * 1000)
    assert outcome(capsys, [wheel], cache)[0] == 0
    assert [path.name for path in cache.iterdir()] == [wheel.filename]
    assert (cache / wheel.filename).read_bytes() == index.files[wheel.filename]


def test_a_cut_connection_keeps_what_came_and_the_next_run_resumes(index, cache, capsys):
    wheel = index.wheel("cut")
    index.mood[wheel.filename] = "cut"
    code, said = outcome(capsys, [wheel], cache)
    assert code == 2
    assert f"download of {wheel.filename} failed" in said
    assert said.endswith("run again (it resumes)")
    assert [path.name for path in cache.iterdir()] == [wheel.filename + ".part"]
    index.mood.clear()
    assert outcome(capsys, [wheel], cache)[0] == 0
    assert index.asked[-1] == (wheel.filename, "bytes=1500-")


def test_a_missing_wheel_on_the_index_is_named(index, cache, capsys):
    wheel = index.wheel("gone")
    part = put(cache, wheel.filename + ".part", index.files[wheel.filename][:1000])
    del index.files[wheel.filename]
    code, said = outcome(capsys, [wheel], cache)
    assert code == 2
    assert f"download of {wheel.filename} failed" in said
    assert "404" in said
    assert part.read_bytes() == content("gone")[:1000]


def test_no_network(index, cache, capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    wheel = index.wheel("far")
    wheel = wheels.Wheel(**{**vars(wheel), "url": f"http://127.0.0.1:{port}/{wheel.filename}"})
    code, said = outcome(capsys, [wheel], cache)
    assert code == 2
    assert f"download of {wheel.filename} failed" in said
    assert "check network and disk" in said
    assert list(cache.iterdir()) == []


def test_a_silent_server_is_given_up(index, cache, capsys, monkeypatch, commands):
    """Neither a connection nor a transfer may hang for ever: curl itself has no such limit."""
    fakes = commands()
    fakes.add("curl", "exit 28")
    monkeypatch.setenv("PATH", f"{fakes.folder}:{os.environ['PATH']}")
    code, said = outcome(capsys, [index.wheel("slow")], cache)
    assert (code, "curl exit 28" in said) == (2, True)
    assert {"--connect-timeout", "--speed-time", "--speed-limit"} <= set(fakes.calls("curl")[0].split())


def test_a_failure_leaves_the_finished_wheels(index, cache, capsys):
    good, gone = index.wheel("good", 4000), index.wheel("gone")
    del index.files[gone.filename]
    code, said = outcome(capsys, [good, gone], cache)
    assert (code, gone.filename in said) == (2, True)
    assert [path.name for path in cache.iterdir()] == [good.filename]


def test_a_disk_too_small_is_told_before_anything_is_fetched(index, cache, capsys, monkeypatch):
    wheel = index.wheel("big")
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: SimpleNamespace(free=wheel.size - 1))
    code, said = outcome(capsys, [wheel], cache)
    assert code == 2
    assert said.startswith("cannot run: disk full: ")
    assert str(cache) in said
    assert "HORIZON_CACHE" in said
    assert index.asked == []


def test_what_came_already_needs_no_room(index, cache, capsys, monkeypatch):
    wheel = index.wheel("big")
    put(cache, wheel.filename + ".part", index.files[wheel.filename][:1000])
    monkeypatch.setattr(wheels.shutil, "disk_usage", lambda path: SimpleNamespace(free=wheel.size - 1000))
    assert outcome(capsys, [wheel], cache)[0] == 0


def test_a_disk_that_fills_during_the_download(index, cache, capsys):
    wheel = index.wheel("big")
    cache.mkdir(parents=True)
    (cache / (wheel.filename + ".part")).symlink_to("/dev/full")
    code, said = outcome(capsys, [wheel], cache)
    assert code == 2
    assert f"download of {wheel.filename} failed" in said
    assert "writ" in said.lower()
    assert not (cache / wheel.filename).exists()


def test_a_cache_that_cannot_be_made(tmp_path, index, capsys):
    (tmp_path / "file").write_text("")
    code, said = outcome(capsys, [index.wheel("any")], tmp_path / "file/wheels")
    assert code == 2
    assert str(tmp_path / "file/wheels") in said


def test_no_curl(index, cache, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = outcome(capsys, [index.wheel("any")], cache)
    assert (code, said) == (2, "cannot run: curl is missing: install it (Debian, Ubuntu: apt-get install curl)")


def test_configuration_of_the_machine_is_ignored(index, cache, capsys, monkeypatch, tmp_path):
    wheel = index.wheel("plain")
    (tmp_path / ".curlrc").write_text("max-filesize = 1\n")
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:1/simple\nno-index = true\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CURL_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    # The control: curl does obey that file when it is asked plainly.
    assert subprocess.run(["curl", "-s", "-o", "/dev/null", wheel.url], check=False).returncode == 63
    assert outcome(capsys, [wheel], cache) == (0, "")


# Progress


def test_progress_in_a_log(index, cache, capsys):
    locked = [index.wheel("one", 2_000_000), index.wheel("two", 1_000_000)]
    wheels.fetch(locked, cache)
    assert capsys.readouterr().err.splitlines()[-1] == "downloading 2 wheels: 3 of 3 MB"
    wheels.fetch(locked, cache)
    assert capsys.readouterr().err.splitlines()[-1] == "verifying cached wheels: 3 of 3 MB"


@pytest.mark.parametrize(
    ("live", "shown"),
    [
        (False, "wheels: 1 of 4 MB\nwheels: 3 of 4 MB\nwheels: 4 of 4 MB\n"),
        (True, "\rwheels: 1 of 4 MB\rwheels: 2 of 4 MB\rwheels: 3 of 4 MB\rwheels: 4 of 4 MB\n"),
    ],
)
def test_progress_is_rare_in_a_log_and_live_on_a_terminal(capsys, monkeypatch, live, shown):
    now = [100.0]
    monkeypatch.setattr(wheels, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = wheels.Progress("wheels", 4_000_000)
    progress.live = live
    for seconds, done in ((0, 1_000_000), (0.1, 1_500_000), (5, 2_000_000), (5, 3_000_000)):
        now[0] += seconds
        progress.show(done)
    progress.show(4_000_000, last=True)
    assert capsys.readouterr().err == shown


# The lock as it is read

ENTRY = '[[packages]]\nname = "p"\nversion = "1.0"\n'
HASHES = 'hashes = { sha256 = "ab" }'
WHEEL = f'{{ url = "https://example.org/p-1.0-py3-none-any.whl", size = 7, {HASHES} }}'


def test_read_lock(tmp_path):
    (tmp_path / "engine.lock").write_text(f"{ENTRY}wheels = [{WHEEL}]\n")
    url = "https://example.org/p-1.0-py3-none-any.whl"
    assert wheels.read_lock(tmp_path / "engine.lock") == [
        wheels.Wheel("p", "1.0", "p-1.0-py3-none-any.whl", url, 7, "ab")
    ]


@pytest.mark.parametrize(
    "listed",
    [
        "",
        "wheels = []",
        f"wheels = [{WHEEL}, {WHEEL}]",
        f"wheels = [{WHEEL.replace('sha256', 'md5')}]",
        f"wheels = [{WHEEL.replace(HASHES, 'hashes = {}')}]",
        f"wheels = [{WHEEL.replace(f', {HASHES}', '')}]",
    ],
    ids=["no-key", "none", "two", "md5", "empty", "no-hashes"],
)
def test_a_lock_without_exactly_one_hashed_wheel(tmp_path, listed):
    (tmp_path / "engine.lock").write_text(ENTRY + listed + "\n")
    with pytest.raises(Rejected, match=r"^engine.lock: p must have exactly one wheel with a SHA-256; run `make lock`$"):
        wheels.read_lock(tmp_path / "engine.lock")


def test_the_lock_of_the_repository():
    locked = wheels.read_lock()
    assert len({wheel.name for wheel in locked}) == len(locked)
    assert all(len(wheel.sha256) == 64 and wheel.size > 0 for wheel in locked)
    assert all(wheel.url.startswith("https://") and wheel.filename.endswith(".whl") for wheel in locked)
    image = tomllib.loads((ROOT / "images/image.toml").read_text())
    names = {wheel.name: wheel.version for wheel in locked}
    assert names["sglang"] == "0.5.23"
    assert not names.keys() & {entry["distribution"] for entry in image["leave_out"]}
    assert set(image["build_tools"]) <= names.keys()


# The command


@pytest.fixture
def command(monkeypatch):
    def run(locked: list[wheels.Wheel], *arguments: str) -> int:
        monkeypatch.setattr(wheels, "read_lock", lambda: locked)
        monkeypatch.setattr(wheels.sys, "argv", ["wheels.py", *arguments])
        return exit_code(wheels.main)

    return run


def test_command_fetches_below_the_cache(index, tmp_path, command):
    one, two = index.wheel("one"), index.wheel("two")
    assert command([one, two], "fetch", "--cache", str(tmp_path), "--only", "two") == 0
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == [two.filename]
    assert command([one, two], "fetch", "--cache", str(tmp_path)) == 0
    assert len(list((tmp_path / "wheels").iterdir())) == 2


def test_command_knows_no_such_package(index, tmp_path, command, capsys):
    assert command([index.wheel("one")], "fetch", "--cache", str(tmp_path), "--only", "onne") == 1
    assert "onne" in capsys.readouterr().err


# lock


def entry(name: str, *filenames: str) -> str:
    listed = ", ".join(
        f'{{ url = "https://example.org/{f}", size = {n}, hashes = {{ sha256 = "{n}" }} }}'
        for n, f in enumerate(filenames, 1)
    )
    return f'[[packages]]\nname = "{name}"\nversion = "1.0"\nwheels = [{listed}]\n'


@pytest.fixture
def resolve(tmp_path, monkeypatch, commands):
    """Run lock() with a uv that resolves to the given entries; return what the lock then says."""
    fakes = commands()
    monkeypatch.setenv("PATH", f"{fakes.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(wheels, "HERE", tmp_path)
    (tmp_path / "engine.in").write_text("p==1.0\n")
    (tmp_path / "image.toml").write_text('[[leave_out]]\ndistribution = "unwanted"\nreason = "a test"\n')
    path = tmp_path / "engine.lock"
    path.write_text("the old lock\n")

    def run(*entries: str, end: str = "exit 0") -> dict[str, str]:
        (tmp_path / "answer").write_text("\n".join(entries))
        write = f'while [ "$1" != --output-file ]; do shift; done; cat "{tmp_path}/answer" >"$2"; {end}'
        fakes.add("uv", write)
        wheels.lock(path)
        return {wheel.name: wheel.filename for wheel in wheels.read_lock(path)}

    run.path, run.calls = path, fakes.calls
    return run


@pytest.mark.parametrize(
    ("filenames", "chosen"),
    [
        (["p-1.0-py3-none-any.whl", "p-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"], 1),
        (["p-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", "p-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"], 1),
        (["p-1.0-cp311-cp311-manylinux_2_39_x86_64.whl", "p-1.0-cp311-cp311-manylinux2014_x86_64.whl"], 1),
        (["p-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "p-1.0-cp39-abi3-manylinux_2_28_x86_64.whl"], 1),
        (["p-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", "p-1.0-py3-none-any.whl"], 1),
        (["p-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", "p-1.0-py3-none-any.whl"], 1),
        (["p-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "p-1.0-py3-none-any.whl"], 0),
        (["p-1.0-py2.py3-none-manylinux_2_5_x86_64.whl", "p-1.0-py3-none-win_amd64.whl"], 0),
    ],
    ids=["binary", "newest-glibc", "glibc-too-new", "abi3", "architecture", "musl", "two-tags", "py2.py3"],
)
def test_lock_takes_the_best_wheel_for_the_image(resolve, filenames, chosen):
    assert resolve(entry("p", *filenames)) == {"p": filenames[chosen]}
    # Its own size and digest came with it.
    assert [(wheel.size, wheel.sha256) for wheel in wheels.read_lock(resolve.path)] == [(chosen + 1, str(chosen + 1))]


def test_lock_leaves_out_what_the_image_leaves_out(resolve):
    wanted, unwanted = entry("wanted", "wanted-1.0-py3-none-any.whl"), entry("unwanted", "unwanted-1.0.whl")
    assert resolve(wanted, unwanted) == {"wanted": "wanted-1.0-py3-none-any.whl"}
    assert "leaves out: unwanted." in resolve.path.read_text()


def test_lock_is_the_same_each_time_and_ignores_the_machines_configuration(resolve):
    resolve(entry("p", "p-1.0-py3-none-any.whl"))
    first = resolve.path.read_bytes()
    resolve(entry("p", "p-1.0-py3-none-any.whl"))
    assert resolve.path.read_bytes() == first
    assert all("--no-config" in call for call in resolve.calls("uv"))


def test_lock_without_a_fitting_wheel_keeps_the_old_one(resolve):
    with pytest.raises(Rejected, match=r"^p 1.0 has no wheel for CPython 3.11 on Debian 12$"):
        resolve(entry("p", "p-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"))
    assert resolve.path.read_text() == "the old lock\n"


def test_lock_that_does_not_resolve_keeps_the_old_one(resolve, tmp_path):
    with pytest.raises(CannotRun, match=r"^uv could not resolve images/engine.in"):
        resolve(entry("p", "p-1.0-py3-none-any.whl"), end="exit 1")
    assert resolve.path.read_text() == "the old lock\n"
    assert {path.name for path in tmp_path.iterdir()} == {"answer", "bin", "engine.in", "engine.lock", "image.toml"}


def test_lock_without_uv(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotRun, match="needs uv"):
        wheels.lock(tmp_path / "engine.lock")
