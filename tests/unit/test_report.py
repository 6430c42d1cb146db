"""The report: what each file becomes on the page, what is refused, and that the README's table is that of the files."""

from __future__ import annotations

import builtins
import json
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from qualify import cli
from qualify import policy as policies
from qualify.receipt import canonical, sanitise
from qualify.suite.targets import TARGETS
from report import figures, floors, grid, models, page, readme, sources, svg
from tests.unit import receipt_runs as runs

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE, RESULTS = ROOT / "evidence", ROOT / "benchmarks/results"
RECEIPT = EVIDENCE / "mova-fp8-cut6-h200.json"
SERVE = RESULTS / "serve-mova-fp8-h200.json"
FOUR = ("7B", "32B", "375B-A23B", "MoVA-36B-A4B")


@pytest.fixture
def lab(tmp_path, capsys, monkeypatch):
    """Empty folders of receipts and benchmark files, and the command on them."""
    monkeypatch.setattr(sanitise, "names_here", set)

    class Lab:
        evidence, results, out = tmp_path / "evidence", tmp_path / "results", tmp_path / "report.html"

        def run(self, *words):
            given = [
                "--evidence",
                str(self.evidence),
                "--results",
                str(self.results),
                *(words or ("--out", str(self.out))),
            ]
            code = cli.main(["report", *given])
            told = capsys.readouterr()
            self.said, self.told = told.err, told.out
            return code

        @property
        def page(self):
            return self.out.read_text()

        def receipt(self, name="good.json", run=None, stages=None, policy=None):
            """A sealed receipt of a made-up run, by default with every bound measured."""
            policy = policy or runs.measured_policy(tmp_path)
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            runs.write(tmp_path / "run", runs.facts(policy, **(run or {})), stages)
            (tmp_path / "inspect.json").write_text(json.dumps(runs.inspect()))
            words = ["seal", "--run", tmp_path / "run", "--out", self.evidence / name, "--policy", policy,
                     "--image-inspect", tmp_path / "inspect.json"]  # fmt: skip
            assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
            return self.evidence / name

    # The committed receipt is of an earlier policy.
    shutil.copytree(EVIDENCE / "policies", Lab.evidence / "policies")
    Lab.results.mkdir()
    return Lab()


def changed(path: Path, out: Path, change) -> Path:
    """A copy of a JSON file with one change."""
    document = json.loads(path.read_text())
    change(document)
    out.write_text(json.dumps(document))
    return out


def reseal(statement) -> None:
    statement["predicate"]["horizonImages"]["content_sha256"] = canonical.content_sha256(statement)


