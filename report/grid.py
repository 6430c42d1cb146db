"""What is proven and what is not: every checkpoint of every recipe, on every topology it lists, on every target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qualify.catalogue import Entry
from qualify.suite.targets import TARGETS
from report.sources import Found, Receipt

#: best first: what a cell says first
ORDER = ("PASSED", "WARNED", "FAILED")


@dataclass(frozen=True, slots=True)
class Row:
    """One topology of one checkpoint."""

    entry: Entry
    topology: str
    #: target name -> receipts, best first
    cells: dict[str, list[Receipt]]
    #: target name -> status of the recipe: verified, not-run, unsupported
    statuses: dict[str, str]

    def proven(self, target: str) -> bool:
        """A passed receipt of the published checkpoint itself."""
        return any(one.verdict == "PASSED" and one.extension["scope"] == "published" for one in self.cells[target])


def rows(found: Found) -> list[Row]:
    """All of them, artifacts that have an image first; a topology that only a receipt has gets a row too."""
    result = []
    for artifact in sorted(found.artifacts.values(), key=lambda item: (item.name not in found.images, item.name)):
        for entry in artifact.checkpoints:
            mine = [receipt for receipt in found.good if entry is home(found, receipt)]
            listed = [label(tp, ep) for tp, ep in entry.topologies] or ["none listed"]
            for topology in dict.fromkeys([*listed, *(topology_of(receipt) for receipt in mine)]):
                cells = {
                    target: sorted(
                        (one for one in mine if (one.extension["target_name"], topology_of(one)) == (target, topology)),
                        key=lambda one: (ORDER.index(one.verdict), one.extension["scope"] != "published", one.file),
                    )
                    for target in TARGETS
                }
                statuses = {name: artifact.targets.get(target.arch, "not-run") for name, target in TARGETS.items()}
                result.append(Row(entry, topology, cells, statuses))
    return result


def homeless(found: Found) -> list[Receipt]:
    """Good receipts of a checkpoint that is none of the recipes' and no synthetic cut of one."""
    return [receipt for receipt in found.good if home(found, receipt) is None]


def home(found: Found, receipt: Receipt) -> Entry | None:
    """The checkpoint that a receipt is of, or whose layout its synthetic one has."""
    artifact = found.artifacts.get(receipt.extension["artifact"])
    repository, model = receipt.extension["checkpoint"]["repository"], receipt.model
    for entry in artifact.checkpoints if artifact else ():
        if entry.repository == repository or (repository is None and model is not None and model.name == entry.name):
            return entry
    return None


def topology_of(receipt: Receipt) -> str:
    """TP8 EP8, with what goes beyond it."""
    topology = receipt.extension["topology"]
    more = [f"{key.upper()}{topology[key]}" for key in ("pp", "dp") if topology[key] > 1]
    if topology["a2a"] != "none":
        more.append(topology["a2a"])
    return " ".join([label(topology["tp"], topology["ep"]), *more])


def label(tp: int, ep: int) -> str:
    """A pair as the page writes it."""
    return f"TP{tp} EP{ep}"


def scope_of(receipt: Receipt) -> str:
    """What was served: published, or synthetic and how much of the model."""
    scope, model = receipt.extension["scope"], receipt.model
    if scope == "published" or model is None:
        return f"{scope} checkpoint"
    depth = "full size" if model.layers == model.all_layers else f"{model.layers} of {model.all_layers} layers"
    return f"{scope} checkpoint, {depth}"


def groups(table: list[Row]) -> Iterator[tuple[Entry, list[Row]]]:
    """Rows by checkpoint, in their order."""
    by_entry: dict[tuple[str, str], list[Row]] = {}
    for row in table:
        by_entry.setdefault((row.entry.artifact, row.entry.name), []).append(row)
    for listed in by_entry.values():
        yield listed[0].entry, listed
