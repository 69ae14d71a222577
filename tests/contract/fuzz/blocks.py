"""Building blocks of random models: modules that map [rows, LENGTH, WIDTH] to the same shape.

Each kind is registered with the values that the grammar may give it. `layer` kinds are ordinary layers. The others do
what a graph can only repeat if the capture notices it: `effect` changes state, `host` reads tensors on the host,
`value` reads attributes, `random` draws random numbers, `context` changes or reads modes, `outside` uses tensors that
are neither parameters nor arguments.
"""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import decimal
import enum
import fractions
import functools
import io
import itertools
import math
import os
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH = 4, 3
KINDS: dict[str, tuple[str, Callable[[Any], nn.Module], tuple[Any, ...]]] = {}


def kind(group: str, *values: Any) -> Callable[[Any], Any]:
    """Register a module class, or a function that makes a module, under its name; it is called with one of `values`."""

    def register(make: Any) -> Any:
        KINDS[make.__name__] = (group, make, values or (None,))
        return make

    return register


def kinds(group: str) -> list[str]:
    return [name for name, (its_group, _, _) in KINDS.items() if its_group == group]


# ---- state outside of modules, which every run begins with anew ----------------------------------------------------


@dataclasses.dataclass
class Settings:
    """A plain object that modules read and change."""

    scale: Any = 1.0
    items: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: Any):
        self.scale = scale


class Pair(NamedTuple):
    first: float
    second: float


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


COUNT = 0
SCALE = 1.0
TABLE: dict[str, Any] = {}
TENSOR: torch.Tensor | None = None
TRAINED: torch.Tensor | None = None
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
VARIABLE = "FUZZ_SCALE"


class Registry:
    scale = 1.0
    calls = 0


def reset(device: torch.device) -> None:
    """Restore all state outside of modules, so that two runs of a program begin equal."""
    global COUNT, SCALE, TENSOR, TRAINED
    COUNT, SCALE = 0, 1.0
    TABLE.clear()
    TABLE.update(scale=1.0, items=[1.0])
    TENSOR = torch.full((WIDTH,), 0.5, device=device)
    TRAINED = torch.full((WIDTH,), 0.5, device=device, requires_grad=True)
    CONTEXT.set(1.0)
    os.environ[VARIABLE] = "1.0"
    Registry.scale, Registry.calls = 1.0, 0
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)


