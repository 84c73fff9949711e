"""`yggc distill` on toy verifiers: it learns, goes on where it was stopped, and writes a folder that loads."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import yggc.distill as distill_module
from yggc import distill_data, distill_training
from yggc.checkpoints import load_model, open_checkpoint
from yggc.distill import DistillOptions, distill, is_enough_text, product_dtype
from yggc.distill_data import (
    ROLE_ANSWER,
    ROLE_GIVEN,
    ROLE_USER,
    Decoder,
    Opening,
    PromptSource,
    chat_format,
    fill_slots,
    read_openings,
    span_parts,
    top_tokens,
)
from yggc.distill_training import Trainer, _head_terms, _HeadLoss, drafter_config, draw_columns, make_drafter
from yggrt.target import detect_target

VOCABULARY = 68
EOS = 1
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def verifier_folder(tmp_path_factory) -> Path:
    """A random 2-layer Llama whose output layer is scaled up, so that it has likely tokens to learn."""
    folder = tmp_path_factory.mktemp("verifier")
    characters = [chr(code) for code in range(ord(" "), ord("z") + 1)][: VOCABULARY - 5]
    words = ["<unk>", "</s>", "<u>", "<a>", "\n", *characters]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<unk>", "</s>", "<u>", "<a>"])
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(25)
        model.model.embed_tokens.weight.mul_(20)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def options(verifier_folder, tmp_path) -> DistillOptions:
    prompts = tmp_path / "questions.txt"
    prompts.write_text("".join(f"{letter * 3} {letter}?\n" for letter in "abcdefghijklmnopqrst"))
    return DistillOptions(
        verifier=str(verifier_folder),
        output=tmp_path / "drafter",
        prompts=prompts,
        tokens=6000,
        layers=1,
        hidden=32,
        device="cpu",
        rows=8,
        length=128,
        batch_tokens=512,
    )


@pytest.fixture
def checkpoint(verifier_folder):
    return open_checkpoint(str(verifier_folder))


def test_top_tokens_equals_topk():
    generator = torch.Generator().manual_seed(0)
    for width in (40, 64, 1000, 3000):
        logits = torch.randn(5, width, generator=generator)
        values, ids = top_tokens(logits, 9)
        expected = logits.topk(9)
        assert torch.equal(values, expected.values)
        assert torch.equal(logits.gather(1, ids), expected.values)


def test_slots_are_filled_from_their_words():
    import random

    text = fill_slots("{name} has {number} {name}", {"name": ["{other}"], "other": ["x"]}, random.Random(0))
    assert text.startswith("x has ") and text.endswith(" x") and text.split()[2].isdigit()


def test_chat_format_is_read_off_the_template(checkpoint):
    form = chat_format(checkpoint)
    assert form.before == (2,)
    assert form.to_answer == (1, 3)
    assert form.to_user == (1, 2)


def test_prompts_depend_on_seed_and_block_alone(checkpoint):
    tables = [PromptSource(checkpoint, None, seed).draw(block, 6, 0, 100) for seed, block in ((0, 1), (0, 1), (0, 2))]
    assert torch.equal(tables[0].tokens, tables[1].tokens)
    assert tables[0].tokens.shape != tables[2].tokens.shape or not torch.equal(tables[0].tokens, tables[2].tokens)
    assert tables[0].num_prompts == 6


def test_a_block_is_what_the_verifier_says(checkpoint, monkeypatch):
    """Teacher probabilities equal a plain forward pass over each conversation, and greedy rows follow the first one."""
    monkeypatch.setattr(distill_data, "ANSWER_LIMIT", 20)
    monkeypatch.setattr(distill_data, "SPAN", 64)  # the last of four is not filled
    verifier = load_model(checkpoint, torch.float32)
    table = PromptSource(checkpoint, None, 0).draw(0, 12, 0, 60)
    block = Decoder(verifier, checkpoint.eos_ids, (0, 1, 2, 3), 8, 250).decode(table, 0)
    reference = load_model(checkpoint, torch.float32)
    conversations = 0
    for row in range(8):
        for start in block.starts[row].unique().tolist():
            places = (block.starts[row] == start).nonzero()[:, 0]
            assert places[0] == start and len(places) == places[-1] - start + 1
            tokens = block.tokens[row, places].long()
            expected = reference(tokens[None]).logits[0].log_softmax(-1)
            kept = expected.gather(1, block.top_ids[row, places].long())
            torch.testing.assert_close(kept, block.top_logprobs[row, places].float(), atol=2e-2, rtol=2e-3)
            answered = (block.roles[row, places[:-1]] == ROLE_ANSWER).nonzero()[:, 0]
            if row == 0:
                assert torch.equal(tokens[answered + 1], block.top_ids[row, places][answered, 0].long())
            conversations += 1
    assert conversations > 8
    assert {ROLE_GIVEN, ROLE_USER, ROLE_ANSWER} == set(block.roles.unique().tolist())


@pytest.mark.parametrize("begin, end", [(0, 5), (0, 256), (250, 260), (256, 300), (3, 700)])
def test_span_parts_are_the_slots_in_order(begin, end):
    slots = [span * 256 + slot for span, inside in span_parts(begin, end) for slot in range(256)[inside]]
    assert slots == list(range(begin, end))


def test_a_block_gone_on_with_equals_an_unbroken_one(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(distill_data, "SPAN", 32)
    table = PromptSource(checkpoint, None, 0).draw(0, 12, 0, 60)

    def decoder() -> Decoder:
        return Decoder(load_model(checkpoint, torch.float32), checkpoint.eos_ids, (0, 1, 2, 3), 4, 96)

    whole = decoder().decode(table, 5)
    broken = decoder()
    step, slots = broken._step, iter(range(41))
    monkeypatch.setattr(broken, "_step", lambda extent: (next(slots), step(extent)))
    path = tmp_path / "unfinished"
    with pytest.raises(StopIteration):
        broken.decode(table, 5, path)
    assert len(list(path.iterdir())) == 41  # a file each time, since no second need pass between two
    other = Path(shutil.copytree(path, tmp_path / "other"))
    assert torch.equal(decoder().decode(table, 6, other).tokens, decoder().decode(table, 6).tokens)  # not its own file
    again = decoder()
    monkeypatch.setattr(again, "_begin", None)
    again = again.decode(table, 5, path)
    for field in fields(whole):
        assert torch.equal(getattr(whole, field.name), getattr(again, field.name))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_head_loss_equals_autograd(dtype, tolerance):

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(40, generator=generator)[:5] for _ in range(12)])
    target = torch.rand(12, 5, generator=generator) / 5
    scale = torch.rand(12, generator=generator)
    loss = _HeadLoss.apply(hidden.to(dtype), weight, ids, target, scale, 5, _head_terms)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    log_q = torch.log_softmax(hidden @ weight.T, dim=1).gather(1, ids)
    expected = -(log_q * target * scale[:, None]).sum()
    torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_drawn_columns_stand_for_the_whole_vocabulary():
    torch.manual_seed(0)
    logits, wanted = torch.randn(400), torch.tensor([[3, 8], [8, 120]])
    generator = torch.Generator().manual_seed(1)
    sums = []
    for _ in range(300):
        columns = draw_columns(wanted, 400, 60, generator)
        assert columns.ids[:3].tolist() == [3, 8, 120] and len(set(columns.ids.tolist())) == 63
        sums.append((logits[columns.ids] + columns.bias).exp().sum())
    assert torch.stack(sums).mean().item() == pytest.approx(logits.exp().sum().item(), rel=0.02)
    everything = draw_columns(wanted, 400, 1000, generator)
    assert sorted(everything.ids.tolist()) == list(range(400)) and not everything.bias.any()


@pytest.mark.parametrize(
    "instruction_set, dtype",
    [(("avx512_vnni",), torch.float32), (("avx512_vnni", "avx512_bf16"), torch.bfloat16), (("bf16",), torch.bfloat16)],
)
def test_the_verifier_writes_in_bfloat16_where_the_cpu_multiplies_it(monkeypatch, instruction_set, dtype):
    target = replace(detect_target(), instruction_set=instruction_set)
    monkeypatch.setattr("yggc.distill.detect_target", lambda: target)
    assert product_dtype(torch.device("cpu")) == dtype
    assert product_dtype(torch.device("cuda")) == torch.bfloat16


def test_a_distilled_drafter_beats_an_untrained_one_and_loads(options, checkpoint, monkeypatch):
    lines = []
    report = distill(options, lines.append)
    monkeypatch.setattr(distill_training, "HELD_OUT_SHARE", 0.9)
    assert {value.dtype for value in load_file(report.folder / "model.safetensors").values()} == {torch.bfloat16}
    drafter = AutoModelForCausalLM.from_pretrained(report.folder)
    assert drafter.config.num_hidden_layers == 1 and drafter.config.hidden_size == 32
    assert Tokenizer.from_file(str(report.folder / "tokenizer.json")).get_vocab() == checkpoint.tokenizer.get_vocab()
    assert open_checkpoint(str(report.folder)).chat_template == TEMPLATE
    verifier = load_model(checkpoint, torch.float32)
    config = drafter_config(1, 32, VOCABULARY, 256, None, (EOS,), 1e5)
    untrained = make_drafter(config, verifier.get_input_embeddings().weight, 0)
    table = PromptSource(checkpoint, None, 9).draw(0, 12, 0, 60)
    block = Decoder(verifier, checkpoint.eos_ids, (0, 1, 2, 3), 50, 128).decode(table, 9)
    first, _ = Trainer(untrained, [block], 0, 512, torch.float32).agreement()
    learned, _ = Trainer(drafter, [block], 0, 512, torch.float32).agreement()
    assert learned > first + 0.15
    assert report.agreement_top1 > 0.2 and report.agreement_top8 >= report.agreement_top1
    assert any("tokens/s" in line and "left" in line for line in lines)
    assert not (options.output.parent / "drafter.distill").exists()
    again = replace(options, output=options.output.with_name("more"), start=report.folder, layers=None, hidden=None)
    further = distill(again)
    assert (further.layers, further.hidden) == (1, 32)


@pytest.mark.parametrize("layers, hidden", [(1, 32), (2, 128)])  # the second has a copying head
def test_a_run_gone_on_with_gives_the_weights_of_an_unbroken_one(options, layers, hidden, monkeypatch, tmp_path):
    options = replace(options, layers=layers, hidden=hidden)

    class Stop(Exception):
        pass

    distill(options)
    monkeypatch.setattr(distill_module, "SAVE_SECONDS", 0.0)  # after every step, however fast
    broken = replace(options, output=tmp_path / "again")
    stops = iter([3, 6, 11])
    calls = {"left": next(stops)}

    def stop_now_and_then(line: str) -> None:
        calls["left"] -= 1
        if calls["left"] == 0:
            raise Stop

    for _ in range(4):
        try:
            distill(broken, stop_now_and_then)
            break
        except Stop:
            assert not broken.output.exists()
            calls["left"] = next(stops, 10**9)
    left, right = (load_file(folder / "model.safetensors") for folder in (options.output, broken.output))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_killed_at_any_time_a_run_leaves_no_output_and_goes_on(options, tmp_path):
    output = tmp_path / "killed"
    program = (
        "import sys, pathlib; from yggc.distill import DistillOptions, distill; import yggc.distill as module\n"
        "module.SAVE_SECONDS = 0.0\n"
        f"distill(DistillOptions(verifier={options.verifier!r}, output=pathlib.Path({str(output)!r}), tokens=200_000, "
        "layers=1, hidden=32, device='cpu', rows=8, length=128, batch_tokens=512), "
        "lambda line: print(line, flush=True))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert "text: block 1" in process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not output.exists()
    assert list((tmp_path / "killed.distill").glob("block-*.safetensors"))
    other = replace(options, output=output, seed=1)
    with pytest.raises(ValueError, match="other options"):
        distill(other)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": None}, "either hours or tokens"),
        ({"hours": 1.0}, "either hours or tokens"),
        ({"tokens": None, "hours": -1.0}, "hours is -1"),
        ({"tokens": 0}, "tokens is 0"),
        ({"layers": None}, "both layers and hidden"),
        ({"hidden": 100}, "hidden is 100"),
        ({"layers": 0}, "layers is 0"),
        ({"start": Path("drafter")}, "not both"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        replace(options, **change)
    assert "\n" not in str(caught.value)


def test_bad_devices_prompts_and_outputs_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match="device"):
        distill(replace(options, device="tpu"))
    options.output.mkdir()
    with pytest.raises(ValueError, match="exists"):
        distill(options)
    bad = tmp_path / "prompts.jsonl"
    bad.write_text('{"text": "hello"}\n{"text": "hello", "colour": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_openings(bad)
    bad.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_openings(bad)
    with pytest.raises(ValueError, match="cannot read"):
        read_openings(tmp_path / "absent")


@pytest.mark.parametrize("next_tokens, enough", [(100, False), (400, True)])
def test_a_long_block_is_not_begun_where_little_time_is_left(next_tokens, enough):
    assert is_enough_text(200, 200, next_tokens, 700) == enough  # a token took a second; 315 seconds are for text
    assert not is_enough_text(200, 0, next_tokens, 1)  # something must be there to learn from


def test_given_prompts_are_used(checkpoint, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('plain words\n{"text": "open", "open": true, "maximum": 9, "turns": 2}\n')
    assert read_openings(path) == [Opening("plain words"), Opening("open", open=True, maximum=9, turns=2)]
    table = PromptSource(checkpoint, path, 0).draw(0, 40, 0, 60)
    plain = [*chat_format(checkpoint).before, *checkpoint.tokenizer.encode("plain words").ids, 1, 3]
    assert any(row[: len(plain)] == plain for row in table.tokens.tolist())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_steps_are_replayed_and_the_drafter_loads(options, checkpoint):
    """Teacher probabilities of a block made by graphs are those of a plain forward pass on the CPU."""
    table = PromptSource(checkpoint, None, 0).draw(0, 12, 0, 60)
    verifier = load_model(checkpoint, torch.float32).cuda()
    block = Decoder(verifier, checkpoint.eos_ids, (0, 1, 2, 3), 8, 250).decode(table, 0)
    places = (block.starts[0] == 0).cpu()
    expected = (
        load_model(checkpoint, torch.float32)(block.tokens[0].cpu()[places].long()[None]).logits[0].log_softmax(-1)
    )
    kept = expected.gather(1, block.top_ids[0].cpu()[places].long())
    torch.testing.assert_close(kept, block.top_logprobs[0].cpu()[places].float(), atol=2e-2, rtol=2e-3)
    report = distill(replace(options, device="cuda"))
    assert AutoModelForCausalLM.from_pretrained(report.folder).config.hidden_size == 32