def text(html: str) -> str:
    """What is read on a page."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.S)))


def cells(html: str) -> dict[tuple[str, str], list[str]]:
    """(checkpoint, topology) -> text of the cell of each target."""
    found = {}
    for body in re.findall(r"<tbody>(.*?)</tbody>", re.search(r'<table class="grid">.*?</table>', html, re.S)[0], re.S):
        first, *rows = re.findall(r"<tr>(.*?)</tr>", body, re.S)
        for row in rows:
            topology, *told = (text(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S))
            found[text(first).split()[0], topology] = told
    return found


# The project's own files


def test_the_readme_has_the_table_of_these_files():
    found = sources.read(EVIDENCE, RESULTS)
    told = (ROOT / "README.md").read_text()
    assert readme.rewrite(told, "README.md", found) == told, "run make report"


def test_every_combination_of_the_public_checkpoints_is_shown():
    found = sources.read(EVIDENCE, RESULTS)
    shown = cells(page.render(found))
    listed = {
        (entry.repository, f"TP{tp} EP{ep}")
        for artifact in found.artifacts.values()
        for entry in artifact.checkpoints
        for tp, ep in entry.topologies
    }
    assert {repository for repository, _ in listed} >= {f"IFM/K2-Horizon-{name}-FP8" for name in FOUR}
    assert ("IFM/K2-Horizon-375B-A23B-FP8", "TP8 EP8") in listed
    assert listed <= shown.keys()
    assert list(TARGETS) == ["h200", "sm120"]
    assert all(len(told) == 2 for told in shown.values())


def test_without_a_receipt_every_combination_is_not_run(lab):
    assert lab.run() == 0, lab.said
    assert {word for row in cells(lab.page).values() for word in row} == {"○ not-run"}
    assert "None: nothing was qualified." in lab.page
    assert "newest measurement none" in text(lab.page)


def test_a_synthetic_cut_is_shown_as_one_and_proves_nothing_else(lab):
    shutil.copy(RECEIPT, lab.evidence)
    assert lab.run() == 0, lab.said
    run = {key: told for key, told in cells(lab.page).items() if told != ["○ not-run"] * 2}
    assert run == {
        ("IFM/K2-Horizon-MoVA-36B-A4B-FP8", "TP1 EP1"): [
            "! WARNED synthetic checkpoint, 6 of 48 layers ○ not-run published checkpoint",
            "○ not-run",
        ]
    }


def test_every_plot_says_where_it_is_from_and_has_its_numbers(lab):
    shutil.copy(RECEIPT, lab.evidence)
    for name in ("serve-mova-fp8-h200", "load-mova-h200", "e2m1-k32-h200"):
        shutil.copy(RESULTS / f"{name}.json", lab.results)
    assert lab.run() == 0, lab.said
    found = re.findall(r"<figure>.*?</figure>", lab.page, re.S)
    assert len(found) == 15
    for one in found:
        assert re.search(r'<svg class="plot" role="img" viewBox="0 0 340 [\d.]+" aria-label="[^"]{20,}">', one)
        source = text(re.search(r"<figcaption>.*</figcaption>", one, re.S)[0])
        assert re.search(r"(evidence|results)/\S+\.json · (20\d\d-\d\d-\d\d|date not recorded) · ", source)
        assert "NVIDIA H200 · driver 580.159.04 · " in source
        assert re.search(r"(sglang|torch) \d", source)
        assert "<caption>" in one
        assert one.count("<tr>") >= 2
    cut = [one for one in found if RECEIPT.name in one]
    assert len(cut) == 10
    assert all("WARNED, synthetic, libraries of the host" in text(one) for one in cut)
    assert text(lab.page).count("synthetic checkpoint, no receipt") == 2


def test_numbers_are_those_of_the_files():
    told = text(page.render(sources.read(EVIDENCE, RESULTS)))
    stages = json.loads(RECEIPT.read_text())["predicate"]["horizonImages"]["stages"]
    numerics, performance = stages["numerics"]["numbers"], stages["performance"]["numbers"]
    for index in range(6):
        row = [index, *(numerics["layers"][name][index] for name in ("attention.mean", "norm.mean", "values.mean"))]
        assert " ".join("–" if value is None else f"{value:.6g}" for value in row) in told
    for name in ("decode-1", "decode-32", "decode-64", "prefill-16x4096"):
        assert f" {performance[name]['tokens_per_second']:.6g} " in told
    for name, seconds in performance["start_up_seconds"].items():
        assert f" {name} {seconds:.6g} " in told
    for blocker in json.loads(RECEIPT.read_text())["predicate"]["horizonImages"]["release_blockers"]:
        assert blocker in told


def test_the_page_needs_nothing_else_and_is_the_same_each_time():
    html = page.render(sources.read(EVIDENCE, RESULTS))
    assert html == page.render(sources.read(EVIDENCE, RESULTS))
    assert "<script" not in html
    assert re.findall(r'(?:src|href)="?\'?(?![#"\']|data:,)[^"\'> ]*', html.replace("href='#", 'href="#')) == []
    assert "url(" not in html
    assert "@import" not in html


def test_every_file_that_was_read_is_listed():
    told = text(page.render(sources.read(EVIDENCE, RESULTS)))
    for path in [*EVIDENCE.glob("*.json"), *RESULTS.glob("*.json")]:
        assert str(path.relative_to(ROOT)) in told


# Verdicts


def test_a_passed_receipt_of_a_published_checkpoint_is_proven(lab, monkeypatch):
    mova = {"checkpoint": {"repository": "IFM/K2-Horizon-MoVA-36B-A4B-FP8"}, "topology": {"tp": 4, "ep": 4},
            "flags": {"--tp-size": 4, "--ep-size": 4}}  # fmt: skip
    stages = {name: {"gpu": {**runs.H200, "count": 4}} for name in runs.STAGES}
    lab.receipt(run=mova, stages=stages)
    monkeypatch.setattr(policies, "PATH", lab.evidence.parent / "policy.toml")
    assert lab.run() == 0, lab.said
    assert cells(lab.page)["IFM/K2-Horizon-MoVA-36B-A4B-FP8", "TP4 EP4"] == [
        "✓ PASSED published checkpoint",
        "○ not-run",
    ]
    assert "proven on a published checkpoint 1 of " in text(lab.page)


def test_a_failed_stage_is_shown_with_its_reason(lab, monkeypatch):
    lab.receipt(run=runs.SYNTHETIC, stages={"load": {"result": "failed", "reason": "a weight is missing"}})
    monkeypatch.setattr(policies, "PATH", lab.evidence.parent / "policy.toml")
    assert lab.run() == 0, lab.said
    assert "✕ FAILED" in text(lab.page)
    assert "stage load: a weight is missing" in text(lab.page)


def test_a_receipt_of_an_unknown_checkpoint_is_named_beside_the_table(lab, monkeypatch):
    lab.receipt()
    monkeypatch.setattr(policies, "PATH", lab.evidence.parent / "policy.toml")
    assert lab.run() == 0, lab.said
    assert "Of a checkpoint that no recipe names, so not in the table evidence/good.json" in text(lab.page)
    assert "proven on a published checkpoint 0 of " in text(lab.page)


@pytest.mark.parametrize("sealed_anew", [False, True])
def test_a_forged_receipt_is_refused_and_never_passed(lab, sealed_anew):
    def forge(statement):
        statement["predicate"]["result"] = "PASSED"
        statement["predicate"]["horizonImages"]["release_blockers"] = []
        if sealed_anew:
            reseal(statement)

    changed(RECEIPT, lab.evidence / "forged.json", forge)
    assert lab.run() == 0, lab.said
    told = text(lab.page)
    assert "refused: evidence/forged.json: " in lab.said
    assert "receipts PASSED 0 receipts WARNED 0 receipts FAILED 0 receipts REFUSED 1" in told
    assert "evidence/forged.json ⊘ REFUSED" in told
    assert {word for row in cells(lab.page).values() for word in row} == {"○ not-run"}
    assert "<figure>" not in lab.page
    found = sources.read(lab.evidence, lab.results)
    assert "forged" not in readme.artifacts(found)


def test_a_receipt_under_an_earlier_policy_is_never_better_than_warned(lab):
    path = lab.receipt(run={"checkpoint": {"repository": "IFM/K2-Horizon-MoVA-36B-A4B-FP8"}})
    assert json.loads(path.read_text())["predicate"]["result"] == "PASSED"
    assert lab.run() == 0
    assert "sealed under another policy" in text(lab.page)
    assert "receipts REFUSED 1" in text(lab.page)
    (lab.evidence / "policies").mkdir(exist_ok=True)
    shutil.copy(lab.evidence.parent / "policy.toml", lab.evidence / "policies/2026-11.toml")
    assert lab.run() == 0
    assert cells(lab.page)["IFM/K2-Horizon-MoVA-36B-A4B-FP8", "TP1 EP1"][0] == "! WARNED published checkpoint"
    assert "it was sealed under an earlier policy" in text(lab.page)
    assert "receipts PASSED 0 receipts WARNED 1" in text(lab.page)


# Files that are no use


KINDS = {"serve": SERVE, "load": RESULTS / "load-mova-h200.json", "kernels": RESULTS / "e2m1-k32-h200.json"}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("serve", lambda raw: raw.pop("rounds")),
        ("serve", lambda raw: raw.update(rounds=[1])),
        ("serve", lambda raw: raw["rounds"]["decode-1"].update(tokens_per_second="fast")),
        ("serve", lambda raw: raw["rounds"]["decode-1"].update(tokens_per_second=True)),
        ("serve", lambda raw: raw["rounds"]["decode-1"].update(requests=0)),
        ("serve", lambda raw: raw["rounds"]["decode-1"].update(first_token_seconds={"median": 1})),
        ("serve", lambda raw: raw.update(machine="an H200")),
        ("serve", lambda raw: raw["machine"].update(gpu=[])),
        ("load", lambda raw: raw["seconds"].update(stock=[])),
        ("load", lambda raw: raw["seconds"].update(stock=[-1.0])),
        ("load", lambda raw: raw.pop("checkpoint")),
        ("kernels", lambda raw: raw["rows"][0].pop("bf16_ms")),
        ("kernels", lambda raw: raw["rows"][0].update(w4a16_ms=0)),
    ],
)
def test_a_benchmark_file_that_lacks_something_is_named(lab, kind, change):
    changed(KINDS[kind], lab.results / "bad.json", change)
    assert lab.run() == 1
    said = r"rejected: results/bad\.json is not a usable benchmark file \(benchmarks\.\w+\): .+\n"
    assert re.fullmatch(said, lab.said), lab.said
    assert not lab.out.exists()


@pytest.mark.parametrize("content", ["", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "\xff", "[" * 100_000])
@pytest.mark.parametrize("folder", ["evidence", "results"])
def test_a_file_that_is_no_json_is_named(lab, folder, content):
    (lab.evidence.parent / folder / "bad.json").write_bytes(content.encode("latin-1"))
    lab.out.write_text("the page of yesterday")
    assert lab.run() == 1
    assert re.fullmatch(rf"rejected: {folder}/bad\.json.+\n", lab.said)
    assert lab.page == "the page of yesterday"


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"payloadType": 1, "predicate": 3}'])
def test_json_that_is_no_receipt_is_refused_or_rejected_with_its_name(lab, content):
    (lab.evidence / "bad.json").write_text(content)
    code = lab.run()
    assert "evidence/bad.json" in lab.said
    assert code == 1 or "⊘ REFUSED" in text(lab.page)


def test_numbers_of_a_receipt_that_are_none_are_named(lab):
    """The schema leaves a stage's numbers open, so a receipt can be consistent and still hold other things there."""

    def change(statement):
        statement["predicate"]["horizonImages"]["stages"]["numerics"]["numbers"]["layers"] = {"ffn.mean": ["x"]}
        reseal(statement)

    changed(RECEIPT, lab.evidence / "odd.json", change)
    assert lab.run() == 1
    told = "evidence/odd.json: the numbers of its stage numerics are unusable: 'x' is no number of at least 0"
    assert lab.said == f"rejected: {told}\n"


