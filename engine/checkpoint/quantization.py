"""How a quantised checkpoint stores its matrices, read from `quantization_config` of config.json.

Reads the layouts of block and plain fp8, compressed-tensors, AWQ, GPTQ, modelopt and MXFP4, and refuses every other
method, and every option that changes what the tensors mean. engine/layers/formats has the storage and arithmetic.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from engine.checkpoint.json_files import read_json_object
from engine.errors import ModelError
from graph_cache.utils.validation import is_whole_number

logger = logging.getLogger(__name__)

KEY = "quantization_config"
ONLINE = "online"
"""The method of a plain checkpoint that is quantised while it loads."""

LEGACY_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that hold the settings of checkpoints whose config.json has no `quantization_config`, and their method."""


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """How one matrix W [outputs, inputs] is stored: W = (code - zero) * scale.

    - layout: the names and shapes of its tensors, a key of `LAYOUTS` in engine/layers/formats.
    - element: the type of a code: "fp8", "int8", "int4" or "mxfp4".
    - block: the rows and columns of W that share a scale; None: all of them.
    - symmetric: whether all zeros are the middle of the codes, and not stored.
    - act_order: whether each column names its group of scales (`g_idx`) instead of being in order.
    - dynamic_activations: whether a product quantises its activations to fp8, with scales from their values.
    """

    layout: str
    element: str
    block: tuple[int | None, int | None]
    symmetric: bool = True
    act_order: bool = False
    dynamic_activations: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Quantization:
    """The quantisation of a checkpoint.

    - method: `quant_method` as config.json writes it, or ONLINE.
    - schemes: the schemes, each with the modules that have it: names, `re:` patterns, or classes such as "Linear".
    - ignored: modules that are not quantised: names, parts of names, or `re:` patterns.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignored: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.method} ({self.element})"

    @property
    def element(self) -> str:
        """The type of the codes, for reports; "mixed" if there are several."""
        found = {scheme.element for _, scheme in self.schemes}
        return found.pop() if len(found) == 1 else "mixed"

    def scheme(self, module: str) -> WeightScheme | None:
        """Return the scheme of a linear layer by its name in the checkpoint: the most specific match; None: no match.

        The whole name counts more than a pattern or a part of it, and these more than a class.

        Doesn't look at `ignored`: programs match it in different ways, so the names of the stored tensors decide.
        """
        for is_match in (module.__eq__, partial(_matches, module), "Linear".__eq__):
            for targets, scheme in self.schemes:
                if any(map(is_match, targets)):
                    return scheme
        return None

    def ignores(self, module: str) -> bool:
        """Return whether a linear layer is listed as not quantised: for a model without files."""
        return any(_matches(module, entry) for entry in self.ignored)


def _matches(module: str, target: str) -> bool:
    """Return whether `target` is a pattern that matches, or whole dotted parts of the module's name."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return f".{target.strip('.')}." in f".{module}."


def online_quantization(element: str) -> Quantization:
    """Return the quantisation of a plain checkpoint to `element` while it loads.

    fp8 and int8 have a scale per row, int4 a scale and a zero per 128 columns of a row.
    """
    block = (1, 128) if element == "int4" else (1, None)
    scheme = WeightScheme(layout=ONLINE, element=element, block=block, symmetric=element != "int4")
    return Quantization(method=ONLINE, schemes=((("Linear",), scheme),))


