"""Which tensors a pipeline stage owns when the head is the embedding, and when it is not."""

import json
from types import SimpleNamespace

import pytest
import torch

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE
from tests.engine.mutations import GATE


def tie(config):
    config["tie_word_embeddings"] = True
    config["quantization_config"]["ignored_layers"].remove("lm_head")


@pytest.fixture
def tied(tiny):
    """The model of a config whose head is the embedding, on the meta device."""
    tie(tiny)
    return engine_cpu.build_model(tiny, overrides=PROVENANCE)


def test_a_tied_checkpoint_loads_and_takes_no_head(tiny, tmp_path, source, refusal):
    tie(tiny)
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    without_head = {name: tensor for name, tensor in source.items() if name != "lm_head.weight"}
    model = engine_cpu.empty_model(tmp_path, overrides=PROVENANCE)
    model.load_weights(without_head.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, source["model.embed_tokens.weight"])
    report = refusal(engine_cpu.empty_model(tmp_path, overrides=PROVENANCE).load_weights, source.items())
    assert report.split("\n")[1:] == [
        "unexpected (1):",
        "  lm_head.weight: torch.bfloat16 (1024, 384) is no tensor of this model",
    ]


def inventory(model, monkeypatch, layers, first, last):
    """The inventory of the model when it poses as one pipeline stage."""
    monkeypatch.setattr(model.model, "start_layer", layers[0])
    monkeypatch.setattr(model.model, "end_layer", layers[1])
    monkeypatch.setattr(model, "pp_group", SimpleNamespace(is_first_rank=first, is_last_rank=last))
    return model.checkpoint_ledger.format.inventory(model)


@pytest.mark.parametrize(
    ("layers", "first", "last", "embedding", "norm"),
    [
        ((0, 5), True, True, "model.embed_tokens.weight", "model.norm.weight"),
        ((0, 2), True, False, "model.embed_tokens.weight", None),
        ((2, 4), False, False, None, None),
        ((4, 5), False, True, "lm_head.weight", "model.norm.weight"),
    ],
    ids=["alone", "first", "middle", "last"],
)
def test_the_last_stage_of_a_tied_model_fills_its_head_from_the_embedding(
    tied, monkeypatch, layers, first, last, embedding, norm
):
    found = inventory(tied, monkeypatch, layers, first, last)
    assert found["model.embed_tokens.weight"].parameter == embedding
    assert found["model.norm.weight"].parameter == norm
    assert "lm_head.weight" not in found
    assert (found[GATE].parameter is not None) == last


def test_the_last_stage_of_an_untied_model_needs_no_embedding(empty, monkeypatch):
    found = inventory(empty, monkeypatch, (4, 5), False, True)
    assert found["model.embed_tokens.weight"].parameter is None
    assert found["lm_head.weight"].parameter == "lm_head.weight"


def test_the_last_stage_of_a_tied_model_takes_the_embedding_and_misses_it(tied, source, refusal, monkeypatch):
    from sglang.srt.model_loader.checkpoint_ledger import Ledger

    inventory(tied, monkeypatch, (4, 5), False, True)
    monkeypatch.setattr(Ledger, "_check_parameters", lambda *args: None)  # this process holds the other stages too
    monkeypatch.setattr(Ledger, "_check_values", lambda *args: None)
    own = {name: tensor for name, tensor in source.items() if name.startswith((GATE[:14], "model.norm"))}
    embedding = {"model.embed_tokens.weight": source["model.embed_tokens.weight"]}
    ledger = tied.checkpoint_ledger
    report = refusal(list, ledger.watch(tied, own.items()))
    assert report.split("\n")[1:] == [
        "missing (1):",
        "  model.embed_tokens.weight: torch.bfloat16 (1024, 384) is in no shard",
    ]
    fresh = tied.checkpoint_ledger = type(ledger)(ledger.format)
    assert dict(fresh.watch(tied, (own | embedding).items())).keys() == (own | embedding).keys()
