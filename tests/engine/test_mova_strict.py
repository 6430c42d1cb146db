"""The ledger beyond single faults: one report, one load, no way past it, and the proof of what is quantised."""

import gc
from types import SimpleNamespace

import pytest
import torch

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE, faults
from qualify.models import k2_horizon
from tests.engine.mutations import DOWN, GATE, NORM, ROUTER, SCALE, SHARED, UP
from tests.engine.strict import Untouchable, forward, refusal

CPU = torch.device("cpu")


@pytest.fixture
def loaded(empty, source):
    empty.load_weights(source.items())
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.postprocess_weights(empty, CPU)
    return empty


# --- one report -------------------------------------------------------------------------------------------------


def test_all_defects_come_in_one_report(empty, source):
    stream = dict(source)
    del stream[DOWN]
    stream[NORM] = stream[NORM].float()
    stream[f"{ROUTER}.weight"] = stream[f"{ROUTER}.weight"][:3]
    stream["stray"] = torch.ones(1)
    stream[SCALE] = torch.full_like(stream[SCALE], torch.inf)
    stream[UP] = stream[UP].clone()
    stream[UP].view(torch.uint8)[0, :5] = 0x7F
    report = refusal(empty.load_weights, [*stream.items(), (GATE, stream[GATE])])
    first, *lines = report.split("\n")
    assert "(7 defect(s) in 7 place(s))" in first
    assert lines == [
        "dtype (1):",
        f"  {NORM}: is torch.float32, must be torch.bfloat16",
        "duplicate (1):",
        f"  {GATE}: comes a second time",
        "missing (1):",
        f"  {DOWN}: torch.float8_e4m3fn (384, 256) is in no shard",
        "shape (1):",
        f"  {ROUTER}.weight: is (3, 384), must be (16, 384)",
        "unexpected (1):",
        "  stray: torch.float32 (1,) is no tensor of this model",
        "value (2):",
        f"  {SCALE}: 6 of 6 values are not finite, positive and in range",
        f"  {UP}: 5 of 98,304 values are NaN or infinite",
    ]


def test_a_long_report_counts_all_and_prints_ten_of_a_kind(empty):
    report = refusal(empty.load_weights, [])
    assert "missing (267):" in report
    assert "... and 257 more" in report
    assert len(report.split("\n")) == 13


def test_a_reading_error_in_the_middle_keeps_what_was_known(empty, source):
    def stream():
        yield "stray", torch.ones(1)
        yield from list(source.items())[:5]
        raise OSError("disk on fire")

    report = refusal(empty.load_weights, stream())
    assert "stray" in report
    assert "cannot be read on: OSError: disk on fire" in report
    assert "missing" not in report


def test_memory_the_engine_does_not_write_is_reported(empty, source, monkeypatch):
    """A loader that consumes every tensor, and skips half of one on its way into the parameter."""
    experts = empty.model.layers[4].mlp.experts
    original = experts.w2_weight.weight_loader

    def forgetful(param, loaded_weight, name, shard_id, expert_id):
        if expert_id != 5:
            original(param, loaded_weight, name, shard_id=shard_id, expert_id=expert_id)

    monkeypatch.setattr(experts.w2_weight, "weight_loader", forgetful)
    report = refusal(empty.load_weights, source.items())
    assert "model.layers.4.mlp.experts.5.down_proj.weight: 98,304 of 98,304 values" in report
    assert "value (1):" in report


def test_a_parameter_without_a_source_is_reported(empty, source):
    empty.model.layers[4].mlp.gate.extra = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    report = refusal(empty.load_weights, source.items())
    assert f"{ROUTER}.extra: is a parameter that no tensor of the format fills" in report


