"""Pairs: what differs in the words is refused by name, what differs in the padding is not."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers

from tests.yggc.checkpoint_makers import (
    SPECIAL_TOKENS,
    edit_json,
    make_llama,
    make_tokenizer,
    write_gguf,
    write_llama,
    write_pair,
)
from yggc import inspect, room
from yggc.checkpoints import open_checkpoint
from yggc.inspect import PairSpec, inspect_pair, preflight, probe_corpus
from yggrt.errors import BuildError, PairError


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(originals: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of a drafter and a verifier, to be changed."""
    drafter, verifier = (Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in originals)
    return drafter, verifier


def look_at(pair: tuple[Path, Path]) -> PairSpec:
    return inspect_pair(open_checkpoint(str(pair[0])), open_checkpoint(str(pair[1])))


def refusal(pair: tuple[Path, Path]) -> str:
    with pytest.raises(PairError) as caught:
        look_at(pair)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def retokenize(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))


def with_model(tokenizer: Tokenizer, **changes: object) -> Tokenizer:
    """The tokenizer with entries of its model exchanged."""
    content = json.loads(tokenizer.to_str())
    content["model"] |= changes
    return Tokenizer.from_str(json.dumps(content))


def test_a_pair_that_fits_is_described(pair: tuple[Path, Path]) -> None:
    spec = look_at(pair)
    assert (spec.vocab_size, spec.eos_ids, spec.notices) == (300, (2,), ())
    assert (spec.drafter.hidden_size, spec.drafter.num_layers) == (16, 1)
    assert (spec.verifier.hidden_size, spec.verifier.num_layers) == (32, 2)
    assert spec.verifier.fingerprint == open_checkpoint(str(pair[1])).fingerprint != spec.drafter.fingerprint
    assert spec.verifier.num_parameters == make_llama(2).num_parameters()


