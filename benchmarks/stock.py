"""The unpatched engine beside the patched one, for side-by-side counts and measurements.

Standard library only; :func:`relax_gates` needs the stock engine importable.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from qualify.errors import CannotRun

#: The patch series that belongs to this checkout.
PATCHES = Path(__file__).resolve().parents[1] / "patches"


def pristine_tree(installed: Path, out: Path, patches: Path = PATCHES) -> None:
    """Write the stock ``sglang`` package to ``out/sglang``: links to ``installed`` (the patched package's
    directory), the touched files with the series reversed, none of the added ones.

    Put ``out`` first on ``PYTHONPATH`` to run stock. Raises ``CannotRun`` when a touched file does not come out
    with the hash that the series pins for the wheel.
    """
    sys.path.insert(0, str(patches))
    try:
        import series_diff
        import series_files
        from series_tree import sha256
    finally:
        sys.path.remove(str(patches))
    series = series_files.load_series(patches / "sglang")
    pin = series_files.load_pin(patches / "sglang")
    added, package = set(series.added), Path("sglang")
    originals = {}
    for path in pin.files:
        data = (installed.parent / path).read_bytes()
        for patch in reversed(series.patches):
            for diff in patch.diffs:
                if diff.path == path:
                    data = series_diff.apply_strict(diff.reversed(), data)
                    if data is None:
                        raise CannotRun(f"{path} is not the file that the series made; is the engine patched?")
        if sha256(data) != pin.files[path][0]:
            raise CannotRun(f"{path} with the series reversed is not the file of the pinned wheel")
        originals[path] = data
    for source in sorted(installed.rglob("*")):
        path = package / source.relative_to(installed)
        if "__pycache__" in path.parts or path.as_posix() in added or source.is_dir():
            continue
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.as_posix() in originals:
            target.write_bytes(originals[path.as_posix()])
        else:
            target.symlink_to(source.resolve())


def installed_package() -> Path:
    """Directory of the importable ``sglang`` package, found without importing it. Raises ``CannotRun``."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise CannotRun("sglang is not importable; run this inside the image, or with the patched engine on PYTHONPATH")
    return Path(spec.submodule_search_locations[0])


def is_stock() -> bool:
    """Whether the importable engine lacks the series."""
    return not (installed_package() / "srt/layers/quantization/mova_fp8.py").is_file()


def relax_gates() -> None:
    """Open the two gates that keep stock from building a MoVA FP8 model, and nothing else.

    Both are checks of ``quant_config`` in ``sglang.srt.models.xllm``: the model's, which wants compressed-tensors,
    and the attention's, which wants none. Each is called with None instead; all other checks stay.
    """
    from sglang.srt.models import xllm

    validate, build = xllm._validate_mova_config, xllm._XllmMoVAAttentionBase.__init__

    def validate_unquantised(config, quant_config):
        return validate(config, None)

    def build_unquantised(self, config, layer_id, quant_config, prefix):
        return build(self, config, layer_id, None, prefix)

    xllm._validate_mova_config = validate_unquantised
    xllm._XllmMoVAAttentionBase.__init__ = build_unquantised