def test_folders_and_outputs_that_are_missing(lab):
    assert lab.run("--results", str(lab.results / "none"), "--out", str(lab.out)) == 1
    assert re.fullmatch(r"rejected: \S+/none is no folder\n", lab.said)
    assert cli.main(["report", "--evidence", str(lab.evidence), "--results", str(lab.results)]) == 1
    assert lab.run("--readme", str(lab.results / "none.md")) == 1
    (lab.results / "bare.md").write_text("# No markers\n")
    assert lab.run("--readme", str(lab.results / "bare.md"), "--out", str(lab.out)) == 1
    assert "bare.md has no place for the table" in lab.said
    assert not lab.out.exists()


def test_readme_is_rewritten_between_its_markers(lab):
    path = lab.results.parent / "README.md"
    path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    assert lab.run("--readme", str(path)) == 0, lab.said
    told = path.read_text()
    assert told.startswith(f"before\n{readme.BEGIN}\n| ARTIFACT |")
    assert told.endswith(f"|\n{readme.END}\nafter\n")
    assert "0 of 12 combinations proven" in told
    assert lab.run("--readme", str(path)) == 0
    assert path.read_text() == told


def test_what_files_say_is_text(lab):
    """Every word of every file, and a file's name, may be anything."""
    evil = "<script>alert(1)</script>\"'&"

    def spoil(value):
        if isinstance(value, dict):
            return {key: value[key] if key == "benchmark" else spoil(value[key]) for key in value}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        return evil if isinstance(value, str) else value

    for kind, path in KINDS.items():
        (lab.results / f"{kind}<i>.json").write_text(json.dumps(spoil(json.loads(path.read_text()))))
    (lab.results / "unknown.json").write_text(json.dumps({"benchmark": evil}))
    (lab.evidence / "refused<i>.json").write_text("{}")
    assert lab.run() == 0, lab.said
    assert lab.page.count("<figure>") == 3
    assert "<script" not in lab.page
    assert "<i>" not in lab.page
    assert evil in text(lab.page)
    assert "No floor: tensors and bytes of the checkpoint are those of no model" in text(lab.page)


