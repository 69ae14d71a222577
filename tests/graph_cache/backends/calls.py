"""Callables over `x`, [4, 8] float32, and `i`, [4] int64 below 16, that use about 300 operations in total."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten
ROWS, WIDTH = 4, 8


def fixed(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


WEIGHT, BIAS, SQUARE, TABLE = fixed(WIDTH, WIDTH), fixed(WIDTH), fixed(WIDTH, WIDTH) + 3, fixed(16, WIDTH)
SCALE = torch.ones(WIDTH)
NARROW, DEPTHWISE, PATCH, SPREAD = fixed(2, ROWS, 3), fixed(ROWS, 1, 3), fixed(2, 1, 3, 3), fixed(ROWS, 2, 3)
LINEAR = nn.Linear(WIDTH, WIDTH)  # its parameters require gradients
ATTENTION = nn.MultiheadAttention(WIDTH, 2, batch_first=True).eval()
LSTM = nn.LSTM(WIDTH, WIDTH)


def heads(x):
    return x.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2)


def as_complex(x):
    return torch.view_as_complex(x.view(ROWS, WIDTH // 2, 2))


def written_views(x, i):
    whole = x * 2
    whole[1:3, ::2] = 7.0
    whole.t()[1].add_(x[0, 0])
    whole.select(1, 3).mul_(whole.select(1, 4))
    return whole, whole.diagonal().clone()


def turned_in_place(x, i):
    whole = x * 2
    wide = whole.view(2, -1)
    whole.t_()
    return whole + 1, wide * 3, whole.unsqueeze_(0).sum(0)


def turned_input(x, i):
    view = x.view(ROWS, WIDTH)
    before = view * 2
    view.t_()
    return before, view * 3


def grown_out(x, i):
    target = torch.empty(0)
    torch.add(x, 1, out=target)
    none_of_four = torch.empty(4)[:0]  # allocated memory that is too small
    torch.sub(x, 1, out=none_of_four)
    return target, x * 2, none_of_four, x * 3


def given_out(x, i):
    target = torch.empty(ROWS, WIDTH)
    torch.mul(x, 2, out=target[:, :])
    torch.exp(x, out=target)
    return target


def state_written(x, i):
    mean, var = torch.zeros(WIDTH), torch.ones(WIDTH)
    y = F.batch_norm(x, mean, var, SCALE, SCALE, True)
    return y + 1, mean, var * 2


CALLS = {
    "arithmetic with numbers": lambda x, i: ((x * 2 + 1) / 3 - 0.5, 2**x, 1 / (x.abs() + 1), x % 0.7),
    "integers": lambda x, i: (i // 3, i % 5, i * 3, i + 2.5, (i > 2.5) & (i < 9), i << 1, -i),
    "comparisons": lambda x, i: (x > 0, x.eq(0), (x >= 0.5).logical_not(), torch.isfinite(x / x.relu())),
    "powers": lambda x, i: (x.pow(2), x.abs().pow(0.5), x.pow(i[:, None]), x.rsqrt()),
    "where": lambda x, i: (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1, 0), torch.where(x > 0, x, -x)),
    "clamp": lambda x, i: (
        x.clamp(min=0.1),
        x.clamp(max=0.2),
        x.clamp(-0.5, 0.5),
        x.clamp(max=x.mean()),
        i.clamp(min=2),
    ),
    "sum": lambda x, i: (x.sum(), x.sum(1), x.sum((0, 1), keepdim=True), x.sum(0, dtype=torch.float64), (x > 0).sum()),
    "sum over no dimension": lambda x, i: (x.sum(()), x.sum([]), x.amax((0,))),
    "mean": lambda x, i: (
        x.mean(),
        x.mean(-1, True),
        x.mean(0, dtype=torch.float64),
        i.float().mean(dtype=torch.float64),
    ),
    "variance": lambda x, i: (*torch.var_mean(x, 1), x.std(0), x.std(1, correction=0), x.norm(dim=1), x.norm()),
    "maxima": lambda x, i: (
        x.max(),
        *x.max(1),
        *x.min(0, keepdim=True),
        x.argmax(),
        x.argmax(-1),
        torch.maximum(x, -x),
    ),
    "order": lambda x, i: (
        *x.topk(3, 1),
        *x.sort(1),
        *x.sort(dim=1, descending=True, stable=True),
        x.argsort(0),
        *x.kthvalue(2, 1),
        *x.median(1),
    ),
    "cumulative": lambda x, i: (
        x.cumsum(1),
        x.cumsum(0, dtype=torch.float64),
        x.cumprod(1),
        *x.cummax(1),
        x.logcumsumexp(1),
    ),
    "any and all": lambda x, i: (
        (x > 0).any(),
        (x > 0).any(1),
        (x > 0).all(0, True),
        (x > 0).all(),
        (x > 0).any((0, 1)),
    ),
    "factories": lambda x, i: (
        torch.arange(5),
        torch.arange(1, 5),
        torch.arange(0, 1, 0.3),
        torch.full((2, 3), 1.5),
        torch.full((2,), 3),
        torch.zeros(3, dtype=torch.int32),
        torch.ones_like(x),
        torch.zeros_like(i, dtype=torch.float16),
        torch.full_like(x, 2),
        x.new_zeros(2, 2),
        x.new_full((2,), True, dtype=torch.bool),
        torch.eye(3),
        torch.linspace(0, 1, 5),
        torch.tril(x),
        torch.empty(3).fill_(2),
    ),
    "values from the host": lambda x, i: (
        torch.tensor([1.0, 2.0]).add_(x.sum()),
        torch.tensor(3) + i,
        x + torch.tensor(0.5),
    ),
    "conversion": lambda x, i: (
        x.to(torch.float64),
        x.bfloat16(),
        x.half() * 2,
        i.to(torch.float32),
        x.int(),
        x.bool(),
        x.to(torch.float32, copy=True),
        x.bfloat16().float(),
        i.double(),
    ),
    "memory formats": lambda x, i: (
        x.view(1, 1, ROWS, WIDTH).expand(1, 3, ROWS, WIDTH).contiguous(memory_format=torch.channels_last) * 2,
        x.t().contiguous(),
        torch.empty_like(x.t(), memory_format=torch.preserve_format).zero_(),
    ),
    "concatenation": lambda x, i: (
        torch.cat((x, x[:2]), 0),
        torch.stack((x, -x), 1),
        torch.hstack((x, x)),
        x.repeat(2, 1),
        torch.cat((x, i[:, None].float()), 1),
        x.tile(2),
        x.roll(1, 0),
        x.flip(1),
    ),
    "splitting": lambda x, i: (
        *x.split(3, 1),
        *x.unbind(0),
        *x.chunk(2, 1),
        *torch.unsafe_split(x, 4, 1),
        *aten.split_with_sizes_copy(x, [3, 5], 1),
        *torch.unsafe_chunk(x * 2, 2),
    ),
    "lists of results": lambda x, i: (
        *torch._foreach_add([x, x * 2], 1.0),
        *torch._foreach_mul([x, -x], [x, x]),
        *aten.unbind_copy(x),
    ),
    "indexing": lambda x, i: (
        x[i % ROWS],
        x[:, i % WIDTH],
        TABLE[i],
        x[i % ROWS, i % WIDTH],
        x[1:3, ::2],
        x[None, :, -1],
        x.index_select(1, i % WIDTH),
        x.take(i),
        x.gather(1, (i % WIDTH)[:, None]),
    ),
    "indexed writes": lambda x, i: (
        x.clone().index_put_((i % ROWS,), x[0]),
        x.index_add(0, i % ROWS, x),
        x.index_copy(0, torch.arange(ROWS), x * 2),
        x.index_fill(1, i % WIDTH, 0.0),
        x.index_put((i % ROWS,), x, accumulate=True),
    ),
    "scattering": lambda x, i: (
        x.scatter(1, (i % WIDTH)[:, None], 2.0),
        x.scatter(1, (i % WIDTH)[:, None], -x),
        x.scatter_add(1, (i % WIDTH)[:, None], x),
        x.scatter_reduce(0, i[None] % ROWS, x, "amax"),
        x.masked_fill(x > 0, 1.5),
        x.masked_fill(x > 0, x.mean()),
        x.slice_scatter(x[:2], 0, 1, 3),
    ),
    "products": lambda x, i: (
        x @ WEIGHT,
        torch.addmm(BIAS, x, WEIGHT),
        torch.addmm(BIAS, x, WEIGHT, beta=0.5, alpha=2),
        x.mv(BIAS),
        x[0].dot(BIAS),
        torch.outer(x[0], BIAS),
        x @ x.t(),
        torch.vdot(x[0], x[1]),
    ),
    "batched products": lambda x, i: (
        heads(x) @ heads(x).transpose(-1, -2),
        torch.bmm(x.view(2, 2, 8), x.view(2, 8, 2)),
        torch.baddbmm(x.view(2, 2, 8), x.view(2, 2, 8), SQUARE.expand(2, 8, 8)),
        torch.einsum("bi,ci->bc", x, x),
        torch.matmul(x.view(2, 2, 8), WEIGHT),
        x.view(2, 2, 8) @ BIAS,
    ),
    "linear": lambda x, i: (
        F.linear(x, WEIGHT),
        F.linear(x, WEIGHT, BIAS),
        LINEAR(x),
        F.bilinear(x, x, TABLE[:, :, None].expand(16, 8, 8)),
    ),
    "embedding": lambda x, i: (
        F.embedding(i, TABLE),
        F.embedding(i[:, None], TABLE, padding_idx=0),
        F.embedding_bag(i[:, None], TABLE),
        i[:, None] == torch.arange(16),
    ),
    "norms": lambda x, i: (
        F.layer_norm(x, (WIDTH,)),
        F.layer_norm(x, (WIDTH,), SCALE, BIAS, 1e-3),
        F.rms_norm(x, (WIDTH,)),
        F.group_norm(x, 2),
        F.normalize(x),
        F.instance_norm(x[None]),
        F.local_response_norm(x[None], 2),
    ),
    "batch norm that keeps statistics": state_written,
    "batch norm by its own name": lambda x, i: (
        aten._native_batch_norm_legit(x, SCALE, SCALE, torch.zeros(WIDTH), torch.ones(WIDTH), True, 0.1, 1e-5)[0] + 1
    ),
    "softmax": lambda x, i: (
        x.softmax(-1),
        x.log_softmax(0),
        x.softmax(1, dtype=torch.float64),
        torch.logsumexp(x, 1),
        F.softmin(x, 1),
    ),
    "activations": lambda x, i: (
        F.relu(x),
        F.silu(x),
        F.gelu(x),
        F.gelu(x, approximate="tanh"),
        F.glu(x),
        F.softplus(x),
        F.leaky_relu(x, 0.1),
        F.elu(x),
        F.hardswish(x),
        F.mish(x),
        F.relu6(x),
        F.rrelu(x),
        torch.tanh(x),
    ),
    "elementwise": lambda x, i: (
        x.exp(),
        x.abs().log(),
        x.sin(),
        x.erf(),
        x.sigmoid(),
        x.floor(),
        x.round(decimals=1),
        x.sign(),
        torch.atan2(x, x + 1),
        torch.lerp(x, -x, 0.3),
        torch.addcmul(x, x, x, value=2),
        torch.nan_to_num(x / 0),
    ),
    "attention": lambda x, i: (
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True),
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=torch.ones(ROWS, ROWS).tril() > 0),
        F.scaled_dot_product_attention(heads(x), heads(x), heads(x), scale=0.3, enable_gqa=True),
    ),
    "attention with float mask": lambda x, i: F.scaled_dot_product_attention(
        heads(x),
        heads(x),
        heads(x),
        attn_mask=torch.zeros(ROWS, ROWS).masked_fill(torch.arange(ROWS)[:, None] < i % ROWS, -1e9),
    ),
    "multi-head attention": lambda x, i: ATTENTION(x[None], x[None], x[None]),
    "recurrent": lambda x, i: (LSTM(x[None])[0], *LSTM(x[None])[1]),
    "convolution": lambda x, i: (
        F.conv1d(x[None], NARROW, padding=1),
        F.conv1d(x[None], DEPTHWISE, groups=ROWS),
        F.conv2d(x[None, None], PATCH, stride=2),
        F.conv_transpose1d(x[None], SPREAD),
    ),
    "pooling and resizing": lambda x, i: (
        F.avg_pool1d(x[None], 2),
        *F.max_pool1d(x[None], 2, return_indices=True),
        F.adaptive_avg_pool1d(x[None], 3),
        F.pad(x, (1, 1), value=3.0),
        F.pad(x[None], (1, 1), mode="reflect"),
        F.pixel_shuffle(x.view(1, 4, 2, 4), 2),
        F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
        F.interpolate(x[None, None], size=(6, 9), mode="nearest"),
    ),
    "dropout that is off": lambda x, i: (
        F.dropout(x, 0.5, training=False),
        F.dropout(x, 0.0),
        nn.Dropout(0.3).eval()(x) + 1,
        *aten.native_dropout(x, 0.5, False),
    ),
    "complex": lambda x, i: (
        as_complex(x) * (1 + 2j),
        as_complex(x).abs(),
        torch.polar(x.abs(), x),
        as_complex(x).real * 2,
    ),
    "conjugates": lambda x, i: (
        (as_complex(x) * 2).conj() * as_complex(x),
        (as_complex(x) * 2j).conj().imag + 1,
        as_complex(x).conj().resolve_conj(),
        torch.view_as_real(as_complex(x) + 1).sum(),
    ),
    "rotary": lambda x, i: torch.view_as_real(
        as_complex(x) * torch.polar(torch.ones(ROWS, 4), i[:, None] * torch.arange(4.0))
    ),
    "transforms": lambda x, i: (torch.fft.rfft(x), torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fft(x).abs()),
    "dtype views": lambda x, i: (
        (x * 2).view(torch.int32) + 1,
        (x * 2).view(torch.uint8)[:, ::4].clone(),
        i.view(torch.float64) * 1,
    ),
    "views written through": written_views,
    "turned in place": turned_in_place,
    "an input turned in place": turned_input,
    "out= into an empty tensor": grown_out,
    "out= into a view": given_out,
    "in place on a copy": lambda x, i: (
        x.clone().add_(1).mul_(x).relu_(),
        x.clone().copy_(x[0]),
        x.clone().zero_(),
        x.clone().clamp_(0, 1),
    ),
    "expanded results": lambda x, i: (
        x.sum(1, keepdim=True).expand(ROWS, WIDTH),
        x[:, :1].expand(-1, 3) + 1,
        x.mean().expand(2, 2),
    ),
    "results that are inputs": lambda x, i: (x, x.view(-1), x.t(), i[1:]),
    "empty tensors": lambda x, i: (
        x[:0] * 2,
        torch.zeros(0, 3),
        torch.cat((x[:0], x)),
        x[:0].sum(),
        x[:, :0] @ x[:, :0].t(),
    ),
    "scalars": lambda x, i: (
        x.sum() * 2,
        x[0, 0] + 1,
        i[0] * 2.5,
        x.mean() + i.sum(),
        torch.where(x.sum() > 0, x[0, 0], i[0]),
    ),
    "triangular": lambda x, i: (x.triu(1), torch.diag(x[0]), x.diagonal(), torch.block_diag(x, x), x[:, :ROWS].trace()),
    "windows": lambda x, i: (
        x.unfold(1, 3, 2) * 2,
        x.as_strided((2, 2), (3, 1), 1) + 1,
        x.movedim(0, 1),
        x.unflatten(1, (2, 4)),
    ),
    "searching": lambda x, i: (
        torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
        torch.searchsorted(BIAS.sort()[0], x),
        torch.isin(i, torch.arange(0, 16, 2)),
        torch.histc(x, 4, -2, 2),
        torch.quantile(x, 0.3, dim=1),
    ),
    "distances": lambda x, i: (
        torch.cdist(x, x + 1),
        F.cosine_similarity(x, x + 1),
        F.pairwise_distance(x, x + 1),
        F.mse_loss(x, x * 2),
        F.cross_entropy(x, i % WIDTH),
        F.nll_loss(x.log_softmax(1), i % WIDTH),
    ),
    "autocast": lambda x, i: torch.autocast("cpu", torch.bfloat16)(lambda: (LINEAR(x), x @ WEIGHT))(),
    "a layer of a transformer": lambda x, i: F.rms_norm(
        x + F.linear(F.silu(x @ WEIGHT) * (x @ SQUARE), WEIGHT), (WIDTH,), SCALE
    ),
}
