"""The one hook through which models reach the decode engine, and how a model describes its layers to it.

A model gives an :class:`Anatomy`; an engine reads it, and either stands for the modules or says why it does not serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from latte.layers.linear import Linear, RMSNorm, TokenLinear
from latte.layers.mlp import GeGLU, PlainMLP, SwiGLU
from latte.layers.window import Window
from latte.mixers import Mixer
from latte.mixers.registry import mixer_class

if TYPE_CHECKING:
    from latte.models.cache import LatteCache


class Unfit(Exception):  # noqa: N818  (an outcome, not an error)
    """The model holds something that the engine does not know.

    Args:
        why: a clause that says what.
        still: whether it is still so; asked before every token, so it looks at one thing. By default: as long as all
            that was looked at before stays the same.
    """

    def __init__(self, why: str, still: Callable[[], bool] | None = None) -> None:
        super().__init__(why)
        self.why, self.still = why, still


class Mixing(NamedTuple):
    """A mixer, and the modules that have its projections: other ones where it stands around a pretrained layer."""

    mixer: Mixer
    values: nn.Module  # has v_proj and o_proj
    queries: nn.Module | None  # has q_proj and k_proj, where queries meet keys
    head_norms: tuple[nn.Module, nn.Module] | None = None  # of queries and keys, before they are turned


class Mlp(NamedTuple):
    """down(act(up(x))), or down(act(gate(x)) . up(x)), in modules called ``down_proj``, ``up_proj``, ``gate_proj``."""

    module: nn.Module
    activation: str  # "silu", "gelu" or "gelu_tanh"
    gated: bool = True


class Sublayer(NamedTuple):
    """x + part(norm(x)), or x + after(part(norm(x)))."""

    norm: nn.Module
    part: Mixing | Mlp
    after: nn.Module | None = None


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) . (weight + plus); ``centred``: of x without its mean, and a bias added."""

    eps: float
    plus: float = 0.0
    centred: bool = False


class Walk(Protocol):
    """Goes down a model and notes every module it passes."""

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        """A submodule, which must be of one of these classes if some are named; raises Unfit."""


class Anatomy:
    """Where the parts of a model of our own blocks are."""

    #: What a projection may be: classes whose call is nothing but the product with their weight.
    products: tuple[type, ...] = (Linear, TokenLinear, nn.Linear)
    #: Our MLPs: their activation, and whether it is a gate.
    mlps: dict[type, tuple[str, bool]] = {  # noqa: RUF012
        SwiGLU: ("silu", True),
        GeGLU: ("gelu_tanh", True),
        PlainMLP: ("gelu", False),
    }

    def body_is_plain(self, body: nn.Module) -> bool:
        """Whether ``body`` would do nothing but embed, call its layers and norm."""
        from latte.models.decoder import LatteModel

        return type(body).forward is LatteModel.forward

    def sublayers(self, block: nn.Module, walk: Walk) -> list[Sublayer]:
        """The parts of one block, in order; raises Unfit."""
        from latte.models.blocks import Block

        if type(block) is not Block:
            raise Unfit(f"a layer is a {type(block).__name__}")
        walk.child(block, "dropout", nn.Dropout)
        found = []
        for role in block.roles:
            norm, module = walk.child(block, f"{role}_norm"), walk.child(block, role)
            if isinstance(module, Mixer):
                window = module._modules.get("window")
                if mixer_class(module.name) is not type(module):
                    raise Unfit(f"a mixer is a {type(module).__name__}, not the registered {module.name!r}")
                queries = module if window is None else walk.child(module, "window", Window)
                found.append(Sublayer(norm, Mixing(module, module, queries)))
            elif type(module) in self.mlps:
                found.append(Sublayer(norm, Mlp(module, *self.mlps[type(module)])))
            else:
                raise Unfit(f"a layer has a {type(module).__name__}")
        return found

    def norm(self, norm: nn.Module) -> Norm:
        """What a norm computes; raises Unfit for a class that is not known."""
        if type(norm) is RMSNorm:
            return Norm(norm.eps)
        if type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1:
            return Norm(norm.eps, centred=True)
        raise Unfit(f"a norm is a {type(norm).__name__}")

    def embedding_scale(self, table: nn.Module) -> float:
        """What embedded tokens are multiplied by; raises Unfit for a table that does something else."""
        if type(table) is not nn.Embedding:
            raise Unfit(f"the embedding is a {type(table).__name__}")
        return 1.0

    def allows(self, dtype: Any) -> bool:
        """Whether the modules compute in their weights' dtype throughout, as the engine does."""
        return True


class Engine(Protocol):
    """Reads one token a row where calling modules would do nothing more."""

    def hidden(self, body: nn.Module, x_B1D: Tensor, cache: LatteCache) -> Tensor | None:
        """Embedded tokens through layers and last norm, the cache advanced; None where modules have to be called."""

    def logits(self, body: nn.Module, head: nn.Module, ids_BT: Tensor, cache: LatteCache) -> Tensor | None:
        """From ids to the logits behind each of a few tokens, the cache advanced; the last ones can be taken back."""

    def refusal(self, body: nn.Module, head: nn.Module) -> str | None:
        """Why modules have to be called for this model; None if the engine serves it."""


class NoEngine:
    """Serves nothing: modules are called."""

    def __init__(self, anatomy: Anatomy) -> None:
        pass

    def hidden(self, body: nn.Module, x_B1D: Tensor, cache: LatteCache) -> Tensor | None:
        return None

    def logits(self, body: nn.Module, head: nn.Module, ids_BT: Tensor, cache: LatteCache) -> Tensor | None:
        return None

    def refusal(self, body: nn.Module, head: nn.Module) -> str | None:
        return "the decode engine is off"


_engine: Callable[[Anatomy], Engine] = NoEngine


def use_engine(engine: Callable[[Anatomy], Engine]) -> None:
    """Models made from now on decode through such an engine."""
    global _engine
    _engine = engine


def new_engine(anatomy: Anatomy) -> Engine:
    """The engine of one model."""
    return _engine(anatomy)