def outside_state() -> dict[str, Any]:
    """Return all state outside of modules, for a comparison."""
    return {
        "COUNT": COUNT,
        "SCALE": SCALE,
        "TABLE": TABLE,
        "TENSOR": TENSOR,
        "TRAINED": TRAINED,
        "TRAINED.grad": None if TRAINED is None else TRAINED.grad,
        "CONTEXT": CONTEXT.get(),
        "environment": os.environ.get(VARIABLE),
        "Registry": [Registry.scale, Registry.calls],
        "random": str(random.getstate()),
        "numpy": numpy.random.get_state()[1],
        "numpy position": numpy.random.get_state()[2],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


# ---- layers ----------------------------------------------------------------------------------------------------------


@kind("layer")
def linear(_: Any) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@kind("layer")
def layer_norm(_: Any) -> nn.Module:
    return nn.LayerNorm(WIDTH)


@kind("layer")
def rms_norm(_: Any) -> nn.Module:
    return nn.RMSNorm(WIDTH)


class Transposed(nn.Module):
    """Run a module with channels in dimension 1."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


@kind("layer", 0.1, None)
def batch_norm(momentum: Any) -> nn.Module:
    return Transposed(nn.BatchNorm1d(WIDTH, momentum=momentum))


@kind("layer")
def group_norm(_: Any) -> nn.Module:
    return Transposed(nn.GroupNorm(2, WIDTH))


@kind("layer", True, False)
def instance_norm(tracks: Any) -> nn.Module:
    return Transposed(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=tracks))


@kind("layer")
def conv(_: Any) -> nn.Module:
    return Transposed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))


@kind("layer", None, 0.5)
class embedding(nn.Module):
    def __init__(self, max_norm):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=max_norm)

    def forward(self, x):
        return x + self.table((x.detach()[..., 0] * 7).nan_to_num(0, 0, 0).clamp(-99, 99).long().remainder(5))


@kind("layer", 0.5, 0.0, 0, 1, 1.0)
def dropout(p: Any) -> nn.Module:
    return nn.Dropout(p)


@kind("layer", 0.3)
def alpha_dropout(p: Any) -> nn.Module:
    return nn.Sequential(nn.AlphaDropout(p), nn.Dropout1d(p))


@kind("layer", 0.0, 0.2)
class attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), p

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).transpose(1, 2).flatten(2)


@kind("layer")
class multihead(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@kind("layer")
def encoder_layer(_: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, batch_first=True)


@kind("layer", nn.LSTM, nn.GRU, nn.RNN)
class recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


@kind("layer", "parameter", "transpose", "reference")
class tied(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how
        if how == "parameter":
            self.second.weight = self.first.weight
        self.held = [self.second.weight]

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.how == "reference":  # of a parameter in a plain list
            return F.linear(self.second(x), self.held[0])
        return self.second(x) if self.how == "parameter" else F.linear(x, self.first.weight.t())


@kind("layer", "constant", "counted")
class packed(nn.Module):
    """A recurrent layer over sequences of different lengths, which PyTorch reads on the host."""

    def __init__(self, how):
        super().__init__()
        self.how, self.cell = how, nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        if self.how == "constant":
            lengths = torch.full((x.shape[0],), LENGTH - 1)
        else:
            lengths = 1 + (x.detach().float().nan_to_num(0, 0, 0).sum((1, 2)) > 0).long().cpu()
        if not x.shape[0]:
            return x
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.cell(rows)[0], batch_first=True, total_length=LENGTH)[0]


@kind("layer")
def weight_norm(_: Any) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


@kind("layer")
def spectral_norm(_: Any) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@kind("layer")
class gated(nn.Module):
    """As in Hugging Face models: a norm in float32 and a gated MLP."""

    def __init__(self, _):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        wide = x.to(torch.float32)
        normed = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@kind("layer")
class rotary(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.register_buffer("frequency", 1.0 / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)

    def forward(self, x):
        angle = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.frequency)
        cos, sin = angle.cos().repeat(1, 2).to(x.dtype), angle.sin().repeat(1, 2).to(x.dtype)
        return x * cos + torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1) * sin


@kind("layer", F.gelu, torch.tanh, torch.sin, F.relu)
class activation(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@kind("layer")
def prelu(_: Any) -> nn.Module:
    return Transposed(nn.PReLU(WIDTH))


@kind("layer")
def inplace_activation(_: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True))


@kind("layer", "cumsum", "sort", "topk", "roll", "fft", "where", "logsumexp", "expand", "double", "half", "complex")
class shuffled(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "cumsum":
            return x.cumsum(1)
        if self.how == "sort":
            return x.sort(1).values
        if self.how == "topk":
            values, indices = x.topk(2, -1)
            return torch.zeros_like(x).scatter(-1, indices, values)
        if self.how == "roll":
            return x.roll(1, 1).flip(-1)
        if self.how == "fft":
            return torch.fft.irfft(torch.fft.rfft(x.float(), dim=-1), n=WIDTH, dim=-1)
        if self.how == "where":
            return torch.where(x > 0, x, x * 0.1)
        if self.how == "logsumexp":
            return x - x.logsumexp(-1, keepdim=True)
        if self.how == "expand":
            return x[:, :1].expand_as(x) + x
        if self.how == "double":
            return x.double().sin().to(x.dtype)
        if self.how == "half":
            return x.bfloat16().mul(1.5).to(x.dtype)
        return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * 1j).flatten(-2)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (grad * x).flatten(0, -2).sum(0)


@kind("layer")
class custom_function(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return _Doubled.apply(x, self.weight)


@kind("layer")
class experts(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        return sum(weights[..., index : index + 1] * expert(x) for index, expert in enumerate(self.experts))


@kind("layer")
class parameter_containers(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.weights = nn.ParameterList([torch.full((WIDTH,), 1.5), torch.full((WIDTH,), 0.5)])
        self.named = nn.ParameterDict({"bias": torch.zeros(WIDTH)})

    def forward(self, x):
        for weight in self.weights:
            x = x * weight
        return x + self.named["bias"]


# ---- blocks around other blocks -------------------------------------------------------------------------------------


class Around(nn.Module):
    """A block that runs an inner block."""

    def __init__(self, how: str, inner: nn.Module):
        super().__init__()
        self.how, self.inner = how, inner

    def forward(self, x):
        return getattr(self, self.how)(x)

    def residual(self, x):
        return x + self.inner(x)

    def twice(self, x):
        return self.inner(self.inner(x) * 0.5)

    def checkpointed(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)

    def checkpointed_without_state(self, x):
        return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)

    def checkpointed_reentrant(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)

    def without_gradient(self, x):
        with torch.no_grad():
            extra = self.inner(x)
        return x + extra

    def in_autocast(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return x + self.inner(x)

    def out_of_autocast(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return x + self.inner(x.float())

    def math_attention(self, x):
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return x + self.inner(x)

    def only_in_training(self, x):
        return self.inner(x) if self.training else x

    def only_with_gradient(self, x):
        return self.inner(x) if torch.is_grad_enabled() else x

    def saved_on_host(self, x):
        with torch.autograd.graph.save_on_cpu():
            return x + self.inner(x)

    def hooked_output(self, x):
        out = self.inner(x)
        if out.requires_grad:
            out.register_hook(_halved)
        return out

    def hooked_input(self, x):
        if x.requires_grad:
            x.register_hook(_halved)
        return self.inner(x)

    def retained_input(self, x):
        if x.requires_grad:
            x.retain_grad()
        return self.inner(x)

    def own_gradient(self, x):
        """Take a gradient within the forward."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.inner(leaf).sum(), leaf)
        return x + grad

    def detached(self, x):
        return x + self.inner(x.detach())


def _halved(grad):
    return grad * 0.5


AROUND = [
    name for name, member in vars(Around).items() if isinstance(member, types.FunctionType) and not name.startswith("_")
]
AROUND.remove("forward")


# ---- effects: state that a forward changes --------------------------------------------------------------------------


@kind("effect", "unread", "read")
class counter(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.count, self.reads = 0, how == "read"

    def forward(self, x):
        self.count += 1
        return x * self.count if self.reads else x


@kind("effect", "add", "rebind", "data", "copy", "set", "fill", "unread", "read_later", "swap")
class moving_average(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("other", torch.ones(WIDTH))
        self.how = how

    def forward(self, x):
        mean = x.detach().float().mean((0, 1))
        if self.how == "add":
            self.average.mul_(0.9).add_(mean, alpha=0.1)
        elif self.how == "rebind":
            self.average = 0.9 * self.average + 0.1 * mean
        elif self.how == "data":
            self.average.data = 0.9 * self.average + 0.1 * mean
        elif self.how == "copy":
            self.average.copy_(mean)
        elif self.how == "set":
            self.average.set_(mean.clone())
        elif self.how == "fill":
            self.average[0] = 2.0
        elif self.how == "unread":
            self.average.add_(mean)
            return x
        elif self.how == "read_later":
            out = x + self.average
            self.average.add_(mean)
            return out
        else:
            self.average, self.other = self.other, self.average
        return x + self.average


@kind("effect", "add", "rebind", "unread", "list", "dict", "nested", "history", "list_append")
class tensor_attribute(nn.Module):
    """State in plain tensor attributes, which are no buffers."""

    def __init__(self, how):
        super().__init__()
        self.how, self.memory, self.held = how, None, []
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        mean = x.detach().float().mean((0, 1))
        if self.how == "unread":
            self.memory = mean
            return x
        if self.how == "history":
            self.memory = self.weight * 2
            return x * self.memory
        if self.how == "list_append":
            self.held.append(mean)
            return x
        if self.memory is None:
            self.memory = torch.zeros_like(mean)
            self.held = [self.memory] if self.how == "list" else {"a": self.memory}
            if self.how == "nested":
                self.held = {"a": [self.memory]}
        if self.how == "add":
            self.memory.add_(mean)
            return x + self.memory
        if self.how == "rebind":
            self.memory = self.memory * 0.9 + mean
            return x + self.memory
        if self.how == "nested":
            self.held["a"][0] = self.held["a"][0] + mean
            return x + self.held["a"][0]
        index = 0 if self.how == "list" else "a"
        self.held[index] = self.held[index] + mean
        return x + self.held[index]


@kind("effect", "list", "dict", "set", "deque", "default", "counter", "bytearray", "array", "numpy", "object", "slots")
class container(nn.Module):
    """State in a container of the module, which the output reads."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.state = {
            "list": [1.0],
            "dict": {"a": 1.0},
            "set": {1},
            "deque": collections.deque([1.0], maxlen=3),
            "default": collections.defaultdict(float),
            "counter": collections.Counter(),
            "bytearray": bytearray(b"a"),
            "array": array.array("d", [1.0]),
            "numpy": numpy.ones(2),
            "object": Settings(),
            "slots": Slotted(1.0),
        }[how]

    def forward(self, x):
        state = self.state
        if self.how == "set":
            state.add(len(state) + 1)
            return x * len(state)
        if self.how in ("list", "deque", "bytearray"):
            state.append(1)
            return x * (len(state) + sum(state))
        if self.how == "object":
            state.scale += 1
            return x * state.scale
        if self.how == "slots":
            state.scale += 1
            return x * state.scale
        if self.how in ("array", "numpy"):
            state[0] += 1
            return x * float(state[0])
        state["a"] += 1
        return x * state["a"]


@kind("effect", "global", "class", "table", "closure", "iterator", "generator", "count", "context", "environment")
class elsewhere(nn.Module):
    """State outside of the module, which the output reads."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "closure":
            count = 0

            def closure():
                nonlocal count
                count += 1
                return count

            self.next = closure
        elif how == "iterator":
            self.numbers = iter([float(number) for number in range(1, 1000)])
        elif how == "generator":
            self.numbers = (number / 2 for number in range(1, 1000))
        elif how == "count":
            self.numbers = itertools.count(1)

    def forward(self, x):
        global COUNT
        if self.how == "global":
            COUNT += 1
            return x * COUNT
        if self.how == "class":
            Registry.calls += 1
            return x * Registry.calls
        if self.how == "table":
            TABLE["calls"] = TABLE.get("calls", 0) + 1
            return x * TABLE["calls"]
        if self.how == "closure":
            return x * self.next()
        if self.how == "context":
            CONTEXT.set(CONTEXT.get() + 1)
            return x * CONTEXT.get()
        if self.how == "environment":
            os.environ[VARIABLE] = str(float(os.environ[VARIABLE]) + 1)
            return x * float(os.environ[VARIABLE])
        return x * next(self.numbers)

    def __deepcopy__(self, memo):
        return type(self)(self.how)


@kind("effect", "multiply", "data", "replace", "requires_grad", "grad", "register")
class parameter_write(nn.Module):
    """Changes its parameters in the forward."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        if self.how == "multiply":
            with torch.no_grad():
                self.scale.mul_(0.9)
        elif self.how == "data":
            self.scale.data = self.scale.data * 0.9
        elif self.how == "replace":
            self.scale = nn.Parameter(self.scale * 0.9, requires_grad=False)
        elif self.how == "requires_grad":
            self.scale.requires_grad_(not self.scale.requires_grad)
        elif self.how == "grad":
            self.scale.grad = x.detach().float().mean((0, 1))
        elif not hasattr(self, "extra"):
            self.register_buffer("extra", torch.full((WIDTH,), 2.0, device=x.device))
        return x * self.weight * self.scale


@kind("effect", "tensor", "input", "unwatched")
class writes_its_input(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "tensor":
            x = x * 1.0
            x.mul_(2)
        elif self.how == "input":
            with torch.no_grad():
                x.detach().mul_(2)
        else:
            x.data.mul_(2)
        return x


@kind("effect", "first", "every", "lazy_parameter")
class lazy(nn.Module):
    """Makes state when it first runs, or for each new shape."""

    def __init__(self, how):
        super().__init__()
        self.how, self.cache, self.shapes = how, None, {}
        if how == "lazy_parameter":
            self.inner = nn.LazyLinear(WIDTH)

    def forward(self, x):
        if self.how == "lazy_parameter":
            return self.inner(x)
        if self.how == "first":
            if self.cache is None:
                self.cache = torch.arange(WIDTH, device=x.device) * 0.1
            return x + self.cache
        if x.shape[0] not in self.shapes:
            self.shapes[x.shape[0]] = torch.full((WIDTH,), float(len(self.shapes)), device=x.device)
        return x + self.shapes[x.shape[0]]


@kind("effect", "list", "sum", "halved", "parameter")
class hooks_its_output(nn.Module):
    """Puts a hook on the gradient of its output, in each forward."""

    def __init__(self, how):
        super().__init__()
        self.how, self.grads, self.calls = how, [], 0
        self.register_buffer("total", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(WIDTH))
        if how == "parameter":
            self.weight.register_hook(lambda grad: grad * 0.5)

    def forward(self, x):
        out = x * self.weight
        if out.requires_grad and self.how != "parameter":
            out.register_hook(self.seen)
        return out

    def seen(self, grad):
        if self.how == "list":
            self.grads.append(float(len(self.grads)))
        elif self.how == "sum":
            self.total.add_(grad.detach().float().sum())
        return grad * 0.5 if self.how == "halved" else None

    def __deepcopy__(self, memo):
        return type(self)(self.how)


# ---- host reads ------------------------------------------------------------------------------------------------------


def _read_item(t):
    return t.item()


def _read_float(t):
    return float(t)


def _read_tolist(t):
    return t.tolist()


def _read_numpy(t):
    return float(t.numpy(force=True))


def _read_bool(t):
    return 2.0 if t > 0 else 1.0


def _read_tensor(t):
    return torch.tensor([t, t], device=t.device).sum()


def _read_new_tensor(t):
    return t.new_tensor([t, 1.0]).sum()


def _read_dlpack(t):
    return float(numpy.from_dlpack(t.cpu()))


def _read_format(t):
    return float(f"{t:.2f}")


def _read_equal(t):
    return 2.0 if torch.equal(t, t.abs()) else 1.0


def _read_allclose(t):
    return 2.0 if torch.allclose(t, t.abs()) else 1.0


def _read_nonzero(t):
    return float(len((t.expand(2) > 0).nonzero()))


def _read_mask(t):
    return t.expand(2)[t.expand(2) > 0].sum()


def _read_unique(t):
    return float(len(torch.stack([t, t.abs()]).unique()))


def _read_pickle(t):
    buffer = io.BytesIO()
    torch.save(t, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def _read_repr(t):
    return float(len(repr(t)))


def _read_int_index(t):
    return [1.0, 2.0][int(t > 0)]


def _read_slice(t):
    return float(torch.ones(4)[: 1 + (t > 0).long()].sum())


def _read_copy(t):
    return copy.deepcopy(t)


def _read_cpu(t):
    return t.cpu().to(t.device)


def _read_range(t):
    return torch.arange(1 + (t > 0).long(), device=t.device).sum()


def _read_where(t):
    return float(torch.where(t.expand(2) > 0)[0].numel())


def _read_storage(t):
    return t.contiguous().view(-1).untyped_storage().tolist()[0] / 256


def _read_full(t):
    return torch.full((), t, device=t.device)


def _read_add_alpha(t):
    return torch.add(t, t, alpha=float(t))


def _read_scalar_tensor(t):
    return torch.scalar_tensor(t, device=t.device)


def _read_as_tensor(t):
    return torch.as_tensor([t], device=t.device).sum()


def _read_map(t):
    return t.clone().cpu().map_(t.cpu(), lambda a, b: a * 2).to(t.device)


def _read_apply(t):
    return t.detach().clone().cpu().apply_(lambda a: a * 2).to(t.device)


def _read_math(t):
    return math.floor(t)


def _read_repeat(t):
    return t.expand(2).repeat_interleave((t.expand(2) > 0).long() + 1).sum()


def _read_split(t):
    return float(torch.ones(4).tensor_split((t > 0).long().cpu().reshape(1))[0].numel())


def _read_masked_select(t):
    return t.expand(2).masked_select(t.expand(2) > 0).sum()


def _read_bincount(t):
    return float(torch.bincount((t > 0).long().reshape(1)).numel())


READS = {name.removeprefix("_read_"): function for name, function in list(vars().items()) if name.startswith("_read_")}


@kind("host", *READS)
class host_read(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        value = READS[self.how](x.detach().float().nan_to_num(0, 0, 0).sum())
        return x * torch.tensor(1.5).to(x) + (value[0] if isinstance(value, list) else value)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


@kind("layer", "symmetric", "weight_norm", "spectral_norm")
def parametrized(how):
    """Return a layer with a weight that is computed at each use."""
    linear = nn.Linear(WIDTH, WIDTH)
    if how == "symmetric":
        nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
        return linear
    return getattr(nn.utils.parametrizations, how)(linear)


@kind("layer", "wrapped", "in_place")
def compiled(how):
    """Return a compiled layer."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    if how == "wrapped":
        return torch.compile(layers, backend="eager")
    layers.compile(backend="eager")
    return layers


# ---- attributes ------------------------------------------------------------------------------------------------------

VALUES: tuple[Callable[[], Any], ...] = (
    lambda: 0.0,
    lambda: -0.0,
    lambda: 1.5,
    lambda: 0,
    lambda: 1,
    lambda: 3,
    lambda: True,
    lambda: False,
    lambda: None,
    lambda: "relu",
    lambda: "gelu2",
    lambda: b"ab",
    lambda: 1 + 2j,
    lambda: (1.0, -0.0),
    lambda: (1, 2),
    lambda: [1.0, 2.0],
    lambda: [0.0],
    lambda: {"a": 1.0},
    lambda: {"a": [0.5, 2]},
    lambda: {1, 2},
    lambda: frozenset((3,)),
    lambda: Settings(2.0),
    lambda: Settings(-0.0, [0.5]),
    lambda: Slotted(2.0),
    lambda: Frozen(2.0),
    lambda: Frozen(-0.0),
    lambda: Pair(1.0, 2.0),
    lambda: Level.LOW,
    lambda: Level.HIGH,
    lambda: torch.float16,
    lambda: torch.float64,
    lambda: torch.Size((2, 3)),
    lambda: torch.device("cpu"),
    lambda: fractions.Fraction(1, 3),
    lambda: decimal.Decimal("1.25"),
    lambda: numpy.float32(1.5),
    lambda: numpy.float64(-0.0),
    lambda: numpy.int64(2),
    lambda: numpy.ones(2),
    lambda: range(3),
    lambda: slice(1, 3),
    lambda: collections.OrderedDict(a=1.0),
    lambda: collections.deque([1.0, 3.0]),
    lambda: types.SimpleNamespace(scale=2.0),
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: scale_of_one,
    lambda: scale_of_two,
    lambda: Registry,
    lambda: array.array("d", [2.0]),
    lambda: torch.tensor(1.5),
    lambda: torch.tensor([1.5, 2.5]).sum(),
    lambda: types.MappingProxyType({"a": 2.0}),
)


def scale_of_one():
    return 1.25


def scale_of_two():
    return 2.25


def number(value: Any) -> Any:
    """Return a number, or a tensor, that differs between values that a graph must tell apart."""
    if value is None:
        return 0.25
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (bool, int, float, numpy.number)):
        value = float(value)
        return value + (0.125 if math.copysign(1, value) < 0 else 0) if math.isfinite(value) else 7.0
    if isinstance(value, complex):
        return value.real + 10 * value.imag
    if isinstance(value, (str, bytes)):
        return float(len(value))
    if isinstance(value, enum.Enum):
        return float(value.value)
    if isinstance(value, torch.dtype):
        return float(torch.finfo(value).bits) / 64
    if isinstance(value, dict | types.MappingProxyType):
        return sum(number(item) for item in value.values())
    if isinstance(value, slice):
        return float(value.start)
    if isinstance(value, (Settings, Slotted, Frozen, types.SimpleNamespace)):
        return number(value.scale) + (number(value.items) if isinstance(value, Settings) else 0)
    if value is Registry:
        return value.scale
    if isinstance(value, types.FunctionType):
        return value()
    if isinstance(value, (fractions.Fraction, decimal.Decimal)):
        return float(value)
    if isinstance(value, torch.device):
        return 0.75
    return sum((number(item) for item in value), 0.0)


@kind("value", *range(len(VALUES)))
class reads_value(nn.Module):
    """Multiplies by an attribute, which may be of any type."""

    def __init__(self, index):
        super().__init__()
        self.value = VALUES[index]()

    def forward(self, x):
        value = number(self.value)
        return x * (value.to(x) if isinstance(value, torch.Tensor) else value)


HOST_DATA: dict[str, Callable[[int], Any]] = {
    "list": lambda size: [1.5] * size,
    "dict": lambda size: dict.fromkeys(range(size), 1.5),
    "deque": lambda size: collections.deque([1.5] * size),
    "array": lambda size: array.array("d", [1.5] * size),
    "ndarray": lambda size: numpy.full(size, 1.5),
    "view": lambda size: numpy.full(2 * size, 1.5)[::2],
    "objects": lambda size: numpy.array([1.5] * size, dtype=object),
    "bytearray": lambda size: bytearray([2] * size),
    "ctypes": lambda size: (ctypes.c_double * size)(*[1.5] * size),
    "nested": lambda size: {0: [1.5] * size},
    "boxed": lambda size: [Settings(1.0, [1.5] * size)],
}


@kind("value", *[(name, size) for name in HOST_DATA for size in (3, 600, 5000, 20_000)])
class reads_host_data(nn.Module):
    """Multiplies by an item, or the sum, of host data of any kind and size."""

    def __init__(self, how):
        super().__init__()
        self.how, self.size = how
        self.data = HOST_DATA[self.how](self.size)

    def innermost(self):
        if self.how == "boxed":
            return self.data[0].items
        return self.data[0] if self.how == "nested" else self.data

    def change_data(self, value):
        """Change an item in place, or replace all data."""
        if value % 3 == 2:
            self.data = HOST_DATA[self.how](self.size + 1)
        self.innermost()[self.size - 1 if value % 2 else 0] = 3

    def forward(self, x):
        data = self.innermost()
        items = data.values() if isinstance(data, dict) else data
        return x * (float(data[self.size - 1]) if self.size % 2 else float(sum(items)) / self.size)


@kind("value", "global", "table", "class", "closure", "context", "environment", "default", "partial", "sequence")
class reads_elsewhere(nn.Module):
    """Multiplies by a number that is kept outside of the module."""

    def __init__(self, how):
        super().__init__()
        self.how, self.held = how, Settings()
        held = self.held
        self.closure = lambda: held.scale
        self.default = lambda given=held: given.scale

    def forward(self, x):
        if self.how == "global":
            return x * SCALE
        if self.how == "table":
            return x * TABLE["scale"]
        if self.how == "class":
            return x * Registry.scale
        if self.how == "context":
            return x * CONTEXT.get()
        if self.how == "environment":
            return x * float(os.environ[VARIABLE])
        if self.how == "default":
            return x * self.default()
        if self.how == "sequence":
            return x * TABLE["items"][0]
        return x * self.closure()


@functools.cache
def cached_scale(name):
    return 1.75 + len(name)


class Base(nn.Module):
    level = 1.5

    def scale(self):
        return self.level


@kind("value", "property", "getattr", "cached", "partial", "classmethod", "base", "nested")
class reads_indirectly(Base):
    """Multiplies by a number behind a property, a name in a string, a cached function, or a base class."""

    def __init__(self, how):
        super().__init__()
        self.how, self.amount, self.name = how, 2.0, "amount"
        self.bound = functools.partial(number, [3.0, 0.5])
        self.settings = types.SimpleNamespace(inner={"deep": [Settings(1.25)]})

    @property
    def doubled(self):
        return self.amount * 2

    @classmethod
    def of_class(cls):
        return cls.level

    def forward(self, x):
        if self.how == "property":
            return x * self.doubled
        if self.how == "getattr":
            return x * getattr(self, self.name)
        if self.how == "cached":
            return x * cached_scale(self.name)
        if self.how == "partial":
            return x * self.bound()
        if self.how == "classmethod":
            return x * self.of_class()
        if self.how == "nested":
            return x * self.settings.inner["deep"][0].scale
        return x * self.scale()


# ---- random numbers --------------------------------------------------------------------------------------------------


@kind("random", "rand_like", "bernoulli", "randperm", "randint", "normal", "own", "seeded", "forked", "python", "numpy")
class noise(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.generators: dict[str, torch.Generator] = {}

    def forward(self, x):
        if self.how == "rand_like":
            return x + torch.rand_like(x)
        if self.how == "bernoulli":
            return x * torch.empty_like(x).bernoulli_(0.5)
        if self.how == "randperm":
            return x[:, :, torch.randperm(WIDTH, device=x.device)]
        if self.how == "randint":
            return x + torch.randint(5, x.shape, device=x.device)
        if self.how == "normal":
            return x + torch.zeros_like(x).normal_()
        if self.how == "own":
            if not self.generators:
                self.generators["own"] = torch.Generator(x.device).manual_seed(3)
            return x + torch.rand(x.shape, device=x.device, generator=self.generators["own"])
        if self.how == "seeded":
            torch.manual_seed(11)
            return x + torch.rand_like(x)
        if self.how == "forked":
            with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
                torch.manual_seed(11)
                return x + torch.rand_like(x)
        if self.how == "python":
            return x * random.random()
        return x * float(numpy.random.rand())

    def __deepcopy__(self, memo):
        return type(self)(self.how)


# ---- modes -----------------------------------------------------------------------------------------------------------


@kind("context", "default_dtype", "autocast", "training", "deterministic", "grad", "precision", "threads", "sdpa")
class reads_mode(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "default_dtype":
            return x + torch.ones(WIDTH, device=x.device) / 3
        if self.how == "autocast":
            return x * (2 if torch.is_autocast_enabled(x.device.type) else 1)
        if self.how == "training":
            return x * (2 if self.training else 1)
        if self.how == "deterministic":
            return x * (2 if torch.are_deterministic_algorithms_enabled() else 1)
        if self.how == "grad":
            return x * (2 if torch.is_grad_enabled() else 1)
        if self.how == "precision":
            return x * len(torch.get_float32_matmul_precision())
        if self.how == "threads":
            return x * (2 if torch.is_inference_mode_enabled() else 1)
        return x * (2 if torch.backends.cuda.flash_sdp_enabled() else 1)


@kind("context", "default_dtype", "grad", "deterministic", "autocast_cache")
class sets_mode(nn.Module):
    """Changes a mode of the process and leaves it changed."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "default_dtype":
            torch.set_default_dtype(torch.float64)
        elif self.how == "grad":
            torch.set_grad_enabled(True)
        elif self.how == "deterministic":
            torch.use_deterministic_algorithms(True, warn_only=True)
        else:
            torch.clear_autocast_cache()
        return x


# ---- tensors from outside --------------------------------------------------------------------------------------------


@kind("outside", "global", "trained", "list", "plain", "trained_list", "computed", "scalar", "counter")
class outside_tensor(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.held: Any = None
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        if self.how == "global":
            return x + TENSOR
        if self.how == "trained":
            return x * TRAINED
        if self.how == "computed":
            self.held = self.held if self.held is not None else TRAINED * 2
            return x + self.held.detach()
        if self.held is None:
            tensor = torch.full((WIDTH,), 0.75, device=x.device)
            if self.how == "trained_list":
                tensor.requires_grad_()
            if self.how in ("scalar", "counter"):
                tensor = torch.tensor(0.75)
            self.held = tensor if self.how in ("plain", "scalar", "counter") else [tensor]
        if self.how == "counter":
            self.held.add_(1)
            return x
        return x * (self.held if isinstance(self.held, torch.Tensor) else self.held[0])


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    aux: torch.Tensor


class NamedOutput(NamedTuple):
    hidden: torch.Tensor
    aux: torch.Tensor


@dataclasses.dataclass
class RegisteredOutput:
    hidden: torch.Tensor
    aux: torch.Tensor


pytree.register_dataclass(RegisteredOutput)

RESULTS = (
    "tensor",
    "tuple",
    "dict",
    "dataclass",
    "named",
    "views",
    "same_twice",
    "number",
    "none",
    "integer",
    "input",
    "registered",
    "nested",
)


class Model(nn.Module):
    """Blocks in a row. `result` says in which container their output is returned."""

    def __init__(self, blocks: list[nn.Module], result: str = "tensor"):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.result = result

    def forward(self, x, *extra, **named):
        given = x
        for leaf in [*extra, *named.values()]:
            value = number(leaf)
            x = x * (value.to(x) if isinstance(value, torch.Tensor) else value)
        for block in self.blocks:
            x = block(x)
        aux = x.float().pow(2).mean()
        if self.result == "tensor":
            return x
        if self.result == "tuple":
            return x, aux
        if self.result == "dict":
            return {"hidden": x, "aux": aux}
        if self.result == "dataclass":
            return Output(x, aux)
        if self.result == "registered":
            return RegisteredOutput(x, aux)
        if self.result == "nested":
            return [x, (aux, {"sum": x.sum()})]
        if self.result == "named":
            return NamedOutput(x, aux)
        if self.result == "views":
            return x[:, 0], x[:, 1:]
        if self.result == "same_twice":
            return x, x
        if self.result == "number":
            return x, 3.5
        if self.result == "integer":
            return x, x.detach().argmax(-1)
        if self.result == "input":
            return x, given
        return x, None


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result of a Model."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (Output, RegisteredOutput)):
        return [result.hidden, result.aux]
    values = result.values() if isinstance(result, dict) else result
    return [
        tensor for value in values if isinstance(value, (torch.Tensor, tuple, dict)) for tensor in tensors_of(value)
    ]