def test_a_file_that_is_no_shard_ends_the_load_unopened(tiny_mova, tmp_path):
    """A pickle runs code when it is opened, so it must not be, even to report more."""
    (tmp_path / "config.json").write_bytes((tiny_mova / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    report = refusal(engine_cpu.load_model, tmp_path, overrides=PROVENANCE)
    assert report.split("\n")[1:] == [
        "unreadable (1):",
        "  pytorch_model.bin: is no safetensors file, and nothing else is loaded",
    ]


# --- one load ---------------------------------------------------------------------------------------------------


def test_a_second_load_is_refused_before_its_iterator_is_touched(loaded, tiny_mova):
    assert "second time" in refusal(loaded.load_weights, Untouchable())
    assert faults(loaded, tiny_mova) == []


def test_a_failed_load_refuses_to_serve_and_to_load(empty, source):
    refusal(empty.load_weights, list(source.items())[1:])
    assert "its checkpoint was refused" in refusal(forward, empty)
    assert "second time" in refusal(empty.load_weights, Untouchable())


def test_post_processing_does_not_let_a_failed_load_serve(empty, source):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    refusal(empty.load_weights, list(source.items())[1:])
    DefaultModelLoader.postprocess_weights(empty, CPU)
    assert "its checkpoint was refused" in refusal(forward, empty)


def test_a_consumer_that_stumbles_leaves_a_model_that_refuses(empty, source, monkeypatch):
    def stumble(*args, **kwargs):
        raise KeyError("consumer")

    monkeypatch.setattr(empty.model.layers[4].mlp.experts.w2_weight, "weight_loader", stumble)
    with pytest.raises(KeyError):
        empty.load_weights(source.items())
    assert "did not come to an end" in refusal(forward, empty)
    assert "second time" in refusal(empty.load_weights, Untouchable())


def test_a_loaded_model_has_its_own_forward_back(loaded):
    assert "forward" not in vars(loaded)
    assert loaded.forward.__func__ is type(loaded).forward


def test_without_post_processing_nothing_serves(empty, source):
    empty.load_weights(source.items())
    assert "not post-processed" in refusal(forward, empty)


def test_the_refusal_keeps_the_signature_of_forward(empty):
    """The engine reads it to see whether a model supports pipeline parallelism."""
    import inspect

    assert inspect.signature(empty.forward) == inspect.signature(type(empty).forward)


# --- no way past it ---------------------------------------------------------------------------------------------


def dummy(model):
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    initialize_dummy_weights(model)


def sharded_state(model):
    for parameter in model.parameters():
        parameter.data.zero_()


@pytest.mark.parametrize("fill", [dummy, sharded_state])
def test_weights_that_bypass_the_ledger_are_not_served(empty, fill):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    fill(empty)
    DefaultModelLoader.postprocess_weights(empty, CPU)
    assert "never loaded by the strict loader" in refusal(forward, empty)


def updater(model, directory):
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=SimpleNamespace(model_path=str(directory), dtype=torch.bfloat16),
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *args, **kwargs: pytest.fail("an update went through"),
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )


@pytest.mark.parametrize(
    "update",
    [
        lambda updater, directory: updater.update_weights_from_disk(str(directory), "auto"),
        lambda updater, directory: updater.load_weights_from_distributed(Untouchable()),
        lambda updater, directory: updater.update_weights_from_tensor(Untouchable()),
        lambda updater, directory: updater.update_weights_from_tensor(Untouchable(), load_format="direct"),
        lambda updater, directory: updater.update_weights_from_ipc(Untouchable()),
    ],
    ids=["disk", "distributed", "tensor", "direct", "ipc"],
)
def test_online_updates_are_refused_and_change_nothing(loaded, tiny_mova, update):
    done, message = update(updater(loaded, tiny_mova), tiny_mova)
    assert not done
    assert message.startswith("Online weight updates are refused for K2-Horizon MoVA FP8")
    assert faults(loaded, tiny_mova) == []


def test_a_second_directory_is_refused_before_it_is_read(loaded, tiny_mova):
    """Also where the engine builds the iterator itself, before load_weights sees it."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig())
    config = SimpleNamespace(model_path=str(tiny_mova), revision=None, hf_config=loaded.config)
    source = DefaultModelLoader.Source.init_new(config, loaded)
    assert "second time" in refusal(loader._get_weights_iterator, source)


def test_a_bf16_model_is_left_alone(tiny):
    del tiny["quantization_config"]
    model = engine_cpu.build_model(tiny, overrides=PROVENANCE)
    assert not hasattr(model, "checkpoint_ledger")
    assert not hasattr(model, "_derived_weight_cache_error")
    assert "forward" not in vars(model)


# --- what is quantised ------------------------------------------------------------------------------------------


def test_a_quantised_shared_expert_is_reported(empty, source):
    """A method that a kernel could run, on a module that the checkpoint declares BF16."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    module = empty.model.layers[4].mlp.shared_experts.down_proj
    module.quant_method = Fp8LinearMethod(empty.quant_config)
    report = refusal(empty.load_weights, source.items())
    assert f"{SHARED}.down_proj: runs Fp8LinearMethod, must be unquantised" in report


def test_an_unquantised_routed_expert_is_reported(empty, source):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    empty.model.layers[4].mlp.experts.quant_method = UnquantizedLinearMethod()
    assert "runs UnquantizedLinearMethod, must run block-wise" in refusal(empty.load_weights, source.items())


@pytest.mark.parametrize("name", ["model.layers.4.self_attn.v_experts", ROUTER, "model.layers.0.self_attn.q_proj"])
def test_another_dtype_than_declared_is_reported(empty, source, name):
    module = empty.get_submodule(name)
    module.weight.data = module.weight.data.half()
    assert f"{name}.weight: is held as torch.float16" in refusal(empty.load_weights, source.items())


def test_what_post_processing_quantises_is_reported(empty, source):
    """After the load all is well; then a method turns a value expert into FP8."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    empty.load_weights(source.items())
    experts = empty.model.layers[4].self_attn.v_experts
    experts.weight.data = experts.weight.data.to(torch.float8_e4m3fn)
    report = refusal(DefaultModelLoader.postprocess_weights, empty, CPU)
    assert "v_experts.weight: is held as torch.float8_e4m3fn, must be torch.bfloat16" in report
    assert "its checkpoint was refused" in refusal(forward, empty)


# --- exceptions and inventory -----------------------------------------------------------------------------------


def test_router_biases_are_widened_exactly_and_may_be_stored_as_float32(empty, source, tiny_mova):
    stream = {name: tensor.float() if name.endswith(".bias") else tensor for name, tensor in source.items()}
    assert sum(tensor.dtype == torch.float32 for tensor in stream.values()) == 96 + 4
    empty.load_weights(stream.items())
    assert faults(empty, tiny_mova) == []


def test_the_inventory_is_the_published_one(published):
    """The engine's own derivation and the one of the qualification agree on all 30,498 tensors."""
    model = engine_cpu.build_model(published, overrides=PROVENANCE)
    inventory = model.checkpoint_ledger.format.inventory(model)
    spelt = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}
    found = {name: (spelt[entry.tensor_class.stored[0]], entry.shape) for name, entry in inventory.items()}
    wanted = {name: (tensor.dtype, tensor.shape) for name, tensor in k2_horizon.tensors(published).items()}
    assert len(wanted) == 30498
    assert found == wanted
    assert {entry.parameter for entry in inventory.values()} == dict(model.named_parameters()).keys()


