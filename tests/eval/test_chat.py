"""Conversations: each token is read once, the state says what re-reading everything would, and saved states go on."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from latte.data.tokenizer import byte_tokenizer
from latte.errors import UserError
from latte.eval.chat import ChatFormat, Conversation
from latte.eval.generate import Reader, stream_text
from latte.extend import convert
from latte.recipe import ChatRecipe, GenerateRecipe
from tests.eval.test_generate import SMALL, make
from tests.extend.families import small_model

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GREEDY = ChatRecipe(temperature=0, max_new_tokens=9)
KINDS = ["latte-r-swa++", "transformer++", "llama", "extended", "gemma2"]


def make_model(kind):
    """A model that writes letters only, so that its answers are text that is tokenized as it was written."""
    torch.manual_seed(3)
    if kind == "extended":
        pretrained = small_model("llama")
        pretrained.resize_token_embeddings(257, mean_resizing=False)
        model = convert(pretrained, {"window": 6, "sinks": 2, "num_latents": 4}).eval()
    elif kind == "gemma2":  # every other layer keeps a window of 8 tokens
        sizes = {**SMALL, "vocab_size": 257, "head_dim": 8, "num_key_value_heads": 1, "sliding_window": 8}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes)).eval()
    else:
        model = make(kind)
    owner = model.base if kind == "extended" else model
    head = torch.nn.Linear(owner.lm_head.in_features, 257, bias=False)
    head.weight.data = torch.randn_like(head.weight) * 3
    head.weight.data[[token for token in range(257) if not chr(token).isalpha() or token > 122]] = 0
    owner.lm_head = head
    return model


def tokenizer_with(template=TEMPLATE):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def converse(conversation, messages, recipe=GREEDY):
    return ["".join(conversation.ask(message, recipe)) for message in messages]


def watch(model, monkeypatch):
    """Every token that the model reads, in order."""
    seen = []
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda input_ids, **more: seen.extend(input_ids[0].tolist()) or forward(input_ids=input_ids, **more),
    )
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_of_a_conversation_is_read_once(kind, monkeypatch):
    model, tokenizer = make_model(kind), tokenizer_with()
    seen = watch(model, monkeypatch)
    conversation = Conversation(Reader(model, tokenizer, chunk=7), system="Be brief.")
    asked = ["First?", "And second: äö", "third"]
    answers = converse(conversation, asked)
    assert all(len(answer) == GREEDY.max_new_tokens for answer in answers)

    messages = [{"role": "system", "content": "Be brief."}]
    for message, answer in zip(asked, answers, strict=True):
        messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    end = len(tokenizer("<|endoftext|>\n")["input_ids"])
    assert [*seen, conversation.reader.waiting] == whole[:-end]
    # and the state is that of a reader that reads the whole conversation at once
    again = Reader(model, tokenizer)
    again.read_ids(whole[:-end])
    got, expected = (reader._forward([reader.waiting]) for reader in (conversation.reader, again))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["latte-r-swa++", "llama"])
def test_an_end_token_of_the_model_is_that_of_the_template(kind, monkeypatch):
    """The answer ends with it, and the next message is read after it and not after a second one."""
    model, tokenizer = make_model(kind), tokenizer_with()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[256] = 1.0
    reader = Reader(model, tokenizer)
    reader.read_text("[user]a<|endoftext|>\n[assistant]")
    sign = 1.0 if reader._forward([reader.waiting])[0, 256] > 0 else -1.0
    model.lm_head.weight.data *= sign
    seen = watch(model, monkeypatch)
    conversation = Conversation(Reader(model, tokenizer))
    stream = conversation.ask("a", GREEDY)
    with pytest.raises(StopIteration) as finished:
        next(stream)
    assert finished.value.value == "end"
    list(conversation.ask("b", GREEDY))
    read = tokenizer.decode([*seen, conversation.reader.waiting])
    assert read.startswith("[user]a<|endoftext|>\n[assistant]<|endoftext|>\n[user]b<|endoftext|>\n[assistant]")


@pytest.mark.parametrize("kind", ["latte-r-swa++", "llama", "gemma2"])
def test_a_stop_string_ends_the_answer_and_is_not_remembered(kind, monkeypatch):
    model, tokenizer = make_model(kind), tokenizer_with()
    conversation = Conversation(Reader(model, tokenizer))
    (whole,) = converse(conversation, ["Hello"])
    stop = whole[4:7]
    before = whole[: whole.index(stop)]
    stopped = Conversation(Reader(model, tokenizer))
    recipe = ChatRecipe(temperature=0, max_new_tokens=9, stop=[stop, "never"])
    assert converse(stopped, ["Hello"], recipe) == [before]
    seen = watch(model, monkeypatch)
    again = Reader(model, tokenizer)
    again.read_text(f"[user]Hello<|endoftext|>\n[assistant]{before}")
    del seen[:]
    assert stopped.reader.waiting == again.waiting
    got, expected = (reader._forward([reader.waiting]) for reader in (stopped.reader, again))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_text_that_may_become_a_stop_string_waits():
    class Scripted(Reader):
        def write(self, recipe, ends=()):
            yield from b"one <b> two <br> three"
            return "end"

    reader = Scripted(make(), byte_tokenizer())
    pieces = list(stream_text(reader, GenerateRecipe(stop=["<br>", "zzz"])))
    assert "".join(pieces) == "one <b> two "
    assert "<b>" in pieces  # held back until it was clear
    assert "".join(stream_text(reader, GenerateRecipe(stop=["<bx"]))) == "one <b> two <br> three"
    assert "".join(stream_text(reader, GenerateRecipe(stop=["eeX"]))).endswith("three")


def test_a_document_is_read_once_and_asked_many_times(tmp_path, monkeypatch):
    model, tokenizer = make_model("latte-r-swa++"), tokenizer_with()
    reading = Conversation(Reader(model, tokenizer), system="Answer.")
    reading.read_document(iter(["All about <|endoftext|> tokens, ", "and more."]))
    reading.save(tmp_path / "state")
    answers = []
    for _ in range(2):
        conversation = Conversation(Reader(model, tokenizer))
        conversation.load(tmp_path / "state")
        seen = watch(model, monkeypatch)
        answers.append(converse(conversation, ["What?", "Why?"]))
        assert tokenizer.decode(seen).startswith(".\n\nWhat?<|endoftext|>")  # the document's last token waited
        monkeypatch.undo()
    assert answers[0] == answers[1]
    assert 256 not in tokenizer("All about ", add_special_tokens=False)["input_ids"]
    # the same as one reading, in which the name of a special token in the document is text
    text = [*b"[system]Answer.", 256, *b"\n[user]All about <|endoftext|> tokens, and more."]
    whole = Reader(model, tokenizer)
    whole.read_ids([*text, *b"\n\nWhat?", 256, *b"\n[assistant]"])
    assert tokenizer.decode(list(whole.write(GREEDY))) == answers[0][0]
    # another system prompt can't be put before it
    with pytest.raises(UserError, match="has read its system prompt already"):
        Conversation(Reader(model, tokenizer), system="Other.").load(tmp_path / "state")


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_conversation_goes_on(kind, tmp_path):
    model, tokenizer = make_model(kind), tokenizer_with()
    conversation = Conversation(Reader(model, tokenizer))
    converse(conversation, ["a message of some length", "another"])
    conversation.save(tmp_path / "state")
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"manifest.json", "state.safetensors"}
    expected = converse(conversation, ["c", "d"])
    again = Conversation(Reader(model, tokenizer))
    again.load(tmp_path / "state")
    assert converse(again, ["c", "d"]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_can_be_taken_back(kind):
    model, tokenizer = make_model(kind), tokenizer_with()
    conversation = Conversation(Reader(model, tokenizer))
    with pytest.raises(UserError, match="no message yet"):
        conversation.take_back()
    converse(conversation, ["a"])
    start = conversation.mark()
    first = converse(conversation, ["b"])
    assert conversation.take_back() == "b"
    assert converse(conversation, ["b"]) == first
    conversation.rollback(start)
    assert converse(conversation, ["b", "c"])[0] == first[0]


def test_a_model_without_a_template_gets_plain_text(monkeypatch):
    model, tokenizer = make_model("latte-r-swa++"), tokenizer_with(None)
    seen = watch(model, monkeypatch)
    conversation = Conversation(Reader(model, tokenizer), system="A talk.")
    answers = converse(conversation, ["Hi", "Bye"])
    assert conversation.format.plain
    expected = f"<|endoftext|>A talk.\n\nUser: Hi\nAssistant:{answers[0]}\nUser: Bye\nAssistant:{answers[1]}"
    assert tokenizer.decode([*seen, conversation.reader.waiting]) == expected
    assert conversation.format.stops == ("\nUser:",)


def test_a_state_of_any_text_can_be_asked(tmp_path, monkeypatch):
    model, tokenizer = make_model("latte-r-swa++"), tokenizer_with()
    reader = Reader(model, tokenizer)
    reader.read_blocks(iter(["Once."]))
    reader.save(tmp_path / "state")
    conversation = Conversation(Reader(model, tokenizer), system="S")
    conversation.load(tmp_path / "state")
    seen = watch(model, monkeypatch)
    converse(conversation, ["a"])
    assert tokenizer.decode(seen).startswith(".\n\n[system]S<|endoftext|>\n[user]a<|endoftext|>\n[assistant]")


def test_a_message_may_name_a_special_token(monkeypatch):
    model, tokenizer = make_model("latte-r-swa++"), tokenizer_with()
    seen = watch(model, monkeypatch)
    converse(Conversation(Reader(model, tokenizer)), ["what is <|endoftext|>?"])
    assert seen[: len("[user]what is <|endoftext|>?")] == list(b"[user]what is <|endoftext|>?")


def test_templates_that_can_not_be_used_are_refused():
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    tokenizer = tokenizer_with(refusing)
    assert ChatFormat.of(tokenizer).opening == "[user]"
    with pytest.raises(UserError, match="a system prompt: no system"):
        ChatFormat.of(tokenizer, "You are")
    with pytest.raises(UserError, match="does not show every message once"):
        ChatFormat.of(tokenizer_with("nothing"))
    with pytest.raises(UserError, match="can't be used"):
        ChatFormat.of(tokenizer_with("{% if %}"))
