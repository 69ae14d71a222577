"""Megatron's graph settings: defaults, spellings, deprecated inputs, and every rejection with its suggested fix."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import types
import warnings

import pytest

from graph_cache.adapters.megatron.config import MODULES
from graph_cache.adapters.megatron.config import MegatronGraphConfig as GraphConfig
from graph_cache.config import GraphConfig as CoreConfig
from graph_cache.errors import GraphConfigError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"):
        monkeypatch.delenv(name, raising=False)


def refusal(**values) -> str:
    with pytest.raises(GraphConfigError) as refused:
        GraphConfig(**values)
    return str(refused.value)


def deprecation(**values) -> tuple[GraphConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = GraphConfig(**values)
    assert all(warning.category is DeprecationWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught), "the warning must point at its caller"
    return config, [str(warning.message) for warning in caught]


# Defaults and spellings


@pytest.mark.parametrize(
    ("impl", "scope"),
    [("none", "none"), ("local", "layer"), ("transformer_engine", "none"), ("full_iteration", "none")],
)
def test_inference_scope_defaults_to_layer_under_local_only(impl, scope):
    config = GraphConfig(cuda_graph_impl=impl)
    assert config.inference_cuda_graph_scope == scope
    assert config.graph_config().captures_inference is (scope != "none")


@pytest.mark.parametrize(
    ("impl", "captures"),
    [
        ("none", "none"),
        ("local", "native"),
        ("transformer_engine", "transformer_engine"),
        ("full_iteration", "iteration"),
    ],
)
def test_every_implementation_maps_onto_the_core(impl, captures):
    config = GraphConfig(cuda_graph_impl=impl, cuda_graph_warmup_steps=5)
    scope = config.inference_cuda_graph_scope
    expected = CoreConfig(inference_scope=scope, training_captures=captures, modules=(), warmup_steps=5)
    assert config.graph_config() == expected


def test_modules_map_onto_the_core():
    assert GraphConfig(cuda_graph_impl="local", cuda_graph_modules="mlp,attn").graph_config().modules == ("mlp", "attn")


def test_defaults_are_no_graphs_and_three_warm_up_steps():
    config = GraphConfig()
    assert (config.cuda_graph_impl, config.inference_cuda_graph_scope) == ("none", "none")
    assert (config.cuda_graph_modules, config.cuda_graph_warmup_steps) == ((), 3)


def test_local_without_inference_graphs_is_training_only_and_allowed():
    config = GraphConfig(cuda_graph_impl="local", inference_cuda_graph_scope="none")
    assert not config.graph_config().captures_inference


@pytest.mark.parametrize(
    "given",
    ["attn,mlp", " attn , mlp ", ["attn", "mlp"], ("attn", "mlp", "attn"), "[attn,mlp]"],
)
def test_modules_are_read_from_lists_and_comma_strings(given):
    assert GraphConfig(cuda_graph_impl="local", cuda_graph_modules=given).cuda_graph_modules == ("attn", "mlp")


def test_modules_keep_their_order():
    assert GraphConfig(cuda_graph_modules="mamba,attn").cuda_graph_modules == ("mamba", "attn")


@pytest.mark.parametrize("given", ["full", ["full"], [], "", ()])
def test_full_alone_or_nothing_means_the_whole_layer(given):
    assert GraphConfig(cuda_graph_impl="local", cuda_graph_modules=given).cuda_graph_modules == ()


class _NumberedModule(enum.Enum):
    attn = 2
    moe_router = 5


class _NumberedScope(enum.Enum):
    none = 1
    block = 3


class _NamedImpl(enum.Enum):
    LOCAL = "local"


def test_enum_members_are_read_by_name_or_value():
    config = GraphConfig(
        cuda_graph_impl=_NamedImpl.LOCAL,
        inference_cuda_graph_scope=_NumberedScope.block,
        cuda_graph_modules=[_NumberedModule.attn, "mlp"],
    )
    assert (config.cuda_graph_impl, config.inference_cuda_graph_scope) == ("local", "block")
    assert config.cuda_graph_modules == ("attn", "mlp")


def test_config_is_frozen_hashable_and_survives_replace_and_pickle():
    config = GraphConfig(cuda_graph_impl="local", moe_layer_freq=[0, 1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cuda_graph_impl = "none"
    assert dataclasses.replace(config, cuda_graph_warmup_steps=5).cuda_graph_warmup_steps == 5
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(GraphConfig(cuda_graph_impl="local", moe_layer_freq=(0, 1)))


# Invalid values


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cuda_graph_impl": "lokal"}, "did you mean 'local'"),
        ({"cuda_graph_impl": 3}, "type int"),
        ({"inference_cuda_graph_scope": "blok"}, "did you mean 'block'"),
        ({"cuda_graph_modules": "atn"}, "did you mean 'attn'"),
        ({"cuda_graph_modules": ["attn", 7]}, "type int"),
        ({"cuda_graph_warmup_steps": -1}, "0 or more"),
        ({"cuda_graph_warmup_steps": True}, "0 or more"),
        ({"num_moe_experts": "8"}, "0 or more"),
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"moe_layer_freq": [0, 2]}, "moe_layer_freq"),
        ({"hidden_dropout": 1.5}, "from 0 to 1"),
        ({"attention_dropout": float("nan")}, "from 0 to 1"),
        ({"recompute_granularity": "ful"}, "did you mean 'full'"),
        ({"cpu_offloading": "yes"}, "True or False"),
        ({"nccl_graph_register": 2}, "True or False"),
        ({"enable_cuda_graph": "yes"}, "True or False"),
    ],
)
def test_invalid_values_are_rejected(values, expected):
    assert expected in refusal(**values)


def test_an_unknown_module_lists_every_known_one():
    message = refusal(cuda_graph_modules=["router"])
    assert all(module in message for module in MODULES)


def test_an_unknown_input_names_the_nearest():
    with pytest.raises(GraphConfigError, match="did you mean 'cuda_graph_modules'"):
        GraphConfig.from_inputs(cuda_graph_module="attn")
    with pytest.raises(TypeError):
        GraphConfig(cuda_graph_module="attn")


# Unsupported combinations: each is rejected, and its smallest fix is accepted

_MOE = {"cuda_graph_impl": "local", "num_moe_experts": 8, "moe_pad_expert_input_to_capacity": True}
_DROP = {"cuda_graph_impl": "local", "hidden_dropout": 0.1}
_FULL = {"cuda_graph_impl": "full_iteration"}
_TE = {"cuda_graph_impl": "transformer_engine"}
_LOCAL = {"cuda_graph_impl": "local"}


@pytest.mark.parametrize(
    ("broken", "expected", "fix"),
    [
        ({"inference_cuda_graph_scope": "block"}, "cuda_graph_impl='local'", _LOCAL),
        ({"inference_cuda_graph_scope": "layer"}, "cuda_graph_impl='local'", {"inference_cuda_graph_scope": "none"}),
        (_TE | {"inference_cuda_graph_scope": "layer"}, "no inference graphs", {"inference_cuda_graph_scope": None}),
        (_FULL | {"inference_cuda_graph_scope": "block"}, "no inference graphs", _LOCAL),
        (_FULL | {"cuda_graph_modules": "attn"}, "leave the modules empty", {"cuda_graph_modules": ()}),
        (_LOCAL | {"cuda_graph_modules": "full,attn"}, "'full' alone", {"cuda_graph_modules": "full"}),
        (_LOCAL | {"cuda_graph_modules": "moe_router"}, "num_moe_experts is None", {"num_moe_experts": 4}),
        (_LOCAL | {"cuda_graph_modules": "moe_router", "num_moe_experts": 1}, "is 1", {"num_moe_experts": 2}),
        (_MOE | {"cuda_graph_modules": "moe", "num_moe_experts": None}, "num_moe_experts", {"num_moe_experts": 2}),
        (_MOE | {"cuda_graph_modules": "moe,moe_router"}, "choose one", {"cuda_graph_modules": "moe"}),
        (
            _MOE | {"cuda_graph_modules": "moe", "moe_pad_expert_input_to_capacity": False},
            "moe_pad_expert_input_to_capacity=True",
            {"moe_pad_expert_input_to_capacity": True},
        ),
        (_MOE | {"cuda_graph_modules": "moe_preprocess"}, "add 'moe_router'",
         {"cuda_graph_modules": "moe_preprocess,moe_router"}),
        (_MOE | {"cuda_graph_modules": "mlp"}, "every layer is an MoE layer", {"moe_layer_freq": 2}),
        (_MOE | {"cuda_graph_modules": "mlp", "moe_layer_freq": [1, 1]}, "every layer", {"moe_layer_freq": [0, 1]}),
        (_LOCAL | {"recompute_granularity": "full"}, "'selective'", {"recompute_granularity": "selective"}),
        (_TE | {"recompute_granularity": "full"}, "'full_iteration'", _FULL),
        (_LOCAL | {"recompute_granularity": "full"}, "graphs", {"training": False}),
        (_LOCAL | {"cpu_offloading": True}, "cpu_offloading=False", {"cuda_graph_impl": "none"}),
        (_FULL | {"cpu_offloading": True}, "cpu_offloading=False", {"cpu_offloading": False}),
        (_DROP, "use_te_rng_tracker=True", {"use_te_rng_tracker": True}),
        (_DROP, "hidden_dropout", {"use_cudagraphable_rng": True}),
        (_DROP, "hidden_dropout", {"cuda_graph_impl": "none"}),
        (_DROP, "training=False", {"training": False}),
        (_TE | {"attention_dropout": 0.1}, "attention_dropout above 0", {"attention_dropout": 0.0}),
        (_FULL | {"attention_dropout": 0.1, "hidden_dropout": 0.1}, "hidden_dropout and attention_dropout",
         {"use_te_rng_tracker": True}),
        (_FULL | {"check_for_nan_in_loss_and_grad": True}, "check_for_nan_in_loss_and_grad=False", _LOCAL),
        (_TE | {"expandable_segments": True}, "NCCL_GRAPH_REGISTER=0", {"nccl_graph_register": 0}),
        (_TE | {"expandable_segments": True, "nccl_graph_register": "1"}, "expandable", {"expandable_segments": False}),
    ],
)  # fmt: skip
def test_unsupported_combinations_are_rejected_and_their_fix_is_accepted(broken, expected, fix):
    assert expected in refusal(**broken)
    GraphConfig(**(broken | fix))


def test_every_broken_rule_is_named_at_once():
    message = refusal(cuda_graph_impl="full_iteration", cuda_graph_modules="attn", cpu_offloading=True)
    assert "modules empty" in message and "cpu_offloading=False" in message


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_te_graphs_read_the_allocators_settings_from_the_environment(monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    assert "NCCL_GRAPH_REGISTER=0" in refusal(cuda_graph_impl="transformer_engine")
    GraphConfig(cuda_graph_impl="local")
    GraphConfig(cuda_graph_impl="transformer_engine", expandable_segments=False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert GraphConfig(cuda_graph_impl="transformer_engine").expandable_segments


# Deprecated inputs


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ({"enable_cuda_graph": True}, {"cuda_graph_impl": "local"}, "cuda_graph_impl='local'"),
        ({"external_cuda_graph": True}, _TE, "cuda_graph_impl='transformer_engine'"),
        (
            {"cuda_graph_scope": ["attn", "mlp"]} | _LOCAL,
            {"cuda_graph_modules": ("attn", "mlp")} | _LOCAL,
            "cuda_graph_modules=['attn', 'mlp']",
        ),
        ({"cuda_graph_scope": "attn, mlp"}, {"cuda_graph_modules": ("attn", "mlp")}, "cuda_graph_modules"),
        ({"cuda_graph_scope": [_NumberedModule.attn]}, {"cuda_graph_modules": ("attn",)}, "cuda_graph_modules"),
        ({"cuda_graph_scope": "full"}, {}, "cuda_graph_modules=[]"),
        ({"cuda_graph_scope": []}, {}, "cuda_graph_modules=[]"),
        ({"cuda_graph_scope": "full_iteration"}, _FULL, "cuda_graph_impl='full_iteration'"),
        ({"cuda_graph_scope": ["full_iteration"]} | _LOCAL, _FULL, "cuda_graph_impl='full_iteration'"),
        (
            {"cuda_graph_scope": "full_iteration_inference"} | _LOCAL,
            {"inference_cuda_graph_scope": "block"} | _LOCAL,
            "cuda_graph_impl='local' with inference_cuda_graph_scope='block'",
        ),
        (
            {"cuda_graph_scope": "attn,full_iteration_inference"} | _LOCAL,
            {"inference_cuda_graph_scope": "block", "cuda_graph_modules": "attn"} | _LOCAL,
            "cuda_graph_modules=['attn']",
        ),
        ({"cuda_graph_modules": "full_iteration"}, _FULL, "cuda_graph_impl='full_iteration'"),
        ({"cuda_graph_modules": ["full_iteration"]} | _LOCAL, _FULL, "cuda_graph_impl='full_iteration'"),
        ({"cuda_graph_modules": "full_iteration"} | _FULL, _FULL, "cuda_graph_impl='full_iteration'"),
        (
            {"cuda_graph_modules": "full_iteration_inference"} | _LOCAL,
            {"inference_cuda_graph_scope": "block"} | _LOCAL,
            "cuda_graph_impl='local' with inference_cuda_graph_scope='block'",
        ),
        (
            {"cuda_graph_modules": "attn,full_iteration_inference"} | _LOCAL,
            {"inference_cuda_graph_scope": "block", "cuda_graph_modules": "attn"} | _LOCAL,
            "inference_cuda_graph_scope='block'",
        ),
    ],
)
def test_a_deprecated_input_works_with_one_warning_that_names_the_replacement(old, new, names):
    config, messages = deprecation(**old)
    assert config == GraphConfig(**new)
    assert len(messages) == 1
    assert names in messages[0] and "deprecated" in messages[0]


@pytest.mark.parametrize("setting", ["cuda_graph_scope", "cuda_graph_modules"])
@pytest.mark.parametrize("impl", [{}, {"cuda_graph_impl": "none"}], ids=["unset", "none"])
def test_full_iteration_inference_without_an_impl_has_no_effect_and_warns(setting, impl):
    config, messages = deprecation(**{setting: "full_iteration_inference"}, **impl)
    assert config == GraphConfig()
    assert len(messages) == 1 and "has no effect without cuda_graph_impl='local'" in messages[0]
    with pytest.warns(DeprecationWarning, match="has no effect"):
        config = GraphConfig.from_megatron({"cuda_graph_impl": "none", setting: ["full_iteration_inference"]})
    assert config == GraphConfig()


@pytest.mark.parametrize("flag", ["enable_cuda_graph", "external_cuda_graph"])
def test_full_iteration_inference_sees_the_impl_of_a_deprecated_flag(flag):
    values = {flag: True, "cuda_graph_modules": "full_iteration_inference"}
    if flag == "enable_cuda_graph":
        config, messages = deprecation(**values)
        assert (config.cuda_graph_impl, config.inference_cuda_graph_scope, len(messages)) == ("local", "block", 2)
    else:
        with pytest.warns(DeprecationWarning):
            refusal(**values)


@pytest.mark.parametrize("setting", ["cuda_graph_scope", "cuda_graph_modules"])
def test_a_migrated_value_of_a_megatron_config_selects_the_same_as_in_megatron(setting):
    with pytest.warns(DeprecationWarning):
        config = GraphConfig.from_megatron({"cuda_graph_impl": "none", setting: ["full_iteration"]})
    assert config == GraphConfig(cuda_graph_impl="full_iteration")


class CudaGraphScope(enum.Enum):
    """Megatron's deprecated enum, whose members are in older configurations and checkpoints."""

    full_iteration = 1
    attn = 2
    mlp = 3
    moe = 4
    moe_router = 5
    moe_preprocess = 6
    mamba = 7
    full_iteration_inference = 8


