"""The experts of a layer as linears of their own, named as in checkpoints. Knows transformers' stacks, no rounding."""

from torch import Tensor, nn

_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")


def split_experts(layers: list[nn.Module], kind: str) -> None:
    """Replace the stacks of each layer that has some by a list of experts, each with three linears. kind: the
    checkpoint's model_type. The layers cannot be computed after this."""
    names = _MIXTRAL if kind == "mixtral" else _NAMES
    for layer in layers:
        mlp = layer.get_submodule("mlp")
        if not hasattr(mlp, "experts"):
            continue
        stacks = mlp.get_submodule("experts")
        pairs = zip(stacks.get_parameter("gate_up_proj"), stacks.get_parameter("down_proj"), strict=True)
        experts = nn.ModuleList()
        for gate_up, down in pairs:
            gate, up = gate_up.chunk(2)
            experts.append(nn.ModuleDict({n: _linear(w) for n, w in zip(names, (gate, up, down), strict=True)}))
        mlp.experts = experts


def _linear(weight_NK: Tensor) -> nn.Linear:
    made = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight_NK.detach())
    return made


def expert_linears(layer: nn.Module) -> list[str]:
    """The names of the linears of a layer's experts; empty: it has none."""
    found = (name for name, module in layer.named_modules() if isinstance(module, nn.Linear))
    return [name for name in found if name.startswith("mlp.experts.")]


def stored_name(layer: nn.Module, name: str) -> str:
    """The name under which a checkpoint stores a tensor of a layer whose experts are split."""
    linears = expert_linears(layer)
    is_mixtral = bool(linears) and linears[0].rpartition(".")[2] in _MIXTRAL
    return name.replace("mlp.", "block_sparse_moe.", 1) if is_mixtral and name.startswith("mlp.") else name


def routers(layers: list[nn.Module]) -> list[str]:
    """The modules that choose experts, as a checkpoint names them."""
    return [
        f"model.layers.{index}.{stored_name(layer, 'mlp.gate')}"
        for index, layer in enumerate(layers)
        if expert_linears(layer)
    ]
