"""The architecture of a checkpoint as numbers: what ``arch.py`` resolves and ``layout.py`` writes down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from smoe_cli.families.rope import Rope


@dataclass(frozen=True)
class Latent:
    """Of block "mla": ranks of the latents of queries (0 = none) and of keys and values, widths of a head's parts."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    eps: float


@dataclass(frozen=True)
class Recurrent:
    """Of a block that carries a state (RecurrentSpec in engine/include/smoe/model.h): ``taps`` of its convolution,
    heads of value_dim values, keys of key_dim; ``bias`` names the parts that have one."""

    block: str
    taps: int
    heads: int
    value_dim: int
    key_heads: int = 0
    key_dim: int = 0
    rank: int = 0
    channel_decay: bool = False
    sigmoid_gate: bool = False
    tiled: bool = False
    negative_rates: bool = False
    eps: float = 0.0
    bias: tuple[str, ...] = ()

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: q [heads * head_dim, hidden], k and v [kv_heads * head_dim, hidden]. window 0 = all.
    With ``latent`` the block is "mla", and kv_heads and head_dim have no meaning; with ``recurrent`` nothing else
    has."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    qk_norm: str = "none"
    norm_after_rope: bool = False
    sinks: bool = False
    gated: bool = False
    chunk: int = 0
    temperature: float = 0.0
    temperature_floor: float = 1.0
    clip: float = 0.0
    bias: tuple[str, ...] = ()
    rope: int = 0
    latent: Latent | None = None
    recurrent: Recurrent | None = None


@dataclass(frozen=True)
class Router:
    """How scores are made and experts chosen (blocks/router.h)."""

    scores: str = "softmax"
    correction: bool = False
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "best"
    jitter: float = 0.0
    normalize: bool = False
    norm_floor: float = 0.0
    norm_added: float = 0.0
    correct_logits: bool = False
    scaling: float = 1.0


@dataclass(frozen=True)
class Ffn:
    """Dense (experts 0: width) or routed (experts, top_k, expert_width, an always-on expert of shared_width)."""

    width: int = 0
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    router: Router = Router()
    shared_width: int = 0
    shared_gate: bool = False
    bias: bool = False  # of the dense or the always-on part
    activation: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    expert_bias: bool = False
    scale_input: bool = False


@dataclass(frozen=True)
class Layer:
    attention: Attention
    ffn: Ffn
    norms: str = "before"


@dataclass(frozen=True)
class Arch:
    family: str
    model_type: str
    hidden: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied_head: bool
    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]
    norm: str = "rms"
    norm_offset: float = 0.0  # what convert adds to the norms' weights
    head_bias: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    notices: tuple[str, ...] = ()

    @property
    def rope(self) -> Rope:
        """Of the first layer."""
        return self.ropes[self.layers[0].attention.rope]

    def moe_layers(self) -> list[int]:
        """Absolute indices of the routed layers, in order."""
        return [index for index, layer in enumerate(self.layers) if layer.ffn.experts]


@dataclass(frozen=True)
class TrunkTensor:
    """A tensor the blocks need. role: embed head norm bias attention router ffn shared."""

    name: str
    role: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """Of a stored matrix, seen as ``count`` groups of ``size`` rows, the ``rows`` rows of each group from ``first`` on;
    ``transposed`` within the group: its columns are then the rows of the matrix. ``pairs``: a group's rows are stored
    as (0, half), (1, half + 1) ..., the order in which some formats keep what is rotated together."""

    count: int
    size: int
    first: int
    rows: int
    transposed: bool = False
    pairs: bool = False

    def source_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Of the stored matrix, given the shape [rows, cols] of what is taken from it."""
        return self.count * self.size, rows // self.count if self.transposed else cols

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The stored rows of the groups that rows [start, stop) come from."""
        return start // self.rows * self.size, -(-stop // self.rows) * self.size

    def pick(self, stored: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop), from the stored rows of their ``span``."""
        groups = stored.reshape(-1, self.size, stored.shape[-1])[:, self.first : self.first + self.rows]
        if self.pairs:
            groups = groups.reshape(len(groups), self.rows // 2, 2, -1).swapaxes(1, 2)
        begin = start // self.rows * self.rows
        return groups.reshape(-1, stored.shape[-1])[start - begin : stop - begin]