@pytest.mark.parametrize(
    "spell",
    [str, lambda name: [name], CudaGraphScope.__getitem__, lambda name: [CudaGraphScope[name]]],
    ids=["str", "list", "member", "members"],
)
@pytest.mark.parametrize("setting", ["cuda_graph_scope", "cuda_graph_modules"])
@pytest.mark.parametrize("impl", ["unset", "none", "local"])
@pytest.mark.parametrize("name", CudaGraphScope.__members__)
def test_every_member_of_megatrons_deprecated_enum_is_read_as_in_megatron(name, impl, setting, spell):
    values = {setting: spell(name), "num_moe_experts": 4, "moe_pad_expert_input_to_capacity": True}
    values |= {} if impl == "unset" else {"cuda_graph_impl": impl}
    values |= {"moe_layer_freq": 2}
    expected = ("none" if impl == "unset" else impl, "layer" if impl == "local" else "none", (name,))
    if name == "full_iteration":
        expected = ("full_iteration", "none", ())
    elif name == "full_iteration_inference":
        expected = (*({"local": ("local", "block")}.get(impl, ("none", "none"))), ())
    if name == "moe_preprocess":
        assert "add 'moe_router'" in refusal_with_warnings(**values)
        return
    config, messages = deprecation(**values)
    assert (config.cuda_graph_impl, config.inference_cuda_graph_scope, config.cuda_graph_modules) == expected
    deprecated = setting == "cuda_graph_scope" or name.startswith("full_iteration")
    assert len(messages) == deprecated and all(setting in message for message in messages)


