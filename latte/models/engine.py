"""The one hook through which models reach the decode engine, and how a model describes its layers to it.

A model gives an :class:`Anatomy`; an engine reads it, and either stands for the modules or says that it does not serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from latte.layers.linear import Linear, RMSNorm, TokenLinear
from latte.layers.mlp import SwiGLU
from latte.layers.window import Window
from latte.mixers.latte import LatteMixer

if TYPE_CHECKING:
    from latte.models.cache import LatteCache, ModelState


class Unfit(Exception):  # noqa: N818  (an outcome, not an error)
    """The model holds something that the engine does not know."""


class Parts(NamedTuple):
    """One layer x + mixer(norm(x)), x + mlp(norm(x)) with a Latte mixer and a gated MLP, as modules."""

    mixer: LatteMixer
    value_owner: nn.Module  # has v_proj and o_proj
    query_owner: nn.Module | None  # has q_proj and k_proj, with a window
    norms: list[Any]  # before the mixer, before the MLP
    mlp: nn.Module


class Walk(Protocol):
    """Goes down a model and notes every module it passes."""

    def child(self, parent: nn.Module, name: str, *kinds: type) -> Any:
        """A submodule, which must be of one of these classes if some are named; raises Unfit."""


class Anatomy:
    """Where the parts of a model of our own blocks are."""

    #: What a projection may be: classes whose call is nothing but the product with their weight.
    products: tuple[type, ...] = (Linear, TokenLinear, nn.Linear)

    def mixer_of(self, block: Any) -> LatteMixer:
        return block.mixer

    def body_is_plain(self, body: nn.Module) -> bool:
        """Whether ``body`` would do nothing but embed, call its layers and norm."""
        from latte.models.decoder import LatteModel

        return type(body).forward is LatteModel.forward and body._modules.get("embed_norm") is None

    def parts(self, block: nn.Module, walk: Walk) -> Parts:
        """The parts of one block; raises Unfit."""
        from latte.models.blocks import Block

        if type(block) is not Block or block.roles != ["mixer", "mlp"]:
            raise Unfit
        mixer = walk.child(block, "mixer", LatteMixer)
        window = None if mixer.window is None else walk.child(mixer, "window", Window)
        walk.child(block, "dropout", nn.Dropout)
        norms = [walk.child(block, name, RMSNorm) for name in ("mixer_norm", "mlp_norm")]
        return Parts(mixer, mixer, window, norms, walk.child(block, "mlp", SwiGLU))

    def eps(self, norm: nn.Module) -> float:
        """The constant of a norm that is x / sqrt(mean(x^2) + eps) . weight; raises Unfit for another."""
        if type(norm) is not RMSNorm:
            raise Unfit
        return norm.eps

    def allows(self, dtype: Any) -> bool:
        """Whether the modules compute in their weights' dtype throughout, as the engine does."""
        return True


class Engine(Protocol):
    """Reads one token a row where calling modules would do nothing more."""

    def hidden(self, body: nn.Module, x_B1D: Tensor, cache: LatteCache) -> Tensor | None:
        """Embedded tokens through layers and last norm, the cache advanced; None where modules have to be called."""

    def logits(self, body: nn.Module, head: nn.Module, ids_B1: Tensor, cache: LatteCache) -> Tensor | None:
        """The same from ids to logits."""

    def logits_of_each(
        self, body: nn.Module, head: nn.Module, ids_BT: Tensor, cache: LatteCache
    ) -> tuple[Tensor, list[ModelState]] | None:
        """Logits behind each of a few tokens and the state after each, the cache as it was; None as above."""


class NoEngine:
    """Serves nothing: modules are called."""

    def __init__(self, anatomy: Anatomy) -> None:
        pass

    def hidden(self, body: nn.Module, x_B1D: Tensor, cache: LatteCache) -> Tensor | None:
        return None

    def logits(self, body: nn.Module, head: nn.Module, ids_B1: Tensor, cache: LatteCache) -> Tensor | None:
        return None

    def logits_of_each(
        self, body: nn.Module, head: nn.Module, ids_BT: Tensor, cache: LatteCache
    ) -> tuple[Tensor, list[ModelState]] | None:
        return None


_engine: Callable[[Anatomy], Engine] = NoEngine


def use_engine(engine: Callable[[Anatomy], Engine]) -> None:
    """Models made from now on decode through such an engine."""
    global _engine
    _engine = engine


def new_engine(anatomy: Anatomy) -> Engine:
    """The engine of one model."""
    return _engine(anatomy)
