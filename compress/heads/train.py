"""Draft heads for a base: trained on its hidden states and its own answers, unrolled over their own guesses.

Legend: W windows, B of them in a batch, T tokens, F fused numbers of a token, V vocabulary, N tokens of an own head.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress import text
from compress.base.network import compute_device, layers_of, load, read_config, stored_dtype
from compress.errors import CompressError
from compress.heads.network import HeadsNetwork, HeadsShape
from compress.output.checkpoint import Workspace, as_stored
from compress.progress import Progress
from compress.training.run import Plan, to_trainer, train
from kernels.drafts.draft_heads import ARCHITECTURE, base_digest

_PROMPT_SHARE = 4
"""The first of this number of equal parts of a window is text; the base answers the rest."""
_TOGETHER = 32
"""Windows that are answered together."""
_LATER_WEIGHT = 0.8
"""Weight of each depth's loss, relative to the depth before: a guess counts only if those before it were right."""
_BARE_SHARE = 8
"""One window in this number lacks the hidden states of its beginning, as a prefix that another worker computed does."""
_ANSWERS = "answers"


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """What is trained."""

    depth: int = 4
    """Guesses over which the heads are unrolled."""
    neurons: int | None = None
    """Neurons of the MLP; None: as many as the base's layers have."""
    vocabulary: int | None = None
    """Tokens of an own head, the most frequent ones of the base's answers; None: the base's head is used."""


def heads(base: Path, out: Path, windows_WT: Tensor, aim: HeadsPlan, plan: Plan, progress: Progress) -> float:
    """Train heads for a base and write them -> the last loss, nats a token. Raises CompressError."""
    model, config = _loaded(base)
    vocab = int(model.config.vocab_size)
    if aim.vocabulary is not None and aim.vocabulary > vocab:
        raise CompressError(f"--vocabulary {aim.vocabulary}: the base has {vocab} tokens")
    settings = {"method": "heads", "text": text.described(windows_WT), **asdict(aim), **asdict(plan)}
    workspace = Workspace(base, out, settings, 1)
    answered = _answered(model, windows_WT, workspace, progress)
    own = None if aim.vocabulary is None else answered.flatten().bincount(minlength=vocab).topk(aim.vocabulary).indices
    tokens = None if own is None else own.sort().values
    layers = fused_layers(len(layers_of(model)))
    shape = _shape(model, aim.neurons, len(layers))
    network = _begin(model, shape, tokens)
    loss = train(network, answered, training_loss(network, model, layers, tokens, aim.depth), plan, workspace, progress)
    workspace.write(0, as_stored(network.tensors(), stored_dtype(config)))
    workspace.finish(_described(base, model, shape, layers, tokens, aim.depth, config), with_tokenizer=False)
    return loss


