"""Models that the tests export: what each computes, its data, and how torch trains it.

Not here: the checks (`test_export.py`) and the kept results (`make.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pserver.export import TorchProgram, export_program

ROWS, BATCH, EPOCHS = 12, 4, 3
PIXELS, WORDS, FIELDS, NUMBERS, CLASSES = 6, 5, 2, 3, 3
IDS = 11

SGD = "optimizer: SGD sgd { momentum: 0.9 } const_lr { learning_rate: 0.1 }"
ADAM = "optimizer: Adam adam { beta_1: 0.9 beta_2: 0.999 epsilon: 1e-8 } const_lr { learning_rate: 0.02 }"
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


@dataclass(frozen=True)
class Case:
    """A model, data of all rows, and the optimizer in both languages."""

    model: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    loss: Callable[..., Tensor]
    targets: dict[str, Tensor]
    optimizer: Optimizer = sgd
    optimizer_text: str = SGD
    output_names: Sequence[str] = field(default=("loss", "output"))

    def built(self) -> nn.Module:
        """The model with its first values, which are always the same."""
        torch.manual_seed(7)
        return self.model()

    def data(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.targets}

    def program(self, model: nn.Module) -> TorchProgram:
        return export_program(
            model,
            tuple(self.inputs.values()),
            loss=self.loss,
            targets=tuple(self.targets.values()),
            data_names=list(self.data()),
            output_names=self.output_names,
        )

    def computed(self, model: nn.Module, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Loss and output of some rows."""
        output = model(*(each[rows] for each in self.inputs.values()))
        return self.loss(output, *(each[rows] for each in self.targets.values())), output

    def trained(self, model: nn.Module) -> float:
        """Trains the model; gives the mean of the last epoch's losses."""
        optimizer = self.optimizer(list(model.parameters()))
        losses: list[float] = []
        for _ in range(EPOCHS):
            losses = []
            for first in range(0, ROWS, BATCH):
                optimizer.zero_grad()
                loss, _output = self.computed(model, slice(first, first + BATCH))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)


