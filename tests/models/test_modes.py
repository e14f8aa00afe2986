"""Models under torch's modes: transforms of functions, inference mode, fake and meta tensors leave nothing behind."""

import copy
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap

from latte.models.loss import linear_cross_entropy
from latte.testing.numbers import assert_close
from tests.models.support import VARIANTS, tiny_model, token_ids

IDS = token_ids(2, 12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_samples(variant):
    """vmap(grad(loss)) gives what each row gives alone."""
    model = tiny_model(variant).double()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, ids):
        return functional_call(model, parameters, (ids[None],), {"labels": ids[None]}).loss

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*performance drop.*")
        gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, IDS)
    for row in range(2):
        model.zero_grad()
        model(IDS[row : row + 1], labels=IDS[row : row + 1]).loss.backward()
        for name, parameter in model.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert_close(gradients[name][row], wanted, 1e-8, name)


def test_the_loss_has_derivatives_of_every_kind():
    """Of the loss that never forms all logits, against differences."""
    hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    labels = torch.tensor([3, -100, 0, 10, 2, -100, 5])
    for leaf in (hidden, weight):
        leaf.requires_grad_()

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, lambda logits: 3 * torch.tanh(logits / 3))

    assert torch.autograd.gradcheck(loss, (hidden, weight))
    assert torch.autograd.gradgradcheck(loss, (hidden, weight))
    direction = torch.randn_like(hidden)
    _, slope = jvp(lambda hidden: loss(hidden, weight.detach()), (hidden.detach(),), (direction,))
    (gradient,) = torch.autograd.grad(loss(hidden, weight), hidden)
    assert_close(slope, (gradient * direction).sum())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_in_inference_mode_leaves_nothing_that_training_could_not_use(variant):
    model = tiny_model(variant)
    with torch.inference_mode():
        model(IDS)
        model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    model.train()(IDS, labels=IDS).loss.backward()
    copy.deepcopy(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_with_fake_tensors_leaves_none_behind(variant):
    model = tiny_model(variant)
    wanted = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    other = tiny_model(variant)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        read = other(IDS)
        other(IDS[:, :1], past_key_values=read.past_key_values)
    assert torch.equal(other.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0), wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_on_the_meta_device(variant):
    model, ids = tiny_model(variant).to("meta"), IDS.to("meta")
    out = model(ids, labels=ids, attention_mask=torch.ones_like(ids))
    out.loss.backward()
    with torch.no_grad():
        cache = model(ids).past_key_values
        assert model(ids[:, :1], past_key_values=cache).logits.shape == (2, 1, 97)


@pytest.mark.parametrize("variant", ["latte-r-swa++", "transformer++"])
def test_a_model_compiles_whole_with_labels(variant):
    model = tiny_model(variant)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(IDS, labels=IDS).loss
    found.backward()
    assert_close(found, model(IDS, labels=IDS).loss)


def test_a_cache_read_in_inference_mode_goes_on_with_gradients():
    model = tiny_model("latte-r-swa++")
    with torch.inference_mode():
        cache = model(IDS[:, :7]).past_key_values
    logits = model(IDS[:, 7:], past_key_values=cache).logits
    logits.sum().backward()
    assert_close(logits.detach(), model(IDS).logits[:, 7:].detach())


def test_a_hooked_head_and_documents_in_functions_that_are_transformed_or_have_no_numbers():
    """Labels, positions and redundant arguments are not looked at where a sample or the meta device hides them."""
    model = tiny_model("latte").double()
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    labels, places = IDS.clone(), torch.tensor([[*range(5), *range(7)], [*range(12)]])
    labels[0, 3:6] = -100

    def loss(parameters, ids, labels, places):
        given = {"labels": labels[None], "position_ids": places[None], "token_type_ids": torch.zeros_like(ids[None])}
        return functional_call(model, parameters, (ids[None],), given).loss

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*performance drop.*")
        gradients = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, IDS, labels, places)
    for row in range(2):
        model.zero_grad()
        loss(dict(model.named_parameters()), IDS[row], labels[row], places[row]).backward()
        for name, parameter in model.named_parameters():
            assert_close(gradients[name][row], parameter.grad, 1e-8, name)

    model, ids = model.to("meta"), IDS.to("meta")
    output = model(ids, labels=ids, position_ids=places.to("meta"), token_type_ids=torch.zeros_like(ids))
    assert output.loss.device.type == "meta"