def test_a_gpu_without_rates_has_no_floor(lab):
    changed(SERVE, lab.results / "other.json", lambda raw: raw["machine"]["gpu"][0].__setitem__(0, "NVIDIA H20"))
    assert lab.run() == 0, lab.said
    assert "No floor: report/rates.toml has no rates for NVIDIA H20." in text(lab.page)


def test_the_parts_of_the_start_are_the_whole(lab):
    shutil.copy(RECEIPT, lab.evidence)
    assert lab.run() == 0, lab.said
    parts = re.search(r'aria-label="From start to ready\. ([^"]+)"', lab.page)[1]
    seconds = json.loads(RECEIPT.read_text())["predicate"]["horizonImages"]["stages"]["performance"]["numbers"]
    ready = seconds["start_up_seconds"]["ready"]
    assert sum(float(part.split()[-2]) for part in parts.split(", ") if part.endswith(" s")) == pytest.approx(
        ready, abs=0.2
    )
    assert parts.count(" s") >= 6


def test_inside_the_image_there_is_no_report(lab, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "report":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert lab.run() == 2
    assert lab.said == "cannot run: the report is made in a checkout of this project, not inside its image\n"


# Stock and floors


def stock_file(out: Path) -> Path:
    """As benchmarks/serve_stock.py writes it: the rates of a measured file, of which stock has nine tenths."""
    served = json.loads(SERVE.read_text())
    rounds = served["rounds"]
    slower = {name: {**one, "tokens_per_second": one["tokens_per_second"] * 0.9} for name, one in rounds.items()}
    inventory = models.tensors("k2-horizon-fp8", "7b")
    out.write_text(json.dumps({
        "benchmark": "serve_stock", "date": "2026-12-01", "machine": served["machine"],
        "checkpoint": {"format": "compressed-tensors-fp8-block", "tensors": len(inventory), "synthetic": True,
                       "bytes": sum(tensor.nbytes for tensor in inventory.values()), "identity": {}, "layers": 36},
        "engine": "sglang serve --model-path MODEL_DIR --tp-size 1 --ep-size 1", "strict_over_stock": {},
        "strict": {"rounds": rounds}, "stock": {"rounds": slower},
    }))  # fmt: skip
    return out


def test_stock_stands_beside_this_image(lab):
    stock_file(lab.results / "stock.json")
    assert lab.run() == 0, lab.said
    plot = re.search(r"<figure><h4>Throughput, k2-horizon-fp8 7b</h4>.*?</figure>", lab.page, re.S)[0]
    assert plot.count('<rect class="bar s0"') == plot.count('<rect class="bar s1"') == 4
    assert plot.count('<rect class="bar s4"') == 4
    assert "not in this file" not in plot
    assert f" {json.loads(SERVE.read_text())['rounds']['decode-1']['tokens_per_second'] * 0.9:.6g} " in text(plot)


def test_the_floor_is_that_of_the_published_sizes():
    """Bytes and flops of MoVA 36B by hand, from its table of sizes."""
    mova = models.identify(nbytes=48353984040)
    assert (mova.artifact, mova.name, mova.layers) == ("mova-fp8", "36b-a4b", 48)
    hidden, q, kv, vocab, dense, sparse = 2560, 4096, 1024, 250624, 3, 45
    attention = 2 * (q + kv + q + q) * hidden  # q, k, gate, o in BF16
    shared = 3 * 768 * hidden * 2
    expert = 3 * 768 * hidden * (1 + 4 / 128**2)
    always = (
        48 * attention + dense * (kv * hidden * 2 + 3 * 6144 * hidden * 2)
        + sparse * (shared + (100 + 64) * hidden * 2) + vocab * hidden * 2
    )  # fmt: skip
    for batch, context in ((1, 512), (32, 768), (64, 768)):
        experts, values = (count * (1 - (1 - k / count) ** batch) for count, k in ((100, 8), (64, 4)))
        bytes_ = always + sparse * (experts * expert + values * kv * hidden * 2) + batch * context * 48 * 2 * kv * 2
        assert floors.step_bytes(mova, batch, context) == pytest.approx(bytes_, rel=2e-4)
    fp8 = 2 * sparse * 8 * 3 * 768 * hidden
    bf16 = 48 * attention + dense * 2 * (kv + 3 * 6144) * hidden + sparse * (shared + 2 * (164 + 4 * kv) * hidden)
    rate = floors.rates()["NVIDIA H200"]
    seconds = 16 * 4096 * (fp8 / rate.fp8_flops + (bf16 + 48 * 2 * q * 4096) / rate.bf16_flops)
    assert floors.prefill_seconds(mova, "NVIDIA H200", 16, 4096) == pytest.approx(seconds, rel=1e-3)


def test_no_measured_rate_is_above_its_floor():
    for one in sources.read(EVIDENCE, RESULTS).serving:
        for name, found in one.sides["this image"].items():
            least = floors.round_seconds(one.model, one.gpu, found.at_once, found.input_tokens, found.output_tokens)
            counted = found.output_tokens if found.counted == "output" else found.input_tokens
            assert found.requests * counted / found.tokens_per_second > least, (one.origin.file, name)


def test_a_rate_above_the_floor_is_pointed_at(lab):
    told = "A rate above this floor"
    shutil.copy(SERVE, lab.results)
    assert lab.run() == 0 and told not in text(lab.page)
    changed(SERVE, lab.results / SERVE.name, lambda raw: raw["rounds"]["decode-1"].update(tokens_per_second=502.0))
    assert lab.run() == 0 and told in text(lab.page)


def test_two_gpus_halve_the_floor_and_more_tokens_raise_it():
    mova = models.identify(nbytes=48353984040)
    one = floors.round_seconds(mova, "NVIDIA H200", 32, 512, 512)
    assert floors.round_seconds(mova, "NVIDIA H200", 32, 512, 512, ranks=2) == pytest.approx(one / 2)
    assert floors.round_seconds(mova, "NVIDIA H200", 32, 512, 513) > one
    assert floors.round_seconds(mova, "NVIDIA H200", 33, 512, 512) > one


def test_rates_are_those_of_the_file_that_they_name():
    copied = json.loads((RESULTS / "e2m1-k32-h200.json").read_text())["copy_gbps"]
    rate = floors.rates()["NVIDIA H200"]
    assert rate.bytes_per_second == copied * 1e9
    assert "benchmarks/results/e2m1-k32-h200.json" in rate.bytes_source
    assert rate.flops_source


def test_models_are_known_by_their_sizes():
    assert str(models.identify("mova-fp8", 2064, 6088691544)) == "36b-a4b, 6 of 48 layers"
    assert models.identify("k2-horizon-fp8", 2064, 6088691544) is None
    assert models.identify("mova-fp8", 2064, 6088691545) is None
    assert models.identify() is None
    assert models.identify(nbytes=390329042688).assumed
    assert len(models._sizes()) == sum(models.config(*key)["num_hidden_layers"] + 1 for key in models.CONFIGS), (
        "two cuts have the same size"
    )


# Plots


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0"), (0.00461, "0.00461"), (12.94, "12.9"), (1300.69, "1,301"), (1.95e-5, "1.95 × 10⁻⁵"), (1e-7, "10⁻⁷"),
     (0.9999, "1.00"), (99.96, "100"), (999.6, "1,000"), (123456.7, "123,457"), (4.271e12, "4.27 × 10¹²")],
)  # fmt: skip
def test_numbers_have_three_digits(value, told):
    assert svg.number(value) == told