class Convolutions(nn.Module):
    """Images to a class, with groups, strides, padding and both kinds of pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding="valid", groups=2)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(image), inplace=True), 2)
        hidden = F.avg_pool2d(torch.tanh(self.second(hidden)), 1)
        return self.last(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 3), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(3, PIXELS), nn.Sigmoid())
        self.register_buffer("shift", torch.tensor([0.5, 0.5, 0.25, 0.25, 0.125, 0.5]))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.decoder(self.encoder(pixels - self.shift))


class Words(nn.Module):
    """The mean of a text's words without padding, to a class."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IDS, 4, padding_idx=0)
        self.scores = nn.Linear(4, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        count = (words != 0).sum(1, keepdim=True).clamp(min=1)
        return self.scores(self.words(words).sum(1) / count)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(IDS, 4, mode="mean")
        self.scores = nn.Sequential(nn.LeakyReLU(), nn.Linear(4, 1))

    def forward(self, words: Tensor) -> Tensor:
        return self.scores(self.bag(words)).squeeze(-1)


class WideDeep(nn.Module):
    """A weight and a row for each field, in one table each, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(FIELDS * IDS, 1)
        self.deep = nn.Embedding(FIELDS * IDS, 3)
        self.layers = nn.Sequential(nn.Linear(FIELDS * 3 + NUMBERS, 4), nn.SiLU(), nn.Linear(4, 1))

    def forward(self, fields: Tensor, numbers: Tensor) -> Tensor:
        deep = self.layers(torch.cat([self.deep(fields).flatten(1), numbers], dim=1))
        return (self.wide(fields).sum(1) + deep).squeeze(1)


class FeedForward(nn.Module):
    """Residual layers over the places of a sequence, and over its width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.mix = nn.Linear(WORDS, WORDS)
        self.groups = nn.GroupNorm(1, WORDS)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = sequence + self.down(F.gelu(self.up(self.norm(sequence))))
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return F.gelu(self.groups(hidden), approximate="tanh").mean(dim=(1, 2))


class MatrixFactorisation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(IDS, 3), nn.Embedding(IDS, 3)
        self.user_bias, self.item_bias = nn.Embedding(IDS, 1), nn.Embedding(IDS, 1)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = (self.users(user) * self.items(item)).sum(-1)
        return self.bias + product + (self.user_bias(user) + self.item_bias(item))[:, 0]


class Attention(nn.Module):
    """A block with causal attention of two heads, whose words and scores share a table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IDS, 4)
        self.places = nn.Parameter(torch.randn(WORDS, 4) * 0.1)
        self.first = nn.Parameter(torch.randn(1, 1, 4) * 0.1)
        self.queries = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4, bias=False)
        self.scores = nn.Linear(4, IDS, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.places
        hidden = torch.cat([self.first.expand(words.shape[0], 1, 4), hidden], dim=1)
        q, k, v = (each.unflatten(2, (2, 2)).transpose(1, 2) for each in self.queries(hidden).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.scores(self.norm(hidden + mixed)[:, -1])


class Encoder(nn.Module):
    """PyTorch's encoder layer with a causal mask, which leaves out the words of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IDS, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(4, IDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WORDS))

    def forward(self, words: Tensor) -> Tensor:
        # The first word of a row is always there.
        is_padding = torch.cat([words[:, :1] < 0, words[:, 1:] == 0], dim=1)
        hidden = self.layer(self.words(words), src_mask=self.mask, src_key_padding_mask=is_padding.float() * -1e30)
        return self.scores(hidden[:, -1])


class Functions(nn.Module):
    """Element-wise functions, reductions, and pieces of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, PIXELS)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, PIXELS))

    def forward(self, pixels: Tensor) -> Tensor:
        y = self.layer(pixels)
        roots = torch.sqrt(torch.abs(y - self.scale) + torch.exp(y * self.scale)) + torch.rsqrt(1 + y * y)
        least = torch.minimum(torch.maximum(roots / self.scale, pixels), torch.log(4 - y.clamp(-1.5, 1.5)))
        chosen = torch.where(y > 0.1, y**3, F.elu(y)) + F.softplus(-y) - F.logsigmoid(y) + 2**y + y.abs().pow(1.5)
        first, second = chosen.split([2, 4], dim=1)
        stacked = torch.stack([second[:, ::2], first.flip(1)[:, [1, 0]]], dim=1)
        picked = torch.index_select(least, 1, torch.tensor([5, 0, 3])) * y.std(1, keepdim=True)
        normal = F.normalize(picked, dim=1) @ self.scale[:3]
        rest = F.softmax(stacked, dim=1)[:, 0].log_softmax(1).sum(1) + y.sum(1) / y.shape[1]
        most = (y.reciprocal().tanh() >= 0.2) & ~(y == 0)
        return stacked.mean((1, 2)) + normal + rest + y.var(1, correction=0) - torch.neg(y[:, 0]) + 3 * most.sum(1)


def many_losses(output: Tensor, click: Tensor, rating: Tensor) -> Tensor:
    """The sum of losses that torch has for one output."""
    p = torch.sigmoid(output)
    return (
        F.binary_cross_entropy(p, click)
        + F.mse_loss(output, rating, reduction="sum") / output.shape[0]
        + F.l1_loss(output, rating)
        + F.smooth_l1_loss(output, rating, beta=0.5)
        + F.huber_loss(output, rating, delta=0.7)
        + F.nll_loss(F.log_softmax(torch.stack([output, -output, rating], dim=1), dim=1), click.long())
        + F.cross_entropy(torch.stack([output, rating], dim=1), click.long(), label_smoothing=0.1)
        + F.cross_entropy(torch.stack([output, 1 - output], 1), torch.stack([click, 1 - click], 1))
    )


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _pixels() -> Tensor:
    return torch.rand(ROWS, PIXELS, generator=_random())


def _ids(*lengths: int) -> Tensor:
    return torch.randint(0, IDS, (ROWS, *lengths), generator=_random())


def _labels(classes: int = CLASSES) -> Tensor:
    return torch.arange(ROWS) * 5 % 7 % classes


def _ratings() -> Tensor:
    return torch.randn(ROWS, generator=_random())


def _clicks() -> Tensor:
    return _labels(2).float()


CASES = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(PIXELS, 4), nn.ReLU(), nn.Linear(4, CLASSES)),
        {"pixels": _pixels()},
        F.cross_entropy,
        {"label": _labels()},
    ),
    "convolutions": Case(
        Convolutions,
        {"image": torch.rand(ROWS, 1, 8, 8, generator=_random())},
        F.cross_entropy,
        {"label": _labels()},
        adam,
        ADAM,
    ),
    "autoencoder": Case(Autoencoder, {"pixels": _pixels()}, F.mse_loss, {"wanted": _pixels()}, adam, ADAM),
    "words": Case(Words, {"words": _ids(WORDS)}, F.cross_entropy, {"label": _labels()}),
    "bag": Case(
        Bag,
        {"words": _ids(WORDS)},
        F.binary_cross_entropy_with_logits,
        {"click": _clicks()},
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        "optimizer: Adagrad adagrad { epsilon: 1e-20 } const_lr { learning_rate: 0.1 }",
    ),
    "wide_deep": Case(
        WideDeep,
        {
            "fields": _ids(FIELDS) + torch.arange(FIELDS) * IDS,
            "numbers": torch.randn(ROWS, NUMBERS, generator=_random()),
        },
        F.binary_cross_entropy_with_logits,
        {"click": _clicks()},
        adam,
        ADAM,
    ),
    "feed_forward": Case(
        FeedForward,
        {"sequence": torch.randn(ROWS, WORDS, 4, generator=_random())},
        F.mse_loss,
        {"rating": _ratings()},
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1),
        "algorithm: \"adamw\" adamw { beta_1: 0.9 beta_2: 0.999 epsilon: 1e-8 } l2: 0.1 regularizer: Decoupled "
        "const_lr { learning_rate: 0.02 }",
    ),
    "matrix_factorisation": Case(
        MatrixFactorisation, {"user": _ids(), "item": _ids().flip(0)}, F.mse_loss, {"rating": _ratings()}
    ),
    # Not with Adam: the gradient of the keys' bias is zero but for rounding, which Adam would scale to the rate.
    "attention": Case(Attention, {"words": _ids(WORDS)}, F.cross_entropy, {"label": _labels(IDS)}),
    "encoder": Case(Encoder, {"words": _ids(WORDS)}, F.cross_entropy, {"label": _labels(IDS)}),
    "functions": Case(
        Functions,
        {"pixels": _pixels()},
        many_losses,
        {"click": _clicks(), "rating": _ratings()},
        lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        "const_lr { learning_rate: 0.001 }",
    ),
}