@pytest.mark.field(13)
def test_logits_padded_to_other_sizes_are_a_pair(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    padded = (
        write_llama(tmp_path / "d", 1, tokenizer, vocab_size=304, num_hidden_layers=1),
        write_llama(tmp_path / "v", 2, tokenizer, vocab_size=320),
    )
    spec = look_at(padded)
    assert (spec.vocab_size, spec.drafter.padded_vocab_size, spec.verifier.padded_vocab_size) == (300, 304, 320)
    assert spec.notices == ()


@pytest.mark.field(13)
def test_a_gguf_verifier_and_a_folder_are_a_pair(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    verifier = write_gguf(tmp_path / "v.gguf", make_llama(2, vocab_size=320), tokenizer)
    spec = look_at((write_llama(tmp_path / "d", 1, tokenizer, num_hidden_layers=1), verifier))
    assert (spec.vocab_size, spec.verifier.padded_vocab_size, spec.notices) == (300, 320, ())


@pytest.mark.field(14)
def test_swapped_tokens_are_refused_naming_the_first(pair: tuple[Path, Path]) -> None:
    content = json.loads((pair[0] / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["w"], vocabulary["x"] = vocabulary["x"], vocabulary["w"]
    (pair[0] / "tokenizer.json").write_text(json.dumps(content))
    first = make_tokenizer().token_to_id("w")
    assert f"differ at id {first}: 'x' in the drafter, 'w' in the verifier" in refusal(pair)
    assert f"differ at id {first}: 'w' in the drafter, 'x' in the verifier" in refusal((pair[1], pair[0]))


@pytest.mark.field(14)
@pytest.mark.parametrize("special", [True, False])
def test_one_more_token_is_refused(tmp_path: Path, special: bool) -> None:
    longer = make_tokenizer()
    token = AddedToken("<extra>", special=special, normalized=False)
    assert (longer.add_special_tokens if special else longer.add_tokens)([token]) == 1
    drafter = write_llama(tmp_path / "d", 1, make_tokenizer(), vocab_size=304)
    verifier = write_llama(tmp_path / "v", 2, longer, vocab_size=304)
    message = refusal((drafter, verifier))
    assert "differ at id 300: no token in the drafter, '<extra>' in the verifier (300 and 301 tokens)" in message


@pytest.mark.field(14)
def test_other_merges_are_refused_naming_the_first(pair: tuple[Path, Path]) -> None:
    merges = json.loads(make_tokenizer().to_str())["model"]["merges"]
    retokenize(pair[0], with_model(make_tokenizer(), merges=merges[:10] + merges[11:]))
    left, right = merges[10]
    assert f"the verifier's merge 10 ({left!r} + {right!r}) is not in the drafter's" in refusal(pair)
    assert f"the drafter's merge 10 ({left!r} + {right!r}) is not in the verifier's" in refusal((pair[1], pair[0]))


def test_another_kind_of_tokenizer_is_refused(pair: tuple[Path, Path]) -> None:
    vocabulary = json.loads(make_tokenizer().to_str())["model"]["vocab"]
    content = json.loads(make_tokenizer().to_str())
    content["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "!"}
    (pair[0] / "tokenizer.json").write_text(json.dumps(content))
    assert "of kind WordLevel, the verifier's of kind BPE" in refusal(pair)


@pytest.mark.field(14)
def test_ids_that_decode_to_other_texts_are_refused(pair: tuple[Path, Path]) -> None:
    changed = make_tokenizer()
    changed.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("world", "earth")])
    retokenize(pair[0], changed)
    assert "turn the same ids into different texts: 'earth" in refusal(pair)


@pytest.mark.parametrize("change", ["digits", "normalizer", "special"])
def test_text_cut_otherwise_is_a_notice(pair: tuple[Path, Path], change: str) -> None:
    changed = make_tokenizer()
    if change == "digits":
        changed.pre_tokenizer = make_tokenizer(single_digits=True).pre_tokenizer
    elif change == "normalizer":
        changed.normalizer = normalizers.NFC()
    else:
        content = json.loads(changed.to_str())
        content["added_tokens"][2]["lstrip"] = True
        changed = Tokenizer.from_str(json.dumps(content))
    retokenize(pair[0], changed)
    (notice,) = look_at(pair).notices
    assert "probe texts otherwise than the verifier's" in notice


@pytest.mark.field(16)
def test_a_drafter_with_a_shorter_context_is_a_notice(tmp_path: Path) -> None:
    (notice,) = look_at(write_pair(tmp_path, max_position_embeddings=64)).notices
    assert "drafter's context is 64 positions, the verifier's 128" in notice
    assert look_at(write_pair(tmp_path / "longer", max_position_embeddings=256)).notices == ()


@pytest.mark.field(18)
def test_other_sizes_of_everything_else_are_a_pair(tmp_path: Path) -> None:
    changes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
    assert look_at(write_pair(tmp_path, **changes)).notices == ()


def test_a_drafter_larger_than_the_verifier_is_a_notice(pair: tuple[Path, Path]) -> None:
    (notice,) = look_at((pair[1], pair[0])).notices
    assert "The drafter has 37,792 parameters" in notice
    assert "37,792" in look_at((pair[1], pair[1])).notices[0]


def test_only_the_verifiers_end_tokens_count(pair: tuple[Path, Path]) -> None:
    edit_json(pair[0] / "generation_config.json", eos_token_id=[5])
    edit_json(pair[1] / "generation_config.json", eos_token_id=[7, 2])
    spec = look_at(pair)
    assert (spec.eos_ids, spec.notices) == ((2, 7), ())
    edit_json(pair[1] / "generation_config.json", eos_token_id=None)
    settings = json.loads((pair[1] / "config.json").read_text()) | {"eos_token_id": None}
    (pair[1] / "config.json").write_text(json.dumps(settings))
    spec = look_at(pair)
    assert spec.eos_ids == ()
    assert "names no end-of-sequence token" in spec.notices[0]


@pytest.mark.field(12)
def test_generation_settings_that_wait_for_a_request_are_named(pair: tuple[Path, Path]) -> None:
    edit_json(pair[1] / "generation_config.json", repetition_penalty=1.3)
    spec = inspect_pair(open_checkpoint(str(pair[0])), open_checkpoint(str(pair[1])))
    assert any("on request alone" in notice and "repetition_penalty=1.3" in notice for notice in spec.notices)


def test_the_probe_corpus_covers_what_tokenizers_differ_in() -> None:
    probes = probe_corpus(make_tokenizer())
    text = "".join(probes)
    assert len(probes) > 30
    for sample in ("1234", "    return", "\n\n\n", "\t\t", "日本", "나는", "😀", "naïve", "e\u0301", "::", "   3"):
        assert sample in text, sample
    assert all(token in text for token in SPECIAL_TOKENS)


# Room


@pytest.fixture
def spec(originals: tuple[Path, Path]) -> PairSpec:
    return look_at(originals)


def test_preflight_passes_where_there_is_room(spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "available_memory", lambda: 64 << 30)
    monkeypatch.setattr(inspect, "available_disk", lambda folder: 64 << 30)
    rooms = preflight(spec, "float32", tmp_path / "new" / "x.bundle", tmp_path / "cache")
    assert [each.place for each in rooms] == ["memory", f"disk at {tmp_path / 'cache'}"]  # one disk: added up
    assert all(each.available == 64 << 30 and 0 < each.required < each.available for each in rooms)
    larger = preflight(spec, "float32", tmp_path, tmp_path)[0].required - room_of_tools()
    smaller = preflight(spec, "bfloat16", tmp_path, tmp_path)[0].required - room_of_tools()
    assert abs(larger - 2 * smaller) <= 1


def room_of_tools() -> int:
    return inspect.MEMORY_OF_TOOLS


@pytest.mark.field(39)
def test_too_little_memory_is_refused_with_both_numbers(
    spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "available_memory", lambda: 1_234_000_000)
    with pytest.raises(BuildError, match=r"not enough memory: about 1\.5 GB are required .* 1\.2 GB are available"):
        preflight(spec, "float32", tmp_path, tmp_path)
    monkeypatch.setattr(inspect, "available_memory", lambda: None)  # not known: no reason to refuse
    preflight(spec, "float32", tmp_path, tmp_path)


@pytest.mark.field(39)
def test_too_little_memory_of_a_gpu_is_refused_with_both_numbers(
    spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"cuda:1": 1_234_000_000}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device], 2**37))
    message = r"not enough memory of cuda:1: about 1\.5 GB are required .* 1\.2 GB are available"
    with pytest.raises(BuildError, match=message):
        preflight(spec, "float32", tmp_path, tmp_path, "cuda:1")
    free["cuda:1"] = 2**34
    assert preflight(spec, "float32", tmp_path, tmp_path, "cuda:1")[1].available == 2**34


