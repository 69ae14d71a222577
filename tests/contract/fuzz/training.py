"""Run a program's training steps eager, through `attach` or through `capture_iteration`, and log everything."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from engine.config import EngineConfig
from engine.training.engine import TrainingEngine
from graph_cache.errors import GraphError
from tests.contract.fuzz import blocks
from tests.contract.fuzz.blocks import LENGTH, WIDTH, Model, tensors_of
from tests.contract.fuzz.changes import Job
from tests.contract.fuzz.compare import Log, bits, state_of
from tests.contract.fuzz.grammar import EXTRAS, Program, Step
from tests.contract.fuzz.iteration import around, loss_of, step_function


@dataclass
class Outcome:
    """What a run logged, how often it replayed, and why calls ran eager."""

    log: Log = field(default_factory=Log)
    replays: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    decisions: list[int | None] = field(default_factory=list)  # of GraphCache: the bucket of each call, or None


def build(program: Program, device: torch.device) -> Model:
    """Return the model of a program, with the same weights each time."""
    torch.manual_seed(1)
    made = []
    for block in program.blocks:
        _, make, values = blocks.KINDS[block.kind]
        module = make(values[block.value % len(values)])
        for name in block.around:
            module = blocks.Around(name, module)
        made.append(module)
    model = Model(made, program.result).to(device)
    for module in model.modules():
        if isinstance(module, blocks.noise) and module.how == "own":
            module.generators["own"] = torch.Generator(device).manual_seed(3)
    return model


def generators_of(program: Program, model: nn.Module) -> list[torch.Generator]:
    """Return the generators of blocks, if the program registers them."""
    found = [
        generator
        for module in model.modules()
        if isinstance(module, blocks.noise)
        for generator in module.generators.values()
    ]
    return found if program.registers else []


def optimizer_for(program: Program, model: nn.Module, device: torch.device) -> torch.optim.Optimizer | None:
    parameters = [
        parameter for parameter in model.parameters() if not isinstance(parameter, nn.parameter.UninitializedParameter)
    ]
    if not parameters or program.optimizer == "none":
        return None
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        "sgd_foreach": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.5, nesterov=True, foreach=True),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, lr=0.01, foreach=False),
        "adam_foreach": lambda: torch.optim.Adam(parameters, lr=0.01, foreach=True),
        "adamw_fused": lambda: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.01),
        "adam_capturable": lambda: torch.optim.Adam(parameters, lr=0.01, capturable=device.type == "cuda"),
    }
    return kinds[program.optimizer]()


def inputs_of(step: Step, number: int, call: int, device: torch.device) -> torch.Tensor:
    """Return the input of a call, [rows, LENGTH, WIDTH]."""
    generator = torch.Generator().manual_seed(1000 + 10 * number + call)
    rows = 0 if step.inputs == "empty" else step.rows
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator).to(device)
    if step.inputs == "expanded":
        return x[:1].expand(step.rows, LENGTH, WIDTH)
    if step.inputs == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if step.inputs == "sliced":
        return torch.cat([x, x], -1)[..., ::2]
    if step.inputs == "double":
        return x.double()
    if step.inputs == "requires_grad":
        return x.requires_grad_()
    if step.inputs == "conjugate":
        return torch.complex(x, x).conj().imag
    return x


def extra_of(step: Step, model: nn.Module, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments besides the input."""
    given = EXTRAS[step.extra]
    if given == ("nested",):
        scale = torch.full((WIDTH,), 1.5, device=device)
        return ({"a": [scale, 2.0], "b": {"c": (scale * 0.5, 1)}},), {}
    if given == ("itself",):
        scale = torch.full((WIDTH,), 1.5, device=device)
        return (scale, scale), {}
    if given == ("parameter",):
        of_width = [parameter for parameter in model.parameters() if not is_lazy(parameter) and parameter.dim() == 1]
        return ((of_width or [torch.ones(WIDTH, device=device)])[0],), {}
    if given == ("tensor",):
        return (torch.full((WIDTH,), 1.5, device=device),), {}
    if given == ("tensors",):
        return ([torch.full((WIDTH,), 1.5, device=device), torch.ones(WIDTH, device=device)],), {}
    if given == ("object",):
        return (blocks.Settings(1.5),), {}
    if given == ("frozen",):
        return (blocks.Frozen(1.5),), {}
    if given == ("host_tensor",):
        return (torch.tensor(1.5),), {}
    if given == ("named",):
        return (), {"scale": 2.0, "mask": torch.ones(WIDTH, device=device)}
    return given, {}


