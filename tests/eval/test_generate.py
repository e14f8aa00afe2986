"""Generation: what one pass says, in constant memory, saved and gone on with, for our models and others'."""

import io
from itertools import islice

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from latte.cli.main import main
from latte.data.tokenizer import byte_tokenizer, train_bpe
from latte.errors import UserError
from latte.eval.generate import Reader, stream_text, text_blocks
from latte.models import LatteForCausalLM, preset
from latte.recipe import GenerateRecipe

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PROMPT = "def main():\n    print('hello world, this is a prompt')  # äöü €\n" * 5


def make(kind="latte-r-swa++", vocab_size=257):
    torch.manual_seed(1)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **SMALL, num_key_value_heads=1))
    else:
        options = {"num_latents": 4, "window": 6} if kind == "latte-r-swa++" else {}
        model = LatteForCausalLM(preset(kind, vocab_size=vocab_size, **SMALL, **options))
    for parameter in model.parameters():
        parameter.data.mul_(5)
    return model.eval()


def read(model, text=PROMPT, tokenizer=None, chunk=512, block=1000):
    reader = Reader(model, tokenizer or byte_tokenizer(), chunk)
    reader.read_blocks(text[start : start + block] for start in range(0, len(text), block))
    return reader


@pytest.mark.parametrize("kind", ["latte-r-swa++", "transformer++", "llama"])
def test_greedy_is_what_full_passes_choose(kind):
    model, tokenizer = make(kind), byte_tokenizer()
    ids = [tokenizer.bos_token_id, *PROMPT.encode()]
    written = []
    for _ in range(12):
        with torch.no_grad():
            written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
    recipe = GenerateRecipe(temperature=0, max_new_tokens=12, stop_at_end=False)
    for chunk, block in ((512, 1000), (7, 13), (1, 1)):
        assert list(read(model, chunk=chunk, block=block).write(recipe)) == written


def test_hooks_of_the_model_see_every_token_and_change_none():
    model, recipe, seen = make(), GenerateRecipe(temperature=0.7, seed=3, max_new_tokens=9, stop_at_end=False), []
    alone = list(read(model).write(recipe))
    reader = read(model)
    handle = model.register_forward_hook(lambda module, given, output: seen.append(output.logits.shape[1]))
    assert list(reader.write(recipe)) == alone
    assert seen == [1] * 9
    handle.remove()
    assert list(read(model).write(recipe)) == alone
    assert seen == [1] * 9


def test_blocks_change_no_token():
    tokenizer = train_bpe([PROMPT], 300)
    model = make(vocab_size=300)
    whole = [tokenizer.bos_token_id, *tokenizer(PROMPT)["input_ids"]]
    for block in (1, 5, 64, 10_000):
        seen = []
        reader = Reader(model, tokenizer)
        reader.read_ids = seen.extend
        reader.read_blocks(PROMPT[start : start + block] for start in range(0, len(PROMPT), block))
        assert seen == whole, block


def test_the_state_has_one_size_however_long_the_prompt(tmp_path):
    model = make()
    sizes = []
    for times in (2, 200):
        reader = read(model, PROMPT * times, block=100_000)
        reader.save(tmp_path / str(times))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(times)).glob("*.safetensors")))
    assert sizes[0] == sizes[1]


def test_a_state_loads_where_only_run_time_fields_of_the_configuration_differ(tmp_path):
    read(make()).save(tmp_path / "state")
    other = make()
    other.config.use_cache = False
    other.config.architectures = ["Renamed"]
    Reader(other, byte_tokenizer()).load(tmp_path / "state")
    other.config.rope_theta = 5.0
    with pytest.raises(UserError, match="another model"):
        Reader(other, byte_tokenizer()).load(tmp_path / "state")


def test_save_and_load_go_on_with_the_same_tokens(tmp_path):
    model = make()
    recipe = GenerateRecipe(max_new_tokens=40, seed=5, stop_at_end=False)
    reader = read(model)
    reader.save(tmp_path / "state")
    expected = list(reader.write(recipe))
    again = Reader(model, byte_tokenizer())
    again.load(tmp_path / "state")
    assert list(again.write(recipe)) == expected
    # more text after a loaded state is the same as all of it at once
    asked = Reader(model, byte_tokenizer())
    asked.load(tmp_path / "state")
    asked.read_blocks(iter(["Question?"]))
    assert list(asked.write(recipe)) == list(read(model, PROMPT + "Question?").write(recipe))


