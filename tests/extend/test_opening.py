"""Where latents begin, and whether a conversion is checked."""

from __future__ import annotations

import pytest
import torch

from latte.errors import UserError
from latte.extend import convert
from latte.extend.check import check_conversion
from latte.extend.layer import CLOSED
from latte.extend.losses import transfer_losses
from latte.extend.opening import _centres, _least_squares
from tests.extend.families import FAMILIES, small_model
from tests.extend.test_convert import OPTIONS, WAYS, ids, opened
from tests.ops.helpers import assert_close


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_latents_begin_nearer_to_the_pretrained_layers_than_the_window_alone(family: str, way: int) -> None:
    model, x = convert(small_model(family), WAYS[way]), ids(6, 60)
    with torch.no_grad():
        closed = transfer_losses(model, x, None)
        model.read_as("open", x)
        opened_losses = transfer_losses(model, x, None)
    assert opened_losses.mean() < closed.mean()
    assert all(torch.isfinite(parameter).all() for parameter in model.new_parameters().values())


def test_opening_is_the_same_each_time_and_knows_documents() -> None:
    reset = torch.zeros(4, 50, dtype=torch.bool)
    reset[:, 0] = reset[1, 20] = True
    found = []
    for seed in (0, 1):  # what was drawn before does not matter
        torch.manual_seed(seed)
        model = convert(small_model("llama"), WAYS[0])
        model.read_as("open", ids(4, 50), reset=reset)
        found.append({name: value.detach().clone() for name, value in model.new_parameters().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_text_within_the_window_opens_the_latents_a_little() -> None:
    model = convert(small_model("llama"), {**WAYS[0], "window": 30})
    model.read_as("open", ids(2, 20))
    assert all(mixer.slot0_bias is not None and (mixer.slot0_bias < CLOSED / 2).all() for mixer in model.mixers)


def test_centres_are_those_of_well_separated_clusters() -> None:
    torch.manual_seed(0)
    true = torch.tensor([[0.0, 10.0], [10.0, 0.0], [-10.0, -10.0]])
    points = (true.repeat(20, 1) + 0.1 * torch.randn(60, 2))[None]
    found = _centres(points, 3)[0]
    assert torch.cdist(true, found).min(dim=1).values.max() < 0.1


def test_least_squares_finds_a_linear_map() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(200, 7), torch.randn(2, 3, 7)
    found = _least_squares(x, torch.einsum("nd,hld->nhl", x, weight), 1e-9)
    assert_close(found, weight, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversion_is_checked(family: str) -> None:
    found = check_conversion(small_model(family), WAYS[0], ids(1, 60)[0])
    assert found["tokens"] == 60
    assert found["as_original"] < 1e-4
    assert found["decoding"] < 1e-4


def test_a_conversion_that_changes_the_model_is_refused() -> None:
    model = small_model("llama")
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def twice(*args, **kwargs):
        y, rest = forward(*args, **kwargs)
        return 2 * y, rest

    layer.forward = twice  # something that the family knows nothing of
    with pytest.raises(UserError, match="computes something that its family does not say"):
        check_conversion(model, OPTIONS, ids(1, 40)[0])


def test_angles_of_decoding_are_those_of_reading() -> None:
    """Past the context the pretrained model was made for, where angles are no longer rounded, and with scaled ones."""
    for family in ("llama", "llama, scaled rotary, untied"):
        model = opened(convert(small_model(family), WAYS[0])).eval()
        x = ids(1, 80)
        assert model.own_context == 64
        with torch.no_grad():
            whole = model(x).logits
            cache, parts = None, []
            for token in x.split(1, dim=1):
                step = model(token, past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                parts.append(step.logits)
        assert_close(torch.cat(parts, dim=1), whole, 1e-4)