@contextlib.contextmanager
def contexts(names: tuple[str, ...], model: nn.Module, device: torch.device) -> Iterator[None]:
    """Enter the contexts of a step."""
    with contextlib.ExitStack() as stack:
        for name in names:
            if name == "autocast":
                stack.enter_context(torch.autocast(device.type, torch.bfloat16))
            elif name == "default_dtype":
                torch.set_default_dtype(torch.float64)
                stack.callback(torch.set_default_dtype, torch.float32)
            elif name == "no_grad":
                stack.enter_context(torch.no_grad())
            elif name == "inference":
                stack.enter_context(torch.inference_mode())
            elif name == "math_attention":
                stack.enter_context(nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH))
            elif name == "deterministic":
                torch.use_deterministic_algorithms(True, warn_only=True)
                stack.callback(torch.use_deterministic_algorithms, False)
            elif name == "precision":
                torch.set_float32_matmul_precision("high")
                stack.callback(torch.set_float32_matmul_precision, "highest")
            elif name == "saved_on_host":
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            elif name == "global_hook":
                handle = nn.modules.module.register_module_forward_hook(_count_calls)
                stack.callback(handle.remove)
            elif name == "evaluating":
                model.eval()
                stack.callback(model.train)
            elif name == "autocast_uncached":
                stack.enter_context(torch.autocast(device.type, torch.bfloat16, cache_enabled=False))
            elif name == "grad_enabled":
                stack.enter_context(torch.enable_grad())
            elif name == "default_device":
                stack.enter_context(torch.device(device))
            elif name == "function_mode":
                stack.enter_context(_Doubling())
            elif name == "cached_weights":
                stack.enter_context(nn.utils.parametrize.cached())
            elif name == "anomaly":
                stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
        yield