def quantization_values(folder: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json's content with the quantisation that an older tool wrote to another file of the folder."""
    if values.get(KEY) is not None:
        return values
    for name, method in LEGACY_FILES.items():
        path = folder / name
        if path.exists():
            found = read_json_object(path)
            nested = found.get("quantization")  # modelopt writes its settings one level deeper
            if isinstance(nested, dict):
                found = nested
            return {**values, KEY: {"quant_method": method, **found}}
    return values


def read_quantization(values: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the quantisation that a config.json describes; None for a plain checkpoint. `where` names the file.

    Raises ModelError that names the method or the option, what is supported, and what to do.
    """
    found = values.get(KEY)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"{where}: {KEY!r} must be an object, found {type(found).__name__}; download the model again")
    settings = _Settings(found, where)
    reader = READERS.get(settings.method)
    if reader is None:
        settings.refuse_method()
    quantization = reader(settings)
    settings.finish()
    return quantization


class _Settings:
    """Access to a `quantization_config` that knows which keys were read."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where, self.seen = values, where, {"quant_method"}
        method = values.get("quant_method")
        if method is None and ("load_in_4bit" in values or "load_in_8bit" in values):
            method = "bitsandbytes"
        self.method = str(method)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; null counts as absent."""
        self.seen.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def ignore(self, *keys: str) -> None:
        """Mark keys that don't change what the tensors mean."""
        self.seen.update(keys)

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Return a value of `allowed`. Raises ModelError for another one."""
        value = self.get(key, default)
        if not any(value == one and type(value) is type(one) for one in allowed):
            self.refuse(key, value, " or ".join(map(repr, allowed)))
        return value

    def size(self, key: str, default: int | None = None) -> int | None:
        """Return a group's size; None for -1, one group per row."""
        value = self.get(key, default)
        if value == -1:
            return None
        if not is_whole_number(value, 1):
            self.refuse(key, value, "a whole number of at least 1, or -1")
        return int(value)

    def block(self, key: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block; None if absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(is_whole_number(one, 1) for one in value):
            self.refuse(key, value, "two whole numbers of at least 1")
        return value[0], value[1]

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the entries of several lists of module names."""
        found: list[str] = []
        for key in keys:
            value = self.get(key, [])
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                self.refuse(key, value, "a list of module names")
            found += value
        for entry in found:
            if entry.startswith("re:"):
                try:
                    re.compile(entry.removeprefix("re:"))
                except re.error as error:
                    raise ModelError(f"{self.where}: {entry!r} in {KEY} is no regular expression ({error})") from error
        return tuple(found)

    def only_if_absent(self, *keys: str, needed: str = "absent") -> None:
        """Raise ModelError if any of the keys has a value other than null, false, or empty."""
        for key in keys:
            if value := self.get(key):
                self.refuse(key, value, needed)

    def refuse(self, key: str, value: Any, needed: str) -> NoReturn:
        raise ModelError(
            f"{self.where}: {KEY} of method {self.method!r} has {key}={value!r}, supported is {needed}; use another "
            "quantised checkpoint of this model, or its plain weights with --quantization"
        )

    def refuse_method(self) -> NoReturn:
        raise ModelError(
            f"{self.where}: checkpoints quantised by {self.method!r} are not supported; supported are "
            f"{', '.join(READERS)}: use one of these, or the model's plain weights with --quantization fp8, int8 or "
            "int4"
        )

    def finish(self) -> None:
        """Log the keys with a value that no reader knows."""
        if unknown := sorted(key for key in self.values.keys() - self.seen if self.values[key] is not None):
            logger.warning("%s: %s has keys that are not used: %s", self.where, KEY, ", ".join(unknown))


def _everywhere(method: str, scheme: WeightScheme, ignored: tuple[str, ...] = ()) -> Quantization:
    return Quantization(method=method, schemes=((("Linear",), scheme),), ignored=ignored)


def _read_fp8(settings: _Settings) -> Quantization:
    settings.one_of("fmt", ("e4m3",), "e4m3")
    dynamic = settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    settings.ignore("scale_fmt", "activation_block_size", "dequantize")
    block = settings.block("weight_block_size")
    layout = "fp8" if block is None else "fp8-block"
    scheme = WeightScheme(layout=layout, element="fp8", block=block or (None, None), dynamic_activations=dynamic)
    return _everywhere("fp8", scheme, settings.names("ignored_layers", "modules_to_not_convert"))


def _read_awq(settings: _Settings) -> Quantization:
    bits = "bits" if "bits" in settings.values else "w_bit"
    group = "group_size" if "group_size" in settings.values else "q_group_size"
    settings.one_of(bits, (4,))
    settings.one_of("zero_point", (True,), True)
    if str(settings.get("version", "gemm")).lower() != "gemm":
        settings.refuse("version", settings.get("version"), "'gemm'")
    settings.ignore("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    scheme = WeightScheme(layout="awq", element="int4", block=(1, settings.size(group, 128)), symmetric=False)
    return _everywhere("awq", scheme, settings.names("modules_to_not_convert"))


GPTQ_FORMATS = ("gptq", "gptq_v2")
GPTQ_WITHOUT_EFFECT = (
    "sym true_sequential damp_percent damp_auto_increment static_groups model_name_or_path model_file_base_name "
    "dataset tokenizer model_seqlen block_name_to_quantize module_name_preceding_first_block batch_size "
    "pad_token_id use_cuda_fp16 use_exllama disable_exllama max_input_length exllama_config cache_block_outputs "
    "modules_in_block_to_quantize meta quantizer backend act_group_aware hyb_act mse mock_quantization "
    "format method v2 v2_alpha"
).split()


def _read_gptq(settings: _Settings) -> Quantization:
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.only_if_absent("lm_head", "is_marlin_format", "rotation", "adapter", needed="false")
    settings.ignore(*GPTQ_WITHOUT_EFFECT)
    base = _gptq_scheme(settings)
    rules, ignored = _gptq_rules(settings)
    schemes = (*rules, (("Linear",), base))
    return Quantization(method="gptq", schemes=schemes, ignored=(*ignored, *settings.names("modules_to_not_convert")))


def _gptq_scheme(settings: _Settings) -> WeightScheme:
    bits = settings.one_of("bits", (4, 8))
    group = settings.size("group_size", 128)
    act_order = settings.one_of("desc_act", (True, False), False) and group is not None
    version = settings.one_of("checkpoint_format", GPTQ_FORMATS, "gptq")
    return WeightScheme(layout=version, element=f"int{bits}", block=(1, group), symmetric=False, act_order=act_order)


def _gptq_rules(settings: _Settings) -> tuple[list[tuple[tuple[str, ...], WeightScheme]], list[str]]:
    """Return the schemes of `dynamic`, and the patterns of modules that are not quantised.

    Its keys are regular expressions of module names, of which the first that matches counts: "+:" or nothing before it
    stands for other settings, "-:" for a module that is not quantised.
    """
    rules: list[tuple[tuple[str, ...], WeightScheme]] = []
    ignored: list[str] = []
    dynamic = settings.get("dynamic", {})
    if not isinstance(dynamic, Mapping):
        settings.refuse("dynamic", dynamic, "an object of settings by module pattern")
    for key, values in dynamic.items():
        pattern = "re:" + key.removeprefix("-:").removeprefix("+:")
        _Settings({"dynamic": [pattern]}, settings.where).names("dynamic")  # checks the expression
        if key.startswith("-:"):
            ignored.append(pattern)
            continue
        if not isinstance(values, Mapping):
            settings.refuse("dynamic", {key: values}, "an object of settings by module pattern")
        known = {"bits", "group_size", "desc_act", *GPTQ_WITHOUT_EFFECT}
        if unknown := sorted(name for name in values.keys() - known if values[name] is not None):
            settings.refuse("dynamic", {key: {name: values[name] for name in unknown}}, "bits, group_size and desc_act")
        own = _Settings({**settings.values, **values}, f"{settings.where}: dynamic {key!r}")
        rules.append(((pattern,), _gptq_scheme(own)))
    return rules, ignored


MODELOPT_BLOCKS = {
    "FP8": (None, None),
    "FP8_PER_CHANNEL_PER_TOKEN": (1, None),
    "FP8_PB_WO": (128, 128),
}
"""The rows and columns that share a scale, by modelopt's `quant_algo`."""


def _read_modelopt(settings: _Settings) -> Quantization:
    nested = settings.get("quantization", {})  # modelopt's own file has its settings one level deeper
    values = {**nested, **settings.values} if isinstance(nested, Mapping) else settings.values
    inner = _Settings(values, settings.where)
    algorithm = str(inner.get("quant_algo")).upper()
    if algorithm not in MODELOPT_BLOCKS:
        inner.refuse("quant_algo", inner.get("quant_algo"), " or ".join(map(repr, MODELOPT_BLOCKS)))
    settings.ignore(
        *"quant_algo producer kv_cache_quant_algo kv_cache_scheme config_groups ignore exclude_modules group_size "
        "quantized_layers".split()
    )
    inner.only_if_absent("quantized_layers", needed="one algorithm for all modules")
    scheme = WeightScheme(
        layout="modelopt",
        element="fp8",
        block=MODELOPT_BLOCKS[algorithm],
        dynamic_activations=algorithm == "FP8_PER_CHANNEL_PER_TOKEN",
    )
    patterns = tuple(
        "re:" + re.escape(name).replace(r"\*", ".*") if "*" in name else name
        for name in inner.names("ignore", "exclude_modules")
    )
    return _everywhere("modelopt", scheme, patterns)


def _read_mxfp4(settings: _Settings) -> Quantization:
    settings.ignore("dequantize")
    scheme = WeightScheme(layout="mxfp4", element="mxfp4", block=(1, 32))
    return _everywhere("mxfp4", scheme, settings.names("modules_to_not_convert"))


COMPRESSED_FORMATS = {
    "pack-quantized": ("ct-packed", {("int", 4): "int4", ("int", 8): "int8"}),
    "int-quantized": ("ct", {("int", 8): "int8"}),
    "float-quantized": ("ct", {("float", 8): "fp8"}),
    "naive-quantized": ("ct", {("int", 8): "int8", ("float", 8): "fp8"}),
    "mxfp4-pack-quantized": ("ct-mxfp4", {("float", 4): "mxfp4"}),
}
"""The layout and the elements, by type and bits, of the formats of compressed-tensors."""


def _read_compressed_tensors(settings: _Settings) -> Quantization:
    # "frozen" in files of earlier versions, which are stored in the same way
    settings.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    settings.ignore("global_compression_ratio", "version", "kv_cache_scheme")
    if settings.get("kv_cache_scheme") is not None:
        logger.info("%s: kv_cache_scheme is not used: the KV cache has the model's dtype", settings.where)
    sparsity = settings.get("sparsity_config", {})
    if sparsity and sparsity.get("format", "dense") != "dense":
        settings.refuse("sparsity_config", sparsity, "no sparsity")
    settings.only_if_absent("transform_config")
    groups = settings.get("config_groups", {})
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(one, Mapping) for one in groups.values()):
        settings.refuse("config_groups", groups, "a non-empty object of groups")
    schemes = tuple(_read_group(settings, name, group) for name, group in groups.items())
    return Quantization(method=settings.method, schemes=schemes, ignored=settings.names("ignore"))


def _read_group(settings: _Settings, name: str, values: Mapping[str, Any]) -> tuple[tuple[str, ...], WeightScheme]:
    """Read a group of `config_groups`. Activations are computed in the model's dtype, whatever they were tuned for."""
    group = _Settings({**values, "quant_method": settings.method}, f"{settings.where}: {name}")
    targets = group.names("targets") or ("Linear",)
    form = group.get("format") or settings.get("format")
    settings.seen.add("format")
    if form not in COMPRESSED_FORMATS:
        group.refuse("format", form, " or ".join(COMPRESSED_FORMATS))
    layout, elements = COMPRESSED_FORMATS[form]
    group.only_if_absent("output_activations")
    weights = _Settings({**(group.get("weights") or {}), "quant_method": settings.method}, f"{group.where}: weights")
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    if kind not in elements:
        weights.refuse("type and num_bits", kind, f"{' or '.join(map(str, elements))} in format {form!r}")
    if elements[kind] == "mxfp4":
        weights.one_of("group_size", (32,), 32)
        return targets, WeightScheme(layout=layout, element="mxfp4", block=(1, 32))
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), "tensor")
    if strategy == "block":
        block: tuple[int | None, int | None] | None = weights.block("block_structure")
        if block is None:
            weights.refuse("block_structure", None, "two whole numbers of at least 1")
    else:
        columns = weights.size("group_size") if strategy == "group" else None
        block = (None if strategy == "tensor" else 1, columns)
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        weights.refuse("actorder", order, "'group' or 'weight'")
    scheme = WeightScheme(
        layout=layout,
        element=elements[kind],
        block=block,
        symmetric=weights.one_of("symmetric", (True, False), True),
        act_order=order in (True, "group", "dynamic") and strategy == "group",
        dynamic_activations=elements[kind] == "fp8" and _has_dynamic_fp8(group.get("input_activations")),
    )
    return targets, scheme


def _has_dynamic_fp8(activations: Any) -> bool:
    """Return whether `input_activations` are quantised to fp8 with scales from their values."""
    if not isinstance(activations, Mapping):
        return False
    return activations.get("dynamic") is True and (activations.get("type"), activations.get("num_bits")) == ("float", 8)


READERS: dict[str, Callable[[_Settings], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
"""Readers of `quantization_config` by `quant_method`."""