def refusal_with_warnings(**values) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return refusal(**values)


def test_two_deprecated_inputs_warn_once_each():
    config, messages = deprecation(enable_cuda_graph=True, cuda_graph_scope="attn")
    assert (config.cuda_graph_impl, config.cuda_graph_modules) == ("local", ("attn",))
    assert [message.split()[0].split("=")[0] for message in messages] == ["enable_cuda_graph", "cuda_graph_scope"]


def test_from_inputs_warns_where_it_was_called():
    with pytest.warns(DeprecationWarning) as caught:
        GraphConfig.from_inputs(enable_cuda_graph=True, cuda_graph_modules=None)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_deprecated_input_that_agrees_is_accepted():
    config, messages = deprecation(
        enable_cuda_graph=True, cuda_graph_impl="local", cuda_graph_scope="mlp,attn", cuda_graph_modules="attn,mlp"
    )
    assert config.cuda_graph_impl == "local" and len(messages) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "values",
    [
        {"enable_cuda_graph": True, "cuda_graph_impl": "none"},
        {"enable_cuda_graph": True, "cuda_graph_impl": "transformer_engine"},
        {"enable_cuda_graph": False, "cuda_graph_impl": "local"},
        {"external_cuda_graph": True, "cuda_graph_impl": "local"},
        {"external_cuda_graph": False, "cuda_graph_impl": "transformer_engine"},
        {"enable_cuda_graph": True, "external_cuda_graph": True},
        {"cuda_graph_scope": "attn", "cuda_graph_modules": "mlp"},
        {"cuda_graph_scope": "attn", "cuda_graph_modules": ()},
        {"cuda_graph_scope": "full_iteration", "cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_scope": "full_iteration_inference", "cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_scope": "full_iteration_inference", "cuda_graph_impl": "full_iteration"},
        {"cuda_graph_scope": "full_iteration_inference", "inference_cuda_graph_scope": "layer"} | _LOCAL,
        {"cuda_graph_modules": "full_iteration_inference", "inference_cuda_graph_scope": "layer"} | _LOCAL,
        {"cuda_graph_modules": "full_iteration_inference", "cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_modules": "full_iteration", "cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_modules": "full_iteration", "inference_cuda_graph_scope": "block"},
        {"cuda_graph_modules": "full_iteration,full_iteration_inference"},
        {"cuda_graph_modules": "full_iteration,attn"},
        {"cuda_graph_modules": "full_iteration,full"},
        {"cuda_graph_scope": "full_iteration,full_iteration_inference"},
        {"cuda_graph_scope": "full_iteration,attn"},
        {"cuda_graph_scope": "full,attn"},
        {"cuda_graph_scope": "attention"},
    ],
)
def test_a_deprecated_input_that_contradicts_is_refused(values):
    refusal(**values)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_contradiction_names_both_sides():
    message = refusal(enable_cuda_graph=True, cuda_graph_impl="none")
    assert "enable_cuda_graph" in message and "cuda_graph_impl is 'none'" in message and "leave out" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scope_with_both_full_iteration_values_is_rejected():
    message = refusal(cuda_graph_scope=["full_iteration", "full_iteration_inference"])
    assert "choose cuda_graph_impl='full_iteration' or cuda_graph_impl='local'" in message


