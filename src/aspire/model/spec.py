"""ModelSpec: what the decoder must know of a model, as numbers. Standard library only."""

from dataclasses import dataclass

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One set of rotary frequencies; rope.py says what each scaling does with its numbers.

    dim: rotated part of a head. max_position: the config's, before scaling. original_max_position: of pretraining.
    """

    kind: str
    theta: float
    dim: int
    max_position: int
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    num_experts: int
    num_active: int  # experts per token
    intermediate_size: int  # of one expert
    normalize: bool  # the chosen experts' weights sum to one


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ between layers. rope: index into ModelSpec.ropes, None: no rotation. window: recent keys seen."""

    rope: int | None = 0
    window: int | None = None
    moe: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a model but its weights. Sizes are of the whole model.

    norm_offset: added to the weight of every RMSNorm (Gemma stores weight - 1). post_norms: attention and MLP outputs
    are normalised before they join the residual (Gemma). fused_checkpoint: the checkpoint stores qkv and gate_up
    already fused (Phi-3).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    max_model_len: int
    attention_scale: float
    activation: str = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    moe: MoeSpec | None = None
    fused_checkpoint: bool = False
    dtype: str = "float32"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None: the layer sees everything."""
        return tuple(layer.window for layer in self.layers)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size

    def num_parameters(self) -> int:
        """Weights that a token's forward may read, embedding included once (all experts counted)."""
        h, d = self.hidden_size, self.head_dim
        attention = 2 * h * d * (self.num_heads + self.num_kv_heads)
        total = self.vocab_size * h * (1 if self.tied_embeddings else 2)
        for layer in self.layers:
            experts, width = 1, self.intermediate_size
            if layer.moe and self.moe is not None:
                experts, width = self.moe.num_experts, self.moe.intermediate_size
                total += experts * h
            total += attention + 3 * h * width * experts
        return total
