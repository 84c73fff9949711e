"""Opening and loading checkpoints: what is accepted comes out complete, what is not gets one line."""

import dataclasses
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.yggc.checkpoint_makers import (
    CHAT_TEMPLATE,
    edit_json,
    make_llama,
    make_tokenizer,
    write_checkpoint,
    write_llama,
)
from yggc.checkpoints import Checkpoint, load_model, open_checkpoint
from yggc.model_support import causal_class, refuse_unsupported
from yggc.text_files import SpecialTokens, generation_defaults, generation_settings
from yggrt.errors import CheckpointError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("checkpoint") / "tiny-llama", seed=0)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny-llama"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", make_llama(0), make_tokenizer(), max_shard_size="60KB")


def refusal(source: Path | str, load: bool = False) -> str:
    """The one line that opening (or loading) is refused with."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_checkpoint(str(source))
        if load:
            load_model(checkpoint, torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


def resave(folder: Path, **changes: torch.Tensor | None) -> None:
    """Writes the weights again with some exchanged; None removes one."""
    weights = load_file(folder / "model.safetensors") | {
        key.replace("__", "."): value for key, value in changes.items()
    }
    save_file({key: value for key, value in weights.items() if value is not None}, folder / "model.safetensors")


# What is found in a folder


def test_a_folder_is_opened_without_weights(original: Path) -> None:
    checkpoint = open_checkpoint(str(original))
    assert (checkpoint.kind, checkpoint.path, checkpoint.name) == ("folder", original, "tiny-llama")
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.context) == (1, (2,), 128)
    assert checkpoint.special_tokens == SpecialTokens(bos="<|im_start|>", eos="<|im_end|>", pad="<|endoftext|>")
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.dtype == "float32"
    assert checkpoint.num_parameters == make_llama(0).num_parameters()
    assert checkpoint.weight_bytes == (original / "model.safetensors").stat().st_size
    assert checkpoint.generation_defaults == ()
    assert checkpoint.tokenizer.encode("the tree<|im_end|>").ids[-1] == 2


def test_negative_end_of_sequence_ids_stand_for_none(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 2]}))
    assert open_checkpoint(str(folder)).eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    assert open_checkpoint(str(folder)).eos_ids == ()


def test_generation_settings_that_change_the_text_are_kept(folder: Path) -> None:
    settings = {"eos_token_id": [5, 2], "repetition_penalty": 1.1, "temperature": 1.0, "suppress_tokens": [3, 4]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.eos_ids == (2, 5)
    assert checkpoint.generation_defaults == (("repetition_penalty", 1.1), ("suppress_tokens", (3, 4)))


def test_without_a_generation_config_the_model_configuration_counts(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=[7, 2], repetition_penalty=1.2)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.eos_ids == (2, 7)
    assert checkpoint.generation_defaults == (("repetition_penalty", 1.2),)


@pytest.mark.field(12)
@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, (0.0, 0, 1.0, 0.0, 1.0, ())),
        ({"do_sample": True}, (1.0, 50, 1.0, 0.0, 1.0, ())),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}, (0.7, 20, 0.8, 0.0, 1.0, ())),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, (0.0, 0, 1.0, 0.0, 1.1, ())),
        ({"do_sample": True, "top_p": 7, "num_beams": 4}, (0.0, 0, 1.0, 0.0, 1.0,
                                                          ("do_sample=True", "num_beams=4", "top_p=7"))),
        ({"suppress_tokens": [3, 4]}, (0.0, 0, 1.0, 0.0, 1.0, ("suppress_tokens=(3, 4)",))),
    ],
)  # fmt: skip
def test_generation_settings_have_transformers_meaning(given, expected):
    found = generation_settings(generation_defaults(given))
    assert dataclasses.astuple(found) == expected


@pytest.mark.parametrize(
    "template, expected",
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}], "usual"),
        ([{"name": "only", "template": "single"}], "single"),
        (None, None),
    ],
)
def test_chat_template_of_the_tokenizer_config(folder: Path, template: object, expected: str | None) -> None:
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    assert open_checkpoint(str(folder)).chat_template == expected


def test_special_tokens_written_as_objects_or_in_the_older_file(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", bos_token={"content": "<|im_start|>", "lstrip": False}, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "bos_token": "other"}))
    tokens = open_checkpoint(str(folder)).special_tokens
    assert (tokens.bos, tokens.eos) == ("<|im_start|>", "<|endoftext|>")


def test_tokens_that_only_the_tokenizer_config_lists_are_added(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=310)
    listed = {"2": {"content": "<|im_end|>"}, "300": {"content": "<think>", "special": False, "normalized": False}}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    assert open_checkpoint(str(folder)).tokenizer.encode("a<think>").ids[-1] == 300
    listed["305"] = {"content": "<gap>"}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    assert "'<gap>' the id 305" in refusal(folder)


def test_truncation_and_padding_of_a_tokenizer_are_switched_off(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = "the world tree holds nine worlds"
    assert open_checkpoint(str(folder)).tokenizer.encode(text).ids == make_tokenizer().encode(text).ids


def test_a_slow_tokenizer_is_converted(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", bos_token=None, eos_token="<|im_end|>")
    text = "the world tree, in 1066"
    assert open_checkpoint(str(folder)).tokenizer.encode(text).ids == make_tokenizer().encode(text).ids


# Weights


def test_loaded_logits_equal_transformers(original: Path) -> None:
    model = load_model(open_checkpoint(str(original)), torch.float32)
    ids = torch.arange(3, 40).unsqueeze(0)
    assert torch.equal(model(ids).logits, make_llama(0)(ids).logits)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_sharded_checkpoint_loads(sharded: Path) -> None:
    checkpoint = open_checkpoint(str(sharded))
    assert checkpoint.num_parameters == make_llama(0).num_parameters()
    ids = torch.arange(3, 20).unsqueeze(0)
    assert torch.equal(load_model(checkpoint, torch.float32)(ids).logits, make_llama(0)(ids).logits)


def test_the_dtype_is_the_one_asked_for(original: Path) -> None:
    assert load_model(open_checkpoint(str(original)), torch.bfloat16).dtype == torch.bfloat16


def test_loading_is_silent_and_leaves_settings_alone(original: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load_model(open_checkpoint(str(original)), torch.float32)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


@pytest.mark.field(15)
def test_a_missing_head_that_is_not_tied_is_named(folder: Path) -> None:
    resave(folder, lm_head__weight=None)
    assert "lacks tensor lm_head.weight (tie_word_embeddings is false" in refusal(folder, load=True)


@pytest.mark.field(15)
def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    model = load_model(open_checkpoint(str(write_llama(tmp_path / "t", 3, tie_word_embeddings=True))), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(3, 20).unsqueeze(0)
    assert torch.equal(model(ids).logits, make_llama(3, tie_word_embeddings=True)(ids).logits)


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"model__layers__1__mlp__up_proj__weight": None}, "lacks tensor model.layers.1.mlp.up_proj.weight"),
        (
            {"model__norm__weight": torch.ones(31)},
            "tensor model.norm.weight has shape (31,), LlamaForCausalLM needs (32,)",
        ),
        ({"model__layers__2__extra__weight": torch.ones(3)}, "holds tensor model.layers.2.extra.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, changes: dict[str, torch.Tensor | None], part: str) -> None:
    resave(folder, **changes)
    assert part in refusal(folder, load=True)


def test_harmless_buffers_in_old_checkpoints_are_no_fault(folder: Path) -> None:
    resave(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load_model(open_checkpoint(str(folder)), torch.float32)


def test_a_truncated_file_is_found_before_loading(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "truncated" in refusal(folder)
    path.write_bytes(path.read_bytes()[:50])
    assert "truncated" in refusal(folder)
    path.write_bytes(b"")
    assert "truncated" in refusal(folder)


def test_a_header_that_announces_too_much_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert "truncated or no safetensors file" in refusal(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard.name} is missing" in refusal(sharded)


def test_a_shard_without_the_tensor_it_should_hold_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = sorted(set(content["weight_map"].values()))
    moved = next(key for key, value in content["weight_map"].items() if value == names[1])
    content["weight_map"][moved] = names[0]
    index.write_text(json.dumps(content))
    assert f"lacks tensor {moved}" in refusal(sharded)


@pytest.mark.field(34)
@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors", "..\\x"])
def test_an_index_that_leaves_the_folder_is_refused(sharded: Path, name: str) -> None:
    shutil.copy(next(sharded.glob("model-*.safetensors")), sharded.parent / "outside.safetensors")
    edit_json(sharded / "model.safetensors.index.json", weight_map={"lm_head.weight": name})
    assert "leaves the folder" in refusal(sharded)


@pytest.mark.field(34)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_that_leaves_a_plain_folder_is_refused(folder: Path, name: str) -> None:
    outside = folder.parent / name
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    assert f"is a link to {outside}, outside the folder" in refusal(folder)


@pytest.mark.field(34)
def test_a_link_within_the_folder_and_a_linked_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    (tmp_path / "alias").symlink_to(folder)
    load_model(open_checkpoint(str(tmp_path / "alias")), torch.float32)


@pytest.mark.field(37)
def test_pickled_weights_are_refused_unopened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    trap = folder / "ran"
    payload = f"cos\nsystem\n(S'touch {trap}'\ntR.".encode()
    (folder / "pytorch_model.bin").write_bytes(payload)
    message = refusal(folder, load=True)
    assert "only as pickles (pytorch_model.bin)" in message
    assert "save_pretrained" in message
    assert not trap.exists()


def test_quantised_weights_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "is quantised (gptq)" in refusal(folder)
    edit_json(folder / "config.json", quantization_config=None)
    save_file({"weight": torch.zeros(64, dtype=torch.int8)}, folder / "model.safetensors")
    assert "weights of type I8" in refusal(folder)


# Other things than a checkpoint


def test_what_is_not_there_gets_a_line(tmp_path: Path) -> None:
    for source in (
        str(tmp_path / "absent"),
        "./absent",
        "one/two/three",
        "absent.gguf",
        "~/absent-model",
        "~nobody-x/m",
    ):
        assert f"{source} does not exist; accepted: a folder" in refusal(source)
    assert "an empty path does not exist" in refusal("")


def test_what_may_not_be_read_gets_a_line(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    assert refusal(original).endswith("tiny-llama cannot be read: Permission denied.")


def test_other_files_and_folders_get_a_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is empty" in refusal(tmp_path / "empty")
    assert "Give the folder that it lies in" in refusal(folder / "model.safetensors")
    (tmp_path / "notes.txt").write_text("words")
    assert "is a file, but no GGUF file" in refusal(tmp_path / "notes.txt")
    (folder / "config.json").rename(folder / "params.json")
    assert "has no config.json" in refusal(folder)
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert "It holds model.gguf: give that file itself" in refusal(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "holds an adapter" in refusal(folder)


def test_a_folder_without_weights_or_tokenizer_gets_a_line(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "elsewhere")
    assert "has no tokenizer" in refusal(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert "is no tokenizer" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "[" * 100_000])
def test_a_damaged_configuration_gets_a_line(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    assert "config.json" in refusal(folder)


def test_a_configuration_with_impossible_values_gets_a_line(folder: Path) -> None:
    edit_json(folder / "config.json", hidden_size="wide")
    assert "tiny-llama" in refusal(folder, load=True)
    edit_json(folder / "config.json", hidden_size=30, num_attention_heads=4)
    assert "tiny-llama" in refusal(folder, load=True)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "token '<extra>' with id 300, the model only ids 0 to 299" in refusal(folder)


# Kinds of model


@pytest.mark.field(37)
def test_code_that_comes_with_a_checkpoint_never_runs(folder: Path) -> None:
    trap = folder / "ran"
    (folder / "modeling_trap.py").write_text(f"open({str(trap)!r}, 'w')\nclass Trap: ...\n")
    names = {"AutoConfig": "modeling_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    edit_json(folder / "config.json", auto_map=names)
    model = load_model(open_checkpoint(str(folder)), torch.float32)  # transformers knows llama itself
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    edit_json(folder / "config.json", model_type="trap")
    assert "'trap': it needs Python code that comes with the checkpoint" in refusal(folder)
    assert not trap.exists()


def test_an_unknown_model_type_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="llama9000")
    assert "'llama9000'" in refusal(folder)
    edit_json(folder / "config.json", model_type=None)
    assert "model_type" in refusal(folder)


def test_a_model_saved_without_a_language_head_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "was saved as LlamaForSequenceClassification" in refusal(folder)


REFUSED_KINDS = {
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "bert": "both directions",
    "gemma3": "images or sound",
    "mamba": "cannot be rewound",
    "mamba2": "cannot be rewound",
    "rwkv": "cannot be rewound",
    "recurrent_gemma": "cannot be rewound",
    "jamba": "cannot be rewound",
    "bamba": "cannot be rewound",
    "zamba2": "cannot be rewound",
    "falcon_h1": "cannot be rewound",
    "falcon_mamba": "cannot be rewound",
    "qwen3_next": "cannot be rewound",
    "lfm2": "cannot be rewound",
    "gemma4": "text-only language models",
    "fuyu": "several models",
    "minimax": "cannot be rewound",
    "granitemoehybrid": "cannot be rewound",
    "llama4_text": "chunked_attention",
    "vit": "no causal language model",
}


@pytest.mark.parametrize("model_type", REFUSED_KINDS)
def test_models_that_cannot_be_rewound_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(CheckpointError, match=f"model_type {model_type} .*{REFUSED_KINDS[model_type]}"):
        refuse_unsupported(Path("folder"), transformers.CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_scaling_that_depends_on_length_is_refused(folder: Path, rope_type: str) -> None:
    scaling = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    edit_json(folder / "config.json", rope_parameters=scaling)
    assert f"by '{rope_type}'" in refusal(folder)


SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ACCEPTED_KINDS = {
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {},
}


@pytest.mark.parametrize("model_type", ACCEPTED_KINDS)
def test_attention_models_load_as_transformers_loads_them(tmp_path: Path, model_type: str) -> None:
    sizes = {} if model_type == "gpt2" else SIZES
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](
        **(sizes | {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2} | ACCEPTED_KINDS[model_type])
    )
    folder = write_checkpoint(tmp_path / model_type, causal_class(config)(config), make_tokenizer())
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.context, checkpoint.eos_ids) == (64, (2,))
    ids = torch.arange(3, 30).unsqueeze(0)
    expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(load_model(checkpoint, torch.float32)(ids).logits, expected)


# Fingerprints


def test_a_fingerprint_follows_the_content_and_not_the_place(original: Path, folder: Path) -> None:
    first = open_checkpoint(str(original)).fingerprint
    assert open_checkpoint(str(folder)).fingerprint == first
    seen = {first}
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    norm[5] += 1e-3
    for change in (
        lambda: resave(folder, model__norm__weight=norm),
        lambda: edit_json(folder / "generation_config.json", eos_token_id=3),
        lambda: edit_json(folder / "config.json", rms_norm_eps=1e-5),
        lambda: (folder / "chat_template.jinja").write_text("other"),
    ):
        change()
        seen.add(open_checkpoint(str(folder)).fingerprint)
    assert len(seen) == 5


# The hub's cache


@pytest.fixture
def hub_cache(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache as huggingface_hub lays it out, used offline: links from a snapshot into a blob store."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    for number, path in enumerate(sorted(original.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.field(34)
def test_a_hub_id_loads_from_the_cache_offline(hub_cache: Path, original: Path) -> None:
    checkpoint = open_checkpoint("someone/tiny")
    assert (checkpoint.path, checkpoint.name, checkpoint.kind) == (hub_cache, "tiny", "folder")
    assert checkpoint.fingerprint == open_checkpoint(str(original)).fingerprint
    ids = torch.arange(3, 20).unsqueeze(0)
    assert torch.equal(load_model(checkpoint, torch.float32)(ids).logits, make_llama(0)(ids).logits)


@pytest.mark.field(34)
def test_a_snapshot_that_links_out_of_its_cache_is_refused(hub_cache: Path, original: Path) -> None:
    (hub_cache / "model.safetensors").unlink()
    (hub_cache / "model.safetensors").symlink_to(original / "model.safetensors")
    assert "outside the folder" in refusal("someone/tiny")


def test_an_incomplete_snapshot_names_what_it_lacks(hub_cache: Path) -> None:
    (hub_cache / "model.safetensors").unlink()
    assert "no weights" in refusal("someone/tiny")


def test_a_hub_id_that_is_not_cached_gets_a_line_offline(hub_cache: Path) -> None:
    assert "someone/else is no folder here, is not in the local hub cache" in refusal("someone/else")


def test_checkpoints_are_values_without_weights(original: Path) -> None:
    checkpoint = open_checkpoint(str(original))
    assert isinstance(checkpoint, Checkpoint)
    with pytest.raises(AttributeError):
        checkpoint.context = 4  # type: ignore[misc]