def test_sampling_follows_its_seed_and_its_limits():
    model = make()
    runs = [
        list(read(model).write(GenerateRecipe(max_new_tokens=30, seed=seed, stop_at_end=False, temperature=1.0)))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    greedy = list(read(model).write(GenerateRecipe(max_new_tokens=10, temperature=0, stop_at_end=False)))
    for limit in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        recipe = GenerateRecipe(max_new_tokens=10, stop_at_end=False, temperature=1.0, **limit)
        assert list(read(model).write(recipe)) == greedy


def test_text_comes_in_whole_characters_and_stops_at_the_end():
    class Scripted(Reader):
        def write(self, recipe, ends=()):
            yield from "a€ä\n𝄞".encode()
            return "end"

    assert list(stream_text(Scripted(make(), byte_tokenizer()), GenerateRecipe())) == ["a", "€", "ä", "\n", "𝄞"]
    model = make()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[256] = 1e-3  # only the end of text ever differs from 0
    reader = read(model)
    logits = reader._forward([reader.waiting])
    recipe = GenerateRecipe(max_new_tokens=3, temperature=0, stop_at_end=True)
    expected = 0 if logits.argmax() == 256 else 3
    assert len(list(read(model).write(recipe))) == expected


def test_half_characters_at_block_ends_are_kept_whole():
    raw = ("€" * 50_000).encode()
    assert "".join(text_blocks(io.BytesIO(raw))) == "€" * 50_000


def test_bytes_that_are_not_text_are_replaced_and_counted():
    raw = b"\xffab\xc3" * 30_000 + "€".encode()[:2]  # the last character is cut
    counted = []
    text = "".join(text_blocks(io.BytesIO(raw), on_undecodable=counted.append))
    assert text == "\ufffdab\ufffd" * 30_000 + "\ufffd" * 2
    assert counted == [60_002]
    "".join(text_blocks(io.BytesIO("\ufffd€".encode()), on_undecodable=counted.append))
    assert counted[1:] == [0]


def test_mistakes(tmp_path):
    model = make()
    with pytest.raises(UserError, match="nothing to continue"):
        next(Reader(model, byte_tokenizer()).write(GenerateRecipe()))
    with pytest.raises(UserError, match="nothing was read yet"):
        Reader(model, byte_tokenizer()).save(tmp_path / "x")
    with pytest.raises(UserError, match="there is no saved state"):
        Reader(model, byte_tokenizer()).load(tmp_path / "x")
    read(model).save(tmp_path / "state")
    other = make()
    other.lm_head.weight.data.mul_(2)
    with pytest.raises(UserError, match="saved by another model"):
        Reader(other, byte_tokenizer()).load(tmp_path / "state")
    file = tmp_path / "state" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="the saved state is damaged"):
        Reader(model, byte_tokenizer()).load(tmp_path / "state")
    for settings in ({"top_p": 2}, {"temperature": -1}, {"prompt": "a", "prompt_file": "b"}):
        with pytest.raises(UserError, match="expected"):
            GenerateRecipe(**settings)


def test_the_command(tmp_path, capsys, monkeypatch):
    model = make()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text(PROMPT)
    common = ["generate", str(tmp_path / "model"), "--max-new-tokens", "8", "--stop-at-end", "false", "--seed", "3"]
    assert main([*common, "--prompt", PROMPT, "--save-state", str(tmp_path / "state")]) == 0
    first = capsys.readouterr().out
    assert main([*common, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert capsys.readouterr().out == first
    assert main([*common, "--load-state", str(tmp_path / "state")]) == 0
    assert capsys.readouterr().out == first
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert main([*common, "--prompt-file", "-"]) == 0
    assert capsys.readouterr().out == first
    for wrong in (
        ["--prompt-file", str(tmp_path / "none")],
        ["--load-state", str(tmp_path / "none")],
        ["--top-p", "7"],
    ):
        assert main([*common, *wrong]) != 0
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.strip().splitlines()) == 1
    assert list(islice(tmp_path.iterdir(), 9))
