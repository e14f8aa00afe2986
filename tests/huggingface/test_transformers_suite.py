"""transformers' own tests of models and generation, on ours and on an extended Llama, with their heads.

docs/huggingface.md lists what is skipped, and why.
"""

from __future__ import annotations

import copy
import unittest
from typing import Any

import pytest
import torch

from latte.extend import (
    LatteExtendedConfig,
    LatteExtendedForCausalLM,
    LatteExtendedForSequenceClassification,
)
from latte.models import LatteConfig, LatteForCausalLM, LatteForMaskedLM, LatteForSequenceClassification
from tests.huggingface import transformers_suite as suite

if suite.MISSING is not None:
    pytest.skip(suite.MISSING, allow_module_level=True)

MIXINS = suite.mixins()
pytestmark = pytest.mark.filterwarnings("ignore")  # the suite's own
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class SmallModel:
    """Configuration and inputs of a small model."""

    is_training = True
    seq_length, batch_size = 7, 3
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 4, 99

    def __init__(self, parent: unittest.TestCase, config: Any, causal: bool) -> None:
        self.parent, self.config, self.causal = parent, config, causal

    def get_config(self) -> Any:
        return type(self.config).from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = MIXINS["ids_tensor"]([self.batch_size, self.seq_length], self.vocab_size - 3) + 3
        mask = torch.ones_like(ids)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Common:
    """What the models have in common."""

    has_attentions = False  # behind a cache there are no single tokens to attend to
    test_missing_keys = True
    causal = True
    config: Any

    def _prepare_for_class(self, inputs_dict: dict[str, Any], model_class: Any, return_labels: bool = False) -> Any:
        """Labels for our classes, which are not among those that the suite knows by name."""
        inputs = copy.deepcopy(inputs_dict)
        if return_labels:
            classifies = model_class in (LatteForSequenceClassification, LatteExtendedForSequenceClassification)
            shape = inputs["input_ids"].shape[:1] if classifies else inputs["input_ids"].shape
            inputs["labels"] = torch.zeros(shape, dtype=torch.long)
        return inputs

    def _check_caches_are_equal(self, first: Any, second: Any) -> None:
        """States instead of layers of keys and values."""
        assert first.length == second.length
        for (name, one), (_, other) in zip(first.state.tensors(), second.state.tensors(), strict=True):
            torch.testing.assert_close(one, other, msg=name)

    def setUp(self) -> None:
        MIXINS["global_rng"].seed(0)  # the ids of the inputs
        torch.manual_seed(0)
        self.model_tester = SmallModel(self, self.config, self.causal)  # type: ignore[arg-type]


class CausalLMTest(Common, MIXINS["ModelTesterMixin"], MIXINS["GenerationTesterMixin"], unittest.TestCase):
    all_model_classes = (LatteForCausalLM,)
    all_generative_model_classes = (LatteForCausalLM,)
    config = LatteConfig(**SIZES, mixer_options={"num_latents": 8, "window": 4, "feed": "rglru"})


class ClassifierTest(Common, MIXINS["ModelTesterMixin"], unittest.TestCase):
    all_model_classes = (LatteForSequenceClassification,)
    causal = False
    config = LatteConfig(**SIZES, bidirectional=True, mixer_options={"num_latents": 8, "window": 4})


class MaskedLMTest(Common, MIXINS["ModelTesterMixin"], unittest.TestCase):
    all_model_classes = (LatteForMaskedLM,)
    causal = False
    config = LatteConfig(**SIZES, bidirectional=True, mixer_options={"num_latents": 8, "feed": "conv"})


class ExtendedLlamaTest(Common, MIXINS["ModelTesterMixin"], MIXINS["GenerationTesterMixin"], unittest.TestCase):
    all_model_classes = (LatteExtendedForCausalLM,)
    all_generative_model_classes = (LatteExtendedForCausalLM,)
    config = LatteExtendedConfig(
        original={"model_type": "llama", **SIZES, "num_key_value_heads": 2},
        options={"window": 4, "num_latents": 2, "feed": "rglru"},
    )


class ExtendedClassifierTest(Common, MIXINS["ModelTesterMixin"], unittest.TestCase):
    all_model_classes = (LatteExtendedForSequenceClassification,)
    config = ExtendedLlamaTest.config