# From a Megatron configuration


def test_a_megatron_config_gives_its_graph_settings_and_keeps_its_default_scope():
    source = types.SimpleNamespace(
        hidden_size=4096, cuda_graph_impl="local", inference_cuda_graph_scope=None, cuda_graph_modules=[],
        enable_cuda_graph=False, external_cuda_graph=False, cuda_graph_scope=None, cuda_graph_warmup_steps=2,
        num_moe_experts=None, moe_layer_freq=1, hidden_dropout=0.1, attention_dropout=0.0, te_rng_tracker=True,
    )  # fmt: skip
    config = GraphConfig.from_megatron(source)
    assert (config.inference_cuda_graph_scope, config.cuda_graph_warmup_steps) == ("layer", 2)
    assert config.use_te_rng_tracker
    block = GraphConfig.from_megatron(source, inference_cuda_graph_scope="block")
    assert block.inference_cuda_graph_scope == "block"


def test_an_older_megatron_config_with_a_deprecated_flag_works():
    source = {"cuda_graph_impl": "none", "enable_cuda_graph": True, "cuda_graph_scope": "full", "padding": 3}
    with pytest.warns(DeprecationWarning) as caught:
        config = GraphConfig.from_megatron(source)
    assert config.cuda_graph_impl == "local" and len(caught) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_enable_cuda_graph_with_full_iteration_is_accepted_as_in_megatron():
    source = types.SimpleNamespace(enable_cuda_graph=True, cuda_graph_impl="full_iteration")
    assert GraphConfig.from_megatron(source).cuda_graph_impl == "full_iteration"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("scope", "modules"), [(["full_iteration_inference"], ()), (["attn", "full_iteration_inference"], ("attn",))]
)
@pytest.mark.parametrize("setting", ["cuda_graph_scope", "cuda_graph_modules"])
def test_an_overridden_inference_scope_is_no_contradiction(setting, scope, modules):
    source = types.SimpleNamespace(cuda_graph_impl="local", **{setting: scope})
    with pytest.warns(DeprecationWarning, match=f"{setting}=full_iteration_inference is deprecated"):
        config = GraphConfig.from_megatron(source, inference_cuda_graph_scope="none")
    assert (config.inference_cuda_graph_scope, config.cuda_graph_modules) == ("none", modules)


def test_a_megatron_config_with_an_unsupported_combination_is_rejected():
    with pytest.raises(GraphConfigError, match="check_for_nan"):
        GraphConfig.from_megatron({"cuda_graph_impl": "full_iteration", "check_for_nan_in_grad": True})