@pytest.mark.field(39)
def test_both_models_are_counted(spec: PairSpec, tmp_path: Path) -> None:
    rooms = preflight(spec, "float32", tmp_path, tmp_path)
    weights = 4 * (spec.drafter.num_parameters + spec.verifier.num_parameters)
    assert rooms[0].required - inspect.MEMORY_OF_TOOLS > weights
    assert rooms[1].required - inspect.DISK_OF_TOOLS > 2 * weights


def test_too_little_disk_is_refused_with_both_numbers(
    spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "available_disk", lambda folder: 5_000_000)
    with pytest.raises(BuildError, match=r"not enough disk at .*: about 301 MB are required .* 5\.0 MB are available"):
        preflight(spec, "float32", tmp_path, tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(
    spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    with pytest.raises(BuildError, match="kept cannot be written"):
        preflight(spec, "float32", tmp_path, tmp_path / "kept" / "cache")


@pytest.mark.parametrize(
    "num_bytes, text",
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (123_456_789, "123 MB"), (1_500_000_000, "1.5 GB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert room.readable(num_bytes) == text


def write_files(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    assert room.available_memory(tmp_path) is None
    write_files(tmp_path, proc__meminfo="MemTotal: 99 kB\nMemAvailable:    4000 kB\n")
    assert room.available_memory(tmp_path) == 4_096_000
    write_files(
        tmp_path,
        proc__self__cgroup="0::/a/b\n",
        sys__fs__cgroup__a__b__memoryDOTmax="max\n",
        sys__fs__cgroup__a__b__memoryDOTcurrent="700\n",
        sys__fs__cgroup__a__memoryDOTmax="1000\n",
        sys__fs__cgroup__a__memoryDOTcurrent="800\n",
        sys__fs__cgroup__a__memoryDOTstat="anon 500\ninactive_file 300\n",
    )
    assert room.available_memory(tmp_path) == 500  # 1000 - 800 + 300 of page cache


def test_the_older_control_groups_limit_memory_too(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        proc__meminfo="MemAvailable:    4000 kB\n",
        proc__self__cgroup="9:name=systemd:/\n4:cpu,memory:/job\n",
        sys__fs__cgroup__memory__job__memoryDOTlimit_in_bytes="2000\n",
        sys__fs__cgroup__memory__job__memoryDOTusage_in_bytes="1500\n",
        sys__fs__cgroup__memory__memoryDOTlimit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__memory__memoryDOTusage_in_bytes="1500\n",
    )
    assert room.available_memory(tmp_path) == 500


def test_free_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert room.available_disk(tmp_path / "not" / "yet") > 0
    assert room.existing_parent(tmp_path / "not" / "yet") == tmp_path