def _loaded(base: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The base, which is not trained, and its config.json: on a GPU in the dtype of its files, else in float32."""
    config = read_config(base)
    dtype = stored_dtype(config) if compute_device().type == "cuda" else torch.float32
    model = load(base, dtype=dtype)
    to_trainer(model)
    return model, config


def fused_layers(count: int) -> list[int]:
    """The layers before which the residual stream is read: a low, a middle and the last one of `count`."""
    return sorted({min(1, count - 1), count // 2, count - 1})


def base_states(model: PreTrainedModel, ids_BT: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """-> the base's residual streams before these layers [B, T, F], and its logits [B, T, V]."""
    found = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    return torch.cat([found.hidden_states[layer] for layer in layers], -1), found.logits


def training_loss(
    network: HeadsNetwork, model: PreTrainedModel, layers: list[int], tokens_N: Tensor | None, depth: int
) -> Callable[[Tensor], Tensor]:
    """The loss of ids [B, T]: cross entropy with the base's distribution, nats a token, mean over depths."""
    network.to(model.device)
    weights = torch.tensor([_LATER_WEIGHT**at for at in range(depth)])
    head = model.get_submodule("lm_head")

    def loss_of(ids_BT: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=ids_BT.is_cuda):
            with torch.no_grad():
                states, logits = base_states(model, ids_BT, layers)
                wanted = logits.float().softmax(-1)
                wanted = wanted if tokens_N is None else wanted[..., tokens_N]
            total = ids_BT.new_zeros((), dtype=torch.float32)
            for at, x in enumerate(network.unroll(ids_BT, _without_beginnings(ids_BT, states), depth)):
                guessed = (network.lm_head or head)(x[:, at:]).float().log_softmax(-1)
                total = total - weights[at] * (wanted[:, at:] * guessed).sum(-1).mean()
        return total / weights.sum()

    return loss_of


def _without_beginnings(ids_BT: Tensor, states_BTF: Tensor) -> Tensor:
    """Some windows lose the states of their first tokens: which and how many is a function of their tokens."""
    marks, tokens = ids_BT.sum(1), ids_BT.shape[1]
    lost = torch.where(marks % _BARE_SHARE == 0, marks // _BARE_SHARE % tokens, 0)
    return states_BTF * (torch.arange(tokens, device=ids_BT.device) >= lost[:, None])[..., None]


@torch.no_grad()
def _answered(model: PreTrainedModel, windows_WT: Tensor, workspace: Workspace, progress: Progress) -> Tensor:
    """The windows with their later tokens drawn by the base; the first window greedily, the last at temperature 1."""
    kept = workspace.kept(_ANSWERS)
    done = windows_WT[:0] if kept is None else kept["ids"]
    temperatures = torch.linspace(0, 1, len(windows_WT))[torch.randperm(len(windows_WT), generator=_seeded(0))]
    while len(done) < len(windows_WT):
        progress(_ANSWERS, len(done), len(windows_WT))
        some = slice(len(done), len(done) + _TOGETHER)
        answers = _continue(model, windows_WT[some], temperatures[some], _seeded(len(done)))
        done = torch.cat((done, answers))
        workspace.keep(_ANSWERS, {"ids": done})
    progress(_ANSWERS, len(done), len(windows_WT))
    return done


def _continue(model: PreTrainedModel, windows_BT: Tensor, temperatures_B: Tensor, source: torch.Generator) -> Tensor:
    """Windows of which the first part is as it was, and the rest drawn token by token."""
    tokens, cache = windows_BT.shape[1], DynamicCache()
    ids = windows_BT[:, : -(-tokens // _PROMPT_SHARE)].to(compute_device())
    read = ids
    while ids.shape[1] < tokens:
        logits = model(input_ids=read, past_key_values=cache, use_cache=True).logits[:, -1].float().cpu()
        # The token with the largest logit / temperature + Gumbel noise is a draw of the softmax.
        noise = -torch.log(torch.empty_like(logits).exponential_(generator=source))
        read = (logits + temperatures_B[:, None] * noise).argmax(-1, keepdim=True).to(ids.device)
        ids = torch.cat((ids, read), 1)
    return ids.cpu()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _shape(model: PreTrainedModel, neurons: int | None, fused: int) -> HeadsShape:
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return HeadsShape(
        width=config.hidden_size,
        neurons=neurons or config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        fused=fused,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        eps=config.rms_norm_eps,
    )


def _begin(model: PreTrainedModel, shape: HeadsShape, tokens_N: Tensor | None) -> HeadsNetwork:
    """Random weights, with the base's last norm before the head."""
    embedding = model.get_input_embeddings()
    assert embedding is not None
    own = None if tokens_N is None else model.get_submodule("lm_head").get_parameter("weight").detach()[tokens_N]
    torch.manual_seed(0)
    network = HeadsNetwork(shape, embedding.get_parameter("weight"), own)
    network.norm.weight.data.copy_(model.get_submodule("model.norm").get_parameter("weight").detach())
    return network


def _described(
    base: Path,
    model: PreTrainedModel,
    shape: HeadsShape,
    layers: list[int],
    tokens_N: Tensor | None,
    depth: int,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """The heads' config.json: the layer's settings as Llama's are called, and the base by name."""
    its: Any = model.config
    embedding = model.get_input_embeddings()
    assert embedding is not None
    described = {
        "architectures": [ARCHITECTURE],
        "base": {
            "name": base.resolve().name,
            "digest": base_digest(embedding.get_parameter("weight")),
            "num_hidden_layers": its.num_hidden_layers,
            "vocab_size": its.vocab_size,
        },
        "hidden_layers": layers,
        "depth": depth,
        "dtype": str(stored_dtype(dict(config))).removeprefix("torch."),
        "hidden_size": shape.width,
        "intermediate_size": shape.neurons,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": 1,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": its.max_position_embeddings,
        "tie_word_embeddings": tokens_N is None,
        "vocab_size": its.vocab_size if tokens_N is None else len(tokens_N),
    }
    return described if tokens_N is None else described | {"draft_tokens": tokens_N.tolist()}