@pytest.mark.parametrize(("value", "told"), [(0.0006, "0.0006"), (20, "20"), (100, "100"), (2.5, "2.5"), (0, "0")])
def test_ticks_are_short(value, told):
    assert svg.tick(value) == told


@pytest.mark.parametrize("values", [[0.003, 0.02], [1.0], [5e-6, 3.0], [0.2, 0.2000001], [7e5, 8e5]])
@pytest.mark.parametrize("log", [False, True])
def test_an_axis_holds_its_values_and_few_ticks(values, log):
    axis = svg.Axis(values, 10, 300, log)
    assert all(9.99 <= axis.at(value) <= 300.01 for value in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(9.9 <= axis.at(tick) <= 300.1 for tick in ticks)


def test_lines_have_gaps_where_there_is_no_value():
    plot = svg.lines("t", [("a", [None, 1.0, 2.0, None, 3.0])], range(5), "layer", "error")
    assert plot.count("<polyline") == 2
    assert plot.count("<circle") == 3
    logarithmic = svg.lines("t", [("a", [0.0, 1.0, 2.0])], range(3), "layer", "error", log=True)
    assert logarithmic.count("<circle") == 2
    assert svg.lines("t", [("a", [0.0, 1.0])], range(2), "layer", "error").count("<circle") == 2


def test_a_layer_without_any_error_is_told_and_not_drawn():
    layers = {"norm.mean": [0.0, 0.0], "attention.mean": [0.1, 0.2]}
    told = text(figures._per_layer("t", layers, sources.Origin("f"), "error", True)[0])
    assert "0 in every layer, so not on a logarithmic axis: norm.mean." in told
    assert "date not recorded · GPU not recorded · driver not recorded · versions not recorded" in told
    assert figures._per_layer("t", {"norm.mean": [0.0]}, sources.Origin("f"), "error", True) == []
    with pytest.raises(ValueError, match="several lengths"):
        figures._per_layer("t", {"a": [0.1], "b": [0.1, 0.2]}, sources.Origin("f"), "error", True)


def test_measured_bounds_are_drawn(lab, monkeypatch):
    policy = runs.measured_policy(lab.evidence.parent)
    policy.write_text(policy.read_text().replace("min = 0.0\nsource", "max = 0.5\nsource"))
    stages = {"numerics": {"numbers": {"max_abs_logprob_error": 0.3}}}
    lab.receipt(run=runs.SYNTHETIC, stages=stages, policy=policy)
    monkeypatch.setattr(policies, "PATH", policy)
    assert lab.run() == 0, lab.said
    plots = re.findall(r"<figure><h4>Error of (?:a token|log-prob).*?</figure>", lab.page, re.S)
    assert len(plots) == 2
    assert all("bound of the mean" in text(one) and "No bound of a mean" not in one for one in plots)
    # Means of both norms, the final one, attention and FFN; worst experts of FFN and values.
    assert text(plots[0]).count(" 0.5 ") == 7


def test_rates_of_a_server_that_nobody_launched_have_no_floor(lab):
    changed(SERVE, lab.results / "bare.json", lambda raw: raw.update(launch=None))
    assert lab.run() == 0, lab.said
    assert "No floor: tensors and bytes of the checkpoint are those of no model" in text(lab.page)


def test_the_first_in_a_cell_is_the_best(lab, monkeypatch):
    one = {"checkpoint": {"repository": "IFM/K2-Horizon-MoVA-36B-A4B-FP8"}}
    lab.receipt("b-good.json", run=one)
    lab.receipt("a-bad.json", run=one, stages={"load": {"result": "failed", "reason": "x"}})
    monkeypatch.setattr(policies, "PATH", lab.evidence.parent / "policy.toml")
    row = next(row for row in grid.rows(sources.read(lab.evidence, lab.results)) if row.cells["h200"])
    assert [receipt.verdict for receipt in row.cells["h200"]] == ["PASSED", "FAILED"]
    assert row.proven("h200")
    assert not row.proven("sm120")
