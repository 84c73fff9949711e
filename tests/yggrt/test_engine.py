"""Requests as a caller may mishandle them: the engine is free and clean afterwards, or says what is wrong."""

from __future__ import annotations

import gc
import threading

import pytest

from tests import toy
from yggrt.engine import Engine
from yggrt.tree import TreeShape

PROMPT = [5, 6, 7]


@pytest.fixture
def engine(verifier) -> Engine:
    return toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(8, 4, 16))


def text_engine() -> Engine:
    from tests.yggc.checkpoint_makers import CHAT_TEMPLATE, make_tokenizer
    from yggrt.text import TextCodec, TextSpec

    model = toy.make_llama(3, vocab_size=300)
    codec = TextCodec(make_tokenizer(300), TextSpec(CHAT_TEMPLATE, None, None, None, None, ()))
    return toy.make_engine(model, model, TreeShape(8, 4, 16), codec=codec, vocab_size=300)


def test_a_dropped_stream_frees_the_engine_at_once():
    engine = text_engine()
    gc.disable()  # another thread would wait for as long as no cycles are looked for
    try:
        for _piece in engine.stream("the world", max_new_tokens=50):
            break
        assert engine.generate("the world", max_new_tokens=3).stats.new_tokens == 3
    finally:
        gc.enable()


def test_a_stream_that_is_never_asked_holds_nothing(engine):
    waiting = engine.stream(PROMPT, max_new_tokens=5)
    expected = engine.generate(PROMPT, max_new_tokens=5)
    list(waiting)
    assert waiting.result is not None and waiting.result.token_ids == expected.token_ids
    list(waiting)
    assert waiting.result.token_ids == expected.token_ids
    closed = engine.stream(PROMPT)
    closed.close()
    closed.close()
    assert list(closed) == [] and closed.result is None


def test_a_stream_may_be_closed_by_another_thread_while_it_works(engine, monkeypatch):
    stream = engine.stream(PROMPT, max_new_tokens=100)
    working, closed = threading.Event(), threading.Event()
    prefill = engine.decoder.prefill

    def slow_prefill(tokens, chooser):
        working.set()
        assert closed.wait(10)
        return prefill(tokens)

    monkeypatch.setattr(engine.decoder, "prefill", slow_prefill)
    thread = threading.Thread(target=lambda: list(stream))
    thread.start()
    assert working.wait(10)
    stream.close()
    closed.set()
    thread.join()
    stream.close()
    monkeypatch.undo()
    assert engine.generate(PROMPT, max_new_tokens=4).stats.new_tokens == 4


def test_an_interrupt_while_moves_are_noted_leaves_none_for_the_next_request(engine, monkeypatch):
    expected = engine.generate(PROMPT, max_new_tokens=30).token_ids
    cache = engine.decoder.verifier_cache

    def interrupted(sources, first_target: int) -> None:
        cache._src[0], cache._dst[0] = 9, 2  # half of what owe_moves does
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "owe_moves", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, max_new_tokens=30)
    monkeypatch.undo()
    engine.decoder.reset()
    assert not cache.move_src.any() and not cache.move_dst.any()
    assert engine.generate(PROMPT, max_new_tokens=30).token_ids == expected


@pytest.mark.parametrize(
    "prompt, message",
    [
        (None, "of type NoneType"),
        (5, "of type int"),
        (b"abc", "of type bytes"),
        ({"role": "user", "content": "x"}, "of type dict"),
        (iter([1]), "accepted: a text, a list of messages or of token ids"),
        ([], "the prompt is empty"),
        ([1, 300], "token id 300"),
        ([True], "token id True"),
        ([3, {"role": "user", "content": "x"}], "message 0 must be a mapping"),
    ],
)
def test_a_prompt_of_another_kind_is_a_value_error(prompt, message):
    with pytest.raises(ValueError, match=message):
        text_engine().generate(prompt)


@pytest.mark.field(43, 12)
def test_options_that_cannot_be_served_are_value_errors(engine):
    for options, message in (
        ({"stop": None}, "stop=None"),
        ({"stop": 5}, "stop=5"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(PROMPT, **options)
    with pytest.raises(ValueError, match="leave raw out"):
        text_engine().generate([{"role": "user", "content": "x"}], raw=True)