def posing(model, monkeypatch, start, end, first, last):
    """Make the model pose as one pipeline stage."""
    monkeypatch.setattr(model.model, "start_layer", start)
    monkeypatch.setattr(model.model, "end_layer", end)
    monkeypatch.setattr(model, "pp_group", SimpleNamespace(is_first_rank=first, is_last_rank=last))
    return model.checkpoint_ledger.format.inventory(model)


def test_two_pipeline_stages_own_every_tensor_once(empty, monkeypatch):
    front = posing(empty, monkeypatch, 0, 4, True, False)
    back = posing(empty, monkeypatch, 4, 5, False, True)
    assert front.keys() == back.keys()
    owners = [(front[name].parameter is not None) + (back[name].parameter is not None) for name in front]
    assert set(owners) == {1}
    assert front["model.embed_tokens.weight"].parameter
    assert back["lm_head.weight"].parameter
    assert back["model.norm.weight"].parameter
    assert back[GATE].parameter


def test_an_expert_parallel_rank_owns_its_experts(empty, monkeypatch):
    experts = empty.model.layers[4].mlp.experts
    monkeypatch.setattr(
        experts, "_map_global_expert_id_to_local_expert_id", lambda expert: expert - 8 if expert >= 8 else -1
    )
    inventory = empty.checkpoint_ledger.format.inventory(empty)
    name = "model.layers.4.mlp.experts.{}.up_proj.weight"
    assert inventory[name.format(3)].parameter is None
    assert inventory[name.format(8)].expert == 0
    assert inventory[name.format(8)].part == 1


