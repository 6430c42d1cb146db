"""What the ledger allows in which state, and what it looks at once more after post-processing."""

import pytest
import torch

from tests.engine.mutations import EXPERTS
from tests.engine.strict import Untouchable, forward

CPU = torch.device("cpu")


def post_process(model):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.postprocess_weights(model, CPU)


# --- files ------------------------------------------------------------------------------------------------------


def test_a_failed_load_looks_at_no_other_files(empty, refusal):
    refusal(empty.load_weights, [])
    said = refusal(empty.checkpoint_ledger.check_files, "/", Untouchable(), True)
    assert "takes no weights a second time, its checkpoint was refused" in said


def test_a_model_that_is_loaded_looks_at_no_other_files(empty, source, refusal):
    """Before post-processing; afterwards is test_a_second_directory_is_refused_before_it_is_read."""
    empty.load_weights(source.items())
    said = refusal(empty.checkpoint_ledger.check_files, "/", Untouchable(), True)
    assert "takes no weights a second time, its weights were not post-processed" in said


# --- live parameters --------------------------------------------------------------------------------------------


def test_the_loaded_model_serves_after_post_processing(empty, source):
    """The control of what follows."""
    empty.load_weights(source.items())
    post_process(empty)
    assert "forward" not in vars(empty)


def replace(layer, leaf, data):
    setattr(layer, leaf, torch.nn.Parameter(data, requires_grad=False))


def codes_in_bf16(layer):
    replace(layer, "w13_weight", layer.w13_weight.data.bfloat16())


def scales_in_bf16(layer):
    replace(layer, "w2_weight_scale_inv", layer.w2_weight_scale_inv.data.bfloat16())


def scales_rounded(layer):
    layer.w13_weight_scale_inv.format_ue8m0 = True


def per_tensor(layer):
    layer.quant_method.block_quant = False


def scales_gone(layer):
    del layer.w2_weight_scale_inv


def one_more(layer):
    replace(layer, "w2_weight_scale", torch.ones(16))


CHANGES = [
    (codes_in_bf16, "parameter", "w13_weight: is held as torch.bfloat16, must be torch.float8_e4m3fn"),
    (scales_in_bf16, "parameter", "w2_weight_scale_inv: is held as torch.bfloat16, must be torch.float32"),
    (scales_gone, "parameter", "w2_weight_scale_inv: is not a parameter of the model as it was built"),
    (one_more, "parameter", "w2_weight_scale: is a parameter that no tensor of the format fills"),
    (scales_rounded, "scope", "w13_weight_scale_inv: was requantised to UE8M0: use --moe-runner-backend triton"),
]
METHOD = (per_tensor, "scope", "runs Fp8MoEMethod, must run block-wise Fp8MoEMethod")


@pytest.mark.parametrize(
    ("change", "kind", "text"), [*CHANGES, METHOD], ids=[change.__name__ for change, *_ in [*CHANGES, METHOD]]
)
def test_what_post_processing_does_to_the_experts_is_reported(empty, source, refusal, monkeypatch, change, kind, text):
    """The load is good; then the method of one layer changes what it has loaded. Such a model never serves."""
    empty.load_weights(source.items())
    method = empty.get_submodule(EXPERTS).quant_method
    original = method.process_weights_after_loading

    def process(layer):
        original(layer)
        change(layer)

    monkeypatch.setattr(method, "process_weights_after_loading", process)
    separator = ": " if change is per_tensor else "."
    assert refusal(post_process, empty).split("\n")[1:] == [f"{kind} (1):", f"  {EXPERTS}{separator}{text}"]
    assert "its checkpoint was refused" in refusal(forward, empty)


@pytest.mark.parametrize(
    ("change", "text"), [(codes_in_bf16, CHANGES[0][2]), (scales_in_bf16, CHANGES[1][2])], ids=["codes", "scales"]
)
def test_experts_that_were_built_in_another_dtype_are_reported(empty, source, refusal, change, text):
    experts = empty.get_submodule(EXPERTS)
    before = dict(experts.named_parameters())
    change(experts)
    for name, parameter in experts.named_parameters():
        vars(parameter).update(vars(before[name]))  # the weight loader and what it reads
    assert f"{EXPERTS}.{text}" in refusal(empty.load_weights, source.items())


def test_experts_that_were_built_without_blocks_are_reported(empty):
    """Asked of the format itself: the consumer of the stream would stumble over such a method first."""
    ledger = empty.checkpoint_ledger
    assert ledger.format.scope_faults(empty) == []
    empty.get_submodule(EXPERTS).quant_method.block_quant = False
    assert ledger.format.scope_faults(empty) == [(EXPERTS, METHOD[2])]
