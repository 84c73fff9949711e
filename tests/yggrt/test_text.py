"""Text: streams join to the whole, stop conditions equal a brute-force reading, chat templates render as expected.

The oracle of streaming is the tokenizer's own decode of all tokens; that of stop conditions decodes everything again
after each token.
"""

import json
import random
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from yggrt.errors import TextError
from yggrt.text import OutputStream, StreamDecoder, TextCodec, TextSpec

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "Größe, naïve café, 你好世界, こんにちは, Привет мир, 🙂🙃👩‍👩‍👧 emoji and \U0001f1e9\U0001f1ea flags.",
    "def main():\n    print('hello')\n\n    return 0\n",
]
NO_TEMPLATE = TextSpec(None, None, None, None, None, ())


def byte_level_codec(vocab_size: int = 330, spec: TextSpec = NO_TEMPLATE) -> TextCodec:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<töol>", special=False), AddedToken("é", special=False)])
    return TextCodec(tokenizer, spec)


def byte_fallback_codec(strip: bool = True, spec: TextSpec = NO_TEMPLATE) -> TextCodec:
    """Like a sentencepiece model: `▁` for spaces, bytes for what is not in the vocabulary, a first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        "▁▁",
        "▁the",
        "▁do",
        "g",
        "s",
        ".",
        "▁a",
        "▁G",
        "rö",
        "ß",
        "e",
        "\n",
        "好",
        "🙂",
        "he",
        "lo",
        "�",
        "▁▁x",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return TextCodec(tokenizer, spec)


def word_codec(decoder: object) -> TextCodec:
    pieces = ["the", "##se", "▁the", "▁", "▁▁", "dog</w>", "s</w>", "do", ".", "!", "n't", "'s", "<0x41>", "a", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="the"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<end>"])
    return TextCodec(tokenizer, NO_TEMPLATE)


CODECS = {
    "byte-level": byte_level_codec,
    "byte-fallback": byte_fallback_codec,
    "byte-fallback-unstripped": lambda: byte_fallback_codec(strip=False),
    "metaspace": lambda: word_codec(decoders.Metaspace()),
    "metaspace-never": lambda: word_codec(decoders.Metaspace(prepend_scheme="never")),
    "word-piece": lambda: word_codec(decoders.WordPiece()),
    "bpe-suffix": lambda: word_codec(decoders.BPEDecoder()),
    "fuse-strip-2": lambda: word_codec(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ),
    "no-decoder": lambda: word_codec(None),
    "of-unknown-kind": lambda: word_codec(decoders.CTC(pad_token="the")),
    "replace-after-fuse": lambda: word_codec(decoders.Sequence([decoders.Fuse(), decoders.Replace("thea", "x")])),
}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> TextCodec:
    return CODECS[request.param]()


def random_tokens(codec: TextCodec, rng: random.Random, num_tokens: int) -> list[int]:
    """Any tokens of the vocabulary, special ones and ids past its end among them; half of them from its last ones."""
    size = codec.tokenizer.get_vocab_size() + 2
    return [rng.randrange(rng.choice([0, max(0, size - 22)]), size) for _ in range(num_tokens)]


def text_tokens(codec: TextCodec, rng: random.Random) -> list[int]:
    return codec.encode("".join(rng.choices([*"aé好🙂 ß\n", "the dog", "  ", "👩‍👩‍👧"], k=rng.randint(0, 12))))


# ---- streaming ----


@pytest.mark.field(36)
def test_the_joined_stream_is_the_full_decode_after_any_tokens(codec):
    rng = random.Random(0)
    for round_index in range(400):
        tokens = text_tokens(codec, rng) if round_index % 2 else random_tokens(codec, rng, rng.randint(0, 25))
        stream = StreamDecoder(codec)
        text = ""
        for token in tokens:
            text += stream.push(token)
        assert text + stream.flush() == codec.decode(tokens)


def test_what_was_streamed_never_changes(codec):
    rng = random.Random(1)
    for _ in range(200):
        tokens = random_tokens(codec, rng, 12)
        stream = StreamDecoder(codec)
        text = ""
        for index, token in enumerate(tokens):
            text += stream.push(token)
            continuations = [tokens[: index + 1] + random_tokens(codec, rng, length) for length in (1, 2, 3)]
            assert all(codec.decode(whole).startswith(text) for whole in continuations)


def test_invalid_utf8_streams_as_the_tokenizer_decodes_it():
    codec = byte_level_codec()
    alphabet = [
        token for token in range(codec.tokenizer.get_vocab_size()) if len(codec.tokenizer.id_to_token(token)) == 1
    ]
    rng = random.Random(2)
    for _ in range(2000):
        tokens = rng.choices(alphabet, k=rng.randint(1, 8))
        stream = StreamDecoder(codec)
        assert "".join([stream.push(token) for token in tokens] + [stream.flush()]) == codec.decode(tokens)


@pytest.mark.parametrize("make_codec", [byte_level_codec, byte_fallback_codec])
def test_a_character_split_over_tokens_is_never_shown_in_part(make_codec):
    codec = make_codec()
    tokens = codec.encode("a 👩‍👩‍👧, 世界. ")
    assert len(tokens) > 12
    stream = StreamDecoder(codec)
    pieces = [stream.push(token) for token in tokens] + [stream.flush()]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) == codec.decode(tokens)


def test_plain_words_are_streamed_token_by_token():
    codec = byte_level_codec()
    stream = StreamDecoder(codec)
    tokens = codec.encode("the dogs. the dog")
    assert [stream.push(token) for token in tokens] == [codec.decode([token]) for token in tokens]
    assert stream.flush() == ""


def test_only_a_run_of_byte_tokens_is_held_back_in_a_sentencepiece_vocabulary():
    codec = byte_fallback_codec()
    stream = StreamDecoder(codec)
    pieces = ["▁the", "▁do", "g", "<0xC3>", "<0xA9>", "▁a", "<0xE2>", "</s>", "<0x82>"]
    assert [stream.push(codec.tokenizer.token_to_id(piece)) for piece in pieces] == [
        *("the", " do", "g", "", "", "é a", "", "", "")
    ]
    assert stream.flush() == "��"


def test_an_unfinished_character_comes_as_a_replacement_with_flush():
    codec = byte_level_codec()
    tokens = codec.encode("🙂")[:-1]
    stream = StreamDecoder(codec)
    assert "".join(stream.push(token) for token in tokens) == ""
    assert stream.flush() == codec.decode(tokens) == "�"


@pytest.mark.parametrize("make_codec", [byte_level_codec, byte_fallback_codec])
def test_the_work_per_token_does_not_grow_with_the_text(make_codec):
    codec = make_codec()
    tokens = codec.encode("the dogs. " * 20)

    def seconds(repeats: int) -> float:
        best = float("inf")
        for _ in range(3):
            output = OutputStream(codec, frozenset(), ("never",), 10**9)
            started = time.perf_counter()
            for _ in range(repeats):
                for token in tokens:
                    output.push(token)
            best = min(best, (time.perf_counter() - started) / repeats)
        return best

    assert seconds(50) < 5 * seconds(5)


# ---- stop conditions ----


def oracle(
    codec: TextCodec, tokens: list[int], eos_ids: frozenset[int], stop_strings: tuple[str, ...], max_new_tokens: int
) -> tuple[list[int], str, str | None]:
    """Token ids, text and finish reason, decoding everything again after each token."""
    if max_new_tokens == 0:
        return [], "", "length"
    for count in range(1, len(tokens) + 1):
        text = codec.decode(tokens[:count])
        if tokens[count - 1] in eos_ids:
            return tokens[:count], text, "eos"
        places = [text.find(stop) for stop in stop_strings if stop in text]
        if places:
            return tokens[:count], text[: min(places)], "stop"
        if count == max_new_tokens:
            return tokens[:count], text, "length"
    return tokens, codec.decode(tokens), None


def run(output: OutputStream, tokens: list[int]) -> list[str]:
    """Push tokens until finished, then end the output; the pieces as they came."""
    pieces = []
    for token in tokens:
        if output.finished:
            break
        assert output.push(token) is output.finished
        pieces.append(output.take_piece())
    output.finish()
    return [*pieces, output.take_piece()]


def random_stop_strings(codec: TextCodec, tokens: list[int], rng: random.Random) -> tuple[str, ...]:
    """Pieces of the text itself, of its characters mixed up, and other strings; without U+FFFD."""
    text = codec.decode(tokens).replace("�", "")
    stops = []
    for _ in range(rng.randint(0, 3)):
        kind = rng.randrange(3)
        if kind == 0 and text:
            start = rng.randrange(len(text))
            stops.append(text[start : start + rng.randint(1, 6)])
        elif kind == 1 and text:
            stops.append("".join(rng.choices(text, k=rng.randint(1, 3))))
        else:
            stops.append(rng.choice(["the", "\n\n", "🙂", " ", "zzz"]))
    return tuple(stops)


def test_the_output_equals_the_brute_force_reading(codec):
    rng = random.Random(3)
    reasons = set()
    for round_index in range(600):
        tokens = text_tokens(codec, rng) if round_index % 2 else random_tokens(codec, rng, rng.randint(0, 15))
        eos_ids = frozenset(rng.choices([*tokens, 10**6], k=rng.randint(0, 2)))
        stop_strings = random_stop_strings(codec, tokens, rng)
        max_new_tokens = rng.choice([0, 1, 2, len(tokens), len(tokens) + 1, 10**6])
        output = OutputStream(codec, eos_ids, stop_strings, max_new_tokens)
        pieces = run(output, tokens)
        expected_ids, expected_text, expected_reason = oracle(codec, tokens, eos_ids, stop_strings, max_new_tokens)
        assert (list(output.token_ids), output.text, output.finish_reason) == (
            expected_ids,
            expected_text,
            expected_reason,
        )
        assert "".join(pieces) == output.text
        reasons.add(output.finish_reason)
    assert reasons == {"eos", "stop", "length", None}


@pytest.mark.field(1)
def test_each_token_in_turn_as_eos_ends_the_output_at_its_first_occurrence():
    codec = byte_level_codec()
    tokens = codec.encode("the dog sleeps; the fox does not.")
    for eos in set(tokens):
        output = OutputStream(codec, frozenset({eos}), (), 1000)
        run(output, tokens)
        assert list(output.token_ids) == tokens[: tokens.index(eos) + 1]
        assert output.finish_reason == "eos"


@pytest.mark.field(3)
@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_the_budget_is_exact(budget):
    codec = byte_level_codec()
    output = OutputStream(codec, frozenset(), (), budget)
    run(output, codec.encode("the dog sleeps; the fox does not."))
    assert (output.num_tokens, output.finish_reason) == (budget, "length")


@pytest.mark.field(1, 2)
def test_eos_goes_before_a_stop_string_and_that_before_the_length():
    codec = byte_level_codec()
    (token,) = codec.encode("x")
    for eos_ids, stop_strings, reason, text in [
        ({token}, ("x",), "eos", "x"),
        (set(), ("x",), "stop", ""),
        (set(), (), "length", "x"),
    ]:
        output = OutputStream(codec, frozenset(eos_ids), stop_strings, 1)
        assert output.push(token)
        assert (output.finish_reason, output.text) == (reason, text)


def test_the_first_of_several_stop_strings_in_one_token_cuts():
    codec = word_codec(None)
    output = OutputStream(codec, frozenset(), ("e", "he", "zz"), 10)
    assert output.push(codec.tokenizer.token_to_id("the"))
    assert output.text == "t"


def test_a_possible_start_of_a_stop_string_is_held_back_until_it_is_clear():
    codec = byte_level_codec()
    a, b, c = (codec.encode(letter)[0] for letter in "abc")
    output = OutputStream(codec, frozenset(), ("aab",), 100)
    pieces = []
    for token in (a, a, a, c, a, a, a, b):
        output.push(token)
        pieces.append(output.take_piece())
    assert pieces == ["", "", "a", "aac", "", "", "a", ""]
    assert (output.text, output.finish_reason) == ("aaaca", "stop")


def test_ending_an_output_early_gives_its_text_and_no_reason():
    codec = byte_level_codec()
    output = OutputStream(codec, frozenset(), ("dog!",), 100)
    for token in codec.encode("the dog"):
        output.push(token)
    output.finish()
    output.finish()
    assert (output.text, output.finish_reason, output.finished) == ("the dog", None, True)
    with pytest.raises(ValueError, match="finished"):
        output.push(1)


def test_without_a_tokenizer_ids_and_conditions_still_work():
    output = OutputStream(None, frozenset({7}), (), 10)
    assert [output.push(token) for token in (1, 2, 7)] == [False, False, True]
    assert (output.token_ids, output.text, output.take_piece(), output.finish_reason) == ((1, 2, 7), "", "", "eos")


@pytest.mark.parametrize(
    "codec_of, stop_strings, max_new_tokens",
    [
        (byte_level_codec, ("",), 1),
        (byte_level_codec, ("a", ""), 1),
        (byte_level_codec, "stop", 1),
        (byte_level_codec, (b"a",), 1),
        (byte_level_codec, (), -1),
        (lambda: None, ("a",), 1),
    ],
)
def test_impossible_conditions_are_bad_arguments(codec_of, stop_strings, max_new_tokens):
    with pytest.raises(ValueError):
        OutputStream(codec_of(), frozenset(), stop_strings, max_new_tokens)


# ---- prompts ----


CHATML = (
    "{% for message in messages %}\n    {{- '<|' + message.role + '|>' + message.content + eos_token }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def with_template(template: str | None) -> TextCodec:
    return byte_fallback_codec(spec=TextSpec(template, "<s>", "</s>", None, None, (2,)))


def test_a_raw_prompt_gets_the_tokenizers_special_tokens_and_a_chat_only_its_templates():
    codec = with_template("{{ bos_token }}{{ messages[0].content }}")
    assert codec.encode("a")[0] == 1
    tokens = codec.encode_chat([{"role": "user", "content": "▁the"}])
    assert tokens.count(1) == 1
    assert tokens == codec.tokenizer.encode("<s>▁the", add_special_tokens=False).ids


def test_a_chat_renders_as_hugging_face_renders_it():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Say "é" <b>.'}]
    templates = [
        CHATML,
        "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ unk_token }}{{ tools is none }}{{ documents is none }}",
        "{% generation %}{{ messages[0].content | trim }}{% endgeneration %}{{ strftime_now('%Y') }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ]
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    for template in templates:
        expected, _ = rendering.render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
        assert with_template(template).render_chat(messages) == expected[0]


def test_without_a_template_the_error_says_what_to_do():
    with pytest.raises(TextError, match="no chat template: give a raw prompt instead \\(yggrt run --raw\\)"):
        with_template(None).encode_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        {"role": "user", "content": "Hi"},
        [None],
        ["Hi"],
        [{"content": "Hi"}],
        [{"role": "user"}],
        [{"role": None, "content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": "Hi", "tool_calls": []}],
        [{"role": "user", "content": "Hi", 3: "x"}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_messages_of_another_shape_are_bad_arguments(messages):
    with pytest.raises(ValueError):
        with_template(CHATML).encode_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{% for %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_gives_one_line(template):
    with pytest.raises(TextError, match="the chat template refuses these messages: .") as caught:
        with_template(template).encode_chat([{"role": "user", "content": "Hi"}])
    assert "\n" not in str(caught.value)


@pytest.mark.field(38)
def test_a_prompt_that_is_not_text_is_a_bad_argument():
    for prompt in (None, b"bytes", 3, ["a"], "\ud800"):
        with pytest.raises(ValueError, match="prompt"):
            byte_level_codec().encode(prompt)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t", "the <s> dog", "ø 🙂", "x" * 1000])
def test_prompts_survive_the_round_trip(prompt):
    codec = byte_level_codec()
    assert codec.decode(codec.encode(prompt)) == prompt.replace("<s>", "")


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply():
    tokenizer = byte_level_codec().tokenizer
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    codec = TextCodec(tokenizer, NO_TEMPLATE)
    assert codec.decode(codec.encode("the lazy dog sleeps")) == "the lazy dog sleeps"


def test_a_tokenizer_file_is_read_or_refused_in_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in (None, "", "{}", json.dumps({"version": "1.0", "model": {"type": "Unheard"}})):
        if content is not None:
            path.write_text(content)
        with pytest.raises(TextError, match="cannot read the tokenizer .*tokenizer.json: .") as caught:
            TextCodec.from_file(path, NO_TEMPLATE)
        assert "\n" not in str(caught.value)
    byte_level_codec().tokenizer.save(str(path))
    assert TextCodec.from_file(path, NO_TEMPLATE).encode("the dog") == byte_level_codec().encode("the dog")
