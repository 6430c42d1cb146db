"""What the report is made of: every receipt and every benchmark file, read, checked, and put into one form.

A receipt that ``verify-receipt`` rejects is kept as refused, and nothing of its content is shown. A file that is no
JSON, or a benchmark file that lacks what its kind holds, ends the report with a sentence that names it.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qualify import catalogue
from qualify import policy as policies
from qualify.errors import Rejected
from qualify.policy import Policy
from qualify.receipt import EXTENSION, canonical, verify
from report import models
from report.models import Model

#: folder below that of the receipts with the policies under which older ones were sealed
OLD_POLICIES = "policies"
_DATE = re.compile(r"20\d\d-\d\d-\d\d\Z")
_TP = re.compile(r"--tp-size (\d+)")
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Origin:
    """Where numbers come from, for the line below each plot. Empty: the file does not say."""

    file: str
    date: str = ""
    gpu: str = ""
    driver: str = ""
    versions: str = ""
    #: what a reader must know before the numbers, in a word or two, such as that the checkpoint was synthetic
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """One round of requests on one side."""

    requests: int
    at_once: int
    input_tokens: int
    output_tokens: int
    tokens_per_second: float
    counted: str
    #: seconds, median and 95th percentile; None where the round was not streamed
    first_token: tuple[float, float] | None
    inter_token: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Serving:
    """Rates of a served model, beside stock where the file has both."""

    origin: Origin
    artifact: str
    model: Model | None
    #: bare name of the GPU, and how many
    gpu: str
    ranks: int
    #: "this image" and perhaps "stock" -> round -> numbers
    sides: dict[str, dict[str, Round]]
    #: parts of the start, seconds; empty where the file has none
    start_up: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds of loading one checkpoint, side by side: side -> repetitions."""

    origin: Origin
    artifact: str
    model: Model | None
    seconds: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Milliseconds of the E2M1-K32 kernels beside others: rows as in the file."""

    origin: Origin
    rows: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Receipt:
    """One receipt; ``statement`` is None where it is refused, and ``refused`` says why."""

    file: str
    refused: str = ""
    statement: dict[str, Any] | None = None
    #: sealed under a policy of evidence/policies, not under today's
    old_policy: bool = False

    @property
    def extension(self) -> dict[str, Any]:
        return self.statement["predicate"][EXTENSION]

    @property
    def verdict(self) -> str:
        """``PASSED``, ``WARNED``, ``FAILED`` or ``REFUSED``; under an old policy nothing is better than WARNED."""
        if self.refused:
            return "REFUSED"
        result = self.statement["predicate"]["result"]
        return "WARNED" if result == "PASSED" and self.old_policy else result

    @property
    def model(self) -> Model | None:
        checkpoint = self.extension["checkpoint"]
        return models.identify(self.extension["artifact"], checkpoint["tensors"], checkpoint["bytes"])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why it lets nothing be released, and what else a reader must know."""
        extension = self.extension
        drift = extension["image"]["base_drift"]
        return (
            *extension["release_blockers"],
            *(["it was sealed under an earlier policy"] if self.old_policy else []),
            *([f"{drift} packages of the base differ from its lock"] if drift else []),
        )

    @property
    def origin(self) -> Origin:
        extension = self.extension
        gpu = next((stage["gpu"] for stage in extension["stages"].values() if stage["gpu"]), None)
        began = [stage["began"] for stage in extension["stages"].values() if stage["began"]]
        engine = extension["image"]["engine"]
        return Origin(
            self.file, max(began, default="")[:10], f"{gpu['count']} × {gpu['name']}" if gpu else "",
            gpu["driver"] if gpu else "",
            f"{engine['name']} {engine['version']}" + (f", CUDA {gpu['cuda']}" if gpu else ""),
            ", ".join([
                self.verdict,
                *([] if extension["scope"] == "published" else [extension["scope"]]),
                *(["libraries of the host"] if extension["image"]["substituted_libraries"] else []),
            ]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class File:
    """One file that was read, and what became of it."""

    name: str
    sha256: str
    date: str
    use: str


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that the report shows."""

    artifacts: dict[str, catalogue.Artifact]
    #: those of them that have an image
    images: frozenset[str]
    receipts: list[Receipt]
    serving: list[Serving]
    loads: list[Load]
    kernels: list[Kernels]
    files: list[File]

    @property
    def good(self) -> list[Receipt]:
        return [receipt for receipt in self.receipts if not receipt.refused]

    @property
    def refused(self) -> list[Receipt]:
        return [receipt for receipt in self.receipts if receipt.refused]


def read(evidence: Path, results: Path) -> Found:
    """Read both folders. Raises ``Rejected`` with the name of a file or folder that is unusable."""
    found = Found(catalogue.load(), _images(), [], [], [], [], [])
    known = [policies.load(), *(policies.load(path) for path in sorted((evidence / OLD_POLICIES).glob("*.toml")))]
    for path in _files(evidence):
        name = _name(path)
        raw, receipt = _receipt(path, name, known)
        date = "" if receipt.refused else receipt.origin.date
        found.receipts.append(receipt)
        found.files.append(File(name, hashlib.sha256(raw).hexdigest(), date, f"receipt, {receipt.verdict}"))
        if not receipt.refused and (one := _receipt_serving(receipt)):
            found.serving.append(one)
    for path in _files(results):
        name = _name(path)
        raw = canonical.read(path, name)
        document = canonical.parse(raw, name)
        kind, parse = _kind(document)
        if parse is not None:
            try:
                one = parse(name, document)
            except KeyError as error:
                raise Rejected(f"{name} is not a usable benchmark file ({kind}): it lacks {error.args[0]!r}") from None
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise Rejected(f"{name} is not a usable benchmark file ({kind}): {error}") from None
            {Serving: found.serving, Load: found.loads, Kernels: found.kernels}[type(one)].append(one)
        use = f"{kind}, plotted" if parse is not None else f"{kind}, no plot"
        date = _date(document) if isinstance(document, dict) else ""
        found.files.append(File(name, hashlib.sha256(raw).hexdigest(), date, use))
    return found


def _images() -> frozenset[str]:
    """Names of the artifacts whose recipe says ``image = true``."""
    recipes = ((path.stem, tomllib.loads(path.read_text())) for path in catalogue.RECIPES.glob("*.toml"))
    return frozenset(name for name, recipe in recipes if recipe.get("image") is True)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise Rejected(f"{folder} is no folder")
    return sorted(folder.glob("*.json"))


def _name(path: Path) -> str:
    """As the page and the README call a file: its path in the project, or its folder's name and its own."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else f"{path.parent.name}/{path.name}"


def _receipt(path: Path, name: str, known: list[Policy]) -> tuple[bytes, Receipt]:
    raw = canonical.read(path, name)
    try:
        statement, _ = verify.load(path)
    except Rejected as error:
        raise Rejected(f"{name}: {error}") from None
    first = ""
    for policy in known:
        try:
            verify.check(statement, policy)
        except Rejected as error:
            first = first or str(error)  # what today's policy says
        else:
            return raw, Receipt(name, statement=statement, old_policy=policy is not known[0])
    return raw, Receipt(name, refused=first)


def _receipt_serving(receipt: Receipt) -> Serving | None:
    extension = receipt.extension
    numbers = extension["stages"]["performance"]["numbers"]
    # What a stage measures is open in the schema: a number that is none is refused here, with the receipt's name.
    try:
        rounds = _rounds(numbers)
        for launch, extra in sorted(numbers.get("cookbook", {}).items()):
            rounds |= {f"cookbook {launch} {name}": one for name, one in _rounds(extra).items()}
        start = {name: _number(value) for name, value in numbers.get("start_up_seconds", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Rejected(f"{receipt.file}: the numbers of its stage performance are unusable: {error}") from None
    if not rounds and not start:
        return None
    gpu, topology = extension["gpu"], extension["topology"]
    return Serving(
        receipt.origin, extension["artifact"], receipt.model, gpu["name"] if gpu else "",
        topology["tp"] * topology["pp"] * topology["dp"], {"this image": rounds}, start,
    )  # fmt: skip


def _rounds(numbers: dict[str, Any]) -> dict[str, Round]:
    found = {}
    for name, raw in numbers.items():
        if isinstance(raw, dict) and "tokens_per_second" in raw:
            found[name] = Round(
                _count(raw["requests"]), _count(raw.get("at_once", raw["requests"])), _count(raw["input_tokens"]),
                _count(raw["output_tokens"]), _number(raw["tokens_per_second"]), str(raw["counted"]),
                *(
                    (_number(raw[key]["median"]), _number(raw[key]["p95"])) if key in raw else None
                    for key in ("first_token_seconds", "inter_token_seconds")
                ),
            )  # fmt: skip
    return found


def _serve(name: str, raw: dict[str, Any]) -> Serving:
    launch, origin = raw["launch"], _machine(name, raw, raw["machine"])
    sides = {"this image": _rounds(raw["rounds"])}
    if launch is None:  # not started by the launcher: nothing says what was served
        return Serving(_noting(origin, False), "", None, raw["machine"]["gpu"][0][0], 1, sides)
    flags, checkpoint = launch["plan"]["flags"], launch["checkpoint"]
    return Serving(
        _noting(origin, checkpoint["synthetic"]), launch["plan"]["artifact"],
        models.identify(launch["plan"]["artifact"], nbytes=checkpoint["bytes"]), raw["machine"]["gpu"][0][0],
        _count(flags["--tp-size"]["value"]), sides,
    )  # fmt: skip


def _serve_stock(name: str, raw: dict[str, Any]) -> Serving:
    origin, checkpoint = _machine(name, raw, raw["machine"]), raw["checkpoint"]
    model = models.identify(None, checkpoint["tensors"], checkpoint["bytes"])
    gpus = raw["machine"]["gpu"]
    return Serving(
        _noting(origin, checkpoint["synthetic"]), model.artifact if model else "", model, gpus[0][0],
        int(_TP.search(raw["engine"])[1]),
        {"this image": _rounds(raw["strict"]["rounds"]), "stock": _rounds(raw["stock"]["rounds"])},
    )  # fmt: skip


def _load(name: str, raw: dict[str, Any]) -> Load:
    origin, checkpoint = _machine(name, raw, raw["machine"]), raw["checkpoint"]
    seconds = {
        label: [_number(value) for value in raw["seconds"][side]]
        for side, label in (("strict", "this image"), ("stock", "stock"))
    }
    if not all(seconds.values()):
        raise ValueError("a side has no repetition")
    model = models.identify(None, checkpoint["tensors"])
    return Load(_noting(origin, checkpoint["synthetic"]), model.artifact if model else "", model, seconds)


def _kernels(name: str, raw: dict[str, Any]) -> Kernels:
    columns = ("w4a16_ms", "fp8_ms", "humming_ms", "bf16_ms", "copy_share")
    for row in raw["rows"]:
        if not isinstance(row["shape"], str) or not all(_number(row[key]) > 0 for key in (*columns, "tokens")):
            raise ValueError("a row holds shape, tokens and times above 0")
    return Kernels(_machine(name, raw, raw["environment"]), raw["rows"])


def _kind(document: Any) -> tuple[str, Callable[[str, dict[str, Any]], Any] | None]:
    """(what the file is, its parser or None where the report has no plot for it)."""
    if not isinstance(document, dict):
        return "unknown kind", None
    kinds = {"serve": _serve, "serve_stock": _serve_stock, "load_mova": _load}
    name = document.get("benchmark")
    if isinstance(name, str):
        return f"benchmarks.{name}", kinds.get(name)
    if {"copy_gbps", "rows"} <= document.keys():
        return "benchmarks.e2m1_k32", _kernels
    command = document.get("command")
    return (command.split()[-1] if isinstance(command, str) and command.split() else "unknown kind"), None


def _machine(name: str, raw: dict[str, Any], machine: dict[str, Any]) -> Origin:
    """The three forms in which benchmarks write down their machine."""
    gpu, driver = machine["gpu"], machine.get("driver", "")
    if isinstance(gpu, list):  # rows of nvidia-smi
        gpu, driver = f"{len(gpu)} × {gpu[0][0]}", gpu[0][1]
    versions = machine.get("versions") or {
        key: machine[key] for key in ("sglang", "torch", "triton", "humming-kernels", "cuda") if machine.get(key)
    }
    told = ", ".join(f"{'CUDA' if key == 'cuda' else key} {value}" for key, value in versions.items())
    return Origin(name, _date(raw), str(gpu), str(driver), told)


def _date(raw: dict[str, Any]) -> str:
    """Its date, if it is one."""
    date = raw.get("date")
    return date if isinstance(date, str) and _DATE.match(date) else ""


def _noting(origin: Origin, synthetic: bool) -> Origin:
    return replace(origin, mark="synthetic checkpoint, no receipt" if synthetic else "no receipt")


def _number(value: Any) -> float:
    """A finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no number of at least 0")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value
