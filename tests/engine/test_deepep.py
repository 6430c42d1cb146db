"""Block-FP8 experts under DeepEP: what is refused, which runner they get, what it is given, and one forward pass.

``import deep_ep`` fails without a GPU. Transport and GPU kernels are stand-ins (``tests.deep_ep_stand_in``,
``tests.engine.deepep_forward`` say which); admission, choice of runner, weights and dispatch metadata are the engine's.
"""

import copy
import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch import all_to_all
from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE
from qualify.models import assumed, k2_horizon
from qualify.synth.layout import derive_config
from tests.engine import deepep_forward
from tests.engine.ownership import CASES

# One rounding to BF16 is at most 2^-8 of a value, and the sum of a token's experts is rounded last.
BF16 = 2**-8


@pytest.fixture(scope="module")
def derived():
    return derive_config(assumed.config_375b(), tiny=True, layers=None)


@pytest.fixture
def moe(derived):
    """The config of a tiny compressed-tensors checkpoint with routed experts, fresh for every test."""
    return copy.deepcopy(derived)


@pytest.fixture
def deepep(monkeypatch):
    """One rank of DeepEP where DeepGEMM is on; returns a function that changes what the engine sees."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.token_dispatcher import deepep as dispatcher
    from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend
    from sglang.srt.layers.quantization import deepep_admission
    from sglang.srt.runtime_context import get_flags

    places = {
        "a2a_backend": get_flags().moe,
        "runner_backend": get_flags().moe,
        "deepep_mode": get_flags().moe,
        "ENABLE_JIT_DEEPGEMM": deep_gemm_wrapper,
        "DEEPGEMM_SCALE_UE8M0": deep_gemm_wrapper,
        "use_deepep": dispatcher,
        "RANKS": deepep_admission,
    }

    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(places[name], name, value)

    change(a2a_backend=MoeA2ABackend.DEEPEP, deepep_mode=DeepEPMode.NORMAL, ENABLE_JIT_DEEPGEMM=True, use_deepep=True)
    change(RANKS=(1,))  # the library has no configuration for one rank; the engine's world here has one
    return change


def refusal(config, overrides):
    """The sentence with which the engine refuses to build ``config``."""
    with pytest.raises(ValueError) as caught:
        engine_cpu.build_model(config, overrides=overrides)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and "experts are not served with" in message
    return message


@pytest.fixture(params=["compressed-tensors", "fp8"])
def model(request, moe, tiny):
    """(config, overrides) of a tiny model with experts in blocks of FP8, in either format."""
    return (moe, {}) if request.param == "compressed-tensors" else (tiny, PROVENANCE)


def experts_of(model):
    """The routed experts of the last layer of a model that is built and not loaded."""
    return engine_cpu.build_model(model[0], overrides=model[1]).model.layers[-1].mlp.experts


# --- admission --------------------------------------------------------------------------------------------------


def test_a_runner_that_takes_no_tokens_from_deepep_is_refused(model, deepep):
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    deepep(runner_backend=MoeRunnerBackend.TRITON)
    assert "--moe-runner-backend triton takes no tokens from DeepEP" in refusal(*model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ENABLE_JIT_DEEPGEMM": False}, "DeepGEMM is off"),
        ({"DEEPGEMM_SCALE_UE8M0": True}, "powers of two only"),
        ({"use_deepep": False}, "the library does not import"),
        ({"RANKS": (2, 4)}, "no configuration for 1 rank(s), only for 2, 4"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(model, deepep, change, words):
    deepep(**change)
    assert words in refusal(*model)


@pytest.mark.parametrize("dtype", ["bf16", "nvfp4", "int8"])
def test_another_dispatch_dtype_is_refused(model, deepep, dtype):
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(deepep_dispatcher_output_dtype=dtype):
        assert f"--deepep-dispatcher-output-dtype {dtype}" in refusal(*model)


def test_the_variable_that_means_bf16_dispatch_is_refused(model, deepep, monkeypatch):
    monkeypatch.setenv("SGLANG_DEEPEP_BF16_DISPATCH", "1")
    assert "SGLANG_DEEPEP_BF16_DISPATCH" in refusal(*model)


@pytest.mark.parametrize("mode", ["AUTO", "LOW_LATENCY"])
def test_a_width_without_low_latency_kernels_is_refused(model, deepep, mode):
    from sglang.srt.layers.moe.utils import DeepEPMode

    deepep(deepep_mode=DeepEPMode[mode])
    assert "not compiled for a hidden size of" in refusal(*model)


@pytest.mark.parametrize("width", [2560, 6144])
def test_the_published_widths_have_low_latency_kernels(deepep, width):
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.layers.quantization import deepep_admission

    deepep(deepep_mode=DeepEPMode.AUTO)
    deepep_admission.check("FP8", width)


def test_the_limits_are_those_of_the_library():
    """Read from its files: it does not import without a GPU."""
    from sglang.srt.layers.quantization import deepep_admission

    package = Path(importlib.util.find_spec("deep_ep").origin).parent
    tables = re.findall(r"config_map = \{(.*?)\}", (package / "buffers" / "legacy.py").read_text(), re.S)
    assert len(tables) == 2  # dispatch and combine
    for table in tables:
        assert tuple(map(int, re.findall(r"(\d+): Config", table))) == deepep_admission.RANKS
    [library] = package.glob("_C.*.so")
    for kernel in (rb"8dispatch", rb"7combine"):
        widths = re.findall(rb"internode_ll" + kernel + rb"I(?:Lb\dE)+Li(\d+)E", library.read_bytes())
        assert tuple(sorted(set(map(int, widths)))) == deepep_admission.LOW_LATENCY_WIDTHS


@pytest.mark.parametrize(("chunk", "served"), [(8192, False), (257, False), (-1, False), (256, True), (None, True)])
def test_low_latency_alone_takes_prefills_that_fit_into_its_room(deepep, monkeypatch, chunk, served):
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.layers.quantization import deepep_admission
    from sglang.srt.runtime_context import get_schedule

    monkeypatch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "256")
    with get_schedule().override(chunked_prefill_size=chunk):
        for mode in ("AUTO", "NORMAL"):
            deepep(deepep_mode=DeepEPMode[mode])
            deepep_admission.check("FP8", 2560)
        deepep(deepep_mode=DeepEPMode.LOW_LATENCY)
        words = f"room for 256 tokens at once, --chunked-prefill-size is {chunk}: set it between 1 and 256"
        with nullcontext() if served else pytest.raises(ValueError, match=words):
            deepep_admission.check("FP8", 2560)


@pytest.mark.parametrize(("unpadded", "room"), [(False, 512), (True, 128)])
def test_a_batch_that_is_not_padded_is_sent_whole(monkeypatch, unpadded, room):
    from sglang.srt.layers.quantization import deepep_admission

    parallel = SimpleNamespace(attn_tp_size=4, disable_attn_tp_gather=unpadded)
    monkeypatch.setattr(deepep_admission, "get_parallel", lambda: parallel)
    assert deepep_admission._room() == room


def test_every_rank_has_the_whole_shared_expert(moe):
    """Quantised and 256 wide it cannot be split over 4 ranks; DeepEP does not split it."""
    from sglang.srt.layers.quantization import k2_horizon_fp8
    from transformers import PretrainedConfig

    config = PretrainedConfig(**{key: value for key, value in moe.items() if key != "quantization_config"})
    linear = [module for module in k2_horizon.modules(moe) if module.kind == "linear"]
    quantised = frozenset(module.name for module in linear if module.routed or "shared" in module.name)
    sizes = {"tp": 4, "ep": 4, "moe_tp": 1, "attn_tp": 4, "mlp_tp": 4}
    with pytest.raises(ValueError, match="shared_experts gate_proj has 256 rows"):
        k2_horizon_fp8.check_topology(config, quantised, **sizes)
    k2_horizon_fp8.check_topology(config, quantised, **sizes, deepep=True)
    with pytest.raises(ValueError, match=r"pairs that work: \(2, 2\), \(4, 4\)[^1]*$"):
        k2_horizon_fp8.check_topology(config, quantised, **(sizes | {"attn_tp": 3}), deepep=True)


# --- runner and weights -----------------------------------------------------------------------------------------


def test_the_experts_forward_through_the_deep_gemm_runner(model, deepep):
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
    from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmRunnerCore

    experts = experts_of(model)
    assert type(experts) is DeepEPMoE and experts.deprecate_flag
    assert experts.runner_backend.is_deep_gemm()
    assert type(runner_of(experts).runner_core) is DeepGemmRunnerCore


def test_without_an_all_to_all_backend_the_runner_stays(moe, deepep):
    from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend

    deepep(a2a_backend=MoeA2ABackend.NONE)
    assert experts_of((moe, {})).runner_backend.is_triton()
    deepep(runner_backend=MoeRunnerBackend.DEEP_GEMM)
    assert experts_of((moe, {})).runner_backend.is_deep_gemm()
    deepep(DEEPGEMM_SCALE_UE8M0=True)
    with pytest.raises(ValueError, match="cannot run on DeepGEMM here: on this GPU"):
        experts_of((moe, {}))


@pytest.mark.parametrize(
    "scheme",
    [
        SimpleNamespace(weight_block_size=None, static_input_scales=False),
        SimpleNamespace(weight_block_size=[64, 128], static_input_scales=False),
        SimpleNamespace(weight_block_size=[128, 128], static_input_scales=True),
    ],
)
def test_other_schemes_keep_their_runner(scheme, deepep):
    from sglang.srt.layers.quantization import block_fp8_deep_gemm

    assert not block_fp8_deep_gemm.chosen(scheme)
    good = SimpleNamespace(weight_block_size=[128, 128], static_input_scales=False)
    assert block_fp8_deep_gemm.chosen(good)


def test_the_runner_is_given_the_loaded_tensors_in_the_layout_of_fp8(model, deepep):
    experts = experts_of(model)
    given = []
    runner_of(experts).run = lambda dispatched, info: given.append(info) or "combined"
    assert experts.run_moe_core(SimpleNamespace(hidden_states=None)) == "combined"
    (info,) = given
    scale = "weight_scale" if hasattr(experts, "w13_weight_scale") else "weight_scale_inv"
    assert (info.w13_weight, info.w2_weight) == (experts.w13_weight, experts.w2_weight)
    assert info.w13_scale is getattr(experts, f"w13_{scale}") and info.w2_scale is getattr(experts, f"w2_{scale}")
    count, rows, hidden = info.w13_weight.shape
    assert info.w2_weight.shape == (count, hidden, rows // 2)
    assert info.w13_scale.shape == (count, rows // 128, hidden // 128)
    assert info.w2_scale.shape == (count, hidden // 128, rows // 256)
    assert info.w13_scale.dtype == info.w2_scale.dtype == torch.float32
    rest = {key: value for key, value in vars(info).items() if not key.startswith("w")}
    assert rest == {"use_fp8": True, "block_shape": [128, 128], "is_fp4_experts": False, "use_mxfp8": False}


def test_a_layer_with_another_runner_is_left_to_the_engine():
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization import block_fp8_deep_gemm

    def layer(runner):
        return SimpleNamespace(scheme=SimpleNamespace(runner=runner))

    assert block_fp8_deep_gemm.keeps_runner(layer(SimpleNamespace(runner_backend=MoeRunnerBackend.DEEP_GEMM)))
    assert not block_fp8_deep_gemm.keeps_runner(layer(SimpleNamespace(runner_backend=MoeRunnerBackend.TRITON)))
    assert not block_fp8_deep_gemm.keeps_runner(layer(None))
    assert not block_fp8_deep_gemm.keeps_runner(SimpleNamespace())


def runner_of(experts):
    return experts.quant_method.runner or experts.scheme.runner


# --- forward ----------------------------------------------------------------------------------------------------

DEEPEP = [case for case in CASES if case.a2a == "deepep" and case.works]


@pytest.mark.parametrize("case", DEEPEP, ids=[case.name for case in DEEPEP])
def test_ranks_compute_what_the_checkpoint_says(ownership, case):
    """Tokens on every rank, on some, on none: both formats, contiguous and masked."""
    for number, rank in enumerate(ownership[case.name]["ranks"]):
        assert len(rank["forward"]) == len(deepep_forward.TOKENS), rank
        for tokens, error in zip(deepep_forward.TOKENS, rank["forward"], strict=True):
            assert 0 < error <= BF16 if tokens[number] else error == 0, rank


@pytest.mark.parametrize("case", DEEPEP, ids=[case.name for case in DEEPEP])
def test_the_ranks_of_attention_share_a_batch(ownership, case):
    """So the room of launch/all_to_all.py is that of all of them together."""
    for rank in ownership[case.name]["ranks"]:
        assert rank["slices"] == ["ATTN_TP"]


def test_the_room_of_a_rank_is_the_engines():
    from sglang.srt.environ import envs

    assert envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get() == all_to_all.ROOM
