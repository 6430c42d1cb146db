"""Stage "load": the engine's own loader reads a synthetic checkpoint in the published format exactly."""

from collections import Counter

from qualify.checks import loading


def test_every_parameter_equals_its_source(loaded_mova, tiny_mova):
    assert loading.faults(loaded_mova, tiny_mova) == []


def test_only_the_routed_experts_are_quantised(loaded_mova):
    methods = {
        name: type(module.quant_method).__name__
        for name, module in loaded_mova.named_modules()
        if getattr(module, "quant_method", None) is not None
    }
    experts = {name for name in methods if name.endswith(".mlp.experts")}
    assert len(experts) == 2
    assert {methods.pop(name) for name in experts} == {"Fp8MoEMethod"}
    # Attention projections, value router, shared experts, dense prefix, embedding and head.
    assert set(Counter(methods.values())) == {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
