"""What images/image.toml keeps out of the image is never loaded by the engine that serves the artifacts.

Runs in the image, where the distributions and paths are absent: these tests read the engine's sources, every
installed ELF file and the real imports.
"""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest

import images

IMAGE = tomllib.loads((Path(next(iter(images.__path__))) / "image.toml").read_text())
LEFT_OUT = {entry["distribution"] for entry in IMAGE["leave_out"]}

#: Import names of the left-out distributions that have one.
MODULES = {
    "cudnn": "nvidia-cudnn-frontend",
    "datasets": "datasets",
    "deepseek_recipe": "deepseek-recipe",
    "llvmlite": "llvmlite",
    "modelscope": "modelscope",
    "modelscope_hub": "modelscope-hub",
    "nccl.ep": "nccl-extensions",
    "nccl.m2n": "nccl-extensions",
    "numba": "numba",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "scipy": "scipy",
    "timm": "timm",
    "torchcodec": "torchcodec",
}

#: The engine's only importers of a left-out module: model families and options that no artifact serves.
IMPORTERS = {
    "layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py": {"cudnn"},
    "models/deepseek_common/amd/aiter_intree_tune.py": {"pandas"},
    "models/deepseek_vl2.py": {"timm"},
    "models/inkling_common/hmlp.py": {"scipy"},
    "multimodal/inkling/image_processing.py": {"numba"},
    "multimodal/processors/embedding_gemma2.py": {"scipy"},
    "parser/deepseek_recipe_renderer.py": {"deepseek_recipe"},
}
#: Importers behind a switch or a guard of the engine's own, by module.
GUARDED = {"modelscope", "torchcodec"}

#: Model classes of the artifacts.
SERVED = [
    "sglang.srt.models.xllm",
    "sglang.srt.models.qwen3_5",
    "sglang.srt.models.qwen3_5_text",
    "sglang.srt.models.glm4_moe",
]


@pytest.fixture(scope="module")
def site() -> Path:
    return Path(metadata.distribution("sglang").locate_file(""))


def imported(source: Path) -> set[str]:
    """Left-out modules that a source file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {module for module in MODULES for name in names if f"{name}.".startswith(f"{module}.")}


def test_every_left_out_distribution_is_absent():
    assert {d.metadata["Name"].lower().replace("_", "-") for d in metadata.distributions()} & LEFT_OUT == set()


def test_every_left_out_distribution_is_tested_here():
    without_python = {"nvidia-cutlass-dsl-libs-cu12", "nvidia-mathdx"}
    assert set(MODULES.values()) | without_python == LEFT_OUT


def test_only_the_named_files_of_the_engine_import_what_is_left_out(site):
    found = defaultdict(set)
    for source in (site / "sglang/srt").rglob("*.py"):
        if modules := imported(source) - GUARDED:
            found[str(source.relative_to(site / "sglang/srt"))] = modules
    assert dict(found) == IMPORTERS


@pytest.mark.parametrize("module", SERVED)
def test_the_served_models_import(module):
    importlib.import_module(module)


def test_no_other_module_of_the_engine_misses_what_is_left_out():
    """Import every module of sglang.srt: the only failures for want of a left-out module are in IMPORTERS."""
    code = (
        "import importlib, pkgutil, sys, warnings; warnings.simplefilter('ignore')\n"
        "import sglang.srt\n"
        "for m in pkgutil.walk_packages(sglang.srt.__path__, 'sglang.srt.', onerror=lambda name: None):\n"
        "    if 'rust_extensions' in m.name or m.name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(m.name)\n"
        "    except ModuleNotFoundError as e: print('MISSING', m.name, e.name, flush=True)\n"
        "    except BaseException: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    missing = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("MISSING")]
    ours = {(name, module) for name, module in missing if module.split(".")[0] in {m.split(".")[0] for m in MODULES}}
    allowed = {"sglang.srt." + path.removesuffix(".py").replace("/", ".") for path in IMPORTERS}
    allowed |= {name.rpartition(".")[0] for name in allowed if ".inkling." in name}  # the package imports its module
    assert {name for name, _ in ours} <= allowed, ours


def elf_files(site: Path) -> list[Path]:
    return [
        path
        for path in site.rglob("*")
        if ".so" in path.name and path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"
    ]


def test_nothing_links_against_an_excluded_library(site):
    excluded = ("libcusolverMg.", "libnvrtc.alt", "libnvrtc-builtins.alt", "libproton")
    users = {}
    for path in elf_files(site):
        dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True).stdout
        needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
        if bad := [name for name in needed if name.startswith(excluded)]:
            users[str(path)] = bad
    assert users == {}


@pytest.mark.parametrize("name", [b"libnvrtc.alt", b"libnvrtc-builtins.alt"])
def test_nothing_names_the_second_nvrtc(site, name):
    assert [str(path) for path in elf_files(site) if name in path.read_bytes()] == []


def test_excluded_paths_are_absent(site):
    assert [rule["path"] for rule in IMAGE["exclude"] if list(site.glob(rule["path"]))] == []
