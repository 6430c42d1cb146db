"""What a published config promises: the tensors of a checkpoint, derived from its ``config.json`` alone."""

from pathlib import Path

#: Verbatim published configs; ``tests/data/README.md`` has their origins and digests.
PUBLISHED = Path(__file__).resolve().parent / "published"
MOVA_CONFIG = PUBLISHED / "K2-Horizon-MoVA-36B-A4B-FP8.config.json"
DENSE_CONFIG = PUBLISHED / "K2-Horizon-7B-FP8.config.json"
