"""What an extended model learns from, against the same thing written plainly, and what it then learns."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from latte.extend import convert
from latte.extend.losses import distillation_loss, teacher_states, transfer_losses
from tests.extend.families import FAMILIES, small_model
from tests.extend.test_convert import WAYS, ids, opened
from tests.ops.helpers import assert_close


def prepared(family: str, way: int = 0):
    """An opened model whose new weights alone are trained."""
    model = opened(convert(small_model(family), WAYS[way]))
    model.requires_grad_(False)
    for parameter in model.new_parameters().values():
        parameter.requires_grad_(True)
    return model


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(("divergence", "next_token"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_distillation_is_divergence_and_cross_entropy_written_plainly(family, divergence, next_token) -> None:
    model, x = prepared(family), ids()
    labels = x.clone()
    labels[0, 5:9] = -100
    known = teacher_states(model, x, None)
    loss, kl, ce = distillation_loss(
        model, x, labels, None, known=known if divergence else None, divergence=divergence, next_token=next_token
    )
    found = torch.autograd.grad(loss, list(model.new_parameters().values()))

    kept = F.pad(labels[:, 1:], (0, 1), value=-100) != -100
    log_p = model(x, use_cache=False).logits.log_softmax(-1)[kept]
    log_q = model.logits(known).log_softmax(-1)[kept]
    plain_kl = F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
    plain_ce = F.nll_loss(log_p, F.pad(labels[:, 1:], (0, 1))[kept])
    expected = divergence * plain_kl + next_token * plain_ce
    wanted = torch.autograd.grad(expected, list(model.new_parameters().values()))
    assert_close(loss, expected.detach(), 1e-5)
    assert_close(ce, plain_ce.detach(), 1e-5)
    if divergence:
        assert_close(kl, plain_kl.detach(), 1e-4)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-4)


def test_documents_of_a_row_are_taught_apart() -> None:
    model, x = prepared("llama"), ids(1, 40)
    reset = torch.zeros(1, 40, dtype=torch.bool)
    reset[0, [0, 17]] = True
    states = teacher_states(model, x, reset)
    assert_close(states[:, 17:], teacher_states(model, x[:, 17:], None), 1e-4)
    assert torch.isfinite(transfer_losses(model, x, reset)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_transfer_loss_is_the_distance_of_the_layers_outputs(family: str) -> None:
    """Each layer on the original's own input, against the original model itself, watched by hooks."""
    original = small_model(family)
    model = opened(convert(copy.deepcopy(original), WAYS[0]))
    seen = []
    for block in original.model.layers:
        block.self_attn.register_forward_hook(
            lambda module, args, kwargs, output: seen.append((kwargs["hidden_states"], output[0])), with_kwargs=True
        )
    with torch.no_grad():
        original(ids(1))
        losses = transfer_losses(model, ids(1), None)
        for layer, (x, target) in enumerate(seen):
            y, _ = model.mixers[layer](x)
            expected = (y - target).square().sum() / target.square().sum()
            assert_close(losses[layer], expected, 1e-3, what=f"layer {layer}")


def test_gradients_of_transfer_are_those_of_the_formula() -> None:
    """They are taken layer by layer while the model is read; here all at once, by differences."""
    model, x = prepared("llama"), ids(1, 30)
    model.double()
    name, weight = next(iter(model.new_parameters().items()))
    transfer_losses(model, x, None).mean().backward()
    direction = torch.randn_like(weight)
    with torch.no_grad():
        ends = []
        for step in (1e-6, -2e-6):
            weight.add_(direction, alpha=step)
            ends.append(transfer_losses(model, x, None).mean().item())
    assert float((weight.grad * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4), name


def test_teaching_brings_the_layers_nearer_and_touches_nothing_else() -> None:
    model, x = prepared("llama"), ids(2, 40)
    with torch.no_grad():
        model.read_as("open", x, share=0.1)
    old = {name: value.clone() for name, value in model.state_dict().items()}
    new = model.new_parameters()
    optimiser = torch.optim.AdamW(new.values(), lr=1e-2)
    first = transfer_losses(model, x, None).mean().item()
    for _ in range(30):
        optimiser.zero_grad()
        transfer_losses(model, x, None).mean().backward()
        optimiser.step()
    assert transfer_losses(model, x, None).mean().item() < 0.8 * first
    for name, value in model.state_dict().items():
        assert name in new or torch.equal(value, old[name]), name


def test_opening_gives_the_latents_the_share_that_was_asked_for() -> None:
    model, x = convert(small_model("llama"), WAYS[0]), ids(2, 40)
    with torch.no_grad():
        for mixer in model.mixers:
            mixer.latent_q_proj.weight.mul_(0.01)  # shares that hardly vary, so that their mean is the share
            mixer.pretrained.attention.q_proj.weight.mul_(0.01)
        model.read_as("open", x, share=0.2)
        hidden = model.base.model.layers[0].input_layernorm(model.base.model.embed_tokens(x))
        slots = model.mixers[0].look(hidden)["latents"].values
    assert slots[..., 1:].sum(-1)[:, 8:].mean().item() == pytest.approx(0.2, abs=0.03)
