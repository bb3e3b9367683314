"""Networks written here in plain PyTorch: recurrent, recommendation, audio, mixer, U-Net, graph, and special cases.

Each is small and keeps the idiom it stands for (Python loops, scatter, shared weights, checkpointing) visible.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .entry import Batch, Entry
from .sizes import sized

VOCAB, SEQ, BATCH, WIDTH, IMAGE, CLASSES = sized((99, 16, 2, 32, 32, 5), (4000, 48, 8, 128, 64, 50))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of [..., classes] logits against [...] targets."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def model_then(criterion):
    """A `loss_fn(model, *inputs, target)` that applies `criterion` to the model's output."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
        return criterion(model(*batch[:-1]), batch[-1])

    return loss_fn


def text_batch() -> Batch:
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1))
    return ids[:, :-1], ids[:, 1:]


def image_batch() -> Batch:
    return torch.randn(BATCH, 3, IMAGE, IMAGE), torch.randint(0, CLASSES, (BATCH,))


class CellLSTM(nn.Module):
    """LSTM language model: `nn.LSTMCell` called in a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        inputs = self.embed(ids).unbind(1)
        for cell in self.cells:
            h = c = self.head.weight.new_zeros(ids.shape[0], WIDTH)
            outputs = []
            for x in inputs:
                h, c = cell(x, (h, c))
                outputs.append(h)
            inputs = outputs
        return self.head(torch.stack(inputs, 1))


class FusedLSTM(nn.Module):
    """LSTM language model with two layers of `nn.LSTM`, or `nn.GRU` when `kind` says so."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Recommendation: bags of sparse features and a dense vector, all pairs of dot products, a top MLP."""

    def __init__(self, tables: int = 4, rows: int = 50, dim: int = 16, bags: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum") if bags else nn.Embedding(rows, dim) for _ in range(tables)
        )
        self.bottom = perceptron(13, 32, dim)
        pairs = (tables + 1) * tables // 2
        self.top = perceptron(dim + pairs, 32, 1)
        self.register_buffer("rows_of_pair", torch.tril_indices(tables + 1, tables + 1, -1)[0], persistent=False)
        self.register_buffer("cols_of_pair", torch.tril_indices(tables + 1, tables + 1, -1)[1], persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack([v if v.dim() == 2 else v.sum(1) for v in vectors], 1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = dots[:, self.rows_of_pair, self.cols_of_pair]
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


def click_batch() -> Batch:
    return torch.randn(8, 13), torch.randint(0, 50, (8, 4, 3)), torch.randint(0, 2, (8,)).float()


class GatedBlock(nn.Module):
    """One WaveNet block: dilated causal convolution, tanh times sigmoid, residual and skip outputs."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.residual = nn.Conv1d(width, width, 1)
        self.skip = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        y = torch.tanh(value) * torch.sigmoid(gate)
        return x + self.residual(y), self.skip(y)


class WaveNet(nn.Module):
    """Raw audio as classes, one per sample, from dilated causal convolutions."""

    def __init__(self, width: int = 16, levels: int = 4, classes: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(GatedBlock(width, 2**i) for i in range(levels))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, classes, 1))

    def forward(self, samples: Tensor) -> Tensor:
        x = self.embed(samples).transpose(1, 2)
        total = 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.head(total)


def wave_batch() -> Batch:
    samples = torch.randint(0, 32, (BATCH, 65))
    return samples[:, :-1], samples[:, 1:]


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Image classifier whose blocks mix patches, then channels."""

    def __init__(self, width: int = WIDTH, patch: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock((IMAGE // patch) ** 2, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def double_conv(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(inplace=True),
        nn.Conv2d(o, o, 3, padding=1, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Segmentation: pooling down, transposed convolutions up, skips by concatenation, BatchNorm, in-place ReLU."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = double_conv(3, width), double_conv(width, 2 * width)
        self.middle = double_conv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join1 = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        a = self.down1(images)
        b = self.down2(F.max_pool2d(a, 2))
        x = self.middle(F.max_pool2d(b, 2))
        x = self.join2(torch.cat([b, self.up2(x)], 1))
        x = self.join1(torch.cat([a, self.up1(x)], 1))
        return self.head(x)


def mask_batch() -> Batch:
    return torch.randn(BATCH, 3, IMAGE, IMAGE), torch.randint(0, CLASSES, (BATCH, IMAGE, IMAGE))


class SumGraphNet(nn.Module):
    """Message passing: edge messages summed into nodes by `index_add`."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.encode = nn.Linear(features, WIDTH)
        self.message = nn.ModuleList(perceptron(2 * WIDTH, WIDTH, WIDTH) for _ in range(2))
        self.update = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = torch.relu(self.encode(x))
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(torch.cat([h[source], h[target]], -1))
            h = update(torch.zeros_like(h).index_add(0, target, sent), h)
        return self.head(h)


class AttentionGraphNet(nn.Module):
    """Graph attention: softmax over incoming edges with `scatter_reduce` (maximum) and `scatter_add` (sums)."""

    def __init__(self, features: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(features, WIDTH, bias=False)
        self.score = nn.Parameter(torch.randn(2, heads, WIDTH // heads) * 0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.project(x).view(x.shape[0], self.heads, -1)
        score = F.leaky_relu((h * self.score[0]).sum(-1)[source] + (h * self.score[1]).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(score)
        zeros = score.new_zeros(x.shape[0], self.heads)
        highest = zeros.scatter_reduce(0, index, score.detach(), "amax", include_self=False)
        weight = torch.exp(score - highest[target])
        total = zeros.scatter_add(0, index, weight)
        weight = weight / (total[target] + 1e-9)
        sent = h[source] * weight[..., None]
        gathered = torch.zeros_like(h).scatter_add(0, target[:, None, None].expand_as(sent), sent)
        return self.head(F.elu(gathered.flatten(1)))


class MeanGraphNet(nn.Module):
    """Graph convolution: neighbours averaged by an in-place `index_add_` and `scatter_reduce` (mean)."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = torch.relu(self.first(x))
        index = target[:, None].expand(-1, WIDTH)
        mean = torch.zeros_like(h).scatter_reduce(0, index, h[source], "mean", include_self=False)
        degree = torch.zeros_like(h[:, 0]).index_add_(0, target, torch.ones_like(target, dtype=h.dtype))
        return self.second(h + mean * degree.clamp(min=1).rsqrt()[:, None])


def graph_batch(nodes: int = 12, edges: int = 30) -> Batch:
    return torch.randn(nodes, 8), torch.randint(0, nodes, (2, edges)), torch.randint(0, CLASSES, (nodes,))


class ConvNet(nn.Module):
    """Small classifier: convolutions, BatchNorm with running statistics, pooling."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4),
            nn.BatchNorm2d(16, momentum=momentum),
            nn.SiLU(),
            nn.Conv2d(16, 16, 3, padding=2, dilation=2),
            nn.GroupNorm(4, 16),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


class TiedGPT(nn.Module):
    """Decoder with the output head tied to the embedding; every other block is checkpointed when asked."""

    def __init__(self, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.position = nn.Parameter(torch.randn(SEQ, WIDTH) * 0.02)
        layer = dict(dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device, x.dtype)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, mask, use_reentrant=self.reentrant)
            else:
                x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class InPlaceNet(nn.Module):
    """In-place habits: writes to slices, `add_` on a view, a masked fill, a counter and a running mean as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        h = h - self.mean
        h[:, 0] = h[:, 1] * 2
        h[:, 2:6].add_(1.0)
        h[:, 6:8] *= 0.5
        h.masked_fill_(h < -1.5, -1.5)
        y = h.clone()
        y.view(-1, 4, 8)[:, 1].mul_(h.view(-1, 4, 8)[:, 2])
        return self.second(F.relu_(y))


class Rounding(torch.autograd.Function):
    """Rounds forward and passes the gradient through unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class QuantizedNet(nn.Module):
    """Quantisation-aware training with a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Rounding.apply(torch.relu(self.first(x)) * 8) / 8)


class FrozenBackbone(nn.Module):
    """Fine-tuning: a frozen trunk with a trainable adapter, a parameter the loss never reaches, a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = perceptron(8, WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.head(h + self.scale * self.up(self.down(h)))


def vector_batch() -> Batch:
    return torch.randn(6, 8), torch.randint(0, CLASSES, (6,))


def maker(model_class: type[nn.Module], batch, **options):
    """A builder of that model with its batch."""
    return lambda: (model_class(**options), batch())


click_loss = model_then(F.binary_cross_entropy_with_logits)
classify = model_then(F.cross_entropy)
next_token = model_then(token_loss)

# fmt: off
OWN: list[Entry] = [
    Entry("lstm-cells", "recurrent", maker(CellLSTM, text_batch), next_token, "unrolled in Python"),
    Entry("lstm", "recurrent", maker(FusedLSTM, text_batch), next_token),
    Entry("gru", "recurrent", maker(FusedLSTM, text_batch, kind=nn.GRU), next_token),
    Entry("dlrm", "recommendation", maker(DLRM, click_batch), click_loss, "embedding bags"),
    Entry("dlrm-embeddings", "recommendation", maker(DLRM, click_batch, bags=False), click_loss),
    Entry("wavenet", "audio", maker(WaveNet, wave_batch), classify),
    Entry("mlp-mixer", "vision mixer", maker(MLPMixer, image_batch), classify,
        null_gradients=("blocks.*.tokens.2.bias",)),
    Entry("unet", "vision conv", maker(UNet, mask_batch), classify, "in-place ReLU, transposed convolution"),
    Entry("convnet", "vision conv", maker(ConvNet, image_batch), classify, "BatchNorm, group norm, dilation",
        null_gradients=("features.0.bias", "features.4.bias")),
    Entry("batchnorm-cumulative", "vision conv", maker(ConvNet, image_batch, momentum=None), classify,
        "BatchNorm with momentum=None", null_gradients=("features.0.bias", "features.4.bias")),
    Entry("graph-index-add", "graph", maker(SumGraphNet, graph_batch), classify),
    Entry("graph-attention", "graph", maker(AttentionGraphNet, graph_batch), classify, "scatter_add, scatter_reduce"),
    Entry("graph-mean", "graph", maker(MeanGraphNet, graph_batch), classify, "scatter_reduce mean, index_add_"),
    Entry("tied-gpt", "tied weights", maker(TiedGPT, text_batch), next_token,
        null_gradients=("*.self_attn.in_proj_bias",)),
    Entry("checkpointed-gpt", "checkpointed", maker(TiedGPT, text_batch, checkpointed=True), next_token,
        null_gradients=("*.self_attn.in_proj_bias",)),
    Entry("checkpointed-gpt-reentrant", "checkpointed", maker(TiedGPT, text_batch, checkpointed=True, reentrant=True),
        next_token,
        null_gradients=("*.self_attn.in_proj_bias",)),
    Entry("in-place", "special cases", maker(InPlaceNet, vector_batch), classify),
    Entry("frozen-backbone", "special cases", maker(FrozenBackbone, vector_batch), classify,
        "frozen and unused parameters"),
    Entry("straight-through", "special cases", maker(QuantizedNet, vector_batch), classify,
        note="an autograd.Function whose backward is not the derivative of its forward"),
]
# fmt: on