class _Doubling(TorchFunctionMode):
    """Doubles what `torch.tanh` returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def _count_calls(module, args, output):
    module.calls = getattr(module, "calls", 0) + 1


@contextlib.contextmanager
def clean(device: torch.device) -> Iterator[None]:
    """Run a program from a fixed state of the process, and restore the modes that it may leave changed."""
    blocks.reset(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")
            torch.clear_autocast_cache()
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()


def run_training(program: Program, device: torch.device, captured: bool) -> Outcome:
    """Run all steps of a program and return its outcome."""
    outcome = Outcome()
    with clean(device):
        model = build(program, device)
        job = Job(model, optimizer_for(program, model, device), device)
        engine = None
        call = None
        if program.api == "iteration":
            call, job.own_state = step_function(program, model, job.optimizer, device)
        if captured:
            impl = "local" if program.api == "attach" else "full_iteration"
            config = EngineConfig(mode="training", cuda_graph_impl=impl, cuda_graph_warmup_steps=program.warmup)
            engine = TrainingEngine(config)
            job.clear = engine.clear
            generators = generators_of(program, model)
            if program.api == "attach":
                engine.attach(model, _paths(program), generators)
            else:
                call = engine.capture_iteration(call, device=device, generators=generators)
        blocks.reset(device)
        try:
            for number, step in enumerate(program.steps):
                _step(program, job, number, step, call, outcome.log)
        except GraphError as error:
            outcome.reasons[f"raised: {str(error)[:60]}"] += 1
            outcome.log.add("refused", None)
        except Exception as error:
            outcome.log.add("raised", type(error).__name__)  # graphs may say in other words why
        finally:
            job.end()
            if engine is not None:
                _count(engine, outcome)
                engine.detach()
        outcome.log.add_all("end", state_of(job.model))
    return outcome


def _count(engine: TrainingEngine, outcome: Outcome) -> None:
    outcome.replays += sum(engine.stats.replays.values())
    for (_, _, reason), count in engine.stats.fallbacks.items():
        outcome.reasons[reason] += count


def _paths(program: Program) -> list[str]:
    if program.parts == "blocks":
        return [f"blocks.{index}" for index in range(len(program.blocks))]
    return {"whole": [""], "first": ["blocks.0"], "last": [f"blocks.{len(program.blocks) - 1}"]}[program.parts]


def _step(program: Program, job: Job, number: int, step: Step, call: Any, log: Log) -> None:
    """Run one step and log its results and all state after it."""
    for change in step.changes:
        job.apply(change)
    label = f"step {number}"
    with contexts(step.contexts, job.model, job.device):
        if step.clears != "keep" and "clear_inside" not in program.quirks:
            job.model.zero_grad(set_to_none=step.clears == "set_to_none")
            if blocks.TRAINED.grad is not None and step.clears == "set_to_none":
                blocks.TRAINED.grad = None
        data = [
            inputs_of(step, number, 0 if step.inputs == "same" else index, job.device) for index in range(step.calls)
        ]
        args, kwargs = extra_of(step, job.model, job.device)
        if call is None:
            _train(program, job, step, data, args, kwargs, label, log)
        else:
            with around(program, job.model, job.device):
                log.add(f"{label}: result", bits(call(data, step.backward, step.clears, *args, **kwargs)))
        log.add_all(label, {f"gradient of input {index}": bits(x.grad) for index, x in enumerate(data) if x.is_leaf})
        log.add_all(label, {f"input {index}": bits(x) for index, x in enumerate(data)})
    log.add_all(label, state_of(job.model))
    if call is None or "step_inside" not in program.quirks:
        if job.optimizer is not None:
            job.optimizer.step()
    if job.optimizer is not None:
        for index, state in enumerate(job.optimizer.state.values()):
            log.add(f"{label}: optimizer state {index}", bits(dict(state)))
    log.add_all(label, {f"outside {name}": bits(value) for name, value in blocks.outside_state().items()})
    log.add_all(label, {f"step function {name}": bits(value) for name, value in job.own_state().items()})


def _train(
    program: Program,
    job: Job,
    step: Step,
    data: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    log: Log,
) -> None:
    """Run the forwards and backwards of one step around the attached model."""
    model, backward, waiting = job.model, step.backward, []
    for index, x in enumerate(data):
        if backward in ("penalty", "grad_only") and x.is_leaf:
            x.requires_grad_()
        if backward == "abandoned":
            model(x, *args, **kwargs)
        if backward == "checkpointed":
            result = checkpoint(model, x, *args, use_reentrant=False, **kwargs)
        elif backward == "functional":
            weights = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
            result = torch.func.functional_call(model, weights, (x, *args), kwargs)
        elif backward == "compiled":
            result = torch.compile(model, backend="eager")(x, *args, **kwargs)
        else:
            result = model(x, *args, **kwargs)
        log.add(f"{label}: result {index}", bits(result))
        log.add(f"{label}: history of result {index}", [tensor.requires_grad for tensor in tensors_of(result)])
        if backward == "held":
            job.held = [result]
        loss = loss_of(tensors_of(result)[-1:]) if backward == "partial" else loss_of(result)
        del result
        if loss is None or backward == "none":
            continue
        if backward == "penalty" and x.requires_grad:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
            if grad is not None:
                loss = loss + grad.float().pow(2).sum()
        if backward == "grad_only":
            leaves = [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]
            log.add(f"{label}: gradients", bits(torch.autograd.grad(loss, leaves, allow_unused=True)))
        elif backward == "twice":
            loss.backward(retain_graph=True)
            loss.backward()
        elif backward == "retained":
            loss.backward(retain_graph=True)
        elif backward == "grad_then_backward":
            leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
            torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
            loss.backward()
        elif backward in ("after", "reversed"):
            waiting.append(loss)
        else:
            loss.backward()
        del loss
    for loss in reversed(waiting) if backward == "reversed" else waiting:
        loss.backward()