def test_a_stage_checks_the_tensors_of_others_and_needs_only_its_own(empty, source, monkeypatch):
    """Tensors of another stage may be absent; present ones must still be right, and are not loaded."""
    from sglang.srt.model_loader.checkpoint_ledger import Ledger

    posing(empty, monkeypatch, 4, 5, False, True)
    own = {name: tensor for name, tensor in source.items() if name.startswith((GATE[:14], "lm_head", "model.norm"))}
    ledger = empty.checkpoint_ledger
    monkeypatch.setattr(Ledger, "_check_parameters", lambda *args: None)  # this process still holds all of them
    monkeypatch.setattr(Ledger, "_check_values", lambda *args: None)
    others = {"model.layers.0.input_layernorm.weight": source[NORM]}
    assert list(ledger.watch(empty, (own | others).items())) == list(own.items())
    ledger.state = type(ledger.state).BUILT  # the second half, without building another model
    wrong = {"model.layers.0.input_layernorm.weight": source[NORM].float()}
    assert "dtype (1):" in refusal(list, ledger.watch(empty, (own | wrong).items()))


# --- server flags -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "leaf", "value", "flag"),
    [
        ("overlap", "enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("moe", "enable_eplb", True, "--enable-eplb"),
        ("moe", "init_expert_location", "file.json", "--init-expert-location"),
        ("moe", "ep_num_redundant_experts", 4, "--ep-num-redundant-experts"),
        ("moe", "elastic_ep_backend", "mooncake", "--elastic-ep-backend"),
        ("moe", "ep_join_mode", "scale", "--elastic-ep-join-mode"),
        ("moe", "enable_elastic_expert_backup", True, "--enable-elastic-expert-backup"),
        ("moe", "enable_paged_experts", True, "--enable-paged-experts"),
        ("moe", "kt_weight_path", "weights", "--kt-weight-path"),
        ("model", "load_format", "dummy", "--load-format"),
        *[
            ("model", "load_format", value, "--load-format")
            for value in ("sharded_state", "remote", "remote_instance", "layered", "flash_rl", "runai_streamer")
        ],
        (
            "model",
            "remote_instance_weight_loader_start_seed_via_transfer_engine",
            True,
            "--remote-instance-weight-loader-start-seed-via-transfer-engine",
        ),
        ("model", "startup_weight_load_mode", "overlap", "--startup-weight-load-mode"),
        ("model", "weight_cache_mode", "attach", "--weight-cache-mode"),
        ("model", "quantize_and_serve", True, "--quantize-and-serve"),
        ("model", "rl_quant_profile", "profile", "--rl-quant-profile"),
    ],
)
def test_server_flags_that_move_weights_are_refused(tiny, namespace, leaf, value, flag):
    from sglang.srt.runtime_context import get_exec, get_model

    bag = get_model() if namespace == "model" else getattr(get_exec(), namespace)
    with bag.override(**{leaf: value}), pytest.raises(ValueError, match=f"not served with {flag} "):
        engine_cpu.build_model(tiny, overrides=PROVENANCE)


@pytest.mark.parametrize("value", ["auto", "safetensors", "fastsafetensors", "instanttensor", "presharded"])
def test_load_formats_that_stream_through_the_ledger_are_admitted(tiny, value):
    from sglang.srt.runtime_context import get_model

    with get_model().override(load_format=value):
        engine_cpu.build_model(tiny, overrides=PROVENANCE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_gate_func", "silu"),
        ("router_scaling_factor", 1),
        ("layernorm_num_groups", 1),
        ("router_score_func", "softmax"),
        ("norm_topk_prob", False),
    ],
)
def test_the_checkpoints_own_statements_are_taken_as_they_stand(tiny, key, value):
    tiny[key] = value
    engine_cpu.build_model(tiny, overrides=PROVENANCE)


def test_the_flags_in_the_messages_exist():
    import argparse

    from sglang.srt.layers.quantization import mova_fp8
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {flag for *_, flag in mova_fp8._RUNTIME} <= known


def test_reading_headers_starts_no_garbage_collection(monkeypatch):
    """One full collection over the engine's objects costs several times what the comparison itself does."""
    from sglang.srt.model_loader import checkpoint_files

    gc.enable()
    with checkpoint_files.without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with checkpoint_files.without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    seen = []
    monkeypatch.setattr(checkpoint_files, "_index_defects", lambda *arguments: seen.append(gc.isenabled()) or [])
    checkpoint_files.examine("/nonexistent", [], True)
    assert seen == [False]
